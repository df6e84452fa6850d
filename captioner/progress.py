"""Progress of long work on stderr: a live bar on a terminal, a line now and then in a log file."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["Bar", "bar", "console", "track", "working"]

Item = TypeVar("Item")

LOG_SECONDS = 30.0  # where there is no terminal: seconds between two lines

console = Console(stderr=True, highlight=False)


class Bar:
    """One running bar: `advance` it, and say what its figures are."""

    def __init__(self, title: str, total: int, unit: str) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._done = self._skipped = 0
        self._start = self._logged = time.monotonic()
        self._live: Progress | None = None
        if console.is_terminal:
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
                # Where the captions go to a file, they must not be shown above the bar instead.
                redirect_stdout=sys.stdout.isatty(),
            )
            self._task = self._live.add_task(title, total=total, figures="")
            self._live.start()

    def advance(self, count: int = 1, figures: str = "") -> None:
        """Counts `count` more units as done; `figures` stands beside the rate."""
        self._done += count
        now = time.monotonic()
        rate = (self._done - self._skipped) / max(now - self._start, 1e-9)
        text = f"{rate:.{0 if rate >= 10 else 1}f} {self._unit}/s  {figures}".rstrip()
        if self._live is not None:
            self._live.update(self._task, completed=self._done, figures=text)
        elif now - self._logged >= LOG_SECONDS or (
            self._done >= self._total and self._logged > self._start
        ):
            self._logged = now
            left = (self._total - self._done) / max(rate, 1e-9)
            console.print(
                f"{self._title}: {self._done}/{self._total}  {text}  {_clock(left)} left",
                soft_wrap=True,
            )

    def skip(self, count: int) -> None:
        """Counts units that were done before, at no time of this bar's."""
        self._done += count
        self._skipped += count

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


@contextmanager
def bar(title: str, total: int, unit: str) -> Iterator[Bar]:
    """A `Bar` that is closed whatever happens."""
    running = Bar(title, total, unit)
    try:
        yield running
    finally:
        running.close()


def track(items: Iterable[Item], title: str, total: int, unit: str) -> Iterator[Item]:
    """The items, with a bar that counts them."""
    with bar(title, total, unit) as running:
        for item in items:
            yield item
            running.advance()


@contextmanager
def working(title: str) -> Iterator[None]:
    """Shows, on a terminal, that something is at work whose end cannot be told."""
    with console.status(title):
        yield


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
        if minutes >= 60
        else f"{minutes}:{seconds:02d}"
    )
