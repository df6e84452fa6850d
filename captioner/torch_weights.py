"""PyTorch state-dict files read without PyTorch, and without trusting them.

A `.pth` file is a pickle, and an ordinary unpickler runs whatever the file asks for. This reader
admits the few opcodes and the few names that a dictionary of tensors needs, replaces those names
with its own, and checks every shape, stride and offset against the bytes that are there.

Both layouts that `torch.save` has written are read: the zip archive (PyTorch 1.6 and later) and the
sequence of pickles before it. Source: `torch/serialization.py`, `_load` and `_legacy_load`.
"""

import io
import pickle
import pickletools
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from captioner.errors import InputError

__all__ = ["read_state_dict"]

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001

# bfloat16 is the upper half of a float32; numpy has no such type, so it is widened on reading.
_BFLOAT16 = "bfloat16"
_STORAGE_TYPES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "BFloat16Storage": _BFLOAT16,
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
    "BoolStorage": "|b1",
}

# What `torch.save` emits for a dictionary of tensors, protocols 2 to 4, and no more.
_OPCODES = frozenset(
    "PROTO FRAME STOP MARK GLOBAL STACK_GLOBAL REDUCE BUILD BINPERSID "  # noqa: SIM905
    "BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET "
    "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINUNICODE SHORT_BINUNICODE "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS "
    "EMPTY_DICT SETITEM SETITEMS".split()
)


class _StorageType(NamedTuple):
    """Stands for a class such as `torch.FloatStorage`; a tuple, so a file cannot alter it."""

    name: str


class _Storage(NamedTuple):
    """A block of numbers that tensors are views of."""

    key: str
    type_name: str
    elements: int


class _Tensor(NamedTuple):
    """A strided view of a storage; offset and strides are in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Refused(Exception):
    """Why the file is not read; `read_state_dict` adds the file's name."""


