"""Kinds of attention side by side."""

import json
from pathlib import Path

import keras
import pytest

from captioner import compare, scenes, training
from captioner.__main__ import main


@pytest.mark.slow
def test_compare_on_scenes(
    module_tiny_encoder: keras.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "build_encoder", lambda *_: module_tiny_encoder)
    scenes.write(tmp_path / "scenes", count=60, seed=1, image_size=96)
    command = [
        *("compare", "--data", str(tmp_path / "scenes"), "--out", str(tmp_path / "out")),
        *("--kinds", "none", "hard", "--epochs", "6", "--min-count", "1", "--beam", "2"),
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
    assert {"alpha_correctness", "evidence_pointing", "uniform_correctness"} <= set(rows["hard"])
    table = (tmp_path / "out" / "compare.md").read_text().splitlines()
    assert table[0].startswith("| | bleu 1 | bleu 4 |")
    assert len({line.count("|") for line in table}) == 1
    history = (tmp_path / "out" / "hard" / "history.csv").read_text()
    assert "baseline" in history.splitlines()[0]

    # What is finished is used again.
    assert main(command) == 0
    assert (tmp_path / "out" / "hard" / "history.csv").read_text() == history
    again = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert again == rows


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
