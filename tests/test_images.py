"""Photos of every kind come out upright and RGB; the square's geometry is exact both ways."""

import io
import os
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import PIL
import pillow_heif
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageCms

from captioner.errors import InputError
from captioner.images import (
    MAX_PIXELS,
    PAD_COLOUR,
    PHOTO_SUFFIXES,
    RESIZES,
    Geometry,
    find_photos,
    load_photo,
    load_square,
    to_upright_rgb,
)

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def corners(size: tuple[int, int] = (34, 22)) -> Image.Image:
    """Red top left, green top right, blue bottom left, white bottom right."""
    image = Image.new("RGB", (2, 2))
    image.putdata([RED, GREEN, BLUE, WHITE])
    return image.resize(size, Image.Resampling.NEAREST)


def near(
    photo: Image.Image, at: tuple[int, int], colour: tuple[int, ...], within: int = 12
) -> bool:
    return max(abs(a - b) for a, b in zip(photo.getpixel(at), colour, strict=True)) <= within


def saved(image: Image.Image, kind: str, **options: object) -> io.BytesIO:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    stream.seek(0)
    return stream


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    crc = struct.pack(">I", zlib.crc32(header))
    start_of_pixels = struct.pack(">I", 1000) + b"IDAT"
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + crc + start_of_pixels


# ---- load_photo: every kind of pixel -------------------------------------------------------------


def palette_with_transparency() -> Image.Image:
    image = Image.new("P", (3, 2), 1)
    image.putpalette([*RED, *BLUE])
    image.putpixel((0, 0), 0)
    image.info["transparency"] = 0  # the red entry is invisible
    return image


@pytest.mark.parametrize(
    ("image", "kind", "expected"),
    [
        (Image.new("1", (3, 2), 1), "PNG", (255, 255, 255)),
        (Image.new("L", (3, 2), 101), "PNG", (101, 101, 101)),
        (Image.new("LA", (3, 2), (101, 0)), "PNG", (255, 255, 255)),
        (Image.new("RGBA", (3, 2), (255, 0, 0, 255)), "PNG", RED),
        (Image.new("RGBA", (3, 2), (255, 0, 0, 51)), "PNG", (255, 204, 204)),
        (palette_with_transparency(), "PNG", WHITE),
        (Image.new("CMYK", (3, 2), (0, 255, 255, 0)), "TIFF", RED),
        pytest.param(
            *(Image.new("YCbCr", (3, 2), (76, 85, 255)), "TIFF", (254, 0, 0)),
            marks=pytest.mark.skipif(
                int(PIL.__version__.split(".")[0]) < 13,
                reason="Pillow 12 cannot read the YCbCr TIFF that it writes",
            ),
        ),
        (Image.fromarray(np.full((2, 3), 257 * 101, np.uint16)), "PNG", (101, 101, 101)),
        (Image.fromarray(np.full((2, 3), 257 * 101, np.uint16)), "TIFF", (101, 101, 101)),
        (Image.fromarray(np.full((2, 3), 257 * 101, np.int32)), "TIFF", (101, 101, 101)),
        (Image.fromarray(np.full((2, 3), 101, np.int32)), "TIFF", (101, 101, 101)),
        (Image.fromarray(np.full((2, 3), 0.2, np.float32)), "TIFF", (51, 51, 51)),
        (Image.fromarray(np.full((2, 3), 101.0, np.float32)), "TIFF", (101, 101, 101)),
    ],
)
def test_every_mode_becomes_rgb(
    image: Image.Image, kind: str, expected: tuple[int, int, int]
) -> None:
    photo = load_photo(saved(image, kind))
    assert (photo.mode, photo.size) == ("RGB", (3, 2))
    assert photo.getpixel((0, 0)) == expected


def test_an_open_image_of_another_colour_space_becomes_rgb() -> None:
    image = to_upright_rgb(Image.new("YCbCr", (3, 2), (76, 85, 255)))
    assert (image.mode, image.getpixel((0, 0))) == ("RGB", (254, 0, 0))


def test_a_transparent_palette_entry_leaves_the_others_alone() -> None:
    assert load_photo(saved(palette_with_transparency(), "PNG")).getpixel((1, 0)) == BLUE


