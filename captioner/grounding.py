"""Whether the map of a word lies on the thing that the word names: a number per kind of map.

Words are those that name a thing with a box in the photo (`captioner.boxes.Names`). Two measures:

- *attention correctness* (Liu, Mao, Sha, Yuille 2017, arXiv 1605.09553): the share of the map inside
  the union of the boxes of the named category. A cell's mass lies evenly in its rectangle, the
  overlap with the boxes is exact, and mass beyond the photo (`--resize pad`) is outside.
- *pointing accuracy* (after the pointing game of Zhang et al. 2016, arXiv 1608.00507, without its
  margin): the centre of the map's highest cell lies in such a box. Of several highest cells each
  counts for its share, which gives a uniform map what a blind guess gets.

Both reward a map for large things in the middle of photos, so two maps that know nothing are
measured on the same words: a uniform one and a Gaussian around the centre.

Shapes: `N` captions, `T` words, `L` regions, `D` region channels, grid `gh x gw`.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from captioner import __version__, datasets, inference, search
from captioner.boxes import BoxedPhoto, Boxes, Names, find_instances, read_boxes
from captioner.config import DataConfig, SearchConfig
from captioner.datasets import Example
from captioner.errors import InputError
from captioner.evidence import evidence_maps
from captioner.features import BATCH_PHOTOS, load_squares
from captioner.files import write_text
from captioner.images import Geometry
from captioner.inference import Writer
from captioner.model import Captioner
from captioner.progress import track
from captioner.text import PAD, START, UNKNOWN, tokenize

__all__ = [
    "BASELINES",
    "MAPS",
    "Grounding",
    "Word",
    "Written",
    "box_shares",
    "centre_map",
    "correctness",
    "ground",
    "pointing",
    "pointing_hits",
    "uniform_map",
]

CENTRE_SIGMA = 0.25  # of the grid's height and width
RESAMPLES = 2000
CONFIDENCE = 0.95
BOOTSTRAP_SEED = 0

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
        attention: `(N, T, L)`, alpha of every word; anything for pads.
    """

    model: Captioner
    regions: np.ndarray
    tokens: np.ndarray
    attention: np.ndarray


def sample_maps(written: Written) -> np.ndarray:
    """Maps with all their mass on one region drawn from alpha, as hard attention looks."""
    random = np.random.default_rng(BOOTSTRAP_SEED)
    drawn = random.random(written.attention.shape[:2])[..., None]
    chosen = (written.attention.cumsum(axis=-1) < drawn).sum(axis=-1)
    regions = written.attention.shape[-1]
    return np.eye(regions, dtype=np.float32)[np.minimum(chosen, regions - 1)]


MAPS: Mapping[str, Callable[[Written], np.ndarray]] = {
    "alpha": lambda written: written.attention,
    "evidence": lambda written: evidence_maps(written.model, written.regions, written.tokens),
    "sample": sample_maps,
}
"""Kinds of maps: captions -> `(N, T, L)`. `sample` is measured for hard attention only."""


def uniform_map(grid: tuple[int, int]) -> np.ndarray:
    """`(gh, gw)`, the same everywhere."""
    return np.full(grid, 1 / (grid[0] * grid[1]))


def centre_map(grid: tuple[int, int]) -> np.ndarray:
    """`(gh, gw)`: a Gaussian around the centre, at the cells' centres, normalised."""
    rows, columns = (
        np.exp(-0.5 * (((np.arange(n) - (n - 1) / 2) / n) / CENTRE_SIGMA) ** 2) for n in grid
    )
    product = np.outer(rows, columns)
    return product / product.sum()


BASELINES: Mapping[str, Callable[[tuple[int, int]], np.ndarray]] = {
    "uniform": uniform_map,
    "centre": centre_map,
}
"""Maps that know nothing of photo and word: grid -> `(gh, gw)`."""


# --- Measures ------------------------------------------------------------------------------------


def box_shares(boxes: np.ndarray, geometry: Geometry, grid: tuple[int, int]) -> np.ndarray:
    """How much of every cell lies in the union of boxes, exactly.

    All edges of cells and boxes cut the window into rectangles, each of which is wholly inside or
    outside of every box, so that what boxes share is not counted twice.

    Args:
        boxes: `(N, 4)`: left, top, right, bottom in photo pixels; what is beyond the photo is cut.
        geometry: of the photo.
        grid: `(gh, gw)`.

    Returns:
        `(gh, gw)`, 0..1.
    """
    left, top, right, bottom = geometry.visible
    boxes = np.clip(boxes, (left, top, left, top), (right, bottom, right, bottom))
    x_edges, y_edges = _cell_edges(geometry, grid)
    x = np.unique(np.concatenate([x_edges, boxes[:, 0], boxes[:, 2]]))
    y = np.unique(np.concatenate([y_edges, boxes[:, 1], boxes[:, 3]]))
    x_middle, y_middle = (x[1:] + x[:-1]) / 2, (y[1:] + y[:-1]) / 2
    areas = np.outer(np.diff(y), np.diff(x)) * _inside(boxes, x_middle, y_middle)
    cells = np.zeros(grid)
    rows = np.searchsorted(y_edges, y_middle) - 1
    columns = np.searchsorted(x_edges, x_middle) - 1
    np.add.at(cells, (rows[:, None], columns[None]), areas)
    return cells / np.outer(np.diff(y_edges), np.diff(x_edges))


