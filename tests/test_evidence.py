"""Evidence maps against finite differences, a model solved by hand, and one word at a time."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from captioner import evidence
from captioner.evidence import evidence_maps
from captioner.model import Captioner

# B=2 captions of T=5 words, the second padded; L=6 regions, D=7.
REGIONS = np.random.default_rng(3).normal(size=(2, 6, 7)).astype("float32")
TOKENS = np.array([[1, 7, 4, 9, 7, 2], [1, 12, 5, 2, 0, 0]], "int32")


@pytest.fixture
def model(tiny_model: Captioner) -> Captioner:
    for weight in tiny_model.decoder.trainable_weights:
        weight.assign(3 * weight)  # so that regions matter
    return tiny_model


def log_probability(model: Captioner, regions: Any, tokens: np.ndarray, place: int) -> Any:
    """Of the word at a place, of one caption alone."""
    outputs = model({"regions": regions[None], "tokens": tokens[None, None, :-1]})
    return tf.nn.log_softmax(outputs["logits"])[0, 0, place, tokens[place + 1]]


def normalised(maps: np.ndarray) -> np.ndarray:
    return maps / maps.sum(axis=-1, keepdims=True)


def test_one_word_at_a_time_gives_the_same(model: Captioner) -> None:
    maps = evidence_maps(model, REGIONS, TOKENS)
    assert maps.shape == (2, 5, 6)
    attention = np.asarray(model({"regions": REGIONS, "tokens": TOKENS[:, None, :-1]})["attention"])
    for row, length in enumerate((5, 3)):
        for place in range(length):
            regions = tf.constant(REGIONS[row])
            with tf.GradientTape() as tape:
                tape.watch(regions)
                wanted = log_probability(model, regions, TOKENS[row], place)
            speaks = (tape.gradient(wanted, regions) * regions).numpy().sum(axis=-1)
            expected = normalised(attention[row, 0, place] * speaks.clip(min=0))
            np.testing.assert_allclose(maps[row, place], expected, rtol=1e-3, atol=1e-5)


def test_finite_differences(model: Captioner) -> None:
    """Gradient x region is how fast log p changes while the region is scaled up."""
    maps = evidence_maps(model, REGIONS, TOKENS)
    step = 0.02
    for place in (0, 4):
        slopes = []
        for region in range(6):
            values = []
            for sign in (1, -1):
                scaled = REGIONS[0].copy()
                scaled[region] *= 1 + sign * step
                values.append(float(log_probability(model, tf.constant(scaled), TOKENS[0], place)))
            slopes.append((values[0] - values[1]) / (2 * step))
        outputs = model({"regions": REGIONS[:1], "tokens": TOKENS[:1, None, :-1]})
        alpha = np.asarray(outputs["attention"][0, 0, place])
        expected = normalised(alpha * np.clip(slopes, 0, None))
        assert 0 < (expected > 0).sum() < 6  # some regions speak for the word, some against it
        np.testing.assert_allclose(maps[0, place], expected, atol=0.01)


def test_by_hand() -> None:
    """Words 1 and 2 have the logits w1.a and w2.a, equal at a = (1, 1, 1), so p = 1/2 each.

    The gradient for word 1 is (w1 - w2) / 2 = (1, -1/2, -1/2), for word 2 its negative.
    """

    def call(inputs: dict[str, Any], training: bool) -> dict[str, Any]:
        assert not training
        weights = tf.constant([[2.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
        logits = tf.matmul(inputs["regions"][..., 0], weights)  # (N, 2)
        logits = tf.concat([tf.fill((len(logits), 1), -1e9), logits], axis=1)
        length = inputs["tokens"].shape[-1]
        attention = tf.broadcast_to([0.5, 0.3, 0.2], (len(logits), 1, length, 3))
        return {
            "logits": tf.repeat(logits[:, None, None], length, axis=2),
            "attention": attention,
        }

    maps = evidence_maps(call, np.ones((1, 3, 1)), [[1, 1, 2]])
    np.testing.assert_allclose(maps, [[[1, 0, 0], [0, 0.6, 0.4]]], atol=1e-6)


def test_maps_sum_to_one_and_pads_have_none(model: Captioner) -> None:
    maps = evidence_maps(model, REGIONS, TOKENS)
    np.testing.assert_allclose(maps.sum(axis=-1), [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], rtol=1e-5)
    longer = evidence_maps(model, REGIONS, np.pad(TOKENS, ((0, 0), (0, 2))))
    np.testing.assert_allclose(longer[:, :5], maps, rtol=1e-3, atol=1e-5)
    assert not longer[:, 5:].any()


def test_a_map_is_of_its_own_word(model: Captioner) -> None:
    """Another word changes its own map and those after it; alpha would not change at its place."""
    other = TOKENS.copy()
    other[0, 3] = 14
    before, after = (evidence_maps(model, REGIONS, tokens) for tokens in (TOKENS, other))
    np.testing.assert_allclose(after[0, :2], before[0, :2], rtol=1e-3, atol=1e-5)
    assert abs(after[0, 2] - before[0, 2]).max() > 0.01
    assert abs(after[0, 3] - before[0, 3]).max() > 1e-4
    np.testing.assert_allclose(after[1], before[1], rtol=1e-3, atol=1e-5)


def test_only_the_words_that_are_wanted(model: Captioner, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evidence_maps(model, REGIONS, TOKENS)
    wanted = np.zeros((2, 5), bool)
    wanted[0, 3] = wanted[1, 1] = wanted[1, 4] = True  # the last is a pad
    monkeypatch.setattr(evidence, "COPIES", 2)
    maps = evidence_maps(model, REGIONS, TOKENS, wanted)
    np.testing.assert_allclose(maps[0, 3], whole[0, 3], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(maps[1, 1], whole[1, 1], rtol=1e-3, atol=1e-5)
    assert maps.sum() == pytest.approx(2)


def test_copies_are_split_into_passes(model: Captioner, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evidence_maps(model, REGIONS, TOKENS)
    passes = []
    counting = evidence._evidence
    monkeypatch.setattr(evidence, "COPIES", 3)
    monkeypatch.setattr(
        evidence, "_evidence", lambda *rows: passes.append(len(rows[1])) or counting(*rows)
    )
    np.testing.assert_allclose(evidence_maps(model, REGIONS, TOKENS), whole, rtol=1e-3, atol=1e-5)
    assert passes == [3, 3, 2]  # 5 + 3 words


def test_uniform_where_no_region_speaks(model: Captioner) -> None:
    maps = evidence_maps(model, np.zeros((1, 6, 7)), TOKENS[:1])
    np.testing.assert_allclose(maps, np.full((1, 5, 6), 1 / 6), rtol=1e-6)


def test_without_attention_regions_weigh_the_same(tiny_encoder: keras.Model) -> None:
    words = [f"w{number}" for number in range(13)]
    model = Captioner(tiny_encoder, words, units=11, embedding_units=3, attention="none")
    maps = evidence_maps(model, REGIONS, TOKENS)
    regions = tf.constant(REGIONS[1])
    with tf.GradientTape() as tape:
        tape.watch(regions)
        wanted = log_probability(model, regions, TOKENS[1], 2)
    speaks = (tape.gradient(wanted, regions) * regions).numpy().sum(axis=-1)
    np.testing.assert_allclose(maps[1, 2], normalised(speaks.clip(min=0)), rtol=1e-3, atol=1e-5)
