"""Which number type training computes in."""

import time
from functools import lru_cache

import tensorflow as tf

__all__ = ["best_precision", "product_seconds"]

SIDE = 768  # a product of this size takes some milliseconds on a laptop
REPEATS = 5
GAIN = 1.2  # what bfloat16 must gain in products to make up for casting to and fro


@lru_cache(maxsize=1)
def best_precision() -> str:
    """Keras' name of the policy to train with: `mixed_bfloat16` where it is faster, or `float32`.

    Measured, in a tenth of a second, not read from the processor's name: without instructions of
    its own bfloat16 is emulated, and slower than float32. The fastest of some repeats counts, so
    that what else the machine does hardly matters.
    """
    float32, bfloat16 = (
        min(product_seconds(dtype, SIDE, REPEATS)) for dtype in (tf.float32, tf.bfloat16)
    )
    return "mixed_bfloat16" if float32 > GAIN * bfloat16 else "float32"


def product_seconds(dtype: tf.DType, side: int, repeats: int) -> list[float]:
    """Seconds that a product of two `side` x `side` matrices takes, per repeat."""
    matrix = tf.cast(tf.random.stateless_normal((side, side), (1, 2)), dtype)
    product = tf.function(lambda x: tf.matmul(x, x), autograph=False)
    product(matrix)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        product(matrix).numpy()
        seconds.append(time.perf_counter() - started)
    return seconds
