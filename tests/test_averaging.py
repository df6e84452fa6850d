"""The moving average of weights."""

import keras
import numpy as np
import pytest

from captioner.averaging import MovingAverage


def test_first_updates_count_more_then_the_decay_holds() -> None:
    weights = keras.Variable(np.array([8.0, 0.0]))
    average = MovingAverage([weights], 0.25)
    weights.assign([0.0, 10.0])
    average.update()  # decay (1 + 0) / (10 + 0) = 0.1
    with average.applied():
        np.testing.assert_allclose(weights.numpy(), [0.8, 9.0], rtol=1e-6)
    np.testing.assert_allclose(weights.numpy(), [0.0, 10.0])  # as they were
    for _ in range(20):
        average.update()
    weights.assign([4.0, 10.0])
    average.update()
    with average.applied():
        np.testing.assert_allclose(weights.numpy(), [3.0, 10.0], rtol=1e-5)


def test_weights_come_back_when_scoring_fails() -> None:
    weights = keras.Variable(1.0)
    average = MovingAverage([weights], 0.9)
    weights.assign(3.0)
    with pytest.raises(KeyboardInterrupt), average.applied():
        assert float(weights.numpy()) == 1.0
        raise KeyboardInterrupt
    assert float(weights.numpy()) == 3.0


def test_restart_forgets() -> None:
    weights = keras.Variable(1.0)
    average = MovingAverage([weights], 0.9)
    weights.assign(7.0)
    average.restart()
    with average.applied():
        assert float(weights.numpy()) == 7.0


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5])
def test_impossible_decays(decay: float) -> None:
    with pytest.raises(ValueError, match="decay must lie between 0 and 1"):
        MovingAverage([keras.Variable(1.0)], decay)
