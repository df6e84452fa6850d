"""A photo's name in a data set -> its file; every folder is listed once and no photo is opened."""

# ruff: noqa: PTH100, PTH116, PTH118, PTH122
# os.path on strings is several times as fast as pathlib, which tells with 100,000 photos.

import functools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from captioner.images import PHOTO_SUFFIXES

__all__ = ["PhotoIndex", "is_photo", "list_folder", "walk"]

# Folders that data sets keep their photos in, tried before any other folder of that tree.
_PHOTO_FOLDERS = frozenset(
    (
        *("images", "image", "photos", "img", "flicker8k_dataset", "flickr8k_dataset"),
        *("flickr30k-images", "flickr30k_images", "train2014", "val2014", "train2017", "val2017"),
    )
)


def is_photo(name: str) -> bool:
    """Whether a file's name ends like a photo's."""
    return os.path.splitext(name)[1].lower() in PHOTO_SUFFIXES


def list_folder(folder: str) -> tuple[list[str], list[str]]:
    """The names of a folder's files and folders, sorted, without the hidden ones."""
    files: list[str] = []
    folders: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                folders.append(entry.name)
            elif entry.is_file():  # a broken link is neither
                files.append(entry.name)
    return sorted(files), sorted(folders)


def walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Every folder from `root` down with its files' names, sorted; hidden ones are left out.

    Links to folders are followed, each folder once: large data sets are often linked in.
    """
    seen: set[tuple[int, int]] = set()
    pending = [os.fspath(root)]
    while pending:
        folder = pending.pop()
        try:
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            files, folders = list_folder(folder)
        except OSError:
            continue  # not ours to read, or gone meanwhile: its photos will be said to be missing
        yield folder, files
        pending.extend(os.path.join(folder, name) for name in reversed(folders))


class PhotoIndex:
    """Finds the photos that a captions file names.

    A name is looked for, in this order: as a path from `beside`, from `base`, and from the folders
    directly below `base` that usually hold photos; then, by the file's bare name, anywhere below
    `base`, where that name must be the only one: first exactly, then in whatever case, then, for a
    name without suffix, with any. So a table may hold the paths of another machine.

    Args:
        base: the folder of photos, or of the whole data set.
        beside: the folder of the captions file.
    """

    def __init__(self, base: Path, beside: Path) -> None:
        self._base = os.path.abspath(base)
        usual = sorted(entry for entry in base.glob("*") if entry.name.lower() in _PHOTO_FOLDERS)
        self._folders = list(dict.fromkeys(map(os.path.abspath, (beside, base, *usual))))
        self._listings: dict[str, frozenset[str]] = {}

    def find(self, names: Iterable[str]) -> dict[str, Path | str]:
        """Every name's file, or in words what is wrong with it."""
        found: dict[str, Path | str] = {}
        rest: dict[str, list[str]] = {}
        for name in names:
            path = self._as_path(name) or self._as_path(name.replace("\\", "/"))
            if path is None:
                rest.setdefault(re.split(r"[/\\]", name)[-1], []).append(name)
            elif not is_photo(path):
                found[name] = f"not a photo: {name} is of no type that is read"
            else:
                found[name] = Path(path)
        # A bare name that stands for two photos, or for one already found, proves nothing: in
        # a/1.jpg, b/1.jpg with only b/ there, the captions of a/1.jpg must not go to b/1.jpg.
        taken = {path for path in found.values() if isinstance(path, Path)}
        for bare, full in rest.items():
            files = self._by_bare_name(bare)
            for name in full:
                if len(files) == 1 and len(full) == 1 and files[0] not in taken:
                    found[name] = files[0]
                    taken.add(files[0])
                elif len(files) > 1:
                    found[name] = f"ambiguous photo: {name} could be {files[0]} or {files[1]}"
                else:
                    found[name] = f"photo missing: {name}"
        return found

    def relative(self, path: Path) -> str:
        """A photo's path from `base`, with "/" between folders."""
        return os.path.relpath(path, self._base).replace(os.sep, "/")

    def _as_path(self, name: str) -> str | None:
        for folder in self._folders:
            path = os.path.normpath(os.path.join(folder, name))
            parent, bare = os.path.split(path)
            if parent not in self._listings:
                try:
                    self._listings[parent] = frozenset(list_folder(parent)[0])
                except (OSError, ValueError):  # ValueError: a NUL in the name
                    self._listings[parent] = frozenset()
            if bare in self._listings[parent]:
                return path
        return None

    def _by_bare_name(self, bare: str) -> list[Path]:
        exact, folded, stems = self._tree
        found = exact.get(bare) or folded.get(bare.casefold())
        if not found and not is_photo(bare):
            found = stems.get(bare)
        return [Path(path) for path in found or ()]

    @functools.cached_property
    def _tree(self) -> list[dict[str, list[str]]]:
        """All photos below `base` by name, by name in lower case, and by name without suffix."""
        tables: list[dict[str, list[str]]] = [{}, {}, {}]
        for folder, files in walk(Path(self._base)):
            for name in filter(is_photo, files):
                keys = (name, name.casefold(), os.path.splitext(name)[0])
                for table, key in zip(tables, keys, strict=True):
                    table.setdefault(key, []).append(os.path.join(folder, name))
        return tables