def test_levels_outside_every_usual_range_are_stretched() -> None:
    for levels in ([-10.0, 0.0, 10.0], [1e6, 2e6, 3e6]):
        image = Image.fromarray(np.array([levels], np.float32))
        photo = load_photo(saved(image, "TIFF"))
        # 1e6..3e6 and -10..10 alike: darkest 0, brightest 255, half way between 128.
        assert [photo.getpixel((x, 0))[0] for x in range(3)] == [0, 128, 255]


def test_levels_that_are_no_numbers_are_black() -> None:
    image = Image.fromarray(np.array([[np.nan, np.inf, 1.0]], np.float32))
    photo = load_photo(saved(image, "TIFF"))
    assert [photo.getpixel((x, 0))[0] for x in range(3)] == [0, 0, 255]


def test_lab_is_converted_by_colour_management() -> None:
    to_lab = ImageCms.buildTransform(
        ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB"
    )
    lab = ImageCms.applyTransform(Image.new("RGB", (3, 2), (140, 160, 120)), to_lab)
    assert near(load_photo(saved(lab, "TIFF")), (0, 0), (140, 160, 120), within=3)


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (5, 3), colour) for colour in (RED, GREEN, BLUE)]
    for kind in ("GIF", "PNG", "WEBP", "TIFF"):
        stream = saved(frames[0], kind, save_all=True, append_images=frames[1:])
        assert near(load_photo(stream), (0, 0), RED), kind


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "JPEG2000", "AVIF"])
def test_content_decides_whatever_the_ending_says(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "photo.txt"
    path.write_bytes(saved(corners(), kind).getvalue())
    photo = load_photo(str(path))
    assert photo.size == (34, 22)
    assert near(photo, (4, 4), RED, within=40)


def test_a_stream_is_left_open_and_a_photo_keeps_no_metadata() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Artist] = "someone"
    stream = saved(corners(), "JPEG", exif=exif)
    photo = load_photo(stream)
    assert not stream.closed
    assert photo.info == {}
    assert not photo.getexif()


# ---- load_photo: upright -------------------------------------------------------------------------

# How a camera stores an upright photo for each orientation: the inverse of what undoes it.
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "HEIF"])
def test_photos_come_upright(tmp_path: Path, kind: str, orientation: int) -> None:
    turn = STORED[orientation]
    stored = corners() if turn is None else corners().transpose(turn)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    path = tmp_path / "photo"
    if kind == "HEIF":
        heif = pillow_heif.from_pillow(stored)
        heif.info["exif"] = exif.tobytes()
        heif.save(path, quality=95)
    else:
        stored.save(path, kind, exif=exif)
    photo = load_photo(path)
    assert photo.size == (34, 22)
    for at, colour in {(4, 4): RED, (29, 4): GREEN, (4, 17): BLUE, (29, 17): WHITE}.items():
        assert near(photo, at, colour, within=60), (at, photo.getpixel(at))


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_changes_nothing(orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    assert near(load_photo(saved(corners(), "JPEG", exif=exif)), (4, 4), RED, within=40)


@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\x00\x00nonsense",
        b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff",  # 65535 entries, none there
        b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x01\x01\x12\x00\x02\xff\xff\xff\xff\x00\x00\x00\x09",
        b"Exif\x00\x00",
    ],
)
def test_broken_exif_does_not_stop_a_photo(exif: bytes) -> None:
    assert near(load_photo(saved(corners(), "JPEG", exif=exif)), (4, 4), RED, within=40)


