"""Image bytes to the encoder's square inside a TensorFlow graph: what `images.py` does by Pillow.

For a model that runs where there is no captioner. The geometry is that of `images.Geometry`, the
filter the same (bicubic, antialiased); pixels differ from Pillow's by rounding.

JPEG is read, and PNG of 8 or 16 bits a channel (TensorFlow reads bilevel ones wrongly). EXIF's
orientation is applied where it stands in a file's first directory at the usual place (right behind
the header), as cameras write it; transparency is laid over white.
Shapes: `B` photos.
"""

from typing import Any

import tensorflow as tf

from captioner.images import PAD_COLOUR

__all__ = ["decoded", "squares"]

HEAD = 1 << 16  # bytes of a file within which EXIF begins and lists its first entries

# A directory has 12 bytes per entry, sorted by tag: before that of the orientation (0x0112, a
# 16-bit number, one of it) stand only tags whose high byte is 0 or 1. \C is any byte.
_ORIENTATION = (
    r"(?s)\A\C*?(?:Exif\x00\x00|eXIf)(?:"
    r"II\*\x00\x08\x00\x00\x00\C\C(?:\C[\x00\x01]\C{10}){0,16}"
    r"\x12\x01\x03\x00\x01\x00\x00\x00([\x01-\x08])\x00"
    r"|MM\x00\*\x00\x00\x00\x08\C\C(?:[\x00\x01]\C{11}){0,16}"
    r"\x01\x12\x00\x03\x00\x00\x00\x01\x00([\x01-\x08])"
    r")\C*\z"
)


def decoded(image_bytes: Any) -> Any:
    """A photo as people see it, upright, uint8 `(height, width, 3)`.

    Args:
        image_bytes: a scalar string: the bytes of a JPEG or PNG file.

    Raises:
        tf.errors.InvalidArgumentError: (when run) they are neither, or damaged.
    """

    def jpeg() -> Any:
        # As Pillow decodes; TensorFlow's own choice is faster and less exact.
        return tf.io.decode_jpeg(image_bytes, channels=3, dct_method="INTEGER_ACCURATE")

    def png() -> Any:
        pixels = tf.cast(tf.io.decode_png(image_bytes, channels=4), tf.float32)
        colours, opacity = pixels[..., :3], pixels[..., 3:] / 255
        return tf.cast(tf.round(colours * opacity + 255 * (1 - opacity)), tf.uint8)

    photo = tf.cond(tf.io.is_jpeg(image_bytes), jpeg, png)
    orientation = _orientation(image_bytes)

    def turned_if(values: tuple[int, ...], turn: Any, photo: Any) -> Any:
        applies = tf.reduce_any(orientation == tf.constant(values))
        return tf.cond(applies, lambda: turn(photo), lambda: photo)

    photo = turned_if((5, 6, 7, 8), lambda x: tf.transpose(x, (1, 0, 2)), photo)
    photo = turned_if((2, 3, 6, 7), lambda x: tf.reverse(x, [1]), photo)
    return turned_if((3, 4, 7, 8), lambda x: tf.reverse(x, [0]), photo)


def _orientation(image_bytes: Any) -> Any:
    """EXIF's orientation, a scalar 1..8; 1 (upright) where there is none."""
    head = tf.strings.substr(image_bytes, 0, HEAD)
    found = tf.strings.regex_full_match(head, _ORIENTATION)
    digit = tf.strings.regex_replace(head, _ORIENTATION, r"\1\2")
    digit = tf.where(found, digit, tf.constant(b"\x01"))
    return tf.cast(tf.io.decode_raw(digit, tf.uint8)[0], tf.int32)


def squares(photos: Any, size: int, resize: str) -> Any:
    """The squares that the encoder sees, uint8 `(B, size, size, 3)`.

    Args:
        photos: uint8 `(B, height, width, 3)`, of any size.
        size: the side of a square, pixels.
        resize: one of `images.RESIZES`.
    """
    lengths = tf.cast(tf.shape(photos)[1:3], tf.float32)  # height, width
    if resize == "stretch":
        window = lengths
    else:
        side = tf.reduce_min(lengths) if resize == "crop" else tf.reduce_max(lengths)
        window = tf.stack([side, side])
    first = (lengths - window) / 2  # top and left of the window, in the photo
    scale = size / window
    # Off the pad's colour: what lies outside, which TensorFlow makes 0, then has it.
    colour = tf.constant(PAD_COLOUR, tf.float32)
    canvas = tf.cast(photos, tf.float32) - colour
    if resize == "pad":
        # TensorFlow weighs only what is inside the canvas: where there is a bar, it is drawn as
        # far as the filter reaches.
        reach = tf.math.ceil(4 * tf.maximum(1 / scale, 1.0))
        margin = tf.where(window > lengths, reach, tf.zeros_like(reach))
        padding = tf.cast(tf.tile(margin[:, None], (1, 2)), tf.int32)
        canvas = tf.pad(canvas, tf.concat([[[0, 0]], padding, [[0, 0]]], axis=0))
        first += margin
    resampled = tf.raw_ops.ScaleAndTranslate(
        images=canvas,
        size=[size, size],
        scale=scale,
        translation=-first * scale,
        kernel_type="keyscubic",
        antialias=True,
    )
    return tf.saturate_cast(tf.round(resampled + colour), tf.uint8)
