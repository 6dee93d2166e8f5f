"""CRC-32 of bytes that are read in pieces, in any order and from several threads.

The checksum of two adjacent pieces is computed from the checksums of both (zlib's crc32_combine).  Each piece is
therefore processed once, while it is in the cache, and no byte is read a second time to be verified.
"""

import zlib
from bisect import bisect_right
from functools import lru_cache
from threading import Lock

import numpy as np

from parity.checkpoints.containers.container import ContiguousArray, FileSlice
from parity.checkpoints.layout import Array
from vit_spec import InputError

_BLOCK = 1 << 20  # bytes per read when a checksum is completed
_POLYNOMIAL = 0xEDB88320  # the polynomial of CRC-32, lowest power first
_ONE = 1 << 31  # the polynomial 1, in the same bit order


class Checksum:
    """The expected CRC-32 of a file slice, and the checksums of the ranges that were read so far.

    The call of `add` that completes the slice raises InputError if the checksum differs.
    """

    def __init__(self, file_slice: FileSlice, crc: int) -> None:
        self._slice, self._crc = file_slice, crc
        self._lock = Lock()
        self._starts: list[int] = []  # starts of the ranges that were read, ascending; adjacent ranges are merged
        self._ranges: dict[int, tuple[int, int]] = {}  # start -> (end, checksum)
        self._verified = False

    def add(self, offset: int, data: Array, array_range: tuple[int, int]) -> None:
        """Add bytes that were read.

        When all of `array_range` was read, the rest of the slice is read too, because the checksum covers the whole slice.

        Args:
            offset: where the bytes begin in the slice.
            data: the bytes, as an array of any dtype.
            array_range: first byte and end of the array that they belong to, as offsets in the slice.

        Raises:
            InputError: the slice is complete and its checksum is wrong.
        """
        if self._verified:
            return
        buffer = data.reshape(-1).view(np.uint8).data
        with self._lock:
            unread = self._unread_ranges(offset, offset + len(buffer))
        checksums = [(start, end, zlib.crc32(buffer[start - offset : end - offset])) for start, end in unread]
        with self._lock:
            for start, end, crc in checksums:
                if self._unread_ranges(start, end) == [(start, end)]:  # no other thread has added it meanwhile
                    self._insert_range(start, end, crc)
            if self._verified or self._unread_ranges(*array_range):
                return
            for start, end in self._unread_ranges(0, self._slice.length):
                for at in range(start, end, _BLOCK):
                    piece = self._slice.read(at, min(_BLOCK, end - at))
                    self._insert_range(at, at + len(piece), zlib.crc32(piece))
            self._verified = True
            if self._ranges.get(0, (0, 0)) != (self._slice.length, self._crc):
                raise checksum_error(self._slice)

    def _unread_ranges(self, lower: int, upper: int) -> list[tuple[int, int]]:
        """Return the parts of a range that were not read yet."""
        ranges, at = [], lower
        index = max(bisect_right(self._starts, lower) - 1, 0)
        while at < upper and index < len(self._starts) and self._starts[index] < upper:
            start = self._starts[index]
            if start > at:
                ranges.append((at, start))
            at = max(at, self._ranges[start][0])
            index += 1
        return [*ranges, (at, upper)] if at < upper else ranges

    def _insert_range(self, start: int, end: int, crc: int) -> None:
        """Add a range that overlaps no other, and merge it with adjacent ranges."""
        index = bisect_right(self._starts, start)
        if index and self._ranges[self._starts[index - 1]][0] == start:
            index -= 1
            previous = self._starts.pop(index)
            start, crc = previous, combine_crc32(self._ranges.pop(previous)[1], crc, end - start)
        if index < len(self._starts) and self._starts[index] == end:
            next_end, next_crc = self._ranges.pop(self._starts.pop(index))
            crc, end = combine_crc32(crc, next_crc, next_end - end), next_end
        self._starts.insert(index, start)
        self._ranges[start] = (end, crc)


class ChecksummedArray(ContiguousArray):
    """A contiguous array in a file slice with a known checksum.

    The slice has the bytes of this array alone, or a storage that several arrays share.
    """

    def __init__(self, checksum: Checksum, offset: int, array: ContiguousArray) -> None:
        """Store the array and its checksum.

        Args:
            checksum: the checksum of the slice.
            offset: offset of the array in the slice, in bytes.
            array: the array without a checksum.
        """
        super().__init__(array.file, array.offset, array.shape, array.dtype)
        self._checksum, self._slice_offset = checksum, offset

    def read(self, start: int, stop: int) -> Array:
        values = super().read(start, stop)
        offset = self._slice_offset + start * self.dtype.itemsize
        self._checksum.add(offset, values, (self._slice_offset, self._slice_offset + self.nbytes))
        return values


def verify_crc32(data: bytes, file_slice: FileSlice, crc: int | None) -> bytes:
    """Return `data` after verifying its checksum.

    Args:
        data: bytes of the slice; all of them, unless `crc` is None.
        file_slice: the slice, for the error message.
        crc: the expected CRC-32; None skips the verification.

    Raises:
        InputError: the checksum is wrong.
    """
    if crc is not None and zlib.crc32(data) != crc:
        raise checksum_error(file_slice)
    return data


def checksum_error(file_slice: FileSlice) -> InputError:
    """Return the error for bytes whose checksum is wrong."""
    return InputError(f"{file_slice.file.path} is damaged (a checksum is wrong): fetch or write it again")


def combine_crc32(lower: int, second: int, length: int) -> int:
    """Return the CRC-32 of two adjacent pieces from the CRC-32 of each; the second piece has `length` bytes."""
    return _multiply(_power_of_x(length), lower) ^ second


@lru_cache(maxsize=256)
def _power_of_x(num_bytes: int) -> int:
    """Return x to the power of 8 * num_bytes, modulo the polynomial of CRC-32."""
    result, square = _ONE, _ONE >> 8
    while num_bytes:
        if num_bytes & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        num_bytes >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the polynomial of CRC-32."""
    result = 0
    for shift in range(31, -1, -1):
        if a >> shift & 1:
            result ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result
