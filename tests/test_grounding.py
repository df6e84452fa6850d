"""Maps on boxes: golden numbers on tiny grids, and the whole measurement on photos made here."""

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from PIL import Image

import captioner
from captioner import scenes
from captioner.config import DataConfig, SearchConfig
from captioner.errors import InputError
from captioner.evidence import evidence_maps
from captioner.grounding import MAPS, Written, ground, table
from captioner.images import Geometry, load_photo
from captioner.map_scores import (
    Word,
    box_shares,
    by_category,
    centre_map,
    correctness,
    pointing,
    pointing_hits,
    summarize,
    uniform_map,
)
from captioner.model import Captioner, save_model

GRID = (2, 3)
LANDSCAPE = Geometry(60, 40, 24)  # cells of 20 x 20 px


# --- Measures ------------------------------------------------------------------------------------


def test_shares_of_cells_cut_by_overlapping_boxes() -> None:
    boxes = np.array([[10, 0, 30, 20], [20, 10, 40, 30]])
    # Cell (0, 1) has 200 of 400 px from each, 100 of them from both.
    expected = [[0.5, 0.75, 0], [0, 0.5, 0]]
    np.testing.assert_allclose(box_shares(boxes, LANDSCAPE, GRID), expected)
    np.testing.assert_allclose(box_shares(boxes[[1, 0, 1]], LANDSCAPE, GRID), expected)
    np.testing.assert_allclose(box_shares(boxes[:1], LANDSCAPE, GRID), [[0.5, 0.5, 0], [0, 0, 0]])
    # A box inside of one cell, and one that is the photo.
    np.testing.assert_allclose(
        box_shares(np.array([[41, 22, 45, 27.0]]), LANDSCAPE, GRID), [[0, 0, 0], [0, 0, 20 / 400]]
    )
    np.testing.assert_allclose(box_shares(np.array([[0, 0, 60, 40]]), LANDSCAPE, GRID), 1)


@pytest.mark.parametrize(
    ("geometry", "box", "grid", "expected"),
    [
        # crop: the window is x 10..50, y 0..40.
        (Geometry(60, 40, 24, "crop"), (0, 0, 20, 40), (2, 2), [[0.5, 0], [0.5, 0]]),
        (Geometry(60, 40, 24, "crop"), (0, 0, 10, 40), (2, 2), [[0, 0], [0, 0]]),
        # pad: the window is x 0..60, y -10..50; nothing beyond the photo is inside.
        (Geometry(60, 40, 24, "pad"), (0, 0, 60, 40), (2, 3), np.full((2, 3), 2 / 3)),
        (Geometry(60, 40, 24, "pad"), (-5, -20, 70, 60), (2, 3), np.full((2, 3), 2 / 3)),
        # The same upright: the window is x -10..50.
        (Geometry(40, 60, 24, "pad"), (0, 0, 5, 30), (3, 2), [[1 / 6, 0], [1 / 12, 0], [0, 0]]),
        (Geometry(40, 60, 24), (0, 0, 10, 30), (3, 2), [[0.5, 0], [0.25, 0], [0, 0]]),
    ],
)
def test_shares_by_geometry(
    geometry: Geometry, box: tuple[float, ...], grid: tuple[int, int], expected: Any
) -> None:
    np.testing.assert_allclose(box_shares(np.array([box]), geometry, grid), expected)


def test_shares_are_those_of_counted_points() -> None:
    """An independent count on a raster finer than all edges."""
    random = np.random.default_rng(5)
    for resize in ("stretch", "crop", "pad"):
        geometry = Geometry(70, 42, 24, resize)
        corners = random.integers(0, (70, 42), (5, 2, 2))
        boxes = np.concatenate([corners.min(axis=1), corners.max(axis=1) + 1], axis=1)
        shares = box_shares(boxes, geometry, (5, 7))
        for row in range(5):
            for column in range(7):
                left, top, right, bottom = geometry.cell_box(row, column, (5, 7))
                x = left + (np.arange(60) + 0.5) * (right - left) / 60
                y = top + (np.arange(60) + 0.5) * (bottom - top) / 60
                inside = np.zeros((60, 60), bool)
                for x0, y0, x1, y1 in boxes:
                    inside |= ((x0 < x) & (x < x1))[None] & ((y0 < y) & (y < y1))[:, None]
                assert shares[row, column] == pytest.approx(inside.mean(), abs=0.03)


