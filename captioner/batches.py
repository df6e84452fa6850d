"""Training batches: photos with all their captions, photos with captions of similar length."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from captioner.datasets import Example
from captioner.features import Features, Squares
from captioner.memory import keep_freed_memory
from captioner.text import END, PAD, START, Vocabulary, tokenize
from captioner.views import is_mirrored, names_sides

__all__ = ["Batches", "padded_length", "token_rows"]

LENGTH_STEP = 4  # batches are padded to a multiple of this: every length is one compilation


def padded_length(length: int) -> int:
    """How many words a batch with captions of this length has."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def token_rows(vocabulary: Vocabulary, captions: Sequence[str], max_words: int) -> list[list[int]]:
    """`<start>`, words, `<end>` as ids for every caption that has words.

    A caption cut at `max_words` has no end: it did not end there.
    """
    rows = []
    for caption in captions:
        words = vocabulary.encode(caption)
        if words:
            tail = [END] if len(words) <= max_words else []
            rows.append([START, *words[:max_words], *tail])
    return rows


class Batches:
    """One epoch of training batches, in an order that epoch and seed decide.

    Item `i` is `(x, y)`: `x["regions"] (B, L, D)` float16 or `x["photos"] (B, size, size, 3)`
    uint8; `x["tokens"] (B, C, T)` int32 previous words; `y (B, C, T)` int32 next words; pads are 0.
    A photo's captions stand in order of falling length, so that training can leave pads out
    (`captioner.packing`). The last batch is filled up with rows of pads, which weigh nothing, so
    that batches differ in `T` only.

    Args:
        views: regions on disk, or photos, one store for every view of the photos
            (`captioner.views`); one view of a photo is drawn per epoch, but no mirrored one if its
            captions tell left from right.
        examples: the train photos; all must be in every store.
        vocabulary: numbers the words.
        batch_photos: `B`.
        max_words: longer captions are cut.
        seed: decides the order together with the epoch.
        share: of several processes that train together, this one's number and how many they are:
            of every batch it has `B / how many` photos.
    """

    def __init__(
        self,
        views: Sequence[Features] | Sequence[Squares],
        examples: Sequence[Example],
        vocabulary: Vocabulary,
        batch_photos: int,
        max_words: int,
        seed: int,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self._views: Sequence[Any] = views
        self._what = "photos" if isinstance(views[0], Squares) else "regions"
        rows = [token_rows(vocabulary, example.captions, max_words) for example in examples]
        kept = [number for number, captions in enumerate(rows) if captions]
        if not kept:
            raise ValueError("no caption has a word: there is nothing to train on")
        self._rows = [sorted(rows[number], key=len, reverse=True) for number in kept]
        paths = [examples[number].path for number in kept]
        self._places = [features.locate(paths) for features in views]
        self._choices = [_allowed(examples[number], len(views)) for number in kept]
        self._captions = max(len(captions) for captions in self._rows)
        self._lengths = np.array([padded_length(len(captions[0]) - 1) for captions in self._rows])
        self._words = np.array([sum(map(len, captions)) for captions in self._rows])
        self._batch_photos = batch_photos
        self._rows_each = batch_photos // share[1]
        self._share = slice(share[0] * self._rows_each, (share[0] + 1) * self._rows_each)
        self._seed = seed
        self._order: list[np.ndarray] = []
        self.start_epoch(0)

    def start_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Draws the order of an epoch; `first_batch` leaves out what was done before a stop."""
        random = np.random.default_rng((self._seed, epoch))
        shuffled = random.permutation(len(self._rows))
        # By the longest caption, which decides how often the loop runs, then by all of them.
        order = np.lexsort((self._words[shuffled], self._lengths[shuffled]))  # stable
        by_length = shuffled[order]
        size = self._batch_photos
        batches = [by_length[first : first + size] for first in range(0, len(by_length), size)]
        self._order = [batches[number] for number in random.permutation(len(batches))][first_batch:]
        draws = random.random(len(self._rows))
        self._view = [
            choices[int(draw * len(choices))]
            for draw, choices in zip(draws, self._choices, strict=True)
        ]

    @property
    def per_epoch(self) -> int:
        """Batches of a whole epoch."""
        return -(-len(self._rows) // self._batch_photos)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def captions(self) -> list[list[list[int]]]:
        """The photos' captions as rows of `token_rows`."""
        return self._rows

    def photos(self, index: int) -> np.ndarray:
        """Which of the photos are in a batch, as places in `captions`; of its share of them."""
        return self._order[index][self._share]

    def tokens(self, index: int) -> np.ndarray:
        """The captions of a batch, `(B, C, T + 1)`."""
        length = int(self._lengths[self._order[index]].max())  # the same for all who share it
        tokens = np.full((self._rows_each, self._captions, length + 1), PAD, np.int32)
        for photo, number in enumerate(self.photos(index)):
            for caption, row in enumerate(self._rows[number]):
                tokens[photo, caption, : len(row)] = row
        return tokens

    def __getitem__(self, index: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        chosen, tokens = self.photos(index), self.tokens(index)
        rows: Any = [None] * len(chosen)
        for view in {self._view[number] for number in chosen}:
            mine = [slot for slot, number in enumerate(chosen) if self._view[number] == view]
            places = [self._places[view][chosen[slot]] for slot in mine]
            for slot, row in zip(mine, self._views[view].read(places), strict=True):
                rows[slot] = row
        any_row = rows[0] if rows else self._views[0].read([self._places[0][0]])[0]
        missing = self._rows_each - len(chosen)
        inputs = np.stack([*rows, *[np.zeros_like(any_row)] * missing])
        return {self._what: inputs, "tokens": tokens[:, :, :-1]}, tokens[:, :, 1:]

    def dataset(self) -> tf.data.Dataset:
        """The epoch for `fit`, read a few batches ahead.

        Keras would take a `keras.utils.PyDataset` too, but guesses from its first batches which
        dimensions vary, and fails later when those happen to be of one length.
        """

        def batches() -> Iterator[Any]:
            keep_freed_memory()  # here, because TensorFlow gives it away when it makes the dataset
            return (self[index] for index in range(len(self)))

        x, y = self[0]
        rows = tf.TensorSpec((*y.shape[:2], None), tf.int32)
        inputs = tf.TensorSpec(x[self._what].shape, x[self._what].dtype)
        data = tf.data.Dataset.from_generator(
            batches, output_signature=({self._what: inputs, "tokens": rows}, rows)
        )
        return data.apply(tf.data.experimental.assert_cardinality(len(self))).prefetch(4)

    def number_of_captions(self) -> int:
        """Captions of a whole epoch."""
        return sum(len(captions) for captions in self._rows)


def _allowed(example: Example, views: int) -> list[int]:
    """The views of a photo that its captions are true for."""
    sided = views > 1 and any(names_sides(tokenize(caption)) for caption in example.captions)
    return [view for view in range(views) if not (sided and is_mirrored(view))]
