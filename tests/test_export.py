"""Exported models against the model that they were made of."""

import base64
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from PIL import Image

import captioner
from captioner import datasets, inference, metrics
from captioner.__main__ import main
from captioner.config import DataConfig, SearchConfig
from captioner.export import _in_words, write_litert, write_saved_model
from captioner.image_graph import decoded, squares
from captioner.images import RESIZES, load_square
from captioner.inference import Writer, describe_files
from captioner.model import Captioner, save_model
from captioner.search import Hypothesis
from captioner.text import Vocabulary, join

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
WORDS = ["a", "man", "'s", "dog", "runs", "n't", *(f"word{number}" for number in range(7))]
KINDS: dict[str, dict[str, Any]] = {
    "soft": {},
    "none": {"attention": "none"},
    "hard": {"attention": "hard", "score": "general", "word_query": True},
    "self": {"self_attention": 1, "positions": True, "score": "cosine", "resize": "crop"},
}


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Any:
    """Small models whose words differ from photo to photo."""
    keras.utils.set_random_seed(7)
    encoder = request.getfixturevalue("tiny_encoder")

    def of_kind(kind: str, **options: Any) -> Captioner:
        model = Captioner(
            encoder, WORDS, units=11, attention_units=5, embedding_units=3,
            **{**KINDS[kind], **options},
        )  # fmt: skip
        for weight in model.decoder.trainable_weights:
            weight.assign(4 * weight)
        return model

    return of_kind


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A JPEG on its side, a transparent PNG, a plain one."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(4)
    paths = [folder / name for name in ("side.jpg", "clear.png", "plain.png")]
    for path, channels in zip(paths, (3, 4, 3), strict=True):
        coarse = random.integers(0, 255, (5, 7, channels), dtype="uint8")
        exif = Image.Exif()
        exif[0x0112] = 6 if path.suffix == ".jpg" else 1
        Image.fromarray(coarse).resize((61, 43)).save(path, exif=exif)
    return paths


def random_squares(photos: int) -> np.ndarray:
    """Of one colour where a region stands."""
    colours = np.random.default_rng(5).integers(0, 255, (photos, 2, 3, 3), dtype="uint8")
    return colours.repeat(12, axis=1).repeat(8, axis=2)


def assert_same(outputs: dict[str, Any], expected: list[list[Hypothesis]]) -> None:
    """That the outputs, of every photo in the batch, are what the model itself wrote."""
    outputs = {name: np.asarray(values) for name, values in outputs.items()}
    assert len(outputs["tokens"]) == len(expected)
    for place, (best,) in enumerate(expected):
        length = len(best.tokens)
        assert outputs["tokens"][place, :length].tolist() == list(best.tokens)
        assert outputs["score"][place] == pytest.approx(best.score, rel=1e-4)
        pairs = {"probabilities": np.exp(best.log_probabilities)}
        if best.attention is not None:
            pairs.update(attention=best.attention.reshape(length, 2, 3), gate=best.gate)
        for name, values in pairs.items():
            np.testing.assert_allclose(outputs[name][place, :length], values, rtol=1e-3, atol=1e-5)
        for name in ("tokens", *pairs):
            assert outputs[name].shape[1] == 7
            assert not outputs[name][place, length:].any()
        assert set(outputs) - {"text", "words"} == {"tokens", "score", *pairs}


@pytest.mark.parametrize(
    ("kind", "beam", "resize"),
    [("soft", 3, "pad"), ("none", 1, "crop")],
)
def test_saved_model(
    make: Any, photos: list[Path], tmp_path: Path, kind: str, beam: int, resize: str
) -> None:
    writer, options = Writer(make(kind, resize=resize)), SearchConfig(beam=beam, max_words=7)
    write_saved_model(writer, tmp_path / "model", options)
    loaded = tf.saved_model.load(tmp_path / "model")
    assert sorted(loaded.signatures) == ["caption", "caption_pixels", "serving_default"]

    seen = random_squares(5)
    expected = writer.write(writer.encode(seen), options)
    assert len({best.tokens for (best,) in expected}) > 1
    assert_same(loaded.signatures["caption_pixels"](pixels=seen), expected)

    content = [path.read_bytes() for path in photos]
    outputs = loaded.signatures["caption"](image_bytes=tf.constant(content))
    seen = np.concatenate([squares(decoded(file)[None], 24, resize) for file in content])
    expected = writer.write(writer.encode(seen), options)
    assert_same(outputs, expected)
    for words, text, (best,) in zip(outputs["words"], outputs["text"], expected, strict=True):
        kept = writer.model.vocabulary.decode(best.tokens)
        assert [word.decode() for word in words.numpy()] == [*kept, *[""] * (7 - len(kept))]
        assert text.numpy().decode() == join(kept)


