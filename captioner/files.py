"""Files and folders that are there whole or not at all, and their names as seen from a folder."""

import errno
import functools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from captioner.errors import InputError

__all__ = ["new_folder", "relative_to", "replacing", "write_text"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, renamed to it when the block ends well, else removed.

    Folders on the way are made. A process killed inside the block leaves `path` as it was.

    Raises:
        InputError: the folder or file cannot be written.

    Example:
        >>> with replacing(Path("scores.json")) as partial:
        ...     partial.write_text("{}")
    """
    partial = _partial(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with suppress(OSError):  # gone already when all went well
            partial.unlink()


def _partial(path: Path) -> Path:
    """The temporary name, on the same disk, of what becomes `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _unwritable(path: Path, error: OSError) -> InputError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    todo = "make room and go on" if full else "choose another place"
    return InputError(f"{path}: cannot be written ({error.strerror or error}); {todo}")


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file in one step."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def relative_to(folder: Path, file: Path) -> str:
    """A file as seen from a folder, with "/"; its whole path where it lies on another drive.

    It stays the same wherever a command is started, and when both are moved together.
    """
    real = _real_folder(file.parent.absolute()) / file.name
    try:
        return Path(os.path.relpath(real, _real_folder(folder.absolute()))).as_posix()
    except ValueError:
        return real.as_posix()


@functools.lru_cache(maxsize=1024)
def _real_folder(folder: Path) -> Path:
    """The folder without links on the way to it."""
    return folder.resolve()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, renamed to it when the block ends well, else removed.

    Raises:
        InputError: there is something at `path` already, or it cannot be written.
    """
    partial = _partial(path)
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(f"{path}: is not empty; give a new or empty folder")
        partial.mkdir(parents=True)
        yield partial
        partial.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
