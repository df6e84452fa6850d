"""Commands, as users type them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from PIL import Image

from captioner import inference
from captioner.__main__ import COMMANDS, main
from captioner.model import Captioner, save_model

SHIPPED = inference.shipped_models()["photo"]


@pytest.fixture
def model(tiny_model: Captioner, tmp_path: Path) -> Path:
    path = tmp_path / "model.keras"
    save_model(tiny_model, path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    for number, name in enumerate(["a.jpg", "trip/b.png", "trip/day 2/b.webp"]):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (50 + number, 40), (number * 90, 80, 200)).save(path)
    return folder


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_caption_one_photo(model: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("caption", photos / "a.jpg", "--model", model) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("word")
    assert printed.count("\n") == 1


def test_caption_a_folder_with_everything(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    status = run(
        *("caption", photos, "--model", model, "--beam", 3, "--overlay", out / "overlays"),
        *("--maps", out / "maps", "--jsonl", out / "captions.jsonl"),
    )
    assert status == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        str(photos / name) for name in ("a.jpg", "trip/b.png", "trip/day 2/b.webp")
    ]
    written = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    assert written == [
        "captions.jsonl",
        *("maps/a.npz", "maps/trip/b.npz", "maps/trip/day 2/b.npz"),
        *("overlays/a.png", "overlays/trip/b.png", "overlays/trip/day 2/b.png"),
    ]
    records = [json.loads(line) for line in (out / "captions.jsonl").read_text().splitlines()]
    assert [record["caption"] for record in records] == [line.split(": ")[1] for line in lines]
    with np.load(out / "maps" / "a.npz") as maps, Image.open(out / "overlays/a.png") as picture:
        words = records[0]["captions"][0]["words"]
        assert list(maps["words"]) == words
        assert maps["attention"].shape == (len(words), 2, 3)
        assert picture.width > 300


def page_data(page: Path) -> list[dict[str, Any]]:
    """The photos of a page."""
    found = re.findall(r'class="photo">(.*?)</script>', page.read_text("utf-8"))
    return [json.loads(one) for one in found]


def test_one_page_for_a_folder_two_models_side_by_side(
    model: Path,
    tiny_encoder: keras.Model,
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = Captioner(tiny_encoder, ["a"], units=11, embedding_units=3, attention="none")
    save_model(other, tmp_path / "none.keras")
    (photos / "broken.jpg").write_bytes(b"")
    page = tmp_path / "new" / "page.html"
    options = ["--beam", 2, "--html", page, "--beside", tmp_path / "none.keras"]
    assert run("caption", photos, "--model", model, *options) == 2  # one photo is broken
    printed = capsys.readouterr()
    assert f"page → {page}" in printed.err
    assert printed.err.count("broken.jpg") == 1
    data = page_data(page)
    assert [photo["name"] for photo in data] == ["a.jpg", "b.png", "b.webp"]
    lines = [line.split(": ")[1] for line in printed.out.splitlines()]
    for photo, line in zip(data, lines, strict=True):
        first, second = photo["captions"]
        assert [first["model"], second["model"]] == [str(model), str(tmp_path / "none.keras")]
        assert first["text"] == line
        assert set(first["maps"]) == {"alpha", "evidence"}
        assert all(word["instead"] for word in first["words"])
        assert {word["word"] for word in second["words"]} == {"a"}
        assert "alpha" not in second["maps"]


@pytest.mark.parametrize("kind", ["gif", "webp"])
def test_animations_of_a_folder(kind: str, model: Path, photos: Path, tmp_path: Path) -> None:
    options = ["--animation", tmp_path / "out", "--animation-format", kind, "--beam", 1]
    assert run("caption", photos / "trip", "--model", model, *options, "--show", "evidence") == 0
    out = tmp_path / "out"
    written = sorted(path.relative_to(out) for path in out.rglob(f"*.{kind}"))
    assert written == [Path(f"b.{kind}"), Path("day 2") / f"b.{kind}"]
    with Image.open(out / written[0]) as picture:
        assert picture.n_frames > 1


def test_n_best_are_printed_with_their_scores(
    model: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("caption", photos / "a.jpg", "--model", model, "--n-best", 3) == 0
    lines = capsys.readouterr().out.splitlines()
    scores = [float(line.rsplit("(", 1)[1].rstrip(")")) for line in lines]
    assert len(lines) == len(set(lines)) == 3
    assert scores == sorted(scores, reverse=True)


def test_a_bad_photo_is_named_and_the_others_are_captioned(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = photos / "broken.jpg"
    bad.write_bytes(b"\xff\xd8\xff")
    assert run("caption", photos, "--model", model, "--overlay", tmp_path / "out") == 2
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 3
    assert str(bad) in printed.err
    assert "1 of 4 photos could not be captioned" in printed.err
    assert len(list((tmp_path / "out").rglob("*.png"))) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["caption"], "no photo given: name a photo, or a folder of photos"),
        (["caption", "nowhere.jpg"], "nowhere.jpg: no such file or folder"),
        (["caption", __file__, "--model", "none.keras"], "none.keras: no such model file"),
        (
            ["caption", __file__, "--beam", "many"],
            "Error parsing --beam: no type matching {None}|INT could be instantiated from ['many']",
        ),
        (["caption", __file__, "--beside", "runs/hard"], "for the page of --html FILE: name both"),
        (["caption", __file__, "--html", "a", "--beside", "photo"], "takes a second model"),
        (["evaluate"], "--data PATH is needed"),
        (["evaluate", "--data", "nowhere"], "nowhere does not exist"),
        (["train"], "--data PATH is needed"),
        (["caption", f"no\n{'o' * 9000}"], ": File name too long"),
        (["train", "--scores", "dot"], "Unrecognized options: --scores"),
        (
            ["train", "--preset", "best"],
            "choose one of default, photo, flickr8k-soft, fine-tune, ",
        ),
        (
            ["compare", "--preset", "best"],
            "choose one of default, photo, flickr8k-soft, fine-tune, ",
        ),
        (["train", "--score", "best"], "Expected one of"),
        (["draw"], "no command 'draw': choose one of train, caption"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1 and len(printed.err) < 2000
    assert printed.out == ""


def test_maps_of_a_model_without_attention_are_refused(
    tiny_encoder: keras.Model, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Captioner(tiny_encoder, ["a"], units=11, embedding_units=3, attention="none")
    save_model(model, tmp_path / "none.keras")
    options = ["caption", photos / "a.jpg", "--model", tmp_path / "none.keras"]
    for option in ("--overlay", "--animation", "--maps"):
        assert run(*options, option, tmp_path / "out") == 2
        assert "this model has no attention" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run(*options) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: captioner {command}" in capsys.readouterr().out


def test_overview_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert all(command in capsys.readouterr().out for command in [*COMMANDS][:1])
    assert main([]) == 2
    capsys.readouterr()
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == "0.1.0"


def test_encoders_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["encoders"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("efficientnet-lite0")
    assert any(line.startswith("vgg19") and "downloads" in line for line in lines)


def test_evaluate(
    tiny_model: Captioner, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run folder as the model: the scores go there; the data set is a CSV with splits."""
    run_folder = tmp_path / "run"
    save_model(tiny_model, run_folder / "captioner.keras")
    table = tmp_path / "captions.csv"
    table.write_text(
        "photo,caption,split\n"
        "a.jpg,a blue wall,train\n"
        "trip/b.png,word1 word2,test\n"
        "trip/b.png,word1 word2 word3,test\n"
        "trip/day 2/b.webp,a word4,test\n"
    )
    status = run(
        *("evaluate", "--data", table, "--images", photos, "--model", run_folder, "--beam", 2),
        *("--html", tmp_path / "page.html"),
    )
    assert status == 0
    scores = json.loads((run_folder / "scores.json").read_text())
    assert scores["photos"] == 2
    assert scores["split"] == "test"
    assert scores["search"] == "beam 2"
    assert "** 0.7" in scores["length_rule"]
    assert 0 <= scores["bleu_1"] <= 1
    assert scores["distinct_captions"] in (1, 2)
    assert "BLEU" in capsys.readouterr().out
    page = page_data(tmp_path / "page.html")
    assert sorted(photo["name"] for photo in page) == ["b.png", "b.webp"]
    ciders = [float(photo["notes"][0].removeprefix("CIDEr ")) for photo in page]
    assert ciders == sorted(ciders, reverse=True)
    (notes,) = (photo["notes"] for photo in page if photo["name"] == "b.png")
    assert notes[1:] == ["word1 word2", "word1 word2 word3"]
    assert set(page[0]["captions"][0]["maps"]) == {"alpha", "evidence"}

    out = tmp_path / "elsewhere.json"
    options = ["--images", photos, "--model", run_folder, "--split", "train", "--out", out]
    assert run("evaluate", "--data", table, *options) == 0
    assert json.loads(out.read_text())["cider"] is None  # one photo has no idf