MIXED = ["狗", "在", "草地", "t恤", "🐶", "the", "café", *WORDS[:6]]


def test_text_is_spaced_as_its_scripts_want() -> None:
    vocabulary = Vocabulary(MIXED)
    ids = [[4, 5, 6, 9, 10, 13, 8, 8, 4], [10, 8, 7, 8, 0, 0, 0, 0, 0], [0] * 9]
    texts = _in_words(tf.constant(ids), vocabulary)["text"].numpy()
    expected = [join(MIXED[number - 4] for number in row if number) for row in ids]
    assert [text.decode() for text in texts] == expected
    assert expected[0] == "狗在草地the café's 🐶 🐶狗"


@pytest.mark.parametrize(("kind", "beam"), [("soft", 3), ("none", 3), ("hard", 1), ("self", 3)])
def test_litert(make: Any, tmp_path: Path, kind: str, beam: int) -> None:
    writer, options = Writer(make(kind)), SearchConfig(beam=beam, max_words=7)
    write_litert(writer, tmp_path, options, "none")
    model = Interpreter(str(tmp_path / "captioner.tflite")).get_signature_runner()
    seen = random_squares(5)
    expected = writer.write(writer.encode(seen), options)
    for photo, found in zip(seen, expected, strict=True):
        assert_same(model(photo=photo[None]), [found])


def python(*arguments: object, without: tuple[str, ...]) -> str:
    """What a script prints in a process of its own where some packages do not exist."""
    script = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({without!r}))\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def exported(model: Captioner, folder: Path, kind: str) -> Path:
    """The model as users export it."""
    save_model(model, folder / "model.keras")
    arguments = ["export", "--model", folder / "model.keras", "--format", kind]
    assert main([*map(str, arguments), "--out", str(folder / kind), "--max-words", "7"]) == 0
    return folder / kind


def test_litert_example(
    make: Any, photos: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, opaque = make("soft"), [photos[0], photos[2]]
    model.vocabulary = Vocabulary(MIXED)
    folder = exported(model, tmp_path, "litert")
    assert capsys.readouterr().out == f"litert, 0.1 MB → {folder}\n"
    assert sorted(path.name for path in folder.iterdir()) == ["captioner.json", "captioner.tflite"]
    for resize in RESIZES:  # the model itself takes squares: how they are made only the file tells
        facts = json.loads((folder / "captioner.json").read_text())
        (folder / "captioner.json").write_text(json.dumps({**facts, "resize": resize}))
        script = EXAMPLES / "litert_caption.py"
        printed = python(script, folder, *opaque, without=("captioner", "keras", "tensorflow"))
        model.resize = resize
        expected = []
        for caption in captioner.describe(model, opaque, max_words=7):
            expected.append(f"{caption.photo}: {caption.text}")
            for word, alpha in zip(caption.words, caption.attention, strict=True):
                row, column = np.unravel_index(alpha.argmax(), alpha.shape)
                share = f"{100 * alpha.max():3.0f}% of alpha on row {row}, column {column}"
                expected.append(f"  {word:15} {share}")
        assert printed.splitlines() == expected


class Serving(http.server.BaseHTTPRequestHandler):
    """TensorFlow Serving's REST interface: its predict call in columns."""

    model: Any

    def do_POST(self) -> None:
        assert self.path == "/v1/models/captioner:predict"
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        files = [base64.b64decode(file["b64"]) for file in asked["inputs"]["image_bytes"]]
        outputs = self.model.signatures[asked["signature_name"]](image_bytes=tf.constant(files))
        plain = {name: values.numpy().tolist() for name, values in outputs.items()}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"outputs": plain}, default=bytes.decode).encode())

    def log_message(self, *arguments: Any) -> None:
        pass


