"""A data set on disk -> photos with their captions: one reader per layout, nothing decoded.

`load` finds out which layout lies at a path (in the order of `FORMATS`, the first that fits), reads
it, finds every photo it names, and gives every photo its split. What is wrong with single lines is
kept as a `Problem` and skipped; only a data set of which nothing can be used is an error.

Splits belong to photos, never to captions, so no photo is in two. Those that the data set gives are
kept. Where it gives none, photos are drawn into train, dev and test; where it gives train without
dev, which training cannot do without, dev is drawn from train. The draw depends on the seed and the
photos' names alone, not on the order of lines or on the folder that they lie in.

Readers yield rows (`_Row`) and problems; `_assemble` turns both into examples, so a new layout is
one generator and one line in `_READERS`.
"""

# ruff: noqa: PTH100, PTH116, PTH118, PTH122
# os.path on strings is several times as fast as pathlib, which tells with 100,000 photos.

import csv
import functools
import hashlib
import io
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from captioner.errors import InputError
from captioner.images import PHOTO_SUFFIXES

__all__ = ["FORMATS", "SPLITS", "DataSet", "Example", "Problem", "load"]

SPLITS = ("train", "dev", "test")

# What data sets call their splits. "restval" is Karpathy's: COCO's validation photos that he left
# over for training.
_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training", "restval"), "train"),
    **dict.fromkeys(("dev", "val", "valid", "validation", "development"), "dev"),
    **dict.fromkeys(("test", "testing"), "test"),
}

# Column names of tables, the most telling first: of several, the first is taken.
_PHOTO_COLUMNS = (
    *("image", "photo", "picture", "img", "image_file", "photo_file", "file_name", "filename"),
    *("image_name", "photo_name", "img_name", "image_path", "photo_path", "img_path", "file"),
    *("file_path", "filepath", "path", "images", "photos", "image_id", "photo_id", "img_id"),
)
_CAPTION_COLUMNS = ("caption", "text", "comment", "sentence", "description", "alt_text", "raw")
_SPLIT_COLUMNS = ("split", "set", "subset", "partition")
_NUMBER_COLUMNS = ("comment_number", "caption_number", "sentence_number")

# Folders that data sets keep their photos in, tried before any other folder of that tree.
_PHOTO_FOLDERS = frozenset(
    (
        *("images", "image", "photos", "img", "flicker8k_dataset", "flickr8k_dataset"),
        *("flickr30k-images", "flickr30k_images", "train2014", "val2014", "train2017", "val2017"),
    )
)


@dataclass(frozen=True)
class Example:
    """One photo of a data set.

    Attributes:
        id: unique in the data set and stable: the photo's path relative to the folder of photos
            where one was given, else to the data set's root, with "/" between folders.
        path: the photo's file; it was there when the data set was read.
        captions: its captions as they were written, without spaces around them; at least one.
        split: "train", "dev" or "test"; `None` for a photo that the given splits leave out.
    """

    id: str
    path: Path
    captions: tuple[str, ...]
    split: str | None


@dataclass(frozen=True)
class Problem:
    """Something in a data set that was skipped.

    Attributes:
        file: the file (or, for a photo, its path) that is wrong.
        line: its line, from 1; `None` where lines mean nothing (JSON documents, photos).
        what: the kind of problem, a colon, and the detail.
    """

    file: Path
    line: int | None
    what: str

    @property
    def kind(self) -> str:
        """The part of `what` by which problems are counted, such as "photo missing"."""
        return self.what.partition(":")[0]


