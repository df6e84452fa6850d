"""How data sets lie on disk: which layout lies at a path, and its captions files -> lines.

A new layout is one generator and one entry of `_LAYOUTS`. Readers say of single lines what is wrong
with them and go on; a file that is not what its layout demands is an error. Whether the photos
exist is not looked at here.
"""

import functools
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from captioner.errors import InputError
from captioner.photo_index import is_photo, walk
from captioner.tables import Columns, find_columns, read_header, split_rows

__all__ = [
    "FORMATS",
    "SPLITS",
    "SPLIT_NAMES",
    "Line",
    "Row",
    "Source",
    "quoted",
    "read",
    "split_in_name",
]

SPLITS = ("train", "dev", "test")

# "restval" is Karpathy's: COCO's validation photos that he left over for training.
SPLIT_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("train", "training", "restval"), "train"),
    **dict.fromkeys(("dev", "val", "valid", "validation", "development"), "dev"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""What data sets call their splits, in lower case -> which of `SPLITS` it is."""


class Row(NamedTuple):
    """What one line of a captions file says, as it was written.

    `number` tells two captions of a photo apart that happen to be worded alike: rows are duplicates
    where photo, captions and number are the same. `split` is what the data set calls it.
    """

    photo: str
    captions: tuple[str, ...]
    split: str | None = None
    number: int | str | None = None


class Line(NamedTuple):
    """A row and where it stands; instead of a row, what is wrong with it ("kind: detail").

    `number` counts from 1; it is `None` where lines mean nothing (JSON documents, photos).
    """

    file: Path
    number: int | None
    row: Row | str


def quoted(text: str, width: int = 60) -> str:
    """Text in quotation marks on one line, cut to `width` characters."""
    return repr(text if len(text) <= width else text[: width - 1] + "…")


# --- Files ---------------------------------------------------------------------------------------


def _text(file: Path) -> str:
    """A file's text; bytes that are not UTF-8 become surrogates: only their line is lost."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from error
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{file} is UTF-16; save it as UTF-8")
    return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")


def _lines(file: Path) -> list[str]:
    """A file's lines; at least one. (`str.splitlines` would also split at U+2028 and the like.)"""
    return io.IncrementalNewlineDecoder(None, translate=True).decode(_text(file)).split("\n")


def _json_lists(file: Path, *keys: str) -> list[list[Any]]:
    """The lists that a JSON document holds under these keys."""
    try:
        document = json.loads(_text(file))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{file}:{error.lineno}: not JSON ({error.msg}, column {error.colno}); "
            "fetch the file again or mend that line"
        ) from error
    except (ValueError, RecursionError) as error:  # an endless number, endless brackets
        raise InputError(
            f"{file} is no captions file: its JSON cannot be read ({error})"
        ) from error
    for key in keys:
        if not isinstance(document, dict) or not isinstance(document.get(key), list):
            is_list = isinstance(document, list)
            hint = "; write a list of records as .jsonl, one a line" if is_list else ""
            raise InputError(f"{file} is no captions file: it has no list {key!r}{hint}")
    return [document[key] for key in keys]


# --- Readers: a captions file -> its lines -------------------------------------------------------

_TOKEN_LINE = re.compile(r"(.+?)#(\d+)\t(.*)")


def _read_tokens(file: Path) -> Iterator[Line]:
    """`name.jpg#0<TAB>caption`, as Flickr8k and Flickr30k are distributed."""
    for number, text in enumerate(_lines(file), 1):
        match = _TOKEN_LINE.fullmatch(text)
        if match:
            yield Line(file, number, Row(match[1].strip(), (match[3],), number=match[2]))
        elif text.strip():
            what = f"malformed row: {quoted(text)} is not NAME#NUMBER<TAB>CAPTION"
            yield Line(file, number, what)


def _read_table(file: Path) -> Iterator[Line]:
    """A table with a header: comma, semicolon, tab or bar between fields."""
    lines = _lines(file)
    header = read_header(lines[0])
    if header is None:
        raise InputError(
            f"{file}:1: the header {quoted(lines[0])} names no column of photos and one of "
            "captions; call them image and caption"
        )
    columns, delimiter = header
    row: Row | str
    for number, fields in split_rows(lines, delimiter)[1:]:
        if fields is None:
            row = "malformed row: a quoted field is not closed, or text follows its end"
        elif len(fields) != columns.width:
            row = (
                f"malformed row: {len(fields)} fields where the header names {columns.width}; "
                "quote text that holds a separator"
            )
        else:
            row = _record(columns, fields)
        yield Line(file, number, row)


