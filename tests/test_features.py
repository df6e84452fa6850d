"""Regions on disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from filelock import FileLock
from PIL import Image

from captioner import features
from captioner.features import Features, extract, store_name
from captioner.model import Captioner, save_model


def write_photos(folder: Path, count: int) -> list[Path]:
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    paths = []
    for number in range(count):
        pixels = random.integers(0, 255, (24 + number, 31, 3), dtype="uint8")
        paths.append(folder / f"{number}.png")
        Image.fromarray(pixels).save(paths[-1])
    return paths


def encoded(encoder: keras.Model, path: Path) -> np.ndarray:
    square = Image.open(path).resize((24, 24), Image.Resampling.BICUBIC)
    return np.asarray(encoder(np.asarray(square)[None].astype("float32")))[0]


def test_rows_are_the_encoders_regions(tiny_encoder: keras.Model, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", 5)
    store, unreadable = extract(tiny_encoder, "tiny", "stretch", photos, tmp_path / "stores")
    assert unreadable == {}
    assert len(store) == 5
    order = [photos[3], photos[0], photos[3]]
    rows = store.read(store.locate(order))
    assert rows.shape == (3, 6, 7)
    assert rows.dtype == np.float16
    for row, path in zip(rows, order, strict=True):
        np.testing.assert_allclose(row, encoded(tiny_encoder, path), rtol=2e-3, atol=2e-3)


def test_extraction_goes_on_after_a_kill(
    tiny_encoder: keras.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "SHARD_PHOTOS", 3)
    monkeypatch.setattr(features, "BATCH_PHOTOS", 2)
    photos = write_photos(tmp_path / "photos", 8)
    read: list[Path] = []
    load = features.load_square

    def load_until_killed(path: Path, *how: object) -> object:
        if len(read) == 7:
            raise KeyboardInterrupt
        read.append(path)
        return load(path, *how)

    monkeypatch.setattr(features, "load_square", load_until_killed)
    with pytest.raises(KeyboardInterrupt):
        extract(tiny_encoder, "tiny", "stretch", photos, tmp_path)
    folder = tmp_path / store_name(tiny_encoder, "tiny", "stretch")
    done = len(Features(folder))
    assert not list(folder.glob("*partial*"))

    read.clear()
    monkeypatch.setattr(
        features, "load_square", lambda path, *how: read.append(path) or load(path, *how)
    )
    store, _ = extract(tiny_encoder, "tiny", "stretch", photos, tmp_path)
    assert len(read) == 8 - done < 8
    assert len(store) == 8
    for path in photos:
        row = store.read(store.locate([path]))[0]
        np.testing.assert_allclose(row, encoded(tiny_encoder, path), rtol=2e-3, atol=2e-3)

    read.clear()
    extract(tiny_encoder, "tiny", "stretch", photos, tmp_path)
    assert read == []


def test_an_array_without_its_list_does_not_count(
    tiny_encoder: keras.Model, tmp_path: Path
) -> None:
    photos = write_photos(tmp_path / "photos", 2)
    folder = tmp_path / store_name(tiny_encoder, "tiny", "stretch")
    folder.mkdir()
    (folder / "regions-00000.npy").write_bytes(b"half an array")
    store, _ = extract(tiny_encoder, "tiny", "stretch", photos, tmp_path)
    assert len(store) == 2


def test_a_stale_store_cannot_be_used(tiny_encoder: keras.Model, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", 2)
    store, _ = extract(tiny_encoder, "tiny", "stretch", photos, tmp_path)
    before = store.read(store.locate(photos))

    # Another photo under the same name.
    Image.new("RGB", (31, 24), "red").save(photos[0])
    os.utime(photos[0], ns=(1, 1))
    assert photos[0] not in store
    store, _ = extract(tiny_encoder, "tiny", "stretch", photos, tmp_path)
    after = store.read(store.locate(photos))
    assert np.abs(after[0] - before[0]).max() > 0.01
    np.testing.assert_array_equal(after[1], before[1])

    # Other weights, other resize: other stores.
    names = {store_name(tiny_encoder, "tiny", resize) for resize in ("stretch", "crop")}
    kernel = next(weight for weight in tiny_encoder.weights if "kernel" in weight.path)
    kernel.assign(kernel + 0.001)
    names.add(store_name(tiny_encoder, "tiny", "stretch"))
    assert len(names) == 3


def test_unreadable_photos_are_named_and_left_out(
    tiny_encoder: keras.Model, tmp_path: Path
) -> None:
    photos = write_photos(tmp_path / "photos", 3)
    photos[1].write_bytes(photos[1].read_bytes()[:200])
    store, unreadable = extract(tiny_encoder, "tiny", "pad", photos, tmp_path)
    assert list(unreadable) == [photos[1]]
    assert str(photos[1]) in unreadable[photos[1]]
    assert len(store) == 2
    with pytest.raises(KeyError):
        store.locate([photos[1]])


def test_lists_are_plain_json(tiny_encoder: keras.Model, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", 2)
    store, _ = extract(tiny_encoder, "tiny", "stretch", photos, tmp_path)
    (listing,) = store.folder.glob("*.json")
    keys = json.loads(listing.read_text())["photos"]
    assert [key.split("|")[0] for key in keys] == [str(photo.resolve()) for photo in photos]


EXTRACT = """
import sys, time
from pathlib import Path
from captioner import features
from captioner.model import load_model

