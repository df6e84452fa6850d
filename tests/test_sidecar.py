"""Captions as files."""

import csv
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from captioner.caption import Caption
from captioner.images import Geometry
from captioner.sidecar import as_json, output_paths, save_maps, save_table

ATTENTION = np.random.default_rng(0).dirichlet(np.ones(6), size=2).reshape(2, 2, 3)


def caption(attention: np.ndarray | None = ATTENTION, text: str = "a café") -> Caption:
    return Caption(
        text=text,
        words=tuple(text.split()),
        word_probabilities=np.array([0.5, 0.123456789]),
        score=-1.25,
        attention=attention,
        gate=None if attention is None else np.array([0.25, 0.75]),
        geometry=Geometry(90, 60, 24, "crop"),
        photo=Path("trip/dog.jpg"),
    )


def test_json() -> None:
    found = json.loads(json.dumps(as_json([caption(), caption(text="a bar")])))
    assert found["photo"] == "trip/dog.jpg"
    assert found["caption"] == "a café"
    assert [one["text"] for one in found["captions"]] == ["a café", "a bar"]
    assert found["captions"][0]["word_probabilities"] == [0.5, 0.12346]
    assert found["captions"][0]["gate"] == [0.25, 0.75]
    assert found["captions"][0]["score"] == -1.25
    assert as_json([caption(None)])["captions"][0]["gate"] is None


def test_table(tmp_path: Path) -> None:
    path = tmp_path / "new" / "captions.csv"
    photos = [tmp_path / "new" / 'a "dog", 狗.jpg', tmp_path / "b.jpg"]
    captions = as_json([caption(), caption(text="a bar, b")])["captions"]
    save_table([(photos[0], captions), (photos[1], captions[:1])], path)
    with path.open(encoding="utf-8", newline="") as stream:
        assert list(csv.reader(stream)) == [
            ["photo", "caption", "score"],
            ['a "dog", 狗.jpg', "a café", "-1.25"],
            ['a "dog", 狗.jpg', "a bar, b", "-1.25"],
            ["../b.jpg", "a café", "-1.25"],
        ]


def test_maps(tmp_path: Path) -> None:
    path = tmp_path / "new" / "dog.npz"
    save_maps(caption(), path)
    with np.load(path, allow_pickle=False) as arrays:
        assert set(arrays.files) == {
            *("words", "word_probabilities", "gate", "attention", "photo_size", "window"),
        }
        assert list(arrays["words"]) == ["a", "café"]
        np.testing.assert_allclose(arrays["attention"], ATTENTION, rtol=1e-6)
        np.testing.assert_allclose(arrays["gate"], [0.25, 0.75])
        assert list(arrays["photo_size"]) == [90, 60]
        assert list(arrays["window"]) == [15, 0, 75, 60]
    assert list(path.parent.iterdir()) == [path]
    full = dataclasses.replace(
        caption(), evidence=ATTENTION[::-1], self_attention=np.ones((1, 8, 6, 6)) / 6
    )
    save_maps(full, path)
    with np.load(path, allow_pickle=False) as arrays:
        np.testing.assert_allclose(arrays["evidence"], ATTENTION[::-1], rtol=1e-6)
        assert arrays["self_attention"].shape == (1, 8, 6, 6)
    with pytest.raises(ValueError, match="without attention"):
        save_maps(caption(None), path)


def test_output_paths_keep_the_tree_and_never_clash() -> None:
    photos = ["trip/dog.jpg", "trip/dog.png", "trip/DOG.JPG", "dog.jpg", "dog.jpg", "dog.jpg"]
    paths = output_paths([Path(name) for name in photos], Path("out"), ".png")
    assert [path.as_posix() for path in paths] == [
        "out/trip/dog.png",
        "out/trip/dog.png.png",
        "out/trip/DOG.JPG.png",
        "out/dog.png",
        "out/dog.jpg.png",
        "out/dog-2.png",
    ]
