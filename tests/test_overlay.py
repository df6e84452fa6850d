"""Maps land where the model looked, and figures of every shape hold all that they should."""

import dataclasses
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image, ImageDraw

from captioner import overlay
from captioner.caption import Caption
from captioner.errors import InputError
from captioner.images import RESIZES, Geometry

GRID = (5, 7)


def described(
    text: str = "a red dog runs",
    *,
    size: tuple[int, int] = (130, 110),
    resize: str = "stretch",
    attention: bool = True,
    peaks: list[tuple[int, int]] | None = None,
) -> Caption:
    """A grey photo whose word `t` looks at one cell only: `peaks[t]`, or the grid's middle."""
    words = tuple(text.split())
    maps = np.zeros((len(words), *GRID), np.float32)
    for index in range(len(words)):
        maps[(index, *(peaks[index] if peaks else (2, 3)))] = 1
    image = Image.new("RGB", size, (160, 160, 160))
    return Caption(
        text=text,
        words=words,
        word_probabilities=np.linspace(0.9, 0.5, len(words)),
        score=-1.5,
        attention=maps if attention else None,
        gate=np.linspace(0.3, 0.7, len(words)) if attention else None,
        geometry=Geometry.of(image, 224, resize),
        image=image,
    )


def panel_of(caption: Caption, index: int, panel: int = 224) -> np.ndarray:
    box = overlay._Layout.of(caption, caption.attention, "alpha", None, panel).panel_box(index)
    return np.asarray(overlay.figure(caption, panel=panel).crop(box), int)


