"""Hard attention's gradient against the exact one, by going through everything it may draw."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from captioner.model import Captioner
from captioner.reinforce import BASELINE_POSITIONS, rewards, surrogate, updated_baseline

REAL = np.array([[[1, 1, 1], [1, 1, 0]]], "float32")  # B=1, C=2, T=3


def test_rewards_are_what_the_rest_of_the_caption_said_better_than_usual() -> None:
    log_likelihood = np.array([[[-1.0, -2.0, -4.0], [-3.0, -5.0, -9.0]]], "float32")
    baseline = np.zeros(BASELINE_POSITIONS, "float32")
    baseline[:3] = -1, -1, -3
    np.testing.assert_allclose(
        rewards(log_likelihood, REAL, baseline),
        [[[0 - 1 - 1, -1 - 1, -1], [-2 - 4, -4, 0]]],
    )


def test_surrogate_by_hand() -> None:
    reward = np.array([[[1.0, -2.0, 3.0], [4.0, 5.0, 100.0]]], "float32")
    log_chosen = np.log(np.array([[[0.5, 0.25, 1.0], [0.5, 0.5, 0.5]]], "float32"))
    alpha = np.tile(np.array([0.5, 0.5, 0.0], "float32"), (1, 2, 3, 1))
    entropy = 5 * np.log(2)  # of five real words
    reward_part = np.log(0.5) - 2 * np.log(0.25) + 0 + 4 * np.log(0.5) + 5 * np.log(0.5)
    drawn = np.ones(1, "float32")
    loss = surrogate(reward, log_chosen, alpha, REAL, drawn, 2.0, 0.1)
    np.testing.assert_allclose(loss, -2 * reward_part - 0.1 * entropy, rtol=1e-6)
    assert surrogate(reward, log_chosen, alpha, REAL, np.zeros(1, "float32"), 2.0, 0.1) == 0


def test_weights_of_zero_give_no_nan() -> None:
    scores = tf.Variable([[[[200.0, 0.0, -200.0]]]])  # alpha = 1, 0, 0 in float32
    one = np.ones((1, 1, 1), "float32")
    with tf.GradientTape() as tape:
        log_alpha = ops.log_softmax(scores, axis=-1)
        loss = surrogate(
            5 * one, log_alpha[..., 2], ops.exp(log_alpha), one, np.ones(1, "float32"), 1.0, 1.0
        )
    assert np.isfinite(loss.numpy())
    assert np.isfinite(tape.gradient(loss, scores).numpy()).all()


def test_baseline_moves_where_there_are_words() -> None:
    log_likelihood = np.array([[[-1.0, -2.0, -4.0], [-3.0, -6.0, -9.0]]], "float32")
    baseline = np.full(BASELINE_POSITIONS, -10, "float32")
    new = np.asarray(updated_baseline(baseline, log_likelihood, REAL, np.ones(1, "float32"), 0.9))
    np.testing.assert_allclose(new[:4], [-9 - 0.2, -9 - 0.4, -9 - 0.4, -10], rtol=1e-6)
    unchanged = updated_baseline(baseline, log_likelihood, REAL, np.zeros(1, "float32"), 0.9)
    np.testing.assert_array_equal(unchanged, baseline)
    long = np.full((1, 1, BASELINE_POSITIONS + 7), -1.0, "float32")
    ones = np.ones_like(long)
    assert rewards(long, ones, baseline).shape == long.shape
    np.testing.assert_allclose(
        updated_baseline(baseline, long, ones, np.ones(1, "float32"), 0.5), -5.5, rtol=1e-6
    )


# --- The whole estimator ---

L, TOKENS = 3, np.array([[[1, 4, 5]]], "int32")  # <start>, a word, a word
CAPTIONS = 4096  # copies of the caption, each with its own draw
BATCHES = 8


@pytest.fixture(scope="module")
def model() -> Captioner:
    keras.utils.set_random_seed(11)
    inputs = keras.Input((4, 4, 3))
    regions = keras.layers.Dense(5)(keras.layers.Reshape((16, 3))(inputs)[:, :L])
    outputs = keras.layers.Reshape((L, 5), name="regions")(regions)
    model = Captioner(
        keras.Model(inputs, outputs), ["a", "b", "c"], units=7, attention_units=2,
        embedding_units=3, attention="hard", dropout=0.0, regularizer=0.0, expected_share=0.0,
        reward_weight=1.0, entropy_weight=0.0,
    )  # fmt: skip
    for weight in model.decoder.trainable_weights:  # so that which region it is matters
        weight.assign(keras.random.normal(weight.shape, stddev=1.0, seed=len(weight.path)))
    return model


REGIONS = np.random.default_rng(12).normal(size=(1, L, 5)).astype("float32")


def gradients(tape: tf.GradientTape, loss: tf.Tensor, model: Captioner) -> dict[str, np.ndarray]:
    """By name, dense, of the weights that the loss reaches."""
    weights = model.decoder.trainable_weights
    return {
        weight.path: np.zeros(weight.shape)
        if gradient is None
        else tf.convert_to_tensor(gradient).numpy()
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True)
    }


def exact_parts(model: Captioner) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Both parts of minus the bound's gradient per word, summed over all L^2 drawn sequences."""
    decoder = model.decoder
    likelihood_part, score_part = None, None
    for sequence in itertools.product(range(L), repeat=2):
        remaining = iter(sequence)

        def choose(log_alpha: tf.Tensor, look: str, remaining=remaining) -> tf.Tensor:
            return tf.one_hot([[next(remaining)]], L)

        original, decoder._choose = decoder._choose, choose
        try:
            with tf.GradientTape(persistent=True) as tape:
                memory, state = decoder.begin(ops.convert_to_tensor(REGIONS))
                log_y, log_s = 0.0, 0.0
                for position in range(2):
                    previous = TOKENS[:, :, position]
                    query = ops.reshape(state.hidden, (1, 1, 7))
                    projected = decoder.attention.score.project(query)
                    log_alpha = decoder.attention.log_weights(projected, memory.keys)
                    log_s += log_alpha[0, 0, sequence[position]]
                    output = decoder.step(previous, state, memory, look="argmax")
                    state = output.state
                    log_p = ops.log_softmax(output.logits)
                    log_y += log_p[0, 0, TOKENS[0, 0, position + 1]]
                probability = tf.stop_gradient(tf.exp(log_s))
                first = -probability * log_y / 2
                second = -probability * tf.stop_gradient(log_y) * log_s / 2
            parts = gradients(tape, first, model), gradients(tape, second, model)
        finally:
            decoder._choose = original
        if likelihood_part is None:
            likelihood_part, score_part = parts
        else:
            for total, part in zip((likelihood_part, score_part), parts, strict=True):
                for name in total:
                    total[name] += part[name]
    assert likelihood_part is not None
    assert score_part is not None
    return likelihood_part, score_part