def test_saved_model_example(make: Any, photos: list[Path], tmp_path: Path) -> None:
    model, script = make("none"), EXAMPLES / "serve_savedmodel.py"
    folder = exported(model, tmp_path, "savedmodel")
    here = python(script, folder, *photos, without=("captioner", "keras"))
    Serving.model = tf.saved_model.load(folder)
    with http.server.HTTPServer(("localhost", 0), Serving) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://localhost:{server.server_port}/v1/models/captioner"
        there = python(script, url, *photos, without=("captioner", "keras", "tensorflow"))
        server.shutdown()
    expected, writer = [], Writer(model)
    seen = [squares(decoded(path.read_bytes())[None], 24, "stretch") for path in photos]
    found = writer.write(writer.encode(np.concatenate(seen)), SearchConfig(max_words=7))
    for path, (best,) in zip(photos, found, strict=True):
        words = model.vocabulary.decode(best.tokens)
        chances = zip(words, np.exp(best.log_probabilities), strict=True)
        expected.append(f"{path}: {join(words)}")
        expected.append("  " + ", ".join(f"{word} {chance:.2f}" for word, chance in chances))
    assert here.splitlines() == there.splitlines() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "savedmodel", "--quantize", "int8"], "a SavedModel is float32"),
        (["--format", "litert", "--beam", "0"], "beam is 0: it must be at least 1"),
        (["--format", "litert", "--model", "none.keras"], "none.keras: no such model file"),
        (["--format", "onnx"], "Expected one of"),
        (["--format", "savedmodel", "--out", str(EXAMPLES)], "is not empty; give a new"),
    ],
)
def test_bad_usage_is_one_line_and_writes_nothing(
    make: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    save_model(make("none"), tmp_path / "model.keras")
    given = ["--model", str(tmp_path / "model.keras"), "--out", str(tmp_path / "out"), *options]
    assert main(["export", *given]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]


@pytest.mark.slow
def test_photos(data_root: Path, tmp_path: Path) -> None:
    """The shipped model exported, on real photos."""
    data = datasets.from_options(DataConfig(data=data_root / "flickr8k"), "the photos")
    examples = data.split("test")[:300]
    model, options = inference.load(), SearchConfig()
    writer = Writer(model)
    captions: list[Any] = [
        best for _, (best, *_) in describe_files(writer, [one.path for one in examples], options)
    ]

    def cider(texts: list[str]) -> float:
        references = {one.id: one.captions for one in examples}
        return metrics.fast_scores(dict(zip(references, texts, strict=True)), references)["cider"]

    def differing(outputs: list[dict[str, Any]], tolerance: float) -> int:
        """How many captions are others; of the same ones, the maps must be too."""
        count = 0
        for caption, output in zip(captions, outputs, strict=False):
            tokens = np.asarray(output["tokens"])
            if model.vocabulary.decode(tokens[tokens > 0]) != caption.words:
                count += 1
                continue
            maps = np.asarray(output["attention"])[: len(caption.words)]
            np.testing.assert_allclose(maps, caption.attention, atol=tolerance)
        return count

    def by_litert(quantize: str, photos: int) -> list[dict[str, Any]]:
        write_litert(writer, tmp_path, options, quantize)
        lite = Interpreter(str(tmp_path / "captioner.tflite"), num_threads=2)
        run = lite.get_signature_runner()
        return [
            {name: values[0] for name, values in run(photo=square[None]).items()}
            for one in examples[:photos]
            for square in [load_square(one.path, model.image_size, model.resize)[0]]
        ]

    write_saved_model(writer, tmp_path / "model", options)
    caption = tf.saved_model.load(tmp_path / "model").signatures["caption"]
    served = []
    for first in range(0, 100, 25):
        files = [one.path.read_bytes() for one in examples[first : first + 25]]
        outputs = caption(image_bytes=tf.constant(files))
        served += [{name: values[place] for name, values in outputs.items()} for place in range(25)]
    assert differing(served, 1e-3) <= 1
    # Its weights are shipped as float16: rounding takes nothing away (of others: docs/export.md).
    assert differing(by_litert("float16", 100), 1e-3) <= 1
    texts = []
    for output in by_litert("int8", len(examples)):
        tokens = output["tokens"]
        texts.append(join(model.vocabulary.decode(tokens[tokens > 0])))
    assert abs(cider(texts) - cider([one.text for one in captions])) <= 0.02
