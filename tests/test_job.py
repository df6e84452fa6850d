"""Folders of anything: every photo described once, every other file accounted for."""

import csv
import functools
import io
import json
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import keras
import numpy as np
import pyexiv2
import pytest
from PIL import Image

from captioner import inference, job
from captioner.__main__ import main
from captioner.caption import Caption
from captioner.model import Captioner, save_model

LOAD, WRITER = functools.cache(inference.load), functools.cache(inference.Writer)


@pytest.fixture(scope="module")
def model(module_tiny_encoder: keras.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    keras.utils.set_random_seed(7)
    words = [f"word{number}" for number in range(13)]
    model = Captioner(module_tiny_encoder, words, units=11, attention_units=5, embedding_units=3)
    path = tmp_path_factory.mktemp("model") / "model.keras"
    save_model(model, path)
    return path


@pytest.fixture
def run(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, list[str], str]]:
    """`captioner caption …`: exit status, the names of the photos it described, stderr."""
    # What every call loads and compiles anew, which is not what is tested here.
    monkeypatch.setattr(job.inference, "load", LOAD)
    monkeypatch.setattr(job, "Writer", WRITER)

    def caption(*arguments: object) -> tuple[int, list[str], str]:
        options = [str(argument) for argument in ("caption", *arguments, "--beam", 1)]
        status = main([*options, "--model", str(model)] if "--model" not in options else options)
        printed = capsys.readouterr()
        names = [line.rsplit(": ", 1)[0].rsplit("/", 1)[-1] for line in printed.out.splitlines()]
        return status, names, printed.err

    return caption


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    for number, name in enumerate(("a.jpg", "a.png", "day 2/a.jpg")):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        Image.new("RGB", (50 + number, 40), (number * 90, 80, 200)).save(folder / name)
    return folder


ALL = ["a.jpg", "a.png", "a.jpg"]


def records(path: Path) -> dict[str, dict[str, object]]:
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert len({line["photo"] for line in lines}) == len(lines)
    return {line["photo"]: line for line in lines}


