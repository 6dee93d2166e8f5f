"""Compressed arrays, decompressed as they are read.

`zipfile.ZipFile` cannot replace this module: it parses the directory again, without a budget and by other rules than
`zip_directory`.  For a file of 97 MB it listed 2,000,000 members (942 MiB, 19 s), where `zip_directory` found one.
`ZipFile.open` also accepts compressed bytes that continue after the declared size, and it is not faster.
"""

import zlib
from threading import Lock
from typing import Any

import numpy as np

from parity.checkpoints.containers.container import File, StoredArray
from parity.checkpoints.layout import Array
from vit_spec import InputError

_MAX_READ_BYTES = 2**18
_MIN_READ_BYTES = 2**12  # the first read is short, because often only the header is needed


class DeflatedFile:
    """A file that is compressed with deflate inside another file.

    Reads in ascending order decompress each byte once; a read at a lower offset starts again from the beginning.

    file: the outer file.
    start, compressed_size: offset and number of the compressed bytes in `file`.
    size, crc: number and CRC-32 of the decompressed bytes.
    """

    def __init__(self, file: File, start: int, compressed_size: int, size: int, crc: int) -> None:
        self.file, self._start, self._compressed_size, self._size, self._crc = file, start, compressed_size, size, crc
        self._lock = Lock()
        self._decompressor: Any  # created on demand, because each takes tens of KB and a file may have very many arrays
        self._rewind()

    def head(self, max_bytes: int) -> bytes:
        """Return the first decompressed bytes, at most `max_bytes`."""
        buffer = np.empty(min(max_bytes, self._size), np.uint8)
        self.fill(buffer, 0)
        self._rewind()
        return buffer.tobytes()

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> StoredArray:
        """Return the decompressed bytes from `offset` as an array."""
        return _DeflatedArray(self, offset, shape, dtype)

    def fill(self, buffer: Array, offset: int) -> None:
        """Fill a uint8 array with the decompressed bytes at `offset`; at the end of the file, verify the checksum.

        Raises:
            InputError: the compressed bytes are damaged, or give fewer or more bytes than declared.
        """
        with self._lock:
            try:
                if offset < self._position:
                    self._rewind()
                self._decompressor = self._decompressor or zlib.decompressobj(-zlib.MAX_WBITS)
                while self._position < offset:
                    self._decompress(min(offset - self._position, _MAX_READ_BYTES))
                filled = 0
                while filled < buffer.size:
                    data = self._decompress(min(buffer.size - filled, _MAX_READ_BYTES))
                    buffer[filled : filled + len(data)] = np.frombuffer(data, np.uint8)
                    filled += len(data)
                if self._position == self._size:
                    if self._running_crc != self._crc or self._has_more():
                        raise zlib.error("its checksum or its length is wrong")
                    self._rewind()
            except zlib.error as error:
                self._rewind()
                raise InputError(f"{self.file.path} is damaged ({error}): fetch or write it again") from None

    def _rewind(self) -> None:
        self._position = self._consumed = self._running_crc = 0
        self._unconsumed = b""
        self._decompressor = None

    def _decompress(self, max_bytes: int) -> bytes:
        """Return the next decompressed bytes, at least one and at most `max_bytes`."""
        while True:
            data = self._unconsumed or self._read_compressed()
            output: bytes = self._decompressor.decompress(data, max_bytes)
            self._unconsumed = self._decompressor.unconsumed_tail
            if output:
                self._position, self._running_crc = self._position + len(output), zlib.crc32(output, self._running_crc)
                return output
            if self._decompressor.eof or not data:
                raise zlib.error("it ends too early")

    def _read_compressed(self) -> bytes:
        wanted = min(max(self._consumed, _MIN_READ_BYTES), _MAX_READ_BYTES)
        data = self.file.read(self._start + self._consumed, min(self._compressed_size - self._consumed, wanted))
        self._consumed += len(data)
        return data

    def _has_more(self) -> bool:
        """Return whether anything follows the declared last byte."""
        while not self._decompressor.eof:
            data = self._unconsumed or self._read_compressed()
            if self._decompressor.decompress(data, 1) or not data:
                return True
            self._unconsumed = self._decompressor.unconsumed_tail
        return self._consumed < self._compressed_size or bool(self._decompressor.unused_data)


class _DeflatedArray(StoredArray):
    def __init__(self, source: DeflatedFile, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._source, self._offset, self.shape, self.dtype = source, offset, shape, dtype

    def read(self, start: int, stop: int) -> Array:
        buffer = np.empty(stop - start, self.dtype)
        self._source.fill(buffer.view(np.uint8), self._offset + start * self.dtype.itemsize)
        return buffer
