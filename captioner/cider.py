"""CIDEr-D as a reward: the reference implementation's figure for one caption, fast, on word ids.

Vedantam et al. 2015 (arXiv 1411.5726), as in pycocoevalcap's `Cider`: n-grams of 1 to 4 words,
weighted by how few of the photos' references have them, counts clipped to the reference's, and a
Gaussian penalty on the difference in length. Words are any hashable values; with the end token
among them a caption that breaks off ("a dog in the") loses the n-grams that end.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from math import exp, log, sqrt
from typing import NamedTuple

__all__ = ["CiderReward"]

LONGEST = 4
SIGMA = 6.0
SCALE = 10.0

Caption = Sequence[Hashable]


class _Vector(NamedTuple):
    """A caption by its n-grams."""

    weights: tuple[dict[Caption, float], ...]  # by n: term frequency x inverse document frequency
    norms: tuple[float, ...]
    length: int  # in bigrams, as the reference implementation counts it


class CiderReward:
    """Scores captions of photos whose references are known.

    Args:
        references: for every photo its captions, each a sequence of words. How rare n-grams are is
            counted over these photos.

    Raises:
        ValueError: fewer than two photos, or one without references.
    """

    def __init__(self, references: Sequence[Sequence[Caption]]) -> None:
        if len(references) < 2 or not all(references):
            raise ValueError("CIDEr needs references of two photos at least, and some of each")
        self._log_photos = log(len(references))
        counted = [[_n_grams(caption) for caption in captions] for captions in references]
        self._photos_with = Counter(
            n_gram for captions in counted for n_gram in set().union(*captions)
        )
        self._references = [[self._vector(counts) for counts in captions] for captions in counted]

    def __call__(self, photo: int, caption: Caption) -> float:
        """CIDEr-D of a caption against the references of the photo of this number."""
        mine, references = self._vector(_n_grams(caption)), self._references[photo]
        total = 0.0
        for other in references:
            similar = 0.0
            for n in range(LONGEST):
                if mine.norms[n] and other.norms[n]:
                    theirs = other.weights[n]
                    product = 0.0
                    for n_gram, weight in mine.weights[n].items():
                        if n_gram in theirs:
                            product += min(weight, theirs[n_gram]) * theirs[n_gram]
                    similar += product / (mine.norms[n] * other.norms[n])
            total += similar * exp(-((mine.length - other.length) ** 2) / (2 * SIGMA**2))
        return SCALE * total / (LONGEST * len(references))

    def _vector(self, counts: Counter[Caption]) -> _Vector:
        weights: tuple[dict[Caption, float], ...] = tuple({} for _ in range(LONGEST))
        for n_gram, count in counts.items():
            rarity = self._log_photos - log(max(1, self._photos_with[n_gram]))
            weights[len(n_gram) - 1][n_gram] = count * rarity
        norms = tuple(sqrt(sum(weight**2 for weight in one.values())) for one in weights)
        length = sum(count for n_gram, count in counts.items() if len(n_gram) == 2)
        return _Vector(weights, norms, length)


def _n_grams(caption: Caption) -> Counter[Caption]:
    words = tuple(caption)
    return Counter(
        words[first : first + n]
        for n in range(1, LONGEST + 1)
        for first in range(len(words) - n + 1)
    )
