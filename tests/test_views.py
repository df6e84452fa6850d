"""Views of a train photo."""

import numpy as np

from captioner.views import cropped_side, is_mirrored, names_sides, view_of

SIZE = 21


def photo(side: int) -> np.ndarray:
    """Every pixel says where it stands."""
    rows, columns = np.mgrid[:side, :side]
    return np.stack([rows, columns, 0 * rows], axis=-1).astype(np.uint8)


def test_the_first_view_is_the_photo_and_the_second_its_mirror_image() -> None:
    assert cropped_side(0, SIZE) == cropped_side(1, SIZE) == SIZE
    square = photo(SIZE)
    assert np.array_equal(view_of(square, 0, SIZE, "a.jpg"), square)
    assert np.array_equal(view_of(square, 1, SIZE, "a.jpg"), square[:, ::-1])


def test_further_views_are_crops_of_a_larger_square() -> None:
    side = cropped_side(2, SIZE)
    assert side == 24  # 21 / 0.875
    corners = set()
    for number in range(40):
        part = view_of(photo(side), 2, SIZE, f"{number}.jpg")
        assert part.shape == (SIZE, SIZE, 3)
        top, left = (int(one) for one in part[0, 0, :2])
        assert np.array_equal(part, photo(side)[top : top + SIZE, left : left + SIZE])
        corners.add((top, left))
    assert {top for top, _ in corners} == {left for _, left in corners} == {0, 1, 2, 3}
    assert len(corners) > 8


def test_odd_crops_are_mirrored() -> None:
    part = view_of(photo(24), 3, SIZE, "a.jpg")
    assert is_mirrored(3)
    assert not is_mirrored(2)
    assert (np.diff(part[..., 1].astype(int), axis=1) == -1).all()


def test_a_view_of_a_photo_is_always_the_same() -> None:
    first, second = (view_of(photo(24), 4, SIZE, "a.jpg") for _ in range(2))
    assert np.array_equal(first, second)


def test_captions_that_tell_left_from_right() -> None:
    assert names_sides(["a", "dog", "on", "the", "left"])
    assert not names_sides(["a", "dog", "leaves"])
    for word in (
        "linken",
        "rechts",
        "gauche",
        "derecha",
        "sinistra",
        "слева",
        "左",
        "右边",
        "왼쪽",
    ):
        assert names_sides([word]), word
