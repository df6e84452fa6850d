"""Drawn scenes: the picture, the boxes, the captions and the files all say the same."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from captioner import datasets, scenes
from captioner.errors import InputError
from captioner.scenes import Thing
from captioner.text import tokenize

SEED = 5
NUMBERS = range(97)
SIDE = 131  # px
COUNT = 43  # scenes in the written data set

RED_RING = Thing("ring", "red", "small", (2, 3, 13, 14))
BLUE_STAR = Thing("star", "blue", "large", (17, 5, 36, 24))


@pytest.fixture(scope="module")
def drawn() -> list[scenes.Scene]:
    return [scenes.draw(SEED, number, SIDE) for number in NUMBERS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "scenes"
    counts = scenes.write(out, COUNT, seed=SEED, image_size=SIDE)
    assert counts == {"train": 35, "dev": 4, "test": 4}  # dev: 8, 18, 28, 38; test: 9, 19, 29, 39
    return out


def document(folder: Path, name: str) -> dict:
    return json.loads((folder / "annotations" / f"{name}.json").read_text())


# --- One scene -----------------------------------------------------------------------------------


def test_a_scene_depends_on_seed_and_number_alone(drawn):
    for number in (61, 7):  # out of order
        assert scenes.draw(SEED, number, SIDE) == drawn[number]
    assert scenes.draw(SEED + 1, 7, SIDE) != drawn[7]
    assert len({scene.image.tobytes() for scene in drawn}) == len(drawn)


def test_boxes_are_where_the_picture_differs_from_its_background(drawn):
    for number, scene in zip(NUMBERS, drawn, strict=True):
        empty = np.asarray(scenes.background(SEED, number, SIDE)).astype(int)
        changed = np.abs(np.asarray(scene.image).astype(int) - empty).max(axis=-1) > 4
        for thing in scene.things:
            left, top, right, bottom = thing.box
            part = changed[top:bottom, left:right]
            rows, columns = np.flatnonzero(part.any(axis=1)), np.flatnonzero(part.any(axis=0))
            measured = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
            wanted = (0, 0, right - left, bottom - top)
            np.testing.assert_allclose(measured, wanted, atol=1, err_msg=f"{number} {thing}")
            changed[top:bottom, left:right] = False
        assert not changed.any(), number


@pytest.mark.parametrize("image_size", [64, 67, 224])
def test_things_lie_apart_within_the_picture_and_as_the_relation_says(image_size):
    for number in NUMBERS:
        scene = scenes.draw(SEED, number, image_size)
        for thing in scene.things:
            left, top, right, bottom = thing.box
            assert min(left, top) > 0 and max(right, bottom) < image_size
            least, greatest = scenes.SIZES[thing.size]
            for side in (right - left, bottom - top):
                assert least * image_size - 1 < side < greatest * image_size + 1
        first, second = (thing.box for thing in scene.things)
        gap = {
            "left of": second[0] - first[2],
            "right of": first[0] - second[2],
            "above": second[1] - first[3],
            "below": first[1] - second[3],
        }[scene.relation]
        assert gap >= scenes.GAP * image_size
        across, down = (abs(first[k] + first[k + 2] - second[k] - second[k + 2]) for k in (0, 1))
        if scene.relation in ("left of", "right of"):
            assert down <= scenes.SLOPE * across
        else:
            assert across <= scenes.SLOPE * down


def test_a_things_commonest_colour_is_its_own(drawn):
    for scene in drawn:
        for thing in scene.things:
            pixels = np.asarray(scene.image.crop(thing.box)).reshape(-1, 3).astype(int)
            # What is neither background nor outline: saturated or very light.
            vivid = pixels[(np.ptp(pixels, axis=1) > 90) | (pixels.min(axis=1) > 225)]
            distance = {
                name: np.abs(np.median(vivid, axis=0) - rgb).max()
                for name, rgb in scenes.COLOURS.items()
            }
            assert min(distance, key=distance.__getitem__) == thing.colour
            assert distance[thing.colour] <= scenes.COLOUR_JITTER


def test_things_of_a_scene_differ_in_shape_and_colour_and_all_kinds_occur(drawn):
    for scene in drawn:
        first, second = scene.things
        assert first.shape != second.shape and first.colour != second.colour
    things = [thing for scene in drawn for thing in scene.things]
    assert {thing.shape for thing in things} == set(scenes.SHAPES)
    assert {thing.colour for thing in things} == set(scenes.COLOURS)
    assert {thing.size for thing in things} == set(scenes.SIZES)
    assert {scene.relation for scene in drawn} == set(scenes.RELATIONS)


# --- Captions ------------------------------------------------------------------------------------


def test_wordings_of_one_scene():
    assert scenes.wordings((RED_RING, BLUE_STAR), "left of") == (
        "a small red ring left of a large blue star",
        "a large blue star right of a small red ring",
        "a small red ring is left of a large blue star",
        "a large blue star is right of a small red ring",
        "there is a small red ring left of a large blue star",
        "there is a large blue star right of a small red ring",
        "there is a small red ring and it is left of a large blue star",
        "there is a large blue star and it is right of a small red ring",
        "a large blue star with a small red ring on its left",
        "a small red ring with a large blue star on its right",
    )


def holds(caption: str, things: tuple[Thing, Thing]) -> bool:
    """Whether a caption is true, read from the caption and the boxes alone."""
    named = re.findall(r"(small|large) (\w+) (\w+)", caption)
    (subject,), (other,) = (
        [one for one in things if (one.size, one.colour, one.shape) == words] for words in named
    )
    side = re.search(r"left|right|above|below", caption).group()
    if " with " in caption:  # "A with B on its left": B is what stands on the left
        subject, other = other, subject
    return {
        "left": subject.box[2] <= other.box[0],
        "right": subject.box[0] >= other.box[2],
        "above": subject.box[3] <= other.box[1],
        "below": subject.box[1] >= other.box[3],
    }[side]


def test_every_caption_is_true_of_the_boxes(drawn):
    for scene in drawn:
        assert len(set(scene.captions)) == 5
        assert len(set(scene.all_captions)) == 10
        assert set(scene.captions) < set(scene.all_captions)
        assert all(holds(caption, scene.things) for caption in scene.all_captions)


def test_words_name_the_things_that_they_describe(drawn):
    for scene in drawn:
        for caption, names in zip(scene.captions, scene.words, strict=True):
            words = tokenize(caption)
            assert len(words) == len(names)
            for place, thing in enumerate(scene.things):
                named = [word for word, name in zip(words, names, strict=True) if name == place]
                assert named == [thing.size, thing.colour, thing.shape]


def test_named_things_of_a_wrong_caption():
    things = (RED_RING, BLUE_STAR)
    # The colour is wrong, the phrase is still about the star; there is no circle.
    assert scenes.named_things("A green star, left of a red circle.", things) == (
        *(None, 1, 1, None, None, None, None, None),
    )


@pytest.mark.parametrize(
    ("caption", "right"),
    [
        ("a small red ring left of a large blue star", True),
        ("A large blue star with a small red ring on its left.", True),
        ("a small red ring right of a large blue star", False),
        ("a small blue ring left of a large red star", False),
        ("a small red ring left of a large blue", False),
        ("a ring", False),
        ("", False),
    ],
)
def test_is_right_demands_one_whole_wording(caption, right):
    assert scenes.is_right(caption, scenes.wordings((RED_RING, BLUE_STAR), "left of")) is right


# --- Data set ------------------------------------------------------------------------------------


def test_the_reader_of_real_data_reads_what_was_written(folder):
    data = datasets.load(folder)
    assert (data.format, data.problems, data.notes) == ("coco", (), ())
    ids: list[str] = []
    for split in datasets.SPLITS:
        examples = data.split(split)
        ids += [example.id for example in examples]
        for example in examples:
            number = int(re.search(r"\d+", example.path.name).group())
            scene = scenes.draw(SEED, number, SIDE)
            assert example.captions == scene.captions
            assert example.split == scenes.split_of(number) == split
            with Image.open(example.path) as image:
                loss = np.asarray(image).astype(int) - np.asarray(scene.image)
            assert np.abs(loss).mean() < 4
    assert len(set(ids)) == len(ids) == COUNT


def test_instances_and_words_hold_the_exact_boxes(folder):
    for suffix in ("train", "val", "test"):
        instances = document(folder, f"instances_{suffix}")
        captions = document(folder, f"captions_{suffix}")
        shapes = {category["id"]: category["name"] for category in instances["categories"]}
        assert set(shapes.values()) == set(scenes.SHAPES)
        boxes = {one["id"]: one for one in instances["annotations"]}
        assert len(boxes) == 2 * len(instances["images"])
        for number in (image["id"] for image in instances["images"]):
            for place, thing in enumerate(scenes.draw(SEED, number, SIDE).things):
                left, top, right, bottom = thing.box
                one = boxes[2 * number + place]
                assert one["image_id"] == number
                assert one["bbox"] == [left, top, right - left, bottom - top]
                assert one["area"] == one["bbox"][2] * one["bbox"][3]
                assert shapes[one["category_id"]] == thing.shape
                assert (one["colour"], one["size"]) == (thing.colour, thing.size)
        for caption in captions["annotations"]:
            for word, name in zip(tokenize(caption["caption"]), caption["words"], strict=True):
                if name is not None:
                    one = boxes[name]
                    assert one["image_id"] == caption["image_id"]
                    assert word in (shapes[one["category_id"]], one["colour"], one["size"])


def test_wordings_are_read_back_from_the_files(folder):
    wordings = scenes.read_wordings(folder, "dev")
    assert list(wordings) == [f"scene_{number:06d}.jpg" for number in (8, 18, 28, 38)]
    assert wordings["scene_000018.jpg"] == scenes.draw(SEED, 18, SIDE).all_captions
    with pytest.raises(InputError, match="no split 'val'; they have train, dev, test"):
        scenes.read_wordings(folder, "val")
    with pytest.raises(InputError, match=r"captions_test\.json: not captions of scenes"):
        scenes.read_wordings(folder / "images")


def test_writing_again_replaces_the_scenes(tmp_path):
    scenes.write(tmp_path, 17, seed=2, image_size=71)
    scenes.write(tmp_path, 11, seed=3, image_size=73)
    data = datasets.load(tmp_path)
    assert len(data.examples) == len(list((tmp_path / "images").iterdir())) == 11
    assert data.examples[0].captions == scenes.draw(3, 0, 73).captions
    files = [file.name for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) == 11 + 6 + 1  # pictures, JSON files, the marker


def test_a_stopped_rewrite_leaves_no_captions_of_other_pictures(tmp_path, monkeypatch):
    scenes.write(tmp_path, 11, seed=2, image_size=71)
    monkeypatch.setattr(scenes, "draw", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scenes.write(tmp_path, 11, seed=3, image_size=71)
    with pytest.raises(InputError, match="no data set found"):
        datasets.load(tmp_path)


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(InputError, match="is not empty and holds no scenes; give --out a new"):
        scenes.write(tmp_path, 11)
    with pytest.raises(InputError, match="is not empty and holds no scenes"):
        scenes.write(tmp_path / "thesis.txt", 11)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 9}, "--count 9: must be 10 or more"),
        ({"seed": -1}, "--seed -1: must be 0 or more"),
        ({"image_size": 63}, "--image-size 63: must be 64 or more"),
    ],
)
def test_numbers_too_small_are_refused(tmp_path, arguments, message):
    with pytest.raises(InputError, match=message):
        scenes.write(tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()