def read_state_dict(
    path: str | Path, *, max_bytes: int = 2**30, max_tensors: int = 10_000
) -> dict[str, np.ndarray]:
    """Reads the tensors of a PyTorch state dict.

    Nothing in the file is executed, so a file from a stranger is refused at worst.

    Args:
        path: a file written by `torch.save(model.state_dict(), path)`.
        max_bytes: refuse files, and tensors in all, larger than this many bytes.
        max_tensors: refuse files with more tensors than this.

    Returns:
        Name to array, in the file's order. Every array is a C-contiguous copy in the machine's byte
        order; bfloat16 becomes float32.

    Raises:
        InputError: the file is missing, damaged, too large, or holds anything but named tensors.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise _Refused(f"it has {size} bytes and {max_bytes} are allowed")
        content = path.read_bytes()
        if zipfile.is_zipfile(io.BytesIO(content)):
            entries, blocks = _read_zip(content, max_bytes)
        else:
            entries, blocks = _read_legacy(content)
        return _arrays(entries, blocks, max_bytes, max_tensors)
    except OSError as error:
        reason = error.strerror or "unreadable"
        raise InputError(f"{path}: cannot read the weights file: {reason}") from error
    except _Refused as error:
        raise InputError(f"{path}: not a usable PyTorch state dict: {error}") from error
    except Exception as error:
        # A damaged or hostile pickle or archive can raise almost any exception on its way.
        detail = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path}: not a usable PyTorch state dict: {detail}") from error


def _read_zip(content: bytes, max_bytes: int) -> tuple[Any, dict[str, memoryview]]:
    """Returns the unpickled root object and the bytes of each storage by key."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        # `torch.save` stores without compression, so more bytes than the limit is a zip bomb.
        if sum(entry.file_size for entry in archive.infolist()) > max_bytes:
            raise _Refused(f"it unpacks to more than {max_bytes} bytes")
        names = archive.namelist()
        roots = [name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise _Refused("the zip archive has no data.pkl")
        root = roots[0]
        if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
            raise _Refused("it was written by a big-endian machine")
        storages: dict[str, _Storage] = {}
        entries, _ = _unpickle(archive.read(f"{root}data.pkl"), storages)
        blocks = {key: memoryview(archive.read(f"{root}data/{key}")) for key in storages}
    return entries, blocks


def _read_legacy(content: bytes) -> tuple[Any, dict[str, memoryview]]:
    """Returns the unpickled root object and the bytes of each storage by key.

    Five pickles (magic number, protocol, the machine's sizes, the object, the storages' keys), then
    for each key a 64-bit element count and the elements.
    """
    storages: dict[str, _Storage] = {}
    magic, rest = _unpickle(content)
    if magic != _LEGACY_MAGIC:
        raise _Refused("its magic number is not PyTorch's")
    protocol, rest = _unpickle(rest)
    machine, rest = _unpickle(rest)
    if protocol != _LEGACY_PROTOCOL or not isinstance(machine, dict):
        raise _Refused(f"its protocol is {protocol!r}, expected {_LEGACY_PROTOCOL}")
    if machine.get("little_endian") is not True:
        raise _Refused("it was written by a big-endian machine")
    entries, rest = _unpickle(rest, storages)
    keys, rest = _unpickle(rest)

    if not isinstance(keys, list) or sorted(keys) != sorted(storages):
        raise _Refused("its list of storages does not match its tensors")
    blocks: dict[str, memoryview] = {}
    remaining = memoryview(rest)
    for key in keys:
        count = int.from_bytes(remaining[:8], "little")
        end = 8 + count * _item_size(storages[key].type_name)
        if count != storages[key].elements or end > len(remaining):
            raise _Refused(f"storage {key!r} is truncated")
        blocks[key] = remaining[8:end]
        remaining = remaining[end:]
    return entries, blocks


def _unpickle(content: bytes, storages: dict[str, _Storage] | None = None) -> tuple[Any, bytes]:
    """Loads one pickle from the start of `content`.

    Args:
        content: the pickle and whatever follows it.
        storages: collects the storages that are referred to; `None` where there may be none.

    Returns:
        The object, and the bytes after the pickle.
    """
    end = 0
    for opcode, argument, position in pickletools.genops(content):
        if opcode.name not in _OPCODES:
            raise _Refused(f"the pickle opcode {opcode.name} has no place in it")
        # The unpickler allocates its memo up to the largest index that is named.
        if opcode.name == "LONG_BINPUT" and (argument or 0) > len(content):
            raise _Refused("a pickle memo index is out of range")
        end = (position or 0) + 1
    stream = io.BytesIO(content[:end])
    return _RestrictedUnpickler(stream, storages).load(), content[end:]


class _RestrictedUnpickler(pickle.Unpickler):
    """Knows ordered dictionaries, tensors and storages; every other name is refused."""

    def __init__(self, stream: io.BytesIO, storages: dict[str, _Storage] | None) -> None:
        super().__init__(stream)
        self._storages = storages

    def find_class(self, module: str, name: str, /) -> Any:
        """Returns our stand-in for the name, and never imports anything."""
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor_builder()
        if module == "torch" and name in _STORAGE_TYPES:
            return _StorageType(name)
        raise _Refused(f"it asks for {module}.{name}, which a state dict does not need")

    def persistent_load(self, reference: Any, /) -> _Storage:
        """Registers a storage; its numbers are read later, outside the pickle."""
        if self._storages is None or not isinstance(reference, tuple) or len(reference) < 5:
            raise _Refused("it has a malformed storage reference")
        kind, storage_type, key, _device, count, *view = reference
        if (
            kind != "storage"
            or not isinstance(storage_type, _StorageType)
            or not isinstance(key, str)
            or not _is_size(count)
            or view not in ([], [None])
        ):
            raise _Refused("it has a malformed storage reference")
        storage = _Storage(key, storage_type.name, count)
        if self._storages.setdefault(key, storage) != storage:
            raise _Refused(f"storage {key!r} is described in two ways")
        return storage


def _tensor_builder() -> Callable[..., _Tensor]:
    """Returns a new stand-in for `_rebuild_tensor_v2`.

    New each time because a pickle can set attributes (BUILD) on any object that it is given.
    """

    def rebuild_tensor(
        storage: Any, offset: Any, shape: Any, strides: Any, *_gradient_and_hooks: Any
    ) -> _Tensor:
        sizes_are_valid = (
            _is_size(offset)
            and isinstance(shape, tuple)
            and isinstance(strides, tuple)
            and len(shape) == len(strides)
            and all(_is_size(number) for number in shape + strides)
        )
        if not isinstance(storage, _Storage) or not sizes_are_valid:
            raise _Refused("it has a malformed tensor")
        return _Tensor(storage, offset, shape, strides)

    return rebuild_tensor


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**63


def _item_size(type_name: str) -> int:
    """Bytes of one element in the file."""
    dtype = _STORAGE_TYPES[type_name]
    return 2 if dtype == _BFLOAT16 else np.dtype(dtype).itemsize


def _arrays(
    entries: Any, blocks: Mapping[str, memoryview], max_bytes: int, max_tensors: int
) -> dict[str, np.ndarray]:
    """Copies every tensor out of its storage, after checking that it lies within."""
    if not isinstance(entries, dict) or not entries:
        raise _Refused("it holds no dictionary of tensors")
    if len(entries) > max_tensors:
        raise _Refused(f"it has {len(entries)} tensors and {max_tensors} are allowed")
    arrays: dict[str, np.ndarray] = {}
    total = 0
    for name, tensor in entries.items():
        if not isinstance(name, str) or not isinstance(tensor, _Tensor):
            raise _Refused(f"its entry {name!r} is not a tensor")
        # A tensor of stride 0 is larger than its storage: the sum of the copies has its own limit.
        count = 1
        for size in tensor.shape:
            count *= size
        total += count * max(4, _item_size(tensor.storage.type_name))
        if total > max_bytes:
            raise _Refused(f"its tensors need more than {max_bytes} bytes")
        arrays[name] = _array(name, tensor, count, blocks[tensor.storage.key])
    return arrays


def _array(name: str, tensor: _Tensor, count: int, block: memoryview) -> np.ndarray:
    """Returns one tensor of `count` elements as a contiguous copy."""
    storage = tensor.storage
    item_size = _item_size(storage.type_name)
    if len(block) != storage.elements * item_size:
        raise _Refused(
            f"storage {storage.key!r} has {len(block)} bytes, not {storage.elements} items"
        )
    last = tensor.offset + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)
    )
    if count > 0 and last >= storage.elements:
        raise _Refused(f"tensor {name!r} reaches beyond its storage")

    dtype = _STORAGE_TYPES[storage.type_name]
    stored = np.dtype("<u2" if dtype == _BFLOAT16 else dtype)
    if count == 0:
        view = np.empty(tensor.shape, stored)
    else:
        view = np.ndarray(
            tensor.shape,
            stored,
            buffer=block,
            offset=tensor.offset * item_size,
            strides=tuple(stride * item_size for stride in tensor.strides),
        )
    if dtype == _BFLOAT16:
        return (view.astype(np.uint32, order="C") << 16).view(np.float32)
    native = stored if sys.byteorder == "little" else stored.newbyteorder("=")
    return np.array(view, dtype=native, order="C", copy=True)
