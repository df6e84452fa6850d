"""Every command of README and docs is run as it stands, in a folder where its files are small."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from captioner.__main__ import main

PROJECT = Path(__file__).resolve().parents[1]
PAGES = [
    PROJECT / name
    for name in (
        *("README.md", "README.zh.md", "docs/captioning.md", "docs/training.md"),
        *("docs/quality.md", "docs/export.md"),
    )
]
COMMAND = re.compile(r"^    (python (?:-m captioner|train\.py|examples/)(?:.*\\\n)*.*)$", re.M)
# These take long, or do not end; test_app, test_bench, test_doctor, test_compare, test_scenes and
# test_grounding type them on something smaller.
ELSEWHERE = ("serve", "bench", "doctor", "compare", "scenes", "ground")
THINGS = ("dog", "cat", "horse", "boat", "car", "tree")


def commands() -> list[list[str]]:
    """The words of each, in the order they are first given."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for command in COMMAND.findall(page.read_text(encoding="utf-8")):
            words = shlex.split(command.replace("\\\n", " "), comments=True)[1:]
            if (words[0] == "-m" and words[2] in ELSEWHERE) or "http:" in command:
                continue
            found[shlex.join(words)] = words
    return list(found.values())


def draw(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(number).integers(0, 255, (3, 4, 3), dtype="uint8")
    Image.fromarray(coarse).resize((64, 48)).save(path)


def write_flickr8k(folder: Path) -> None:
    """In the layout of the original, with words enough for the shipped vocabulary."""
    names = [f"{number:03d}_{thing}.jpg" for number, thing in enumerate(THINGS * 5)]
    for number, name in enumerate(names):
        draw(folder / "Flicker8k_Dataset" / name, number)
    rows = [
        f"{name}#{caption}\tA {name[4:-4]} stands {('here', 'on the grass')[caption]} ."
        for name in names
        for caption in range(2)
    ]
    (folder / "Flickr8k.token.txt").write_text("\n".join(rows) + "\n")
    for split, chosen in (("train", names[:20]), ("dev", names[20:25]), ("test", names[25:])):
        (folder / f"Flickr_8k.{split}Images.txt").write_text("\n".join(chosen) + "\n")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program in a user's home, with photos and data at the places that the pages name."""
    home = tmp_path_factory.mktemp("home")
    for number in range(3):
        draw(home / "Pictures" / "trip" / f"{number}.jpg", number)
    checkout = home / "captioner"
    checkout.mkdir()
    (checkout / "examples").symlink_to(PROJECT / "examples")
    draw(checkout / "dog.jpg", 9)
    write_flickr8k(home / "shared" / "data" / "flickr8k")
    for name in ("PATH", "my_photos", "flickr8k"):
        shutil.copytree(home / "shared" / "data" / "flickr8k", checkout / name)
    return checkout


def run(words: list[str]) -> int:
    """A command without the time that Python takes to import TensorFlow."""
    words = [str(Path(word).expanduser()) if word[0] == "~" else word for word in words]
    if words[0] == "-m":
        return main(words[2:])
    if words[0] == "train.py":
        return main(["train", *words[1:]])
    return subprocess.run([sys.executable, *words], check=False).returncode


@pytest.mark.slow
def test_every_command_works(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(checkout.parent))
    monkeypatch.chdir(checkout)
    given = commands()
    assert len(given) > 12
    first = next(words for words in given if words[0] == "train.py")
    assert run(first) == 0, capsys.readouterr().err
    for name in ("soft", "hard", "flickr8k"):
        shutil.copytree(Path("runs") / "mine", Path("runs") / name, dirs_exist_ok=True)
    for words in given:
        if words is first:
            continue
        out = Path(words[words.index("--out") + 1]) if words[0] == "train.py" else Path("nowhere")
        if "--resume" not in words and (out / "config.json").exists():
            shutil.rmtree(out)  # another page's example of the same name
        assert run(words) == 0, f"{shlex.join(words)}\n{capsys.readouterr().err}"
    for path in ("out/dog.png", "captions.jsonl", "trip.html", "dog.html", "maps/0.npz"):
        assert Path(path).stat().st_size > 200
    assert (checkout.parent / "Pictures" / "trip" / "0.jpg.xmp").is_file()


def test_links_lead_somewhere() -> None:
    pages = [PROJECT / "README.md", PROJECT / "README.zh.md", *(PROJECT / "docs").glob("*.md")]
    for page in [*pages, PROJECT / "data" / "README.md", PROJECT / "benchmarks" / "README.md"]:
        for target in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text(encoding="utf-8")):
            file, _, heading = target.partition("#")
            other = page.parent / file if file else page
            assert other.exists(), f"{page.name}: {target}"
            if heading:
                titles = re.findall(r"^#+ (.+)$", other.read_text(encoding="utf-8"), re.M)
                slugs = [re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in titles]
                assert heading in slugs, f"{page.name}: {target}"


def test_the_code_is_on_the_map() -> None:
    """Every module is in the table for newcomers, in both languages, and nothing that is gone."""
    modules = {path.name for path in (PROJECT / "captioner").glob("*.py")} - {"__init__.py"}
    for name in ("README.md", "README.zh.md"):
        page = (PROJECT / name).read_text(encoding="utf-8")
        rows = re.findall(r"^\| (`.+?) \|", page, re.M)
        listed = {file for row in rows for file in re.findall(r"`(\w+\.py)`", row)}
        assert listed == modules | {"__main__.py"}, name
