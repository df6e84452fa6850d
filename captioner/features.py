"""Regions on disk: every photo goes through the encoder once, training reads rows.

A store is a folder of shards, each a float16 array `(photos, L, D)` with a list of its photos. A
shard is renamed into place when it is whole, so an extraction that was killed goes on where it
was. The folder's name holds encoder, size, resize and a digest of the encoder's weights; a photo is
known by its path, size and time of change: regions of another encoder or of a changed photo cannot
be taken for the right ones.
"""

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from captioner.encoders import fingerprint, grid_of, image_size_of
from captioner.errors import InputError
from captioner.files import replacing
from captioner.images import Geometry, load_photo
from captioner.progress import track

__all__ = ["Features", "extract", "load_squares", "store_name"]

SHARD_PHOTOS = 512  # about 64 MB of 7x7x1280 regions: what a kill can cost, and one file to map
BATCH_PHOTOS = 32


def load_squares(
    photos: Sequence[Path], size: int, resize: str
) -> Iterator[tuple[Path, np.ndarray | InputError, Geometry | None]]:
    """Reads photos in threads, in order, a few ahead of the reader.

    Yields:
        `(path, square, geometry)`: square is uint8 `(size, size, 3)`; for a photo that cannot be
        read, the `InputError` that says why, and no geometry.
    """

    def load(path: Path) -> tuple[Path, np.ndarray | InputError, Geometry | None]:
        try:
            photo = load_photo(path)
        except InputError as error:
            return path, error, None
        geometry = Geometry.of(photo, size, resize)
        return path, np.asarray(geometry.square(photo)), geometry

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ahead: list[Any] = []
        for path in photos:
            ahead.append(pool.submit(load, path))
            if len(ahead) > 2 * BATCH_PHOTOS:
                yield ahead.pop(0).result()
        for future in ahead:
            yield future.result()


def store_name(encoder: keras.Model, encoder_name: str, resize: str) -> str:
    """Folder name of the store that belongs to this encoder and resize."""
    return f"{encoder_name}-{image_size_of(encoder)}-{resize}-{fingerprint(encoder)[:12]}"


class Features:
    """Regions of photos, read by row from memory-mapped shards.

    Args:
        folder: a store, as `extract` writes it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shards: list[np.ndarray] = []
        self._rows: dict[str, tuple[int, int]] = {}
        for listing in sorted(folder.glob("regions-*.json")):
            array = np.load(listing.with_suffix(".npy"), mmap_mode="r")
            for row, key in enumerate(json.loads(listing.read_text())["photos"]):
                self._rows[key] = (len(self._shards), row)
            self._shards.append(array)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, photo: Path) -> bool:
        return _key(photo) in self._rows

    def locate(self, photos: Sequence[Path]) -> list[tuple[int, int]]:
        """Where each photo's regions are, for `read`; `KeyError` if they are not there."""
        return [self._rows[_key(photo)] for photo in photos]

    def read(self, places: Sequence[tuple[int, int]]) -> np.ndarray:
        """Regions `(len(places), L, D)` float16, in the order of the places."""
        return np.stack([self._shards[shard][row] for shard, row in places])


def _key(photo: Path) -> str:
    status = photo.stat()
    return f"{photo.resolve()}|{status.st_size}|{status.st_mtime_ns}"


def extract(
    encoder: keras.Model,
    encoder_name: str,
    resize: str,
    photos: Sequence[Path],
    root: Path,
) -> tuple[Features, dict[Path, str]]:
    """Makes sure that the regions of `photos` are on disk.

    Args:
        encoder: from `captioner.encoders.build_encoder`.
        encoder_name: its name, for the folder.
        resize: how photos become squares: `stretch`, `crop` or `pad`.
        photos: the files.
        root: folder of stores.

    Returns:
        The store, and for every photo that could not be read the reason.
    """
    folder = root / store_name(encoder, encoder_name, resize)
    folder.mkdir(parents=True, exist_ok=True)
    store = Features(folder)
    missing = [photo for photo in photos if photo not in store]
    if not missing:
        return store, {}

    rows, columns = grid_of(encoder)
    depth = encoder.output_shape[-1]
    encode = tf.function(
        lambda batch: tf.cast(encoder(batch, training=False), tf.float16),
        reduce_retracing=True,
        autograph=False,
    )
    unreadable: dict[Path, str] = {}
    shard = _ShardWriter(folder, (rows * columns, depth))
    waiting: list[tuple[Path, np.ndarray]] = []

    def flush() -> None:
        if waiting:
            regions = encode(np.stack([square for _, square in waiting])).numpy()
            shard.add([_key(path) for path, _ in waiting], regions)
            waiting.clear()

    squares = load_squares(missing, image_size_of(encoder), resize)
    for path, square, _ in track(squares, f"Regions ({encoder_name})", len(missing), "photos"):
        if isinstance(square, InputError):
            unreadable[path] = str(square)
            continue
        waiting.append((path, square))
        if len(waiting) == BATCH_PHOTOS:
            flush()
    flush()
    shard.close()
    return Features(folder), unreadable


class _ShardWriter:
    """Collects rows and writes a shard whenever it is full."""

    def __init__(self, folder: Path, shape: tuple[int, int]) -> None:
        self._folder = folder
        self._buffer = np.empty((SHARD_PHOTOS, *shape), np.float16)
        self._keys: list[str] = []

    def add(self, keys: list[str], regions: np.ndarray) -> None:
        for key, row in zip(keys, regions, strict=True):
            self._buffer[len(self._keys)] = row
            self._keys.append(key)
            if len(self._keys) == SHARD_PHOTOS:
                self.close()

    def close(self) -> None:
        if not self._keys:
            return
        number = len(list(self._folder.glob("regions-*.json")))
        array = self._folder / f"regions-{number:05d}.npy"
        # The array first: a shard counts once its list is there.
        for path, write in (
            (array, lambda stream: np.save(stream, self._buffer[: len(self._keys)])),
            (
                array.with_suffix(".json"),
                lambda stream: stream.write(json.dumps({"photos": self._keys}).encode()),
            ),
        ):
            with replacing(path) as partial, partial.open("wb") as stream:
                write(stream)
        self._keys = []
