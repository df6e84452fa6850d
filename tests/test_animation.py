"""Moving pictures: a frame for the photo, one for every word, in the figure's colours."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from captioner import animation, overlay
from captioner.caption import Caption
from captioner.errors import InputError
from captioner.images import Geometry


def described(
    text: str = "a red dog runs", size: tuple[int, int] = (130, 110), shade: int = 160
) -> Caption:
    """Word `t` looks at one of 5 x 7 cells, number `3 * t`, on a grey photo."""
    words = tuple(text.split())
    maps = np.zeros((len(words), 35), np.float32)
    maps[np.arange(len(words)), 3 * np.arange(len(words)) % 35] = 1
    image = Image.new("RGB", size, (shade, shade, shade))
    return Caption(
        text=text,
        words=words,
        word_probabilities=np.linspace(0.9, 0.5, len(words)),
        score=-1.5,
        attention=maps.reshape(-1, 5, 7),
        gate=np.linspace(0.3, 0.7, len(words)),
        geometry=Geometry.of(image, 224),
        image=image,
        evidence=maps.reshape(-1, 5, 7)[:, ::-1],
    )


def photo_box(frame: Image.Image, shade: int = 160) -> tuple[int, int, int, int]:
    """Where the photo lies in the first frame."""
    return Image.fromarray((np.asarray(frame) == shade).all(-1)).getbbox()


@pytest.mark.parametrize(
    ("words", "size"), [(1, (130, 110)), (1, (100, 900)), (10, (4000, 150)), (25, (100, 900))]
)
def test_a_frame_for_the_photo_and_one_for_every_word(words: int, size: tuple[int, int]) -> None:
    caption = described(" ".join(["word"] * words), size)
    frames = list(animation.frames(caption))
    assert len(frames) == words + 1
    assert len({frame.size for frame in frames}) == 1
    left, top, right, bottom = photo_box(frames[0])
    assert (right - left) / (bottom - top) == pytest.approx(size[0] / size[1], rel=0.02)
    small = frames[0].crop((left, top, right, bottom))
    for index, frame in enumerate(frames[1:]):
        alpha = overlay.spread(caption.attention[index], caption.geometry, *small.size)
        expected = overlay.blend(small, alpha, 1.0)
        assert np.array_equal(frame.crop((left, top, right, bottom)), expected)


def test_the_current_word_is_white_on_black_and_nothing_else_moves_in_the_sentence() -> None:
    frames = [np.asarray(frame.convert("L"), int) for frame in animation.frames(described())]
    top = photo_box(next(animation.frames(described())))[1]
    middles = []
    for frame in frames[1:]:
        changed = np.argwhere(np.abs(frame - frames[0])[:top] > 100)
        left, right = changed[:, 1].min(), changed[:, 1].max() + 1
        box = frame[changed[:, 0].min() : changed[:, 0].max() + 1, left:right]
        assert np.median(box) < 30  # a black box
        assert box.max() > 200  # with white letters
        assert np.array_equal(frame[:top, right + 1 :], frames[0][:top, right + 1 :])
        middles.append((left + right) / 2)
    assert middles == sorted(middles)


def test_an_arabic_sentence_starts_at_the_right() -> None:
    first, second, *_ = (
        np.asarray(frame.convert("L"), int) for frame in animation.frames(described("كلب يجري"))
    )
    changed = np.argwhere(np.abs(second - first)[:40] > 100)
    assert changed[:, 1].min() > first.shape[1] / 2


@pytest.mark.parametrize("kind", animation.FORMATS)
def test_a_file_plays_for_ever(kind: str, tmp_path: Path) -> None:
    caption = described()
    path = tmp_path / "new" / f"dog.{kind}"
    animation.save(caption, path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    expected = [np.asarray(frame, int) for frame in animation.frames(caption)]
    with Image.open(path) as written:
        assert written.format == kind.upper()
        assert written.n_frames == 5
        assert written.info["loop"] == 0
        for frame, picture, milliseconds in zip(
            ImageSequence.Iterator(written), expected, (1200, 800, 800, 800, 2000), strict=True
        ):
            assert np.abs(np.asarray(frame.convert("RGB"), int) - picture).mean() < 2
            assert frame.info["duration"] == milliseconds


@pytest.mark.parametrize("shade", [12, 160, 245])
def test_a_gif_keeps_the_colours_of_the_scale(shade: int, tmp_path: Path) -> None:
    """They are few pixels among many: a palette made for the photo alone would drop them."""
    caption = described(shade=shade)
    animation.save(caption, tmp_path / "dog.gif")
    expected = list(animation.frames(caption))[2]
    bottom = photo_box(next(animation.frames(caption)), shade)[3]
    with Image.open(tmp_path / "dog.gif") as written:
        written.seek(2)
        shown = np.asarray(written.convert("RGB"), float)[bottom:]
    wanted = np.asarray(expected, float)[bottom:]
    ramp = np.ptp(wanted, axis=-1) > 20  # all else below the photo is grey
    assert ramp.sum() > 1000
    assert np.abs(shown - wanted)[ramp].mean() < 8


def test_evidence_on_request() -> None:
    caption = described()
    alpha, evidence = (
        [np.asarray(frame, int) for frame in animation.frames(caption, show=show)]
        for show in overlay.SHOWS
    )
    assert np.array_equal(alpha[0], evidence[0])
    assert np.abs(alpha[1] - evidence[1]).max() > 100
    with pytest.raises(ValueError, match="carries no evidence"):
        list(animation.frames(dataclasses.replace(caption, evidence=None), show="evidence"))


def test_without_maps_or_words_there_is_only_the_photo() -> None:
    caption = described()
    assert len(list(animation.frames(dataclasses.replace(caption, attention=None)))) == 1
    assert len(list(animation.frames(described("")))) == 1


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in one of \.gif, \.webp"):
        animation.save(described(), tmp_path / "dog.mp4")
    (tmp_path / "dog.gif").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        animation.save(described("dog"), tmp_path / "dog.gif")
    assert [entry.name for entry in tmp_path.iterdir()] == ["dog.gif"]
