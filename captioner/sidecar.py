"""Captions as files for other programs: JSON, tables, text, and maps as numbers."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from captioner.caption import Caption
from captioner.files import relative_to, replacing

__all__ = ["as_json", "output_paths", "save_maps", "save_table"]


def as_json(captions: Sequence[Caption]) -> dict[str, Any]:
    """One photo's captions, best first, as an object for JSON; maps are left to `save_maps`."""
    return {
        "photo": str(captions[0].photo),
        "caption": captions[0].text,
        "captions": [
            {
                "text": one.text,
                "score": round(one.score, 5),
                "words": list(one.words),
                "word_probabilities": [round(float(p), 5) for p in one.word_probabilities],
                "gate": None if one.gate is None else [round(float(g), 5) for g in one.gate],
            }
            for one in captions
        ],
    }


def save_table(photos: Iterable[tuple[Path, Sequence[Mapping[str, Any]]]], path: Path) -> None:
    """Writes a CSV file: a row `photo,caption,score` per caption, whole or not at all.

    Args:
        photos: each with its captions, best first, as `as_json` gives them.
        path: the file; photos are named as seen from its folder.
    """
    with (
        replacing(path) as partial,
        partial.open("w", encoding="utf-8", errors="backslashreplace", newline="") as stream,
    ):
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow(("photo", "caption", "score"))
        for photo, captions in photos:
            for one in captions:
                rows.writerow((relative_to(path.parent, photo), one["text"], one["score"]))


def save_maps(caption: Caption, path: Path) -> None:
    """Writes a caption's maps as an `.npz` file that `numpy.load` reads without pickle.

    Arrays (`T` words, grid `gh x gw`):
        words `(T,)` str; word_probabilities `(T,)`; gate `(T,)`;
        attention `(T, gh, gw)`: alpha, each map summing to 1, row 0 at the top of the photo;
        evidence `(T, gh, gw)`, where the caption carries it: the regions that spoke for the word;
        self_attention `(layers, heads, L, L)`, where the model has such layers;
        photo_size `(2,)`: width and height in pixels, upright;
        window `(4,)`: left, top, right, bottom, in photo pixels, of the rectangle that the grid
        covers evenly: cell `(r, c)` spans `left + c * (right - left) / gw`, and so on. It is the
        whole photo for `stretch`, inside it for `crop`, larger than it for `pad`.

    Raises:
        ValueError: the caption has no attention.
    """
    if caption.attention is None or caption.gate is None:
        raise ValueError("a caption of a model without attention has no maps to save")
    with replacing(path) as partial, partial.open("wb") as stream:
        np.savez_compressed(
            stream,
            words=np.array(caption.words, dtype=np.str_),
            word_probabilities=caption.word_probabilities.astype(np.float32),
            gate=caption.gate.astype(np.float32),
            attention=caption.attention.astype(np.float32),
            **{
                name: maps.astype(np.float32)
                for name in ("evidence", "self_attention")
                if (maps := getattr(caption, name)) is not None
            },
            photo_size=np.array([caption.geometry.photo_width, caption.geometry.photo_height]),
            window=np.array(caption.geometry.window, np.float64),
        )


def output_paths(relatives: Sequence[Path], folder: Path, suffix: str) -> list[Path]:
    """A file below `folder` for every photo, in the photos' own tree, no two the same.

    `trip/dog.jpg` becomes `trip/dog.png`; where that is taken (by `trip/dog.jpeg`, or on a file
    system that ignores case by `trip/Dog.jpg`), `trip/dog.jpg.png`, then `trip/dog-2.png`.
    """
    taken: set[str] = set()
    paths = []
    for relative in relatives:
        names = [relative.with_suffix(suffix), relative.with_name(relative.name + suffix)]
        number = 1
        while str(names[0]).lower() in taken:
            names.pop(0)
            if not names:
                number += 1
                names = [relative.with_name(f"{relative.stem}-{number}{suffix}")]
        taken.add(str(names[0]).lower())
        paths.append(folder / names[0])
    return paths
