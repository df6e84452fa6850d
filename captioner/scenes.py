"""Drawn scenes whose captions and boxes are exact: the data set of tests, notebooks and first runs.

A scene holds two things on a muted background. Each is a shape with a colour and a size, and one
stands clearly left of, right of, above or below the other: "a small red circle left of a large blue
star". The two differ in shape and in colour, so every such word names one thing and one box. A list
of the attributes does not say which belong together, nor which thing is where: a model has to look.

A scene depends on its seed and number alone, never on how many are drawn, and so do its split and
its file's name. `write` makes a COCO data set of them, which the reader of real data reads.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from captioner.errors import InputError
from captioner.files import replacing, write_text
from captioner.progress import track
from captioner.text import tokenize

__all__ = [
    "COLOURS",
    "RELATIONS",
    "SHAPES",
    "SIZES",
    "Scene",
    "Thing",
    "background",
    "draw",
    "is_right",
    "named_things",
    "read_wordings",
    "split_of",
    "wordings",
    "write",
]

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")

# RGB. No more colours, and every thing has a dark outline, because an ImageNet network's last
# features hardly tell which side of an edge has which colour: opposites (black and white, purple
# and green) and neighbours (orange and yellow) are mixed up.
COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (225, 25, 30),
    "yellow": (255, 235, 40),
    "green": (40, 175, 60),
    "blue": (35, 70, 225),
    "white": (245, 245, 245),
}
OUTLINE = (18, 18, 18)
OUTLINE_WIDTH = 0.018  # as a share of the image's side; inside the box
COLOUR_JITTER = 10  # a thing's RGB is off by up to this

# Least and greatest side of a thing's box, as shares of the image's side. On EfficientNet's 7 x 7
# regions a small thing spans about 1.6 of them, a large one about 2.8.
SIZES: Mapping[str, tuple[float, float]] = {"small": (0.21, 0.25), "large": (0.38, 0.43)}
MARGIN = 0.03  # least distance from the image's edge, as a share of its side
GAP = 0.05  # least distance of the two boxes along the axis of their relation
SLOPE = 0.5  # greatest distance of the centres across that axis, as a share of that along it

# A relation, its inverse, and how a thing in it is said to stand to the other ("it").
RELATIONS: Mapping[str, tuple[str, str]] = {
    "left of": ("right of", "on its left"),
    "right of": ("left of", "on its right"),
    "above": ("below", "above it"),
    "below": ("above", "below it"),
}
TEMPLATES = (
    "a {first} {relation} a {second}",
    "a {first} is {relation} a {second}",
    "there is a {first} {relation} a {second}",
    "there is a {first} and it is {relation} a {second}",
    "a {second} with a {first} {beside}",
)

SMALLEST_IMAGE = 64  # px; below this a small thing has too few pixels to have a shape
SPLIT_FILES = {"train": "train", "dev": "val", "test": "test"}  # as COCO calls them
FEWEST_SCENES = 10  # fewer leave a split empty
MARKER = "scenes.json"  # tells a folder of scenes from one that holds something else


@dataclass(frozen=True)
class Thing:
    """One shape of a scene.

    Attributes:
        shape: one of `SHAPES`.
        colour: one of `COLOURS`.
        size: one of `SIZES`.
        box: left, top, right, bottom in px, right and bottom exclusive: the smallest box around it.
    """

    shape: str
    colour: str
    size: str
    box: tuple[int, int, int, int]

    @property
    def name(self) -> str:
        """Size, colour and shape, as captions name it."""
        return f"{self.size} {self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """A drawn picture with all that is true of it.

    Attributes:
        things: the two things; they differ in shape and in colour.
        relation: how the first stands to the second, one of `RELATIONS`.
        image: the picture, square RGB.
        captions: one per template, each told from the one or from the other thing.
        words: for every caption and every word of it, the index in `things` of the thing that the
            word names; `None` for words that name none ("a", "left").
    """

    things: tuple[Thing, Thing]
    relation: str
    image: Image.Image
    captions: tuple[str, ...]
    words: tuple[tuple[int | None, ...], ...]

    @property
    def all_captions(self) -> tuple[str, ...]:
        """Every wording that describes this scene exactly, `captions` among them."""
        return wordings(self.things, self.relation)


def draw(seed: int, number: int, image_size: int = 224) -> Scene:
    """Draws one scene; the same arguments always draw the same one.

    Args:
        seed: of the data set, from 0.
        number: of the scene in it, from 0.
        image_size: side of the picture in px.
    """
    random = np.random.default_rng((seed, number, 0))
    relation = str(random.choice(list(RELATIONS)))
    shapes = random.choice(SHAPES, size=2, replace=False)
    colours = random.choice(list(COLOURS), size=2, replace=False)
    sizes = random.choice(list(SIZES), size=2)
    boxes = _place(
        random, relation, [_side(random, size, image_size) for size in sizes], image_size
    )
    first, second = (
        Thing(str(shape), str(colour), str(size), box)
        for shape, colour, size, box in zip(shapes, colours, sizes, boxes, strict=True)
    )
    image = background(seed, number, image_size)
    for thing in (first, second):
        shade = COLOURS[thing.colour] + random.integers(-COLOUR_JITTER, COLOUR_JITTER + 1, 3)
        red, green, blue = (int(value) for value in np.clip(shade, 0, 255))
        left, top, right, _ = thing.box
        whole, inside = _masks(thing.shape, right - left, max(1, round(OUTLINE_WIDTH * image_size)))
        image.paste(OUTLINE, (left, top), whole)
        image.paste((red, green, blue), (left, top), inside)

    told_from = random.integers(2, size=len(TEMPLATES))
    all_captions = wordings((first, second), relation)
    captions = tuple(all_captions[2 * place + side] for place, side in enumerate(told_from))
    words = tuple(named_things(caption, (first, second)) for caption in captions)
    return Scene((first, second), relation, image, captions, words)


# --- Language ------------------------------------------------------------------------------------


def wordings(things: tuple[Thing, Thing], relation: str) -> tuple[str, ...]:
    """Every caption that is exactly right: each template, told from the first, then the second."""
    first, second = (thing.name for thing in things)
    inverse, beside = RELATIONS[relation]
    told = [
        {"first": first, "second": second, "relation": relation, "beside": beside},
        {"first": second, "second": first, "relation": inverse, "beside": RELATIONS[inverse][1]},
    ]
    return tuple(template.format(**names) for template in TEMPLATES for names in told)


def is_right(caption: str, all_captions: Iterable[str]) -> bool:
    """Whether a caption is, word for word, one of a scene's wordings; case and stops do not count.

    Args:
        caption: what a model wrote.
        all_captions: `Scene.all_captions`, or what `read_wordings` gives for the scene.
    """
    words = tokenize(caption)
    return any(words == tokenize(right) for right in all_captions)


def named_things(caption: str, things: Sequence[Thing]) -> tuple[int | None, ...]:
    """Which thing each word of a caption names, in a caption of whatever wording, right or wrong.

    A shape names the thing of that shape; sizes and colours name what the next shape does.

    Returns:
        For every word (as `captioner.text.tokenize` splits them) an index in `things`, or `None`.
    """
    by_shape = {thing.shape: place for place, thing in enumerate(things)}
    names: list[int | None] = []
    named = None
    for word in reversed(tokenize(caption)):
        if word in SHAPES:
            named = by_shape.get(word)
        elif word not in COLOURS and word not in SIZES:
            named = None
        names.append(named)
    return tuple(reversed(names))


# --- Layout --------------------------------------------------------------------------------------


def _side(random: np.random.Generator, size: str, image_size: int) -> int:
    """The side of a thing's box in px."""
    least, greatest = SIZES[size]
    return int(random.integers(round(least * image_size), round(greatest * image_size) + 1))


