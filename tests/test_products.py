"""Products of a loop and their gradients, against TensorFlow's own."""

import numpy as np
import pytest
import tensorflow as tf

from captioner.products import Kernel, late_gradient, late_values, product


@pytest.mark.parametrize("compiled", [False, True])
def test_late_gradients_are_those_of_every_step_added_up(compiled: bool) -> None:
    random = np.random.default_rng(4)
    # T=3 steps, N=2 rows, K=5 inputs, M=7
    x, added, first, second = (
        tf.constant(random.normal(size=size))  # float64: rounding is not what is tested
        for size in ((3, 2, 5), (6, 7), (5, 7), (7, 7))
    )

    def loss(late: bool) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            tape.watch([x, added, first, second])
            inputs, before, states = [], [], [tf.zeros((2, 7), tf.float64)]
            offsets = added
            if late:
                offsets = late_gradient(offsets, first, inputs)
                offsets = late_gradient(offsets, second, before)
            for now, row in zip(tf.unstack(x), tf.split(offsets, 3), strict=True):
                inputs.append(now)
                before.append(states[-1])
                if late:
                    row += product(now, Kernel(first).for_late_gradient())
                    row += product(states[-1], Kernel(second).for_late_gradient())
                else:
                    row += now @ first + states[-1] @ second
                states.append(tf.tanh(row))
            total = tf.reduce_sum(tf.stack(states[1:]) ** 2 * tf.range(1.0, 8.0, dtype=tf.float64))
        return total, tape.gradient(total, [x, added, first, second])

    run = tf.function(loss, autograph=False) if compiled else loss
    (value, gradients), (plain, expected) = run(True), run(False)
    np.testing.assert_allclose(value, plain, rtol=1e-12)
    for mine, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
def test_late_gradients_of_values_that_are_weighed(compiled: bool) -> None:
    """Fewer queries from step to step, as captions end."""
    random = np.random.default_rng(5)
    sources, counts, keys, width = 2, (5, 3, 1), 7, 11  # queries of a source at every step
    values = tf.constant(random.normal(size=(sources, keys, width)))
    added = tf.constant(random.normal(size=(sources * sum(counts), width)))
    weights = [tf.constant(random.normal(size=(sources, count, keys))) for count in counts]
    sizes = [sources * count for count in counts]

    def by_source(rows: tf.Tensor) -> tf.Tensor:
        steps = [tf.reshape(step, (sources, -1, width)) for step in tf.split(rows, sizes)]
        return tf.concat(steps, axis=1)

    def loss(late: bool) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            tape.watch([values, added, *weights])
            looked: list[tf.Tensor] = []
            offsets = late_values(added, values, looked, by_source) if late else added
            kernel = Kernel(tf.stop_gradient(values) if late else values)
            total = tf.zeros((), tf.float64)
            for weight, offset in zip(weights, tf.split(offsets, sizes), strict=True):
                looked.append(weight)
                total += tf.reduce_sum(
                    (offset + tf.reshape(product(weight, kernel), (-1, width))) ** 3
                )
        return total, tape.gradient(total, [values, added, *weights])

    run = tf.function(loss, autograph=False) if compiled else loss
    (value, gradients), (plain, expected) = run(True), run(False)
    np.testing.assert_allclose(value, plain, rtol=1e-12)
    for mine, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-10, atol=1e-12)
