"""Training by the score of sampled captions."""

from pathlib import Path

import keras
import numpy as np
import pytest

from captioner.batches import Batches
from captioner.cider import CiderReward
from captioner.datasets import Example
from captioner.inference import Writer
from captioner.model import Captioner
from captioner.reinforce import advantages
from captioner.self_critical import SelfCritical, _stutters
from captioner.text import END, NEVER_WRITTEN, PAD, START, UNKNOWN


class Regions:
    """Three photos that differ."""

    def locate(self, photos: list[Path]) -> list[int]:
        return [int(photo.stem) for photo in photos]

    def read(self, places: list[int]) -> np.ndarray:
        drawn = np.random.default_rng(3).normal(size=(3, 6, 7)).astype(np.float16)
        return drawn[places]


CAPTIONS = [
    ("word1 word2 word3", "word1 word2 word3 word4"),
    ("word5 word6 word7", "word5 unheard word7"),
    ("word8 word9 word1", "word8 word9"),
]


@pytest.fixture
def batches(tiny_model: Captioner) -> Batches:
    examples = [
        Example(str(number), Path(f"{number}.jpg"), texts, "train")
        for number, texts in enumerate(CAPTIONS)
    ]
    return Batches([Regions()], examples, tiny_model.vocabulary, 2, 7, 1)


def test_advantages_are_over_the_others_mean() -> None:
    np.testing.assert_allclose(
        advantages(np.array([[1.0, 2.0, 6.0]])), [[1 - 4, 2 - 3.5, 6 - 1.5]], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [((5, 6), False), ((5, 5), True), ((4, 5, 6, 5, 6), True), ((5, 6, 5), False), ((5,), False)],
)
def test_stuttering_ends(tokens: tuple[int, ...], expected: bool) -> None:
    assert _stutters(tokens) is expected


def test_a_batch_holds_sampled_captions_with_their_advantages(
    tiny_model: Captioner, batches: Batches
) -> None:
    sampled = SelfCritical(batches, Writer(tiny_model), 5, 7, seed=2)
    reward = CiderReward([[row[1:] for row in rows] for rows in batches.captions])
    for index in range(2):
        x, y, weights, mean = sampled.batch(index, index)
        photos = batches.photos(index)
        np.testing.assert_array_equal(x["regions"], batches[index][0]["regions"])
        assert x["tokens"].shape == y.shape
        assert y.shape[:2] == weights.shape == (2, 5)
        assert y.shape[2] % 4 == 0
        np.testing.assert_allclose(weights.sum(axis=1), 0, atol=1e-5)
        scores = np.zeros((2, 5))
        for place, photo in enumerate(photos):
            lengths = (y[place] != PAD).sum(axis=1)
            assert sorted(lengths, reverse=True) == lengths.tolist()
            for slot, length in enumerate(lengths):
                words = y[place, slot, :length].tolist()
                assert x["tokens"][place, slot, : length + 1].tolist()[:length] == [
                    START,
                    *words[: length - 1],
                ]
                assert (words[-1] == END) == (length < 8 and END in words)
                ended = words[:-1] if words[-1] == END else words
                scores[place, slot] = 0 if _stutters(ended) else reward(photo, words)
        np.testing.assert_allclose(weights, advantages(scores), rtol=1e-5, atol=1e-6)
        assert mean == pytest.approx(scores[: len(photos)].mean(), rel=1e-5)
        if len(photos) == 1:  # the last batch is filled up
            assert not y[1].any()
            assert not weights[1].any()


def test_people_s_captions_may_stand_beside_them(tiny_model: Captioner, batches: Batches) -> None:
    writer = Writer(tiny_model)
    alone = SelfCritical(batches, writer, 5, 7, seed=2).batch(0, 0)
    _, y, weights, mean = SelfCritical(batches, writer, 5, 7, 2, likelihood=0.25).batch(0, 0)
    assert y.shape[:2] == weights.shape == (2, 5 + 2)
    assert mean == alone[3]
    for place, photo in enumerate(batches.photos(0)):
        rows = [tuple(row[row != PAD].tolist()) for row in y[place]]
        assert sorted(rows, key=len, reverse=True) == rows
        people = [(tuple(row[1:]), 0.25) for row in batches.captions[photo] if UNKNOWN not in row]
        rest = sorted(one for one in zip(rows, weights[place].tolist(), strict=True) if one[0])
        for one in people:
            rest.remove(one)
        drawn = [tuple(row[row != PAD].tolist()) for row in alone[1][place]]
        assert rest == sorted(zip(drawn, alone[2][place].tolist(), strict=True))


def test_what_is_drawn_depends_on_seed_and_number_alone(
    tiny_model: Captioner, batches: Batches
) -> None:
    writer = Writer(tiny_model)

    def tokens(seed: int, number: int) -> list[int]:
        return SelfCritical(batches, writer, 5, 7, seed).batch(0, number)[1].ravel().tolist()

    assert tokens(1, 4) == tokens(1, 4)
    assert tokens(1, 4) != tokens(1, 5)
    assert tokens(1, 4) != tokens(2, 4)


def test_the_loss_is_that_of_the_distribution_they_were_drawn_from(
    tiny_model: Captioner, batches: Batches
) -> None:
    """Without dropout, without the regulariser, and among the words that may be written."""
    assert tiny_model.decoder.dropout > 0
    assert tiny_model.regularizer > 0
    tiny_model.stop_dropout()
    tiny_model.compile(optimizer=keras.optimizers.SGD(0.0), jit_compile=False)
    x, y, weights, _ = SelfCritical(batches, Writer(tiny_model), 5, 7, seed=1).batch(0, 0)
    logits = np.array(tiny_model(x)["logits"], np.float64)
    logits[..., list(NEVER_WRITTEN)] = -np.inf
    log_likely = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    real = y != PAD
    losses = np.zeros(y.shape)
    losses[real] = -np.take_along_axis(log_likely[real], y[real][:, None], axis=1)[:, 0]
    logs = tiny_model.train_on_batch(x, y, weights, return_dict=True)
    assert logs["word_loss"] == pytest.approx(losses.sum() / real.sum(), rel=1e-4)
    expected = (losses * weights[..., None]).sum() / real.sum()
    assert logs["loss"] == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("attention", ["soft", "hard"])
def test_captions_get_better(
    tiny_encoder: keras.Model, batches: Batches, tiny_model: Captioner, attention: str
) -> None:
    keras.utils.set_random_seed(1)
    model = Captioner(
        tiny_encoder, list(tiny_model.vocabulary.words[4:]), units=11, attention_units=5,
        embedding_units=3, attention=attention, dropout=0.0, regularizer=0.0,
    )  # fmt: skip
    model.compile(optimizer=keras.optimizers.Adam(0.02), jit_compile=False)
    model.train_as_soft(True)
    sampled = SelfCritical(batches, Writer(model), 11, 7, seed=1)
    rewards = []
    for number in range(60):
        x, y, weights, reward = sampled.batch(number % 2, number)
        assert np.isfinite(model.train_on_batch(x, y, weights, return_dict=True)["loss"])
        rewards.append(reward)
    assert np.mean(rewards[-10:]) > 1.3 * np.mean(rewards[:10])
