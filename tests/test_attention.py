"""Score functions and attention, against values worked out by hand."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from captioner.attention import (
    SCORES,
    AdditiveScore,
    Attention,
    Positions,
    SelfAttention,
    flat_matmul,
    weighted_sum,
)
from captioner.products import turned

# B=1, C=1, L=2, Q=D=2
QUERY = np.array([[[1.0, 2.0]]], "float32")
KEYS = np.array([[[3.0, 4.0], [-1.0, 0.5]]], "float32")
IDENTITY = np.eye(2, dtype="float32")


def built(name: str, **arguments: object) -> keras.layers.Layer:
    score = SCORES[name](**arguments)
    score.build(QUERY.shape, KEYS.shape)
    return score


def test_dot_by_hand() -> None:
    scores = built("dot")(QUERY, KEYS)
    np.testing.assert_allclose(scores, [[[1 * 3 + 2 * 4, 1 * -1 + 2 * 0.5]]])


def test_scaled_dot_by_hand() -> None:
    scores = built("scaled-dot")(QUERY, KEYS)
    np.testing.assert_allclose(scores, [[[11 / 2**0.5, 0]]], rtol=1e-6)


def test_general_by_hand() -> None:
    score = built("general")
    score.kernel.assign([[1.0, 0.0], [10.0, 1.0]])  # (D, Q): key @ kernel = (k0 + 10 k1, k1)
    np.testing.assert_allclose(score(QUERY, KEYS), [[[43 + 2 * 4, 4 + 2 * 0.5]]])


def test_cosine_by_hand() -> None:
    score = built("cosine", strength=2.0)
    expected = 2 * 11 / (5**0.5 * 5), 0.0
    np.testing.assert_allclose(score(QUERY, KEYS), [[expected]], rtol=1e-5, atol=1e-6)


def test_additive_by_hand() -> None:
    score = built("additive", units=2)
    score.key_kernel.assign(IDENTITY)
    score.query_kernel.assign(2 * IDENTITY)
    score.bias.assign([0.5, -8.0])
    score.vector.assign([[1.0], [3.0]])
    expected = [
        np.tanh(3 + 2 * 1 + 0.5) + 3 * np.tanh(4 + 2 * 2 - 8),
        np.tanh(-1 + 2 * 1 + 0.5) + 3 * np.tanh(0.5 + 2 * 2 - 8),
    ]
    np.testing.assert_allclose(score(QUERY, KEYS), [[expected]], rtol=1e-6)


@pytest.mark.parametrize("name", ["dot", "scaled-dot", "cosine"])
def test_projections_come_before_the_comparison(name: str) -> None:
    score, plain = built(name, units=2), built(name)
    score.query_kernel.assign([[0.0, 1.0], [1.0, 0.0]])  # swaps the channels
    score.key_kernel.assign(2 * IDENTITY)
    np.testing.assert_allclose(
        score(QUERY, KEYS), plain(QUERY[..., ::-1].copy(), 2 * KEYS), rtol=1e-5
    )


@pytest.mark.parametrize("name", ["dot", "scaled-dot", "cosine"])
def test_channels_must_agree_without_projection(name: str) -> None:
    with pytest.raises(ValueError, match="query has 2, keys have 3; give units to project both"):
        SCORES[name]().build((None, None, 2), (None, None, 3))


@pytest.mark.parametrize("name", SCORES)
def test_shapes(name: str) -> None:
    # B=2, C=3, L=5, Q=7, D=11, A=13, values of 17 channels
    random = np.random.default_rng(1)
    query = random.normal(size=(2, 3, 7)).astype("float32")
    keys = random.normal(size=(2, 5, 11)).astype("float32")
    values = random.normal(size=(2, 5, 17)).astype("float32")
    context, weights = Attention(name, units=13)(query, keys, values)
    assert context.shape == (2, 3, 17)
    assert weights.shape == (2, 3, 5)
    np.testing.assert_allclose(ops.sum(weights, -1), np.ones((2, 3)), rtol=1e-5)
    np.testing.assert_allclose(
        context, np.einsum("bcl,bld->bcd", np.asarray(weights), values), rtol=1e-4, atol=1e-5
    )


def test_softmax_and_weighted_sum_by_hand() -> None:
    context, weights = Attention("dot", units=None)(QUERY, KEYS)
    share = 1 / (1 + np.exp(-11.0))
    np.testing.assert_allclose(weights, [[[share, 1 - share]]], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(
        context, [[share * KEYS[0, 0] + (1 - share) * KEYS[0, 1]]], rtol=1e-5
    )


@pytest.mark.parametrize("name", SCORES)
def test_masked_keys_weigh_nothing(name: str) -> None:
    random = np.random.default_rng(2)
    query = random.normal(size=(2, 3, 7)).astype("float32")
    keys = random.normal(size=(2, 5, 7)).astype("float32")
    mask = np.array([[True, True, False, True, False], [True, False, False, False, False]])
    attention = Attention(name, units=13)
    context, weights = attention(query, keys, keys_mask=mask)
    assert np.all(np.asarray(weights)[:, 0][~mask] == 0)
    shorter, _ = attention(query[:1], keys[:1, [0, 1, 3]])
    np.testing.assert_allclose(context[:1], shorter, rtol=1e-4, atol=1e-6)


def test_weights_are_float32_in_mixed_precision() -> None:
    attention = Attention("additive", units=3, dtype="mixed_bfloat16")
    context, weights = attention(QUERY, KEYS)
    assert context.dtype == "bfloat16"
    assert weights.dtype == "float32"
    np.testing.assert_allclose(ops.sum(weights, -1), [[1.0]], rtol=1e-6)


@pytest.mark.parametrize("name", SCORES)
def test_config_round_trip(name: str) -> None:
    attention = Attention(name, units=3)
    twin = Attention.from_config(attention.get_config())
    assert twin.get_config() == attention.get_config()
    attention(QUERY, KEYS)
    twin(QUERY, KEYS)
    assert [w.shape for w in twin.weights] == [w.shape for w in attention.weights]
    score = SCORES[name].from_config(attention.score.get_config())
    assert score.get_config() == attention.score.get_config()


def test_unknown_score() -> None:
    with pytest.raises(ValueError, match="score must be one of additive, dot"):
        Attention("sine")


def test_flat_matmul_is_matmul() -> None:
    random = np.random.default_rng(3)
    x, kernel = random.normal(size=(2, 3, 5)), random.normal(size=(5, 7))
    np.testing.assert_allclose(flat_matmul(ops.array(x), ops.array(kernel)), x @ kernel, rtol=1e-5)


def test_weighted_sum_by_hand() -> None:
    np.testing.assert_allclose(weighted_sum([[[0.25, 0.75]]], KEYS), [[[0.0, 1.375]]])


def test_self_attention_is_a_residual_over_all_positions() -> None:
    # B=2, L=5, D=7, 3 heads of 11 channels
    values = np.random.default_rng(4).normal(size=(2, 5, 7)).astype("float32")
    layer = SelfAttention(heads=3, head_units=11)
    outputs, scores = layer(values, return_scores=True)
    assert outputs.shape == (2, 5, 7)
    assert scores.shape == (2, 3, 5, 5)
    np.testing.assert_allclose(ops.sum(scores, -1), np.ones((2, 3, 5)), rtol=1e-5)
    # Order of the regions is nothing to it.
    turned = layer(values[:, ::-1].copy())
    np.testing.assert_allclose(turned, outputs[:, ::-1], rtol=1e-4, atol=1e-5)
    # A region far away changes the first one.
    changed = values.copy()
    changed[:, -1] = np.arange(7)
    assert np.abs(np.asarray(layer(changed) - outputs)[:, 0]).max() > 1e-4
    # With nothing mixed in, what remains is the input.
    for weight in layer.attention.weights:
        weight.assign(ops.zeros_like(weight))
    np.testing.assert_allclose(layer(values), values, rtol=1e-6)


def test_self_attention_drops_weights_only_while_training() -> None:
    values = np.random.default_rng(5).normal(size=(2, 5, 7)).astype("float32")
    layer = SelfAttention(heads=3, head_units=11, dropout=0.5)
    np.testing.assert_array_equal(layer(values), layer(values))
    assert np.abs(np.asarray(layer(values, training=True) - layer(values))).max() > 1e-4


def test_positions_by_hand() -> None:
    values = np.random.default_rng(5).normal(size=(2, 6, 5)).astype("float32")
    layer = Positions((2, 3))
    layer.build(values.shape)
    rows, columns = layer.axes
    rows.assign([[10] * 5, [20] * 5])
    columns.assign([[1] * 5, [2] * 5, [3] * 5])
    added = np.asarray(layer(values)) - values
    for channel in range(5):
        np.testing.assert_allclose(added[1, :, channel], [11, 12, 13, 21, 22, 23], atol=1e-5)


# B=2, C=3, L=5, A=7, Q=11, D=13
B, C, L, A, Q, D = 2, 3, 5, 7, 11, 13


def test_the_gradient_of_the_additive_score_is_tensorflows() -> None:
    """It is written by hand, because it makes the tanh again instead of keeping it."""
    layer = AdditiveScore(A)
    layer.build((B, C, Q), (B, L, D))
    random = np.random.default_rng(5)
    shapes = ((B, L, A), (B, C, A), (A, 1), (B, C, L))
    prepared, projected, vector, upstream = (
        tf.constant(random.normal(size=shape), tf.float32) for shape in shapes
    )
    layer.vector.assign(vector)

    def gradients(compare: Callable[..., Any]) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch([prepared, projected])
            total = tf.reduce_sum(compare(projected, prepared) * upstream)
        return tape.gradient(total, [prepared, projected, layer.vector.value])

    def plain(projected: Any, prepared: Any) -> Any:
        hidden = tf.tanh(prepared[:, None] + projected[:, :, None])
        return (hidden @ layer.vector)[..., 0]

    np.testing.assert_allclose(
        layer.compare(projected, prepared), plain(projected, prepared), rtol=1e-5, atol=1e-6
    )
    for mine, other in zip(gradients(layer.compare), gradients(plain), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_sum_with_values_written_out_is_the_same() -> None:
    random = np.random.default_rng(6)
    weights, values, upstream = (
        tf.constant(random.normal(size=shape), tf.float32)
        for shape in ((B, C, L), (B, L, D), (B, C, D))
    )

    def gradients(transposed: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch([weights, values])
            total = tf.reduce_sum(weighted_sum(weights, values, transposed) * upstream)
        return tape.gradient(total, [weights, values])

    written_out = turned(values)
    for mine, other in zip(gradients(written_out), gradients(None), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


def test_self_attention_in_one_row_is_keras_own() -> None:
    layer = SelfAttention(heads=2, head_units=3, dropout=0.0)
    layer.build((B, L, D))
    values = np.random.default_rng(7).normal(size=(B, L, D)).astype("float32")
    plain = keras.layers.MultiHeadAttention(2, 3, flash_attention=False)
    plain.build((B, L, D), (B, L, D))
    for mine, its_twin in zip(plain.weights, layer.attention.weights, strict=True):
        assert mine.shape == its_twin.shape
        its_twin.assign(keras.random.normal(mine.shape))
        mine.assign(its_twin)
    normal = layer.normalise(values)
    mixed, scores = plain(normal, normal, return_attention_scores=True)
    mine, my_scores = layer(values, return_scores=True)
    np.testing.assert_allclose(mine, values + mixed, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(my_scores, scores, rtol=1e-4, atol=1e-6)