def _read_flickr30k(file: Path) -> Iterator[Line]:
    """The official `.token` file or Kaggle's table."""
    return _read_table(file) if _is_table(file) else _read_tokens(file)


def _read_json_lines(file: Path) -> Iterator[Line]:
    """One JSON object per line: its captions a text, a list of texts, or several fields."""
    columns_of = functools.cache(find_columns)
    row: Row | str
    for number, text in enumerate(_lines(file), 1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            row = f"malformed row: {quoted(text)} is not one JSON object on one line"
        elif (columns := columns_of(tuple(record))) is None:
            row = f"malformed row: no photo and caption among the fields {', '.join(record)}"
        else:
            row = _record(columns, list(record.values()))
        yield Line(file, number, row)


def _record(columns: Columns, fields: Sequence[Any]) -> Row | str:
    """The row that a table's or an object's fields make, or what is wrong with them."""
    photo = fields[columns.photo]
    if not isinstance(photo, str) or not photo.strip():
        return f"malformed row: the photo is {quoted(str(photo))}, not a name"
    captions: list[str] = []
    for place in columns.captions:
        texts = _texts(fields[place])
        if texts is None:
            return f"malformed row: the caption is {quoted(str(fields[place]))}, not text"
        captions.extend(texts)
    split, number = (
        None if place is None or fields[place] is None else str(fields[place]).strip() or None
        for place in (columns.split, columns.number)
    )
    return Row(photo.strip(), tuple(captions), split, number)


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


def _read_coco(file: Path) -> Iterator[Line]:
    """COCO captions JSON: `images[].id, file_name` and `annotations[].image_id, caption`."""
    images, annotations = _json_lists(file, "images", "annotations")
    names: dict[int | str, str] = {}
    for place, image in enumerate(images):
        match image:
            case {"id": int() | str() as key, "file_name": str() as name}:
                names[key] = name
            case _:
                yield Line(file, None, f"malformed entry: images[{place}] needs id, file_name")
    described = set()
    row: Row | str
    for place, annotation in enumerate(annotations):
        match annotation:
            case {"image_id": int() | str() as key, "caption": str() as caption} if key in names:
                described.add(key)
                number = annotation.get("id")
                number = number if isinstance(number, int | str) else None
                row = Row(names[key], (caption,), number=number)
            case {"image_id": int() | str() as key, "caption": str()}:
                row = f"unknown photo: annotations[{place}].image_id {key} is not in images"
            case _:
                row = f"malformed entry: annotations[{place}] needs image_id, caption"
        yield Line(file, None, row)
    for key, name in names.items():
        if key not in described:
            yield Line(file, None, f"photo without captions: {name}")


def _read_karpathy(file: Path) -> Iterator[Line]:
    """Karpathy's `dataset_*.json`: `images[].filename, filepath, split, sentences[].raw`."""
    (images,) = _json_lists(file, "images")
    row: Row | str
    for place, image in enumerate(images):
        match image:
            case {"filename": str() as name, "sentences": list() as sentences} if all(
                isinstance(sentence, dict) and isinstance(sentence.get("raw"), str)
                for sentence in sentences
            ):
                folder, split = image.get("filepath"), image.get("split")
                name = f"{folder}/{name}" if isinstance(folder, str) and folder else name
                captions = tuple(sentence["raw"] for sentence in sentences)
                row = Row(name, captions, None if split is None else str(split))
            case _:
                row = f"malformed entry: images[{place}] needs filename, sentences[].raw"
        yield Line(file, None, row)


def _read_folder(folder: Path) -> Iterator[Line]:
    """Photos, each with a `.txt` of the same name beside it: one caption per line.

    Folders directly below that are named like splits (`train/`, `val/`, `test/`) are splits.
    """
    for parent, files in walk(folder):
        photos: dict[str, list[str]] = {}
        for name in filter(is_photo, files):
            photos.setdefault(Path(name).stem, []).append(name)
        below = Path(parent).relative_to(folder).parts
        split = SPLIT_NAMES.get(below[0].lower()) if below else None
        texts = {Path(name).stem for name in files if name.endswith(".txt")}
        for stem in sorted(texts | photos.keys()):
            text = Path(parent, f"{stem}.txt")
            names = photos.get(stem, [])
            if len(names) > 1:
                what = f"ambiguous photo: {text.name} could describe {' or '.join(names)}"
                yield Line(text, None, what)
            elif stem not in texts:
                what = f"photo without captions: there is no {text.name} beside it"
                yield Line(Path(parent, names[0]), None, what)
            elif not names:
                yield Line(text, None, "photo missing: there is no photo of that name beside it")
            else:
                photo = Path(*below, names[0]).as_posix()
                captions = [line for line in enumerate(_lines(text), 1) if line[1].strip()]
                for number, caption in captions or [(1, "")]:
                    yield Line(text, number, Row(photo, (caption,), split))


def _read_split_lists(folder: Path) -> Iterator[Line]:
    """Flickr's split lists, one photo's name a line: `Flickr_8k.trainImages.txt`, `train.txt`."""
    pattern = re.compile(r"(?:flickr_?\d+k[._-]?)?(train|dev|val|test)(?:images)?\.txt", re.I)
    for file in sorted(folder.glob("*.txt")):
        match = pattern.fullmatch(file.name)
        for number, text in enumerate(_lines(file) if match else (), 1):
            if match and text.strip():
                yield Line(file, number, Row(text.strip(), (), match[1]))


# --- Finders: a folder -> its captions files -----------------------------------------------------

_Finder = Callable[[Path], list[Path]]
_Test = Callable[[Path], bool]


def _one_of(*names: str, fits: _Test = Path.is_file) -> _Finder:
    """Finds the first file of these names that fits, in a folder or directly below it."""
    patterns = [pattern for name in names for pattern in (name, f"*/{name}")]
    return lambda root: _matching(root, patterns, fits)[:1]


def _one_per_split(*patterns: str, fits: _Test = Path.is_file) -> _Finder:
    """Finds the files to read together: one per split that their names tell, else the only one."""

    def find(root: Path) -> list[Path]:
        named: dict[str | None, list[Path]] = {}
        for file in _matching(root, patterns, fits):
            named.setdefault(split_in_name(file.name), []).append(file)
        if len(named) > 1:
            named.pop(None, None)
        for split, files in named.items():
            if len(files) > 1:
                names = ", ".join(file.relative_to(root).as_posix() for file in files)
                which = f"the split {split}" if split else "its captions"
                what = f"{root} holds several files for {which}: {names}; give one of them"
                raise InputError(what)
        return [named[split][0] for split in (*SPLITS, None) if split in named]

    return find


def _matching(root: Path, patterns: Sequence[str], fits: _Test) -> list[Path]:
    """A folder's files of these names that fit; hidden ones are left out."""
    return [
        file
        for pattern in patterns
        for file in sorted(root.glob(pattern))
        if not any(part.startswith(".") for part in file.relative_to(root).parts)
        if file.is_file() and fits(file)
    ]


def _find_folder(root: Path) -> list[Path]:
    """The folder itself, where at least one photo has its text beside it."""
    for _, files in walk(root):
        texts = {Path(name).stem for name in files if name.endswith(".txt")}
        if any(is_photo(name) and Path(name).stem in texts for name in files):
            return [root]
    return []


def split_in_name(name: str) -> str | None:
    """The split that a file's name tells: `captions_val2014.json` -> dev."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)


def _is_table(file: Path) -> bool:
    return read_header(_lines(file)[0]) is not None


def _is_json_lines(file: Path) -> bool:
    return any(isinstance(line.row, Row) for line in _read_json_lines(file))


def _is_karpathy(file: Path) -> bool:
    return '"sentences"' in _text(file)


def _is_kaggle_flickr8k(file: Path) -> bool:
    return _header_names(file) == ["image", "caption"]


def _is_kaggle_flickr30k(file: Path) -> bool:
    return _header_names(file) == ["image_name", "comment_number", "comment"]


def _is_flickr30k(file: Path) -> bool:
    return file.suffix == ".token" or _is_kaggle_flickr30k(file)


def _header_names(file: Path) -> list[str]:
    """The column names of a table's first line, whatever separates them."""
    return [name.strip().lower() for name in re.split(r"[,;|\t]", _lines(file)[0])]


# --- Which layout lies at a path -----------------------------------------------------------------


class _Layout(NamedTuple):
    """One layout.

    Attributes:
        find: finds its captions files in a folder.
        read: reads one of them.
        looks_like: how people recognise it.
        has_split_lists: Flickr's lists of splits may lie beside the captions file.
    """

    find: _Finder
    read: Callable[[Path], Iterator[Line]]
    looks_like: str
    has_split_lists: bool = False


_LAYOUTS: Mapping[str, _Layout] = {
    "flickr8k": _Layout(_one_of("Flickr8k.token.txt"), _read_tokens, "Flickr8k.token.txt", True),
    "karpathy": _Layout(
        _one_per_split("dataset_*.json", "*/dataset_*.json", fits=_is_karpathy),
        _read_karpathy,
        "dataset_*.json",
    ),
    "flickr30k": _Layout(
        _one_of("results_20130124.token", "results.csv", "captions.txt", fits=_is_flickr30k),
        _read_flickr30k,
        "results_20130124.token or results.csv",
        True,
    ),
    "flickr8k-kaggle": _Layout(
        _one_of("captions.txt", fits=_is_kaggle_flickr8k),
        _read_table,
        "captions.txt that begins image,caption",
        True,
    ),
    "coco": _Layout(
        _one_per_split("captions*.json", "*/captions*.json"),
        _read_coco,
        "annotations/captions*.json",
    ),
    "csv": _Layout(
        _one_per_split("*.csv", fits=_is_table), _read_table, "*.csv with columns image, caption"
    ),
    "tsv": _Layout(_one_per_split("*.tsv", fits=_is_table), _read_table, "*.tsv with such columns"),
    "jsonl": _Layout(
        _one_per_split("*.jsonl", fits=_is_json_lines), _read_json_lines, "*.jsonl with such fields"
    ),
    "folder": _Layout(_find_folder, _read_folder, "photo.txt beside photo.jpg"),
}

FORMATS = tuple(_LAYOUTS)
"""Names of the layouts, in the order in which they are looked for in a folder: the official files
first, then those that carry splits before those that do not, then the general ones."""


class Source(NamedTuple):
    """What was found at a path and read.

    Attributes:
        format: the layout, one of `FORMATS`.
        root: the folder of the data set.
        folder: the folder of the captions, which photos are often beside.
        files: the captions files.
        lines: their lines, in order.
        split_lists: the lines of Flickr's split lists, whose rows have no captions.
    """

    format: str
    root: Path
    folder: Path
    files: list[Path]
    lines: list[Line]
    split_lists: list[Line]


def read(path: Path, format: str | None = None) -> Source:
    """Finds out which layout lies at a path, and reads it.

    Args:
        path: a data set's folder, or its captions file.
        format: one of `FORMATS`; `None` takes the first that fits.

    Raises:
        InputError: no layout fits, the captions files of a folder cannot be told apart, or one
            cannot be read or is not what its layout demands.
    """
    root = path
    if path.is_dir():
        format, files = _detect(path, format)
    else:
        format, files = format or _format_of(path), [path]
        root = path.parent.parent if path.parent.name == "annotations" else path.parent
    folder = root if format == "folder" else files[0].parent
    layout = _LAYOUTS[format]
    lines = []
    for file in files:
        split = None if format == "folder" else split_in_name(file.name)
        for line in layout.read(file):
            if split and isinstance(line.row, Row) and line.row.split is None:
                line = line._replace(row=line.row._replace(split=split))
            lines.append(line)
    split_lists = list(_read_split_lists(folder)) if layout.has_split_lists else []
    return Source(format, root, folder, files, lines, split_lists)


def _detect(root: Path, format: str | None) -> tuple[str, list[Path]]:
    """The layout of a folder and its captions files."""
    wanted = FORMATS if format is None else (format,)
    for name in wanted:
        files = _LAYOUTS[name].find(root)
        if files:
            return name, files
    expected = "; ".join(f"{_LAYOUTS[name].looks_like} ({name})" for name in wanted)
    raise InputError(
        f"no data set found in {root}: it holds none of {expected}; give the captions file itself "
        "with --data and the folder of photos with --images"
    )


def _format_of(file: Path) -> str:
    """The layout of a captions file, from its name and its first line."""
    suffix = file.suffix.lower()
    if suffix == ".json":
        return "karpathy" if _is_karpathy(file) else "coco"
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if not is_photo(file.name):
        if _is_kaggle_flickr30k(file):
            return "flickr30k"
        if suffix == ".txt" and _is_kaggle_flickr8k(file):
            return "flickr8k-kaggle"
        if suffix in (".csv", ".tsv"):
            return suffix[1:]
        if _TOKEN_LINE.fullmatch(_lines(file)[0]):
            return "flickr30k" if file.name.startswith("results") else "flickr8k"
        if _is_table(file):
            return "csv"
    raise InputError(
        f"{file} is no captions file that can be recognised; force --format "
        f"{', '.join(name for name in FORMATS if name != 'folder')}"
    )
