"""Files from strangers: damaged and hostile ones are read or refused in one line, nothing else.

Every parser gets mutated files (`mutations.py`). CAPTIONER_FUZZ sets how many each of them gets
(10,000: minutes). Uploads are in `test_app.py`.
"""

import io
import json
import os
import random
import resource
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from mutations import COUNT, STRANGE, mutated
from PIL import Image
from test_torch_weights import GOLDEN

from captioner import datasets
from captioner.__main__ import COMMANDS, main
from captioner.boxes import read_boxes
from captioner.config import TrainConfig
from captioner.errors import InputError
from captioner.features import Features
from captioner.images import load_square
from captioner.journal import Journal
from captioner.model import Captioner, load_model, save_model
from captioner.torch_weights import read_state_dict

SECONDS, MEGABYTES = 10, 2_000  # what one file may take, of the processor and of memory


def pictures() -> Iterator[tuple[str, bytes]]:
    """A small photo in every format that is read, with what such files carry besides."""
    noise = np.random.default_rng(1).integers(0, 256, (23, 31, 3), np.uint8)
    photo = Image.fromarray(noise)
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a dog"
    kinds = {"JPEG": {"exif": exif}, "PNG": {"exif": exif}, "WEBP": {}, "GIF": {}, "TIFF": {},
             "BMP": {}, "PPM": {}, "TGA": {}, "JPEG2000": {}, "HEIF": {}}  # fmt: skip
    import pillow_heif

    pillow_heif.register_heif_opener()
    for kind, options in kinds.items():
        stream = io.BytesIO()
        photo.save(stream, kind, **options)
        yield kind, stream.getvalue()


def survives(file: Path, content: bytes, parse: Callable[[Path], object], count: int) -> int:
    """How many of the mutated files were refused."""
    parse_one(file, content, parse)  # as it is, it is read
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for seed in range(count):
        started = time.process_time()
        refused += parse_one(file, mutated(content, seed), parse, seed)
        assert time.process_time() - started < SECONDS, f"seed {seed}"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MEGABYTES
    return refused


def parse_one(
    file: Path, content: bytes, parse: Callable[[Path], object], seed: int | None = None
) -> bool:
    file.write_bytes(content)
    try:
        parse(file)
    except InputError as error:
        assert seed is not None, error
        assert "\n" not in str(error), f"seed {seed}: {error}"
        assert len(str(error)) < 2000
        return True
    except Exception as error:
        raise AssertionError(f"{file.name}, seed {seed}: {error!r}") from error
    return False


@pytest.mark.parametrize(
    ("kind", "content"), list(pictures()), ids=[kind for kind, _ in pictures()]
)
@pytest.mark.filterwarnings("ignore")  # Pillow's, about what it could make out all the same
def test_photos(tmp_path: Path, kind: str, content: bytes) -> None:
    # The name says nothing of what is in a file.
    survives(tmp_path / "photo.jpg", content, lambda file: load_square(file, 24, "stretch"), COUNT)


