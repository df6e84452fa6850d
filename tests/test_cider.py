"""CIDEr-D as a reward, against the reference implementation."""

import numpy as np
import pytest
from pycocoevalcap.cider.cider import Cider

from captioner.cider import CiderReward

WORDS = ["a", "the", "dog", "cat", "man", "runs", "sits", "on", "in", "grass", "ball", "<end>"]


def caption(random: np.random.Generator) -> list[str]:
    return [str(word) for word in random.choice(WORDS, random.integers(1, 13))]


def test_it_is_pycocoevalcaps_cider() -> None:
    random = np.random.default_rng(3)
    references = [[caption(random) for _ in range(random.integers(1, 6))] for _ in range(29)]
    # Captions of their own, one of another photo, and a word that no reference has.
    candidates = [caption(random) for _ in range(27)] + [references[0][0], ["zebra", "a", "dog"]]
    _, expected = Cider().compute_score(
        {number: [" ".join(one) for one in captions] for number, captions in enumerate(references)},
        {number: [" ".join(one)] for number, one in enumerate(candidates)},
    )
    reward = CiderReward(references)
    found = [reward(number, one) for number, one in enumerate(candidates)]
    assert max(found) > 0.5
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_a_reference_itself_scores_highest_and_an_end_counts() -> None:
    references = [[[1, 2, 3, 4, 0]], [[5, 6, 7, 8, 0]], [[1, 6, 9, 4, 0]]]
    reward = CiderReward(references)
    assert reward(0, [1, 2, 3, 4, 0]) > reward(0, [1, 2, 3, 4]) > reward(0, [1, 2]) > 0
    assert reward(0, [5, 6, 7, 8, 0]) == 0  # that of all photos' ends is worth nothing
    assert reward(0, []) == 0


def test_what_cannot_be_counted_is_refused() -> None:
    for references in ([[[1, 2]]], [[[1, 2]], []]):
        with pytest.raises(ValueError, match="two photos at least"):
            CiderReward(references)
