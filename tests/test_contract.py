"""What every layer must do, and that every option changes only what it names."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from captioner.attention import SCORES, Attention, Positions, SelfAttention
from captioner.config import ModelConfig
from captioner.decoder import ATTENTIONS, Decoder
from captioner.localizer import Localizer
from captioner.model import Captioner, load_model, save_model

# B=2 photos, C=3 captions, T=5 words, L=7 regions, D=11, V=17, H=13, A=19, E=23
RANDOM = np.random.default_rng(1)
REGIONS = RANDOM.normal(size=(2, 7, 11)).astype("float32")
TOKENS = RANDOM.integers(4, 17, (2, 3, 5)).astype("int32")
QUERY = RANDOM.normal(size=(2, 3, 13)).astype("float32")


def _score(kind: str, **arguments: Any) -> keras.layers.Layer:
    return SCORES[kind](**({} if kind == "general" else {"units": 19}), **arguments)


def _decoder(kind: str, **arguments: Any) -> keras.layers.Layer:
    return Decoder(17, 13, 19, 23, kind, "general", 0.25, 0.75, **arguments)


LAYERS: dict[str, tuple[Callable[..., keras.layers.Layer], Sequence[np.ndarray]]] = {
    **{f"attention-{kind}": (partial(Attention, kind, 19), (QUERY, REGIONS)) for kind in SCORES},
    **{f"score-{kind}": (partial(_score, kind), (QUERY, REGIONS)) for kind in SCORES},
    **{f"decoder-{kind}": (partial(_decoder, kind), (REGIONS, TOKENS)) for kind in ATTENTIONS},
    "positions": (partial(Positions, (7,)), (REGIONS,)),
    "self-attention": (partial(SelfAttention, 3, 5, 0.25), (REGIONS,)),
    "localizer": (partial(Localizer, 17, 19), (REGIONS, TOKENS)),
}


def floats(outputs: Any) -> list[np.ndarray]:
    return [np.asarray(tf.cast(one, tf.float32)) for one in tf.nest.flatten(outputs)]


def unnumbered(weight: keras.Variable) -> str:
    """Its path, without the numbers that Keras gives to names it has seen before."""
    return re.sub(r"(layer_normalization|multi_head_attention)_\d+", r"\1", weight.path)


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer(name: str) -> None:
    """Config round trip, one step of training, and mixed precision."""
    make, inputs = LAYERS[name]
    keras.utils.set_random_seed(5)
    layer = make(name="layer")
    outputs = layer(*inputs)
    assert all(np.isfinite(one).all() for one in floats(outputs))

    text = keras.saving.serialize_keras_object(layer)
    twin = keras.saving.deserialize_keras_object(text)
    assert keras.saving.serialize_keras_object(twin)["config"] == text["config"]
    twin(*inputs)
    assert [unnumbered(one) for one in twin.weights] == [unnumbered(one) for one in layer.weights]
    twin.set_weights(layer.get_weights())
    for mine, other in zip(floats(twin(*inputs)), floats(outputs), strict=True):
        np.testing.assert_array_equal(mine, other)

    mixed = make(name="layer", dtype="mixed_bfloat16")
    mixed(*inputs)
    mixed.set_weights(layer.get_weights())
    assert {weight.dtype for weight in mixed.trainable_weights} == {"float32"}
    mixed_outputs = mixed(*inputs)
    in_half = any(one.dtype == tf.bfloat16 for one in tf.nest.flatten(mixed_outputs))
    assert in_half != (name == "localizer")  # all it says is probabilities and losses: float32
    for mine, other in zip(floats(mixed_outputs), floats(outputs), strict=True):
        np.testing.assert_allclose(mine, other, atol=0.1, rtol=0.1)

    for trained in (layer, mixed):
        before = [weight.numpy() for weight in trained.trainable_weights]
        with tf.GradientTape() as tape:
            loss = sum(
                tf.reduce_sum(tf.square(tf.cast(one, tf.float32)))
                for one in tf.nest.flatten(trained(*inputs))
                if one.dtype.is_floating
            )
        gradients = tape.gradient(loss, trained.trainable_weights)
        keras.optimizers.SGD(1e-3).apply(gradients, trained.trainable_weights)
        for weight, value in zip(trained.trainable_weights, before, strict=True):
            assert np.isfinite(weight.numpy()).all(), weight.path
            assert (weight.numpy() != value).any(), weight.path


# --- Options of the whole model ---

DECODER = {
    "embedding/embeddings", "initial_hidden/kernel", "initial_hidden/bias", "initial_cell/kernel",
    "initial_cell/bias", "gate/kernel", "gate/bias", "head_hidden/kernel", "head_hidden/bias",
    "head_context/kernel", "head_words/kernel", "head_words/bias", "word_kernel",
    "context_kernel", "recurrent_kernel", "lstm_bias",
}  # fmt: skip
ATTEND = {"attention/score/" + name for name in ("key_kernel", "query_kernel", "bias", "vector")}
MULTI_HEAD = {
    f"self_attention_0/{part}/{name}"
    for part, names in {
        "layer_normalization": ("gamma", "beta"),
        **{
            f"multi_head_attention/{role}": ("kernel", "bias")
            for role in ("query", "key", "value", "attention_output")
        },
    }.items()
    for name in names
}
# An option, what it is set to, and the weights that come and go with it.
OPTIONS: list[tuple[str, Any, set[str], set[str]]] = [
    ("attention", "hard", set(), set()),
    ("attention", "none", set(), ATTEND | {"gate/kernel", "gate/bias"}),
    ("score", "dot", set(), {"attention/score/bias", "attention/score/vector"}),
    ("score", "scaled-dot", set(), {"attention/score/bias", "attention/score/vector"}),
    ("score", "general", {"attention/score/kernel"}, ATTEND),
    ("score", "cosine", {"attention/score/scale"},
     {"attention/score/bias", "attention/score/vector"}),
    ("positions", True, {"positions/axis_0", "positions/axis_1"}, set()),
    ("self_attention", 1, MULTI_HEAD, set()),
    ("dropout", 0.25, set(), set()),
    ("word_query", True, set(), set()),
    ("tied", True, {"word_bias"}, {"head_words/kernel", "head_words/bias"}),
    ("regularizer", 0.0, set(), set()),
    ("label_smoothing", 0.1, set(), set()),
    ("expected_share", 0.25, set(), set()),
    ("reward_weight", 0.5, set(), set()),
    ("entropy_weight", 0.5, set(), set()),
    ("baseline_decay", 0.5, set(), set()),
    ("grounding_weight", 0.5, {"localizer/kernel", "localizer/words", "localizer/bias"}, set()),
]  # fmt: skip


def captioner(encoder: keras.Model, **options: Any) -> Captioner:
    keras.utils.set_random_seed(3)
    return Captioner(encoder, [f"w{i}" for i in range(13)], units=13, attention_units=19,
                     embedding_units=23, **options)  # fmt: skip


def names(model: Captioner) -> set[str]:
    paths = {unnumbered(weight) for weight in model.trainable_weights}
    return {path.removeprefix(model.name + "/").removeprefix("decoder/") for path in paths}


def test_options_are_all_here() -> None:
    sizes = {"units", "attention_units", "embedding_units"}
    photos = {"encoder", "weights", "image_size", "layer", "normalize", "resize"}
    named = {name for name, *_ in OPTIONS}
    assert named | sizes | photos == set(ModelConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("option", "value", "more", "fewer"), OPTIONS)
def test_an_option_changes_only_what_it_names(
    tiny_encoder: keras.Model, tmp_path: Path, option: str, value: Any, more: set[str],
    fewer: set[str], dtype: str,
) -> None:  # fmt: skip
    plain, model = captioner(tiny_encoder), captioner(tiny_encoder, **{option: value})
    assert names(plain) == DECODER | ATTEND
    assert names(model) == (names(plain) - fewer) | more
    changed, same = model.get_config(), plain.get_config()
    assert changed.pop(option) == value != same.pop(option)
    for config in (changed, same):
        config.pop("encoder")
        config.pop("name")
    assert changed == same

    # It trains, and comes back from a file as what captions: float32, without what only trains.
    model = captioner(tiny_encoder, dtype=dtype, **{option: value})
    tokens = np.concatenate([np.full((2, 3, 1), 1), TOKENS], axis=-1).astype("int32")
    regions = RANDOM.normal(size=(2, 6, 7)).astype("float16")
    x, y = {"regions": regions, "tokens": tokens[:, :, :-1]}, tokens[:, :, 1:]
    model.compile(optimizer=keras.optimizers.Adam(0.01), jit_compile=False)
    losses = model.fit(x, y, epochs=2, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    twin = model.in_float32()
    save_model(twin, tmp_path / "model.keras")
    loaded = load_model(tmp_path / "model.keras")
    for mine, other in zip(floats(loaded(x)), floats(twin(x)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    for mine, other in zip(floats(model(x)), floats(twin(x)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=0.1, atol=0.1)