# ---- load_photo: what is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is empty"),
        (b"these are words, not pixels", r"is not an image"),
        (saved(corners(), "JPEG").getvalue()[:-200], r"damaged or cut short"),
        (saved(corners(), "PNG").getvalue()[:60], r"damaged or cut short"),
        (saved(corners(), "WEBP").getvalue()[:60], r"not an image|damaged or cut short"),
        (saved(corners(), "TIFF").getvalue()[:300], r"not an image|damaged or cut short"),
        (png_header(20_000, 20_000), r"has more than 178 million pixels"),
        (png_header(MAX_PIXELS // 1000, 1001), r"has more than 178 million pixels"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_that_names_it(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as refused:
        load_photo(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_photo_a_folder_and_an_impossible_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.jpg: no such photo"):
        load_photo(tmp_path / "nowhere.jpg")
    with pytest.raises(InputError, match=r": is a folder"):
        load_photo(tmp_path)
    with pytest.raises(InputError, match=r"cannot be opened"):
        load_photo("a\0b")
    with pytest.raises(InputError, match=r"^the stream: is not an image"):
        load_photo(io.BytesIO(b"words"))


def test_pillow_calling_a_large_photo_a_bomb_does_not_stop_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = saved(corners((34, 22)), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 34 * 22 - 1)  # Pillow warns, here an error
    before = list(warnings.filters)
    assert load_photo(stream).size == (34, 22)
    assert list(warnings.filters) == before


def test_a_lower_limit_set_in_pillow_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = saved(corners((34, 22)), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 34 * 22 // 3)  # Pillow refuses twice this
    with pytest.raises(InputError, match="million pixels"):
        load_photo(stream)


def test_a_photo_too_large_is_refused_though_pillow_would_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(InputError, match="more than 178 million pixels"):
        load_photo(io.BytesIO(png_header(MAX_PIXELS + 1, 1)))


def test_an_open_image_is_turned_and_left_as_it_was() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    image = Image.open(saved(corners().transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif))
    photo = to_upright_rgb(image)
    assert (photo.size, image.size) == ((34, 22), (22, 34))
    assert photo.getpixel((4, 4)) == RED
    assert image.getexif()[ExifTags.Base.Orientation] == 6


# ---- find_photos ---------------------------------------------------------------------------------


def test_folders_are_searched_in_order_without_what_is_hidden(tmp_path: Path) -> None:
    names = ["b.JPG", "a/z.heic", "a/y/x.png", ".hidden.jpg", ".cache/c.jpg", "notes.txt", "c.webp"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    note = tmp_path / "notes.txt"
    assert find_photos([note, tmp_path]) == [
        (note, Path("notes.txt")),  # a file that is named is taken, whatever its ending
        *((tmp_path / name, Path(name)) for name in ["a/y/x.png", "a/z.heic", "b.JPG", "c.webp"]),
    ]


def test_what_a_folder_holds_besides_photos_is_told(tmp_path: Path) -> None:
    for name in (
        "a/x.jpg",
        "a/.hidden.jpg",
        ".cache/c.jpg",
        "notes.TXT",
        "readme",
        "sub.jpg/y.jpg",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "nowhere.jpg").symlink_to("gone")
    os.mkfifo(tmp_path / "pipe.jpg")
    skipped: dict[str, object] = {}
    found = find_photos([tmp_path], lambda path, what: skipped.update({path.name: what}))
    assert [str(relative) for _, relative in found] == ["a/x.jpg", "nowhere.jpg", "sub.jpg/y.jpg"]
    assert skipped == {
        ".hidden.jpg": "hidden",
        ".cache": "hidden",
        "notes.TXT": ".txt file",
        "readme": "file without suffix",
        "loop": "link to a folder",
        "pipe.jpg": "neither file nor folder",
    }


def test_a_folder_that_cannot_be_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shut").mkdir()
    (tmp_path / "a.jpg").touch()
    scandir = os.scandir

    def refuse(folder: str) -> object:  # for root no folder is shut
        if Path(folder).name == "shut":
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match=r"shut: cannot be searched \(Permission denied\)"):
        find_photos([tmp_path])
    skipped: list[object] = []
    assert len(find_photos([tmp_path], lambda path, what: skipped.append(what))) == 1
    assert str(skipped[0]).endswith("shut: cannot be searched (Permission denied)")


def test_paths_that_hold_no_photo_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone: no such file or folder"):
        find_photos([tmp_path / "gone"])
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match=r": no photo in this folder"):
        find_photos([tmp_path])


def test_every_suffix_has_a_reader() -> None:
    kinds = Image.registered_extensions()
    readable = {suffix for suffix in PHOTO_SUFFIXES if kinds.get(suffix) in Image.OPEN}
    # Pillow registers .mpo for writing; its JPEG reader is what opens such files.
    assert readable == PHOTO_SUFFIXES - {".mpo"}


# ---- Geometry ------------------------------------------------------------------------------------

lengths = st.integers(1, 5000)
geometries = st.builds(Geometry, lengths, lengths, st.integers(1, 600), st.sampled_from(RESIZES))
grids = st.tuples(st.integers(1, 23), st.integers(1, 23))


@pytest.mark.parametrize(
    ("resize", "window", "visible"),
    [
        ("stretch", (0, 0, 7, 4), (0, 0, 7, 4)),
        ("crop", (1.5, 0, 5.5, 4), (1.5, 0, 5.5, 4)),
        ("pad", (0, -1.5, 7, 5.5), (0, 0, 7, 4)),
    ],
)
def test_windows_of_a_photo_of_seven_by_four(
    resize: str, window: tuple[float, ...], visible: tuple[float, ...]
) -> None:
    geometry = Geometry(7, 4, 224, resize)
    assert geometry.window == window
    assert geometry.visible == visible


def test_cells_of_a_padded_photo_by_hand() -> None:
    geometry = Geometry(6, 4, 224, "pad")  # the window is (0, -1, 6, 5)
    assert geometry.cell_box(0, 0, (3, 2)) == (0, -1, 3, 1)
    assert geometry.cell_box(2, 1, (3, 2)) == (3, 3, 6, 5)
    for row, column in ((3, 0), (0, 2), (-1, 0)):
        with pytest.raises(IndexError, match="grid of 3x2"):
            geometry.cell_box(row, column, (3, 2))


@given(geometries, st.floats(-2, 2), st.floats(-2, 2))
def test_points_travel_there_and_back(geometry: Geometry, x: float, y: float) -> None:
    x, y = x * geometry.photo_width, y * geometry.photo_height
    assert geometry.to_photo(*geometry.to_square(x, y)) == pytest.approx((x, y), abs=1e-6)
    left, top, right, bottom = geometry.window
    assert geometry.to_square(left, top) == (0, 0)
    assert geometry.to_square(right, bottom) == pytest.approx((geometry.size, geometry.size))


@given(geometries)
def test_windows_are_centred_and_square_unless_stretched(geometry: Geometry) -> None:
    left, top, right, bottom = geometry.window
    assert (left + right, top + bottom) == (geometry.photo_width, geometry.photo_height)
    sides = {geometry.photo_width, geometry.photo_height}
    if geometry.resize != "stretch":
        expected = min(sides) if geometry.resize == "crop" else max(sides)
        assert (right - left, bottom - top) == (expected, expected)


@given(geometries, grids)
def test_cells_tile_the_window(geometry: Geometry, grid: tuple[int, int]) -> None:
    rows, columns = grid
    boxes = [[geometry.cell_box(r, c, grid) for c in range(columns)] for r in range(rows)]
    assert (*boxes[0][0][:2], *boxes[-1][-1][2:]) == geometry.window
    for row in range(rows):
        for column in range(columns):
            _, _, right, bottom = boxes[row][column]
            if column + 1 < columns:  # not one bit between neighbours
                assert boxes[row][column + 1][0] == right
            if row + 1 < rows:
                assert boxes[row + 1][column][1] == bottom


@given(
    st.integers(20, 200), st.integers(20, 200), st.sampled_from(RESIZES), st.integers(0, 2**32 - 1)
)
@example(200, 20, "pad", 0)
@example(20, 199, "crop", 0)
def test_a_cell_shows_in_the_square_what_lies_under_it_in_the_photo(
    width: int, height: int, resize: str, seed: int
) -> None:
    size, grid = 77, (7, 11)
    geometry = Geometry(width, height, size, resize)
    row, column = divmod(int(np.random.default_rng(seed).integers(77)), 11)
    left, top, right, bottom = geometry.cell_box(row, column, grid)
    centre_x, centre_y = (left + right) / 2, (top + bottom) / 2
    # A smooth ramp, so that resampling keeps each point's colour: red is x, green is y.
    y, x = np.mgrid[:height, :width] + 0.5
    ramp = np.stack([x / width, y / height, np.ones_like(x)], -1) * 255
    square = geometry.square(Image.fromarray(np.rint(ramp).astype(np.uint8)))
    assert (square.size, square.mode) == ((size, size), "RGB")
    at = int((column + 0.5) * size / 11), int((row + 0.5) * size / 7)
    inside_x = min(centre_x, width - centre_x) > 3 * max(1, width / size)
    inside_y = min(centre_y, height - centre_y) > 3 * max(1, height / size)
    if inside_x and inside_y:
        expected = (255 * centre_x / width, 255 * centre_y / height, 255)
        # Within half a pixel of either raster, in levels of the ramp.
        slack = 3 + 255 * max(1 / width, 1 / height, 1 / size)
        assert np.abs(np.subtract(square.getpixel(at), expected)).max() <= slack
    elif min(centre_x, width - centre_x, centre_y, height - centre_y) < -3 * max(width, height) / 7:
        assert square.getpixel(at) == PAD_COLOUR


@pytest.mark.parametrize(("width", "height"), [(31, 17), (17, 32), (101, 7), (6, 5), (223, 1)])
def test_pad_equals_resizing_the_whole_padded_photo(width: int, height: int) -> None:
    # Mid-grey noise, so that nothing overshoots: Pillow clips between its two passes.
    noise = np.random.default_rng(0).integers(64, 192, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    geometry = Geometry(width, height, 37, "pad")
    side = max(width, height)
    # Bars on the short side only, wider than needed, so that half a pixel's offset can be cut.
    bar_x, bar_y = (0, side) if width > height else (side, 0)
    canvas = Image.new("RGB", (width + 2 * bar_x, height + 2 * bar_y), PAD_COLOUR)
    canvas.paste(image, (bar_x, bar_y))
    left, top, right, bottom = geometry.window
    expected = canvas.resize(
        (37, 37),
        Image.Resampling.BICUBIC,
        box=(left + bar_x, top + bar_y, right + bar_x, bottom + bar_y),
    )
    difference = np.asarray(geometry.square(image), int) - np.asarray(expected, int)
    assert np.abs(difference).max() <= 1  # Pillow's fixed-point rounding


def test_a_square_of_the_right_size_passes_untouched() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (13, 13, 3), dtype=np.uint8)
    for resize in RESIZES:
        square = Geometry(13, 13, 13, resize).square(Image.fromarray(noise))
        assert np.array_equal(np.asarray(square), noise)
    crop = Geometry(19, 13, 13, "crop").square(
        Image.fromarray(np.pad(noise, ((0, 0), (3, 3), (0, 0))))
    )
    assert np.array_equal(np.asarray(crop), noise)


def test_shrinking_averages_instead_of_picking_pixels() -> None:
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 254
    square = np.asarray(Geometry(64, 64, 8, "stretch").square(Image.fromarray(stripes)), int)
    assert np.abs(square - 127).max() <= 6  # 5 at the edges; picking would be off by 127


def test_a_geometry_refuses_what_cannot_be() -> None:
    with pytest.raises(InputError, match="resize 'squash' is unknown; choose stretch, crop, pad"):
        Geometry(3, 5, 7, "squash")
    with pytest.raises(ValueError, match="received 3, 0 and 7"):
        Geometry(3, 0, 7)
    with pytest.raises(ValueError, match="of a 3x5 photo, received one of 5x3"):
        Geometry(3, 5, 7).square(Image.new("RGB", (5, 3)))
    assert Geometry.of(Image.new("RGB", (3, 5)), 7, "pad") == Geometry(3, 5, 7, "pad")


def test_grey_photos_become_rgb_squares() -> None:
    square = Geometry(3, 5, 7).square(Image.new("L", (3, 5), 101))
    assert (square.mode, square.getpixel((3, 3))) == ("RGB", (101, 101, 101))


@pytest.mark.parametrize("resize", RESIZES)
@pytest.mark.parametrize("orientation", [1, 6])
def test_a_large_jpeg_is_decoded_small_and_seen_alike(
    tmp_path: Path, resize: str, orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.jpg"
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    corners((1601, 1203)).save(path, quality=95, exif=exif)
    expected = load_photo(path)
    sizes = []
    square = Geometry.square
    monkeypatch.setattr(
        Geometry, "square", lambda self, image: sizes.append(image.size) or square(self, image)
    )
    seen, geometry = load_square(path, 96, resize)
    upright = (1601, 1203) if orientation == 1 else (1203, 1601)
    assert (geometry.photo_width, geometry.photo_height) == upright == expected.size
    assert geometry == Geometry.of(expected, 96, resize)
    assert min(sizes[0]) == 301  # a quarter; an eighth would be less than twice 96
    assert sizes[0] == tuple(-(-side // 4) for side in upright)
    assert seen.dtype == np.uint8
    difference = seen.astype(float) - np.asarray(square(geometry, expected))
    assert np.abs(difference).mean() < 1.5


@pytest.mark.parametrize(("kind", "side"), [("PNG", 801), ("JPEG", 383)])
def test_other_and_small_photos_are_decoded_whole(tmp_path: Path, kind: str, side: int) -> None:
    path = tmp_path / f"photo.{kind.lower()}"
    corners((side, side)).save(path)
    seen, geometry = load_square(path, 96, "stretch")
    photo = load_photo(path)
    assert geometry == Geometry.of(photo, 96, "stretch")
    np.testing.assert_array_equal(seen, np.asarray(geometry.square(photo)))
