"""Captions of different lengths, word by word, without computing what follows their ends."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

__all__ = ["Packing"]


class Packing:
    """Which captions of a batch are still being written at every step.

    Step `t` of `T` is made for the first `C_t` captions of every photo, as many as leave no word
    out, so captions in order of falling length cost little more than their words; other orders cost
    more and give the same. `C_t` never grows.

    Rows of step `t` are `(B * C_t, ...)`; *packed* are the rows of all steps, one step after the
    other: `(M, ...)`. Steps without any word keep one caption per photo: empty tensors are a
    special case for many an operation.

    Args:
        shape: `B, C, T`; `C` and `T` must be known while tracing.
        words: `(B, C, T)` bool, where words are; `None`: everywhere.
    """

    def __init__(self, shape: tuple[Any, int, int], words: Any = None) -> None:
        self.photos, self.captions, self.length = shape
        self.words = words
        self.counts: Any = [self.captions] * self.length
        if words is not None:
            number = tf.range(1, self.captions + 1)[:, None]
            last = tf.reduce_max(tf.cast(words, tf.int32) * number, axis=(0, 1))  # (T,)
            # The largest from each step on: an upper triangle.
            later = tf.linalg.band_part(tf.ones((self.length, self.length), tf.int32), 0, -1)
            counts = tf.maximum(tf.reduce_max(later * last[None], axis=1), 1)
            self.counts = tf.unstack(counts, self.length)

    def pack(self, values: Any) -> Any:
        """`(B, C, T)` as packed rows `(M,)`."""
        steps = tf.unstack(values, self.length, axis=2)
        rows = [
            tf.reshape(x[:, :count], (-1,)) for x, count in zip(steps, self.counts, strict=True)
        ]
        return tf.concat(rows, axis=0)

    def steps(self, packed: Any) -> list[Any]:
        """Packed rows `(M, K)` as those of every step."""
        # Split, not sliced: the gradient of a slice is as large as what it was cut from.
        sizes = tf.stack([self.photos * count for count in self.counts])
        return tf.split(packed, sizes, num=self.length)

    def by_photo(self, packed: Any) -> Any:
        """Packed rows `(M, K)` photo by photo, `(B, C_1 + … + C_T, K)`, step after step."""
        width = packed.shape[-1]
        steps = [tf.reshape(x, (self.photos, -1, width)) for x in self.steps(packed)]
        return tf.concat(steps, axis=1)

    def from_photos(self, rows: Any) -> Any:
        """Rows in the order of `by_photo` as packed ones."""
        steps = tf.split(rows, tf.stack(self.counts), axis=1, num=self.length)
        return tf.concat([tf.reshape(x, (-1, rows.shape[-1])) for x in steps], axis=0)

    def narrowed(self, rows: Any, step: int) -> Any:
        """Rows `(B * C_{t-1}, K)` of the step before, without the captions that have ended."""
        if self.words is None:
            return rows
        width = rows.shape[-1]
        return tf.reshape(
            tf.reshape(rows, (self.photos, -1, width))[:, : self.counts[step]], (-1, width)
        )

    def spread(self, steps: Sequence[Any]) -> Any:
        """`(B, C_t, ...)` of every step as `(B, C, T, ...)`, 0 where nothing was computed."""
        if self.words is not None:
            steps = [
                tf.pad(x, [[0, 0], [0, self.captions - count], *[[0, 0]] * (len(x.shape) - 2)])
                for x, count in zip(steps, self.counts, strict=True)
            ]
        spread = tf.stack(steps, axis=2)
        return tf.ensure_shape(spread, (None, self.captions, self.length, *spread.shape[3:]))

    def only_words(self, packed: Any) -> tuple[Any, Any]:
        """Of packed rows `(M, K)` those of words, `(R, K)`, and where in `B * C * T` they are."""
        place = tf.range(self.photos * self.captions * self.length)
        place = self.pack(tf.reshape(place, (self.photos, self.captions, self.length)))
        if self.words is None:
            return packed, place
        chosen = tf.where(self.pack(self.words))[:, 0]
        return tf.gather(packed, chosen), tf.gather(place, chosen)
