"""Any photo file -> upright RGB, and the geometry of the square that the encoder sees.

Coordinates are continuous pixels: pixel `i` covers `[i, i + 1)`, the photo's top left corner is
`(0, 0)`, x grows to the right and y downwards, both in the upright photo.
"""

import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np
import pillow_heif
from PIL import ExifTags, Image, ImageCms, ImageOps, UnidentifiedImageError

from captioner.errors import InputError

__all__ = [
    "MAX_PIXELS",
    "PAD_COLOUR",
    "PHOTO_SUFFIXES",
    "RESIZES",
    "Geometry",
    "find_photos",
    "load_photo",
    "load_square",
    "to_upright_rgb",
]

pillow_heif.register_heif_opener()

# The size above which Pillow itself refuses a file as a decompression bomb: a few kilobytes of
# PNG can claim any size, and this many RGB pixels already take half a gigabyte. Phones' 108
# megapixel photos pass.
MAX_PIXELS = 2 * 89_478_485

# ImageNet's mean colour: next to zero in every encoder's input scale, so the bars say nothing.
PAD_COLOUR = (124, 116, 104)

RESIZES = ("stretch", "crop", "pad")

# What a folder is searched for. Left out on purpose: what Pillow opens but is no photo (icons,
# fonts, EPS and WMF drawings, MPEG, FITS, GRIB, HDF5 ...).
# fmt: off
PHOTO_SUFFIXES = frozenset((
    ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".gif", ".webp", ".avif", ".avifs",
    ".heic", ".heics", ".heif", ".heifs", ".hif", ".tif", ".tiff", ".bmp", ".dib",
    ".jp2", ".j2k", ".jpf", ".jpx", ".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".tga", ".psd", ".qoi",
))
# fmt: on

_WARNINGS_LOCK = threading.Lock()


def load_photo(source: str | Path | BinaryIO) -> Image.Image:
    """Reads a photo as people see it: upright, 8-bit RGB, its first frame if it moves.

    What the file holds decides how it is read, not its ending. Transparency is laid over white.
    The result carries no metadata.

    Args:
        source: a file's path, or a binary stream at its start, which is left open.

    Returns:
        The photo, mode RGB.

    Raises:
        InputError: the file is missing, unreadable, not an image, damaged, cut short, or has more
            than `MAX_PIXELS` pixels, which its header tells before anything is decoded.
    """
    if not isinstance(source, str | Path):
        return _read(source, f"the stream {getattr(source, 'name', '')!s}".rstrip())[0]
    with _opened(Path(source)) as stream:
        return _read(stream, str(source))[0]


def load_square(path: Path, size: int, resize: str) -> tuple[np.ndarray, "Geometry"]:
    """Reads a photo as the encoder sees it.

    A JPEG file is decoded at a half, a quarter or an eighth of its size where that leaves both
    sides at least twice as long as the square's: several times as fast for a camera's photos, and
    what the encoder makes of it hardly differs.

    Args:
        path: the file.
        size: the side of the square, pixels.
        resize: one of `RESIZES`.

    Returns:
        The square, uint8 `(size, size, 3)`, and the geometry of the whole photo in it.

    Raises:
        InputError: as `load_photo`.
    """
    with _opened(path) as stream:
        photo, (width, height) = _read(stream, str(path), smallest=2 * size)
    square = Geometry.of(photo, size, resize).square(photo)
    return np.asarray(square), Geometry(width, height, size, resize)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such photo; check the path") from error
    except IsADirectoryError as error:
        raise InputError(f"{path}: is a folder; give a photo inside it") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be opened ({_reason(error)})") from error


def to_upright_rgb(image: Image.Image) -> Image.Image:
    """What `load_photo` makes of an image that is open already.

    Returns:
        A new image, mode RGB, turned as its EXIF says, without metadata.
    """
    image.load()
    orientation = _orientation(image)
    photo = _to_rgb(image)
    # Only the orientation is kept for `exif_transpose`, which rewrites all the metadata that it
    # finds and fails on what is broken; EXIF may hold the owner's name and place besides.
    _forget_metadata(photo)
    photo.getexif()[ExifTags.Base.Orientation] = orientation
    ImageOps.exif_transpose(photo, in_place=True)
    _forget_metadata(photo)
    return photo


