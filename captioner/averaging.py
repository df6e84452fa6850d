"""The moving average of a model's weights: steadier than any of them, and scored and saved instead.

Polyak and Juditsky 1992; as an exponential average, with a decay that grows from nothing as in
TensorFlow's `ExponentialMovingAverage`, so that first weights are soon forgotten.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

__all__ = ["MovingAverage"]


class MovingAverage:
    """Exponential moving average of variables.

    Args:
        variables: what is averaged; their values now are the first ones.
        decay: share of the average that stays at an update, below 1; less for the first updates,
            `(1 + n) / (10 + n)` for the n-th.
    """

    def __init__(self, variables: Sequence[Any], decay: float) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay must lie between 0 and 1, received {decay}")
        self._averaged, self._decay = list(variables), decay
        self._averages = [
            keras.Variable(one, trainable=False, dtype=one.dtype, name=f"average_{number}")
            for number, one in enumerate(self._averaged)
        ]
        self._updates = keras.Variable(0.0, trainable=False, name="updates")
        self._step = tf.function(self._moved, autograph=False)

    @property
    def variables(self) -> list[Any]:
        """What a checkpoint must hold."""
        return [*self._averages, self._updates]

    def restart(self) -> None:
        """Begins anew from what the variables are now."""
        self._updates.assign(0.0)
        for average, one in zip(self._averages, self._averaged, strict=True):
            average.assign(one)

    def update(self) -> None:
        """Takes in what the variables are now."""
        self._step()

    def _moved(self) -> None:
        count = self._updates + 1.0
        self._updates.assign(count)
        share = 1.0 - keras.ops.minimum(self._decay, count / (count + 9.0))
        for average, one in zip(self._averages, self._averaged, strict=True):
            average.assign(average + keras.ops.cast(share, one.dtype) * (one - average))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the variables have their averages as values."""
        kept = [one.numpy() for one in self._averaged]
        try:
            for average, one in zip(self._averages, self._averaged, strict=True):
                one.assign(average)
            yield
        finally:
            for one, value in zip(self._averaged, kept, strict=True):
                one.assign(value)
