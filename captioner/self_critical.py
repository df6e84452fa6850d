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
from captioner.text import END, PAD, START, UNKNOWN

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
        likelihood: weight of people's captions, which stand beside the sampled ones where it is
            above 0: as if each were better than the others by so much CIDEr-D.
    """

    def __init__(
        self,
        batches: Batches,
        writer: Writer,
        samples: int,
        max_words: int,
        seed: int,
        longest: Callable[[int], int] = int,
        likelihood: float = 0.0,
    ) -> None:
        self._batches, self._writer, self._longest = batches, writer, longest
        self._samples, self._max_words, self._seed = samples, max_words, seed
        self._likelihood = likelihood
        people = max(map(len, batches.captions)) if likelihood else 0
        self._rows = samples + people
        self._reward = CiderReward(
            [[caption[1:] for caption in captions] for captions in batches.captions]
        )

    def batch(self, index: int, number: int) -> tuple[Any, np.ndarray, np.ndarray, float]:
        """A batch as for `fit`, of sampled captions and, with `likelihood`, people's: `R` a photo.

        Args:
            index: of the batch among those left of the epoch.
            number: of the batch since training began: decides what is drawn.

        Returns:
            `x`, `y`, the weights `(B, R)`, advantages of what was sampled, and the mean CIDEr-D, a
            fraction as in `captioner.metrics`. Photos that fill up the last batch have no words and
            weight 0.
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
        sampled = [
            [[*one.tokens, *([END] if one.finished else [])] for one in hypotheses]
            for hypotheses in found
        ]
        rewards = np.zeros((len(photos), self._samples), np.float32)
        for place, photo in enumerate(photos):
            rewards[place] = [
                0.0 if _stutters(one.tokens) else self._reward(photo, row)
                for one, row in zip(found[place], sampled[place], strict=True)
            ]
        captions: list[list[tuple[list[int], float]]] = []
        for photo, rows, better in zip(
            photos, sampled, np.asarray(advantages(rewards)), strict=True
        ):
            weighted = list(zip(rows, better, strict=True))
            if self._likelihood:  # what is never written is never likely: no unknown words
                people = [row[1:] for row in self._batches.captions[photo] if UNKNOWN not in row]
                weighted += [(row, self._likelihood) for row in people]
            # In order of falling length, as `Batches` has them.
            captions.append(sorted(weighted, key=lambda one: -len(one[0])))
        longest = max((len(one[0][0]) for one in captions), default=1)
        length = self._longest(padded_length(longest))
        tokens = np.full((len(x["regions"]), self._rows, length + 1), PAD, np.int32)
        weights = np.zeros(tokens.shape[:2], np.float32)
        tokens[: len(photos), :, 0] = START
        for place, weighted in enumerate(captions):
            for slot, (row, weight) in enumerate(weighted):
                tokens[place, slot, 1 : len(row) + 1] = row
                weights[place, slot] = weight
        x = {"regions": x["regions"], "tokens": tokens[:, :, :-1]}
        return x, tokens[:, :, 1:], weights, float(rewards.mean()) if len(photos) else 0.0


def _stutters(tokens: Sequence[int]) -> bool:
    """Whether the last word, or the last two, stand there twice: what pays in n-grams and reads
    badly ("a dog in the in the")."""
    return any(
        len(tokens) >= 2 * n and tuple(tokens[-n:]) == tuple(tokens[-2 * n : -n]) for n in (1, 2)
    )
