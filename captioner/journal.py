"""What a captioning job has done: JSON lines, one a photo, added to as it goes.

A line is written at once when all that is made of its photo is there, so that a job that was killed
has lost what it was at, and no more; were a line cut short by a power cut, it is dropped when the
file is opened again. Of two lines of one photo the later one counts, and the earlier one is removed
when the job ends.

Beside the captions (`captioner.sidecar.as_json`) a line holds how they came about:

    photo       the photo as seen from the journal's folder
    size        of the photo's file, bytes
    modified    when that was changed last, nanoseconds since 1970
    settings    a digest of the model and of the options that decide which words are chosen
    files       what was made of it, by kind, as seen from the journal's folder
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from captioner.errors import InputError
from captioner.files import relative_to, replacing

__all__ = ["Journal", "Made"]

START_OF_LINE = b'{"photo": '


class Made(NamedTuple):
    """How a photo's captions came about: see above."""

    size: int
    modified: int
    settings: str
    files: dict[str, str]


class Journal:
    """A journal, open for adding to it; a context manager.

    It keeps some hundred bytes a photo in memory, not its captions.

    Args:
        path: the file; made if it is not there.

    Raises:
        InputError: it cannot be read or written, or holds anything else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: dict[str, int] = {}  # of every photo, its last line
        self._made: dict[str, str] = {}  # and what that says, packed
        self._lines = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept, end = self._read() if path.exists() else (0, b"")
            self._stream = path.open("ab")
            self._stream.truncate(kept)
            self._stream.write(end)
        except OSError as error:
            raise self._failure(error) from error

    def made(self, photo: Path) -> Made | None:
        """How a photo's captions came about; `None` if it has none."""
        packed = self._made.get(self.relative(photo))
        return None if packed is None else Made(*json.loads(packed))

    def has_made(self, file: Path) -> bool:
        """Whether a file was made of any photo."""
        name = self.relative(file)
        return any(name in Made(*json.loads(one)).files.values() for one in self._made.values())

    def relative(self, file: Path) -> str:
        """A file as the journal names it."""
        return relative_to(self.path.parent, file)

    def located(self, name: str) -> Path:
        """The file that the journal names so."""
        return self.path.parent / name

    def add(self, photo: Path, captions: Mapping[str, Any], made: Made) -> None:
        """Writes a photo's line.

        Args:
            photo: its file.
            captions: from `captioner.sidecar.as_json`.
            made: how they came about.

        Raises:
            InputError: it cannot be written.
        """
        record = {**captions, "photo": self.relative(photo), **made._asdict()}
        # In JSON strings, what `backslashreplace` makes of names that are not Unicode is an escape.
        line = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace")
        try:
            self._stream.write(line + b"\n")
            self._stream.flush()
        except OSError as error:
            raise self._failure(error) from error
        self._count(record)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The last line of every photo."""
        for number, line in enumerate(self._complete_lines()):
            record = json.loads(line)
            if self._last[record["photo"]] == number:
                yield record

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._stream.close()
        except OSError as failure:
            raise self._failure(failure) from failure
        if self._lines > len(self._last):
            with replacing(self.path) as partial, partial.open("wb") as stream:
                for number, line in enumerate(self._complete_lines()):
                    if self._last[json.loads(line)["photo"]] == number:
                        stream.write(line)

    def _read(self) -> tuple[int, bytes]:
        """Learns what is done; returns how many bytes are kept, and what is missing after them."""
        size, line = 0, b"\n"
        with self.path.open("rb") as stream:
            for line in stream:
                try:
                    record = json.loads(line)
                    if not isinstance(record["photo"], str):
                        raise TypeError
                    [(one["text"], one["score"]) for one in record["captions"]]
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    is_cut = isinstance(error, ValueError) and not line.endswith(b"\n")
                    if is_cut and line.startswith(START_OF_LINE[: len(line)]):
                        return size, b""
                    raise InputError(
                        f"{self.path}, line {self._lines + 1}: not what captioner writes here; "
                        "give another file"
                    ) from error
                self._count(record)
                size += len(line)
        return size, b"" if line.endswith(b"\n") else b"\n"

    def _count(self, record: Mapping[str, Any]) -> None:
        photo = record["photo"]
        self._last[photo] = self._lines
        self._lines += 1
        if all(name in record for name in Made._fields):  # not so in files of earlier versions
            self._made[photo] = json.dumps([record[name] for name in Made._fields])

    def _complete_lines(self) -> Iterator[bytes]:
        with self.path.open("rb") as stream:
            yield from itertools.islice(stream, self._lines)

    def _failure(self, error: OSError) -> InputError:
        return InputError(
            f"{self.path}: cannot be written ({error.strerror or error}); choose another place"
        )
