"""Photos to squares in a graph, against what Pillow makes of them."""

import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from captioner.image_graph import decoded, squares
from captioner.images import RESIZES, Geometry, load_photo


def picture(width: int, height: int) -> Image.Image:
    """A photo with no edges finer than some pixels."""
    random = np.random.default_rng(width * height)
    coarse = random.integers(0, 255, (height // 6 + 2, width // 6 + 2, 3), dtype="uint8")
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def as_bytes(image: Image.Image, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, **options)
    return stream.getvalue()


def difference(ours: tf.Tensor, theirs: Image.Image) -> int:
    """Of the most different pixel, in levels of 255."""
    assert ours.dtype == tf.uint8
    assert tuple(ours.shape) == np.asarray(theirs).shape
    return int(np.abs(ours.numpy().astype(int) - np.asarray(theirs)).max())


@pytest.mark.parametrize("resize", RESIZES)
@pytest.mark.parametrize("size", [(31, 53), (53, 31), (101, 101), (24, 24), (401, 30), (30, 400)])
def test_squares_are_those_of_images(resize: str, size: tuple[int, int]) -> None:
    photo = picture(*size)
    for side in (24, 67):
        (ours,) = squares(np.asarray(photo)[None], side, resize)
        expected = Geometry.of(photo, side, resize).square(photo)
        # Pillow rounds between the two directions.
        assert difference(ours, expected) <= (0 if size == (side, side) else 5)


def test_photos_of_a_batch_do_not_mix() -> None:
    photos = np.stack([np.asarray(picture(31, 53)), np.asarray(picture(31, 53))[::-1]])
    together = squares(photos, 24, "pad").numpy()
    for photo, square in zip(photos, together, strict=True):
        np.testing.assert_array_equal(squares(photo[None], 24, "pad")[0], square)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_upright_by_exif(orientation: int) -> None:
    for kind, order in (("JPEG", "<"), ("JPEG", ">"), ("PNG", "<")):
        exif = Image.Exif()
        exif.endian = order
        exif.update({0x0112: orientation, 0x010F: "maker", 0x011A: 72.0, 0x9003: "2020:01:01"})
        content = as_bytes(picture(53, 31), format=kind, exif=exif)
        assert difference(decoded(content), load_photo(io.BytesIO(content))) <= 1


def test_what_only_looks_like_an_orientation_turns_nothing() -> None:
    exif = Image.Exif()
    # Behind the directory, at a distance that is no multiple of an entry's length.
    exif[0x010E] = "12345" + "\x12\x01\x03\x00\x01\x00\x00\x00\x06\x00\x00\x00" * 2
    content = as_bytes(picture(53, 31), format="JPEG", exif=exif)
    assert b"\x12\x01\x03\x00\x01\x00\x00\x00\x06" in content
    assert decoded(content).shape == (31, 53, 3)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "CMYK", "I;16"])
def test_modes(mode: str) -> None:
    photo = picture(53, 31)
    if mode == "I;16":
        photo = Image.fromarray(np.asarray(photo.convert("L")).astype("uint16") * 257)
    elif mode.endswith("A"):
        photo = photo.convert(mode[:-1])
        photo.putalpha(picture(53, 31).rotate(180).convert("L"))
    else:
        photo = photo.convert(mode)
    content = as_bytes(photo, format="JPEG" if mode == "CMYK" else "PNG")
    assert difference(decoded(content), load_photo(io.BytesIO(content))) <= 1


@pytest.mark.parametrize("content", [b"", b"no photo", b"\xff\xd8\xff"])
def test_what_is_no_photo_is_refused(content: bytes) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError):
        decoded(content)
