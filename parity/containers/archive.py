"""The zip archives of torch.save, read without torch: where each storage lies, and which tensors look at it.

An archive holds `data.pkl`, a pickle of everything but the numbers, and `data/<key>`, the storages, uncompressed.  See
https://github.com/pytorch/pytorch/blob/main/torch/serialization.py and torch/_utils.py, `_rebuild_tensor_v2`.
"""

import io
import zipfile
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from parity.containers.container import File, Span, Stored
from parity.containers.pickles import LIMIT, Global, Table, load, table
from parity.layout import Array
from vit_spec import InputError

DTYPES = {  # torch's name -> numpy's
    "bool": np.dtype(np.bool_),
    **{name: np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")},
    **{name: np.dtype(name) for name in ("float16", "float32", "float64", "complex64", "complex128")},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
_STORAGES = {
    **{"Bool": "bool", "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64"},
    **{"Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64"},
    **{"ComplexFloat": "complex64", "ComplexDouble": "complex128"},
}
_LOCAL = 30  # bytes of a member's own header, before its name
_HUGE = 1 << 62


@dataclass(frozen=True)
class Window:
    """Some bytes of a file, as if they were one."""

    file: File
    start: int
    length: int

    @classmethod
    def of(cls, file: File) -> "Window":
        """Return the whole file."""
        return cls(file, 0, file.size)

    def read(self, offset: int, count: int) -> bytes:
        """Return `count` bytes at `offset` of the window; fewer where it ends, none outside."""
        inside = 0 <= offset < self.length
        return self.file.read(self.start + offset, min(count, self.length - offset)) if inside else b""


class _Stream(io.RawIOBase):
    """A window as `zipfile` wants it."""

    def __init__(self, window: Window) -> None:
        self.window, self.place = window, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        place = offset + (0, self.place, self.window.length)[whence]
        if place < 0:
            raise OSError("before the start")
        self.place = place
        return place

    def tell(self) -> int:
        return self.place

    def readinto(self, buffer: Any) -> int:
        data = self.window.read(self.place, len(buffer))
        buffer[: len(data)] = data
        self.place += len(data)
        return len(data)


def members(window: Window) -> dict[str, Window]:
    """Return where the members of a zip archive lie, those that are not compressed.

    Raises:
        InputError: a damaged archive, or members that repeat a name or lie over one another.
    """
    path = window.file.path
    try:
        with zipfile.ZipFile(_Stream(window)) as archive:
            infos, end = archive.infolist(), archive.start_dir
    except Exception as error:  # zipfile meets damage with errors of many kinds
        raise InputError(f"{path} is damaged ({type(error).__name__} in its zip directory): fetch it again") from None
    infos.sort(key=lambda info: info.header_offset)
    places: dict[str, Window] = {}
    spans: list[tuple[int, int]] = []
    for info in infos:
        header = window.read(info.header_offset, _LOCAL)
        size, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
        start = info.header_offset + _LOCAL + size + extra
        name = window.read(info.header_offset + _LOCAL, size)
        if header[:4] != b"PK\3\4" or name.decode("utf-8", "replace") != info.orig_filename or info.flag_bits & 1:
            raise InputError(f"{path} is damaged: its zip directory does not fit {info.filename!r}: fetch it again")
        if info.filename in places:
            raise InputError(f"{path} holds {info.filename!r} twice: do not trust it, and ask for another file")
        spans.append((info.header_offset, start + info.compress_size))
        stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
        places[info.filename] = Window(window.file, window.start + start, info.file_size if stored else -1)
    if any(a[1] > b[0] for a, b in pairwise([*spans, (end, end)])):
        raise InputError(f"{path} has members that lie over one another: do not trust it, and ask for another file")
    return places


def read(window: Window) -> Any:
    """Return what torch.save wrote, or torch.jit.save: dictionaries, lists, `Record`s, and tensors as `Stored`.

    Raises:
        InputError: an archive that is damaged, or that holds or asks for anything else.
    """
    path, places = window.file.path, members(window)
    pickles = [name for name in places if name == "data.pkl" or (name.endswith("/data.pkl") and name.count("/") == 1)]
    if len(pickles) != 1:
        raise InputError(f"{path} has {len(pickles)} data.pkl, expected one: give a file that torch.save wrote")
    root = pickles[0].removesuffix("data.pkl")

    def member(name: str) -> Window:
        place = places.get(root + name)
        if place is None:
            raise InputError(f"{path} lacks {root + name!r}: it is incomplete, so fetch or write it again")
        if place.length < 0:
            raise InputError(f"{path} has {root + name!r} compressed: unpack it and write it with torch.save again")
        return place

    if f"{root}byteorder" in places:
        order = member("byteorder")
        if order.read(0, 16) != b"little":
            raise InputError(
                f"{path} was written by a big-endian machine: load it in torch and save it on a little-endian one"
            )

    def storage(pid: Any) -> _Storage:
        word, kind, key, _, count = pid
        if word != "storage" or not isinstance(kind, Global) or not isinstance(key, str):
            raise ValueError("not a storage")
        dtype = _KINDS[kind.name]
        place = member(f"data/{key}")
        if not isinstance(count, int) or place.length != count * (dtype.itemsize if dtype else 1):
            raise InputError(f"{path}: storage {key!r} has {place.length} bytes, not as announced: fetch or write it again")
        return _Storage(place, dtype)

    data = member("data.pkl")
    return load(data.read(0, LIMIT + 1), str(path), TABLE, storage)


@dataclass(frozen=True, eq=False)
class _Storage:
    place: Window
    dtype: np.dtype[Any] | None  # None: bytes, of which each tensor says what they are


class Strided(Stored):
    """A tensor whose entries do not follow one another, such as a transpose that was saved as a view."""

    def __init__(
        self, file: File, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.file, self.offset, self.shape, self.strides, self.dtype = file, offset, shape, strides, dtype

    def read(self, first: int, last: int) -> Array:
        if first == last:
            return np.empty(0, self.dtype)
        row = prod(self.shape[1:])
        top, bottom = first // row, -(-last // row)  # the rows that hold the entries; what they span is read
        shape = (bottom - top, *self.shape[1:])
        span = np.empty(1 + sum((n - 1) * s for n, s in zip(shape, self.strides, strict=True)), self.dtype)
        self.file.read_into(span, self.offset + top * self.strides[0] * self.dtype.itemsize)
        bits = span.view(f"u{min(8, self.dtype.itemsize)}").reshape(len(span), -1)  # numpy then copies bits, never numbers
        steps = (*(s * self.dtype.itemsize for s in self.strides), bits.itemsize)
        rows = np.lib.stride_tricks.as_strided(bits, (*shape, bits.shape[1]), steps, writeable=False)
        entries: Array = np.ascontiguousarray(rows).reshape(-1).view(self.dtype)
        return entries[first - top * row : last - top * row].copy()


def _tensor(
    storage: _Storage, offset: Any, shape: Any, strides: Any, *_: Any, dtype: np.dtype[Any] | None = None
) -> Stored:
    """Return the tensor that looks at a storage: held to its bytes, whatever its numbers say."""
    dtype, path = dtype or storage.dtype, storage.place.file.path
    if not isinstance(storage, _Storage) or dtype is None or len(shape) != len(strides) or len(shape) > 63:
        raise ValueError("not a tensor")
    numbers = (offset, *shape, *strides)
    if (
        not all(type(n) is int and 0 <= n < _HUGE for n in numbers)
        or prod(max(n, 1) for n in shape) * dtype.itemsize > _HUGE
    ):
        raise InputError(f"{path} has a tensor of impossible shape or strides: it is damaged, fetch or write it again")
    shape, strides = tuple(shape), tuple(strides)
    start = storage.place.start + offset * dtype.itemsize
    if 0 in shape:
        return Span(storage.place.file, storage.place.start, shape, dtype)
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if (offset + span) * dtype.itemsize > storage.place.length:
        raise InputError(f"{path} has a tensor {shape} that reaches beyond its storage: fetch or write it again")
    if prod(shape) > span:
        raise InputError(f"{path} has a tensor {shape} that repeats {span} entries: save its .clone() instead")
    dense = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    if all(n == 1 or a == b for n, a, b in zip(shape, strides, dense, strict=True)):
        return Span(storage.place.file, start, shape, dtype)
    return Strided(storage.place.file, start, shape, strides, dtype)


def _typed(
    storage: _Storage, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, kind: Global, *_: Any
) -> Stored:
    return _tensor(storage, offset, shape, strides, dtype=DTYPES[kind.name.removeprefix("torch.")])


def _parameter(data: Stored, *_: Any) -> Stored:
    return data


def _same(value: Any, *_: Any) -> Any:
    return value


_KINDS: dict[str, np.dtype[Any] | None] = {
    **{f"torch.{name}Storage": DTYPES[dtype] for name, dtype in _STORAGES.items()},
    **{f"torch.{place}UntypedStorage": None for place in ("", "storage.")},
}
TABLE: Table = table(
    {
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _typed,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        **{f"torch.jit._pickle.build_{kind}list": _same for kind in ("int", "double", "bool", "tensor")},
        "torch.jit._pickle.restore_type_tag": _same,
    },
    values=[*_KINDS, *(f"torch.{name}" for name in DTYPES)],
)
