"""A data set on disk -> photos with their captions; no photo is opened.

`load` reads the layout that lies at a path (`layouts`), finds every photo that it names
(`photo_index`), and gives every photo its split. What is wrong with single lines is kept as a
`Problem` and skipped; only a data set of which nothing can be used is an error.

Splits belong to photos, never to captions, so no photo is in two. Those that the data set gives are
kept. Where it gives none, photos are drawn into train, dev and test; where it gives train without
dev, which training cannot do without, dev is drawn from train. The draw depends on the seed and the
photos' names alone, not on the order of lines or on the folder that they lie in.
"""

import functools
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from captioner import layouts
from captioner.config import DataConfig
from captioner.errors import InputError
from captioner.layouts import FORMATS, SPLIT_NAMES, SPLITS, Row, Source, quoted
from captioner.photo_index import PhotoIndex
from captioner.progress import working

__all__ = ["FORMATS", "SPLITS", "DataSet", "Example", "Problem", "load"]

LONGEST = 300  # characters of a problem that are shown: in a damaged file a name may have no end


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
        wanted = SPLIT_NAMES.get(name.strip().lower())
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
            lines.append(f"skipped: {_kinds(self.problems)}")
            lines.extend(f"  {_where(problem, self.root)}" for problem in self.problems[:shown])
            if len(self.problems) > shown:
                lines.append(f"  and {len(self.problems) - shown:,} more")
        return "\n".join(lines)


def from_options(options: DataConfig, purpose: str) -> "DataSet":
    """Reads the data set that a command's options name.

    Args:
        options: `--data` and what goes with it.
        purpose: what it is wanted for, for the message when `--data` is missing.

    Raises:
        InputError: no `--data`, or as `load` raises.
    """
    if options.data is None:
        raise InputError(f"--data PATH is needed: {purpose}")
    with working("Reading the data set"):
        return load(
            options.data,
            format=options.format,
            images=options.images,
            seed=options.split_seed,
        )


def load(
    path: str | Path,
    *,
    format: str | None = None,
    images: str | Path | None = None,
    seed: int = 0,
    dev: float = 0.1,
    test: float = 0.1,
) -> DataSet:
    """Reads the data set at a path.

    Args:
        path: the data set's folder, or its captions file.
        format: one of `FORMATS`; `None` finds out.
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
    if format is not None and format not in FORMATS:
        raise InputError(f"unknown format {format!r}: choose one of {', '.join(FORMATS)}")
    for option, given in (("data set", path), ("--images", images)):
        if given is not None and not Path(given).exists():
            raise InputError(f"{option}: {given} does not exist")
    if images is not None and not Path(images).is_dir():
        raise InputError(f"--images: {images} is a file; give the folder that holds the photos")
    for name, share in (("dev", dev), ("test", test)):
        _count(share, 1, name)  # complain of a wrong share even where it is not needed

    source = layouts.read(path, format)
    if source.format == "folder" and (path.is_file() or images is not None):
        raise InputError(
            f"the format folder reads photos with a .txt beside each: give it one folder, not "
            f"{path if images is None else '--images'}"
        )
    base = source.root if images is None else Path(images)
    photos = PhotoIndex(base, source.folder if images is None else base)
    examples, problems = _assemble(source, photos)
    if not examples:
        raise InputError(_nothing_usable(source, problems, base))
    examples, notes = _complete_splits(examples, seed, dev, test)
    return DataSet(source.format, source.root, tuple(examples), tuple(problems), tuple(notes))


# --- Lines -> examples ---------------------------------------------------------------------------

_UNDECODED = re.compile("[\ud800-\udfff]")


def _assemble(source: Source, photos: PhotoIndex) -> tuple[list[Example], list[Problem]]:
    """Brings the captions of each photo together and sorts out what cannot be used."""
    rows = [line.row for line in source.lines if isinstance(line.row, Row)]
    paths = photos.find(dict.fromkeys(row.photo for row in rows))
    captions: dict[Path, list[str]] = {}
    splits: dict[Path, str] = {}
    seen: set[tuple[Path, int | str | None, tuple[str, ...]]] = set()
    problems: list[Problem] = []

    def assign(path: Path, row: Row) -> str | None:
        """Gives a photo the split that a row tells; returns what is wrong with that."""
        split = None if row.split is None else SPLIT_NAMES[row.split.lower()]
        if split is None or splits.setdefault(path, split) == split:
            return None
        return f"split conflict: {row.photo} is already in {splits[path]}, not also in {split}"

    def add(row: Row) -> str | None:
        """Takes a row's captions; returns what is wrong with it."""
        texts = tuple(text for text in map(str.strip, row.captions) if text)
        path = paths[row.photo]
        if any(map(_UNDECODED.search, texts)):
            return f"not UTF-8: the caption {quoted(' '.join(texts))}"
        if isinstance(path, str):
            return f"not UTF-8: the name {row.photo}" if _UNDECODED.search(row.photo) else path
        if not texts:
            return f"empty caption: of {row.photo}"
        if row.split is not None and row.split.lower() not in SPLIT_NAMES:
            return f"unknown split: {row.split!r}; use train, dev or test"
        if (path, row.number, texts) in seen:
            return f"duplicate row: of {row.photo}"
        seen.add((path, row.number, texts))
        captions.setdefault(path, []).extend(texts)
        return assign(path, row)

    # Split lists may leave the suffix out (Flickr30k Entities does).
    named = {key: path for name, path in paths.items() for key in (Path(name).stem, name)}

    def add_listed(row: Row) -> str | None:
        path = named.get(row.photo)
        if path is None:
            return f"unknown photo: {row.photo} is in this split but has no caption"
        return assign(path, row) if isinstance(path, Path) else None  # said of its captions

    for lines, take in ((source.lines, add), (source.split_lists, add_listed)):
        for line in lines:
            what = line.row if isinstance(line.row, str) else take(line.row)
            if what is not None:
                problems.append(Problem(line.file, line.number, _printable(what)))
    examples = [
        Example(_printable(photos.relative(path)), path, tuple(texts), splits.get(path))
        for path, texts in captions.items()
    ]
    return examples, problems


