"""Zip archives of torch.save, read without torch.

An archive holds `data.pkl`, a pickle of everything except the tensor data, and `data/<key>`, the uncompressed storages.
See https://github.com/pytorch/pytorch/blob/main/torch/serialization.py and torch/_utils.py, `_rebuild_tensor_v2`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from parity.checkpoints.containers import zip_directory
from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.checksum import Checksum, ChecksummedArray, verify_crc32
from parity.checkpoints.containers.container import ContiguousArray, FileSlice, StoredArray
from parity.checkpoints.containers.pickle_globals import Allowlist, Global, allowlist
from parity.checkpoints.containers.pickles import MAX_PICKLE_BYTES, load
from parity.checkpoints.layout import Array
from vit_spec import InputError

DTYPES = {  # torch's name -> numpy's
    "bool": np.dtype(np.bool_),
    **{name: np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")},
    **{name: np.dtype(name) for name in ("float16", "float32", "float64", "complex64", "complex128")},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "float8_e5m2fnuz": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_STORAGE_DTYPES = {
    **{"Bool": "bool", "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64"},
    **{"Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64"},
    **{"ComplexFloat": "complex64", "ComplexDouble": "complex128"},
}
_MAX_SIZE = 1 << 62


def read(file_slice: FileSlice, budget: Budget) -> Any:
    """Return what torch.save or torch.jit.save wrote: dictionaries, lists, `PickledObject`s, and tensors as `StoredArray`.

    The checksum of `data.pkl` and of `byteorder` is verified here; that of a storage, once all of a tensor in it was read.

    Raises:
        InputError: the archive is damaged, or its pickle asks for anything else.
    """
    path, members = file_slice.file.path, _read_members(file_slice, budget)
    pickle_names = [name for name in members if name == "data.pkl" or (name.endswith("/data.pkl") and name.count("/") == 1)]
    if len(pickle_names) != 1:
        raise InputError(f"{path} has {len(pickle_names)} data.pkl, expected one: give a file that torch.save wrote")
    root = pickle_names[0].removesuffix("data.pkl")
    has_checksums = any(member.crc for member in members.values())  # all are 0 after set_crc32_options(False) in torch

    def get_member(name: str) -> zip_directory.Member:
        member = members.get(root + name)
        if member is None:
            raise InputError(f"{path} lacks {(root + name)[:200]!r}: it is incomplete, so fetch or write it again")
        if member.method != zip_directory.STORED:
            raise InputError(f"{path} has {root + name!r} compressed: unpack it and write it with torch.save again")
        return member

    def read_member(name: str) -> bytes:
        member = get_member(name)
        data = member.read(MAX_PICKLE_BYTES + 1)
        is_whole = len(data) == member.size
        return verify_crc32(data, member.file_slice, member.crc if has_checksums and is_whole else None)

    if f"{root}byteorder" in members and read_member("byteorder") != b"little":
        raise InputError(f"{path} was written by a big-endian machine: load it in torch and save it on a little-endian one")

    storages: dict[str, Storage] = {}

    def load_storage(pid: Any) -> Storage:
        dtype, key, size = parse_storage_id(pid)
        member = get_member(f"data/{key}")
        if member.size != size * (1 if dtype is None else dtype.itemsize):
            raise InputError(f"{path}: storage {key!r} has {member.size} bytes, not as declared: fetch or write it again")
        if key not in storages:
            checksum = Checksum(member.file_slice, member.crc) if has_checksums else None
            storages[key] = Storage(member.file_slice, dtype, checksum)
        elif storages[key].dtype != dtype:
            return Storage(member.file_slice, dtype, storages[key].checksum)
        return storages[key]

    return load(read_member("data.pkl"), str(path), ALLOWED_GLOBALS, budget, load_storage)


def _read_members(file_slice: FileSlice, budget: Budget) -> Mapping[str, zip_directory.Member]:
    try:
        return zip_directory.read_members(file_slice, budget)
    except InputError as error:
        raise InputError(f"{file_slice.file.path} is damaged ({error}): do not trust it, and fetch it again") from None


@dataclass(frozen=True, eq=False)
class Storage:
    """The bytes of one or more tensors.

    file_slice: the byte range of the storage.
    dtype: dtype of its elements; None for an untyped storage, whose tensors have their own dtypes.
    checksum: checksum of the storage; None if the file has none.
    """

    file_slice: FileSlice
    dtype: np.dtype[Any] | None
    checksum: Checksum | None


def parse_storage_id(pid: Any) -> tuple[np.dtype[Any] | None, str, int]:
    """Return the dtype, the key and the number of elements of a storage, from its persistent id.

    Raises:
        ValueError, KeyError: not the id of a storage.
    """
    tag, storage_type, key, _, size, *_ = pid
    if tag != "storage" or not isinstance(storage_type, Global) or not isinstance(key, str) or type(size) is not int:
        raise ValueError("not a storage")
    if not 0 <= size < _MAX_SIZE:
        raise ValueError("not a number of elements")
    return _STORAGE_TYPES[storage_type.name], key, size


class StridedArray(StoredArray):
    """A tensor whose elements are not contiguous in its storage, such as a transpose that was saved as a view."""

    def __init__(
        self, storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._storage, self._offset, self.shape, self.strides, self.dtype = storage, offset, shape, strides, dtype

    def _span(self, shape: tuple[int, ...]) -> int:
        """Return the number of elements of the storage from the first to the last element of an array of this shape."""
        return 1 + sum((n - 1) * s for n, s in zip(shape, self.strides, strict=True))

    @property
    def span_bytes(self) -> int:
        return self._span(self.shape) * self.dtype.itemsize

    def read(self, start: int, stop: int) -> Array:
        if start == stop:
            return np.empty(0, self.dtype)
        row = prod(self.shape[1:])
        top, bottom = start // row, -(-stop // row)  # the rows with these elements; the whole span of the rows is read
        shape = (bottom - top, *self.shape[1:])
        values = np.empty(self._span(shape), self.dtype)
        offset = self._offset + top * self.strides[0] * self.dtype.itemsize
        self._storage.file_slice.file.read_into(values, self._storage.file_slice.start + offset)
        if self._storage.checksum:
            array_range = self._offset, self._offset + self.span_bytes
            self._storage.checksum.add(offset, values, array_range)
        # As unsigned integers, because numpy copies their bits unchanged.
        bits = values.view(f"u{min(8, self.dtype.itemsize)}").reshape(len(values), -1)
        byte_strides = (*(s * self.dtype.itemsize for s in self.strides), bits.itemsize)
        rows = np.lib.stride_tricks.as_strided(bits, (*shape, bits.shape[1]), byte_strides, writeable=False)
        elements: Array = np.ascontiguousarray(rows).reshape(-1).view(self.dtype)
        return elements[start - top * row : stop - top * row].copy()


def _rebuild_tensor(
    storage: Storage,
    offset: Any,
    shape: Any,
    strides: Any,
    grad: Any = None,
    hooks: Any = None,
    metadata: Any = None,
    *_: Any,
    dtype: np.dtype[Any] | None = None,
) -> StoredArray:
    """Return a tensor in a storage, after checking that it lies within the storage: all arguments come from the pickle."""
    if not isinstance(storage, Storage):
        raise ValueError("not a tensor")
    dtype, file_slice = dtype or storage.dtype, storage.file_slice
    path = file_slice.file.path
    if dtype is None or len(shape) != len(strides) or len(shape) > 63:
        raise ValueError("not a tensor")
    if metadata:  # "conj" or "neg": torch conjugates or negates the elements when it reads them
        raise InputError(f"{path} has a tensor that is a conjugate or negative view: save its .clone() instead")
    numbers = (offset, *shape, *strides)
    if (
        not all(type(n) is int and 0 <= n < _MAX_SIZE for n in numbers)
        or prod(max(n, 1) for n in shape) * dtype.itemsize > _MAX_SIZE
    ):
        raise InputError(f"{path} has a tensor of impossible shape or strides: it is damaged, fetch or write it again")
    shape, strides = tuple(shape), tuple(strides)
    start = offset * dtype.itemsize
    if 0 in shape:
        return ContiguousArray(file_slice.file, file_slice.start, shape, dtype)
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if start + span * dtype.itemsize > file_slice.length:
        raise InputError(f"{path} has a tensor {shape} that reaches beyond its storage: fetch or write it again")
    if prod(shape) > span:
        raise InputError(f"{path} has a tensor {shape} that repeats {span} elements: save its .clone() instead")
    contiguous_strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    if all(n == 1 or a == b for n, a, b in zip(shape, strides, contiguous_strides, strict=True)):
        array = ContiguousArray(file_slice.file, file_slice.start + start, shape, dtype)
        return ChecksummedArray(storage.checksum, start, array) if storage.checksum else array
    return StridedArray(storage, start, shape, strides, dtype)


def _rebuild_tensor_v3(
    storage: Storage,
    offset: Any,
    shape: Any,
    strides: Any,
    grad: Any,
    hooks: Any,
    dtype: Global,
    metadata: Any = None,
    *_: Any,
) -> StoredArray:
    """Return a tensor in an untyped storage."""
    numpy_dtype = DTYPES[dtype.name.removeprefix("torch.")]
    return _rebuild_tensor(storage, offset, shape, strides, grad, hooks, metadata, dtype=numpy_dtype)


def _rebuild_parameter(data: StoredArray, *_: Any) -> StoredArray:
    return data


def _identity(value: Any, *_: Any) -> Any:
    return value


_STORAGE_TYPES: dict[str, np.dtype[Any] | None] = {
    **{f"torch.{name}Storage": DTYPES[dtype] for name, dtype in _STORAGE_DTYPES.items()},
    **{f"torch.{prefix}UntypedStorage": None for prefix in ("", "storage.")},
}
ALLOWED_GLOBALS: Allowlist = allowlist(
    {
        "torch._utils._rebuild_tensor": _rebuild_tensor,
        "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
        "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
        "torch._utils._rebuild_parameter": _rebuild_parameter,
        "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
        **{f"torch.jit._pickle.build_{kind}list": _identity for kind in ("int", "double", "bool", "tensor")},
        "torch.jit._pickle.restore_type_tag": _identity,
    },
    constants=[*_STORAGE_TYPES, *(f"torch.{name}" for name in DTYPES)],
)
