"""The zip archives of torch.save, read without torch: where each storage lies, and which tensors look at it.

An archive holds `data.pkl`, a pickle of everything but the numbers, and `data/<key>`, the storages, uncompressed.  See
https://github.com/pytorch/pytorch/blob/main/torch/serialization.py and torch/_utils.py, `_rebuild_tensor_v2`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from parity.checkpoints.containers import zips
from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.checksum import Checked, Checksum, verify
from parity.checkpoints.containers.container import Span, Stored, Window
from parity.checkpoints.containers.pickles import LIMIT, Global, Table, load, table
from parity.checkpoints.layout import Array
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
_HUGE = 1 << 62


def read(window: Window, budget: Budget) -> Any:
    """Return what torch.save wrote, or torch.jit.save: dictionaries, lists, `Record`s, and tensors as `Stored`.

    Every member that is read is held to its checksum; a tensor's, when all of it was read.

    Raises:
        InputError: an archive that is damaged, or that holds or asks for anything else.
    """
    path, places = window.file.path, _members(window, budget)
    pickles = [name for name in places if name == "data.pkl" or (name.endswith("/data.pkl") and name.count("/") == 1)]
    if len(pickles) != 1:
        raise InputError(f"{path} has {len(pickles)} data.pkl, expected one: give a file that torch.save wrote")
    root = pickles[0].removesuffix("data.pkl")
    summed = any(member.crc for member in places.values())  # torch leaves all at 0 after set_crc32_options(False)

    def member(name: str) -> zips.Member:
        place = places.get(root + name)
        if place is None:
            raise InputError(f"{path} lacks {(root + name)[:200]!r}: it is incomplete, so fetch or write it again")
        if place.method != zips.STORED:
            raise InputError(f"{path} has {root + name!r} compressed: unpack it and write it with torch.save again")
        return place

    def content(name: str) -> bytes:
        place = member(name)
        data = place.read(LIMIT + 1)
        return verify(data, place.window, place.crc if summed and len(data) == place.size else None)

    if f"{root}byteorder" in places and content("byteorder") != b"little":
        raise InputError(f"{path} was written by a big-endian machine: load it in torch and save it on a little-endian one")

    storages: dict[str, Storage] = {}

    def storage(pid: Any) -> Storage:
        kind, key, count = named(pid)
        place = member(f"data/{key}")
        if place.size != count * (1 if kind is None else kind.itemsize):
            raise InputError(f"{path}: storage {key!r} has {place.size} bytes, not as announced: fetch or write it again")
        if key not in storages:
            storages[key] = Storage(place.window, kind, Checksum(place.window, place.crc) if summed else None)
        elif storages[key].dtype != kind:
            return Storage(place.window, kind, storages[key].checksum)
        return storages[key]

    return load(content("data.pkl"), str(path), TABLE, budget, storage)


def _members(window: Window, budget: Budget) -> Mapping[str, zips.Member]:
    try:
        return zips.members(window, budget)
    except InputError as error:
        raise InputError(f"{window.file.path} is damaged ({error}): do not trust it, and fetch it again") from None


@dataclass(frozen=True, eq=False)
class Storage:
    """The bytes that tensors look at.

    dtype: None: bytes, of which each tensor says what they are.
    checksum: None: the file has none.
    """

    place: Window
    dtype: np.dtype[Any] | None
    checksum: Checksum | None


def named(pid: Any) -> tuple[np.dtype[Any] | None, str, int]:
    """Return the dtype, the key and the number of entries of a storage, from its persistent id.

    Raises:
        ValueError, KeyError: what is no storage.
    """
    word, kind, key, _, count, *_ = pid
    if word != "storage" or not isinstance(kind, Global) or not isinstance(key, str) or type(count) is not int:
        raise ValueError("not a storage")
    if not 0 <= count < _HUGE:
        raise ValueError("not a number of entries")
    return _KINDS[kind.name], key, count


class Strided(Stored):
    """A tensor whose entries do not follow one another, such as a transpose that was saved as a view."""

    def __init__(
        self, storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._storage, self._offset, self.shape, self.strides, self.dtype = storage, offset, shape, strides, dtype

    def _span(self, shape: tuple[int, ...]) -> int:
        """Return how many entries of the storage lie from the first to the last of such a part."""
        return 1 + sum((n - 1) * s for n, s in zip(shape, self.strides, strict=True))

    def read(self, first: int, last: int) -> Array:
        if first == last:
            return np.empty(0, self.dtype)
        row = prod(self.shape[1:])
        top, bottom = first // row, -(-last // row)  # the rows that hold the entries; what they span is read
        shape = (bottom - top, *self.shape[1:])
        span = np.empty(self._span(shape), self.dtype)
        place = self._offset + top * self.strides[0] * self.dtype.itemsize
        self._storage.place.file.read_into(span, self._storage.place.start + place)
        if self._storage.checksum:
            whole = self._offset, self._offset + self._span(self.shape) * self.dtype.itemsize
            self._storage.checksum.add(place, span, whole)
        bits = span.view(f"u{min(8, self.dtype.itemsize)}").reshape(len(span), -1)  # numpy then copies bits, never numbers
        steps = (*(s * self.dtype.itemsize for s in self.strides), bits.itemsize)
        rows = np.lib.stride_tricks.as_strided(bits, (*shape, bits.shape[1]), steps, writeable=False)
        entries: Array = np.ascontiguousarray(rows).reshape(-1).view(self.dtype)
        return entries[first - top * row : last - top * row].copy()


def _tensor(
    storage: Storage,
    offset: Any,
    shape: Any,
    strides: Any,
    grad: Any = None,
    hooks: Any = None,
    metadata: Any = None,
    *_: Any,
    dtype: np.dtype[Any] | None = None,
) -> Stored:
    """Return the tensor that looks at a storage: held to its bytes, whatever its numbers say."""
    if not isinstance(storage, Storage):
        raise ValueError("not a tensor")
    dtype, place = dtype or storage.dtype, storage.place
    path = place.file.path
    if dtype is None or len(shape) != len(strides) or len(shape) > 63:
        raise ValueError("not a tensor")
    if metadata:  # "conj" or "neg": entries are to be conjugated or negated when they are read
        raise InputError(f"{path} has a tensor that is of conjugates or negatives of others: save its .clone() instead")
    numbers = (offset, *shape, *strides)
    if (
        not all(type(n) is int and 0 <= n < _HUGE for n in numbers)
        or prod(max(n, 1) for n in shape) * dtype.itemsize > _HUGE
    ):
        raise InputError(f"{path} has a tensor of impossible shape or strides: it is damaged, fetch or write it again")
    shape, strides = tuple(shape), tuple(strides)
    start = offset * dtype.itemsize
    if 0 in shape:
        return Span(place.file, place.start, shape, dtype)
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if start + span * dtype.itemsize > place.length:
        raise InputError(f"{path} has a tensor {shape} that reaches beyond its storage: fetch or write it again")
    if prod(shape) > span:
        raise InputError(f"{path} has a tensor {shape} that repeats {span} entries: save its .clone() instead")
    dense = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    if all(n == 1 or a == b for n, a, b in zip(shape, strides, dense, strict=True)):
        found = Span(place.file, place.start + start, shape, dtype)
        return Checked(storage.checksum, start, found) if storage.checksum else found
    return Strided(storage, start, shape, strides, dtype)


def _typed(
    storage: Storage,
    offset: Any,
    shape: Any,
    strides: Any,
    grad: Any,
    hooks: Any,
    kind: Global,
    metadata: Any = None,
    *_: Any,
) -> Stored:
    dtype = DTYPES[kind.name.removeprefix("torch.")]
    return _tensor(storage, offset, shape, strides, grad, hooks, metadata, dtype=dtype)


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
