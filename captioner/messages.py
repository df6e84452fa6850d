"""What is said while a command works: to one logger, on stderr; only results go to stdout."""

import logging
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from captioner.progress import console

__all__ = ["configure", "load_tensorflow"]


def configure(*, verbose: bool = False, quiet: bool = False) -> None:
    """Decides what is shown of what `captioner`'s modules log, and whether progress is.

    Commands call it. From Python, where nothing is shown but warnings, it shows what they show.

    Args:
        verbose: show details as well, each line with its time and module, and Python's warnings.
        quiet: show only what went wrong, and no progress; wins over `verbose`.
    """
    verbose = verbose and not quiet
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names of files may hold what no encoding has
            stream.reconfigure(errors="backslashreplace")
    console.quiet = quiet
    handler = _OnConsole(Console(stderr=True) if quiet else console)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(name)s: %(message)s") if verbose else _Plain()
    )
    level = logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO
    _attach("captioner", handler, level)
    # Pillow warns of odd metadata, Keras of its own ways: nothing that users have to act upon.
    logging.captureWarnings(True)
    _attach("py.warnings", handler, logging.WARNING if verbose else logging.CRITICAL)


def load_tensorflow() -> None:
    """Imports TensorFlow without what it prints before its log level is heeded."""
    if "tensorflow" in sys.modules:
        return
    sys.stderr.flush()
    terminal = os.dup(2)
    try:
        with (
            Path(os.devnull).open("wb") as nowhere,
            os.fdopen(terminal, "w", encoding="utf-8", closefd=False) as stream,
            Console(file=stream, quiet=console.quiet).status("Starting TensorFlow"),
        ):
            os.dup2(nowhere.fileno(), 2)
            import tensorflow

            # "Tracing is expensive": once per model and shape, which it cannot know.
            tensorflow.get_logger().setLevel("ERROR")
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def _attach(name: str, handler: logging.Handler, level: int) -> None:
    logger = logging.getLogger(name)
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False


class _OnConsole(logging.Handler):
    """Prints on a rich console, above the progress bar if there is one."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        # As `Text`: in a file's name "[b]" or ":dog:" is no markup.
        self._console.print(Text(self.format(record)), soft_wrap=True)


class _Plain(logging.Formatter):
    """The message alone; what went wrong says whose it is."""

    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        return f"captioner: {message}" if record.levelno >= logging.WARNING else message
