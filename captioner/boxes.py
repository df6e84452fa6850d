"""People's boxes around the things in photos, and which words of a caption name such a thing.

Boxes come from COCO instances JSON, as it lies beside a COCO data set's captions. Words are matched
by table: the names of the categories, their plurals, and for COCO's 80 the everyday words for them.
"""

import itertools
import json
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from captioner.errors import InputError
from captioner.layouts import SPLIT_NAMES, split_in_name
from captioner.photo_index import PhotoIndex
from captioner.text import tokenize

__all__ = ["EVERYDAY", "BoxedPhoto", "Boxes", "Names", "find_instances", "read_boxes"]

Identity = int | str
Entry = tuple[int, Any]  # its place in a list of the file, from 0, and what stands there


@dataclass(frozen=True)
class BoxedPhoto:
    """The boxes of one photo.

    Attributes:
        width, height: of the photo in the pixels that the boxes are given in.
        boxes: for every category that is boxed in it, `(N, 4)` float64: left, top, right, bottom.
    """

    width: int
    height: int
    boxes: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Boxes:
    """What instances files say.

    Attributes:
        categories: names of the categories, in the files' order.
        photos: every photo that was annotated, by its file, also those without any box.
    """

    categories: tuple[str, ...]
    photos: Mapping[Path, BoxedPhoto]


# --- Reading -------------------------------------------------------------------------------------


def find_instances(data: Path, split: str | None = None) -> list[Path]:
    """The instances files beside the captions of a COCO data set.

    Args:
        data: the data set's folder, or its captions file.
        split: files whose names tell of another split are left out; `None` takes all.

    Raises:
        InputError: there is none.
    """
    if data.is_file():
        file = data.with_name(data.name.replace("captions", "instances"))
        files = [file] if file != data and file.is_file() else []
        looked_for = str(file)
    else:
        files = sorted([*data.glob("instances*.json"), *data.glob("*/instances*.json")])
        looked_for = f"{data}/annotations/instances*.json"
    wanted = (None, split and SPLIT_NAMES.get(split.lower(), split))
    files = [file for file in files if split is None or split_in_name(file.name) in wanted]
    if not files:
        raise InputError(
            f"{data}: no boxes beside its captions ({looked_for}); give COCO's instances JSON "
            "with --boxes FILE"
        )
    return files


def read_boxes(files: Iterable[Path], root: Path, images: Path | None = None) -> Boxes:
    """Reads instances files and finds the photos that they name.

    Boxes of crowds (`iscrowd`) count like others: people do stand there. Boxes without area, which
    COCO has a few of, and images whose photo is not there are left out.

    Args:
        files: COCO instances JSON: `images[].id, file_name, width, height`, `categories[].id, name`
            and `annotations[].image_id, category_id, bbox` (left, top, width, height in pixels).
        root: folder of the data set.
        images: folder of the photos, where they are not with the data set.

    Raises:
        InputError: a file cannot be read or is none of instances; the message says which entry.
    """
    categories: dict[str, None] = {}
    photos: dict[Path, BoxedPhoto] = {}
    for file in files:
        document = _document(file)
        names = {_field(file, "categories", entry, "id", Identity): _name(file, entry)
                 for entry in enumerate(document["categories"])}  # fmt: skip
        categories.update(dict.fromkeys(names.values()))
        found = _find(document, file, root, images)
        boxes: dict[Identity, dict[str, list[list[float]]]] = {key: {} for key in found}
        for entry in enumerate(document["annotations"]):
            key = _field(file, "annotations", entry, "image_id", Identity)
            category = names.get(_field(file, "annotations", entry, "category_id", Identity))
            if key not in found or category is None:
                lacking = "categories" if category is None else "images"
                raise _malformed(file, "annotations", entry, f"refers to none of {lacking}")
            left, top, width, height = _box(file, entry)
            if width and height:
                box = [left, top, left + width, top + height]
                boxes[key].setdefault(category, []).append(box)
        for key, (path, width, height) in found.items():
            if path is not None:
                photo = photos.setdefault(path, BoxedPhoto(width, height))
                photo.boxes.update({name: np.array(rows) for name, rows in boxes[key].items()})
    return Boxes(tuple(categories), photos)


