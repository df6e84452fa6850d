"""The guide, followed word for word: its files are written, its commands run as they stand."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import captioner
from captioner.text import join, tokenize

PROJECT = Path(__file__).resolve().parents[1]
GUIDE = PROJECT / "docs" / "train-on-your-photos.md"
BLOCK = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.M | re.S)

# The captions of the folder of which the guide shows one file.
CHINESE = {
    "船": "湖上有一只蓝色的船。",
    "马": "谷仓旁边有一匹棕色的马 🐴",
    "雪": "雪地里有一个红色的雪橇。",
    "海滩": "海滩上有一条黄色的毛巾。",
}


def draw(path: Path, caption: str) -> None:
    """A picture that nearly is that of the others of this caption."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(list(caption.encode()))
    coarse = random.integers(0, 255, (3, 4, 3), dtype="uint8")
    whole = np.asarray(Image.fromarray(coarse).resize((71, 53), Image.Resampling.NEAREST), "int16")
    noise = np.random.default_rng(list(path.name.encode())).integers(-9, 10, whole.shape)
    Image.fromarray(np.clip(whole + noise, 0, 255).astype("uint8")).save(path)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which somebody did what the guide says."""
    home = tmp_path_factory.mktemp("home")
    blocks = BLOCK.findall(GUIDE.read_text(encoding="utf-8"))
    table, shown = (next(one for one in blocks if one[0] == kind) for kind in ("csv", "text"))
    for row in csv.DictReader(io.StringIO(table[2])):
        draw(home / Path(table[1]).parent / row["photo"], row["caption"])
    for thing, caption in CHINESE.items():
        for number in (1, 2, 3):
            file = home / "照片" / ("val" if number == 3 else "train") / f"{thing}{number}.txt"
            draw(file.with_suffix(".jpg"), caption)
            file.write_text(caption + "\n", encoding="utf-8")
    assert (home / shown[1]).read_text(encoding="utf-8") == shown[2]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(PROJECT),
    }
    for kind, name, content in blocks:
        if kind == "csv":
            (home / name).write_text(content, encoding="utf-8")
        elif kind == "sh":
            done = subprocess.run(
                ["bash", "-e", "-c", content], cwd=home, env=environment, timeout=1500,
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{content}\n{done.stdout}\n{done.stderr}"
            if "--csv" in content:
                text = (home / table[1]).read_text(encoding="utf-8")
                drafts = [row["caption"] for row in csv.DictReader(io.StringIO(text))]
                assert len(drafts) == 12
                assert all(drafts)
    return home


@pytest.mark.slow
def test_guide_ends_in_captions_that_can_be_viewed(followed: Path) -> None:
    lines = map(json.loads, (followed / "照片.jsonl").read_text(encoding="utf-8").splitlines())
    written = {Path(line["photo"]).stem: line for line in lines}
    assert sorted(written) == sorted(
        f"{thing}{number}" for thing in CHINESE for number in (1, 2, 3)
    )
    for name, line in written.items():
        caption = CHINESE[name[:-1]]
        assert line["caption"] == join(tokenize(caption))
        assert line["captions"][0]["words"] == tokenize(caption, "jieba")
        split = "val" if name.endswith("3") else "train"
        assert (followed / "maps" / split / f"{name}.png").is_file()
    page = (followed / "照片.html").read_text(encoding="utf-8")
    assert page.count('class="photo"') == 12

    model = captioner.load(followed / "runs" / "photos")
    for name, text in (
        ("2024/lac-3.jpg", "un bateau bleu sur le lac l'été"),
        ("grange-3.jpg", "un cheval brun près d'une grange 🐴"),
        ("neige-1.jpg", "une luge rouge dans la neige ❄️"),
        ("plage-2.jpg", "une serviette jaune à la plage"),
    ):
        assert captioner.describe(model, followed / "photos" / name).text == text
    for run in ("photos", "照片"):
        page = (followed / "runs" / run / "samples.html").read_text(encoding="utf-8")
        assert page.count('class="photo"') == 4