# --- Splits --------------------------------------------------------------------------------------


def _complete_splits(
    examples: Sequence[Example], seed: int, dev: float, test: float
) -> tuple[list[Example], list[str]]:
    """Draws the splits that training needs and the data set does not give; says so in notes."""
    given = {example.split for example in examples if example.split is not None}
    if given and ("train" not in given or "dev" in given):
        return list(examples), []
    shares = {"dev": dev} if given else {"dev": dev, "test": test}
    pool = [example for example in examples if example.split == ("train" if given else None)]
    counts = {name: _count(share, len(pool), name) for name, share in shares.items() if share}
    wanted = " and ".join(counts)
    notes = []
    if len(pool) <= len(counts):
        notes = [f"too few photos ({len(pool)}) to draw {wanted}: all of them are in train"]
        counts = {}
    elif counts:
        why = "from train, as no dev was given" if given else "by photo, as no splits were given"
        notes = [f"{wanted} drawn {why} (seed {seed})"]
    if sum(counts.values()) >= len(pool):
        raise InputError(
            f"{' and '.join(f'{count:,} photos in {name}' for name, count in counts.items())} "
            f"leave none of the {len(pool):,} to train on; draw fewer"
        )
    drawn = dict.fromkeys((example.id for example in pool), "train")
    order = iter(sorted(pool, key=functools.partial(_draw_key, seed)))
    for name, count in counts.items():
        drawn.update((example.id, name) for example in itertools.islice(order, count))
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


def _nothing_usable(source: Source, problems: Sequence[Problem], base: Path) -> str:
    """The one line that says why a data set cannot be used at all."""
    where = ", ".join(map(str, source.files))
    if not problems:
        return f"{where} holds no captions"
    names = {line.row.photo for line in source.lines if isinstance(line.row, Row)}
    if names and all(problem.kind == "photo missing" for problem in problems):
        return (
            f"no photo of the {len(names):,} named in {where} exists under {base}; "
            "give their folder with --images"
        )
    first = _where(problems[0], None)
    return f"nothing in {where} is usable: {_kinds(problems)}; the first: {first}"


def _kinds(problems: Sequence[Problem]) -> str:
    """How many problems there are of each kind, the most frequent first."""
    kinds = Counter(problem.kind for problem in problems)
    return ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common())


def _where(problem: Problem, root: Path | None) -> str:
    file = problem.file
    if root is not None and file.is_relative_to(root):
        file = file.relative_to(root)
    line = "" if problem.line is None else f":{problem.line}"
    what = problem.what if len(problem.what) <= LONGEST else problem.what[: LONGEST - 1] + "…"
    return f"{_printable(file)}{line}: {what}"


def _printable(text: str | Path) -> str:
    """Text without the surrogates that stand for undecodable bytes, which no stream takes."""
    return str(text).encode("utf-8", "backslashreplace").decode()
