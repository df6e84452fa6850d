"""Views of a train photo: as it is, mirrored, lightly cropped. More to learn from few photos.

Each view goes through the encoder once, like the photo itself, and training draws one per epoch.
View 0 is the photo as it is, 1 its mirror image; from 2 on they are crops, the odd ones mirrored.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np

__all__ = ["cropped_side", "is_mirrored", "names_sides", "view_of"]

KEPT = 0.875  # of each side of the photo that a crop keeps: 224 of 256 pixels, as for ImageNet

# What words for left and right are, or begin with, in English; German and Dutch; French, Spanish,
# Italian, Portuguese; Russian; Korean. Captions of other languages need theirs here. A word too
# many costs a mirrored view of a photo, a word too few teaches what is wrong.
_SIDES = frozenset(["left", "right", "lefthand", "righthand", "left-hand", "right-hand"])
_BEGIN_LIKE_SIDES = (
    *("links", "rechts", "linke", "rechte"),
    *("gauche", "droite", "izquierd", "derech", "sinistr", "destr", "esquerd", "direit"),
    *("лев", "прав", "слев", "спра", "налев", "напра", "왼", "오른"),
)
_SIGNS_OF_SIDES = frozenset("左右")  # Chinese, Japanese: wherever in a word they stand


def is_mirrored(view: int) -> bool:
    """Whether left and right are exchanged in this view."""
    return view % 2 == 1


def cropped_side(view: int, size: int) -> int:
    """Side of the square, in pixels, that `view_of` wants for a view of `size` pixels."""
    return size if view < 2 else math.ceil(size / KEPT)


def view_of(square: np.ndarray, view: int, size: int, name: str) -> np.ndarray:
    """One view of a photo.

    Args:
        square: the photo, `(side, side, 3)` of the side that `cropped_side` gives.
        view: its number.
        size: the side of the result in pixels.
        name: of the photo; decides with `view` what is cropped, the same in every process.

    Returns:
        `(size, size, 3)`.
    """
    spare = len(square) - size
    digest = hashlib.sha256(f"{view}|{name}".encode()).digest()
    top, left = (byte * (spare + 1) // 256 for byte in digest[:2])  # 0 to spare
    part = square[top : top + size, left : left + size]
    return part[:, ::-1] if is_mirrored(view) else part


def names_sides(words: Sequence[str]) -> bool:
    """Whether a caption tells left from right, so that it is wrong for a mirrored photo."""
    return any(
        word in _SIDES or word.startswith(_BEGIN_LIKE_SIDES) or not _SIGNS_OF_SIDES.isdisjoint(word)
        for word in words
    )
