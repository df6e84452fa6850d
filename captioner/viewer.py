"""Captions -> one HTML file to look at them: photos, sentences, and the map of every word.

The file needs no other and reaches out to nothing: photos and maps are in it, and `page.html`, its
template, draws the maps with the colours and the interpolation of `captioner.overlay`.
"""

import base64
import hashlib
import html
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from captioner.caption import Caption
from captioner.files import replacing
from captioner.overlay import COLOURS, DIMMED, EARLY, GAMMA, GLOW, highest_share
from captioner.text import join

__all__ = ["PHOTO_BYTES", "save_page"]

PHOTO_BYTES = 125_000  # of one photo with its maps; with the page around it one stays below 150 kB

# A photo's area in pixels and WebP quality: the first that fits is taken.
_SIZES = ((480_000, 82), (480_000, 65), (240_000, 60), (120_000, 50), (50_000, 40))
_LONGEST = 1600  # pixels of its longer side


def save_page(
    captions: Mapping[str, Sequence[Caption]],
    path: str | Path,
    *,
    title: str,
    notes: Sequence[Sequence[str]] | None = None,
) -> None:
    """Writes captioned photos as one HTML file, whole or not at all.

    Args:
        captions: by the model's name, its captions; those of several models, of the same photos in
            the same order, stand side by side. What a caption does not carry (attention, evidence,
            runners-up) the page does not offer.
        path: the file; its folder is made when missing.
        title: the page's heading.
        notes: lines to print below each photo, such as people's captions of it.

    Raises:
        InputError: the file cannot be written, or a photo cannot be read.
        ValueError: the models do not have equally many captions, or there are notes, but not for
            every photo.
    """
    template = resources.files("captioner").joinpath("page.html").read_text(encoding="utf-8")
    page = template.replace("{{title}}", html.escape(title))
    for tag in ("style", "script"):
        # The browser runs nothing but what has this hash, whatever the data manages to smuggle in.
        page = page.replace(f"{{{{{tag}-hash}}}}", _hash_of(template, tag))
    before, after = page.split("{{data}}")
    by_photo = list(zip(*captions.values(), strict=True))
    with (
        replacing(Path(path)) as partial,
        partial.open("w", encoding="utf-8", errors="replace", newline="\n") as stream,
    ):
        stream.write(before + _embedded(_constants(), 'id="page"'))
        notes = [()] * len(by_photo) if notes is None else notes
        for of_photo, lines in zip(by_photo, notes, strict=True):
            photo = _photo(dict(zip(captions, of_photo, strict=True)), lines)
            stream.write("\n" + _embedded(photo, 'class="photo"'))
        stream.write(after)


def _hash_of(template: str, tag: str) -> str:
    content = re.search(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
    assert content is not None  # the template is ours
    return _base64(hashlib.sha256(content[1].encode("utf-8")).digest())


def _embedded(data: Any, attribute: str) -> str:
    """Data as JSON in the page; it holds no `<`, so it cannot end before its end."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" {attribute}>{text}</script>'


def _constants() -> dict[str, Any]:
    """What the page draws like the figure with."""
    colours = COLOURS(np.arange(256), bytes=True)[:, :3]
    return {
        "colours": _base64(colours.tobytes()),
        "gamma": GAMMA,
        "dimmed": DIMMED,
        "glow": GLOW,
        "early": EARLY,
    }


def _photo(captions: Mapping[str, Caption], notes: Sequence[str]) -> dict[str, Any]:
    """One photo with its captions by models' names, as `page.html` reads it."""
    first = next(iter(captions.values()))
    geometry = first.geometry
    photo = {
        "name": first.photo.name if first.photo else "photo",
        "size": [geometry.photo_width, geometry.photo_height],
        "notes": list(notes),
        "captions": [_caption(model, caption) for model, caption in captions.items()],
    }
    room = PHOTO_BYTES - len(_embedded(photo, 'class="photo"'))
    return {**photo, "photo": _data_url(first.pixels(), room)}


def _caption(model: str, caption: Caption) -> dict[str, Any]:
    words = caption.words
    kinds = {"alpha": caption.attention, "evidence": caption.evidence}
    maps = {show: one for show, one in kinds.items() if one is not None}
    some = next(iter(maps.values()), np.empty((0, 1, 1)))
    lengths = [len(join(words[:count])) for count in range(len(words) + 1)]
    return {
        "model": model,
        "text": caption.text,
        "grid": some.shape[1:],
        "window": caption.geometry.window,
        "words": [
            {
                "word": word,
                # What was split off from a word is joined to it again.
                "apart": index > 0 and lengths[index + 1] - lengths[index] > len(word),
                "p": round(float(caption.word_probabilities[index]), 4),
                "gate": None if caption.gate is None else round(float(caption.gate[index]), 4),
                "instead": caption.runners_up
                and [(other, round(p, 4)) for other, p in caption.runners_up[index]],
            }
            for index, word in enumerate(words)
        ],
        "maps": {show: _maps(one) for show, one in maps.items()},
    }


def _maps(maps: np.ndarray) -> dict[str, Any]:
    """Maps `(T, gh, gw)` as a byte per region, 255 where each word's own peak is."""
    peaks = maps.max(axis=(1, 2), initial=0.0)
    cells = np.rint(255 * maps / np.where(peaks > 0, peaks, 1)[:, None, None])
    return {
        "highest": float(f"{highest_share(maps):.6g}"),
        "peaks": [float(f"{peak:.6g}") for peak in peaks],
        "cells": _base64(cells.astype(np.uint8).tobytes()),
    }


def _data_url(photo: Image.Image, room: int) -> str:
    """The photo as WebP in at most `room` characters, or in as few as there are."""
    url = ""
    for area, quality in _SIZES:
        scale = min(1.0, math.sqrt(area / (photo.width * photo.height)), _LONGEST / max(photo.size))
        size = max(1, round(photo.width * scale)), max(1, round(photo.height * scale))
        stream = io.BytesIO()
        small = photo.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
        small.save(stream, "WEBP", quality=quality)
        url = f"data:image/webp;base64,{_base64(stream.getvalue())}"
        if len(url) <= room:
            break
    return url


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
