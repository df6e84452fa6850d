"""How well maps lie on boxes: two measures, maps that know nothing, means with intervals.

- *attention correctness* (Liu, Mao, Sha, Yuille 2017, arXiv 1605.09553): the share of the map
  inside the union of the boxes of the named category. A cell's mass lies evenly in its rectangle,
  the overlap with the boxes is exact, and mass beyond the photo (`--resize pad`) is outside.
- *pointing accuracy* (after the pointing game of Zhang et al. 2016, arXiv 1608.00507, without its
  margin): the centre of the map's highest cell lies in such a box. Of several highest cells each
  counts for its share, which gives a uniform map what a blind guess gets.

Both reward a map for large things in the middle of photos, so two maps that know nothing are
measured on the same words: a uniform one and a Gaussian around the centre.

`gh x gw` is the grid of regions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from captioner.images import Geometry

__all__ = [
    "BASELINES",
    "CENTRE_SIGMA",
    "CONFIDENCE",
    "MEASURES",
    "RESAMPLES",
    "SEED",
    "Word",
    "box_shares",
    "by_category",
    "centre_map",
    "correctness",
    "pointing",
    "pointing_hits",
    "summarize",
    "uniform_map",
]

CENTRE_SIGMA = 0.25  # of the grid's height and width
MEASURES = ("correctness", "pointing")
RESAMPLES = 2000
CONFIDENCE = 0.95
SEED = 0


# --- Maps that know nothing -----------------------------------------------------------------------


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
        boxes: `(M, 4)`: left, top, right, bottom in photo pixels; what is beyond the photo is cut.
        geometry: of the photo.
        grid: `(gh, gw)`.

    Returns:
        `(gh, gw)`, 0..1.
    """
    boxes = _visible(boxes, geometry)
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
    """Whether every cell's centre lies in one of the boxes, edges included: `(gh, gw)` bool."""
    boxes = _visible(boxes, geometry)
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


def _visible(boxes: np.ndarray, geometry: Geometry) -> np.ndarray:
    """What of the boxes is in the part of the photo that the model sees: `(M, 4)` or fewer."""
    left, top, right, bottom = geometry.visible
    boxes = np.clip(boxes, (left, top, left, top), (right, bottom, right, bottom))
    return boxes[(boxes[:, 0] < boxes[:, 2]) & (boxes[:, 1] < boxes[:, 3])]


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
    return np.any(in_rows[:, :, None] & in_columns[:, None], axis=0)


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


def summarize(words: Sequence[Word]) -> dict[str, dict[str, dict[str, Any]]]:
    """What many words say of every kind of map.

    Args:
        words: all counted words; at least one.

    Returns:
        Per map and measure: `mean` over the words and its `interval`; for maps other than the
        baselines also `ratio_to_uniform` and `ratio_to_centre` with their intervals; `None` where
        the baseline's mean is 0.
    """
    columns = [(name, measure) for name in words[0].correctness for measure in MEASURES]
    values = np.array([[getattr(word, measure)[name] for name, measure in columns]
                       for word in words])  # fmt: skip
    _, photo = np.unique([word.photo for word in words], return_inverse=True)
    photos = int(photo.max()) + 1
    sums = np.zeros((photos, len(columns) + 1))
    np.add.at(sums, photo, np.pad(values, ((0, 0), (0, 1)), constant_values=1))  # last: words
    # Photos are resampled, not words: the words of one photo are not independent.
    random = np.random.default_rng(SEED)
    resampled = np.array(
        [
            np.bincount(random.integers(photos, size=photos), minlength=photos) @ sums
            for _ in range(RESAMPLES)
        ]
    )
    mean = dict(zip(columns, values.mean(axis=0), strict=True))
    means = dict(zip(columns, (resampled[:, :-1] / resampled[:, -1:]).T, strict=True))

    report: dict[str, dict[str, dict[str, Any]]] = {}
    for name, measure in columns:
        key = (name, measure)
        cell: dict[str, Any] = {"mean": float(mean[key]), "interval": _interval(means[key])}
        for other in BASELINES if name not in BASELINES else ():
            base, bases = mean[other, measure], means[other, measure]
            cell[f"ratio_to_{other}"] = float(mean[key] / base) if base else None
            cell[f"ratio_to_{other}_interval"] = (
                _interval(means[key] / bases) if bases.all() else None
            )
        report.setdefault(name, {})[measure] = cell
    return report


def by_category(words: Sequence[Word]) -> dict[str, dict[str, Any]]:
    """Per category, the most named first: `words`, `photos`, and per map the mean measures."""
    groups: dict[str, list[Word]] = {}
    for word in words:
        groups.setdefault(word.category, []).append(word)
    return {
        category: {
            "words": len(group),
            "photos": len({word.photo for word in group}),
            "maps": {
                name: {
                    measure: float(np.mean([getattr(word, measure)[name] for word in group]))
                    for measure in MEASURES
                }
                for name in group[0].correctness
            },
        }
        for category, group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    }


def _interval(values: np.ndarray) -> list[float]:
    tail = (1 - CONFIDENCE) / 2
    return [float(value) for value in np.quantile(values, [tail, 1 - tail])]