features.SHARD_PHOTOS, features.BATCH_PHOTOS = 3, 2
load = features.load_square

def slowly(path, *how):
    time.sleep(0.05)
    sys.stdout.write(f"{path.name}\\n")  # in one go: threads print at once
    return load(path, *how)

features.load_square = slowly
model, photos, stores = map(Path, sys.argv[1:])
encoder = load_model(model).encoder
store, _ = features.extract(encoder, "tiny", "stretch", sorted(photos.iterdir()), stores)
assert len(store) == 24, len(store)
"""


def test_two_processes_divide_the_work(tiny_model: Captioner, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", 24)
    save_model(tiny_model, tmp_path / "tiny.keras")
    command = [sys.executable, "-c", EXTRACT, "tiny.keras", "photos", "stores"]
    processes = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in "ab"
    ]
    read = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(read[0] + read[1]) == sorted(photo.name for photo in photos)  # each once
    (folder,) = (tmp_path / "stores").iterdir()
    store = Features(folder)
    row = store.read(store.locate([photos[7]]))[0]
    np.testing.assert_allclose(row, encoded(tiny_model.encoder, photos[7]), rtol=2e-3, atol=2e-3)


def test_a_part_that_another_process_holds_is_waited_for(
    tiny_encoder: keras.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "SHARD_PHOTOS", 2)
    photos = write_photos(tmp_path / "photos", 4)
    folder = tmp_path / store_name(tiny_encoder, "tiny", "stretch")
    (folder / "locks").mkdir(parents=True)
    held = FileLock(folder / "locks" / f"{features._digest(photos[:2])}.lock")
    held.acquire()
    waits = []

    def let_go(seconds: float) -> None:
        waits.append(len(Features(folder)))
        held.release()

    monkeypatch.setattr(features.time, "sleep", let_go)
    store, _ = extract(tiny_encoder, "tiny", "stretch", photos, tmp_path)
    assert waits == [2]  # meanwhile the other part was done
    assert len(store) == 4


def test_damaged_regions_are_made_again(
    tiny_encoder: keras.Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    photos = write_photos(tmp_path / "photos", 3)
    store, _ = extract(tiny_encoder, "tiny", "stretch", photos, tmp_path)
    [array] = store.folder.glob("*.npy")
    array.write_bytes(array.read_bytes()[:-2])
    store, _ = extract(tiny_encoder, "tiny", "stretch", photos, tmp_path)
    assert f"{array}: damaged, left out" in caplog.text
    rows = store.read(store.locate(photos))
    np.testing.assert_allclose(rows[2], encoded(tiny_encoder, photos[2]), rtol=2e-3, atol=1e-3)