def _place(
    random: np.random.Generator, relation: str, sides: Sequence[int], image_size: int
) -> list[tuple[int, int, int, int]]:
    """Boxes of the two things, so that the relation is beyond doubt."""
    forward = relation in ("left of", "above")  # the first thing is the nearer to the origin
    near, far = sides if forward else reversed(sides)
    low, high = round(MARGIN * image_size), image_size - round(MARGIN * image_size)

    def between(least: float, greatest: float) -> int:
        return int(random.integers(math.ceil(least), math.floor(greatest) + 1))

    # Along the axis of the relation, then across it.
    gap = between(GAP * image_size, high - low - near - far)
    along_near = between(low, high - near - gap - far)
    along_far = along_near + near + gap
    drift = SLOPE * (near / 2 + gap + far / 2)
    across_near = between(low, high - near)
    level = across_near + near / 2 - far / 2  # where both centres are at one height
    across_far = between(max(low, level - drift), min(high - far, level + drift))

    boxes = []
    for along, across, side in ((along_near, across_near, near), (along_far, across_far, far)):
        horizontal = relation in ("left of", "right of")
        left, top = (along, across) if horizontal else (across, along)
        boxes.append((left, top, left + side, top + side))
    return boxes if forward else boxes[::-1]


# --- Painting ------------------------------------------------------------------------------------

