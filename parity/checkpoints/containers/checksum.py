"""CRC-32 of bytes that are read in pieces, in any order and by several threads.

The checksum of two neighbouring pieces follows from theirs (zlib's crc32_combine), so every piece is summed once, while
it is in the cache, and nothing is read a second time to be verified.
"""

import zlib
from bisect import bisect_right
from functools import lru_cache
from threading import Lock

import numpy as np

from parity.checkpoints.containers.container import Span, Window
from parity.checkpoints.layout import Array
from vit_spec import InputError

_PIECE = 1 << 20  # bytes read at once to complete a checksum
_POLYNOMIAL = 0xEDB88320  # of CRC-32, its lowest power first
_ONE = 1 << 31  # the polynomial 1, in the same order


class Checksum:
    """What some bytes of a file sum to, and what of them was read so far.

    Raises InputError, in whichever call completes it, if the bytes are others.
    """

    def __init__(self, window: Window, crc: int) -> None:
        self._window, self._crc = window, crc
        self._lock = Lock()
        self._starts: list[int] = []  # of the pieces that were read, ascending; neighbours are one piece
        self._pieces: dict[int, tuple[int, int]] = {}  # start -> (end, checksum)
        self._verified = False

    def add(self, first: int, data: Array, wanted: tuple[int, int]) -> None:
        """Take in bytes that were read.

        first: their place in the window.
        wanted: the bytes of the array that they belong to.  When all of these were read, what else is in the window
            is read too: its checksum is of all or of nothing.
        """
        if self._verified:
            return
        flat = data.reshape(-1).view(np.uint8).data
        with self._lock:
            gaps = self._gaps(first, first + len(flat))
        sums = [(start, end, zlib.crc32(flat[start - first : end - first])) for start, end in gaps]
        with self._lock:
            for start, end, crc in sums:
                if self._gaps(start, end) == [(start, end)]:  # no other thread has read it meanwhile
                    self._insert(start, end, crc)
            if self._verified or self._gaps(*wanted):
                return
            for start, end in self._gaps(0, self._window.length):
                for at in range(start, end, _PIECE):
                    piece = self._window.read(at, min(_PIECE, end - at))
                    self._insert(at, at + len(piece), zlib.crc32(piece))
            self._verified = True
            if self._pieces.get(0, (0, 0)) != (self._window.length, self._crc):
                raise damaged(self._window)

    def _gaps(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return what of an interval was not read yet."""
        found, at = [], first
        index = max(bisect_right(self._starts, first) - 1, 0)
        while at < last and index < len(self._starts) and self._starts[index] < last:
            start = self._starts[index]
            if start > at:
                found.append((at, start))
            at = max(at, self._pieces[start][0])
            index += 1
        return [*found, (at, last)] if at < last else found

    def _insert(self, start: int, end: int, crc: int) -> None:
        """Take in a piece that overlaps none, and join it with its neighbours."""
        index = bisect_right(self._starts, start)
        if index and self._pieces[self._starts[index - 1]][0] == start:
            index -= 1
            before = self._starts.pop(index)
            start, crc = before, combined(self._pieces.pop(before)[1], crc, end - start)
        if index < len(self._starts) and self._starts[index] == end:
            after, other = self._pieces.pop(self._starts.pop(index))
            crc, end = combined(crc, other, after - end), after
        self._starts.insert(index, start)
        self._pieces[start] = (end, crc)


class Checked(Span):
    """A span of bytes whose checksum, or that of the storage around them, is known."""

    def __init__(self, checksum: Checksum, offset: int, span: Span) -> None:
        """offset: of the span in the window of the checksum, in bytes."""
        super().__init__(span.file, span.offset, span.shape, span.dtype)
        self._checksum, self._within = checksum, offset

    def read(self, first: int, last: int) -> Array:
        out = super().read(first, last)
        place = self._within + first * self.dtype.itemsize
        self._checksum.add(place, out, (self._within, self._within + self.nbytes))
        return out


def verify(data: bytes, window: Window, crc: int | None) -> bytes:
    """Return all bytes of a window, whose checksum is held to `crc`; None: the archive has no checksums."""
    if crc is not None and zlib.crc32(data) != crc:
        raise damaged(window)
    return data


def damaged(window: Window) -> InputError:
    """Return the error of bytes that are not those that were written."""
    return InputError(f"{window.file.path} is damaged (a checksum is wrong): fetch or write it again")


def combined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two pieces, one after the other, from theirs; `length` bytes are in the second."""
    return _product(_power(length), first) ^ second


@lru_cache(maxsize=256)
def _power(count: int) -> int:
    """Return x to the power of 8 * count, modulo the polynomial of CRC-32."""
    result, square = _ONE, _ONE >> 8
    while count:
        if count & 1:
            result = _product(square, result)
        square = _product(square, square)
        count >>= 1
    return result


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials modulo that of CRC-32."""
    result = 0
    for shift in range(31, -1, -1):
        if a >> shift & 1:
            result ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result
