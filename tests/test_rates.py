"""AdamW with two learning rates."""

import keras
import numpy as np

from captioner.rates import TwoRates


def test_slow_variables_move_by_their_share_and_do_not_decay() -> None:
    fast, slow = (keras.Variable(np.full(3, 2.0), name=name) for name in ("fast", "slow"))
    optimizer = TwoRates(0.1, weight_decay=0.5)
    optimizer.slow_down([slow], 0.01)
    optimizer.build([slow, fast])
    gradient = keras.ops.ones(3)
    optimizer.apply([gradient, gradient])
    # Adam's first step is the learning rate; decay takes lr * 0.5 * 2 off.
    np.testing.assert_allclose(slow.numpy(), 2.0 - 0.001, rtol=1e-5)
    np.testing.assert_allclose(fast.numpy(), 2.0 - 0.1 - 0.1, rtol=1e-5)


def test_it_is_adamw_where_nothing_is_slow() -> None:
    one, other = (keras.Variable(np.arange(5.0), name=name) for name in ("one", "other"))
    mine, theirs = TwoRates(0.1), keras.optimizers.AdamW(0.1)
    for gradient in (np.ones(5), -np.arange(5.0)):
        mine.apply([keras.ops.array(gradient)], [one])
        theirs.apply([keras.ops.array(gradient)], [other])
    np.testing.assert_array_equal(one.numpy(), other.numpy())
