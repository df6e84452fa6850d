"""Attention taught by words: where a word that is known would look, learned without boxes.

Alpha is decided before its word, from what has been said so far, and likelihood alone hardly cares
where it lies: several regions tell the same, and those around a thing as well. While training,
though, the word is known. A `Localizer` learns from captions alone which regions speak for which
word, by multiple-instance learning: a photo has what its captions name in at least one region, and
what no caption names in none (Fang et al. 2015, arXiv 1411.4952, section 3). Its map of a known
word then teaches alpha.

The teacher knows the word, and the pupil is drawn to where it looked: the idea of Ma et al. 2020
(arXiv 1906.00283, a localiser of generated words) and Liu et al. 2020 (Prophet Attention).

Shapes: `B` photos, `C` captions per photo, `T` words, `L` regions, `D` region channels, `A` units,
`V` vocabulary.
"""

from typing import Any, NamedTuple

import keras
from keras import ops

from captioner.attention import flat_matmul
from captioner.text import PAD

__all__ = ["Localized", "Localizer", "teaching_loss"]

FIRST_BIAS = -5.0  # most words are not in most photos


class Localized(NamedTuple):
    """What a localiser says of a batch.

    Attributes:
        maps: `(B, C, T, L)`, beta: where every word is, float32, summing to 1.
        gain: `(B, C, T)`: how much likelier its best regions make the word than the mean region,
            a difference of log p: near 0 for words that have no place, such as "a".
        loss: what the localiser itself learns by: binary cross-entropy, summed over photos and
            vocabulary.
    """

    maps: Any
    gain: Any
    loss: Any


@keras.saving.register_keras_serializable("captioner")
class Localizer(keras.layers.Layer):
    """Finds the regions that speak for known words.

    With `s(w, l) = v_w . U a_l` the score of word `w` at region `l`, the map of a word is
    `beta_l = softmax_l s(w, l)`, and a photo has the word with probability
    `sigmoid(log mean_l exp s(w, l) + b_w)`.

    Args:
        vocabulary_size: `V`.
        units: `A`.

    Call arguments:
        regions: `(B, L, D)`, the encoder's.
        words: `(B, C, T)` int: what the captions of the photos name.

    Returns:
        A `Localized`.
    """

    def __init__(self, vocabulary_size: int, units: int = 256, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocabulary_size = vocabulary_size
        self.units = units

    def build(self, regions_shape: Any, words_shape: Any = None) -> None:
        self.kernel = self.add_weight(shape=(regions_shape[-1], self.units), name="kernel")
        self.words = self.add_weight(shape=(self.vocabulary_size, self.units), name="words")
        first = keras.initializers.Constant(FIRST_BIAS)
        self.bias = self.add_weight(
            shape=(self.vocabulary_size,), initializer=first, autocast=False, name="bias"
        )

    def call(self, regions: Any, words: Any) -> Localized:
        photos, captions, length = ops.shape(words)
        projected = flat_matmul(ops.cast(regions, self.compute_dtype), self.kernel)  # (B, L, A)
        flat = ops.reshape(words, (photos, -1))  # (B, C * T)

        scores = ops.cast(flat_matmul(projected, ops.transpose(self.words)), "float32")
        logits = _log_mean_exp(scores, axis=1) + self.bias  # (B, V)
        named = ops.multi_hot(flat, self.vocabulary_size, dtype="float32")
        is_photo = ops.max(ops.cast(flat != PAD, "float32"), axis=-1, keepdims=True)  # not a filler
        loss = ops.sum((ops.softplus(logits) - named * logits) * is_photo)

        asked = ops.take(self.words, flat, axis=0)  # (B, C * T, A)
        scores = ops.cast(ops.matmul(asked, ops.swapaxes(projected, -1, -2)), "float32")
        bias = ops.take(self.bias, flat)
        gain = ops.log_sigmoid(_log_mean_exp(scores, axis=-1) + bias) - ops.log_sigmoid(
            ops.mean(scores, axis=-1) + bias
        )
        maps = ops.reshape(ops.softmax(scores, axis=-1), (photos, captions, length, -1))
        return Localized(maps, ops.reshape(gain, (photos, captions, length)), loss)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "units": self.units,
        }


def _log_mean_exp(scores: Any, axis: int) -> Any:
    return ops.logsumexp(scores, axis=axis) - ops.log(float(scores.shape[axis]))


def teaching_loss(maps: Any, gain: Any, alpha: Any, real: Any) -> Any:
    """The sum over words of `g KL(beta || alpha)`: draws alpha to where its word is.

    `g = 1 - exp(-max(gain, 0))`, from 0 for words that no region speaks for to 1 for those that
    have a place. No gradient flows into the teacher.

    Args:
        maps: `(B, C, T, L)`, beta.
        gain: `(B, C, T)`.
        alpha: `(B, C, T, L)`.
        real: `(B, C, T)`, 1 for words, 0 for pads.
    """
    maps, gain = ops.stop_gradient(maps), ops.stop_gradient(gain)
    weight = (1 - ops.exp(-ops.relu(gain))) * real
    # Kept from 0, where the logarithm has no gradient.
    difference = ops.log(ops.maximum(maps, 1e-20)) - ops.log(ops.maximum(alpha, 1e-20))
    return ops.sum(weight * ops.sum(maps * difference, axis=-1))