def _document(file: Path) -> dict[str, list[Any]]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not JSON ({error}); fetch the file again") from error
    for key in ("images", "categories", "annotations"):
        if not isinstance(document, dict) or not isinstance(document.get(key), list):
            raise InputError(
                f"{file}: has no list {key!r}, so it is not COCO instances JSON; --boxes takes "
                "annotations/instances*.json"
            )
    return document


def _find(
    document: Mapping[str, list[Any]], file: Path, root: Path, images: Path | None
) -> dict[Identity, tuple[Path | None, int, int]]:
    """Of every image, by id: its photo (`None` if it is not there), width and height."""
    entries = list(enumerate(document["images"]))
    names = [_field(file, "images", entry, "file_name", str) for entry in entries]
    index = PhotoIndex(images or root, images or file.parent)
    paths = index.find(dict.fromkeys(names))
    found: dict[Identity, tuple[Path | None, int, int]] = {}
    for entry, name in zip(entries, names, strict=True):
        key = _field(file, "images", entry, "id", Identity)
        width, height = (_field(file, "images", entry, side, int) for side in ("width", "height"))
        path = paths[name]
        found[key] = (path if isinstance(path, Path) else None, width, height)
    return found


def _field(file: Path, section: str, entry: Entry, name: str, kind: Any) -> Any:
    value = entry[1].get(name) if isinstance(entry[1], dict) else None
    if not isinstance(value, kind):
        raise _malformed(file, section, entry, f"needs {name}")
    return value


def _name(file: Path, entry: Entry) -> str:
    name = _field(file, "categories", entry, "name", str)
    if not name.strip():
        raise _malformed(file, "categories", entry, "has an empty name")
    return name


def _box(file: Path, entry: Entry) -> tuple[float, float, float, float]:
    box = _field(file, "annotations", entry, "bbox", list)
    numbers = [value for value in box if isinstance(value, int | float) and np.isfinite(value)]
    if len(box) != 4 or len(numbers) != 4 or min(numbers[2:]) < 0:
        raise _malformed(file, "annotations", entry, "needs bbox: left, top, width, height")
    left, top, width, height = map(float, numbers)
    return left, top, width, height


def _malformed(file: Path, section: str, entry: Entry, what: str) -> InputError:
    return InputError(f"{file}: {section}[{entry[0]}] {what}; mend or remove that entry")


# --- Naming --------------------------------------------------------------------------------------

