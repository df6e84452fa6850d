"""What is here and what is missing, as people ask for it."""

import shutil
from pathlib import Path

import pytest

from captioner import doctor, inference
from captioner.__main__ import main


def test_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr()
    rows = dict(line.split(None, 1) for line in printed.out.splitlines())
    assert rows["captioner"].startswith("0.1.0")
    assert rows["tensorflow"].startswith("2.")
    assert rows["captioning"].startswith("works; photo 2")
    assert rows["training"] == "works; encoder efficientnet-lite0"
    assert rows["number"].split()[1] in ("float32", "mixed_bfloat16")
    assert rows["Latin"].endswith("DejaVuSans.ttf")
    assert int(rows["processors"]) >= 1
    assert printed.err == ""


def test_what_is_missing_is_named_with_its_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inference, "shipped_models", lambda: {"photo": tmp_path / "photo.keras"})
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setitem(doctor.OPTIONAL, "no-such-package", "nothing; pip install it")
    monkeypatch.setattr(doctor.lettering, "font_of", lambda text: ("DejaVuSans.ttf", False))
    assert main(["doctor"]) == 2
    printed = capsys.readouterr()
    for line in (
        f"captioning         does not work: {tmp_path / 'photo.keras'}: no such model file",
        "training           works",
        "java               missing: wanted for METEOR",
        "no-such-package    missing: wanted for nothing; pip install it",
        "Chinese font       missing: wanted for overlays of captions in Chinese",
    ):
        assert line in printed.out
    assert printed.err == "captioner: captioning will not work here: see above\n"
