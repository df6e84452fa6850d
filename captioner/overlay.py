"""Caption -> one picture that shows where the model looked for every word.

The picture follows figure 2 of Xu et al. 2015: the photo, then the photo once per word with the
word's attention map over it. Where the model did not look the photo turns dark and grey, where it
did the photo keeps its colours under a glow, so that colour means attention and nothing else.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image, ImageDraw

from captioner.caption import Caption
from captioner.files import replacing
from captioner.images import Geometry
from captioner.lettering import fit, runs, typeface, wrap

__all__ = [
    "COLOURS",
    "DIMMED",
    "EARLY",
    "GAMMA",
    "GLOW",
    "SHOWS",
    "blend",
    "draw_scale",
    "figure",
    "highest_share",
    "maps_of",
    "numbers",
    "save",
    "spread",
]

# Perceptually uniform: equal steps of attention look like equal steps, in grey print as well.
COLOURS = matplotlib.colormaps["inferno"]
# Brightness over alpha / highest: one sharp word would leave all the others dark on a linear scale.
GAMMA = 0.6
DIMMED = 0.5  # brightness of the grey photo where no attention falls
GLOW = 0.6  # the colour map's opacity where attention is full
EARLY = 1.6  # it is full at 1 / EARLY of the level already, or faint glows look muddy
_RED_GREEN_BLUE_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow's mode L

SHOWS = ("alpha", "evidence")

_INK, _FAINT = (24, 24, 28), (100, 100, 108)
_ASPECT = 1.8  # width / height that `figure` aims at when it chooses the number of columns

# Lengths of a figure whose `panel` is 224 pixels; they grow with it.
_MARGIN, _GAP = 24, 16
_TITLE, _TITLE_LINE = 23, 31  # type size and line height of the caption's sentence
_WORD, _ABOVE = 18, 30  # type size of a panel's word, height of its line above the picture
_SMALL, _SMALL_LINE, _BELOW = 12, 17, 34  # the same of the numbers and notes
_SCALE = 46  # height of the colour scale with its marks
_NARROWEST = 130  # least width of a panel's text
_LEAST_WIDTH = 340  # of all panels together


def spread(attention_map: np.ndarray, geometry: Geometry, width: int, height: int) -> np.ndarray:
    """Spreads one attention map over the whole photo, in the photo's own aspect ratio.

    Cubic convolution (Keys 1981) between the cells' centres: at the centre of a region's cell the
    result is that region's alpha. Values below zero, which the cubic's overshoot makes, are 0.

    Args:
        attention_map: `(gh, gw)`, alpha of every region.
        geometry: how the photo became the square that the encoder saw.
        width: pixels across which the whole photo is drawn.
        height: pixels down which the whole photo is drawn.

    Returns:
        `(height, width)` float32, alpha as share per region; 0 on what `crop` hid from the
        encoder. What `pad` added is cut away.
    """
    rows, columns = attention_map.shape
    left, top, right, bottom = geometry.window
    across = _interpolation(width, geometry.photo_width, left, right, columns)
    down = _interpolation(height, geometry.photo_height, top, bottom, rows)
    return np.maximum(down @ attention_map @ across.T, 0.0).astype(np.float32)


def blend(photo: Image.Image, alpha: np.ndarray, highest: float) -> Image.Image:
    """Lays a spread map over the photo.

    Args:
        photo: RGB.
        alpha: `(photo.height, photo.width)`, from `spread`.
        highest: the alpha that glows brightest, the top of the colour scale.

    Returns:
        A picture of the photo's size, RGB.
    """
    level = np.clip(alpha / highest, 0.0, 1.0)[..., None] ** GAMMA
    colours = np.asarray(photo, np.float32) / 255
    grey = (colours @ np.array(_RED_GREEN_BLUE_LUMA, np.float32))[..., None]
    opacity = GLOW * np.minimum(EARLY * level, 1.0)
    lit = grey * DIMMED * (1 - level) + colours * level
    blended = lit * (1 - opacity) + COLOURS(level[..., 0])[..., :3] * opacity
    return Image.fromarray(np.rint(blended * 255).astype(np.uint8))


def maps_of(caption: Caption, show: str) -> np.ndarray | None:
    """A caption's maps `(T, gh, gw)` of one of `SHOWS`; `None` without attention.

    Raises:
        ValueError: `show` is unknown, or the caption carries no evidence.
    """
    if show not in SHOWS:
        raise ValueError(f"show must be one of {', '.join(SHOWS)}, received {show!r}")
    if show == "evidence" and caption.evidence is None:
        raise ValueError("this caption carries no evidence; describe(..., evidence=True) adds it")
    return caption.attention if show == "alpha" else caption.evidence


def figure(
    caption: Caption, *, show: str = "alpha", columns: int | None = None, panel: int = 224
) -> Image.Image:
    """Draws the photo and, word by word, where the model looked.

    All words share one colour scale, from 0 to the figure's highest alpha, so that panels can be
    compared; the scale at the foot says what its colours mean and where an even spread lies.

    Args:
        caption: what to draw; without attention only the photo and the caption are drawn.
        show: `alpha`, what the model weighed before it chose the word, or `evidence`, the regions
            that spoke for the word it chose; the foot says which.
        columns: panels per row; chosen for a page-like shape when `None`.
        panel: side in pixels of a square photo's panel; other photos get the same area, up to
            twice this length. Type and spacing grow with it.

    Returns:
        The figure, RGB on white.

    Raises:
        InputError: the photo's file is gone or unreadable.
        ValueError: `columns` or `panel` is not positive, or the caption carries no evidence.
    """
    if panel < 1 or (columns is not None and columns < 1):
        raise ValueError(f"panel and columns must be positive, received {panel} and {columns}")
    maps = maps_of(caption, show)
    photo = caption.pixels()
    layout = _Layout.of(caption, maps, show, columns, panel)
    canvas = Image.new("RGB", (layout.width, layout.height), "white")
    draw = ImageDraw.Draw(canvas)
    for index, line in enumerate(layout.title):
        y = layout.margin + (index + 0.5) * _TITLE_LINE * layout.unit
        x: float = layout.margin
        for run, font in runs(line, _TITLE * layout.unit, bold=True):
            draw.text((x, y), run, _INK, font, anchor="lm")
            x += font.getlength(run)

    small = photo.resize(layout.picture, Image.Resampling.LANCZOS, reducing_gap=3.0)
    canvas.paste(small, layout.panel_box(0)[:2])
    if maps is None:
        _label(draw, layout, 0, "photo", "")
    else:
        cropped = caption.geometry.resize == "crop"
        _label(draw, layout, 0, "photo", "frame: what the model saw" if cropped else "")
        if cropped:
            _frame_visible(draw, caption.geometry, layout)
        highest = highest_share(maps)
        for index, word in enumerate(caption.words):
            alpha = spread(maps[index], caption.geometry, *layout.picture)
            canvas.paste(blend(small, alpha, highest), layout.panel_box(index + 1)[:2])
            _label(draw, layout, index + 1, word, numbers(caption, index), bold=True)
        if caption.words:
            foot = len(layout.foot) * _SMALL_LINE * layout.unit
            top = layout.height - layout.margin - round(foot + 20 * layout.unit)
            draw_scale(canvas, layout.margin, top, layout.unit, highest, maps[0].size)
    first = layout.height - layout.margin - len(layout.foot) * _SMALL_LINE * layout.unit
    for index, line in enumerate(layout.foot):
        y = first + (index + 0.5) * _SMALL_LINE * layout.unit
        font = typeface(line, _SMALL * layout.unit)
        draw.text((layout.margin, y), line, _FAINT, font, anchor="lm")
    return canvas


def highest_share(maps: np.ndarray) -> float:
    """The top of the colour scale: the highest share of any word and region."""
    return float(maps.max(initial=0.0)) or 1.0


def numbers(caption: Caption, index: int) -> str:
    """A word's gate and probability as they stand below its map."""
    probability = f"p {caption.word_probabilities[index]:.2f}"
    return (
        probability if caption.gate is None else f"gate {caption.gate[index]:.2f}   {probability}"
    )


