"""Whether the map of a word lies on the thing that the word names: a number per kind of map.

Words are those that name a thing with a box in the photo (`captioner.boxes.Names`); what is
measured of their maps is in `captioner.map_scores`.

Shapes: `N` captions, `T` words, `L` regions, `D` region channels, grid `gh x gw`.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from captioner import __version__, datasets, inference, search
from captioner.boxes import BoxedPhoto, Boxes, Names, find_instances, read_boxes
from captioner.config import CompleteSearch, DataConfig, SearchConfig
from captioner.datasets import Example
from captioner.errors import InputError
from captioner.evidence import evidence_maps
from captioner.features import BATCH_PHOTOS, load_squares
from captioner.files import write_text
from captioner.images import Geometry
from captioner.inference import Writer
from captioner.map_scores import (
    BASELINES,
    CENTRE_SIGMA,
    CONFIDENCE,
    MEASURES,
    RESAMPLES,
    SEED,
    Word,
    box_shares,
    by_category,
    correctness,
    pointing,
    pointing_hits,
    summarize,
)
from captioner.model import Captioner
from captioner.progress import track
from captioner.text import PAD, START, UNKNOWN

__all__ = ["MAPS", "Written", "ground", "table"]

log = logging.getLogger(__name__)

DEFINITIONS = {
    "words": "words of a caption that name a category with a box in the part of the photo that the "
    "model sees, and that its vocabulary has",
    "correctness": "share of a word's map inside the union of the boxes of the named category; a "
    "cell's mass lies evenly in its rectangle; mean over words",
    "pointing": "share of words whose map's highest cell has its centre in such a box; equal "
    "highest cells count for their share",
    "alpha": "the attention weights",
    "evidence": "alpha x positive part of gradient x region of the word's own log-probability, "
    "normalised",
    "sample": "one region drawn from alpha",
    "uniform": "the same for all cells",
    "centre": f"Gaussian around the grid's centre, sigma {CENTRE_SIGMA:g} of its height and width; "
    "its highest cells are the bare centre cells",
    "interval": f"percentile bootstrap, {CONFIDENCE:.0%}: photos are resampled {RESAMPLES} times",
    "ratio": "to the uniform or centre map's mean on the same words",
}


# --- Maps ----------------------------------------------------------------------------------------


class Written(NamedTuple):
    """Captions of photos, as they were written or as they were read.

    Attributes:
        model: that wrote or read them.
        regions: `(N, L, D)`.
        tokens: `(N, T + 1)`: `<start>`, words, pads.
        counted: `(N, T)` bool: the words that are measured; only their maps are needed.
        attention: `(N, T, L)`, alpha of every word; anything for pads.
        random: for maps that are drawn.
    """

    model: Captioner
    regions: np.ndarray
    tokens: np.ndarray
    counted: np.ndarray
    attention: np.ndarray
    random: np.random.Generator


def sample_maps(written: Written) -> np.ndarray:
    """Maps with all their mass on one region drawn from alpha, as hard attention looks."""
    drawn = written.random.random(written.attention.shape[:2])[..., None]
    chosen = (written.attention.cumsum(axis=-1) < drawn).sum(axis=-1)
    regions = written.attention.shape[-1]
    return np.eye(regions, dtype=np.float32)[np.minimum(chosen, regions - 1)]


MAPS: Mapping[str, Callable[[Written], np.ndarray]] = {
    "alpha": lambda written: written.attention,
    "evidence": lambda written: evidence_maps(
        written.model, written.regions, written.tokens, written.counted
    ),
    "sample": sample_maps,
}
"""Kinds of maps: captions -> `(N, T, L)`. `sample` is measured for hard attention only."""


# --- Measuring a model ---------------------------------------------------------------------------


def ground(
    data: DataConfig,
    split: str | None,
    model: Path | None,
    options: SearchConfig,
    out: Path | None = None,
    *,
    reference: bool = False,
    boxes: Path | None = None,
) -> dict[str, Any]:
    """Measures where a model looks for the things that its captions name.

    Args:
        data: a data set with boxes: COCO instances JSON beside its captions, or given.
        split: whose photos; `None` takes all, for data sets that nothing was trained on.
        model: a `.keras` file or a run folder; `None` for the shipped model.
        options: how captions are generated; references are cut at `max_words` too.
        out: file for the result; `ground.json` in the run folder, when `model` is one.
        reference: read the data set's captions (teacher forcing) instead of generating them.
        boxes: COCO instances JSON, where it is not beside the captions.

    Returns:
        The result, as it is written to `out`: fractions, with all that is needed to repeat it.

    Raises:
        InputError: no data set, boxes, model or split; a model without attention; photos of another
            size than the boxes are for; no word that names a boxed thing.
    """
    data_set = datasets.from_options(data, "a data set with boxes (COCO instances JSON)")
    assert data.data is not None  # or there were no data set
    files = [boxes] if boxes else find_instances(data.data, split)
    writer = Writer(inference.load(model))
    if not writer.model.has_attention:
        raise InputError(
            f"{model}: this model has no attention, so it has no alpha to measure (only evidence "
            "would exist); use one trained with --attention soft or hard"
        )
    photos = data_set.examples if split is None else data_set.split(split)
    annotated = read_boxes(files, data_set.root, data.images)
    examples = [one for one in photos if one.path in annotated.photos][: data.limit]
    if not examples:
        raise InputError(
            f"{files[0]}: none of the {len(photos)} photos of {data.data} is in it; give the "
            "instances JSON of these photos with --boxes FILE"
        )
    search_options = options.completed(writer.model.decoding)
    words, unreadable = _measure(_Meter(writer, annotated, search_options, reference), examples)
    kind = "reference" if reference else "generated"
    seen = len(examples) - unreadable
    if not words:
        raise InputError(
            f"{data.data}: no {kind} caption of {seen} photos names a thing with a box; is the "
            "model trained on such things?"
        )
    counted = len({word.photo for word in words})
    report: dict[str, Any] = {
        "maps": summarize(words),
        "categories": by_category(words),
        "words": len(words),
        "photos": counted,
        "photos_without_words": seen - counted,
        "unreadable_photos": unreadable,
        "captions": kind,
        "search": _search(search_options, reference),
        "look": "expected" if reference else options.look,
        "max_words": options.max_words,
        "split": split or "all",
        "data": str(data.data),
        "boxes": [str(file) for file in files],
        "model": str(model or inference.PHOTO),
        "grid": list(writer.model.grid),
        "image_size": writer.model.image_size,
        "resize": writer.model.resize,
        "bootstrap_seed": SEED,
        "definitions": DEFINITIONS,
        "captioner": __version__,
    }
    if out is None and model is not None and model.is_dir():
        out = model / "ground.json"
    print(table(report))
    if out:
        write_text(out, json.dumps(report, indent=2) + "\n")
        print(f"result → {out}")
    return report


def table(report: Mapping[str, Any]) -> str:
    """The result of `ground` for people: fractions, three decimals."""
    lines = [f"{'':<24}{'correctness':<24}{'x uniform':<12}{'pointing':<24}x centre"]
    for name, measures in report["maps"].items():
        inside, point = (measures[measure] for measure in MEASURES)
        lines.append(
            f"{name:<24}{_with_interval(inside):<24}{_ratio(inside, 'uniform'):<12}"
            f"{_with_interval(point):<24}{_ratio(point, 'centre')}"
        )
    lines += [
        "",
        f"{'correctness, pointing':<24}" + "".join(f"{name:<14}" for name in report["maps"]),
    ]
    for category, row in report["categories"].items():
        cells = (f"{one['correctness']:.3f}, {one['pointing']:.3f}" for one in row["maps"].values())
        lines.append(
            f"{category:<16}{row['words']:>6}  " + "".join(f"{cell:<14}" for cell in cells)
        )
    lines += [
        "",
        f"{report['words']} words in {report['photos']} photos; "
        f"{report['photos_without_words']} photos without such a word",
        f"{report['captions']} captions: {report['search']}",
        f"in brackets: {CONFIDENCE:.0%} interval, photos resampled {RESAMPLES} times",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _with_interval(cell: Mapping[str, Any]) -> str:
    low, high = cell["interval"]
    return f"{cell['mean']:.3f} [{low:.3f}, {high:.3f}]"


def _ratio(cell: Mapping[str, Any], baseline: str) -> str:
    ratio = cell.get(f"ratio_to_{baseline}")
    return "" if ratio is None else f"{ratio:.2f}"


def _search(options: CompleteSearch, reference: bool) -> str:
    if reference:
        return "teacher forcing"
    how = "sampling" if options.sample else f"beam {options.beam}"
    return f"{how}, score {search.length_rule(options.length_penalty)}"


# --- Words of a batch of photos ------------------------------------------------------------------


class _Photo(NamedTuple):
    number: int
    example: Example
    geometry: Geometry
    boxed: BoxedPhoto


class _Caption(NamedTuple):
    """A caption, and the row in the batch of its photo; alpha `(T, L)` where it was written."""

    row: int
    words: Sequence[str]
    tokens: Sequence[int]
    attention: np.ndarray | None


class _Target(NamedTuple):
    """A word that names a boxed thing, with `box_shares` and `pointing_hits` of its boxes."""

    position: int
    category: str
    shares: np.ndarray
    hits: np.ndarray


def _measure(meter: "_Meter", examples: Sequence[Example]) -> tuple[list[Word], int]:
    """All counted words, and how many photos could not be read (each is named on stderr)."""
    model = meter.model
    words: list[Word] = []
    waiting: list[_Photo] = []
    squares: list[np.ndarray] = []
    unreadable = 0
    loaded = load_squares([one.path for one in examples], model.image_size, model.resize)
    progress = track(loaded, "Looking", len(examples), "photos")
    for number, (path, square, geometry) in enumerate(progress):
        if isinstance(square, InputError) or geometry is None:
            unreadable += 1
            log.warning(square)
        else:
            boxed = meter.annotated.photos[path]
            waiting.append(_Photo(number, examples[number], geometry, boxed))
            squares.append(square)
        if len(waiting) == BATCH_PHOTOS or (waiting and number == len(examples) - 1):
            words += meter.words(waiting, meter.writer.encode(np.stack(squares)))
            waiting.clear()
            squares.clear()
    return words, unreadable


class _Meter:
    """Measures the words of a batch of photos."""

    def __init__(
        self, writer: Writer, annotated: Boxes, options: SearchConfig, reference: bool
    ) -> None:
        self.writer, self.model, self.annotated = writer, writer.model, annotated
        self._options, self._reference = options, reference
        self._names = Names(annotated.categories, writer.model.vocabulary.split)
        self._blind = {name: make(self.model.grid) for name, make in BASELINES.items()}
        is_hard = self.model.decoder.attention_kind == "hard"
        self._random = np.random.default_rng(SEED)
        self._kinds = [kind for kind in MAPS if kind != "sample" or is_hard]

    def words(self, photos: Sequence[_Photo], regions: Any) -> list[Word]:
        """The counted words of some photos, whose regions are `(B, L, D)`."""
        captions = self._references(photos) if self._reference else self._generated(regions)
        targets = [(one, self._targets(one, photos[one.row])) for one in captions]
        targets = [(one, found) for one, found in targets if found]
        if not targets:
            return []
        written = self._written(np.asarray(regions), targets)
        maps = {kind: MAPS[kind](written) for kind in self._kinds}
        words = []
        for row, (caption, found) in enumerate(targets):
            for position, category, shares, hits in found:
                here = {
                    kind: each[row, position].reshape(self.model.grid)
                    for kind, each in maps.items()
                } | self._blind
                words.append(
                    Word(
                        photos[caption.row].number,
                        category,
                        {name: correctness(each, shares) for name, each in here.items()},
                        {name: pointing(each, hits) for name, each in here.items()},
                    )
                )
        return words

    def _generated(self, regions: Any) -> list[_Caption]:
        found = self.writer.write(regions, self._options)
        decode = self.model.vocabulary.decode
        return [
            _Caption(row, decode(best.tokens), best.tokens, best.attention)
            for row, (best, *_) in enumerate(found)
        ]

    def _references(self, photos: Sequence[_Photo]) -> list[_Caption]:
        cut = slice(self._options.max_words)
        vocabulary = self.model.vocabulary
        return [
            _Caption(row, vocabulary.split(caption)[cut], vocabulary.encode(caption)[cut], None)
            for row, photo in enumerate(photos)
            for caption in photo.example.captions
        ]

    def _targets(self, caption: _Caption, photo: _Photo) -> list[_Target]:
        """The words to count."""
        geometry, boxed, grid = photo.geometry, photo.boxed, self.model.grid
        size = (geometry.photo_width, geometry.photo_height)
        if size != (boxed.width, boxed.height):
            raise InputError(
                f"{photo.example.path}: is {size[0]}x{size[1]}, but its boxes are for a photo of "
                f"{boxed.width}x{boxed.height}; use the photos that were annotated"
            )
        targets = []
        for position, category in enumerate(self._names.find(caption.words, boxed.boxes)):
            # For <unk> in place of the word no map would be this word's.
            if category is not None and caption.tokens[position] != UNKNOWN:
                shares = box_shares(boxed.boxes[category], geometry, grid)
                if shares.any():  # else it was cropped away
                    hits = pointing_hits(boxed.boxes[category], geometry, grid)
                    targets.append(_Target(position, category, shares, hits))
        return targets

    def _written(
        self, regions: np.ndarray, targets: Sequence[tuple[_Caption, Sequence[_Target]]]
    ) -> Written:
        """Captions side by side, with alpha; where nobody wrote them, they are read."""
        regions = regions[[one.row for one, _ in targets]]
        size, length = len(targets), max(len(one.tokens) for one, _ in targets)
        tokens = np.full((size, length + 1), PAD, np.int32)
        counted = np.zeros((size, length), bool)
        attention = np.zeros((size, length, regions.shape[1]), np.float32)
        for row, (one, found) in enumerate(targets):
            counted[row, [target.position for target in found]] = True
            tokens[row, : len(one.tokens) + 1] = [START, *one.tokens]
            if one.attention is not None:
                attention[row, : len(one.tokens)] = one.attention
        if self._reference:
            outputs = self.model({"regions": regions, "tokens": tokens[:, None, :-1]})
            attention = np.asarray(outputs["attention"][:, 0])
        return Written(self.model, regions, tokens, counted, attention, self._random)
