"""The one exception that a command turns into a line on stderr and exit status 2."""

from pathlib import Path

from captioner import __version__

__all__ = ["InputError", "refuse_newer"]

LONGEST = 1500


class InputError(Exception):
    """Something the user gave cannot be used.

    The message is one line: what was wrong, where (file, line, option) and what to do about it.
    `captioner.__main__` prints it and exits with 2; from Python it is an ordinary exception.

    What it quotes may be a stranger's: line breaks become spaces, and of what is longer than
    `LONGEST` characters the middle is left out.
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message.splitlines())
        if len(line) > LONGEST:
            line = f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"
        super().__init__(line)


def refuse_newer(path: Path, found: int, known: int) -> None:
    """Raises `InputError` if a file's format is newer than what this program reads."""
    if found > known:
        raise InputError(
            f"{path}: format {found}, made by a newer captioner; this one ({__version__}) reads "
            f"up to {known}: update it"
        )