def drawn_panels(picture: Image.Image) -> int:
    """Counts a figure's panels without knowing its layout.

    Only panels have room for 40 x 40 pixels of which none is white; the places of such squares
    form one rectangle per panel, and each rectangle has one top left corner.
    """
    filled = (np.asarray(picture) != 255).any(-1)
    sums = np.pad(filled.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    squares = sums[40:, 40:] - sums[:-40, 40:] - sums[40:, :-40] + sums[:-40, :-40] == 40 * 40
    padded = np.pad(squares, ((1, 0), (1, 0)))
    return int((squares & ~padded[:-1, 1:] & ~padded[1:, :-1]).sum())


# ---- spread --------------------------------------------------------------------------------------


@pytest.mark.parametrize("resize", RESIZES)
@pytest.mark.parametrize(("photo", "drawn"), [((300, 200), (330, 220)), ((170, 290), (119, 203))])
def test_a_cell_s_attention_lands_on_the_photo_under_the_cell(
    resize: str, photo: tuple[int, int], drawn: tuple[int, int]
) -> None:
    geometry = Geometry(*photo, 224, resize)
    visible = geometry.visible
    inner = 0
    for row in range(11):
        for column in range(13):
            left, top, right, bottom = geometry.cell_box(row, column, (11, 13))
            reach_x, reach_y = 2 * (right - left), 2 * (bottom - top)
            if not (
                left - reach_x >= visible[0]
                and right + reach_x <= visible[2]
                and top - reach_y >= visible[1]
                and bottom + reach_y <= visible[3]
            ):
                continue  # only whole bells are symmetric
            inner += 1
            one_hot = np.zeros((11, 13))
            one_hot[row, column] = 1
            alpha = overlay.spread(one_hot, geometry, *drawn)
            assert (alpha.shape, alpha.dtype) == ((drawn[1], drawn[0]), np.float32)
            y, x = np.mgrid[: drawn[1], : drawn[0]] + 0.5
            centre = np.array([(x * alpha).sum(), (y * alpha).sum()]) / alpha.sum()
            scale = drawn[0] / photo[0]
            expected = np.array([left + right, top + bottom]) / 2 * scale
            assert centre == pytest.approx(expected, abs=0.05)
    assert inner >= 15


def test_at_the_centre_of_a_cell_stands_its_own_alpha() -> None:
    alphas = np.random.default_rng(0).random(GRID)
    # 3 x 3 pixels per cell: the middle one's centre is the cell's.
    spread = overlay.spread(alphas, Geometry(21, 15, 224, "stretch"), 21, 15)
    assert spread[1::3, 1::3] == pytest.approx(alphas, abs=1e-6)


@pytest.mark.parametrize("resize", RESIZES)
def test_an_even_map_is_even_on_all_the_encoder_saw_and_zero_elsewhere(resize: str) -> None:
    geometry = Geometry(30, 10, 224, resize)
    spread = overlay.spread(np.full(GRID, 1 / 35), geometry, 60, 20)
    left, _, right, _ = (round(2 * edge) for edge in geometry.visible)
    assert (left, right) == ((20, 40) if resize == "crop" else (0, 60))
    assert spread[:, left:right] == pytest.approx(1 / 35)
    assert (spread[:, :left] == 0).all()
    assert (spread[:, right:] == 0).all()


def test_a_pixel_half_hidden_by_the_crop_gets_half() -> None:
    spread = overlay.spread(np.ones(GRID), Geometry(7, 4, 224, "crop"), 7, 4)  # sees 1.5 .. 5.5
    assert spread[0].tolist() == [0, 0.5, 1, 1, 1, 0.5, 0]


def test_what_pad_added_is_cut_away() -> None:
    geometry = Geometry(40, 8, 224, "pad")  # of 5 rows of cells, 8 pixels high, one is photo
    photo, bars = np.zeros(GRID), np.zeros(GRID)
    photo[2], bars[[0, 4]] = 1, 1
    assert overlay.spread(photo, geometry, 40, 8).min() > 0.5
    assert overlay.spread(bars, geometry, 40, 8).max() == 0


def test_overshoot_never_makes_attention_negative() -> None:
    one_hot = np.zeros(GRID)
    one_hot[2, 3] = 1
    assert overlay.spread(one_hot, Geometry(97, 61, 224), 97, 61).min() == 0


# ---- blend ---------------------------------------------------------------------------------------


def test_the_photo_is_grey_and_dark_without_attention_and_glows_with_it() -> None:
    photo = Image.new("RGB", (3, 1), (200, 60, 20))
    alpha = np.array([[0, 0.05, 0.2]], np.float32)
    dark, middle, bright = np.asarray(overlay.blend(photo, alpha, 0.2), int)[0]
    assert np.ptp(dark) == 0
    assert dark[0] == round((0.299 * 200 + 0.587 * 60 + 0.114 * 20) / 2)
    assert dark.sum() < middle.sum() < bright.sum()
    top = np.array(matplotlib.colormaps["inferno"](1.0)[:3]) * 255
    half = np.array(matplotlib.colormaps["inferno"](0.4353)[:3]) * 255  # 0.25 ** 0.6
    lit = 0.5647 * dark[0] + 0.4353 * np.array([200, 60, 20])
    opacity = 0.6 * 1.6 * 0.4353
    assert middle == pytest.approx((1 - opacity) * lit + opacity * half, abs=1)
    assert bright == pytest.approx(0.4 * np.array([200, 60, 20]) + 0.6 * top, abs=1)


# ---- figure --------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [1, 2, 5, 25])
def test_there_is_one_panel_for_the_photo_and_one_for_every_word(words: int) -> None:
    picture = overlay.figure(described(" ".join(["word"] * words)), panel=64)
    assert picture.mode == "RGB"
    assert drawn_panels(picture) == words + 1
    assert 0.4 < picture.width / picture.height < 4


@pytest.mark.parametrize("resize", RESIZES)
@pytest.mark.parametrize("size", [(130, 110), (90, 170), (400, 50), (50, 400)])
def test_every_word_glows_where_it_looked(resize: str, size: tuple[int, int]) -> None:
    peaks = [(2, 3), (2, 2), (2, 4), (2, 3)]  # on the photo even when bars take most of the square
    caption = described(size=size, resize=resize, peaks=peaks)
    for index, (row, column) in enumerate(peaks):
        shown = panel_of(caption, index + 1)
        left, top, right, bottom = caption.geometry.cell_box(row, column, GRID)
        if (left + right) / 2 > size[0] or (left + right) / 2 < 0:
            continue  # that cell is bar
        x = (left + right) / 2 / size[0] * shown.shape[1]
        y = (top + bottom) / 2 / size[1] * shown.shape[0]
        brightest = np.argwhere(shown.sum(-1) >= shown.sum(-1).max() - 1).mean(0) + 0.5
        cell = (right - left) / size[0] * shown.shape[1], (bottom - top) / size[1] * shown.shape[0]
        assert abs(brightest[1] - x) <= max(1, 0.1 * cell[0])
        assert abs(brightest[0] - y) <= max(1, 0.1 * cell[1])


def test_panels_hold_exactly_the_blended_photo_and_share_one_scale() -> None:
    caption = described("sharp flat")
    assert caption.attention is not None
    caption.attention[1] = 1 / 35
    small = caption.pixels().resize(
        overlay._Layout.of(caption, None, "alpha", None, 224).picture, Image.Resampling.LANCZOS
    )
    assert np.array_equal(panel_of(caption, 0), np.asarray(small))
    for index in range(2):
        alpha = overlay.spread(caption.attention[index], caption.geometry, *small.size)
        expected = np.asarray(overlay.blend(small, alpha, 1.0))
        assert np.array_equal(panel_of(caption, index + 1), expected)
    assert panel_of(caption, 2).max() < panel_of(caption, 1).max()


@pytest.mark.parametrize("size", [(4000, 150), (150, 4000), (1, 700)])
def test_panoramas_and_towers_keep_their_shape_and_a_readable_size(size: tuple[int, int]) -> None:
    caption = described(size=size)
    layout = overlay._Layout.of(caption, caption.attention, "alpha", None, 224)
    assert max(layout.picture) <= 448
    assert layout.picture[0] / layout.picture[1] == pytest.approx(size[0] / size[1], rel=0.1) or (
        min(layout.picture) == 1
    )
    picture = overlay.figure(described(size=size))
    assert picture.width >= 340


def test_the_number_of_columns_can_be_chosen() -> None:
    caption = described()
    one, three = (overlay.figure(caption, columns=columns, panel=64) for columns in (1, 3))
    assert one.height > three.height
    assert one.width < three.width
    assert overlay.figure(caption, columns=99, panel=64).size == (
        overlay.figure(caption, columns=5, panel=64).size
    )
    with pytest.raises(ValueError, match="received 64 and 0"):
        overlay.figure(caption, columns=0, panel=64)


def test_a_figure_grows_with_its_panels() -> None:
    small, large = (overlay.figure(described(), panel=panel) for panel in (150, 450))
    assert large.width / small.width == pytest.approx(3, rel=0.03)
    assert large.height / small.height == pytest.approx(3, rel=0.03)


def test_every_number_and_word_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written = texts_of(monkeypatch, described("a dog"))
    assert {"a dog", "photo", "a", "dog"} <= set(written)
    assert {"gate 0.30   p 0.90", "gate 0.70   p 0.50"} <= set(written)
    assert {"0%", "100.0%", "even spread 2.9%"} <= set(written)
    assert "35 regions" in " ".join(written)


def test_without_attention_the_figure_is_the_photo_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caption = described(attention=False)
    written = texts_of(monkeypatch, caption)
    assert "this model has no attention: no map to draw" in " ".join(written)
    assert not any("gate" in text or "even spread" in text for text in written)
    assert drawn_panels(overlay.figure(caption, panel=64)) == 1


def test_a_caption_without_words_is_only_the_photo() -> None:
    assert drawn_panels(overlay.figure(described(""), panel=64)) == 1


def test_crop_frames_what_the_model_saw() -> None:
    caption = described(size=(200, 100), resize="crop")
    photo = panel_of(caption, 0)
    left = round(photo.shape[1] / 4)
    middle = photo[photo.shape[0] // 2]
    assert (middle[left] == (24, 24, 28)).all()
    assert (middle[left + 1] == 255).all()
    assert (middle[left - 1] == 160).all()


# ---- scripts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["собака бежит", "ένας σκύλος", "كلب يجري", "כלב רץ", "一只 狗", "🐕 runs", "e\u0301"]
)
def test_words_of_any_script_are_drawn(text: str) -> None:
    assert drawn_panels(overlay.figure(described(text), panel=64)) == len(text.split()) + 1


# ---- save ----------------------------------------------------------------------------------------


def test_save_writes_the_figure_and_nothing_else(tmp_path: Path) -> None:
    caption = described("dog")
    path = tmp_path / "new" / "folder" / "dog.png"
    overlay.save(caption, path)
    overlay.save(caption, str(path))  # over the first
    assert [entry.name for entry in path.parent.iterdir()] == ["dog.png"]
    with Image.open(path) as written:
        assert written.format == "PNG"
        assert np.array_equal(np.asarray(written), np.asarray(overlay.figure(caption)))


def test_a_figure_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "dog.png", tmp_path / "folder"):
        with pytest.raises(InputError, match=r"cannot be written") as refused:
            overlay.save(described("dog"), path)
        assert str(path) in str(refused.value)
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["file", "folder"]


