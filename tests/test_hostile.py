"""Files from strangers: damaged and hostile ones are read or refused in one line, nothing else.

Every parser gets mutated files: bytes changed, cut, doubled, moved, and numbers that overflow.
They are drawn from fixed seeds. CAPTIONER_FUZZ sets how many each parser gets (10,000: minutes).
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
from PIL import Image

from captioner import datasets
from captioner.boxes import read_boxes
from captioner.config import TrainConfig
from captioner.errors import InputError
from captioner.features import Features
from captioner.images import load_square
from captioner.journal import Journal
from captioner.model import Captioner, load_model, save_model

COUNT = int(os.environ.get("CAPTIONER_FUZZ", "150"))
SECONDS, MEGABYTES = 10, 2_000  # what one file may take, of the processor and of memory
STRANGE = [
    *(b"\x00", b"\xff" * 4, b"\x80\x00\x00\x00", b"\x7f\xff\xff\xff", b"-1", b"1e999", b"NaN"),
    *(b"null", b"{}", b"[]", b"[" * 3000, b'"', b"\\u0000", b"\r", b"\n\n", b"\t", b","),
    *(b"99999999999999999999", b"../../../etc/passwd", b"\xef\xbb\xbf", b"\xed\xa0\x80"),
    "\U0001f415\u202e".encode(),
]  # fmt: skip


def mutated(content: bytes, seed: int) -> bytes:
    """One to five changes, drawn from the seed."""
    draw = random.Random(seed)
    data = bytearray(content)
    for _ in range(draw.randint(1, 5)):
        at, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        kind = draw.randrange(7)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at:at] = draw.choice(STRANGE)
        elif kind == 2:
            piece = draw.choice(STRANGE)
            data[at : at + len(piece)] = piece
        elif kind == 3:
            del data[at : at + draw.randint(1, 16)]
        elif kind == 4:
            data[at:at] = data[at : min(end, at + 200)]
        elif kind == 5:
            data[at : at + 8] = draw.randbytes(8)
        elif draw.random() < 0.3:
            del data[at:]
    return bytes(data)


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