def find_photos(
    paths: Sequence[Path], skip: Callable[[Path, str | InputError], None] | None = None
) -> list[tuple[Path, Path]]:
    """Finds the photos that the user named.

    Args:
        paths: files, taken whatever their ending, and folders, searched with all below them for
            files with one of `PHOTO_SUFFIXES`; hidden files and folders in them are skipped, and
            links to folders, which may lead in circles.
        skip: is told of all in the folders that is not taken: its path and what it is, or why a
            folder cannot be searched, which without `skip` is raised.

    Returns:
        `(file, relative)` pairs in the order of `paths`, a folder's sorted: `relative` is the
        file's path below the folder that was given, or its bare name for a file.

    Raises:
        InputError: `paths` is empty, a path does not exist, or a folder cannot be read or holds no
            photo.
    """
    if not paths:
        raise InputError("no photo given: name a photo, or a folder of photos")
    found: list[tuple[Path, Path]] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(_walk(path, skip))
            if not inside:
                raise InputError(
                    f"{path}: no photo in this folder or below it; give a folder with files that "
                    "end in .jpg, .png, .heic or another photo format"
                )
            found += [(path / relative, relative) for relative in inside]
        elif path.exists():
            found.append((path, Path(path.name)))
        else:
            raise InputError(f"{path}: no such file or folder; check the path")
    return found


