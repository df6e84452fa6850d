"""Caption -> a GIF or WebP that goes through the sentence word by word, each with its map.

Colours and scale are those of the figure: see `captioner.overlay`.
"""

import math
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from captioner.caption import Caption
from captioner.files import replacing
from captioner.lettering import fit, typeface
from captioner.overlay import blend, draw_scale, highest_share, maps_of, numbers, spread
from captioner.text import join

__all__ = ["FORMATS", "frames", "save"]

FORMATS = ("gif", "webp")

PHOTO_MS, WORD_MS, LAST_MS = 1200, 800, 2000  # how long the frames stay

_AREA = 400 * 300  # pixels of the photo, whatever its shape
_LONGEST = 720  # pixels of its longer side
_LEAST_WIDTH = 340  # of the sentence and the scale
_MARGIN, _TITLE, _TITLE_LINE, _SMALL = 18, 20, 30, 12
_BELOW, _SCALE = 26, 40  # heights of the numbers and of the scale with its mark
_INK, _FAINT = (24, 24, 28), (100, 100, 108)


def frames(caption: Caption, *, show: str = "alpha") -> Iterator[Image.Image]:
    """Draws the photo below its sentence, then once per word with the word's map.

    Args:
        caption: without attention, the photo is the only frame.
        show: which maps: `alpha` or `evidence`.

    Yields:
        RGB pictures, all of one size; the first is the photo.

    Raises:
        InputError: the photo's file is gone or unreadable.
        ValueError: `show` is unknown, or the caption carries no evidence.
    """
    maps = maps_of(caption, show)
    photo = caption.pixels()
    aspect = photo.width / photo.height
    width = min(math.sqrt(_AREA * aspect), _LONGEST, _LONGEST * aspect)
    size = max(1, round(width)), max(1, round(width / aspect))
    small = photo.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
    inner = max(size[0], _LEAST_WIDTH)
    words = _set(caption, inner)
    head = round(words[-1].middle + _TITLE_LINE / 2) + 8 if words else _MARGIN
    foot = (_BELOW + _SCALE) if maps is not None and words else 0
    canvas = Image.new("RGB", (inner + 2 * _MARGIN, head + size[1] + foot + _MARGIN), "white")
    corner = _MARGIN + (inner - size[0]) // 2, head
    canvas.paste(small, corner)
    if maps is None or not words:
        yield _lettered(canvas, words, None)
        return
    highest = highest_share(maps)
    draw_scale(canvas, _MARGIN, head + size[1] + _BELOW + 22, 1, highest, maps[0].size)
    yield _lettered(canvas, words, None)
    for index in range(len(words)):
        canvas.paste(blend(small, spread(maps[index], caption.geometry, *size), highest), corner)
        frame = _lettered(canvas, words, index)
        ImageDraw.Draw(frame).text(
            (_MARGIN, head + size[1] + _BELOW / 2 + 2),
            f"{show}   {numbers(caption, index)}",
            _FAINT,
            typeface(show, _SMALL),
            anchor="lm",
        )
        yield frame


def save(caption: Caption, path: str | Path, *, show: str = "alpha") -> None:
    """Writes `frames` as a file that plays for ever, whole or not at all.

    Args:
        caption: what to draw.
        path: ends in one of `FORMATS`; its folder is made when missing.
        show: which maps: `alpha` or `evidence`.

    Raises:
        InputError: the file cannot be written, or the photo cannot be read.
        ValueError: another ending, `show` is unknown, or the caption carries no evidence.
    """
    path = Path(path)
    kind = path.suffix.lower().lstrip(".")
    if kind not in FORMATS:
        raise ValueError(f"{path}: an animation ends in one of .{', .'.join(FORMATS)}")
    pictures = frames(caption, show=show)
    first, *rest = map(_with_256_colours, pictures) if kind == "gif" else pictures
    durations = [PHOTO_MS, *[WORD_MS] * len(rest)]
    durations[-1] = LAST_MS
    with replacing(path) as partial:
        first.save(
            partial, kind, save_all=True, append_images=rest, duration=durations, loop=0, quality=85
        )


class _Set(NamedTuple):
    """A word where it stands in the sentence, in pixels."""

    text: str
    font: ImageFont.FreeTypeFont
    left: float
    middle: float  # of its line
    width: float


def _set(caption: Caption, room: int) -> list[_Set]:
    """The sentence in lines no wider than `room`, below each other from the margin on."""
    gap = typeface(caption.text, _TITLE).getlength(" ") + 5  # the current word's box fits in
    kinds = map(unicodedata.bidirectional, caption.text)
    right_to_left = next((kind for kind in kinds if kind in ("L", "R", "AL")), "L") != "L"
    words: list[_Set] = []
    x, middle = 0.0, _MARGIN + _TITLE_LINE / 2
    for index, word in enumerate(caption.words):
        text, font = fit(word, room, _TITLE)
        width = font.getlength(text)
        before, with_it = join(caption.words[:index]), join(caption.words[: index + 1])
        is_apart = len(with_it) > len(before) + len(word)  # what was split off is not
        x += gap if is_apart else 0
        if x + width > room:
            x, middle = 0.0, middle + _TITLE_LINE
        left = room - x - width if right_to_left else x
        words.append(_Set(text, font, _MARGIN + left, middle, width))
        x += width
    return words


def _with_256_colours(frame: Image.Image) -> Image.Image:
    """The frame as a GIF holds it.

    The colours are chosen as if a strip of the colour map lay below the frame: its bright end,
    which few pixels have, would go without otherwise, on the scale as well.
    """
    ramp = np.broadcast_to(np.linspace(0, 1, frame.width, dtype=np.float32), (64, frame.width))
    strip = blend(Image.new("RGB", (frame.width, 64), (150, 150, 150)), ramp, 1.0)
    sample = Image.new("RGB", (frame.width, frame.height + 64))
    sample.paste(frame, (0, 0))
    sample.paste(strip, (0, frame.height))
    return frame.quantize(palette=sample.quantize(256), dither=Image.Dither.FLOYDSTEINBERG)


def _lettered(canvas: Image.Image, words: Sequence[_Set], current: int | None) -> Image.Image:
    """A copy of the canvas with the sentence, the current word white on black."""
    frame = canvas.copy()
    draw = ImageDraw.Draw(frame)
    for index, word in enumerate(words):
        if index == current:
            box = (word.left - 4, word.middle - 13, word.left + word.width + 4, word.middle + 13)
            draw.rounded_rectangle(box, 5, fill=_INK)
        ink = "white" if index == current else _INK
        draw.text((word.left, word.middle), word.text, ink, word.font, anchor="lm")
    return frame