def test_correctness() -> None:
    shares = np.array([[0.5, 0.75, 0], [0, 0.5, 0]])
    attention = np.array([[0.2, 0.4, 0], [0, 0.1, 0.3]])
    assert correctness(attention, shares) == pytest.approx(0.1 + 0.3 + 0.05)
    # A uniform map scores the boxes' share of the photo.
    assert correctness(uniform_map(GRID), shares) == pytest.approx(1.75 / 6)


def test_pointing() -> None:
    hits = pointing_hits(np.array([[10, 0, 30, 20], [21, 10, 40, 30]]), LANDSCAPE, GRID)
    # The centres are at x 10, 30, 50 and y 10, 30; edges belong to the box.
    np.testing.assert_array_equal(hits, [[True, True, False], [False, True, False]])
    assert pointing(np.array([[0.2, 0.4, 0], [0, 0.1, 0.3]]), hits) == 1
    assert pointing(np.array([[0.2, 0.3, 0], [0, 0.1, 0.4]]), hits) == 0
    # Equal peaks count for their share: a uniform map scores what a blind guess does.
    assert pointing(np.array([[0.4, 0.0, 0], [0, 0.2, 0.4]]), hits) == 0.5
    assert pointing(uniform_map(GRID), hits) == 0.5
    assert pointing(centre_map(GRID), hits) == 1
    # With pad, centres beyond the photo are never hit: rows of 15 px from -10 on.
    padded = Geometry(60, 40, 24, "pad")
    hits = pointing_hits(np.array([[-5, -20, 70, 60]]), padded, (4, 3))
    np.testing.assert_array_equal(hits[:, 0], [False, True, True, False])


def test_centre_map() -> None:
    # Offsets of 1/3 of the width are 4/3 sigma: exp(-8/9) = 0.4111, and 0.4111 / 1.8222 = 0.2256.
    expected = np.array([[0.2256, 0.5488, 0.2256]]) / 2
    np.testing.assert_allclose(centre_map(GRID), np.repeat(expected, 2, axis=0), atol=1e-4)
    assert centre_map((7, 5)).argmax() == 3 * 5 + 2


# --- Statistics ----------------------------------------------------------------------------------


def word(photo: int, category: str, alpha: float, uniform: float, centre: float = 0.5) -> Word:
    inside = {"alpha": alpha, "uniform": uniform, "centre": centre}
    return Word(photo, category, inside, {name: float(x > 0.3) for name, x in inside.items()})


def test_summary() -> None:
    """A photo with one word and one with three: the mean is over words, the draw over photos."""
    words = [word(4, "dog", 0.2, 0.1), *[word(9, "cat", 0.6, 0.2)] * 3]
    summary = summarize(words)
    alpha = summary["alpha"]["correctness"]
    assert alpha["mean"] == pytest.approx((0.2 + 3 * 0.6) / 4)
    # One draw in four holds only the one photo, one in four only the other.
    np.testing.assert_allclose(alpha["interval"], [0.2, 0.6])
    assert alpha["ratio_to_uniform"] == pytest.approx(2.0 / 0.7)
    # Maps are compared within each draw: ratios of 2 and of 3, not 0.2 / 0.2 to 0.6 / 0.1.
    np.testing.assert_allclose(alpha["ratio_to_uniform_interval"], [2, 3])
    assert alpha["ratio_to_centre"] == pytest.approx(1.0)
    assert summary["uniform"]["correctness"]["mean"] == pytest.approx(0.7 / 4)
    assert set(summary["uniform"]["correctness"]) == {"mean", "interval"}
    point = summary["alpha"]["pointing"]
    assert point["mean"] == 0.75
    assert point["ratio_to_uniform"] is None  # the uniform map never points right here
    assert point["ratio_to_uniform_interval"] is None
    assert point["ratio_to_centre"] == 0.75