def pointing_hits(boxes: np.ndarray, geometry: Geometry, grid: tuple[int, int]) -> np.ndarray:
    """Whether the centre of every cell lies in one of the boxes, edges included: `(gh, gw)` bool."""
    x_edges, y_edges = _cell_edges(geometry, grid)
    return _inside(boxes, (x_edges[1:] + x_edges[:-1]) / 2, (y_edges[1:] + y_edges[:-1]) / 2)


def correctness(attention: np.ndarray, shares: np.ndarray) -> float:
    """Share of a map inside the boxes.

    Args:
        attention: `(gh, gw)`, summing to 1.
        shares: from `box_shares`.
    """
    return float((attention * shares).sum())


def pointing(attention: np.ndarray, hits: np.ndarray) -> float:
    """Whether a map's highest cell points into a box, 0 or 1; the share of its highest cells.

    Args:
        attention: `(gh, gw)`.
        hits: from `pointing_hits`.
    """
    return float(hits[attention == attention.max()].mean())


def _cell_edges(geometry: Geometry, grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Where columns and rows begin and end, in photo pixels: `(gw + 1,)` and `(gh + 1,)`."""
    rows, columns = grid
    across = [geometry.cell_box(0, column, grid) for column in range(columns)]
    down = [geometry.cell_box(row, 0, grid) for row in range(rows)]
    return (
        np.array([across[0][0], *(right for _, _, right, _ in across)]),
        np.array([down[0][1], *(bottom for *_, bottom in down)]),
    )


def _inside(boxes: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """For every y and x whether the point lies in a box: `(len(y), len(x))` bool."""
    left, top, right, bottom = (boxes[:, side, None] for side in range(4))
    in_columns = (left <= x) & (x <= right)  # (boxes, x)
    in_rows = (top <= y) & (y <= bottom)
    return (in_rows[:, :, None] & in_columns[:, None]).any(axis=0)


# --- Statistics ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Word:
    """One counted word.

    Attributes:
        photo: its photo's number.
        category: what it names.
        correctness, pointing: by the name of the map, those of `BASELINES` among them.
    """

    photo: int
    category: str
    correctness: dict[str, float]
    pointing: dict[str, float]


class Grounding:
    """What is said of many words.

    Args:
        words: all counted words; at least one.
    """

    def __init__(self, words: Sequence[Word]) -> None:
        self.words = words
        self.maps = tuple(words[0].correctness)
        _, photo = np.unique([word.photo for word in words], return_inverse=True)
        self.photos = int(photo.max()) + 1
        random = np.random.default_rng(BOOTSTRAP_SEED)
        chosen = random.integers(self.photos, size=(RESAMPLES, self.photos))
        self._photo = photo
        # How often every photo is in every resample. Photos, not words: words of a photo are alike.
        self._times = np.stack([np.bincount(row, minlength=self.photos) for row in chosen])

    def summary(self) -> dict[str, dict[str, Any]]:
        """Per map and measure: `mean`, its `interval`, and `ratio_to_*` with theirs."""
        return {
            name: {measure: self._measure(measure, name) for measure in ("correctness", "pointing")}
            for name in self.maps
        }

    def by_category(self) -> dict[str, dict[str, Any]]:
        """Per category, the most named first: words, photos, and the means of every map."""
        groups: dict[str, list[Word]] = {}
        for word in self.words:
            groups.setdefault(word.category, []).append(word)
        return {
            category: {
                "words": len(words),
                "photos": len({word.photo for word in words}),
                **{
                    name: {
                        "correctness": float(np.mean([word.correctness[name] for word in words])),
                        "pointing": float(np.mean([word.pointing[name] for word in words])),
                    }
                    for name in self.maps
                },
            }
            for category, words in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
        }

    def _measure(self, measure: str, name: str) -> dict[str, Any]:
        mean, means = self._mean(measure, name)
        result: dict[str, Any] = {"mean": mean, "interval": _interval(means)}
        for baseline in BASELINES:
            if name not in BASELINES:
                base, bases = self._mean(measure, baseline)
                # Where a resample's words give the baseline nothing there is no ratio.
                usable = bases > 0
                result[f"ratio_to_{baseline}"] = mean / base if base > 0 else None
                result[f"ratio_to_{baseline}_interval"] = (
                    _interval(means[usable] / bases[usable]) if usable.all() else None
                )
        return result

    def _mean(self, measure: str, name: str) -> tuple[float, np.ndarray]:
        """The mean over words, and that of every resample `(RESAMPLES,)`."""
        values = np.array([getattr(word, measure)[name] for word in self.words])
        sums = np.bincount(self._photo, values, self.photos)
        counts = np.bincount(self._photo, minlength=self.photos)
        return float(values.mean()), (self._times @ sums) / (self._times @ counts)


def _interval(values: np.ndarray) -> list[float]:
    tail = (1 - CONFIDENCE) / 2
    return [float(value) for value in np.quantile(values, [tail, 1 - tail])]


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
    if data.data is None:
        raise InputError("--data PATH is needed: a data set with boxes (COCO instances JSON)")
    writer = Writer(inference.load(model))
    if not writer.model.has_attention:
        raise InputError(
            f"{model}: this model has no attention, so it has no alpha to measure (only evidence "
            "would exist); use one trained with --attention soft or hard"
        )
    files = [boxes] if boxes else find_instances(data.data, split)
    data_set = datasets.load(
        data.data, format=data.format, images=data.images, seed=data.split_seed
    )
    photos = data_set.examples if split is None else data_set.split(split)
    annotated = read_boxes(files, data_set.root, data.images)
    examples = [one for one in photos if one.path in annotated.photos][: data.limit]
    if not examples:
        raise InputError(
            f"{files[0]}: none of the {len(photos)} photos of {data.data} is in it; give the "
            "instances JSON of these photos with --boxes FILE"
        )
    unreadable: list[Path] = []
    words = _measure(writer, examples, annotated, options, reference, unreadable)
    kind = "reference" if reference else "generated"
    if not words:
        raise InputError(
            f"{data.data}: no {kind} caption of {len(examples) - len(unreadable)} photos names "
            "a thing with a box; is the model trained on such things?"
        )
    grounding = Grounding(words)
    report: dict[str, Any] = {
        "maps": grounding.summary(),
        "categories": grounding.by_category(),
        "words": len(words),
        "photos": grounding.photos,
        "photos_without_words": len(examples) - len(unreadable) - grounding.photos,
        "unreadable_photos": len(unreadable),
        "captions": kind,
        "split": split or "all photos",
        "data": str(data.data),
        "boxes": [str(file) for file in files],
        "model": str(model) if model else "shipped",
        "grid": list(writer.model.grid),
        "image_size": writer.model.image_size,
        "resize": writer.model.resize,
        "max_words": options.max_words,
        "bootstrap": {"resamples": RESAMPLES, "confidence": CONFIDENCE, "seed": BOOTSTRAP_SEED},
        "definitions": DEFINITIONS,
        "captioner": __version__,
    }
    if not reference:
        report["search"] = "sampling" if options.sample else f"beam {options.beam}"
        report["length_rule"] = search.length_rule(options.length_penalty)
    if out is None and model is not None and model.is_dir():
        out = model / "ground.json"
    print(table(report))
    if out:
        write_text(out, json.dumps(report, indent=2) + "\n")
        print(f"result → {out}")
    return report


def _measure(
    writer: Writer,
    examples: Sequence[Example],
    annotated: Boxes,
    options: SearchConfig,
    reference: bool,
    unreadable: list[Path],
) -> list[Word]:
    """Every counted word of the photos' captions; photos that cannot be read are said and listed."""
    model, grid = writer.model, writer.model.grid
    names = Names(annotated.categories)
    kinds = [kind for kind in MAPS if kind != "sample" or model.decoder.attention_kind == "hard"]
    blind = {name: make(grid) for name, make in BASELINES.items()}
    words: list[Word] = []
    batches = _encoded(writer, examples, unreadable)
    for batch, regions in batches:
        captions = _captions(writer, batch, regions, options, reference)
        targets = [
            _targets(one, batch[one.photo], annotated.photos, names, grid) for one in captions
        ]
        kept = [(one, things) for one, things in zip(captions, targets, strict=True) if things]
        if not kept:
            continue
        written = _written(model, regions, [one for one, _ in kept])
        maps = {kind: MAPS[kind](written) for kind in kinds}
        for row, (one, things) in enumerate(kept):
            for place, category, shares, hits in things:
                here = {kind: maps[kind][row, place].reshape(grid) for kind in kinds} | blind
                words.append(
                    Word(
                        batch[one.photo].number,
                        category,
                        {name: correctness(each, shares) for name, each in here.items()},
                        {name: pointing(each, hits) for name, each in here.items()},
                    )
                )
    return words
