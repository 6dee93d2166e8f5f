"""The .npy files inside an npz file: each is a short header and an array."""

import re
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from parity.checkpoints.containers import header_checks
from parity.checkpoints.containers.checksum import Checksum, ChecksummedArray
from parity.checkpoints.containers.container import ContiguousArray, FileSlice, StoredArray
from parity.checkpoints.layout import Array
from vit_spec import InputError

MAGIC = b"\x93NUMPY"
MAX_HEADER_BYTES = 10_000  # as in numpy
_MAX_FORTRAN_BYTES = 1 << 28  # arrays in Fortran order are read whole

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_NATIVE = [
    np.dtype(code)
    for code in ("?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16")
]
DESCRS: dict[np.dtype[Any], str] = {dtype: dtype.str for dtype in _NATIVE} | {_BFLOAT16: "|V2"}

# numpy itself writes "<V2" for bfloat16; other writers give a byte order to types without one.
_DTYPES = {mark + descr[1:]: dtype for dtype, descr in DESCRS.items() for mark in {descr[0], "<"}}
_BIG_ENDIAN = {dtype.newbyteorder(">").str: dtype for dtype in _NATIVE if dtype.itemsize > 1}
_TEXT = re.compile(r"([<>|])([US])(\d{1,9})")
_FIELD = r"'(descr|fortran_order|shape)'\s*:\s*('[^']*'|True|False|\([\d,L\s]*\))\s*"
_HEADER = re.compile(rf"{{\s*{_FIELD},\s*{_FIELD},\s*{_FIELD}(?:,\s*)?}}\s*")


class ByteSource(Protocol):
    """Gives access to the bytes of a .npy file."""

    def head(self, max_bytes: int) -> bytes:
        """Return the first bytes, at most `max_bytes`."""

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> StoredArray:
        """Return the bytes from `offset` as an array, whose checksum is verified once all of it was read."""


@dataclass(frozen=True)
class Header:
    """The header of a .npy file.

    length: size of the header itself, in bytes.
    descr: the dtype of the array as numpy spells it, such as "<f4".
    itemsize: bytes of an element.
    is_text: whether the elements are text.
    is_fortran: whether the array is in Fortran order (first dimension contiguous).
    shape: shape of the array.
    """

    length: int
    descr: str
    itemsize: int
    is_text: bool
    is_fortran: bool
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the array."""
        return prod(self.shape) * self.itemsize


def parse_header(head: bytes) -> Header:
    """Parse the header at the beginning of `head`.

    Raises:
        InputError: the header is invalid; the caller adds the path and the name of the array.
    """
    if head[:6] != MAGIC or len(head) < 12 or head[6] not in (1, 2, 3):
        raise InputError("not a .npy file")
    length_bytes = 2 if head[6] == 1 else 4
    header_start = 8 + length_bytes
    length = header_start + int.from_bytes(head[8:header_start], "little")
    if length > len(head):
        raise InputError(f"its .npy header of {length} bytes is incomplete or too long")
    match = _HEADER.fullmatch(head[header_start:length].decode("latin-1"))
    fields = dict(zip(match.groups()[::2], match.groups()[1::2], strict=True)) if match else {}
    if len(fields) != 3 or fields["descr"][0] != "'" or fields["shape"][0] != "(" or fields["fortran_order"][0] not in "TF":
        raise InputError("its .npy header is not one that numpy writes, or its dtype has several fields")
    descr = fields["descr"][1:-1]
    lengths = [number.strip().removesuffix("L") for number in fields["shape"][1:-1].split(",") if number.strip()]
    if not all(re.fullmatch(r"[0-9]{1,19}", number) for number in lengths):
        raise InputError("its shape is not made of whole numbers")
    itemsize, is_text = _element_type(descr)
    shape = header_checks.parse_shape([int(number) for number in lengths], max(itemsize, 1))
    return Header(length, descr, itemsize, is_text, fields["fortran_order"] == "True", shape)


def _element_type(descr: str) -> tuple[int, bool]:
    """Return the bytes of an element, and whether it is text."""
    if match := _TEXT.fullmatch(descr):
        return int(match[3]) * (4 if match[2] == "U" else 1), True
    dtype = _DTYPES.get(descr) or _BIG_ENDIAN.get(descr)
    if dtype is None:
        what = "it is a pickle, which can run code" if descr == "|O" else f"its dtype is {header_checks.quote(descr)}"
        raise InputError(f"{what}, expected one of {', '.join(DESCRS.values())}")
    return dtype.itemsize, False


def open_array(source: ByteSource, header: Header) -> StoredArray:
    """Return the array that follows a header, converted to C order and little-endian when it is read.

    Raises:
        InputError: the array is in Fortran order and too large to be read whole; the caller adds the path.
    """
    native_dtype = _BIG_ENDIAN.get(header.descr)
    array = source.array(header.length, header.shape, native_dtype or _DTYPES[header.descr])
    if native_dtype is not None:
        array = _BigEndianArray(array)
    if header.is_fortran and sum(length != 1 for length in header.shape) > 1:
        if header.nbytes > _MAX_FORTRAN_BYTES:
            raise InputError(f"it has {header.nbytes:,} bytes in Fortran order: save it in C order")
        return _FortranArray(array)
    return array


def read_text(source: ByteSource, header: Header) -> str:
    """Return the string that follows a header whose shape is ().

    Raises:
        InputError: the string is not Unicode; the caller adds the path.
    """
    data = source.array(header.length, (header.nbytes,), np.dtype(np.uint8)).read(0, header.nbytes).tobytes()
    codec = "utf-8" if header.descr[1] == "S" else "utf-32-be" if header.descr[0] == ">" else "utf-32-le"
    try:
        return data.decode(codec).rstrip("\0")
    except UnicodeDecodeError:
        raise InputError("its text is not Unicode") from None


class UncompressedFile:
    """An uncompressed .npy file inside another file."""

    def __init__(self, file_slice: FileSlice, checksum: Checksum) -> None:
        self._slice, self._checksum = file_slice, checksum

    def head(self, max_bytes: int) -> bytes:
        return self._slice.read(0, max_bytes)

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> StoredArray:
        return ChecksummedArray(
            self._checksum, offset, ContiguousArray(self._slice.file, self._slice.start + offset, shape, dtype)
        )


class _BigEndianArray(StoredArray):
    """A big-endian array, converted to little-endian when it is read."""

    def __init__(self, array: StoredArray) -> None:
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def read(self, start: int, stop: int) -> Array:
        return self._array.read(start, stop).view(self.dtype.str.replace("<", ">")).byteswap().view(self.dtype)


class _FortranArray(StoredArray):
    """An array in Fortran order: it is read whole, and stays in memory until its last element is read."""

    def __init__(self, array: StoredArray) -> None:
        self._array, self.shape, self.dtype = array, array.shape, array.dtype
        self._c_order: Array | None = None

    def read(self, start: int, stop: int) -> Array:
        c_order = self._c_order
        if c_order is None:
            c_order = self._array.read(0, self.size).reshape(self.shape[::-1]).T.reshape(-1)
        self._c_order = None if stop == self.size else c_order
        return c_order[start:stop].copy()
