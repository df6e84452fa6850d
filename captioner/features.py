"""Regions on disk: every photo goes through the encoder once, training reads rows.

A store is a folder of shards, each a float16 array `(photos, L, D)` with a list of its photos. A
shard is renamed into place when it is whole, so an extraction that was killed goes on where it
was. The folder's name holds encoder, size, resize, a digest of the encoder's weights, and the view;
a photo is known by its path, size and time of change: regions of another encoder or of a changed
photo cannot be taken for the right ones. Never more than a shard is in memory.
"""

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from filelock import FileLock, Timeout

from captioner.encoders import fingerprint, image_size_of
from captioner.errors import InputError
from captioner.files import replacing
from captioner.images import Geometry, load_square
from captioner.progress import bar
from captioner.views import cropped_side, view_of

__all__ = ["Features", "Squares", "extract", "load_squares", "store_name"]

log = logging.getLogger(__name__)

SHARD_PHOTOS = 512  # about 64 MB of 7x7x1280 regions: what a kill can cost, and one file to map
BATCH_PHOTOS = 32


def load_squares(
    photos: Iterable[Path], size: int, resize: str, view: int = 0
) -> Iterator[tuple[Path, np.ndarray | InputError, Geometry | None]]:
    """Reads photos in threads, in order, a few ahead of the reader.

    Args:
        photos: the files.
        size: the side of the squares, pixels.
        resize: how photos become squares: `stretch`, `crop` or `pad`.
        view: which view of them: see `captioner.views`. The geometry is that of view 0.

    Yields:
        `(path, square, geometry)`: square is uint8 `(size, size, 3)`; for a photo that cannot be
        read, the `InputError` that says why, and no geometry.
    """

    def load(path: Path) -> tuple[Path, np.ndarray | InputError, Geometry | None]:
        try:
            square, geometry = load_square(path, cropped_side(view, size), resize)
            return path, view_of(square, view, size, path.name), geometry
        except InputError as error:
            return path, error, None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ahead: list[Any] = []
        for path in photos:
            ahead.append(pool.submit(load, path))
            if len(ahead) > 2 * BATCH_PHOTOS:
                yield ahead.pop(0).result()
        for future in ahead:
            yield future.result()


def store_name(encoder: keras.Model, encoder_name: str, resize: str, view: int = 0) -> str:
    """Folder name of the store that belongs to this encoder, resize and view."""
    name = f"{encoder_name}-{image_size_of(encoder)}-{resize}-{fingerprint(encoder)[:12]}"
    return f"{name}-view{view}" if view else name


class Features:
    """Regions of photos, read by row from shards.

    Args:
        folder: a store, as `extract` writes it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shards: list[tuple[Path, int, tuple[int, ...]]] = []  # file, its header, a row
        self._rows: dict[str, tuple[int, int]] = {}
        for listing in sorted(folder.glob("regions-*.json")):
            path = listing.with_suffix(".npy")
            try:
                array = np.load(path, mmap_mode="r")
                photos = json.loads(listing.read_text(encoding="utf-8"))["photos"]
                whole = array.offset + array.nbytes == path.stat().st_size
                if array.dtype != np.float16 or not whole or len(array) != len(photos):
                    raise ValueError("not the regions of the photos in its list")
                keys = {str(key): (len(self._shards), row) for row, key in enumerate(photos)}
            except Exception as error:  # a damaged header can raise almost any
                # As good as not there: its photos are encoded again.
                reason = " ".join(str(error).split())[:200]
                log.warning(f"{path}: damaged, left out ({reason})")
                continue
            self._rows |= keys
            self._shards.append((path, array.offset, array.shape[1:]))

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, photo: Path) -> bool:
        return _key(photo) in self._rows

    def locate(self, photos: Sequence[Path]) -> list[tuple[int, int]]:
        """Where each photo's regions are, for `read`; `KeyError` if they are not there."""
        return [self._rows[_key(photo)] for photo in photos]

    def read(self, places: Sequence[tuple[int, int]]) -> np.ndarray:
        """Regions `(len(places), L, D)` float16, in the order of the places."""
        # Read, not mapped: what is mapped counts as the process's own memory, and would grow with
        # the photos.
        rows = []
        for number, row in places:
            path, header, shape = self._shards[number]
            size = math.prod(shape)
            start = header + row * size * np.dtype(np.float16).itemsize
            rows.append(np.fromfile(path, np.float16, size, offset=start).reshape(shape))
        return np.stack(rows)


