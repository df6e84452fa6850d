"""The one exception that a command turns into a line on stderr and exit status 2."""


class InputError(Exception):
    """Something the user gave cannot be used.

    The message is one line: what was wrong, where (file, line, option) and what to do about it.
    `captioner.__main__` prints it and exits with 2; from Python it is an ordinary exception.
    """