_SUPERSAMPLING = 4  # masks are drawn this many times larger, then reduced: smooth edges


@lru_cache(maxsize=512)
def _masks(shape: str, side: int, outline: int) -> tuple[Image.Image, Image.Image]:
    """How much of every pixel of its box a shape covers, 0..255, with and without its outline.

    The shape touches all four edges of the box; the outline, `outline` px wide, lies inside it.
    """
    large, width = side * _SUPERSAMPLING, outline * _SUPERSAMPLING
    whole = Image.new("L", (large, large))
    pen = ImageDraw.Draw(whole)
    if shape in ("circle", "ring"):
        pen.ellipse((0, 0, large - 1, large - 1), fill=255)
        inside = whole.copy()
        ImageDraw.Draw(inside).ellipse((0, 0, large - 1, large - 1), outline=0, width=width)
        if shape == "ring":
            edge = round(large * 0.31)
            pen.ellipse((edge, edge, large - 1 - edge, large - 1 - edge), fill=0)
            edge -= width
            hole = (edge, edge, large - 1 - edge, large - 1 - edge)
            ImageDraw.Draw(inside).ellipse(hole, fill=0)
    else:
        corners = [(x * (large - 1), y * (large - 1)) for x, y in _corners(shape)]
        pen.polygon(corners, fill=255)
        inside = whole.copy()
        closed = [*corners, *corners[:2]]  # past the first corner, so that it is joined too
        ImageDraw.Draw(inside).line(closed, fill=0, width=2 * width, joint="curve")
    return whole.reduce(_SUPERSAMPLING), inside.reduce(_SUPERSAMPLING)


def _corners(shape: str) -> list[tuple[float, float]]:
    """The corners, in order, of a shape that fills the unit square."""
    match shape:
        case "square":
            return [(0, 0), (1, 0), (1, 1), (0, 1)]
        case "triangle":
            return [(0.5, 0), (1, 1), (0, 1)]
        case "cross":
            low, high = 0.31, 0.69
            top = [(0, low), (low, low), (low, 0), (high, 0), (high, low), (1, low)]
            return [*top, *((1 - x, 1 - y) for x, y in top)]
        case "star":
            turns = np.arange(10)
            radii = np.where(turns % 2 == 0, 1.0, 0.46)
            angles = np.pi * turns / 5
            corners = np.stack([radii * np.sin(angles), -radii * np.cos(angles)], axis=1)
            corners -= corners.min(axis=0)
            return [(float(x), float(y)) for x, y in corners / corners.max(axis=0)]
        case _:
            raise ValueError(f"unknown shape {shape!r}; there are {', '.join(SHAPES)}")


