"""Optimizers with two learning rates."""

import keras
import numpy as np

from captioner.rates import AdamW, build_optimizer


def test_slow_variables_move_by_their_share_and_do_not_decay() -> None:
    fast, slow = (keras.Variable(np.full(3, 2.0), name=name) for name in ("fast", "slow"))
    optimizer = AdamW(0.1, weight_decay=0.5)
    optimizer.slow_down([slow], 0.01)
    optimizer.build([slow, fast])
    gradient = keras.ops.ones(3)
    optimizer.apply([gradient, gradient])
    # Adam's first step is the learning rate; decay takes lr * 0.5 * 2 off.
    np.testing.assert_allclose(slow.numpy(), 2.0 - 0.001, rtol=1e-5)
    np.testing.assert_allclose(fast.numpy(), 2.0 - 0.1 - 0.1, rtol=1e-5)


def test_it_is_adamw_where_nothing_is_slow() -> None:
    """Loshchilov and Hutter 2019, algorithm 2, written out; in float64, because Keras' own step
    rounds its betas to float32, which is up to 7e-6 of the result."""
    variable = keras.Variable(np.arange(5.0), dtype="float64")
    expected, first, second = np.arange(5.0), np.zeros(5), np.zeros(5)
    optimizer = AdamW(0.1, weight_decay=0.5)
    for step, gradient in enumerate((np.ones(5), -np.arange(5.0), np.full(5, 0.25)), 1):
        optimizer.apply([keras.ops.array(gradient, "float64")], [variable])
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        rate = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        expected = expected - 0.1 * 0.5 * expected - rate * first / (np.sqrt(second) + 1e-7)
    np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6)


def test_rmsprop_is_that_of_the_authors() -> None:
    """Their formulas, written out: kelvinxu/arctic-captions, optimizers.py."""
    variable, expected = keras.Variable(np.full(3, 2.0)), np.full(3, 2.0)
    optimizer = build_optimizer("rmsprop", 1e-4, 0.0, 1e9)
    mean, square, step = np.zeros(3), np.zeros(3), np.zeros(3)
    for gradient in (np.array([1.0, -0.02, 3.0]), np.array([0.5, 0.01, -3.0]), np.ones(3)):
        optimizer.apply([keras.ops.array(gradient)], [variable])
        mean = 0.95 * mean + 0.05 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        step = 0.9 * step - 1e-4 * gradient / np.sqrt(square - mean**2 + 1e-4)
        expected = expected + step
    np.testing.assert_allclose(variable.numpy() - 2, expected - 2, rtol=1e-3)


def test_rmsprop_can_move_some_variables_slowly() -> None:
    fast, slow = (keras.Variable(np.full(3, 2.0), name=name) for name in ("fast", "slow"))
    optimizer = build_optimizer("rmsprop", 0.1, 0.0, 1e9)
    optimizer.slow_down([slow], 0.01)
    optimizer.build([slow, fast])
    optimizer.apply([keras.ops.ones(3)] * 2)
    np.testing.assert_allclose((slow.numpy() - 2) * 100, fast.numpy() - 2, rtol=1e-3)
