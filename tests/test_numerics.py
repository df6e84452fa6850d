"""Batches at the edges of what is possible, in every number type."""

import keras
import numpy as np
import pytest

from captioner.model import Captioner
from captioner.text import END, PAD, START

DTYPES = ("float32", "mixed_bfloat16", "mixed_float16")
RANDOM = np.random.default_rng(3)


def encoder(regions: tuple[int, int] = (2, 3)) -> keras.Model:
    """24 px photos to a grid of 7 channels."""
    inputs = keras.Input((24, 24, 3))
    size = (24 // regions[0], 24 // regions[1])
    features = keras.layers.Conv2D(7, size, strides=size)(inputs)
    count = regions[0] * regions[1]
    return keras.Model(inputs, keras.layers.Reshape((count, 7), name="regions")(features))


def captioner(words: int = 13, regions: tuple[int, int] = (2, 3), **options: object) -> Captioner:
    keras.utils.set_random_seed(5)
    names = [f"w{number}" for number in range(words)]
    sizes = {"units": 11, "attention_units": 5, "embedding_units": 3, "regularizer": 1.0}
    model = Captioner(encoder(regions), names, **{**sizes, **options})
    model.compile(optimizer=keras.optimizers.AdamW(0.01, global_clipnorm=5.0), run_eagerly=True)
    return model


def batch(captions: list[list[list[int]]], regions: int = 6) -> tuple[dict, np.ndarray]:
    """Captions as words; an empty one is a row of pads."""
    length = max(len(words) for photo in captions for words in photo) + 2
    tokens = np.full((len(captions), len(captions[0]), length), PAD, "int32")
    for photo, rows in enumerate(captions):
        for number, words in enumerate(rows):
            if words:
                row = [START, *words, END]
                tokens[photo, number, : len(row)] = row
    values = RANDOM.normal(size=(len(captions), regions, 7)).astype("float16")
    return {"regions": values, "tokens": tokens[:, :, :-1]}, tokens[:, :, 1:]


EDGES = {
    "a row of pads": [[[4, 5, 6], []], [[7, 8], [9]]],
    "a photo of pads": [[[4, 5, 6], [5]], [[], []]],
    "one word": [[[4], [5]]],
    "a long caption": [[[4 + number % 13 for number in range(70)], [5]]],
    "one photo with one caption": [[[4, 5, 6, 7]]],
}


@pytest.mark.parametrize("attention", ["soft", "hard"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_edges_train_without_nan(dtype: str, attention: str) -> None:
    model = captioner(attention=attention, dtype=dtype, grounding_weight=0.3, label_smoothing=0.1)
    last_scale = 2.0**15
    for name, captions in EDGES.items():
        x, y = batch(captions)
        before = [one.numpy().copy() for one in model.trainable_variables]
        logs = model.train_on_batch(x, y, return_dict=True)
        assert all(np.isfinite(value) for value in logs.values()), (name, logs)
        after = [one.numpy() for one in model.trainable_variables]
        assert all(np.isfinite(one).all() for one in after), name
        learned = any((a != b).any() for a, b in zip(after, before, strict=True))
        # A step whose gradients overflow float16 is left out, and the next ones are scaled less.
        scale = getattr(model.optimizer, "dynamic_scale", None)
        left_out = scale is not None and scale.numpy() < last_scale
        assert learned or left_out, name
        last_scale = 0.0 if scale is None else scale.numpy()
    x, y = batch([[[], []]])  # nothing at all
    assert np.isfinite(model.train_on_batch(x, y, return_dict=True)["loss"])


@pytest.mark.parametrize("attention", ["soft", "hard", "none"])
def test_a_vocabulary_of_one_word_and_one_region(attention: str) -> None:
    """Five words with the special four; alpha of one region is 1."""
    model = captioner(words=1, regions=(1, 1), attention=attention)
    x, y = batch([[[4, 4], [4]]], regions=1)
    losses = [model.train_on_batch(x, y, return_dict=True)["word_loss"] for _ in range(3)]
    assert np.isfinite(losses).all()
    if attention != "none":
        np.testing.assert_allclose(np.asarray(model(x)["attention"]), 1.0, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"self_attention": 1, "positions": True}])
def test_batched_and_single_are_the_same(options: dict) -> None:
    model = captioner(**options)
    x, _ = batch([[[4, 5, 6], [7]], [[8, 9], []], [[5], [6, 7, 8, 4]]])
    together = model(x)
    for photo in range(3):
        for number in range(2):
            alone = model(
                {
                    "regions": x["regions"][photo, None],
                    "tokens": x["tokens"][photo, None, number, None],
                }
            )
            for name in ("logits", "attention", "gate"):
                mine = np.asarray(together[name])[photo, number]
                expected = np.asarray(alone[name])[0, 0]
                np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("attention", ["soft", "hard"])
def test_a_seed_decides_everything(attention: str) -> None:
    def trained(seed: int) -> list[np.ndarray]:
        model = captioner(attention=attention, dropout=0.5)
        keras.utils.set_random_seed(seed)
        for generator in (model.decoder.random, model.decoder.drop_embedding.seed_generator):
            generator.state.assign([seed, 0])
        for _ in range(3):
            model.train_on_batch(x, y)
        return [one.numpy() for one in model.trainable_variables]

    x, y = batch([[[4, 5, 6], [7]], [[8, 9], [5]]])
    one, same = trained(1), trained(1)
    for mine, expected in zip(one, same, strict=True):
        np.testing.assert_array_equal(mine, expected)
    assert any((a != b).any() for a, b in zip(one, trained(2), strict=True))
