"""Text in pictures: type that fits its room, in a font that has the letters of any script."""

import functools
from pathlib import Path

import matplotlib
import regex
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font
from PIL import ImageFont

__all__ = ["fit", "font_of", "runs", "typeface", "wrap"]


def fit(
    text: str, room: float, size: float, *, bold: bool = False
) -> tuple[str, ImageFont.FreeTypeFont]:
    """Shrinks the type to the room, down to 60 %, and then shortens the text."""
    font, least = typeface(text, size, bold=bold), 0.6 * size
    while size > least and font.getlength(text) > room:  # hinted type does not shrink evenly
        size = max(least, 0.96 * size)
        font = typeface(text, size, bold=bold)
    kept = text
    while len(kept) > 1 and font.getlength(text) > room:
        kept = kept[:-1]
        text = kept.rstrip() + "…"
    return text, font


def wrap(text: str, room: float, size: float, *, bold: bool = False) -> tuple[str, ...]:
    """Breaks text into lines no wider than `room`: between words, inside a word that must be."""

    def width(text: str) -> float:
        return sum(font.getlength(run) for run, font in runs(text, size, bold=bold))

    lines: list[str] = []
    line = ""
    for word in text.split():
        joined = f"{line} {word}" if line else word
        if width(joined) <= room:
            line = joined
            continue
        if line:
            lines.append(line)
        line = ""
        for letter in word:
            if line and width(line + letter) > room:
                lines.append(line)
                line = ""
            line += letter
    return (*lines, line) if line else tuple(lines)


def runs(text: str, size: float, *, bold: bool = False) -> list[tuple[str, ImageFont.FreeTypeFont]]:
    """Cuts text where no font has all its letters: the pieces in order, each with its font.

    As in "一匹马 🐴", whose letters no common font has together.
    """
    main = typeface(text, size, bold=bold)
    known = _code_points(str(main.path))
    if known >= set(map(ord, text)):
        return [(text, main)]
    pieces: list[tuple[str, ImageFont.FreeTypeFont]] = []
    for letter in regex.findall(r"\X", text):  # with the accents on it
        font = main if known >= set(map(ord, letter)) else typeface(letter, size, bold=bold)
        if pieces and pieces[-1][1] is font:
            letter = pieces.pop()[0] + letter
        pieces.append((letter, font))
    return pieces


def typeface(text: str, size: float, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    """A font that has the text's letters, DejaVu Sans where there is a choice."""
    needed = frozenset(letter for letter in text if letter.isprintable() and letter != " ")
    return _open_font(_font_file(needed, bold), max(1.0, size))


def font_of(text: str) -> tuple[str, bool]:
    """The file of the font that writes a text here, and whether it has all its letters."""
    path = _font_file(frozenset(text), bold=False)
    return path, _code_points(path) >= set(map(ord, text))


@functools.lru_cache(maxsize=256)
def _open_font(path: str, size: float) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size)


@functools.lru_cache(maxsize=4096)
def _font_file(letters: frozenset[str], bold: bool) -> str:
    """The first font with all the letters, or else the one with most; DejaVu Sans on a tie."""
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    dejavu = str(folder / ("DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"))
    wanted = frozenset(map(ord, letters))
    best, missing = dejavu, len(wanted - _code_points(dejavu))
    if missing:
        for path in _system_fonts():
            absent = len(wanted - _code_points(path))
            if absent < missing:
                best, missing = path, absent
            if not missing:
                break
    return best


@functools.lru_cache(maxsize=1)
def _system_fonts() -> tuple[str, ...]:
    """Installed fonts, upright text faces first."""
    slanted = ("italic", "oblique", "mono", "thin", "light", "black")
    paths = map(str, font_manager.findSystemFonts())
    return tuple(sorted(paths, key=lambda p: (any(w in Path(p).name.lower() for w in slanted), p)))


@functools.cache
def _code_points(path: str) -> frozenset[int]:
    """The characters a font draws with outlines; none for a broken or a bitmap font."""
    try:
        font = FT2Font(path)
    except (OSError, RuntimeError):
        return frozenset()
    return frozenset(font.get_charmap()) if font.scalable else frozenset()