# Beyond each category's own name; regular plurals are made of all of them. Left out are words that
# more often mean something else ("sign", "light", "baseball" the game), words for several kinds of
# thing ("animal", "group", "couple"), and parts of things ("hand", "wheel").
EVERYDAY: Mapping[str, str] = {
    "person": "people, man, men, woman, women, boy, girl, child, children, kid, guy, gentleman, "
    "gentlemen, lady, baby, toddler, infant, adult, teenager, teen, crowd, player, skateboarder, "
    "skier, snowboarder, surfer, swimmer, biker, cyclist, bicyclist, motorcyclist, rider, runner, "
    "climber, hiker, jogger, dancer, batter, catcher, umpire, golfer, athlete, teammate, worker, "
    "officer, policeman, policemen, fireman, firemen, soldier, cowboy, bride, groom, pedestrian, "
    "passenger, spectator, student, performer, musician, guitarist, singer, fisherman, fishermen, "
    "friend, mother, father, mom, dad, son, daughter, brother, sister, chef",
    "bicycle": "bike, mountain bike",
    "car": "automobile, taxi, cab, suv, sedan, minivan, jeep, van",
    "motorcycle": "motorbike, motor bike, dirt bike, dirtbike, moped, scooter, bike",
    "airplane": "plane, aeroplane, aircraft, airliner, jet",
    "bus": "minibus, double decker, van",
    "train": "locomotive, train car",
    "truck": "pickup, lorry, firetruck, fire engine, van",
    "boat": "ship, sailboat, motorboat, speedboat, rowboat, canoe, kayak, raft, yacht, ferry",
    "traffic light": "traffic signal, stoplight, stop light",
    "fire hydrant": "hydrant",
    "parking meter": "meter",
    "bird": "seagull, gull, duck, goose, geese, pigeon, parrot, owl, eagle, swan, hawk, crow, "
    "heron, pelican, flamingo, penguin, ostrich, peacock, rooster",
    "cat": "kitten, kitty",
    "dog": "puppy, pup, doggy, poodle, labrador, retriever, dachshund, terrier, bulldog, "
    "greyhound, collie, husky, beagle, sheepdog, german shepherd",
    "horse": "pony, foal, stallion",
    "sheep": "lamb",
    "cow": "cattle, bull, calf, calves, ox, oxen",
    "bear": "cub",
    "backpack": "rucksack, knapsack, bag",
    "umbrella": "parasol",
    "handbag": "purse, bag",
    "tie": "necktie",
    "suitcase": "luggage, baggage, bag",
    "frisbee": "disc, disk",
    "skis": "ski",
    "snowboard": "board",
    "sports ball": "ball",
    "baseball bat": "bat",
    "baseball glove": "glove, mitt",
    "skateboard": "board",
    "surfboard": "board",
    "tennis racket": "racket, racquet",
    "wine glass": "wineglass, glass",
    "cup": "mug, glass",
    "knife": "knives",
    "sandwich": "burger, hamburger",
    "hot dog": "hotdog",
    "donut": "doughnut",
    "cake": "cupcake",
    "chair": "armchair",
    "couch": "sofa, loveseat",
    "potted plant": "plant",
    "dining table": "table",
    "tv": "television, monitor, screen, computer",
    "laptop": "computer",
    "mouse": "mice",
    "remote": "remote control, controller",
    "cell phone": "phone, cellphone, smartphone",
    "microwave": "microwave oven",
    "oven": "stove",
    "refrigerator": "fridge, freezer",
    "teddy bear": "bear, teddy, stuffed animal",
    "hair drier": "hair dryer, dryer, drier, blow dryer",
}


class Names:
    """Finds the words of a caption that name a thing of one of some categories.

    - A category is named by its name, by the words of `EVERYDAY` for it, and by their plurals. A
      name of several words is found as a whole and stands at its last: the "dog" of "hot dog".
    - A word that may name several categories ("bike", "glass", "board") names the first of them,
      in the order of `categories`, that is boxed in the photo.
    - A naming word directly before another only qualifies it: "baby" in "baby elephant". Where the
      tokeniser took the comma of a list away, its earlier words are passed over so too.

    Args:
        categories: names, as an instances file gives them.
        split: how captions are split into words.
    """

    def __init__(
        self, categories: Iterable[str], split: Callable[[str], list[str]] = tokenize
    ) -> None:
        self._categories: dict[tuple[str, ...], list[str]] = {}
        for category in categories:
            name = re.sub(r"[_\W]+", " ", category).lower()
            phrases = [name, *filter(None, EVERYDAY.get(name, "").split(", "))]
            for words in (tuple(split(phrase)) for phrase in phrases):
                for form in (words, (*words[:-1], _plural(words[-1]))):
                    self._categories.setdefault(form, []).append(category)
        self._longest = max(map(len, self._categories), default=0)

    def find(self, words: Sequence[str], boxed: Container[str]) -> list[str | None]:
        """For every word the category that it names, `None` for one that names none.

        Args:
            words: of the caption.
            boxed: the categories that have a box in the photo; others are not named.
        """
        named = [self._ending_at(words, place) for place in range(len(words))]
        return [
            None if following else next((name for name in names if name in boxed), None)
            for names, following in itertools.zip_longest(named, named[1:])
        ]

    def _ending_at(self, words: Sequence[str], place: int) -> list[str]:
        """The categories of the longest name that ends at a word."""
        for length in range(min(self._longest, place + 1), 0, -1):
            names = self._categories.get(tuple(words[place + 1 - length : place + 1]))
            if names:
                return names
        return []


def _plural(word: str) -> str:
    """The regular plural; of a word that is plural already, none that anyone writes."""
    if re.search(r"(s|x|z|ch|sh)$", word):
        return f"{word}es"
    if re.search(r"[^aeiou]y$", word):
        return f"{word[:-1]}ies"
    return f"{word}s"
