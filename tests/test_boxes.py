"""Boxes from COCO instances JSON, and the words that name what is in them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from captioner.boxes import EVERYDAY, Names, find_instances, read_boxes
from captioner.errors import InputError
from captioner.text import tokenize

CATEGORIES = ["person", "bicycle", "motorcycle", "bear", "dog", "hot dog", "teddy bear"]


def document() -> dict[str, Any]:
    return {
        "images": [
            {"id": 5, "file_name": "a.jpg", "width": 60, "height": 40},
            {"id": 7, "file_name": "b.jpg", "width": 30, "height": 50},
            {"id": 8, "file_name": "gone.jpg", "width": 30, "height": 50},
        ],
        "categories": [{"id": 1, "name": "person"}, {"id": 18, "name": "dog"}],
        "annotations": [
            {"image_id": 5, "category_id": 18, "bbox": [10, 20, 5.5, 7]},
            {"image_id": 5, "category_id": 1, "bbox": [0, 0, 60, 40], "iscrowd": 1},
            {"image_id": 5, "category_id": 18, "bbox": [1, 2, 3, 4]},
            {"image_id": 5, "category_id": 18, "bbox": [1, 2, 3, 0]},
            {"image_id": 8, "category_id": 1, "bbox": [1, 2, 3, 4]},
        ],
    }


def write(root: Path, content: Any, name: str = "instances.json") -> Path:
    (root / "annotations").mkdir(exist_ok=True)
    (root / "images").mkdir(exist_ok=True)
    for photo in ("a.jpg", "b.jpg"):
        (root / "images" / photo).touch()
    file = root / "annotations" / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_boxes_by_photo_and_category(tmp_path: Path) -> None:
    boxes = read_boxes([write(tmp_path, document())], tmp_path)
    assert boxes.categories == ("person", "dog")
    assert list(boxes.photos) == [tmp_path / "images" / "a.jpg", tmp_path / "images" / "b.jpg"]
    first, second = boxes.photos.values()
    assert (first.width, first.height, second.width, second.height) == (60, 40, 30, 50)
    assert set(first.boxes) == {"dog", "person"}
    # Left, top, right, bottom; the box without height is not there.
    np.testing.assert_array_equal(first.boxes["dog"], [[10, 20, 15.5, 27], [1, 2, 4, 6]])
    np.testing.assert_array_equal(first.boxes["person"], [[0, 0, 60, 40]])
    assert second.boxes == {}


def test_photos_elsewhere_and_several_files(tmp_path: Path) -> None:
    data, photos = tmp_path / "data", tmp_path / "photos"
    (data / "annotations").mkdir(parents=True)
    photos.mkdir()
    (photos / "a.jpg").touch()
    (photos / "b.jpg").touch()
    files = [data / "annotations" / f"instances_{split}.json" for split in ("train", "val")]
    for file, number in zip(files, (0, 1), strict=True):
        part = {**document(), "annotations": []}
        part["images"] = part["images"][number : number + 1]
        file.write_text(json.dumps(part))
    boxes = read_boxes(files, data, photos)
    assert [path.name for path in boxes.photos] == ["a.jpg", "b.jpg"]


@pytest.mark.parametrize(
    ("section", "place", "change", "message"),
    [
        ("images", 1, {"file_name": None}, r"images\[1\] needs file_name"),
        ("images", 0, {"width": "60"}, r"images\[0\] needs width"),
        ("images", 0, {"height": None}, r"images\[0\] needs height"),
        ("images", 0, {"id": None}, r"images\[0\] needs id"),
        ("categories", 1, {"id": 1.5}, r"categories\[1\] needs id"),
        ("categories", 1, {"name": " "}, r"categories\[1\] has an empty name"),
        ("annotations", 2, {"image_id": 6}, r"annotations\[2\] refers to none of images"),
        ("annotations", 2, {"category_id": 2}, r"annotations\[2\] refers to none of categories"),
        ("annotations", 0, {"bbox": [1, 2, 3]}, r"annotations\[0\] needs bbox: left, top"),
        ("annotations", 0, {"bbox": [1, 2, -3, 4]}, r"annotations\[0\] needs bbox"),
        ("annotations", 0, {"bbox": [1, 2, 3, "4"]}, r"annotations\[0\] needs bbox"),
        ("annotations", 0, {"bbox": [1, float("nan"), 3, 4]}, r"annotations\[0\] needs bbox"),
        ("annotations", 0, {"bbox": None}, r"annotations\[0\] needs bbox"),
    ],
)
def test_malformed_entries_are_named(
    tmp_path: Path, section: str, place: int, change: dict[str, Any], message: str
) -> None:
    content = document()
    content[section][place].update(change)
    file = write(tmp_path, content)
    with pytest.raises(InputError, match=f"instances.json: {message}.*; mend or remove"):
        read_boxes([file], tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "instances.json: not JSON"),
        ("[]", "has no list 'images', so it is not COCO instances JSON"),
        ({"images": [], "annotations": []}, "has no list 'categories'"),
        ({"images": [3], "categories": [], "annotations": []}, r"images\[0\] needs file_name"),
    ],
)
def test_files_of_something_else(tmp_path: Path, content: Any, message: str) -> None:
    file = write(tmp_path, content)
    with pytest.raises(InputError, match=message):
        read_boxes([file], tmp_path)
    file.unlink()
    with pytest.raises(InputError, match=r"instances\.json: cannot be read"):
        read_boxes([file], tmp_path)


def test_instances_lie_beside_captions(tmp_path: Path) -> None:
    train, val = (write(tmp_path, "", f"instances_{one}2014.json") for one in ("train", "val"))
    captions = write(tmp_path, "", "captions_val2014.json")
    assert find_instances(tmp_path) == [train, val]
    assert find_instances(tmp_path, "dev") == find_instances(tmp_path, "val") == [val]
    assert find_instances(tmp_path / "annotations", "train") == [train]
    assert find_instances(captions) == find_instances(captions, "dev") == [val]
    whole = write(tmp_path, "", "instances.json")
    assert find_instances(tmp_path, "test") == [whole]
    val.unlink()
    for data in (captions, tmp_path / "images", tmp_path / "images" / "a.jpg"):
        with pytest.raises(InputError, match=r"no boxes beside its captions .* with --boxes FILE"):
            find_instances(data)


# --- Names ---------------------------------------------------------------------------------------


def found(caption: str, *boxed: str, categories: list[str] = CATEGORIES) -> dict[str, str]:
    """The naming words of a caption."""
    words = tokenize(caption)
    named = Names(categories).find(words, boxed or categories)
    assert len(named) == len(words)
    return {word: name for word, name in zip(words, named, strict=True) if name is not None}


@pytest.mark.parametrize(
    ("caption", "names"),
    [
        ("A man with his puppy .", {"man": "person", "puppy": "dog"}),
        ("Two women and children", {"women": "person", "children": "person"}),
        ("dogs and puppies with people", {"dogs": "dog", "puppies": "dog", "people": "person"}),
        ("people, dogs", {"dogs": "dog"}),
        ("a player's dog", {"player": "person", "dog": "dog"}),
        ("a hot dog", {"dog": "hot dog"}),
        ("two hot dogs", {"dogs": "hot dog"}),
        ("a teddy bear", {"bear": "teddy bear"}),
        ("a teddy in bed", {"teddy": "teddy bear"}),
        ("a bear", {"bear": "bear"}),
        # Directly before another name a word only qualifies it.
        ("a baby bear and a baby", {"bear": "bear", "baby": "person"}),
        ("nothing of the kind", {}),
        ("", {}),
    ],
)
def test_words_name_categories(caption: str, names: dict[str, str]) -> None:
    assert found(caption) == names


def test_only_what_is_boxed_is_named() -> None:
    assert found("a man and a dog", "dog") == {"dog": "dog"}
    # A hot dog is no dog, whatever is boxed; a baby bear is no person.
    assert found("a hot dog", "dog") == {}
    assert found("a baby bear", "person") == {}


def test_an_ambiguous_word_names_what_is_boxed() -> None:
    assert found("a bike", "motorcycle") == {"bike": "motorcycle"}
    assert found("bikes", "motorcycle", "bicycle") == {"bikes": "bicycle"}
    assert found("a bike", "dog") == {}
    assert found("a bear", "teddy bear") == {"bear": "teddy bear"}


def test_other_categories_go_by_their_names() -> None:
    categories = ["circle", "cross", "Big_Box", "fly", "monkey"]
    captions = {
        "circle": "circle",
        "circles": "circle",
        "crosses": "cross",
        "flies": "fly",
        "monkeys": "monkey",
    }
    for word, name in captions.items():
        assert found(word, categories=categories) == {word: name}
    assert found("a big box, a box", "Big_Box", categories=categories) == {"box": "Big_Box"}
    assert found("man", categories=categories) == {}
    assert Names([]).find(["man"], ["person"]) == [None]


def test_coco(data_root: Path) -> None:
    """The real boxes; every category goes by its own name, every phrase of the table names its."""
    root = data_root / "coco_boxes"
    boxes = read_boxes(find_instances(root), root)
    assert len(boxes.photos) == 258
    assert len(boxes.categories) == 80
    rows = [rows for photo in boxes.photos.values() for rows in photo.boxes.values()]
    assert sum(map(len, rows)) == 2196
    for photo in boxes.photos.values():
        for rows in photo.boxes.values():
            assert (rows[:, :2] >= 0).all()
            assert (rows[:, 2:] <= [photo.width + 1, photo.height + 1]).all()
    names = Names(boxes.categories)
    for category in boxes.categories:
        *_, named = names.find(tokenize(f"a {category}"), boxes.categories)
        assert named == category
    assert set(EVERYDAY) <= set(boxes.categories)
    for category, phrases in EVERYDAY.items():
        for phrase in phrases.split(", "):
            *_, named = names.find(tokenize(phrase), [category])
            assert named == category, phrase
    for phrase, category in {
        "a tennis racket": "tennis racket",
        "a fire hydrant": "fire hydrant",
        "some scissors": "scissors",
        "traffic lights": "traffic light",
        "wine glasses": "wine glass",
        "sheep": "sheep",
        "knives": "knife",
        "buses": "bus",
    }.items():
        *_, named = names.find(tokenize(phrase), boxes.categories)
        assert named == category