def draw_scale(
    canvas: Image.Image, left: float, top: int, unit: float, highest: float, regions: int
) -> None:
    """Draws the colour scale between its ends' values, with a mark at the even spread.

    Args:
        canvas: what is drawn on.
        left: where the value of its lower end starts, pixels.
        top: of its colours, pixels; the mark's words stand above.
        unit: one pixel of a scale 180 wide.
        highest: the share at its upper end.
        regions: among how many a word's attention is shared out.
    """
    draw = ImageDraw.Draw(canvas)
    font = typeface("0%", _SMALL * unit)
    width, thick = round(180 * unit) + 1, max(1, round(11 * unit))
    left = round(left + draw.textlength("0%", font) + 6 * unit)
    # Over mid-grey: in the panels, too, its colours always lie on a photo.
    ramp = np.broadcast_to(np.linspace(0, highest, width, dtype=np.float32), (thick, width))
    backdrop = Image.new("RGB", (width, thick), (150, 150, 150))
    canvas.paste(blend(backdrop, ramp, highest), (left, top))
    middle = top + thick / 2
    draw.text((left - 6 * unit, middle), "0%", _FAINT, font, anchor="rm")
    draw.text((left + width + 6 * unit, middle), f"{highest:.1%}", _FAINT, font, anchor="lm")
    even = left + (width - 1) * min(1.0, 1 / (regions * highest))
    line = max(1, round(unit))
    draw.line([(even, top - 5 * unit), (even, top - 1)], _INK, line)
    draw.line([(even, top), (even, top + thick - 1)], "white", line)
    text = f"even spread {1 / regions:.1%}"
    half = draw.textlength(text, font) / 2
    centre = min(max(even, left + half), left + width - half)
    draw.text((centre, top - 6 * unit), text, _FAINT, font, anchor="mb")


