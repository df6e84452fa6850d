"""A run that is killed again and again ends as one that nobody disturbed.

`CAPTIONER_SOAK=30 python -m pytest tests/test_soak.py` kills it that often.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

PROJECT = Path(__file__).resolve().parents[1]
KILLS = int(os.environ.get("CAPTIONER_SOAK", "1"))
COLOURS = ("red", "green", "blue", "white", "black", "orange", "purple")
# A checkpoint after every batch, so that killing it often falls into the writing of one.
OPTIONS = (
    *("--weights", "none", "--image-size", "64", "--units", "11", "--attention-units", "5"),
    *("--embedding-units", "3", "--min-count", "1", "--batch-photos", "3", "--save-minutes", "0"),
    *("--precision", "float32", "--patience", "1000", "--views", "2", "--average", "0.9"),
    *("--attention", "hard", "--soft-epochs", "2", "--optimize-cider", "2"),
)


def start(run: Path, *options: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "train.py", "--out", str(run), *options],
        cwd=PROJECT,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> None:
    said = process.communicate()[1]
    assert process.returncode == 0, said


def changes_until(path: Path, wanted: int, process: subprocess.Popen) -> None:
    """Waits until a file has been replaced so often, or the process has ended."""
    seen, last = 0, path.stat().st_ino if path.exists() else None
    while seen < wanted and process.poll() is None:
        time.sleep(0.002)
        now = path.stat().st_ino if path.exists() else last
        seen, last = seen + (now != last), now


@pytest.mark.slow
def test_killed_again_and_again(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(14):
        colour = COLOURS[number % 7]
        Image.new("RGB", (80 + number, 70), colour).save(photos / f"{number}.png")
        (photos / f"{number}.txt").write_text(f"a {colour} wall\n{colour} paint\n")
    options = ("--data", str(photos), *OPTIONS, "--epochs", str(4 + 2 * KILLS))
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    finish(start(undisturbed, *options))

    draw, kills = random.Random(KILLS), 0
    checkpoint = killed / "checkpoint" / "state.npz"
    process = start(killed, *options)
    while kills < KILLS:
        changes_until(checkpoint, draw.randint(0, 9), process)
        time.sleep(draw.choice((0.0, 0.001, 0.01, 0.1, 1.0)))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
        there = (killed / "config.json").exists()  # unless it was killed before it was a run
        process = start(killed, "--resume") if there else start(killed, *options)
    finish(process)
    assert kills == KILLS

    with (
        np.load(undisturbed / "checkpoint" / "state.npz") as expected,
        np.load(checkpoint) as found,
    ):
        names = [name for name in expected.files if name.startswith("variable")]
        for name in names:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5)
    histories = [(run / "history.csv").read_text().splitlines() for run in (undisturbed, killed)]
    assert len(histories[0]) == len(histories[1]) == 4 + 2 * KILLS + 2 + 1
