"""A disk that is full, a real one: a file system in memory that is too small."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

PROJECT = Path(__file__).resolve().parents[1]
SMALL_DISK = ("unshare", "--map-root-user", "--mount", "sh", "-c")

# The disk is full when an epoch is to be saved; then there is room again.
STORY = """
set -u
mount -t tmpfs -o size=64m tmpfs disk
"$PYTHON" "$PROJECT/train.py" --out disk/runs/run $OPTIONS --epochs 1 || exit 10
"$PYTHON" -c 'import sys; from pathlib import Path
run = Path("disk/runs/run"); text = (run / "config.json").read_text()
(run / "config.json").write_text(text.replace("\\"epochs\\": 1,", "\\"epochs\\": 2,"))'
cp disk/runs/run/checkpoint/state.npz before.npz
dd if=/dev/zero of=disk/ballast bs=1k 2>/dev/null
"$PYTHON" "$PROJECT/train.py" --out disk/runs/run --resume 2>full.txt
echo $? >full.status
cmp disk/runs/run/checkpoint/state.npz before.npz || exit 11
ls -A disk/runs/run disk/runs/run/checkpoint >left.txt
rm disk/ballast
"$PYTHON" "$PROJECT/train.py" --out disk/runs/run --resume || exit 12
cp disk/runs/run/history.csv .
"""


def may_mount(folder: Path) -> bool:
    try:
        command = [*SMALL_DISK, f"mount -t tmpfs -o size=1m tmpfs {folder}"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
def test_training_onto_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    if not may_mount(tmp_path / "disk"):
        pytest.skip("a small disk cannot be mounted here (needs Linux and user namespaces)")
    photos = tmp_path / "photos"
    photos.mkdir()
    for number, colour in enumerate(("red", "green", "blue", "white", "black") * 2):
        Image.new("RGB", (80 + number, 70), colour).save(photos / f"{number}.png")
        (photos / f"{number}.txt").write_text(f"a {colour} wall\n")
    options = (
        f"--data {photos} --weights none --image-size 64 --units 11 --attention-units 5 "
        "--embedding-units 3 --min-count 1 --batch-photos 4 --precision float32"
    )
    environment = {
        "PYTHON": sys.executable,
        "PROJECT": str(PROJECT),
        "OPTIONS": options,
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [*SMALL_DISK, STORY],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "full.status").read_text() == "2\n"
    said = (tmp_path / "full.txt").read_text()
    assert "(No space left on device); make room and go on" in said and "Traceback" not in said
    assert ".partial" not in (tmp_path / "left.txt").read_text()
    assert len((tmp_path / "history.csv").read_text().splitlines()) == 3
