"""Arrays that are compressed, decompressed as they are read."""

import zlib
from threading import Lock
from typing import Any

import numpy as np

from parity.checkpoints.containers.container import File, Stored
from parity.checkpoints.layout import Array
from vit_spec import InputError

_PIECE = 2**18  # bytes read at once
_FIRST = 2**12  # and at first, when only a header is wanted


class Inflated:
    """A deflated file in another file.  What was read once is decompressed again: only reading on is fast.

    start, packed: where it begins, and its bytes there.
    size, crc: its bytes once decompressed, and their checksum.
    """

    def __init__(self, file: File, start: int, packed: int, size: int, crc: int) -> None:
        self.file, self._start, self._packed, self._size, self._crc = file, start, packed, size, crc
        self._lock = Lock()
        self._decompressor: Any  # made when it is needed: a file may hold very many arrays
        self._rewind()

    def head(self, count: int) -> bytes:
        """Return the first bytes, at most `count`."""
        out = np.empty(min(count, self._size), np.uint8)
        self.fill(out, 0)
        self._rewind()
        return out.tobytes()

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Stored:
        """Return what lies at `offset` as an array."""
        return _Inflated(self, offset, shape, dtype)

    def fill(self, out: Array, offset: int) -> None:
        """Fill an array of bytes with those at `offset`; verify the checksum if they are the last.

        Raises:
            InputError: compressed bytes that are damaged, or that are fewer or more than was said.
        """
        with self._lock:
            try:
                if offset < self._at:
                    self._rewind()
                self._decompressor = self._decompressor or zlib.decompressobj(-zlib.MAX_WBITS)
                while self._at < offset:
                    self._inflate(min(offset - self._at, _PIECE))
                done = 0
                while done < out.size:
                    data = self._inflate(min(out.size - done, _PIECE))
                    out[done : done + len(data)] = np.frombuffer(data, np.uint8)
                    done += len(data)
                if self._at == self._size:
                    if self._sum != self._crc or self._more():
                        raise zlib.error("its checksum or its length is wrong")
                    self._rewind()
            except zlib.error as error:
                self._rewind()
                raise InputError(f"{self.file.path} is damaged ({error}): fetch or write it again") from None

    def _rewind(self) -> None:
        self._at = self._read = self._sum = 0
        self._waiting = b""
        self._decompressor = None

    def _inflate(self, count: int) -> bytes:
        """Return the next bytes, at least one and at most `count`."""
        while True:
            data = self._waiting or self._next()
            out: bytes = self._decompressor.decompress(data, count)
            self._waiting = self._decompressor.unconsumed_tail
            if out:
                self._at, self._sum = self._at + len(out), zlib.crc32(out, self._sum)
                return out
            if self._decompressor.eof or not data:
                raise zlib.error("it ends too early")

    def _next(self) -> bytes:
        piece = min(max(self._read, _FIRST), _PIECE)
        data = self.file.read(self._start + self._read, min(self._packed - self._read, piece))
        self._read += len(data)
        return data

    def _more(self) -> bool:
        """Whether anything follows the last byte."""
        while not self._decompressor.eof:
            data = self._waiting or self._next()
            if self._decompressor.decompress(data, 1) or not data:
                return True
            self._waiting = self._decompressor.unconsumed_tail
        return self._read < self._packed or bool(self._decompressor.unused_data)


class _Inflated(Stored):
    def __init__(self, source: Inflated, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._source, self._offset, self.shape, self.dtype = source, offset, shape, dtype

    def read(self, first: int, last: int) -> Array:
        out = np.empty(last - first, self.dtype)
        self._source.fill(out.view(np.uint8), self._offset + first * self.dtype.itemsize)
        return out