def background(seed: int, number: int, image_size: int = 224) -> Image.Image:
    """The picture of a scene before its things are painted."""
    random = np.random.default_rng((seed, number, 1))
    pattern = _PATTERNS[int(random.integers(len(_PATTERNS)))](random, image_size)
    # Two tones between dark and light grey, slightly tinted, that no colour of a thing is near to.
    tone = random.uniform(100, 160) + random.uniform(-16, 16, 3)
    contrast = random.uniform(-30, 30) + random.uniform(-8, 8, 3)
    # 32 bits: this is where drawing spends its time.
    grain = random.uniform(0, 5) * random.standard_normal(pattern.shape, np.float32)
    shade = pattern.astype(np.float32)[..., None] * contrast.astype(np.float32)
    shade += tone.astype(np.float32) + grain[..., None]
    return Image.fromarray(shade.clip(0, 255).astype(np.uint8))


def _plain(random: np.random.Generator, side: int) -> np.ndarray:
    return np.zeros((side, side))


def _gradient(random: np.random.Generator, side: int) -> np.ndarray:
    ramp = _ramp(random, side)
    return (ramp - ramp.min()) / np.ptp(ramp)


def _stripes(random: np.random.Generator, side: int) -> np.ndarray:
    return _wave(_ramp(random, side), random.uniform(0.06, 0.2))


def _checks(random: np.random.Generator, side: int) -> np.ndarray:
    period = random.uniform(0.1, 0.25)
    steps = _wave(np.arange(side) / side, period)
    return np.abs(steps[:, None] - steps[None, :])


def _clouds(random: np.random.Generator, side: int) -> np.ndarray:
    cells = int(random.integers(4, 17))
    coarse = Image.fromarray(random.random((cells, cells)).astype(np.float32))
    return np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC))


def _ramp(random: np.random.Generator, side: int) -> np.ndarray:
    """`(side, side)`: every pixel's distance from a line in a random direction, 1 per side."""
    angle = random.uniform(0, 2 * np.pi)
    steps = np.arange(side) / side
    return np.cos(angle) * steps[None, :] + np.sin(angle) * steps[:, None]


def _wave(distance: np.ndarray, period: float) -> np.ndarray:
    """0 and 1 by turns."""
    return np.floor(2 * distance / period) % 2


# A pattern is `(side, side)`, about 0..1: how much of the second tone a pixel has.
_PATTERNS: Sequence[Callable[[np.random.Generator, int], np.ndarray]] = (
    *(_plain, _gradient, _stripes, _checks, _clouds),
)


# --- Data set ------------------------------------------------------------------------------------


def split_of(number: int) -> str:
    """The split of a scene: of ten in a row, eight are "train", one is "dev" and one is "test"."""
    return {8: "dev", 9: "test"}.get(number % 10, "train")


def write(out: Path, count: int = 3000, seed: int = 1, image_size: int = 224) -> dict[str, int]:
    """Draws a data set into a folder: `images/` and COCO JSON in `annotations/`.

    `captions_{train,val,test}.json` hold, beyond COCO's fields, every image's `all_captions` and
    every caption's `words`: for each word the id of the instance that it names, or null.
    `instances_{train,val,test}.json` hold the boxes; their categories are the shapes, and every
    instance has its `colour` and `size` too.

    Scenes that an earlier call wrote to the folder are replaced. The JSON files are removed first
    and written last, so that a folder that has them is whole.

    Args:
        out: the folder; it is made, or empty, or holds scenes already.
        count: how many scenes, all splits together.
        seed: of the data set, from 0.
        image_size: side of the pictures in px.

    Returns:
        How many scenes each split has.

    Raises:
        InputError: the folder holds something else or cannot be written, or a number is too small.
    """
    for option, value, least in (
        ("--count", count, FEWEST_SCENES),
        ("--seed", seed, 0),
        ("--image-size", image_size, SMALLEST_IMAGE),
    ):
        if value < least:
            raise InputError(f"{option} {value}: must be {least} or more")
    _prepare(out)
    info = {"description": "captioner scenes", "seed": seed, "count": count}
    write_text(out / MARKER, json.dumps({**info, "image_size": image_size}, indent=2) + "\n")

    coco = {split: _Coco(info) for split in SPLIT_FILES}
    for number in track(range(count), "Drawing scenes", count, "scenes"):
        scene = draw(seed, number, image_size)
        name = f"scene_{number:06d}.jpg"
        with replacing(out / "images" / name) as partial:
            # 4:4:4: halved colour would bleed over the edges of the things.
            scene.image.save(partial, "JPEG", quality=92, subsampling=0)
        coco[split_of(number)].add(number, name, scene)
    for split, suffix in SPLIT_FILES.items():
        for kind, document in (
            ("instances", coco[split].instances),
            ("captions", coco[split].captions),
        ):
            write_text(out / "annotations" / f"{kind}_{suffix}.json", json.dumps(document) + "\n")
    return {split: len(documents.captions["images"]) for split, documents in coco.items()}


