"""Tables of photos and captions: which column holds what, and where rows and fields end."""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

__all__ = ["Columns", "find_columns", "read_header", "split_rows"]

# Names of columns, the most telling first: of several, the first is taken.
_PHOTO_COLUMNS = (
    *("image", "photo", "picture", "img", "image_file", "photo_file", "file_name", "filename"),
    *("image_name", "photo_name", "img_name", "image_path", "photo_path", "img_path", "file"),
    *("file_path", "filepath", "path", "images", "photos", "image_id", "photo_id", "img_id"),
)
_CAPTION_COLUMNS = ("caption", "text", "comment", "sentence", "description", "alt_text", "raw")
_SPLIT_COLUMNS = ("split", "set", "subset", "partition")
_NUMBER_COLUMNS = ("comment_number", "caption_number", "sentence_number")


class Columns(NamedTuple):
    """Which of a table's `width` columns holds what, counted from 0."""

    photo: int
    captions: tuple[int, ...]
    split: int | None
    number: int | None
    width: int


def find_columns(header: Sequence[str]) -> Columns | None:
    """Finds the columns by their names; `None` without one of photos and one of captions."""
    names = [re.sub(r"[\s-]+", "_", name.strip().lower()) for name in header]

    def first(wanted: Iterable[str]) -> int | None:
        return next((names.index(name) for name in wanted if name in names), None)

    photo = first(_PHOTO_COLUMNS)
    for word in _CAPTION_COLUMNS:
        # "caption", "captions", and "caption_1", "caption_2", ... which are all used.
        pattern = re.compile(rf"{word}s?(_?\d+)?")
        captions = tuple(place for place, name in enumerate(names) if pattern.fullmatch(name))
        if captions and photo is not None:
            return Columns(
                photo, captions, first(_SPLIT_COLUMNS), first(_NUMBER_COLUMNS), len(names)
            )
    return None


def read_header(line: str) -> tuple[Columns, str] | None:
    """The columns that a table's first line names and what separates them; `None` without such."""
    for delimiter in ",;\t|":
        for _, fields in split_rows([line], delimiter):
            columns = find_columns(fields or ())
            if columns is not None:
                return columns, delimiter
    return None


def split_rows(lines: Sequence[str], delimiter: str) -> list[tuple[int, list[str] | None]]:
    """Splits a table's lines into `(first line, fields)`; `None` for a row quoted wrongly.

    The `csv` module gives up at such a row, and a quote that is never closed swallows the rest of
    the file: reading goes on at the line after the one where the row began. Between bars nothing is
    quoted: that is Flickr30k's `results.csv`, whose captions hold loose quotation marks.
    """
    position = 0

    def feed() -> Iterator[str]:
        nonlocal position
        while position < len(lines):
            position += 1
            yield lines[position - 1] + "\n"

    rows: list[tuple[int, list[str] | None]] = []
    quoting: Literal[0, 3] = csv.QUOTE_NONE if delimiter == "|" else csv.QUOTE_MINIMAL
    limit = csv.field_size_limit(2**31 - 1)  # what Windows takes at most
    try:
        while position < len(lines):
            first = position
            try:
                for row in csv.reader(feed(), delimiter=delimiter, quoting=quoting, strict=True):
                    if any(text.strip() for text in row):
                        rows.append((first + 1, row))
                    first = position
            except csv.Error:
                rows.append((first + 1, None))
                position = first + 1
    finally:
        csv.field_size_limit(limit)
    return rows