def test_the_interval_is_of_photos_and_repeats() -> None:
    random = np.random.default_rng(3)
    words = [word(photo, "dog", alpha, 0.3) for photo, alpha in enumerate(random.random(101))]
    low, high = summarize(words)["alpha"]["correctness"]["interval"]
    error = np.std([one.correctness["alpha"] for one in words]) / 101**0.5
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert summarize(words)["alpha"]["correctness"]["interval"] == [low, high]
    # The same words five times over in the same photos tell nothing new.
    assert summarize(words * 5)["alpha"]["correctness"]["interval"] == pytest.approx([low, high])


def test_by_category() -> None:
    words = [word(4, "dog", 0.2, 0.1), *[word(9, "cat", 0.6, 0.2)] * 3, word(8, "ant", 1, 0.2)]
    rows = by_category(words)
    assert list(rows) == ["cat", "ant", "dog"]
    assert rows["cat"]["words"] == 3
    assert rows["cat"]["photos"] == 1
    assert rows["cat"]["maps"]["alpha"]["correctness"] == pytest.approx(0.6)
    assert rows["cat"]["maps"]["uniform"] == {"correctness": pytest.approx(0.2), "pointing": 0}


# --- The whole -----------------------------------------------------------------------------------

WORDS = ["a", "dog", "man", "by", "the", "red", "runs"]
DOG, MAN = 5, 6
PHOTOS = {"a.png": (60, 40), "b.png": (30, 50), "c.png": (45, 45), "bad.png": (9, 9)}
BOXES = {  # of a photo: category, left, top, width, height
    "a.png": [("dog", 10, 0, 20, 20), ("dog", 20, 10, 20, 20), ("person", 40, 0, 20, 40)],
    "b.png": [("person", 0, 0, 15, 25)],
    "bad.png": [("dog", 0, 0, 9, 9)],
}
CAPTIONS = {
    "a.png": ["A dog by the man .", "the puppy runs"],
    "b.png": ["the red man", "a dog"],
    "c.png": ["a dog by a man"],
    "bad.png": ["a dog"],
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    (root / "images").mkdir(parents=True)
    (root / "annotations").mkdir()
    random = np.random.default_rng(2)
    images = []
    for number, (name, (width, height)) in enumerate(PHOTOS.items()):
        pixels = random.integers(0, 255, (height, width, 3), dtype="uint8")
        Image.fromarray(pixels).save(root / "images" / name)
        images.append({"id": number, "file_name": name, "width": width, "height": height})
    (root / "images" / "bad.png").write_bytes(b"no photo")
    ids = {name: number for number, name in enumerate(PHOTOS)}
    captions = [
        {"id": len(PHOTOS) * place + ids[name], "image_id": ids[name], "caption": caption}
        for name, own in CAPTIONS.items()
        for place, caption in enumerate(own)
    ]
    categories = ["person", "dog"]
    instances = [
        {"image_id": ids[name], "category_id": categories.index(category), "bbox": box}
        for name, own in BOXES.items()
        for category, *box in own
    ]
    for name, document in {
        "captions": {"images": images, "annotations": captions},
        "instances": {
            "images": images,
            "annotations": instances,
            "categories": [{"id": key, "name": name} for key, name in enumerate(categories)],
        },
    }.items():
        (root / "annotations" / f"{name}.json").write_text(json.dumps(document))
    return root


def build(encoder: keras.Model, **options: Any) -> Captioner:
    keras.utils.set_random_seed(11)
    sizes = {"units": 11, "attention_units": 5, "embedding_units": 3}
    model = Captioner(encoder, WORDS, **sizes, **options)
    for weight in model.decoder.trainable_weights:
        weight.assign(3 * weight)
    return model


def saved(model: Captioner, folder: Path, **bias: float) -> Path:
    """A run folder; the model writes the words with a bias above all."""
    if bias:
        values = np.full(len(model.vocabulary), -60.0)
        for name, value in bias.items():
            values[model.vocabulary.words.index(name)] = value
        model.decoder.head_words.bias.assign(values)
    save_model(model, folder / "captioner.keras")
    return folder


def shares_of(name: str, category: str) -> np.ndarray:
    boxes = np.array(
        [[x, y, x + w, y + h] for kind, x, y, w, h in BOXES[name] if kind == category], float
    )
    return box_shares(boxes, Geometry(*PHOTOS[name], 24), GRID)


def test_generated_captions(
    tiny_encoder: keras.Model,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The model says "dog" of every photo; only a.png, which can be read, has a box of one."""
    run = saved(build(tiny_encoder), tmp_path / "run", dog=60.0)
    report = ground(DataConfig(data=data), None, run, SearchConfig(beam=2, max_words=1))
    assert (report["words"], report["photos"]) == (1, 1)
    assert report["photos_without_words"] == 2
    assert report["unreadable_photos"] == 1
    assert list(report["maps"]) == ["alpha", "evidence", "uniform", "centre"]

    model = captioner.load(run)
    caption = captioner.describe(model, data / "images" / "a.png", beam=2, max_words=1)
    assert caption.words == ("dog",)
    shares = shares_of("a.png", "dog")
    means = {name: one["correctness"]["mean"] for name, one in report["maps"].items()}
    assert means["alpha"] == pytest.approx((caption.attention[0] * shares).sum(), rel=1e-4)
    assert means["uniform"] == pytest.approx(1.75 / 6)
    square = np.asarray(Geometry(60, 40, 24).square(load_photo(data / "images" / "a.png")))
    regions = model.encode(square[None].astype("float32"))
    evidence = evidence_maps(model, regions, [[1, DOG]])[0, 0].reshape(GRID)
    assert means["evidence"] == pytest.approx((evidence * shares).sum(), rel=1e-3)
    assert means["evidence"] != pytest.approx(means["alpha"], rel=1e-3)

    assert json.loads((run / "ground.json").read_text()) == report
    assert report["search"].startswith("beam 2, score (sum of log p")
    assert report["split"] == "all"
    assert report["boxes"] == [str(data / "annotations" / "instances.json")]
    assert {"alpha", "evidence", "uniform", "centre", "words"} < set(report["definitions"])
    printed = capsys.readouterr()
    assert table(report) in printed.out
    assert f"result → {run / 'ground.json'}" in printed.out
    assert "bad.png: is not an image" in caplog.text


def test_reference_captions(tiny_encoder: keras.Model, data: Path, tmp_path: Path) -> None:
    """Counted: dog and man of a.png, man of b.png. The model does not know "puppy"; nothing in
    b.png is boxed as a dog; c.png has no boxes."""
    run, out = saved(build(tiny_encoder), tmp_path / "run"), tmp_path / "out.json"
    report = ground(DataConfig(data=data), None, run, SearchConfig(), out, reference=True)
    assert report["words"] == 3
    assert (report["photos"], report["photos_without_words"]) == (2, 1)
    assert {name: row["words"] for name, row in report["categories"].items()} == {
        "person": 2,
        "dog": 1,
    }
    assert (report["captions"], report["search"]) == ("reference", "teacher forcing")
    assert json.loads(out.read_text()) == report
    assert not (run / "ground.json").exists()

    model = captioner.load(run)
    inside = {}
    for name, tokens, place, category in (
        ("a.png", [1, 4, DOG, 7, 8, MAN], 1, "dog"),
        ("a.png", [1, 4, DOG, 7, 8, MAN], 4, "person"),
        ("b.png", [1, 8, 9, MAN], 2, "person"),
    ):
        photo = load_photo(data / "images" / name)
        square = np.asarray(Geometry(*PHOTOS[name], 24).square(photo), "float32")
        outputs = model({"photos": square[None], "tokens": np.array([[tokens[:-1]]])})
        attention = np.asarray(outputs["attention"][0, 0, place]).reshape(GRID)
        inside[name, category] = correctness(attention, shares_of(name, category))
    rows = {name: row["maps"]["alpha"]["correctness"] for name, row in report["categories"].items()}
    assert rows["dog"] == pytest.approx(inside["a.png", "dog"], rel=1e-4)
    people = (inside["a.png", "person"] + inside["b.png", "person"]) / 2
    assert rows["person"] == pytest.approx(people, rel=1e-4)
    # Cut at two words, only "a dog" is left.
    cut = ground(DataConfig(data=data), None, run, SearchConfig(max_words=2), out, reference=True)
    assert cut["words"] == 1


def test_batches_and_limit(
    tiny_encoder: keras.Model, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saved(build(tiny_encoder), tmp_path / "run")
    whole = ground(DataConfig(data=data), None, run, SearchConfig(), reference=True)
    monkeypatch.setattr("captioner.grounding.BATCH_PHOTOS", 1)
    single = ground(DataConfig(data=data), None, run, SearchConfig(), reference=True)
    assert single["words"] == whole["words"] == 3
    for name in ("alpha", "evidence"):
        assert single["maps"][name]["correctness"]["mean"] == pytest.approx(
            whole["maps"][name]["correctness"]["mean"], rel=1e-3
        )
    first = ground(DataConfig(data=data, limit=1), None, run, SearchConfig(), reference=True)
    assert (first["photos"], first["photos_without_words"]) == (1, 0)


def test_what_is_cropped_away_is_not_counted(
    tiny_encoder: keras.Model, data: Path, tmp_path: Path
) -> None:
    file = data / "annotations" / "instances.json"
    document = json.loads(file.read_text())
    for box in document["annotations"]:
        if box["image_id"] == 0:
            box["bbox"] = [0, 0, 10, 40]  # a.png, cropped, begins at x = 10
    file.write_text(json.dumps(document))
    run = saved(build(tiny_encoder, resize="crop"), tmp_path / "run")
    report = ground(DataConfig(data=data), None, run, SearchConfig(), reference=True)
    assert (report["words"], report["resize"]) == (1, "crop")
    assert list(report["categories"]) == ["person"]  # of b.png


def test_hard_attention_is_also_measured_on_samples(
    tiny_encoder: keras.Model, data: Path, tmp_path: Path
) -> None:
    run = saved(build(tiny_encoder, attention="hard"), tmp_path / "run")
    report = ground(DataConfig(data=data), None, run, SearchConfig(), reference=True)
    assert list(report["maps"]) == ["alpha", "evidence", "sample", "uniform", "centre"]
    again = ground(DataConfig(data=data), None, run, SearchConfig(), reference=True)
    assert again == report


def test_samples_are_drawn_from_alpha(tiny_model: Captioner) -> None:
    alpha = np.array([0.5, 0.0, 0.2, 0.3])
    attention = np.broadcast_to(alpha, (50, 40, 4))
    nothing = np.zeros(0)
    written = Written(tiny_model, nothing, nothing, nothing, attention, np.random.default_rng(1))
    maps = MAPS["sample"](written)
    assert maps.shape == (50, 40, 4)
    assert set(np.unique(maps)) == {0, 1}
    np.testing.assert_array_equal(maps.sum(axis=-1), 1)
    np.testing.assert_allclose(maps.mean(axis=(0, 1)), alpha, atol=0.04)
    assert not maps[..., 1].any()


def test_scenes(tiny_encoder: keras.Model, tmp_path: Path) -> None:
    """Drawn scenes: the split's own instances file, categories by their own names."""
    scenes.write(tmp_path / "scenes", count=20, image_size=64)
    keras.utils.set_random_seed(1)
    words = ["a", *scenes.SHAPES]
    model = Captioner(tiny_encoder, words, units=11, attention_units=5, embedding_units=3)
    run = saved(model, tmp_path / "run")
    data = DataConfig(data=tmp_path / "scenes")
    report = ground(data, "test", run, SearchConfig(), reference=True)
    # Two scenes of five captions, each with two shapes.
    assert (report["words"], report["photos"]) == (20, 2)
    assert set(report["categories"]) <= set(scenes.SHAPES)
    assert [Path(file).name for file in report["boxes"]] == ["instances_test.json"]
    assert report["split"] == "test"
    box_share = np.mean(
        [
            np.prod(np.subtract(thing.box[2:], thing.box[:2])) / 64**2
            for number in (9, 19)
            for thing in scenes.draw(1, number, 64).things
        ]
    )
    assert report["maps"]["uniform"]["correctness"]["mean"] == pytest.approx(box_share)


def test_input_errors(tiny_encoder: keras.Model, data: Path, tmp_path: Path) -> None:
    run = saved(build(tiny_encoder), tmp_path / "run", runs=60.0)
    options = SearchConfig(beam=1, max_words=1)

    def complaint(config: DataConfig, model: Path = run, **arguments: Any) -> str:
        with pytest.raises(InputError) as raised:
            ground(config, arguments.pop("split", None), model, options, **arguments)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    here = DataConfig(data=data)
    assert "--data PATH is needed" in complaint(DataConfig())
    assert "does not exist" in complaint(DataConfig(data=tmp_path / "nowhere"))
    assert "no such model file" in complaint(here, tmp_path / "none.keras")
    assert "has no split 'best'" in complaint(here, split="best")
    assert "no generated caption of 3 photos names a thing" in complaint(here)
    captions = data / "annotations" / "captions.json"
    assert "is not COCO instances JSON" in complaint(here, boxes=captions)

    none = saved(Captioner(tiny_encoder, WORDS, attention="none"), tmp_path / "none")
    assert "this model has no attention" in complaint(here, none)
    assert "only evidence would exist" in complaint(here, none)

    instances = data / "annotations" / "instances.json"
    document = json.loads(instances.read_text())
    document["images"][0]["width"] = 61
    instances.write_text(json.dumps(document))
    wrong = complaint(here, reference=True)
    assert "a.png: is 60x40, but its boxes are for a photo of 61x40" in wrong
    instances.write_text(json.dumps({"images": [], "annotations": [], "categories": []}))
    assert "none of the 4 photos" in complaint(here)
    instances.unlink()
    assert "no boxes beside its captions" in complaint(here)


@pytest.mark.slow
def test_real_boxes(tiny_encoder: keras.Model, data_root: Path, tmp_path: Path) -> None:
    """People's captions of 40 real photos: every map is measured on many words of many kinds."""
    words = ["a", "man", "woman", "people", "dog", "table", "train", "bus", "cat", "bike", "plate"]
    keras.utils.set_random_seed(1)
    model = Captioner(tiny_encoder, words, units=11, attention_units=5, embedding_units=3)
    run = saved(model, tmp_path / "run")
    data = DataConfig(data=data_root / "coco_boxes", limit=40)
    report = ground(data, None, run, SearchConfig(), reference=True)
    assert report["words"] > 50
    assert len(report["categories"]) > 3
    maps = report["maps"]
    # Photographers put things in the middle.
    assert maps["centre"]["correctness"]["mean"] > 1.1 * maps["uniform"]["correctness"]["mean"]
    for one in maps.values():
        for measure in ("correctness", "pointing"):
            low, high = one[measure]["interval"]
            assert 0 < low < one[measure]["mean"] < high < 1