CAPTIONS = {
    "Flickr8k.token.txt": "".join(
        f"{n}.jpg#{m}\tA dog № {m} runs .\n" for n in range(4) for m in range(2)
    ),
    "captions.csv": "photo,caption,split\n0.jpg,a dog,train\n1.jpg,\"a \"\"big\"\" cat, é\",dev\n",
    "captions.tsv": "photo\tcaption\n2.jpg\ta dog\n3.jpg\ttwo dogs\n",
    "captions.jsonl": "".join(
        json.dumps({"photo": f"{n}.jpg", "captions": ["a dog", "dogs"], "split": "train"}) + "\n"
        for n in range(4)
    ),
    "captions_train.json": json.dumps(
        {
            "images": [{"id": n, "file_name": f"{n}.jpg"} for n in range(4)],
            "annotations": [{"id": n, "image_id": n, "caption": "a dog"} for n in range(4)],
        }
    ),
    "dataset_own.json": json.dumps(
        {
            "images": [
                {"filename": f"{n}.jpg", "split": "train", "sentences": [{"raw": "a dog"}]}
                for n in range(4)
            ]
        }
    ),
    "0.txt": "a dog\nanother caption\n",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four photos."""
    for number in range(4):
        Image.new("RGB", (9, 9)).save(tmp_path / f"{number}.jpg")
    return tmp_path


@pytest.mark.parametrize("name", CAPTIONS)
def test_caption_files(folder: Path, name: str) -> None:
    def parse(file: Path) -> None:
        for example in datasets.load(folder).examples:
            assert example.path.is_relative_to(folder)  # "../" leads nowhere

    survives(folder / name, CAPTIONS[name].encode(), parse, COUNT)


def test_boxes(folder: Path) -> None:
    document = {
        "images": [{"id": 1, "file_name": "0.jpg", "width": 9, "height": 9}],
        "categories": [{"id": 5, "name": "dog"}],
        "annotations": [{"id": 2, "image_id": 1, "category_id": 5, "bbox": [1, 2, 3.5, 4]}],
    }
    content = json.dumps(document).encode()
    survives(folder / "instances.json", content, lambda file: read_boxes([file], folder), COUNT)


def test_run_configs(tmp_path: Path) -> None:
    def parse(file: Path) -> None:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return
        TrainConfig.from_json(text, str(file))

    survives(tmp_path / "config.json", TrainConfig().to_json().encode(), parse, COUNT)


def test_journals(tmp_path: Path) -> None:
    record = {"photo": "a.jpg", "captions": [{"text": "a dog", "score": -1.5}], "size": 3,
              "modified": 4, "settings": "5", "files": {"txt": "a.txt"}}  # fmt: skip
    content = 2 * (json.dumps(record) + "\n").encode()

    def parse(file: Path) -> None:
        with Journal(file) as journal:
            journal.made(tmp_path / "a.jpg")
            list(journal)

    survives(tmp_path / "captions.jsonl", content, parse, COUNT)


@pytest.mark.parametrize("name", ["regions-1.json", "regions-1.npy"])
def test_regions(tmp_path: Path, name: str) -> None:
    """What cannot be used is as good as not there: it is made again."""
    photos = [f"/photos/{n}.jpg|1|2" for n in range(3)]
    np.save(tmp_path / "regions-1.npy", np.ones((3, 5, 7), np.float16))
    (tmp_path / "regions-1.json").write_text(json.dumps({"photos": photos}))
    content = (tmp_path / name).read_bytes()

    def parse(file: Path) -> None:
        store = Features(tmp_path)
        if len(store):
            assert store.read([store._rows[key] for key in store._rows]).shape[1:] == (5, 7)

    survives(tmp_path / name, content, parse, COUNT)


def test_models(tmp_path: Path, tiny_model: Captioner) -> None:
    """Whole files, and files whose configuration alone is mutated, which their checksums hide."""
    whole = tmp_path / "whole.keras"
    save_model(tiny_model, whole)
    survives(tmp_path / "a.keras", whole.read_bytes(), load_model, max(COUNT // 10, 3))
    with zipfile.ZipFile(whole) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for seed in range(max(COUNT // 10, 3)):
        changed = {**members, "config.json": mutated(members["config.json"], seed)}
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            for name, content in changed.items():
                archive.writestr(name, content)
        parse_one(tmp_path / "b.keras", stream.getvalue(), load_model, seed)


@pytest.mark.parametrize("layout", sorted(GOLDEN))
def test_torch_weights(tmp_path: Path, layout: str) -> None:
    def parse(file: Path) -> None:
        assert all(isinstance(array, np.ndarray) for array in read_state_dict(file).values())

    survives(tmp_path / "a.pth", GOLDEN[layout], parse, COUNT)


LINES = (
    "train --data flickr8k --out runs/a --preset small --epochs 3 --learning-rate 1e-3 --limit 7",
    "train --out=runs/a --resume --attention hard --score dot --views 4 --no-normalize -v",
    "caption photos/ a.jpg --model photo --beam 5 --length-penalty 0.7 --no-repeat 2 --html a",
    "caption a.jpg --sample --temperature 0.8 --top-k 50 --top-p 0.9 --overlay out --quiet",
    "evaluate --data flickr8k --split test --model flickr8k-soft --beam 5 --out scores.json",
    "tune --data flickr8k --split dev --model photo --beams 3 5 --length-penalties 0.7 0.9",
    "ground --data coco_boxes --model photo",
    "compare --data flickr8k --out runs/b --epochs 2 --kinds soft hard",
    "scenes --out scenes --count 600 --image-size 320",
    "serve --port 7860 --model photo --model flickr8k-soft",
    "export --format litert --quantize int8 --out model",
    "bench --quick --out bench.json",
    "demo --out out",
    "doctor",
    "encoders",
)


def test_command_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """They are understood, or refused in one line; other tests do what they say."""
    for command in COMMANDS.values():
        monkeypatch.setattr(command, "run", lambda self: None)
    for line in LINES:
        assert main(line.split()) == 0, (line, capsys.readouterr().err)
    for seed in range(COUNT):
        draw = random.Random(seed)
        words = [word.encode() for word in draw.choice(LINES).split()]
        for _ in range(draw.randint(1, 3)):
            at, kind = draw.randrange(len(words) + 1), draw.randrange(5)
            if kind == 0:
                words.insert(at, draw.choice(STRANGE))
            elif kind == 1:
                words.insert(at, draw.choice(draw.choice(LINES).split()).encode())
            elif kind == 2 and words:
                del words[at % len(words)]
            elif words:
                words[at % len(words)] = mutated(words[at % len(words)], draw.randrange(2**31))
        # A shell can give everything but bytes of 0.
        arguments = [os.fsdecode(word.replace(b"\0", b"")) for word in words]
        capsys.readouterr()
        try:
            status = main(arguments)
        except SystemExit as stop:
            assert stop.code == 0 and {"-h", "--help"} & set(arguments), arguments
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}, {arguments}: {error!r}") from error
        assert status in (0, 2), arguments
        if status and arguments:
            complaint = capsys.readouterr().err
            assert complaint.count("\n") == 1 and complaint[-1] == "\n", (seed, complaint)
            assert len(complaint) < 6 * 2000, seed  # escaped, a character may take six