def read_wordings(folder: Path, split: str = "test") -> dict[str, tuple[str, ...]]:
    """All right captions of every scene of a split that `write` wrote, by the image's file name.

    Raises:
        InputError: there is no such split, or the folder is none of scenes.
    """
    if split not in SPLIT_FILES:
        raise InputError(f"scenes have no split {split!r}; they have {', '.join(SPLIT_FILES)}")
    file = folder / "annotations" / f"captions_{SPLIT_FILES[split]}.json"
    try:
        images = json.loads(file.read_text(encoding="utf-8"))["images"]
        return {image["file_name"]: tuple(image["all_captions"]) for image in images}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{file}: not captions of scenes; write them with `captioner scenes --out {folder}`"
        ) from error


class _Coco:
    """The two COCO documents of one split, scene by scene."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        categories = [
            {"id": number, "name": shape, "supercategory": "shape"}
            for number, shape in enumerate(SHAPES, 1)
        ]
        self.captions: dict[str, Any] = {"info": info, "images": [], "annotations": []}
        self.instances: dict[str, Any] = {"info": info, "images": [], "annotations": []}
        self.instances["categories"] = categories

    def add(self, number: int, file_name: str, scene: Scene) -> None:
        width, height = scene.image.size
        image = {"id": number, "file_name": file_name, "width": width, "height": height}
        self.instances["images"].append(image)
        self.captions["images"].append({**image, "all_captions": scene.all_captions})
        instance_ids = [number * len(scene.things) + place for place in range(len(scene.things))]
        for place, (caption, names) in enumerate(zip(scene.captions, scene.words, strict=True)):
            self.captions["annotations"].append(
                {
                    "id": number * len(scene.captions) + place,
                    "image_id": number,
                    "caption": caption,
                    "words": [None if name is None else instance_ids[name] for name in names],
                }
            )
        for identity, thing in zip(instance_ids, scene.things, strict=True):
            left, top, right, bottom = thing.box
            self.instances["annotations"].append(
                {
                    "id": identity,
                    "image_id": number,
                    "category_id": SHAPES.index(thing.shape) + 1,
                    "bbox": [left, top, right - left, bottom - top],
                    "area": (right - left) * (bottom - top),
                    "iscrowd": 0,
                    "colour": thing.colour,
                    "size": thing.size,
                }
            )


def _prepare(out: Path) -> None:
    """Makes a folder fit to be written to, without the scenes that it may hold.

    Raises:
        InputError: it is no folder, or holds something else.
    """
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            if not (out / MARKER).is_file():
                raise InputError(
                    f"{out}: is not empty and holds no scenes; give --out a new or empty folder"
                )
            for pattern in ("annotations/captions_*.json", "annotations/instances_*.json"):
                _remove(out.glob(pattern))
            _remove(out.glob("images/scene_*.jpg"))
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror or error})") from error


def _remove(files: Iterable[Path]) -> None:
    for file in list(files):
        file.unlink()