class Squares:
    """Photos as the encoder sees them, read anew every time: in place of `Features` where the
    encoder itself changes.

    Args:
        size: the side of the squares, pixels.
        resize: how photos become squares: `stretch`, `crop` or `pad`.
        view: which view of them: see `captioner.views`.
    """

    def __init__(self, size: int, resize: str, view: int = 0) -> None:
        self._how = size, resize, view

    def locate(self, photos: Sequence[Path]) -> list[Path]:
        """Where each photo is, for `read`."""
        return list(photos)

    def read(self, places: Sequence[Path]) -> np.ndarray:
        """Squares `(len(places), size, size, 3)` uint8, in the order of the places.

        Raises:
            InputError: a photo cannot be read any more.
        """
        squares = []
        for _, square, _ in load_squares(places, *self._how):
            if isinstance(square, InputError):
                raise square
            squares.append(square)
        return np.stack(squares)


def _key(photo: Path) -> str:
    status = photo.stat()
    return f"{photo.resolve()}|{status.st_size}|{status.st_mtime_ns}"


def extract(
    encoder: keras.Model,
    encoder_name: str,
    resize: str,
    photos: Sequence[Path],
    root: Path,
    view: int = 0,
) -> tuple[Features, dict[Path, str]]:
    """Makes sure that the regions of `photos` are on disk.

    Several processes may do so at once, on one machine or on several that share the folder: they
    divide the work.

    Args:
        encoder: from `captioner.encoders.build_encoder`.
        encoder_name: its name, for the folder.
        resize: how photos become squares: `stretch`, `crop` or `pad`.
        photos: the files.
        root: folder of stores.
        view: which view of the photos: see `captioner.views`.

    Returns:
        The store, and for every photo that could not be read the reason.
    """
    folder = root / store_name(encoder, encoder_name, resize, view)
    folder.mkdir(parents=True, exist_ok=True)
    store = Features(folder)
    missing = sum(photo not in store for photo in photos)
    if not missing:
        return store, {}

    encode = tf.function(
        lambda batch: tf.cast(encoder(batch, training=False), tf.float16),
        reduce_retracing=True,
        autograph=False,
    )
    unreadable: dict[Path, str] = {}
    parts = [photos[first : first + SHARD_PHOTOS] for first in range(0, len(photos), SHARD_PHOTOS)]
    left = [part for part in parts if any(photo not in store for photo in part)]
    what = f"{encoder_name}, view {view}" if view else encoder_name
    with bar(f"Regions ({what})", missing, "photos") as running:
        while left:
            busy = []
            for part in left:
                # Let go by the system if the process dies, whatever kills it.
                lock = FileLock(folder / "locks" / f"{_digest(part)}.lock")
                try:
                    lock.acquire(timeout=0)
                except Timeout:
                    busy.append(part)  # another process is at it
                    continue
                try:
                    done, store = store, Features(folder)
                    running.advance(sum(one in store and one not in done for one in part))
                    _extract_part(
                        encode,
                        [photo for photo in part if photo not in store],
                        (image_size_of(encoder), resize, view),
                        folder,
                        unreadable,
                        running.advance,
                    )
                finally:
                    lock.release()
            left = busy
            if left:
                time.sleep(1)
    return Features(folder), unreadable


def _extract_part(
    encode: Callable[[np.ndarray], tf.Tensor],
    photos: Sequence[Path],
    how: tuple[int, str, int],
    folder: Path,
    unreadable: dict[Path, str],
    advance: Callable[[], None],
) -> None:
    """Writes one shard: the regions of all photos that can be read."""
    read: list[Path] = []
    rows: list[np.ndarray] = []
    waiting: list[np.ndarray] = []

    def flush() -> None:
        if waiting:
            rows.append(encode(np.stack(waiting)).numpy())
            waiting.clear()

    for path, square, _ in load_squares(photos, *how):
        advance()
        if isinstance(square, InputError):
            unreadable[path] = str(square)
            continue
        read.append(path)
        waiting.append(square)
        if len(waiting) == BATCH_PHOTOS:
            flush()
    flush()
    if not read:
        return
    array = folder / f"regions-{_digest(read)}.npy"
    listing = json.dumps({"photos": [_key(path) for path in read]}).encode()
    # The array first: a shard counts once its list is there.
    with replacing(array) as partial, partial.open("wb") as stream:
        np.save(stream, np.concatenate(rows))
    with replacing(array.with_suffix(".json")) as partial:
        partial.write_bytes(listing)


def _digest(photos: Sequence[Path]) -> str:
    """A name for these photos, the same in every process."""
    return hashlib.sha256("\n".join(map(_key, photos)).encode()).hexdigest()[:16]