def test_every_output_of_a_folder(run: Callable, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--jsonl", out / "all.jsonl", "--csv", out / "all.csv", "--txt", out / "texts"]
    options += ["--maps", out / "maps", "--overlay", photos / "overlays", "--alt-text", "xmp"]
    status, names, said = run(photos, *options)
    assert (status, names) == (0, ALL)
    assert said.startswith("3 described\n")
    found = records(out / "all.jsonl")
    assert list(found) == [f"../photos/{name}" for name in ("a.jpg", "a.png", "day 2/a.jpg")]
    with (out / "all.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["photo"]: row["caption"] for row in rows} == {
        name: record["caption"] for name, record in found.items()
    }
    for name, text in (("a.jpg", "a.txt"), ("a.png", "a.png.txt"), ("day 2/a.jpg", "day 2/a.txt")):
        caption = found[f"../photos/{name}"]["caption"]
        assert (out / "texts" / text).read_text() == f"{caption}\n"
        with pyexiv2.ImageData((photos / f"{name}.xmp").read_bytes()) as image:
            both = {'lang="x-default"': caption, 'lang="en"': caption}
            assert set(map(str, image.read_xmp().values())) == {str(both)}

    # Nothing is missing: not even the model is loaded, and overlays are not taken for photos.
    status, names, said = run(photos, *options)
    assert (status, names) == (0, [])
    assert "0 described, 3 were before\n3 skipped: 3 .xmp file\n" in said
    assert records(out / "all.jsonl") == found


def test_a_second_call_does_what_is_missing(run: Callable, photos: Path, tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    options = [photos, "--jsonl", path, "--txt", tmp_path / "texts"]
    assert run(*options)[1] == ALL
    # A new photo, a changed one, a file that is gone.
    Image.new("L", (30, 20)).save(photos / "new.gif")
    Image.new("RGB", (51, 41)).save(photos / "a.png")
    (tmp_path / "texts" / "day 2" / "a.txt").unlink()
    status, names, said = run(*options)
    assert (status, names) == (0, ["a.png", "a.jpg", "new.gif"])
    assert "3 described, 1 were before" in said
    assert len(records(path)) == 4
    # An output that was not asked for before; those of before are still known.
    assert run(*options[:3], "--maps", tmp_path / "maps")[1] == [
        "a.jpg",
        "a.png",
        "a.jpg",
        "new.gif",
    ]
    assert run(*options)[1] == []
    # `a.jpg` is gone, so `a.txt` is now that of `a.png`.
    (photos / "a.jpg").unlink()
    assert run(*options)[1] == ["a.png"]
    assert (tmp_path / "texts" / "a.txt").read_text() == (
        f"{records(path)['photos/a.png']['caption']}\n"
    )


def test_other_models_and_options_do_it_again(
    run: Callable, photos: Path, tmp_path: Path, tiny_model: Captioner
) -> None:
    options = [photos, "--jsonl", tmp_path / "all.jsonl"]
    assert run(*options)[1] == ALL
    assert run(*options, "--max-words", 5)[1] == ALL
    assert run(*options, "--max-words", 5)[1] == []
    keras.utils.set_random_seed(8)
    tiny_model.decoder.set_weights(
        [
            weights + 0.01 if weights.ndim == 2 else weights
            for weights in tiny_model.decoder.get_weights()
        ]
    )
    save_model(tiny_model, tmp_path / "other.keras")
    options += ["--max-words", 5, "--model", tmp_path / "other.keras"]
    assert run(*options)[1] == ALL
    assert run(*options)[1] == []
    assert len(records(tmp_path / "all.jsonl")) == 3


@pytest.mark.parametrize("output", ["--csv", "--txt", "--overlay", "--alt-text"])
def test_every_output_alone_is_resumed(
    run: Callable, photos: Path, tmp_path: Path, output: str
) -> None:
    options = [photos, output, "xmp" if output == "--alt-text" else tmp_path / "out"]
    assert run(*options)[1] == ALL
    (photos / "a.jpg").rename(photos / "b.jpg")
    renamed = output in ("--txt", "--overlay")  # what was made of a.png has a shorter name now
    assert run(*options)[1] == (["a.png", "b.jpg"] if renamed else ["b.jpg"])
    if output == "--csv":
        names = [line.split(",")[0] for line in (tmp_path / "out").read_text().splitlines()]
        assert sorted(names) == [
            "photo",
            *(f"photos/{n}" for n in ("a.jpg", "a.png", "b.jpg", "day 2/a.jpg")),
        ]


def test_texts_of_others_are_left_alone(run: Callable, photos: Path) -> None:
    """`--txt` may be the photos' own folder, where people's captions may lie."""
    mine, ours = photos / "day 2" / "a.txt", photos / "a.txt"
    mine.write_text("my own words\n")
    options = [photos, "--txt", photos]
    status, _names, said = run(*options)
    assert status == 2
    assert f"{mine}: is there already, and not of this job" in said
    assert "1 of 3 photos could not be captioned" in said
    assert mine.read_text() == "my own words\n"
    # Texts of the job are written again, also where the photo is another one now.
    written = ours.read_text()
    assert len(run(*options, "--max-words", 3)[1]) == 3
    assert ours.read_text() != written
    (photos / "a.jpg").unlink()
    (photos / "a.png").rename(photos / "a.webp")
    _, _, said = run(*options)
    assert str(ours) not in said


def test_alt_text_embedded(run: Callable, photos: Path) -> None:
    """Every file changes, which is no reason to do it again; what it cannot be in is named."""
    Image.new("RGB", (40, 30)).save(photos / "b.gif")
    options = [photos, "--alt-text", "embed", "--language", "de"]
    status, names, said = run(*options)
    assert status == 2
    assert f"{photos / 'b.gif'}: nothing can be written into it" in said
    assert "3 described" in said
    with pyexiv2.ImageData((photos / "a.jpg").read_bytes()) as image:
        assert list(image.read_xmp()["Xmp.dc.description"]) == ['lang="x-default"', 'lang="de"']
    assert run(*options)[1] == ["b.gif"]
    # Descriptions of their own are kept, and that is said, unless told otherwise.
    (photos / "b.gif").unlink()
    status, names, said = run(*options, "--max-words", 3)
    assert (status, names) == (0, ALL)
    assert "3 described; 3 keep the description that they had" in said
    before = (photos / "a.jpg").read_bytes()
    options += ["--max-words", 3, "--overwrite-descriptions"]
    status, names, said = run(*options)
    assert names == ALL
    assert "keep" not in said
    assert (photos / "a.jpg").read_bytes() != before
    assert run(*options)[1] == []


def test_photos_that_are_named_are_always_captioned(
    run: Callable, photos: Path, tmp_path: Path
) -> None:
    options = [photos / "a.jpg", photos / "a.png", "--jsonl", tmp_path / "all.jsonl"]
    for _ in range(2):
        status, names, said = run(*options)
        assert (status, names) == (0, ["a.jpg", "a.png"])
        assert len(records(tmp_path / "all.jsonl")) == 2
        assert "described" not in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--overlay", "photos"],
            "--overlay photos: pictures need a folder other than the photos'",
        ),
        (["--overlay", "photos/../photos"], "pictures need a folder"),
        (["--jsonl", "photos"], "photos: cannot be written"),
        (["--alt-text", "xmp", "--language", "x_y"], "--language 'x_y': give a tag"),
    ],
)
def test_what_would_go_wrong_is_refused_first(
    run: Callable,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    status, names, said = run("photos", *options)
    assert (status, names) == (2, [])
    assert message in said
    assert said.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_an_overlay_replaces_no_photo(
    run: Callable, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos)
    before = Path("a.png").read_bytes()
    status, _, said = run("a.jpg", "a.png", "--overlay", ".")
    assert status == 2
    assert "a.png: a picture would replace this photo" in said
    assert Path("a.png").read_bytes() == before


# ---- A thousand files ----------------------------------------------------------------------------


def saved(kind: str, mode: str, size: tuple[int, int], **options: object) -> bytes:
    random = np.random.default_rng(size[0] * size[1])
    grey = random.integers(0, 255, size[::-1], np.uint8)
    if mode == "I;16":
        image = Image.fromarray(grey.astype(np.uint16) * 257)
    elif mode in ("I", "F"):
        image = Image.fromarray(grey.astype({"I": np.int32, "F": np.float32}[mode]))
    else:
        image = Image.fromarray(grey).convert("RGB").convert(mode)
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


# Every mode that Pillow has, in the formats that keep it.
MODES = {
    "JPEG": ("jpg", ("L", "RGB", "CMYK")),
    "PNG": ("png", ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
    "TIFF": (
        "tiff",
        # Not YCbCr: Pillow 12 cannot read what it writes.
        ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "LAB", "I;16", "I", "F"),
    ),
    "GIF": ("GIF", ("L", "P", "RGB")),
    "WEBP": ("webp", ("L", "RGB", "RGBA")),
    "BMP": ("bmp", ("1", "L", "P", "RGB")),
    "HEIF": ("heic", ("L", "RGB", "RGBA")),
    "AVIF": ("avif", ("RGB", "RGBA")),
    "JPEG2000": ("jp2", ("L", "LA", "RGB", "RGBA")),
    "PPM": ("ppm", ("1", "L", "RGB", "I;16")),
    "TGA": ("tga", ("L", "P", "RGB", "RGBA")),
    "MPO": ("mpo", ("RGB",)),
    "QOI": ("qoi", ("RGB", "RGBA")),
}
NAMES = (
    "plain",
    "two words",
    'it\'s "quoted"',
    "[b]bold[/b] :dog:",
    "día 狗 🐶",
    "a: b (1)",
    "%s {0}",
)


def thousand(folder: Path) -> tuple[set[Path], dict[Path, str], Counter[str]]:
    """A thousand files; the good photos, why each bad one is bad, and how many are no photos."""
    good: set[Path] = set()
    bad: dict[Path, str] = {}
    others: Counter[str] = Counter()

    def put(name: str, content: bytes) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        assert not path.exists()
        path.write_bytes(content)
        return path

    photos = [
        (suffix, saved(kind, mode, (37 + number, 29)))
        for kind, (suffix, modes) in MODES.items()
        for number, mode in enumerate(modes)
    ]
    exif = Image.Exif()
    exif[274] = 6  # on its side
    photos.append(("jpg", saved("JPEG", "RGB", (41, 31), exif=exif, progressive=True)))
    for number in range(700):
        suffix, content = photos[number % len(photos)]
        name = NAMES[number % len(NAMES)]
        # The same names in every folder.
        good.add(put(f"{name} folder/{number // 70}/{name} {number % 70}.{suffix}", content))
    whole = saved("JPEG", "RGB", (43, 31))
    size = b"IHDR" + struct.pack(">IIBBBBB", 10**5, 10**5, 8, 2, 0, 0, 0)
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + size
    header += struct.pack(">II", zlib.crc32(size), 1000) + b"IDAT"
    kinds = {
        "empty.jpg": (b"", "is empty (0 bytes)"),
        "cut.jpg": (whole[: len(whole) // 2], "is damaged or cut short"),
        "text.png": (b"This is no picture.", "is not an image that can be read"),
        "video.webp": (bytes(range(256)) * 9, "is not an image that can be read"),
        "bomb.png": (header, "has more than 178 million pixels"),
    }
    for number in range(18):
        for name, (content, reason) in kinds.items():
            bad[put(f"bad ones/{number} {name}", content)] = reason
    link = folder / "nowhere.jpg"
    link.symlink_to("gone.jpg")
    bad[link] = "no such photo"
    itself = folder / "itself.jpg"
    itself.symlink_to(itself)
    bad[itself] = "cannot be opened (Too many levels of symbolic links)"
    for number in range(60):
        for name in ("notes.txt", "film.MOV", "data.json"):
            put(f"plain folder/{number} {name}", b"x")
            others[f"{Path(name).suffix.lower()} file"] += 1
    for number in range(25):
        put(f"plain folder/.hidden {number}.jpg", whole)
        others["hidden"] += 1
    (folder / "plain folder" / "loop").symlink_to(folder)
    others["link to a folder"] += 1
    os.mkfifo(folder / "pipe.jpg")
    others["neither file nor folder"] += 1
    put("README", b"x")
    others["file without suffix"] += 1
    assert len(good) + len(bad) + others.total() == 1000
    return good, bad, others


@pytest.mark.slow
def test_a_thousand_files(run: Callable, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    good, bad, others = thousand(folder)
    options = [folder, "--jsonl", tmp_path / "all.jsonl", "--txt", tmp_path / "texts"]
    status, names, said = run(*options, "--verbose")
    assert status == 2
    assert Counter(names) == Counter(path.name for path in good)
    found = records(tmp_path / "all.jsonl")
    assert {tmp_path / name for name in found} == good
    texts = list((tmp_path / "texts").rglob("*.txt"))
    assert len(texts) == len(good)
    for path, reason in bad.items():
        assert f": {path}: {reason}" in said
    assert said.count("skipped (") == others.total()
    summary = said[said.index(f"{len(good)} described") :]
    assert f"{others.total()} skipped: " in summary
    assert all(f"{count} {kind}" in summary for kind, count in others.items())
    assert f"{len(bad)} failed: 36 is not an image that can be read, " in summary
    assert all(f"18 {kind}" in summary for kind in ("is empty", "is damaged", "has more than"))
    assert f"{len(bad)} of {len(good) + len(bad)} photos could not be captioned" in summary

    # Nothing but the bad ones is looked at again, quietly: they alone are named.
    status, names, said = run(*options, "--quiet")
    assert (status, names) == (2, [])
    assert len(said.splitlines()) == len(bad) + 1
    assert records(tmp_path / "all.jsonl") == found

    missing = sorted(good)[::50]
    for path in missing[:7]:
        Image.new("RGB", (20, 20)).save(path, "PNG")
    kept = [line for name, line in found.items() if tmp_path / name not in missing[7:]]
    (tmp_path / "all.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    _, names, said = run(*options)
    assert names == [path.name for path in missing]
    assert f"{len(missing)} described, {len(good) - len(missing)} were before" in said


@pytest.mark.slow
def test_killed(run: Callable, model: Path, tmp_path: Path) -> None:
    """Whatever was done when the job was killed is there, whole, and not done again."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(300):
        Image.new("RGB", (40, 30), (number % 251, 90, 10)).save(folder / f"{number:03}.png")
    out = tmp_path / "all.jsonl"
    options = ["caption", str(folder), "--jsonl", str(out), "--txt", str(tmp_path / "texts")]
    command = [sys.executable, "-m", "captioner", *options, "--model", str(model), "--beam", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as killed:
        while not out.exists() or out.read_bytes().count(b"\n") < 50:
            assert killed.poll() is None
            time.sleep(0.002)
        killed.send_signal(signal.SIGKILL)
    done = {Path(json.loads(line)["photo"]).name for line in out.read_text().splitlines()}
    assert 50 <= len(done) < 300
    status, names, _ = run(*options[1:])
    assert status == 0
    assert sorted([*done, *names]) == [f"{number:03}.png" for number in range(300)]
    assert len(records(out)) == len(list((tmp_path / "texts").glob("*.txt"))) == 300


def test_whoever_reads_has_had_enough(
    run: Callable, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`captioner caption photos | head -n 0`: no traceback, and what is done is kept."""
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, os.fdopen(writer, "w") as pipe:
        patch.setattr(sys, "stdout", pipe)
        status, _, said = run(photos, "--jsonl", tmp_path / "all.jsonl")
    assert (status, said) == (130, "")
    assert run(photos, "--jsonl", tmp_path / "all.jsonl")[1] == ALL


def test_stopped_by_the_user(
    run: Callable, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done is kept, the table written, and the status 130."""
    as_json = job.sidecar.as_json

    def stop(captions: Sequence[Caption]) -> dict[str, object]:
        if captions[0].photo and captions[0].photo.parent.name == "day 2":
            raise KeyboardInterrupt
        return as_json(captions)

    options = [photos, "--csv", tmp_path / "all.csv"]
    with monkeypatch.context() as patch:
        patch.setattr(job.sidecar, "as_json", stop)
        status, _, said = run(*options)
    assert status == 130
    assert said == "captioner: stopped; the same command goes on from here\n"
    assert (tmp_path / "all.csv").read_text().count("\n") == 3
    assert run(*options)[1] == ["a.jpg"]
    assert (tmp_path / "all.csv").read_text().count("\n") == 4