def texts_of(monkeypatch: pytest.MonkeyPatch, caption: Caption) -> list[str]:
    """Every text that a figure of the caption writes."""
    written = []
    draw = ImageDraw.ImageDraw.text

    def record(
        self: ImageDraw.ImageDraw, at: object, text: str, *rest: object, **more: object
    ) -> None:
        written.append(text)
        draw(self, at, text, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(ImageDraw.ImageDraw, "text", record)
        overlay.figure(caption)
    return written


def test_evidence_is_drawn_on_request_and_said() -> None:
    alpha, evidence = np.zeros((2, 1, 2, 2))
    alpha[0, 0, 0] = evidence[0, 1, 1] = 1  # top left, bottom right
    caption = dataclasses.replace(described("dog"), attention=alpha, evidence=evidence)
    by_alpha, by_evidence = (
        np.asarray(overlay.figure(caption, show=show), float) for show in overlay.SHOWS
    )
    left, top, right, bottom = overlay._Layout.of(caption, alpha, "alpha", None, 224).panel_box(1)
    middle_x, middle_y = (left + right) // 2, (top + bottom) // 2
    corner = np.s_[top:middle_y, left:middle_x]
    opposite = np.s_[middle_y:bottom, middle_x:right]
    assert by_alpha[corner].mean() > by_evidence[corner].mean() + 10
    assert by_evidence[opposite].mean() > by_alpha[opposite].mean() + 10
    assert "weighed before" in overlay._explanation(caption, alpha, "alpha")
    assert "once it was chosen" in overlay._explanation(caption, evidence, "evidence")
    with pytest.raises(ValueError, match="carries no evidence"):
        overlay.figure(described("dog"), show="evidence")
    with pytest.raises(ValueError, match="show must be one of alpha, evidence"):
        overlay.figure(caption, show="heat")
