"""What is said, where, and what is not."""

import io
import logging
import subprocess
import sys
import warnings

import pytest
from rich.console import Console

from captioner import messages, progress
from captioner.progress import bar, track, working

log = logging.getLogger("captioner.somewhere")


def everything() -> None:
    log.debug("detail")
    log.info("a [b]file[/b] :dog: %s")
    log.warning("gone")
    print("result")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, ["a [b]file[/b] :dog: %s", "captioner: gone"]),
        ({"quiet": True}, ["captioner: gone"]),
        ({"quiet": True, "verbose": True}, ["captioner: gone"]),
        ({"verbose": True}, ["detail", "a [b]file[/b] :dog: %s", "gone"]),
    ],
)
def test_levels(
    options: dict[str, bool], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    messages.configure(**options)
    everything()
    printed = capsys.readouterr()
    assert printed.out == "result\n"
    lines = printed.err.splitlines()
    if options == {"verbose": True}:  # with the time and the module
        assert all(" captioner.somewhere: " in line for line in lines)
        lines = [line.split(" captioner.somewhere: ")[1] for line in lines]
    assert lines == said


def test_long_lines_are_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    messages.configure()
    log.info("word " * 200)
    assert capsys.readouterr().err.count("\n") == 1


def test_names_that_are_no_unicode_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    messages.configure()
    log.warning("caf\udce9.jpg: gone")
    print("caf\udce9.jpg")
    printed = capsys.readouterr()
    assert printed.out == "caf\\udce9.jpg\n"
    assert printed.err == "captioner: caf\\udce9.jpg: gone\n"


def test_warnings_of_libraries_are_details(capsys: pytest.CaptureFixture[str]) -> None:
    for verbose in (False, True):
        messages.configure(verbose=verbose)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(False)  # pytest has its own way in between
            logging.captureWarnings(True)
            warnings.warn("odd EXIF", UserWarning, stacklevel=1)
            logging.captureWarnings(False)
        assert ("odd EXIF" in capsys.readouterr().err) == verbose


def test_results_go_to_stdout_though_a_bar_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """stderr is a terminal, stdout a file: `captioner caption photos > captions.txt`."""
    terminal = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=terminal, force_terminal=True))
    for number in track(range(3), "Captioning", 3, "photos"):
        print(f"line {number}")
    assert capsys.readouterr().out == "line 0\nline 1\nline 2\n"
    assert "3/3" in terminal.getvalue()
    assert "photos/s" in terminal.getvalue()


def test_without_a_terminal_short_work_is_silent_and_long_work_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    messages.configure()
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with working("Loading"), bar("Captioning", 2, "photos") as running:
        for _ in range(2):
            now += 10
            running.advance()
    assert capsys.readouterr().err == ""
    with bar("Captioning", 3, "photos") as running:
        for _ in range(3):
            now += 20
            running.advance()
    assert capsys.readouterr().err.splitlines() == [
        *("Captioning: 2/3  0.1 photos/s  0:20 left", "Captioning: 3/3  0.1 photos/s  0:00 left"),
    ]
    messages.configure(quiet=True)
    with bar("Captioning", 1, "photos") as running:
        now += 100
        running.advance()
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_tensorflow_is_silent_from_python_too() -> None:
    code = "import captioner; captioner.load(); captioner.Captioner"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
