"""The localiser of known words, and how its maps teach attention."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from captioner.localizer import Localizer, teaching_loss
from captioner.model import Captioner


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def test_by_hand() -> None:
    layer = Localizer(7, units=2)  # four special tokens, three words
    layer.build((None, 2, 1))
    layer.kernel.assign([[1.0, 0.0]])
    # The second unit is 0 everywhere, so s(5, l) = log 3, 0, and 0 for all other words.
    layer.words.assign([[0, 5]] * 5 + [[np.log(3), 7], [0, 9]])
    layer.bias.assign([-1, -1, -1, -1, -1, -2, -3])
    regions = np.array([[[1.0], [0.0]]])  # one photo, two regions
    located = layer(regions, np.array([[[5, 4]]]))
    np.testing.assert_allclose(located.maps, [[[[0.75, 0.25], [0.5, 0.5]]]], rtol=1e-6)
    looked = np.log((3 + 1) / 2) - 2  # mean of 3 and 1
    gain = np.log(sigmoid(looked)) - np.log(sigmoid(np.log(3) / 2 - 2))
    np.testing.assert_allclose(located.gain, [[[gain, 0]]], rtol=1e-6, atol=1e-7)
    named = np.log(sigmoid(looked)) + np.log(sigmoid(-1.0))
    absent = 4 * np.log(sigmoid(1.0)) + np.log(sigmoid(3.0))
    np.testing.assert_allclose(located.loss, -named - absent, rtol=1e-6)


def test_what_fills_up_a_batch_counts_for_nothing() -> None:
    keras.utils.set_random_seed(1)
    layer = Localizer(7, units=3)
    layer.build((None, 5, 2))
    regions = np.random.default_rng(1).normal(size=(2, 5, 2)).astype("float32")
    words = np.array([[[4, 5, 0]], [[0, 0, 0]]])
    both, one = layer(regions, words), layer(regions[:1], words[:1])
    np.testing.assert_allclose(both.loss, one.loss, rtol=1e-6)


def test_teaching_loss_by_hand() -> None:
    maps = np.array([[[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]]], "float32")
    alpha = np.array([[[[0.25, 0.25, 0.5], [0.5, 0.5, 0.0], [0.1, 0.9, 0.0]]]], "float32")
    gain = np.log(np.array([[[2.0, 4.0, 4.0]]], "float32"))  # weights 1/2, 3/4, and a pad
    real = np.array([[[1.0, 1.0, 0.0]]], "float32")
    loss = teaching_loss(maps, gain, alpha, real)
    np.testing.assert_allclose(loss, (1 / 2 + 3 / 4) * np.log(2), rtol=1e-6)
    # A word that looking does not tell better teaches nothing.
    np.testing.assert_array_equal(teaching_loss(maps, -gain, alpha, real), 0)


def test_the_teacher_does_not_learn_from_the_pupil() -> None:
    maps, gain = tf.constant([[[[0.2, 0.8]]]]), tf.constant([[[1.0]]])
    scores, one = tf.constant([[[[0.3, -200.0]]]]), tf.ones((1, 1, 1))
    with tf.GradientTape() as tape:
        tape.watch([maps, gain, scores])
        loss = teaching_loss(maps, gain, tf.nn.softmax(scores), one)
    into_maps, into_gain, into_scores = tape.gradient(loss, [maps, gain, scores])
    assert into_maps is None
    assert into_gain is None
    assert np.isfinite(into_scores.numpy()).all()  # alpha is 0 there in float32


def planted(random: np.random.Generator, photos: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Photos `(N, 11, 7)` with two of five things in two of eleven regions; words; places."""
    regions = 0.3 * random.normal(size=(photos, 11, 7))
    words = np.stack([random.permutation(5)[:2] for _ in range(photos)])
    places = np.stack([random.permutation(11)[:2] for _ in range(photos)])
    for photo in range(photos):
        regions[photo, places[photo], words[photo]] += 2
    return regions.astype("float32"), words[:, None], places


def test_it_finds_what_only_words_name() -> None:
    keras.utils.set_random_seed(3)
    random = np.random.default_rng(3)
    layer = Localizer(9, units=13)
    layer.build((None, 11, 7))
    optimizer = keras.optimizers.Adam(0.02)
    for _ in range(150):
        regions, words, _ = planted(random, 37)
        with tf.GradientTape() as tape:
            loss = layer(regions, words + 4).loss
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
    regions, words, places = planted(random, 101)
    located = layer(regions, words + 4)
    assert (np.asarray(located.maps)[:, 0].argmax(axis=-1) == places).mean() > 0.95
    assert (np.asarray(located.gain) > 0.5).mean() > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["soft", "hard"])
@pytest.mark.parametrize("self_attention", [0, 1])
def test_alpha_learns_from_it(
    tiny_encoder: keras.Model, attention: str, self_attention: int
) -> None:
    """Things that stand for words lie anywhere; alpha finds them when taught, and only then."""

    def trained(weight: float) -> float:
        keras.utils.set_random_seed(4)
        model = Captioner(
            tiny_encoder, list("abcde"), units=23, attention_units=19, embedding_units=13,
            dropout=0.0, regularizer=0.0, attention=attention, self_attention=self_attention,
            grounding_weight=weight,
        )  # fmt: skip
        random = np.random.default_rng(5)
        model.compile(optimizer=keras.optimizers.Adam(0.01), jit_compile=False)

        def batch(photos: int):
            regions, words, places = planted(random, photos)
            # The captions name both things, in the order of the words' ids.
            order = np.argsort(words, axis=-1)
            words = np.take_along_axis(words, order, -1) + 4
            places = np.take_along_axis(places, order[:, 0], -1)
            tokens = np.concatenate(
                [np.full_like(words[..., :1], 1), words, np.full_like(words[..., :1], 2)], -1
            )
            return regions, tokens, places

        regions, tokens, _ = batch(1700)
        history = model.fit(
            {"regions": regions, "tokens": tokens[:, :, :-1]}, tokens[:, :, 1:],
            batch_size=100, epochs=12, verbose=0,
        ).history  # fmt: skip
        assert np.isfinite(history["loss"]).all()
        assert ("teaching_loss" in history) == (weight > 0)
        regions, tokens, places = batch(211)
        alpha = model({"regions": regions, "tokens": tokens[:, :, :-1]})["attention"]
        found = np.take_along_axis(np.asarray(alpha)[:, 0, :2], places[..., None], -1)
        return float(found.mean())

    assert trained(1.0) > trained(0.0) + 0.1


def test_only_training_has_one(tiny_encoder: keras.Model) -> None:
    model = Captioner(tiny_encoder, ["a", "b"], units=11, attention_units=5, grounding_weight=0.5)
    assert model.get_config()["grounding_weight"] == 0.5
    again = Captioner.from_config(model.get_config())
    assert again.localizer is not None
    assert model.in_float32().localizer is None
    none = Captioner(tiny_encoder, ["a", "b"], units=11, attention="none", grounding_weight=0.5)
    assert none.localizer is None  # there is no map to teach
