"""Files of every format so far can be read forever: tests/data/format_N, made by this very file.

python -m tests.test_formats          # writes tests/data/format_1 anew, should the format change
"""

import json
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import captioner
from captioner import training
from captioner.config import DataConfig, ModelConfig, TrainConfig, TrainingConfig, VocabularyConfig
from captioner.errors import InputError
from captioner.model import FORMAT, load_model
from captioner.training import train

DATA = Path(__file__).parent / "data"
COLOURS = ("red", "green", "blue", "white", "black", "orange", "purple")


def draw(folder: Path) -> None:
    for number in range(14):
        colour = COLOURS[number % 7]
        Image.new("RGB", (80 + number, 70), colour).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a {colour} wall\n{colour} paint\n")


def copied(number: int, tmp_path: Path) -> Path:
    """The stored run, with the photos it was trained on where its options say."""
    photos, run = tmp_path / "photos", tmp_path / "runs" / "run"
    photos.mkdir()
    draw(photos)
    shutil.copytree(DATA / f"format_{number}", run)
    options = json.loads((run / "config.json").read_text())
    options["data"]["data"] = str(photos)
    options["training"]["epochs"] += 1
    (run / "config.json").write_text(json.dumps(options))
    return run


def test_today_s_format_is_stored() -> None:
    assert (DATA / f"format_{FORMAT}").is_dir()


@pytest.mark.parametrize("number", range(1, FORMAT + 1))
def test_models_and_runs_of_old_formats(
    number: int, tmp_path: Path, module_tiny_encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(number, tmp_path)
    expected = json.loads((run / "expected.json").read_text())
    found = captioner.describe(captioner.load(run), tmp_path / "photos" / "3.png", beam=2)
    assert list(found.words) == expected["words"]
    np.testing.assert_allclose(found.attention, expected["attention"], atol=1e-4)
    assert found.score == pytest.approx(expected["score"], abs=1e-4)

    monkeypatch.setattr(training, "build_encoder", lambda *_, **__: module_tiny_encoder)
    before = (run / "history.csv").read_text().splitlines()
    train(TrainConfig(), run, resume=True)
    after = (run / "history.csv").read_text().splitlines()
    assert after[: len(before)] == before and len(after) == len(before) + 1


def test_newer_formats_are_refused(
    tmp_path: Path, module_tiny_encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(FORMAT, tmp_path)
    monkeypatch.setattr(training, "build_encoder", lambda *_, **__: module_tiny_encoder)
    checkpoint = run / "checkpoint" / "state.npz"
    with np.load(checkpoint) as arrays:
        values = {name: arrays[name] for name in arrays.files}
    np.savez(checkpoint, **{**values, "format": np.array(FORMAT + 1)})
    with pytest.raises(
        InputError, match=r"state.npz: format 2, made by a newer captioner; this one"
    ):
        train(TrainConfig(), run, resume=True)

    newer = tmp_path / "newer.keras"
    with zipfile.ZipFile(run / "captioner.keras") as source, zipfile.ZipFile(newer, "w") as target:
        for member in source.infolist():
            content = source.read(member)
            if member.filename == "config.json":
                config = json.loads(content)
                config["config"]["format_version"] = FORMAT + 1
                content = json.dumps(config).encode()
            target.writestr(member, content)
    with pytest.raises(InputError, match=r"newer.keras: format 2, made by a newer .*: update it"):
        load_model(newer)


def write(folder: Path) -> None:
    """Trains a tiny model with all that has a state of its own, and notes what it says."""
    import tempfile

    from tests.conftest import _tiny_encoder

    training.build_encoder = lambda *_, **__: _tiny_encoder()
    with tempfile.TemporaryDirectory() as name:
        photos = Path(name) / "photos"
        photos.mkdir()
        draw(photos)
        config = TrainConfig(
            DataConfig(data=photos),
            VocabularyConfig(min_count=1),
            ModelConfig(
                units=11,
                attention_units=5,
                embedding_units=3,
                dropout=0.2,
                positions=True,
                grounding_weight=0.5,
                attention="hard",
            ),
            TrainingConfig(
                epochs=16,
                soft_epochs=12,
                batch_photos=3,
                learning_rate=0.02,
                precision="float32",
                views=2,
                average=0.9,
            ),
        )
        run = Path(name) / "runs" / "run"
        train(config, run)
        found = captioner.describe(captioner.load(run), photos / "3.png", beam=2)
        expected = {
            "words": found.words,
            "attention": found.attention.round(6).tolist(),
            "score": found.score,
        }
        (run / "expected.json").write_text(json.dumps(expected) + "\n")
        options = json.loads((run / "config.json").read_text())
        options["data"]["data"] = "photos"
        (run / "config.json").write_text(json.dumps(options, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        keep = shutil.ignore_patterns("tensorboard", "*.png", "*.html", "previous.npz")
        shutil.copytree(run, folder, ignore=keep)


if __name__ == "__main__":
    write(DATA / f"format_{FORMAT}")
    sys.exit()
