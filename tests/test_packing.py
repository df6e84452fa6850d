"""Captions without their pads, step by step."""

import numpy as np
import tensorflow as tf

from captioner.packing import Packing

# B=2 photos, C=3 captions, T=5 steps; 4, 2, 2 and 3, 3, 0 words
WORDS = np.arange(5) < np.array([[4, 2, 2], [3, 3, 0]])[..., None]
VALUES = np.arange(2 * 3 * 5).reshape(2, 3, 5)


def test_steps_shrink_with_the_captions_that_go_on() -> None:
    packing = Packing((2, 3, 5), tf.constant(WORDS))
    assert [int(count) for count in packing.counts] == [3, 3, 2, 1, 1]
    packed = packing.pack(tf.constant(VALUES))
    steps = packing.steps(packed[:, None])
    assert [step[:, 0].numpy().tolist() for step in steps] == [
        [0, 5, 10, 15, 20, 25],
        [1, 6, 11, 16, 21, 26],
        [2, 7, 17, 22],
        [3, 18],
        [4, 19],
    ]
    narrowed = packing.narrowed(tf.constant([[0], [5], [10], [15], [20], [25]]), 2)
    assert narrowed[:, 0].numpy().tolist() == [0, 5, 15, 20]


def test_a_longer_caption_behind_a_shorter_one_is_not_cut() -> None:
    words = np.arange(5) < np.array([[1, 4, 2]])[..., None]
    counts = Packing((1, 3, 5), tf.constant(words)).counts
    assert [int(count) for count in counts] == [3, 3, 2, 2, 1]


def test_only_words_are_kept_and_say_where_they_are() -> None:
    packing = Packing((2, 3, 5), tf.constant(WORDS))
    packed = packing.pack(tf.constant(VALUES))
    kept, place = packing.only_words(packed[:, None])
    assert sorted(place.numpy()) == np.flatnonzero(WORDS).tolist()
    np.testing.assert_array_equal(kept[:, 0], place)  # the values are their own places


def test_spread_puts_every_step_back_and_zeros_elsewhere() -> None:
    packing = Packing((2, 3, 5), tf.constant(WORDS))
    counts = [int(count) for count in packing.counts]
    values = VALUES + 1
    spread = packing.spread([tf.constant(values[:, :n, t]) for t, n in enumerate(counts)])
    computed = np.arange(3)[None, :, None] < np.array(counts)
    np.testing.assert_array_equal(spread, np.where(computed, values, 0))


def test_without_words_nothing_is_left_out() -> None:
    packing = Packing((2, 3, 5))
    assert packing.counts == [3] * 5
    kept, place = packing.only_words(packing.pack(tf.constant(VALUES))[:, None])
    assert sorted(kept[:, 0].numpy()) == VALUES.ravel().tolist()
    np.testing.assert_array_equal(kept[:, 0], place)


def test_rows_photo_by_photo_and_back() -> None:
    packing = Packing((2, 3, 5), tf.constant(WORDS))
    packed = packing.pack(tf.constant(VALUES))[:, None]
    by_photo = packing.by_photo(packed)
    assert by_photo[..., 0].numpy().tolist() == [
        [0, 5, 10, 1, 6, 11, 2, 7, 3, 4],
        [15, 20, 25, 16, 21, 26, 17, 22, 18, 19],
    ]
    np.testing.assert_array_equal(packing.from_photos(by_photo), packed)
