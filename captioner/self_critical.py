"""Captions sampled from the model, for training it by their CIDEr-D instead of their likelihood.

Self-critical sequence training (Rennie et al. 2017, arXiv 1612.00563): several captions are drawn
for every photo, each is scored against the photo's own, and those better than the others become
likelier. The end token belongs to what is scored, or captions learn to break off before it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from captioner.batches import Batches, padded_length
from captioner.cider import CiderReward
from captioner.config import SearchConfig
from captioner.inference import Writer
from captioner.reinforce import advantages
from captioner.text import END, PAD, START

__all__ = ["SelfCritical"]


class SelfCritical:
    """Batches of sampled captions, with how much better than the others each one is.

    Args:
        batches: the train photos, in the order of the epoch.
        writer: samples; of a model with the weights to be trained.
        samples: `K`, captions drawn per photo.
        max_words: longer ones are cut.
        seed: decides with the number of the batch what is drawn.
        longest: called with the number of words of a batch, gives how many it is to have: for
            processes that train together, which must have batches of one shape.
    """

    def __init__(
        self,
        batches: Batches,
        writer: Writer,
        samples: int,
        max_words: int,
        seed: int,
        longest: Callable[[int], int] = int,
    ) -> None:
        self._batches, self._writer, self._longest = batches, writer, longest
        self._samples, self._max_words, self._seed = samples, max_words, seed
        self._reward = CiderReward(
            [[caption[1:] for caption in captions] for captions in batches.captions]
        )

    def batch(self, index: int, number: int) -> tuple[Any, np.ndarray, np.ndarray, float]:
        """A batch as for `fit`, of sampled captions.

        Args:
            index: of the batch among those left of the epoch.
            number: of the batch since training began: decides what is drawn.

        Returns:
            `x`, `y`, the advantages `(B, K)` as their weights, and the mean CIDEr-D, a fraction as
            in `captioner.metrics`. Photos that fill up the last batch have no words and weight 0.
        """
        x, _ = self._batches[index]
        photos = self._batches.photos(index)
        options = SearchConfig(
            beam=1,
            sample=True,
            n_best=self._samples,
            max_words=self._max_words,
            seed=(self._seed * 1_000_003 + number) % 2**31,
        )
        regions = x["regions"][: len(photos)]
        found = self._writer.write(regions, options) if len(photos) else []
        rewards = np.zeros((len(x["regions"]), self._samples), np.float32)
        captions = []
        for place, (photo, hypotheses) in enumerate(zip(photos, found, strict=True)):
            # In order of falling length, as `Batches` has them.
            hypotheses = sorted(hypotheses, key=lambda one: -len(one.tokens) - one.finished)
            rows = [[*one.tokens, *([END] if one.finished else [])] for one in hypotheses]
            rewards[place] = [
                0.0 if _stutters(one.tokens) else self._reward(photo, row)
                for one, row in zip(hypotheses, rows, strict=True)
            ]
            captions.append(rows)
        length = self._longest(padded_length(max((len(rows[0]) for rows in captions), default=1)))
        tokens = np.full((*rewards.shape, length + 1), PAD, np.int32)
        tokens[: len(photos), :, 0] = START
        for place, rows in enumerate(captions):
            for slot, row in enumerate(rows):
                tokens[place, slot, 1 : len(row) + 1] = row
        x = {"regions": x["regions"], "tokens": tokens[:, :, :-1]}
        mean = float(rewards[: len(photos)].mean()) if len(photos) else 0.0
        return x, tokens[:, :, 1:], np.asarray(advantages(rewards)), mean


def _stutters(tokens: Sequence[int]) -> bool:
    """Whether the last word, or the last two, stand there twice: what pays in n-grams and reads
    badly ("a dog in the in the")."""
    return any(
        len(tokens) >= 2 * n and tuple(tokens[-n:]) == tuple(tokens[-2 * n : -n]) for n in (1, 2)
    )