@dataclass(frozen=True)
class DataSet:
    """What was read.

    Attributes:
        format: the layout it was read as, one of `FORMATS`.
        root: the folder of the data set.
        examples: its photos, in the order in which the data set first names them.
        problems: what was skipped, in the order in which it was met.
        notes: what a user should know though nothing is wrong: splits that were drawn.
    """

    format: str
    root: Path
    examples: tuple[Example, ...]
    problems: tuple[Problem, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()

    def splits(self) -> tuple[str, ...]:
        """The names of the splits that hold photos, in the order of `SPLITS`."""
        present = {example.split for example in self.examples}
        return tuple(name for name in SPLITS if name in present)

    def split(self, name: str) -> tuple[Example, ...]:
        """The photos of one split.

        Args:
            name: "train", "dev" or "test", or another usual name of these ("val").

        Raises:
            InputError: the data set has no such split.
        """
        wanted = _SPLIT_NAMES.get(name.strip().lower())
        if wanted not in self.splits():
            present = ", ".join(f"{split} ({len(self.split(split)):,})" for split in self.splits())
            raise InputError(f"{self.root} has no split {name!r}; it has {present}")
        return tuple(example for example in self.examples if example.split == wanted)

    def summary(self, shown: int = 5) -> str:
        """A few lines for people: how many photos and captions, the splits, and what was skipped.

        Args:
            shown: how many of the problems are written out with their file and line.
        """
        captions = sum(len(example.captions) for example in self.examples)
        lines = [
            f"{_printable(self.root)} ({self.format}): {len(self.examples):,} photos, "
            f"{captions:,} captions"
        ]
        photos = Counter(example.split for example in self.examples)
        parts = [f"{name} {photos[name]:,}" for name in self.splits()]
        if photos[None]:
            parts.append(f"in no split {photos[None]:,} (not used)")
        lines.append("photos per split: " + ", ".join(parts))
        lines.extend(self.notes)
        if self.problems:
            kinds = Counter(problem.kind for problem in self.problems).most_common()
            lines.append("skipped: " + ", ".join(f"{kind} {count:,}" for kind, count in kinds))
            lines.extend(f"  {_where(problem, self.root)}" for problem in self.problems[:shown])
            if len(self.problems) > shown:
                lines.append(f"  and {len(self.problems) - shown:,} more")
        return "\n".join(lines)


def load(
    path: str | Path,
    *,
    format: str | None = None,
    captions: str | Path | None = None,
    images: str | Path | None = None,
    seed: int = 0,
    dev: float = 0.1,
    test: float = 0.1,
) -> DataSet:
    """Reads the data set at a path.

    Args:
        path: the data set's folder, or its captions file.
        format: one of `FORMATS`; `None` finds out.
        captions: the captions file, where it is not in the folder `path`.
        images: the folder of photos, where they are not with the captions.
        seed: of the draw, where splits have to be drawn.
        dev: how many photos are drawn into dev: a share of them (below 1) or their number; 0 for
            none.
        test: the same for test.

    Raises:
        InputError: there is no such path or format, no layout fits, a file is not what its layout
            demands, or nothing in it is usable.
    """
    path = Path(path)
    file = path if captions is None else Path(captions)
    if format is not None and format not in _READERS:
        raise InputError(f"unknown format {format!r}: choose one of {', '.join(FORMATS)}")
    for option, given in (("data set", path), ("--captions", captions), ("--images", images)):
        if given is not None and not Path(given).exists():
            raise InputError(f"{option}: {given} does not exist")
    if images is not None and not Path(images).is_dir():
        raise InputError(f"--images: {images} is a file; give the folder that holds the photos")
    if captions is not None and not (path.is_dir() and file.is_file()):
        raise InputError(
            f"--captions takes a file and needs a folder: {file} and {path} are not so"
        )
    for name, share in (("dev", dev), ("test", test)):
        _count(share, 1, name)  # complain of a wrong share even where it is not needed

    root = path
    if file.is_dir():
        format, files = _detect(path, format)
    else:
        format, files = format or _format_of(file), [file]
        if captions is None:
            root = file.parent.parent if file.parent.name == "annotations" else file.parent
    if format == "folder" and (file.is_file() or images is not None):
        raise InputError(
            f"the format folder reads photos with a .txt beside each: give it one folder, not "
            f"{file if images is None else '--images'}"
        )

    reader = _READERS[format]
    rows = [row for file in files for row in reader.read(file, _split_in_name(file.name))]
    lists = _read_split_lists(files[0].parent) if reader.split_lists else []
    base = root if images is None else Path(images)
    beside = [] if format == "folder" or images is not None else [files[0].parent]
    examples, problems = _assemble(rows, lists, _Photos(base, [*beside, base]))
    if not examples:
        raise InputError(_nothing_usable(files, rows, problems, base))
    examples, notes = _complete_splits(examples, seed, dev, test)
    return DataSet(format, root, tuple(examples), tuple(problems), tuple(notes))


# --- Readers: a captions file -> rows ------------------------------------------------------------


class _Row(NamedTuple):
    """One line of a captions file, as it was written.

    `number` tells two captions of a photo apart that happen to be worded alike: rows are duplicates
    where photo, captions and number are the same. `split` is what the data set calls it.
    """

    photo: str
    captions: tuple[str, ...]
    split: str | None
    file: Path
    line: int | None
    number: int | str | None = None


_TOKEN_LINE = re.compile(r"(.+?)#(\d+)\t(.*)")


def _read_tokens(file: Path, split: str | None) -> Iterator[_Row | Problem]:
    """`name.jpg#0<TAB>caption`, as Flickr8k and Flickr30k are distributed."""
    for line, text in enumerate(_lines(file), 1):
        match = _TOKEN_LINE.fullmatch(text)
        if match:
            yield _Row(match[1].strip(), (match[3],), split, file, line, match[2])
        elif text.strip():
            what = f"malformed row: {_short(text)} is not NAME#NUMBER<TAB>CAPTION"
            yield Problem(file, line, what)


def _read_table(file: Path, split: str | None) -> Iterator[_Row | Problem]:
    """A table with a header: comma, semicolon, tab or bar between fields."""
    lines = _lines(file)
    columns, delimiter = _header(lines[0])
    if columns is None:
        raise InputError(
            f"{file}:1: the header {_short(lines[0])} names no column of photos and one of "
            "captions; call them image and caption"
        )
    for line, fields in _fields(lines, delimiter)[1:]:
        if fields is None:
            what = "malformed row: a quoted field is not closed, or text follows its end"
            yield Problem(file, line, what)
        elif len(fields) != columns.width:
            what = (
                f"malformed row: {len(fields)} fields where the header names {columns.width}; "
                "quote text that holds a separator"
            )
            yield Problem(file, line, what)
        else:
            yield _table_row(columns, fields, split, file, line)


def _read_json_lines(file: Path, split: str | None) -> Iterator[_Row | Problem]:
    """One JSON object per line: its captions a text, a list of texts, or several fields."""
    columns_of = functools.cache(_columns)
    for line, text in enumerate(_lines(file), 1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            what = f"malformed row: {_short(text)} is not one JSON object on one line"
            yield Problem(file, line, what)
            continue
        columns = columns_of(tuple(record))
        if columns is None:
            what = f"malformed row: no photo and caption among the fields {', '.join(record)}"
            yield Problem(file, line, what)
        else:
            yield _table_row(columns, list(record.values()), split, file, line)


def _read_coco(file: Path, split: str | None) -> Iterator[_Row | Problem]:
    """COCO captions JSON: `images[].id, file_name` and `annotations[].image_id, caption`."""
    document = _json(file)
    names: dict[int | str, str] = {}
    for place, image in enumerate(_members(document, "images", file)):
        match image:
            case {"id": int() | str() as key, "file_name": str() as name}:
                names[key] = name
            case _:
                yield Problem(file, None, f"malformed entry: images[{place}] needs id, file_name")
    described = set()
    for place, annotation in enumerate(_members(document, "annotations", file)):
        match annotation:
            case {"image_id": int() | str() as key, "caption": str() as caption}:
                described.add(key)
                if key not in names:
                    what = f"unknown photo: annotations[{place}].image_id {key} is not in images"
                    yield Problem(file, None, what)
                    continue
                number = annotation.get("id")
                number = number if isinstance(number, int | str) else None
                yield _Row(names[key], (caption,), split, file, None, number)
            case _:
                what = f"malformed entry: annotations[{place}] needs image_id, caption"
                yield Problem(file, None, what)
    for key, name in names.items():
        if key not in described:
            yield Problem(file, None, f"photo without captions: {name}")


def _read_karpathy(file: Path, split: str | None) -> Iterator[_Row | Problem]:
    """Karpathy's `dataset_*.json`: `images[].filename, filepath, split, sentences[].raw`."""
    for place, image in enumerate(_members(_json(file), "images", file)):
        match image:
            case {"filename": str() as name, "sentences": list() as sentences} if all(
                isinstance(sentence, dict) and isinstance(sentence.get("raw"), str)
                for sentence in sentences
            ):
                folder = image.get("filepath")
                name = f"{folder}/{name}" if isinstance(folder, str) and folder else name
                given = image.get("split", split)
                captions = tuple(sentence["raw"] for sentence in sentences)
                yield _Row(name, captions, None if given is None else str(given), file, None)
            case _:
                what = f"malformed entry: images[{place}] needs filename, sentences[].raw"
                yield Problem(file, None, what)


def _read_folder(folder: Path, split: str | None) -> Iterator[_Row | Problem]:
    """Photos, each with a `.txt` of the same name beside it: one caption per line.

    Folders directly below that are named like splits (`train/`, `val/`, `test/`) are splits.
    """
    for parent, files in _walk(folder):
        stems: dict[str, list[str]] = {}
        for name in files:
            if _is_photo(name):
                stems.setdefault(Path(name).stem, []).append(name)
        below = Path(parent).relative_to(folder).parts
        split = _SPLIT_NAMES.get(below[0].lower()) if below else None
        texts = {Path(name).stem for name in files if name.endswith(".txt")}
        for stem in sorted(texts | stems.keys()):
            text = Path(parent, f"{stem}.txt")
            names = stems.get(stem, [])
            if len(names) > 1:
                what = f"ambiguous photo: {text.name} could describe {' or '.join(sorted(names))}"
                yield Problem(text, None, what)
            elif stem not in texts:
                what = f"photo without captions: there is no {text.name} beside it"
                yield Problem(Path(parent, names[0]), None, what)
            elif not names:
                yield Problem(text, None, "photo missing: there is no photo of that name beside it")
            else:
                photo = Path(*below, names[0]).as_posix()
                lines = _lines(text)
                written = [row for row in enumerate(lines, 1) if row[1].strip()]
                for line, caption in written or [(1, "")]:
                    yield _Row(photo, (caption,), split, text, line)


def _table_row(
    columns: "_Columns", fields: Sequence[Any], split: str | None, file: Path, line: int
) -> _Row | Problem:
    """The row of a table that its columns describe; `split` is the file's own."""
    photo = fields[columns.photo]
    if not isinstance(photo, str) or not photo.strip():
        return Problem(file, line, f"malformed row: the photo is {_short(str(photo))}, not a name")
    captions: list[str] = []
    for place in columns.captions:
        texts = _texts(fields[place])
        if texts is None:
            what = f"malformed row: the caption is {_short(str(fields[place]))}, not text"
            return Problem(file, line, what)
        captions.extend(texts)
    if columns.split is not None and fields[columns.split] is not None:
        split = str(fields[columns.split]).strip() or split
    number = None if columns.number is None else str(fields[columns.number]).strip()
    return _Row(photo.strip(), tuple(captions), split, file, line, number)


def _texts(value: Any) -> list[str] | None:
    """The captions of one field, which may hold a JSON list; `None` for what is not text."""
    if isinstance(value, str) and value.startswith('["'):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):  # a caption that happens to begin so
            return [value]
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return value
    return None


class _Columns(NamedTuple):
    """Which of a table's `width` columns holds what, counted from 0."""

    photo: int
    captions: tuple[int, ...]
    split: int | None
    number: int | None
    width: int


def _columns(header: Sequence[str]) -> _Columns | None:
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
            split, number = first(_SPLIT_COLUMNS), first(_NUMBER_COLUMNS)
            return _Columns(photo, captions, split, number, len(names))
    return None


def _header(line: str) -> tuple[_Columns | None, str]:
    """Which columns a table's first line names, and what separates them."""
    for delimiter in ",;\t|":
        for _, fields in _fields([line], delimiter):
            columns = _columns(fields) if fields else None
            if columns is not None:
                return columns, delimiter
    return None, ","


def _fields(lines: Sequence[str], delimiter: str) -> list[tuple[int, list[str] | None]]:
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
    limit = csv.field_size_limit(sys.maxsize)
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


# --- Which layout lies at a path -----------------------------------------------------------------


class _Reader(NamedTuple):
    """One layout: how it is found in a folder, how it is read, and how people recognise it."""

    find: Callable[[Path], list[Path]]
    read: Callable[[Path, str | None], Iterator[_Row | Problem]]
    split_lists: bool
    looks_like: str


def _find_flickr8k(root: Path) -> list[Path]:
    return _below(root, "Flickr8k.token.txt")[:1]


def _find_karpathy(root: Path) -> list[Path]:
    return _by_split(root, [file for file in _below(root, "dataset_*.json") if _is_karpathy(file)])


def _find_flickr30k(root: Path) -> list[Path]:
    tables = [*_below(root, "results.csv"), *_below(root, "captions.txt")]
    named = [file for file in tables if _header_names(file) == _FLICKR30K_HEADER]
    return [*_below(root, "results_20130124.token"), *named][:1]


def _find_flickr8k_kaggle(root: Path) -> list[Path]:
    tables = _below(root, "captions.txt")
    return [file for file in tables if _header_names(file) == ["image", "caption"]][:1]


def _find_coco(root: Path) -> list[Path]:
    return _by_split(root, _below(root, "captions*.json"))


def _find_tables(pattern: str) -> Callable[[Path], list[Path]]:
    def find(root: Path) -> list[Path]:
        files = [file for file in sorted(root.glob(pattern)) if not file.name.startswith(".")]
        headed = [file for file in files if _header(_lines(file)[0])[0] is not None]
        return _by_split(root, headed)

    return find


def _find_json_lines(root: Path) -> list[Path]:
    def is_table(file: Path) -> bool:
        return any(isinstance(row, _Row) for row in _read_json_lines(file, None))

    return _by_split(root, list(filter(is_table, sorted(root.glob("*.jsonl")))))


def _find_folder(root: Path) -> list[Path]:
    for _, files in _walk(root):
        texts = {Path(name).stem for name in files if name.endswith(".txt")}
        if any(_is_photo(name) and Path(name).stem in texts for name in files):
            return [root]
    return []


_FLICKR30K_HEADER = ["image_name", "comment_number", "comment"]


def _read_flickr30k(file: Path, split: str | None) -> Iterator[_Row | Problem]:
    """The official `.token` file or Kaggle's table."""
    table = _header(_lines(file)[0])[0] is not None
    yield from (_read_table if table else _read_tokens)(file, split)


_READERS: Mapping[str, _Reader] = {
    "flickr8k": _Reader(_find_flickr8k, _read_tokens, True, "Flickr8k.token.txt"),
    "karpathy": _Reader(_find_karpathy, _read_karpathy, False, "dataset_*.json"),
    "flickr30k": _Reader(
        _find_flickr30k, _read_flickr30k, True, "results_20130124.token or results.csv"
    ),
    "flickr8k-kaggle": _Reader(
        _find_flickr8k_kaggle, _read_table, True, "captions.txt that begins image,caption"
    ),
    "coco": _Reader(_find_coco, _read_coco, False, "annotations/captions*.json"),
    "csv": _Reader(_find_tables("*.csv"), _read_table, False, "*.csv with columns image, caption"),
    "tsv": _Reader(_find_tables("*.tsv"), _read_table, False, "*.tsv with such columns"),
    "jsonl": _Reader(_find_json_lines, _read_json_lines, False, "*.jsonl with such fields"),
    "folder": _Reader(_find_folder, _read_folder, False, "photo.txt beside photo.jpg"),
}

FORMATS = tuple(_READERS)
"""Names of the layouts, in the order in which they are looked for in a folder: the official files
first, then those that carry splits before those that do not, then the general ones."""


def _detect(root: Path, format: str | None) -> tuple[str, list[Path]]:
    """The layout of a folder and its captions files."""
    for name in FORMATS if format is None else (format,):
        files = _READERS[name].find(root)
        if files:
            return name, files
    wanted = FORMATS if format is None else (format,)
    expected = "; ".join(f"{_READERS[name].looks_like} ({name})" for name in wanted)
    raise InputError(
        f"no data set found in {root}: it holds none of {expected}; "
        "give the captions file with --captions"
    )


def _format_of(file: Path) -> str:
    """The layout of a captions file, from its name and its first line."""
    suffix = file.suffix.lower()
    if suffix == ".json":
        return "karpathy" if _is_karpathy(file) else "coco"
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if not _is_photo(file.name):
        names = _header_names(file)
        if names == _FLICKR30K_HEADER:
            return "flickr30k"
        if suffix == ".txt" and names == ["image", "caption"]:
            return "flickr8k-kaggle"
        if suffix in (".csv", ".tsv"):
            return suffix[1:]
        first = _lines(file)[0]
        if _TOKEN_LINE.fullmatch(first):
            return "flickr30k" if file.name.startswith("results") else "flickr8k"
        if _header(first)[0] is not None:
            return "csv"
    raise InputError(
        f"{file} is no captions file that can be recognised; force --format "
        f"{', '.join(name for name in FORMATS if name != 'folder')}"
    )


def _header_names(file: Path) -> list[str]:
    """The column names of a table's first line, whatever separates them."""
    return [name.strip().lower() for name in re.split(r"[,;|\t]", _lines(file)[0])]


def _is_karpathy(file: Path) -> bool:
    return b'"sentences"' in _bytes(file)


def _below(root: Path, pattern: str) -> list[Path]:
    """Files of that name in a folder, then in the folders directly below it."""
    found = [*sorted(root.glob(pattern)), *sorted(root.glob(f"*/{pattern}"))]
    hidden = [file.name.startswith(".") or file.parent.name.startswith(".") for file in found]
    return [file for file, hide in zip(found, hidden, strict=True) if file.is_file() and not hide]


def _by_split(root: Path, files: Sequence[Path]) -> list[Path]:
    """The files to read together: one per split that their names tell, else the only one."""
    named: dict[str | None, list[Path]] = {}
    for file in files:
        named.setdefault(_split_in_name(file.name), []).append(file)
    if len(named) > 1:
        named.pop(None, None)
    for split, several in named.items():
        if len(several) > 1:
            names = ", ".join(file.relative_to(root).as_posix() for file in several)
            which = f"the split {split}" if split else "its captions"
            raise InputError(f"{root} holds several files for {which}: {names}; give one of them")
    return [named[split][0] for split in (*SPLITS, None) if split in named]


def _split_in_name(name: str) -> str | None:
    """The split that a file's name tells: `captions_val2014.json` -> dev."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((_SPLIT_NAMES[word] for word in words if word in _SPLIT_NAMES), None)


# --- Files ---------------------------------------------------------------------------------------


def _bytes(file: Path) -> bytes:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from error
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{file} is UTF-16; save it as UTF-8")
    return data


def _text(file: Path) -> str:
    """A file's text; bytes that are not UTF-8 become surrogates, which `_assemble` looks for."""
    return _bytes(file).removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")


def _lines(file: Path) -> list[str]:
    """A file's lines; at least one. (`str.splitlines` would also split at U+2028 and the like.)"""
    return io.IncrementalNewlineDecoder(None, translate=True).decode(_text(file)).split("\n")


def _json(file: Path) -> Any:
    try:
        return json.loads(_text(file))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{file}:{error.lineno}: not JSON ({error.msg}, column {error.colno}); "
            "fetch the file again or mend that line"
        ) from error
    except (ValueError, RecursionError) as error:  # an endless number, endless brackets
        raise InputError(
            f"{file} is no captions file: its JSON cannot be read ({error})"
        ) from error