def sampled_gradients(
    model: Captioner, reward_weight: float, captions: int, batches: int
) -> list[dict[str, np.ndarray]]:
    """Gradients of the loss that `fit` uses, each the mean over `captions` draws."""
    model.reward_weight = reward_weight
    tokens = np.repeat(TOKENS, captions, axis=1)
    x, y = {"regions": REGIONS, "tokens": tokens[:, :, :-1]}, tokens[:, :, 1:]
    found = []
    for _ in range(batches):
        with tf.GradientTape(persistent=True) as tape:
            loss = model.compute_loss(x, y, model(x, training=True), training=True)
        found.append(gradients(tape, loss, model))
    return found


@pytest.mark.parametrize("baseline", ["none", "moving average"])
def test_mean_of_many_samples_is_the_exact_gradient(model: Captioner, baseline: str) -> None:
    """Term by term, for every parameter, within five standard errors."""
    likelihood_part, score_part = exact_parts(model)
    model.baseline.assign(ops.zeros_like(model.baseline))
    model.baseline_decay = 1.0 if baseline == "none" else 0.5
    for reward_weight, expected in (
        (0.0, likelihood_part),
        (1.0, {name: likelihood_part[name] + score_part[name] for name in score_part}),
    ):
        samples = sampled_gradients(model, reward_weight, CAPTIONS, BATCHES)
        for name, exact in expected.items():
            values = np.stack([sample[name] for sample in samples])
            error = values.std(axis=0, ddof=1) / np.sqrt(BATCHES)
            # The standard error itself is estimated from few batches: hence the floor.
            allowed = 6 * np.maximum(error, np.abs(exact).max() * 2e-3) + 1e-5
            assert np.all(np.abs(values.mean(axis=0) - exact) < allowed), name
    # The second part is there, and is no accident of sampling.
    path = next(name for name in score_part if "query_kernel" in name)
    assert np.abs(score_part[path]).max() > 1e-3


def test_the_baseline_lowers_the_variance(model: Captioner) -> None:
    def variance(decay: float) -> float:
        model.baseline.assign(ops.zeros_like(model.baseline))
        model.baseline_decay = decay
        sampled_gradients(model, 1.0, 512, 4)  # lets the baseline settle
        samples = sampled_gradients(model, 1.0, 16, 60)
        name = next(name for name in samples[0] if "query_kernel" in name)
        return float(np.stack([sample[name] for sample in samples]).var(axis=0).sum())

    assert variance(0.9) < 0.7 * variance(1.0)


def test_expected_share_of_one_is_soft_attention(model: Captioner) -> None:
    soft = Captioner(
        model.encoder, ["a", "b", "c"], units=7, attention_units=2, embedding_units=3,
        dropout=0.0, regularizer=0.0,
    )  # fmt: skip
    soft.take_weights(model)
    x, y = {"regions": REGIONS, "tokens": TOKENS[:, :, :-1]}, TOKENS[:, :, 1:]
    model.train_as_soft(True)
    try:
        hard_loss = model.compute_loss(x, y, model(x, training=True), training=True)
    finally:
        model.train_as_soft(False)
    assert model.expected_share.numpy() == model.decoder.expected_share == 0
    np.testing.assert_allclose(
        hard_loss, soft.compute_loss(x, y, soft(x, training=True)), rtol=1e-5
    )


def test_saved_maps_are_alpha_whatever_is_looked_at(model: Captioner) -> None:
    memory, state = model.decoder.begin(ops.convert_to_tensor(REGIONS))
    outputs = {
        look: model.decoder.step(TOKENS[:, :, 0], state, memory, look)
        for look in ("expected", "sampled", "argmax")
    }
    for output in outputs.values():
        np.testing.assert_allclose(output.attention, outputs["expected"].attention)
    assert np.abs(np.asarray(outputs["argmax"].logits - outputs["expected"].logits)).max() > 1e-3


def test_samples_follow_alpha(model: Captioner) -> None:
    log_alpha = np.log(np.array([0.7, 0.1, 0.2], "float32"))
    drawn = model.decoder._choose(
        ops.convert_to_tensor(np.tile(log_alpha, (1, 20000, 1))), "sampled"
    )
    np.testing.assert_allclose(np.asarray(drawn).mean(axis=(0, 1)), [0.7, 0.1, 0.2], atol=0.015)
