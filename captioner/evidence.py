"""Evidence maps: which regions spoke for a word, where alpha says what was weighed before it.

Alpha is decided by the decoder's state before the word, so it is the same whatever word follows.
The evidence of a region for the word that did follow is gradient x input (Shrikumar et al. 2016,
arXiv 1605.01713) of that word's own log-probability, times alpha:

    e_tl = alpha_tl * max(0, sum_d a_ld * d log p(y_t | y_<t, a) / d a_ld)

normalised to sum 1 over the regions. Only what speaks for the word counts, hence the positive part.

Shapes: `B` captions, `T` words, `L` regions, `D` region channels, `V` vocabulary.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from captioner.model import Captioner
from captioner.text import PAD

__all__ = ["evidence_maps"]

COPIES = 32  # differentiated at once; 20 words over 14x14 regions then take less than 1 GB


def evidence_maps(
    model: Captioner, regions: Any, tokens: Any, wanted: np.ndarray | None = None
) -> np.ndarray:
    """Where the evidence for every word of given captions lies.

    A gradient of a sum over words could not be taken apart again, and one pass per word would be
    `T` times as many. So every word gets a copy of its photo's regions, and one pass over many
    copies differentiates each for its own word alone.

    Args:
        model: one with or without attention; without, every region weighs the same.
        regions: `(B, L, D)`, the encoder's; a photo stands in as many rows as it has captions.
        tokens: `(B, T + 1)` int: `<start>`, then the words; pads may follow.
        wanted: `(B, T)` bool, the words whose maps are wanted; `None` for all.

    Returns:
        `(B, T, L)` float32: a map per word that sums to 1, uniform where no region speaks for the
        word; zeros for pads and for words that are not wanted.
    """
    regions, tokens = np.asarray(regions, np.float32), np.asarray(tokens, np.int32)
    maps = np.zeros((len(tokens), tokens.shape[1] - 1, regions.shape[1]), np.float32)
    real = tokens[:, 1:] != PAD
    if wanted is not None:
        real &= wanted
    # In the order of positions, because a copy need not be read past its word.
    positions, captions = np.nonzero(real.T)
    for first in range(0, len(positions), COPIES):
        position, caption = positions[first : first + COPIES], captions[first : first + COPIES]
        maps[caption, position] = _evidence(
            model, regions[caption], tokens[caption, : position.max() + 2], position
        )
    return maps


def _evidence(
    model: Captioner, regions: np.ndarray, tokens: np.ndarray, position: np.ndarray
) -> np.ndarray:
    """Maps `(N, L)`: of every row, the one of the word at `position (N,)`."""
    copies = tf.constant(regions)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(copies)
        outputs = model({"regions": copies, "tokens": tokens[:, None, :-1]}, training=False)
        logits = tf.gather(outputs["logits"][:, 0], position, batch_dims=1)  # (N, V)
        log_probabilities = tf.nn.log_softmax(tf.cast(logits, tf.float32))
        words = np.take_along_axis(tokens, position[:, None] + 1, axis=1)[:, 0]
        # Rows do not touch each other: the gradient of the sum is each row's own.
        total = tf.reduce_sum(tf.gather(log_probabilities, words, batch_dims=1))
    gradient = tape.gradient(total, copies).numpy()
    evidence = np.maximum((gradient * regions).sum(axis=-1), 0)
    if "attention" in outputs:
        evidence *= tf.gather(outputs["attention"][:, 0], position, batch_dims=1).numpy()
    evidence[evidence.sum(axis=-1) == 0] = 1  # nothing speaks for the word: uniform
    return evidence / evidence.sum(axis=-1, keepdims=True)
