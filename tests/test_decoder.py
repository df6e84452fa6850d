"""The decoder against the paper's equations, written out in numpy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from captioner.decoder import Decoder

# B=2 photos, C=3 captions, T=4 words, L=6 regions, D=7 channels, H=11, A=5, E=13, V=17
B, C, T, L, D, H, A, E, V = 2, 3, 4, 6, 7, 11, 5, 13, 17


# Few regions go through the context's kernels before they are weighed, many after.
FEW_AND_MANY = pytest.mark.parametrize("regions", [L, 19], indirect=True)


@pytest.fixture
def regions(request: pytest.FixtureRequest) -> np.ndarray:
    number = getattr(request, "param", L)
    return np.random.default_rng(1).normal(size=(B, number, D)).astype("float32")


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(2).integers(0, V, (B, C, T)).astype("int32")


def decoder(**arguments: object) -> Decoder:
    keras.utils.set_random_seed(3)
    layer = Decoder(V, H, A, E, name="decoder", **arguments)
    layer.build((None, L, D))
    # Biases start at zero: any value will do, as long as leaving one out is seen.
    for weight in layer.weights:
        if "seed" not in weight.path:
            weight.assign(keras.random.normal(weight.shape, stddev=0.5))
    return layer


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def paper(layer: Decoder, regions: np.ndarray, words: np.ndarray) -> dict[str, np.ndarray]:
    """One photo, one caption, one region at a time: Xu et al. 2015, eqs. 1-7."""
    value = {weight.path.split("decoder/")[-1]: np.asarray(weight) for weight in layer.weights}
    mean = regions.mean(axis=0)
    h = np.tanh(mean @ value["initial_hidden/kernel"] + value["initial_hidden/bias"])
    c = np.tanh(mean @ value["initial_cell/kernel"] + value["initial_cell/bias"])
    logits, alphas, betas = [], [], []
    for word in words:
        embedded = value["embedding/embeddings"][word]
        score = "attention/score/"
        e = [
            value[f"{score}vector"][:, 0]
            @ np.tanh(
                a_i @ value[f"{score}key_kernel"]
                + (np.concatenate([h, embedded]) if layer.word_query else h)
                @ value[f"{score}query_kernel"]
                + value[f"{score}bias"]
            )
            for a_i in regions
        ]
        alpha = np.exp(e) / np.exp(e).sum()
        beta = sigmoid(h @ value["gate/kernel"] + value["gate/bias"])
        z = beta * sum(weight * a_i for weight, a_i in zip(alpha, regions, strict=True))
        lstm = (
            embedded @ value["word_kernel"]
            + z @ value["context_kernel"]
            + h @ value["recurrent_kernel"]
            + value["lstm_bias"]
        )
        i, f, g, o = np.split(lstm, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        head = np.tanh(
            embedded
            + h @ value["head_hidden/kernel"]
            + value["head_hidden/bias"]
            + z @ value["head_context/kernel"]
        )
        if layer.tied:
            logits.append(value["embedding/embeddings"] @ head + value["word_bias"])
        else:
            logits.append(head @ value["head_words/kernel"] + value["head_words/bias"])
        alphas.append(alpha)
        betas.append(beta[0])
    return {"logits": np.array(logits), "attention": np.array(alphas), "gate": np.array(betas)}


@FEW_AND_MANY
@pytest.mark.parametrize("option", [None, "word_query", "tied"])
def test_teacher_forcing_is_the_papers_mathematics(
    regions: np.ndarray, tokens: np.ndarray, option: str | None
) -> None:
    layer = decoder(**{option: True} if option else {})
    outputs = layer(regions, tokens)
    assert outputs["logits"].shape == (B, C, T, V)
    assert outputs["attention"].shape == (B, C, T, regions.shape[1])
    assert outputs["gate"].shape == (B, C, T)
    for photo in range(B):
        for caption in range(C):
            expected = paper(layer, regions[photo], tokens[photo, caption])
            for name, value in expected.items():
                np.testing.assert_allclose(
                    outputs[name][photo, caption], value, rtol=2e-4, atol=2e-5, err_msg=name
                )


@pytest.mark.parametrize("score", ["additive", "dot", "scaled-dot", "general", "cosine"])
@pytest.mark.parametrize("attention", ["soft", "none"])
@pytest.mark.parametrize("word_query", [False, True])
def test_free_steps_agree_with_teacher_forcing(
    attention: str, score: str, word_query: bool, regions: np.ndarray, tokens: np.ndarray
) -> None:
    layer = decoder(attention=attention, score=score, word_query=word_query)
    forced = layer(regions, tokens)
    memory, state = layer.begin(regions, captions=C)
    for position in range(T):
        output = layer.step(tokens[:, :, position], state, memory)
        state = output.state
        np.testing.assert_allclose(
            output.logits, forced["logits"][:, :, position], rtol=1e-4, atol=1e-5
        )
        if attention == "none":
            assert output.attention is None
            assert output.gate is None
        else:
            np.testing.assert_allclose(
                output.attention, forced["attention"][:, :, position], rtol=1e-4, atol=1e-6
            )
            np.testing.assert_allclose(
                output.gate, forced["gate"][:, :, position], rtol=1e-4, atol=1e-6
            )


def test_without_attention_every_word_sees_the_mean(
    regions: np.ndarray, tokens: np.ndarray
) -> None:
    layer = decoder(attention="none")
    outputs = layer(regions, tokens)
    assert set(outputs) == {"logits"}
    shuffled = layer(regions[:, ::-1].copy(), tokens)
    np.testing.assert_allclose(outputs["logits"], shuffled["logits"], rtol=1e-4, atol=1e-5)


def test_a_caption_does_not_depend_on_its_neighbours(
    regions: np.ndarray, tokens: np.ndarray
) -> None:
    layer = decoder()
    together = layer(regions, tokens)
    alone = layer(regions[1:], tokens[1:, 2:])
    np.testing.assert_allclose(together["logits"][1:, 2:], alone["logits"], rtol=1e-4, atol=1e-5)


def test_later_words_do_not_change_earlier_ones(regions: np.ndarray, tokens: np.ndarray) -> None:
    layer = decoder()
    changed = tokens.copy()
    changed[:, :, 2:] = (changed[:, :, 2:] + 1) % V
    first, second = layer(regions, tokens)["logits"], layer(regions, changed)["logits"]
    np.testing.assert_allclose(first[:, :, :2], second[:, :, :2], rtol=1e-5)
    assert np.abs(np.asarray(first - second)[:, :, 2:]).max() > 0.01


@pytest.mark.parametrize("word_query", [False, True])
def test_which_words_attention_has_heard(
    regions: np.ndarray, tokens: np.ndarray, word_query: bool
) -> None:
    """In the paper alpha_t knows of y_{t-2} and all before, not of y_{t-1}, its input."""
    changed = tokens.copy()
    changed[:, :, 1] = (changed[:, :, 1] + 1) % V
    layer = decoder(word_query=word_query)
    one, other = (np.asarray(layer(regions, words)["attention"]) for words in (tokens, changed))
    difference = np.abs(one - other).max(axis=(0, 1, 3))  # per word
    assert list(difference > 1e-3) == [False, word_query, True, True]


def test_hard_attention_draws_per_word_and_flips_a_coin_per_photo(
    regions: np.ndarray, tokens: np.ndarray
) -> None:
    layer = decoder(attention="hard", dropout=0.0, expected_share=0.5)
    many = np.repeat(regions[:1], 1000, axis=0)
    outputs = layer(many, np.repeat(tokens[:1], 1000, axis=0), training=True)
    assert set(outputs) == {"logits", "attention", "gate", "log_chosen", "drawn"}
    drawn = np.asarray(outputs["drawn"])
    assert set(drawn) == {0.0, 1.0}
    assert 430 < drawn.sum() < 570
    # What was drawn is one of the regions, and not always the same.
    log_alpha = np.log(np.asarray(outputs["attention"]))
    gaps = np.abs(np.asarray(outputs["log_chosen"])[..., None] - log_alpha).min(axis=-1)
    np.testing.assert_allclose(gaps, 0, atol=1e-4)
    # Photos that saw the expected context agree with each other and with soft attention.
    soft = layer(many[:1], tokens[:1])  # not training: expected
    logits = np.asarray(outputs["logits"])
    np.testing.assert_allclose(
        logits[drawn == 0], np.repeat(soft["logits"], int((drawn == 0).sum()), axis=0),
        rtol=1e-3, atol=1e-4,
    )  # fmt: skip
    assert np.abs(logits[drawn == 1] - np.asarray(soft["logits"])).max(axis=(1, 2, 3)).min() > 1e-3


def test_sampled_looks_are_reproducible(regions: np.ndarray, tokens: np.ndarray) -> None:
    layer = decoder(attention="hard")
    memory, state = layer.begin(regions, captions=C)

    def look(seed: int) -> np.ndarray:
        layer.reseed(seed)
        return np.asarray(layer.step(tokens[:, :, 0], state, memory, "sampled").logits)

    np.testing.assert_array_equal(look(1), look(1))
    assert np.abs(look(1) - look(2)).max() > 1e-3


def test_dropout_only_while_training(regions: np.ndarray, tokens: np.ndarray) -> None:
    layer = decoder(dropout=0.5)
    np.testing.assert_array_equal(
        layer(regions, tokens)["logits"], layer(regions, tokens)["logits"]
    )
    first = layer(regions, tokens, training=True)["logits"]
    second = layer(regions, tokens, training=True)["logits"]
    assert np.abs(np.asarray(first - second)).max() > 0.01


def test_forget_gate_starts_open() -> None:
    layer = Decoder(V, H, A, E)
    layer.build((None, L, D))
    expected = np.concatenate([np.zeros(H), np.ones(H), np.zeros(2 * H)])
    np.testing.assert_array_equal(layer.lstm_bias, expected)


def test_unknown_length_is_refused(regions: np.ndarray) -> None:
    import tensorflow as tf

    layer = decoder()

    @tf.function(input_signature=[tf.TensorSpec((B, C, None), tf.int32)])
    def run(tokens):
        return layer(regions, tokens)

    with pytest.raises(ValueError, match="give tokens a static shape"):
        run(np.zeros((B, C, T), np.int32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"attention": "sharp"}, "attention must be one of"), ({"score": "sum"}, "score must be")],
)
def test_unknown_kinds(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Decoder(V, **arguments)


@FEW_AND_MANY
@pytest.mark.parametrize("option", [None, "word_query", "tied"])
def test_gradients_are_those_of_the_loss(
    regions: np.ndarray, tokens: np.ndarray, option: str | None
) -> None:
    """Along a random direction in all weights of a kind, and in the regions, as of an encoder that
    is fine-tuned, against a difference of two losses."""
    layer = decoder(**{option: True} if option else {})
    encoded = keras.Variable(regions, name="regions")
    weights = [*layer.trainable_weights, encoded]

    def loss() -> tf.Tensor:
        outputs = layer(tf.convert_to_tensor(encoded), tokens)
        return tf.reduce_mean(outputs["logits"] ** 2) + tf.reduce_mean(outputs["attention"] ** 2)

    with tf.GradientTape() as tape:
        value = loss()
    gradients = tape.gradient(value, weights)
    random = np.random.default_rng(6)
    for weight, gradient in zip(weights, gradients, strict=True):
        start, direction = weight.numpy(), random.normal(size=weight.shape).astype("float32")
        losses = []
        for step in (0.01, -0.01):
            weight.assign(start + step * direction)
            losses.append(float(loss()))
        weight.assign(start)
        expected = (losses[0] - losses[1]) / 0.02
        slope = float(tf.reduce_sum(tf.convert_to_tensor(gradient) * direction))
        assert slope == pytest.approx(expected, rel=0.03, abs=0.002), weight.path


@FEW_AND_MANY
@pytest.mark.parametrize("attention", ["soft", "none"])
@pytest.mark.parametrize("score", ["additive", "general"])
def test_words_alone_give_the_same_losses_and_gradients(
    regions: np.ndarray, tokens: np.ndarray, attention: str, score: str
) -> None:
    """Captions of 4, 2 and 3 words, and of 1, 3 and none: in no order of length."""
    layer = decoder(attention=attention, score=score)
    lengths = np.array([[4, 2, 3], [1, 3, 0]])
    words = np.arange(T) < lengths[..., None]  # (B, C, T)
    place = np.flatnonzero(words)
    weights = layer.trainable_weights

    def run(packed: bool) -> tuple[dict, list]:
        with tf.GradientTape() as tape:
            if packed:
                outputs = layer(regions, tokens, words=tf.constant(words))
                logits = tf.gather(outputs["logits"], tf.argsort(outputs["place"]))
            else:
                outputs = layer(regions, tokens)
                logits = tf.gather(tf.reshape(outputs["logits"], (-1, V)), place)
            total = tf.reduce_sum(logits**2)
            if attention == "soft":
                total += tf.reduce_sum(outputs["attention"][words] ** 2)
        return {**outputs, "logits": logits}, tape.gradient(total, weights)

    (packed, gradients), (plain, expected) = run(True), run(False)
    assert sorted(packed["place"].numpy()) == place.tolist()
    np.testing.assert_allclose(packed["logits"], plain["logits"], rtol=1e-4, atol=1e-5)
    if attention == "soft":
        for name in ("attention", "gate"):
            assert packed[name].shape == plain[name].shape
            np.testing.assert_allclose(packed[name][words], plain[name][words], rtol=1e-4)
    for weight, mine, other in zip(weights, gradients, expected, strict=True):
        mine, other = tf.convert_to_tensor(mine), tf.convert_to_tensor(other)
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-4, err_msg=weight.path)


def test_regions_may_go_through_the_kernels_first_or_last() -> None:
    """The same losses and gradients: with more words than this a step asks regions, with fewer the
    weighted sums. What follows the words that count must not change anything."""
    keras.config.set_floatx("float64")
    try:
        layer = decoder()
        random = np.random.default_rng(8)
        encoded = tf.Variable(random.normal(size=(B, 7, D)))
        words = random.integers(0, V, (B, 1, 7))  # 2 x 7 regions > 3 x 4 words; < 3 x 7

        def run(length: int) -> list:
            with tf.GradientTape() as tape:
                outputs = layer(tf.convert_to_tensor(encoded), words[..., :length])
                loss = sum(
                    tf.reduce_sum(outputs[name][:, :, :4] ** 2)
                    for name in ("logits", "attention", "gate")
                )
            gradients = tape.gradient(loss, [*layer.trainable_weights, encoded])
            return [loss, *map(tf.convert_to_tensor, gradients)]

        for last, first in zip(run(4), run(7), strict=True):
            # alpha and beta are float32 whatever the policy
            np.testing.assert_allclose(last, first, rtol=1e-4, atol=1e-5)
    finally:
        keras.config.set_floatx("float32")