def save(caption: Caption, path: str | Path, *, show: str = "alpha") -> None:
    """Writes `figure(caption, show=show)` as a PNG, whole or not at all.

    Its folder is made when missing.

    Raises:
        InputError: the file cannot be written, or the photo cannot be read.
    """
    picture = figure(caption, show=show)
    with replacing(Path(path)) as partial:
        picture.save(partial, "PNG")


@dataclass(frozen=True)
class _Layout:
    """Where everything stands in the figure, in pixels."""

    unit: float  # one pixel of a figure whose `panel` is 224
    picture: tuple[int, int]  # the photo's width and height in a panel
    cell: tuple[int, int]  # a panel with its labels and the gap to the next
    columns: int
    width: int
    height: int
    margin: int
    title: tuple[str, ...]
    foot: tuple[str, ...]
    head: int  # where the first row of cells starts

    @classmethod
    def of(
        cls, caption: Caption, maps: Any, show: str, columns: int | None, panel: int
    ) -> "_Layout":
        unit = panel / 224
        aspect = caption.geometry.photo_width / caption.geometry.photo_height
        width = panel * min(math.sqrt(aspect), 2.0, 2.0 * aspect)
        picture = max(1, round(width)), max(1, round(width / aspect))
        gap = round(_GAP * unit)
        # A narrow picture still needs room for "gate 0.73   p 0.91" below it.
        cell = (
            max(picture[0], round(_NARROWEST * unit)) + gap,
            picture[1] + round((_ABOVE + _BELOW) * unit),
        )
        panels = 1 if maps is None else 1 + len(caption.words)
        columns = min(columns, panels) if columns else _columns(panels, cell)
        # The colour scale and the caption's sentence need some width under the narrowest photo.
        inner = max(columns * cell[0] - gap, round(_LEAST_WIDTH * unit))
        margin = round(_MARGIN * unit)
        title = wrap(caption.text, inner, _TITLE * unit, bold=True)
        foot = wrap(_explanation(caption, maps, show), inner, _SMALL * unit)
        head = margin + round((len(title) * _TITLE_LINE + _GAP / 2) * unit)
        scale = _SCALE if panels > 1 else 0
        body = -(-panels // columns) * cell[1]
        below = round((scale + len(foot) * _SMALL_LINE) * unit) + margin
        return cls(
            unit=unit,
            picture=picture,
            cell=cell,
            columns=columns,
            width=inner + 2 * margin,
            height=head + body + below,
            margin=margin,
            title=title,
            foot=foot,
            head=head,
        )

    def panel_box(self, index: int) -> tuple[int, int, int, int]:
        """(left, top, right, bottom) of one picture: 0 is the photo, `t + 1` is word `t`."""
        row, column = divmod(index, self.columns)
        spare = self.cell[0] - round(_GAP * self.unit) - self.picture[0]
        left = self.margin + column * self.cell[0] + spare // 2
        top = self.head + row * self.cell[1] + round(_ABOVE * self.unit)
        return left, top, left + self.picture[0], top + self.picture[1]


def _columns(panels: int, cell: tuple[int, int]) -> int:
    """The number of columns whose figure is nearest to `_ASPECT` with few places left empty."""

    def cost(columns: int) -> float:
        rows = -(-panels // columns)
        aspect = columns * cell[0] / (rows * cell[1])
        return abs(math.log(aspect / _ASPECT)) + 1.2 * (rows * columns / panels - 1)

    return min(range(1, panels + 1), key=cost)


def _explanation(caption: Caption, maps: np.ndarray | None, show: str) -> str:
    """What a reader needs to know to read the figure."""
    if maps is None:
        return "this model has no attention: no map to draw"
    if not caption.words:
        return ""
    regions = maps[0].size
    what = {
        "alpha": "attention (alpha, weighed before the word was chosen)",
        "evidence": "evidence (what spoke for the word once it was chosen)",
    }[show]
    gate = (
        "" if caption.gate is None else "Gate: how much of the photo reached the decoder, 0 to 1. "
    )
    return (
        f"Colour: share of the word's {what} that one of {regions} regions gets; spread evenly, "
        f"each would get {1 / regions:.1%}. {gate}p: the word's probability."
    )


def _interpolation(pixels: int, length: int, start: float, stop: float, cells: int) -> np.ndarray:
    """Weights `(pixels, cells)` that draw an axis of cells over the photo's axis.

    Args:
        pixels: how many pixels the photo is drawn with along this axis.
        length: the photo's own length along this axis.
        start: where the encoder's window starts, in photo pixels.
        stop: where it stops.
        cells: regions along this axis.
    """
    edges = np.arange(pixels + 1) * (length / pixels)
    centres = (edges[:-1] + edges[1:]) / 2
    # In cells from the first cell's centre; beyond the outermost centres the map stays level.
    position = np.clip((centres - start) / (stop - start) * cells - 0.5, 0, cells - 1)
    first = np.floor(position).astype(int)
    weights = np.zeros((pixels, cells))
    for offset in (-1, 0, 1, 2):
        distance = np.abs(position - (first + offset))
        near = (1.5 * distance - 2.5) * distance**2 + 1
        far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
        kernel = np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
        np.add.at(weights, (np.arange(pixels), np.clip(first + offset, 0, cells - 1)), kernel)
    # The share of each pixel that lies in the window: 0 on what a crop hid.
    covered = np.minimum(edges[1:], stop) - np.maximum(edges[:-1], start)
    return weights * (np.clip(covered, 0, None) / np.diff(edges))[:, None]


def _frame_visible(draw: ImageDraw.ImageDraw, geometry: Geometry, layout: _Layout) -> None:
    """Frames the part of the first panel that `crop` let the encoder see."""
    corner_x, corner_y = layout.panel_box(0)[:2]
    left, top, right, bottom = geometry.visible
    x = layout.picture[0] / geometry.photo_width
    y = layout.picture[1] / geometry.photo_height
    box = (
        corner_x + round(left * x),
        corner_y + round(top * y),
        corner_x + round(right * x) - 1,
        corner_y + round(bottom * y) - 1,
    )
    line = max(1, round(layout.unit))
    draw.rectangle(box, outline="white", width=3 * line)  # seen on dark photos
    draw.rectangle(box, outline=_INK, width=line)  # seen on bright ones and at the photo's edge


def _label(
    draw: ImageDraw.ImageDraw,
    layout: _Layout,
    index: int,
    above: str,
    below: str,
    *,
    bold: bool = False,
) -> None:
    """Writes a word above a picture and its numbers below, both centred on it."""
    left, top, right, bottom = layout.panel_box(index)
    middle, unit = (left + right) / 2, layout.unit
    room = layout.cell[0] - _GAP * unit / 2
    word, font = fit(above, room, _WORD * unit, bold=bold)
    draw.text((middle, top - 14 * unit), word, _INK if bold else _FAINT, font, anchor="mm")
    below, font = fit(below, room, _SMALL * unit)
    draw.text((middle, bottom + 13 * unit), below, _FAINT, font, anchor="mm")
