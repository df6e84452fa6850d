"""Kinds of attention side by side."""

import json
from pathlib import Path

import keras
import pytest

from captioner import compare, scenes, training
from captioner.__main__ import main
from captioner.config import DataConfig
from captioner.errors import InputError


@pytest.mark.slow
def test_compare_on_scenes(
    module_tiny_encoder: keras.Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(training, "build_encoder", lambda *_, **__: module_tiny_encoder)
    # The tiny model may name nothing; that real ones are measured, test_grounding.py shows.
    measured = []

    def ground(data: DataConfig, split: str, run: Path, _: object) -> dict[str, object]:
        measured.append((data.data, split, run.name))
        if len(measured) > 1:
            raise InputError("no generated caption names a thing with a box")
        cells = {"correctness": {"mean": 0.5}, "pointing": {"mean": 0.25}}
        return {"maps": {"alpha": cells}}

    monkeypatch.setattr(compare, "ground", ground)
    scenes.write(tmp_path / "scenes", count=60, seed=1, image_size=96)
    command = [
        *("compare", "--data", str(tmp_path / "scenes"), "--out", str(tmp_path / "out")),
        *("--kinds", "none", "hard", "--epochs", "2", "--min-count", "1", "--beam", "2"),
        *("--learning-rate", "0.02", "--batch-photos", "8", "--precision", "float32"),
        *("--units", "11", "--attention-units", "5", "--embedding-units", "7"),
    ]
    assert main(command) == 0
    rows = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert list(rows) == ["none", "hard"]
    for row in rows.values():
        assert 0 <= row["exactly_right"] <= 1
        assert 0 <= row["bleu_4"] <= 1
        assert row["minutes"] > 0
    assert "alpha_pointing" not in rows["none"]
    assert rows["hard"]["alpha_correctness"] == 0.5
    assert measured == [(tmp_path / "scenes", "test", "hard")]
    table = (tmp_path / "out" / "compare.md").read_text().splitlines()
    assert table[0].startswith("| | bleu 1 | bleu 4 |")
    assert len({line.count("|") for line in table}) == 1
    history = (tmp_path / "out" / "hard" / "history.csv").read_text()
    assert "baseline" in history.splitlines()[0]

    # By another name of its split, too.
    data, run = str(tmp_path / "scenes"), str(tmp_path / "out" / "none")
    assert main(["evaluate", "--data", data, "--split", "val", "--model", run, "--beam", "1"]) == 0
    assert "% of the scenes described exactly right" in capsys.readouterr().out

    # What is finished is used again, and kinds that are not asked for keep their rows.
    command[command.index("none")] = "soft"
    assert main(command) == 0
    assert (tmp_path / "out" / "hard" / "history.csv").read_text() == history
    again = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert list(again) == ["none", "soft", "hard"]
    assert again["none"] == rows["none"]
    assert "alpha_correctness" not in again["hard"]  # it named nothing: left blank, no end


@pytest.mark.parametrize("text", ["{", "[1]", '{"soft": 3}'])
def test_rows_of_something_else(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "compare.json").write_text(text)
    assert main(["compare", "--data", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "compare.json: not the rows of a comparison" in capsys.readouterr().err


def test_table() -> None:
    rows = {
        "none": {"bleu_4": 0.123, "cider": None, "distinct_captions": 12, "minutes": 3.21},
        "soft": {"bleu_4": 0.2, "alpha_pointing": 0.55},
    }
    assert compare.table(rows).splitlines() == [
        "| | bleu 4 | cider | distinct captions | minutes | alpha pointing |",
        "| --- | --- | --- | --- | --- | --- |",
        "| none | 12.3 |  | 12 | 3 |  |",
        "| soft | 20.0 |  |  |  | 55.0 |",
    ]


def test_unknown_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--data", ".", "--kinds", "soft", "fuzzy"]) == 2
    assert "--kinds fuzzy: choose among none, soft, hard" in capsys.readouterr().err
