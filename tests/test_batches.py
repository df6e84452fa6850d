"""Training batches."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from captioner.batches import Batches, token_rows
from captioner.datasets import Example
from captioner.text import END, PAD, START, UNKNOWN, Vocabulary

VOCABULARY = Vocabulary.build(["a b c d e f g"])


class FakeFeatures:
    """Regions whose every number is the photo's own."""

    def locate(self, photos: list[Path]) -> list[int]:
        return [int(photo.stem) for photo in photos]

    def read(self, places: list[int]) -> np.ndarray:
        return np.stack([np.full((3, 5), place, np.float16) for place in places])


def batches(captions: list[tuple[str, ...]], batch_photos: int = 2, seed: int = 0) -> Batches:
    examples = [
        Example(str(number), Path(f"{number}.jpg"), texts, "train")
        for number, texts in enumerate(captions, 1)
    ]
    return Batches([FakeFeatures()], examples, VOCABULARY, batch_photos, 6, seed)


def test_token_rows() -> None:
    a, b, c = VOCABULARY.encode("a b c")
    rows = token_rows(VOCABULARY, ["a b", " . ", "c zebra c", "a b c c"], max_words=3)
    assert rows == [
        [START, a, b, END],
        [START, c, UNKNOWN, c, END],
        [START, a, b, c],  # cut: it did not end there
    ]


def test_an_epoch_holds_every_photo_once_with_its_own_captions() -> None:
    captions = [("a", "b c"), ("d",), ("a b c d e", "f", "g"), ("g g",), ("e f g a b",)]
    data = batches(captions)
    assert len(data) == data.per_epoch == 3
    assert data.number_of_captions() == 8
    seen = []
    for index in range(len(data)):
        x, y = data[index]
        assert x["regions"].shape == (2, 3, 5)
        assert x["tokens"].shape == y.shape
        assert x["tokens"].shape[:2] == (2, 3)
        assert x["tokens"].shape[2] % 4 == 0
        for photo in range(2):
            number = int(x["regions"][photo, 0, 0])
            if number == 0:
                assert not y[photo].any()  # fills up the last batch
                continue
            seen.append(number)
            expected = token_rows(VOCABULARY, captions[number - 1], 6)
            expected.sort(key=len, reverse=True)
            for row in range(3):
                previous, following = x["tokens"][photo, row], y[photo, row]
                tokens = expected[row] if row < len(expected) else []
                assert [token for token in following if token != PAD] == tokens[1:]
                assert [token for token in previous if token != PAD][: len(tokens) - 1] == tokens[
                    :-1
                ]
    assert sorted(seen) == [1, 2, 3, 4, 5]


def order(data: Batches) -> list[int]:
    return [int(n) for i in range(len(data)) for n in data[i][0]["regions"][:, 0, 0]]


def test_order_depends_on_epoch_and_seed_alone() -> None:
    captions = [("a",)] * 30
    first, second = batches(captions), batches(captions)
    second.start_epoch(3)
    second.start_epoch(0)
    assert order(first) == order(second)
    second.start_epoch(1)
    assert order(first) != order(second)
    assert order(first) != order(batches(captions, seed=1))


def test_a_resumed_epoch_leaves_out_what_was_done() -> None:
    whole, rest = batches([("a",)] * 30), batches([("a",)] * 30)
    whole.start_epoch(2)
    rest.start_epoch(2, first_batch=4)
    assert len(rest) == len(whole) - 4
    assert order(rest) == order(whole)[8:]
    assert rest.per_epoch == 15


def test_batches_hold_captions_of_similar_length() -> None:
    captions = [("a",), ("a b c d e f",)] * 20
    data = batches(captions)
    lengths = [data[index][1].shape[2] for index in range(len(data))]
    assert sorted(lengths) == [4] * 10 + [8] * 10


def test_dataset_takes_any_length_after_two_of_one() -> None:
    """Keras' own reading of a PyDataset fails here: it looks at the first batches only."""
    data = batches([("a",)] * 6 + [("a b c d e f",)] * 2)
    lengths = [data[index][1].shape[2] for index in range(len(data))]
    while lengths[0] != 4 or lengths[1] != 4:
        data.start_epoch(len(lengths) + data._seed)
        data._seed += 1
        lengths = [data[index][1].shape[2] for index in range(len(data))]
    assert lengths.count(8) == 1
    assert int(data.dataset().cardinality()) == 4
    for (x, y), expected in zip(data.dataset(), lengths, strict=True):
        assert x["regions"].shape == (2, 3, 5)
        assert x["tokens"].shape == y.shape == (2, 1, expected)


def test_photos_without_a_usable_caption_are_left_out() -> None:
    data = batches([("a",), (" . ",), ("b",)])
    assert sorted(order(data)) == [1, 3]


def test_no_photo_with_words_is_an_error() -> None:
    with pytest.raises(ValueError, match="no caption has a word"):
        batches([(" . ",)])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="about glibc")
def test_reading_batches_leaves_freed_memory_where_it_is() -> None:
    """TensorFlow has glibc give back what is larger than 128 kB: see `captioner.memory`."""
    code = """
import resource, sys
from tests.test_batches import batches
import numpy as np
data = batches([("a",)] * 6).dataset()
list(data)
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3): np.ones(2**20)  # 8 MB, 2048 pages
before = faults()
for _ in range(50): np.ones(2**20)
print(faults() - before)
"""
    project = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 50 * 2048 / 10


class Mirrored(FakeFeatures):
    """The photos' second view: regions of the photo's negative number."""

    def read(self, places: list[int]) -> np.ndarray:
        return -super().read(places)


def test_views_take_turns_but_not_where_a_caption_names_a_side() -> None:
    captions = [("a", "b on the Left"), ("c",), ("d e",), ("f leftover",), ("g",)]
    examples = [
        Example(str(number), Path(f"{number}.jpg"), texts, "train")
        for number, texts in enumerate(captions, 1)
    ]
    data = Batches([FakeFeatures(), Mirrored()], examples, VOCABULARY, 2, 6, 0)
    seen: dict[int, list[bool]] = {number: [] for number in range(1, 6)}
    for epoch in range(40):
        data.start_epoch(epoch)
        for index in range(len(data)):
            for number in data[index][0]["regions"][:, 0, 0].astype(int):
                if number:
                    seen[abs(number)].append(number < 0)
    assert not any(seen.pop(1))
    assert all(len(views) == 40 and 10 < sum(views) < 30 for views in seen.values())


def test_a_resumed_epoch_shows_the_same_views() -> None:
    examples = [Example(str(one), Path(f"{one}.jpg"), ("a",), "train") for one in range(1, 8)]

    def regions(first: int) -> list[np.ndarray]:
        data = Batches([FakeFeatures(), Mirrored()], examples, VOCABULARY, 2, 6, 0)
        data.start_epoch(3, first)
        return [data[index][0]["regions"] for index in range(len(data))]

    np.testing.assert_array_equal(regions(0)[2:], regions(2))