def _members(document: Any, key: str, file: Path) -> list[Any]:
    members = document.get(key) if isinstance(document, dict) else None
    if isinstance(members, list):
        return members
    hint = "; write a list of records as .jsonl, one a line" if isinstance(document, list) else ""
    raise InputError(f"{file} is no captions file: it has no list {key!r}{hint}")


def _walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Every folder from `root` down with its files' names, sorted; hidden ones are left out.

    Links to folders are followed, each folder once: large data sets are often linked in.
    """
    seen: set[tuple[int, int]] = set()
    pending = [os.fspath(root)]
    while pending:
        folder = pending.pop()
        try:
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            files, folders = _list_folder(folder)
        except OSError:
            continue  # not ours to read, or gone meanwhile: its photos will be said to be missing
        yield folder, files
        pending.extend(os.path.join(folder, name) for name in reversed(folders))


def _list_folder(folder: str) -> tuple[list[str], list[str]]:
    """The names of a folder's files and folders, sorted, without the hidden ones."""
    files: list[str] = []
    folders: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                folders.append(entry.name)
            elif entry.is_file():  # a broken link is neither
                files.append(entry.name)
    return sorted(files), sorted(folders)


def _is_photo(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in PHOTO_SUFFIXES


class _Photos:
    """Finds the photos that a captions file names, listing every folder once.

    A name is looked for, in this order: as a path from each of `folders`; from the folders directly
    below `base` that usually hold photos; then, by the file's bare name, anywhere below `base`,
    where that name must be the only one: first exactly, then in whatever case, then, for a name
    without suffix, with any. So a table may hold the paths of another machine.
    """

    def __init__(self, base: Path, folders: Sequence[Path]) -> None:
        self.base = base
        below = sorted(entry for entry in base.glob("*") if entry.name.lower() in _PHOTO_FOLDERS)
        self._folders = [os.path.abspath(folder) for folder in (*folders, *below)]
        self._listings: dict[str, frozenset[str]] = {}

    def find(self, names: Iterable[str]) -> dict[str, Path | str]:
        """Every name's file, or in words what is wrong with it."""
        found: dict[str, Path | str] = {}
        rest: dict[str, list[str]] = {}
        for name in names:
            path = self._as_path(name) or self._as_path(name.replace("\\", "/"))
            if path is None:
                rest.setdefault(re.split(r"[/\\]", name)[-1], []).append(name)
            elif not _is_photo(path):
                found[name] = f"not a photo: {name} is of no type that is read"
            else:
                found[name] = Path(path)
        # A bare name that stands for two photos, or for one already found, proves nothing: in
        # a/1.jpg, b/1.jpg with only b/ there, the captions of a/1.jpg must not go to b/1.jpg.
        taken = {path for path in found.values() if isinstance(path, Path)}
        for bare, full in rest.items():
            for name in full:
                files = self._by_bare_name(bare)
                if len(files) == 1 and len(full) == 1 and files[0] not in taken:
                    found[name] = files[0]
                    taken.add(files[0])
                elif len(files) > 1:
                    found[name] = f"ambiguous photo: {name} could be {files[0]} or {files[1]}"
                else:
                    found[name] = f"photo missing: {name}"
        return found

    def identify(self, path: Path) -> str:
        """A photo's id: its path from `base`."""
        return _printable(os.path.relpath(path, self.base).replace(os.sep, "/"))

    def _as_path(self, name: str) -> str | None:
        for folder in self._folders:
            path = os.path.normpath(os.path.join(folder, name))
            parent, bare = os.path.split(path)
            if parent not in self._listings:
                try:
                    self._listings[parent] = frozenset(_list_folder(parent)[0])
                except (OSError, ValueError):  # ValueError: a NUL in the name
                    self._listings[parent] = frozenset()
            if bare in self._listings[parent]:
                return path
        return None

    def _by_bare_name(self, bare: str) -> list[Path]:
        exact, folded, stems = self._tree
        found = exact.get(bare) or folded.get(bare.casefold())
        if not found and not _is_photo(bare):
            found = stems.get(bare)
        return [Path(path) for path in found or ()]

    @functools.cached_property
    def _tree(self) -> tuple[dict[str, list[str]], dict[str, list[str]], dict[str, list[str]]]:
        """All photos below `base` by name, by name in lower case, and by name without suffix."""
        tables: tuple[dict[str, list[str]], ...] = ({}, {}, {})
        for folder, files in _walk(Path(os.path.abspath(self.base))):
            for name in filter(_is_photo, files):
                keys = (name, name.casefold(), os.path.splitext(name)[0])
                for table, key in zip(tables, keys, strict=True):
                    table.setdefault(key, []).append(os.path.join(folder, name))
        return tables[0], tables[1], tables[2]


# --- Rows -> examples ----------------------------------------------------------------------------

_UNDECODED = re.compile("[\ud800-\udfff]")


def _assemble(
    rows: Sequence[_Row | Problem], lists: Sequence[_Row], photos: _Photos
) -> tuple[list[Example], list[Problem]]:
    """Brings the rows of each photo together and sorts out what cannot be used.

    Args:
        rows: what a reader yielded.
        lists: the lines of split lists; once there are any, they alone give the splits.
        photos: where to look for the photos.
    """
    problems: list[Problem] = []
    paths = photos.find(dict.fromkeys(row.photo for row in rows if isinstance(row, _Row)))
    captions: dict[Path, list[str]] = {}
    splits: dict[Path, str] = {}
    seen: set[tuple[Path, int | str | None, tuple[str, ...]]] = set()

    def assign(path: Path, split: str, row: _Row) -> None:
        if splits.setdefault(path, split) != split:
            what = f"split conflict: {row.photo} is already in {splits[path]}, not also in {split}"
            problems.append(Problem(row.file, row.line, what))

    for row in rows:
        if isinstance(row, Problem):
            problems.append(replace(row, what=_printable(row.what)))
            continue
        texts = tuple(text for text in map(str.strip, row.captions) if text)
        path = paths[row.photo]
        split = None if row.split is None else _SPLIT_NAMES.get(row.split.lower())
        what = None
        if any(map(_UNDECODED.search, texts)):
            what = f"not UTF-8: the caption {_short(' '.join(texts))}"
        elif isinstance(path, str):
            what = f"not UTF-8: the name {row.photo}" if _UNDECODED.search(row.photo) else path
        elif not texts:
            what = f"empty caption: of {row.photo}"
        elif row.split is not None and split is None:
            what = f"unknown split: {row.split!r}; use train, dev or test"
        elif (key := (path, row.number, texts)) in seen:
            what = f"duplicate row: of {row.photo}"
        else:
            seen.add(key)
            captions.setdefault(path, []).extend(texts)
            if split is not None:
                assign(path, split, row)
        if what is not None:
            problems.append(Problem(row.file, row.line, _printable(what)))

    # Split lists may leave the suffix out (Flickr30k Entities does).
    named = {key: path for name, path in paths.items() for key in (Path(name).stem, name)}
    for row in lists:
        listed = named.get(row.photo)
        if listed is None:
            what = f"unknown photo: {row.photo} is in this split but has no caption"
            problems.append(Problem(row.file, row.line, _printable(what)))
        elif isinstance(listed, Path) and row.split is not None:
            assign(listed, row.split, row)
    examples = [
        Example(photos.identify(path), path, tuple(texts), splits.get(path))
        for path, texts in captions.items()
    ]
    return examples, problems


def _read_split_lists(folder: Path) -> list[_Row]:
    """Flickr's split lists, one photo's name a line: `Flickr_8k.trainImages.txt`, `train.txt`."""
    pattern = re.compile(r"(?:flickr_?\d+k[._-]?)?(train|dev|val|test)(?:images)?\.txt", re.I)
    rows = []
    for file in sorted(folder.glob("*.txt")):
        match = pattern.fullmatch(file.name)
        if match:
            split = _SPLIT_NAMES[match[1].lower()]
            for line, text in enumerate(_lines(file), 1):
                if text.strip():
                    rows.append(_Row(text.strip(), (), split, file, line))
    return rows


def _complete_splits(
    examples: Sequence[Example], seed: int, dev: float, test: float
) -> tuple[list[Example], list[str]]:
    """Draws the splits that training needs and the data set does not give; says so in notes."""
    given = {example.split for example in examples if example.split is not None}
    if given and ("train" not in given or "dev" in given):
        return list(examples), []
    shares = {"dev": dev} if given else {"dev": dev, "test": test}
    shares = {name: share for name, share in shares.items() if share}
    wanted = " and ".join(shares)
    pool = [example for example in examples if example.split == ("train" if given else None)]
    drawn = {example.id: "train" for example in pool}
    notes = []
    if shares and len(pool) <= len(shares):
        notes = [f"too few photos ({len(pool)}) to draw {wanted}: all of them are in train"]
    elif shares:
        counts = {name: _count(share, len(pool), name) for name, share in shares.items()}
        if sum(counts.values()) >= len(pool):
            raise InputError(
                f"{' and '.join(f'{count:,} photos in {name}' for name, count in counts.items())} "
                f"leave none of the {len(pool):,} to train on; draw fewer"
            )
        order = iter(sorted(pool, key=functools.partial(_draw_key, seed)))
        for name, count in counts.items():
            for _ in range(count):
                drawn[next(order).id] = name
        why = "from train, as no dev was given" if given else "by photo, as no splits were given"
        notes = [f"{wanted} drawn {why} (seed {seed})"]
    completed = [
        replace(example, split=drawn.get(example.id, example.split)) for example in examples
    ]
    return completed, notes


def _count(share: float, photos: int, name: str) -> int:
    """How many photos a share (below 1) or a number (from 1) of them is."""
    if 0 <= share < 1:
        return max(1, round(share * photos)) if share else 0
    if share < 0 or share % 1 != 0 or (isinstance(share, float) and share == 1):
        raise InputError(
            f"{name} is {share}: give a share of the photos below 1, or a whole number"
        )
    return int(share)


def _draw_key(seed: int, example: Example) -> tuple[bytes, bytes]:
    """What photos are sorted by to draw them: the hash of the bare name, then of the id.

    The bare name comes first so that the draw stays the same when the folder of photos is given
    another way, else what was trained on could come back as test.
    """

    def digest(text: str) -> bytes:
        return hashlib.sha256(f"{seed}/{text}".encode()).digest()

    return digest(example.id.rpartition("/")[2]), digest(example.id)


# --- Words for people ----------------------------------------------------------------------------


def _nothing_usable(
    files: Sequence[Path], rows: Sequence[_Row | Problem], problems: Sequence[Problem], base: Path
) -> str:
    """The one line that says why a data set cannot be used at all."""
    where = ", ".join(map(str, files))
    kinds = Counter(problem.kind for problem in problems)
    if not kinds:
        return f"{where} holds no captions"
    names = {row.photo for row in rows if isinstance(row, _Row)}
    if set(kinds) == {"photo missing"} and names:
        return (
            f"no photo of the {len(names):,} named in {where} exists under {base}; "
            "give their folder with --images"
        )
    counts = ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common())
    return f"nothing in {where} is usable: {counts}; the first: {_where(problems[0], None)}"


def _where(problem: Problem, root: Path | None) -> str:
    file = problem.file
    if root is not None and file.is_relative_to(root):
        file = file.relative_to(root)
    line = "" if problem.line is None else f":{problem.line}"
    return f"{_printable(file)}{line}: {problem.what}"


def _short(text: str, width: int = 60) -> str:
    return repr(text if len(text) <= width else text[: width - 1] + "…")


def _printable(text: str | Path) -> str:
    """Text without the surrogates that stand for undecodable bytes, which no stream takes."""
    return str(text).encode("utf-8", "backslashreplace").decode()
