"""Products of a loop: what multiplies at every step is prepared once, its gradient made once."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from keras import ops

__all__ = ["Kernel", "late_gradient", "late_values", "product", "turned"]


class Kernel(NamedTuple):
    """What every step of a loop multiplies with.

    On CPUs a product of few rows with a matrix that is read across takes two to three times as long
    as with one that is read along (160 rows, 2048 x 1280, float32, 2 cores with AVX2: 13.5 against
    6.2 ms), and the way back of every product reads it across. So it is written out both ways.

    Attributes:
        matrix: `(..., K, M)`.
        transposed: `(..., M, K)`; `None`: the matrix is read across.
    """

    matrix: Any
    transposed: Any = None

    def for_late_gradient(self) -> "Kernel":
        """One that gets no gradient from `product`, but from `late_gradient`."""
        return Kernel(ops.stop_gradient(self.matrix), turned(self.matrix))


def turned(matrix: Any) -> Any:
    """The last two axes exchanged, `(..., K, M)` to `(..., M, K)`, and written out that way."""
    transposed = ops.swapaxes(matrix, -1, -2)
    # TensorFlow would merge a transposition into the product that follows, which reads it across
    # then. Through this, which does nothing, it does not see it.
    return tf.ensure_shape(transposed, transposed.shape)


def product(rows: Any, kernel: Kernel) -> Any:
    """`rows (..., N, K) @ kernel (..., K, M)`."""
    if kernel.transposed is None:
        return ops.matmul(rows, kernel.matrix)

    @ops.custom_gradient
    def multiply(rows: Any, matrix: Any) -> Any:
        def gradient(*arguments: Any, upstream: Any = None) -> Any:
            upstream = arguments[0] if upstream is None else upstream
            of_matrix = ops.matmul(ops.swapaxes(rows, -1, -2), upstream)
            return ops.matmul(upstream, kernel.transposed), of_matrix

        return ops.matmul(rows, matrix), gradient

    return multiply(rows, kernel.matrix)


def late_gradient(added: Any, kernel: Any, inputs: Sequence[Any]) -> Any:
    """`added` itself, which takes the kernel's gradient along.

    A kernel that a loop of `T` steps multiplies with has `T` gradients, each as large as itself, to
    be written and added up. But all that the steps multiplied with it is at hand once the loop is
    over, and then its gradient is one product.

    Args:
        added: `(M, W)`: what is added to the loop's products, the rows of all its steps, packed.
        kernel: `(K, W)`; in the loop it is used without its gradient, by `product`.
        inputs: a list that the loop fills: step `t` multiplies `inputs[t]` with the kernel.
            Together they have `M` rows.
    """

    @ops.custom_gradient
    def tie(added: Any, kernel: Any) -> Any:
        def gradient(*arguments: Any, upstream: Any = None) -> Any:
            upstream = arguments[0] if upstream is None else upstream
            rows = ops.concatenate(inputs, axis=0)
            return upstream, ops.matmul(ops.transpose(rows), upstream)

        return added, gradient

    return tie(added, kernel)


def late_values(
    added: Any, values: Any, weights: Sequence[Any], by_source: Callable[[Any], Any]
) -> Any:
    """`added` itself, which takes the gradient of values along that a loop weighs and sums.

    As `late_gradient`, for products with a matrix per source (photo): the gradient of all values
    is one product per source instead of one at every step.

    Args:
        added: `(M, W)`: what is added to the loop's weighted sums, the rows of all steps, packed.
        values: `(B, L, W)`; in the loop they are used without their gradient.
        weights: a list that the loop fills: step `t` weighs the values by `weights[t] (B, C_t, L)`.
        by_source: brings rows `(M, W)` into the order `(B, C_1 + … + C_T, W)`.
    """

    @ops.custom_gradient
    def tie(added: Any, values: Any) -> Any:
        def gradient(*arguments: Any, upstream: Any = None) -> Any:
            upstream = arguments[0] if upstream is None else upstream
            every = turned(ops.concatenate(weights, axis=1))  # (B, L, C_1 + … + C_T)
            return upstream, ops.matmul(every, by_source(upstream))

        return added, gradient

    return tie(added, values)
