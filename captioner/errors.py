"""The one exception that a command turns into a line on stderr and exit status 2."""

from pathlib import Path

from captioner import __version__

__all__ = ["InputError", "refuse_newer"]


class InputError(Exception):
    """Something the user gave cannot be used.

    The message is one line: what was wrong, where (file, line, option) and what to do about it.
    `captioner.__main__` prints it and exits with 2; from Python it is an ordinary exception.
    """


def refuse_newer(path: Path, found: int, known: int) -> None:
    """Raises `InputError` if a file's format is newer than what this program reads."""
    if found > known:
        raise InputError(
            f"{path}: format {found}, made by a newer captioner; this one ({__version__}) reads "
            f"up to {known}: update it"
        )