def test_tune_saves_what_is_then_the_default(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "captions.csv"
    table.write_text(
        "photo,caption,split\na.jpg,word1 word2,dev\ntrip/b.png,word3 word4 word5,dev\n"
        "trip/day 2/b.webp,word1,test\n"
    )
    data = ["--data", table, "--images", photos]
    before = inference.load(model)
    status = run(
        *("tune", *data, "--model", model, "--out", tmp_path / "tuned.json"),
        *("--beams", 2, 3, "--length-penalties", 0.5, "--no-repeats", 0, 2),
    )
    assert status == 0
    tuned = json.loads((tmp_path / "tuned.json").read_text())
    assert [(row["beam"], row["no_repeat"]) for row in tuned["tried"]] == [
        (2, 0), (2, 2), (3, 0), (3, 2)
    ]  # fmt: skip
    best = max(tuned["tried"], key=lambda row: row["cider"])
    assert tuned["best"] == {name: best[name] for name in ("beam", "length_penalty", "no_repeat")}
    after = inference.load(model)
    assert after.decoding == tuned["best"]
    for mine, other in zip(after.weights, before.weights, strict=True):
        np.testing.assert_array_equal(mine, other)

    run("evaluate", *data, "--model", model, "--out", tmp_path / "scores.json")
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["search"] == f"beam {best['beam']}"
    assert "** 0.5" in scores["length_rule"]
    run("evaluate", *data, "--model", model, "--out", tmp_path / "scores.json", "--beam", 1)
    assert json.loads((tmp_path / "scores.json").read_text())["search"] == "beam 1"
    capsys.readouterr()
    assert run("tune", *data, "--model", model, "--beams") == 2


@pytest.mark.slow
def test_shipped_model_captions_the_sample_photos_from_a_cold_shell(tmp_path: Path) -> None:
    """`captioner demo` as typed: captions on stdout, nothing but progress on stderr, overlays."""
    result = subprocess.run(
        [sys.executable, "-m", "captioner", "demo", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    captions = dict(line.rsplit("/", 1)[1].split(": ") for line in result.stdout.splitlines()[:4])
    assert list(captions) == ["astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg"]
    assert {"woman", "man", "person", "girl", "boy"} & set(captions["astronaut.png"].split())
    for line in result.stderr.splitlines():
        assert "→" in line, f"noise on stderr: {line}"
    assert {path.name for path in tmp_path.iterdir()} == {
        *("astronaut.png", "chelsea.png", "coffee.png", "rocket.png", "index.html"),
    }


@pytest.mark.parametrize("name", inference.shipped_models())
def test_shipped_models_are_small_and_say_what_they_are(name: str) -> None:
    path = inference.shipped_models()[name]
    assert path.stat().st_size < 30e6
    card = (path.parent / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert card.startswith(f"# `{name}`") and "python train.py" in card
    model = inference.load(name)
    assert model.about["encoder"].startswith("efficientnet-lite")
    assert ("coco" in model.about["data"]) == (name == "photo")
    assert model.dtype_policy.name == "float32"