@dataclass(frozen=True)
class Geometry:
    """How a photo becomes the square that the encoder sees, and the way back.

    Attributes:
        photo_width: the upright photo's width, pixels.
        photo_height: the upright photo's height, pixels.
        size: the side of the square, pixels.
        resize: `stretch` squeezes the whole photo into the square, `crop` takes the largest
            centred square of the photo, `pad` the smallest square around the photo, whose bars
            are filled with `PAD_COLOUR`.

    Raises:
        InputError: `resize` is not one of `RESIZES`.
        ValueError: a length is not positive.
    """

    photo_width: int
    photo_height: int
    size: int
    resize: str = "stretch"

    def __post_init__(self) -> None:
        if self.resize not in RESIZES:
            raise InputError(f"resize {self.resize!r} is unknown; choose {', '.join(RESIZES)}")
        if min(self.photo_width, self.photo_height, self.size) < 1:
            raise ValueError(
                "photo_width, photo_height and size must be at least 1, received "
                f"{self.photo_width}, {self.photo_height} and {self.size}"
            )

    @classmethod
    def of(cls, image: Image.Image, size: int, resize: str = "stretch") -> "Geometry":
        """The geometry of one upright photo in a square of `size` pixels."""
        return cls(image.width, image.height, size, resize)

    @property
    def window(self) -> tuple[float, float, float, float]:
        """(left, top, right, bottom) in photo pixels of what fills the square.

        With `pad` it reaches beyond the photo.
        """
        width, height = self.photo_width, self.photo_height
        if self.resize == "stretch":
            return 0.0, 0.0, float(width), float(height)
        side = min(width, height) if self.resize == "crop" else max(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        return left, top, left + side, top + side

    @property
    def visible(self) -> tuple[float, float, float, float]:
        """(left, top, right, bottom) in photo pixels of the part of the photo in the square."""
        left, top, right, bottom = self.window
        width, height = float(self.photo_width), float(self.photo_height)
        return max(left, 0.0), max(top, 0.0), min(right, width), min(bottom, height)

    def square(self, image: Image.Image) -> Image.Image:
        """The square that the encoder sees.

        Args:
            image: the upright photo.

        Returns:
            `size x size` pixels, RGB, resampled once, bicubic with antialiasing; the photo's own
            pixels where nothing has to change.

        Raises:
            ValueError: `image` does not have the size of this geometry's photo.
        """
        if image.size != (self.photo_width, self.photo_height):
            raise ValueError(
                f"this geometry is of a {self.photo_width}x{self.photo_height} photo, received "
                f"one of {image.width}x{image.height}"
            )
        if image.mode != "RGB":
            image = image.convert("RGB")
        if self.resize == "pad" and image.width != image.height:
            return self._padded_square(image)
        return image.resize((self.size, self.size), Image.Resampling.BICUBIC, box=self.window)

    def to_square(self, x: float, y: float) -> tuple[float, float]:
        """Where a point of the photo (pixels) lands in the square (pixels)."""
        left, top, right, bottom = self.window
        return (x - left) * self.size / (right - left), (y - top) * self.size / (bottom - top)

    def to_photo(self, x: float, y: float) -> tuple[float, float]:
        """Which point of the photo (pixels) a point of the square (pixels) shows."""
        left, top, right, bottom = self.window
        return left + x * (right - left) / self.size, top + y * (bottom - top) / self.size

    def cell_box(
        self, row: int, column: int, grid: tuple[int, int]
    ) -> tuple[float, float, float, float]:
        """The part of the photo that one of the encoder's regions stands on.

        The boxes of all cells tile `window` without gap or overlap; with `pad` some lie beyond
        the photo.

        Args:
            row: the region's row, 0 at the top.
            column: the region's column, 0 at the left.
            grid: `(gh, gw)`, the encoder's rows and columns.

        Returns:
            (left, top, right, bottom) in photo pixels.

        Raises:
            IndexError: the grid has no such cell.
        """
        rows, columns = grid
        if not (0 <= row < rows and 0 <= column < columns):
            raise IndexError(f"no cell ({row}, {column}) in a grid of {rows}x{columns}")
        left, top, right, bottom = self.window
        width, height = right - left, bottom - top
        return (
            left + width * column / columns,
            top + height * row / rows,
            left + width * (column + 1) / columns,
            top + height * (row + 1) / rows,
        )

    def _padded_square(self, image: Image.Image) -> Image.Image:
        """`square` for `pad`, without ever building the full square at the photo's own size.

        A 16000x2000 panorama would need 768 MB for it. Only as much of the bars is drawn around
        the photo as the bicubic filter reaches, which gives the same pixels.
        """
        left, _, right, _ = self.window
        scale = (right - left) / self.size  # photo pixels per pixel of the square
        reach = math.ceil(2 * max(scale, 1.0))  # bicubic: two pixels of the coarser raster
        # The square's whole pixels that the photo's colours reach; the others are plain bar.
        x0, y0 = (max(0, math.floor(c)) for c in self.to_square(-reach, -reach))
        x1, y1 = (
            min(self.size, math.ceil(c))
            for c in self.to_square(image.width + reach, image.height + reach)
        )
        margin = 2 * reach + math.ceil(scale)
        margin_x, margin_y = (margin, 0) if left < 0 else (0, margin)
        canvas = Image.new(
            "RGB", (image.width + 2 * margin_x, image.height + 2 * margin_y), PAD_COLOUR
        )
        canvas.paste(image, (margin_x, margin_y))
        box = (*self.to_photo(x0, y0), *self.to_photo(x1, y1))
        part = canvas.resize(
            (x1 - x0, y1 - y0),
            Image.Resampling.BICUBIC,
            box=(box[0] + margin_x, box[1] + margin_y, box[2] + margin_x, box[3] + margin_y),
        )
        square = Image.new("RGB", (self.size, self.size), PAD_COLOUR)
        square.paste(part, (x0, y0))
        return square


def _read(
    stream: BinaryIO, name: str, smallest: int | None = None
) -> tuple[Image.Image, tuple[int, int]]:
    """`load_photo` for an open stream.

    Args:
        stream: at its start.
        name: stands for it in messages.
        smallest: decode at reduced size, if the format can, down to sides of this many pixels.

    Returns:
        The photo, and the width and height of the whole one.
    """
    try:
        start = stream.tell()
        try:
            return _decode(stream, name, smallest)
        except Warning:
            # Odd metadata makes Pillow warn, which is no reason to refuse a photo. Where the
            # process turns warnings into exceptions, and only there, they are silenced; the
            # filters are global to the process, hence the lock.
            stream.seek(start)
            with _WARNINGS_LOCK, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _decode(stream, name, smallest)
    except InputError:
        raise
    except UnidentifiedImageError as error:
        if not _has_content(stream):
            raise InputError(f"{name}: is empty (0 bytes); replace it with the photo") from error
        raise InputError(
            f"{name}: is not an image that can be read; give a JPEG, PNG, WebP, HEIC, TIFF or "
            "another photo format"
        ) from error
    except Image.DecompressionBombError as error:
        _refuse_size(name, error)
    except Exception as error:  # Pillow's readers raise anything at all on damaged files
        raise InputError(
            f"{name}: is damaged or cut short ({_reason(error)}); replace it with a whole copy"
        ) from error


def _decode(
    stream: BinaryIO, name: str, smallest: int | None
) -> tuple[Image.Image, tuple[int, int]]:
    with Image.open(stream) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            _refuse_size(name)
        if smallest is not None:
            image.draft(None, (smallest, smallest))
        photo = to_upright_rgb(image)
        on_its_side = _orientation(image) >= 5
    return photo, (height, width) if on_its_side else (width, height)


def _forget_metadata(image: Image.Image) -> None:
    image.info = {}
    image.getexif().clear()  # cached apart from `info`


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation, 1 (upright) where there is none or it cannot be read."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Warning:
        raise
    except Exception:  # broken EXIF raises whatever its bytes happen to lead to
        return 1


def _to_rgb(image: Image.Image) -> Image.Image:
    """Any of Pillow's modes as RGB, never the same object."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return Image.fromarray(_to_eight_bits(np.asarray(image), image.mode)).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    if image.mode == "LAB":  # the one mode that `convert` does not turn into RGB
        transform = ImageCms.buildTransform(
            ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB"
        )
        converted = ImageCms.applyTransform(image, transform)
        assert converted is not None  # only `inPlace=True` returns None
        return converted
    return image.convert("RGB")


def _to_eight_bits(values: np.ndarray, mode: str) -> np.ndarray:
    """Grey levels of a deep image as 0..255.

    16 bits have their white at 65535. 32-bit integers and floats do not say where it is: it is
    taken to be the smallest usual white that no pixel exceeds, and an image beyond all of them,
    or with values below zero, is stretched from its darkest to its brightest pixel.
    """
    levels = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(levels.min()), float(levels.max())
    whites = {"I": (255.0, 65535.0), "F": (1.0, 255.0, 65535.0)}.get(mode, (65535.0,))
    white = next((white for white in whites if high <= white), None)
    if low < 0 or white is None:
        levels, white = levels - low, max(high - low, np.finfo(float).tiny)
    return np.rint(levels * (255.0 / white)).astype(np.uint8)


def _walk(folder: Path, skip: Callable[[Path, str | InputError], None] | None) -> Iterator[Path]:
    """The photos below `folder`, relative to it; of all else `skip` is told."""

    def refuse(error: OSError) -> None:
        unreadable = InputError(f"{error.filename}: cannot be searched ({_reason(error)})")
        if skip is None:
            raise unreadable from error
        skip(Path(error.filename), unreadable)

    for parent, folders, files in os.walk(folder, onerror=refuse):
        for name, is_folder in (
            *((name, True) for name in folders),
            *((name, False) for name in files),
        ):
            path = Path(parent, name)
            what = _what_else(path, is_folder)
            if what is None and not is_folder:
                yield path.relative_to(folder)
            elif what is not None and skip is not None:
                skip(path, what)
        folders[:] = [name for name in folders if not name.startswith(".")]


def _what_else(path: Path, is_folder: bool) -> str | None:
    """What in a folder is not taken, in words; `None` for photos and for folders to be searched."""
    if path.name.startswith("."):
        return "hidden"
    if is_folder:
        return "link to a folder" if path.is_symlink() else None
    if path.suffix.lower() not in PHOTO_SUFFIXES:
        return f"{path.suffix.lower()} file" if path.suffix else "file without suffix"
    # Nobody may ever write into a pipe. A link to nowhere is taken: to be named with its error.
    return "neither file nor folder" if path.exists() and not path.is_file() else None


def _has_content(stream: BinaryIO) -> bool:
    stream.seek(0)
    return bool(stream.read(1))


def _refuse_size(name: str, cause: Exception | None = None) -> NoReturn:
    raise InputError(
        f"{name}: has more than {MAX_PIXELS // 1_000_000} million pixels, which no honest photo "
        "has; shrink it first"
    ) from cause


def _reason(error: Exception) -> str:
    """An exception's message on one line."""
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(message.split()) or type(error).__name__
