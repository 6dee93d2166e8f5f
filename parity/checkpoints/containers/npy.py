"""What is in an npz file: the bytes of .npy files, each a short header and an array."""

import re
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from parity.checkpoints.containers import strict
from parity.checkpoints.containers.checksum import Checked, Checksum
from parity.checkpoints.containers.container import Span, Stored, Window
from parity.checkpoints.layout import Array
from vit_spec import InputError

MAGIC = b"\x93NUMPY"
LIMIT = 10_000  # bytes of a header, as in numpy
_REORDERED = 1 << 28  # bytes of an array in Fortran order, which is read whole

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_NATIVE = [np.dtype(code) for code in ("?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")]
DESCRIPTIONS: dict[np.dtype[Any], str] = {dtype: dtype.str for dtype in _NATIVE} | {_BFLOAT16: "|V2"}

# numpy itself writes <V2, and others mark an order where there is none.
_DTYPES = {mark + text[1:]: dtype for dtype, text in DESCRIPTIONS.items() for mark in {text[0], "<"}}
_SWAPPED = {dtype.newbyteorder(">").str: dtype for dtype in _NATIVE if dtype.itemsize > 1}
_TEXT = re.compile(r"([<>|])([US])(\d{1,9})")
_FIELD = r"'(descr|fortran_order|shape)'\s*:\s*('[^']*'|True|False|\([\d,L\s]*\))\s*"
_HEADER = re.compile(rf"{{\s*{_FIELD},\s*{_FIELD},\s*{_FIELD}(?:,\s*)?}}\s*")


class Source(Protocol):
    """The bytes of a .npy file."""

    def head(self, count: int) -> bytes:
        """Return the first bytes, at most `count`."""

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Stored:
        """Return what lies at `offset` as an array, verified when it is read from first to last."""


@dataclass(frozen=True)
class Header:
    """A .npy file's header.

    length: its own, in bytes.
    descr: the dtype as numpy spells it.
    itemsize: bytes of an entry.
    is_text: whether the entries are text.
    fortran: whether the first dimension runs fastest.
    """

    length: int
    descr: str
    itemsize: int
    is_text: bool
    fortran: bool
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the array."""
        return prod(self.shape) * self.itemsize


def parse(head: bytes) -> Header:
    """Return the header at the beginning of some bytes.

    Raises:
        InputError: what is wrong with it; the caller names the file and the array.
    """
    if head[:6] != MAGIC or len(head) < 12 or head[6] not in (1, 2, 3):
        raise InputError("not a .npy file")
    width = 2 if head[6] == 1 else 4
    begin = 8 + width
    length = begin + int.from_bytes(head[8:begin], "little")
    if length > len(head):
        raise InputError(f"a .npy header of {length} bytes")
    match = _HEADER.fullmatch(head[begin:length].decode("latin-1"))
    fields = dict(zip(match.groups()[::2], match.groups()[1::2], strict=True)) if match else {}
    if len(fields) != 3 or fields["descr"][0] != "'" or fields["shape"][0] != "(" or fields["fortran_order"][0] not in "TF":
        raise InputError("a .npy header that numpy does not write, or a dtype of several fields")
    descr = fields["descr"][1:-1]
    lengths = [word.strip().removesuffix("L") for word in fields["shape"][1:-1].split(",") if word.strip()]
    if not all(re.fullmatch(r"[0-9]{1,19}", word) for word in lengths):
        raise InputError("its shape holds what is no length")
    itemsize, is_text = _entry(descr)
    shape = strict.shape([int(word) for word in lengths], max(itemsize, 1))
    return Header(length, descr, itemsize, is_text, fields["fortran_order"] == "True", shape)


def _entry(descr: str) -> tuple[int, bool]:
    """Return the bytes of an entry, and whether it is text."""
    if match := _TEXT.fullmatch(descr):
        return int(match[3]) * (4 if match[2] == "U" else 1), True
    dtype = _DTYPES.get(descr) or _SWAPPED.get(descr)
    if dtype is None:
        what = "a pickle, whose reading runs code" if descr == "|O" else f"of dtype {strict.quoted(descr)}"
        raise InputError(f"{what}: arrays are of {', '.join(DESCRIPTIONS.values())}")
    return dtype.itemsize, False


def stored(source: Source, header: Header) -> Stored:
    """Return the array that follows a header, in C order and little-endian."""
    swapped = _SWAPPED.get(header.descr)
    array = source.array(header.length, header.shape, swapped or _DTYPES[header.descr])
    if swapped is not None:
        array = _Swapped(array)
    if header.fortran and sum(length != 1 for length in header.shape) > 1:
        if header.nbytes > _REORDERED:
            raise InputError(f"an array of {header.nbytes:,} bytes in Fortran order: save it in C order")
        return _Fortran(array)
    return array


def text(source: Source, header: Header) -> str:
    """Return the one string that follows a header."""
    data = source.array(header.length, (header.nbytes,), np.dtype(np.uint8)).read(0, header.nbytes).tobytes()
    codec = "utf-8" if header.descr[1] == "S" else "utf-32-be" if header.descr[0] == ">" else "utf-32-le"
    try:
        return data.decode(codec).rstrip("\0")
    except UnicodeDecodeError:
        raise InputError("is text that is not Unicode") from None


class Plain:
    """A .npy file as it lies in another file."""

    def __init__(self, window: Window, checksum: Checksum) -> None:
        self._window, self._checksum = window, checksum

    def head(self, count: int) -> bytes:
        return self._window.read(0, count)

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Stored:
        return Checked(self._checksum, offset, Span(self._window.file, self._window.start + offset, shape, dtype))


class _Swapped(Stored):
    """A big-endian array."""

    def __init__(self, array: Stored) -> None:
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def read(self, first: int, last: int) -> Array:
        return self._array.read(first, last).view(self.dtype.str.replace("<", ">")).byteswap().view(self.dtype)


class _Fortran(Stored):
    """An array whose first dimension runs fastest in the file: read whole, and kept until its last entry was read."""

    def __init__(self, array: Stored) -> None:
        self._array, self.shape, self.dtype = array, array.shape, array.dtype
        self._whole: Array | None = None

    def read(self, first: int, last: int) -> Array:
        whole = self._whole
        if whole is None:
            whole = self._array.read(0, self.size).reshape(self.shape[::-1]).T.reshape(-1)
        self._whole = None if last == self.size else whole
        return whole[first:last].copy()
