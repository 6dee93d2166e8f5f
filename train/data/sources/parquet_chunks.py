"""Random access to single values of a Parquet column of byte strings, without decompressing the values around them.

Parquet (https://parquet.apache.org/docs/file-format/) stores the images of a row group in pages.  Writers often make a
single page of 10 to 100 MB, and in a random order each image would decompress a whole page.  Here the first access to a
column chunk builds an index of its values.  From then on an uncompressed value is one read of its bytes.  Of a large Snappy
page only the blocks that contain the value are decompressed, because Snappy compresses each 64 KB independently
(https://github.com/google/snappy/blob/main/format_description.txt).  Small pages, and pages in other codecs, are
decompressed whole and kept in a cache of limited size.
"""

import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.data.sources.decoding import error_text
from train.data.sources.files import read_range

_SMALL_PAGE = 4 << 20  # bytes of a page up to which it is decompressed whole and cached
_CACHE_BYTES = 256 << 20  # of decompressed pages, in each process
_MAX_RATIO = 64  # of decompressed to compressed size, beyond _CACHE_BYTES
_MAX_PAGE_BYTES = (1 << 31) - 1  # Parquet's limit; writers often put all images of a row group into one page
_HEADER_BYTES = (1 << 14, 1 << 24)  # of a page header, which may quote values: read at first, and at most
_MAX_VARINT_SHIFT = 63  # offset of the last seven bits
_SNAPPY_BLOCK = 1 << 16  # bytes that Snappy compresses independently

_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3  # parquet.thrift, PageType
_PLAIN, _PLAIN_DICTIONARY, _RLE_DICTIONARY = 0, 2, 8  # parquet.thrift, Encoding


class UnreadableChunk(ValueError):
    """A column chunk that is damaged or in an unsupported form; the message says what is wrong."""


class ColumnChunk(NamedTuple):
    """The location of a column chunk, and its metadata.

    offset, size: its range of bytes in the file.
    uncompressed_size: its bytes after decompression.
    codec: pyarrow's name.
    max_level: the highest definition level of the column.
    """

    path: str
    offset: int
    size: int
    uncompressed_size: int
    rows: int
    codec: str
    max_level: int


@dataclass(frozen=True)
class _Page:
    """The location of the compressed values of a page.

    offset, size: their range of bytes in the file.
    uncompressed_size: their bytes after decompression.
    block_offsets: offsets of Snappy's blocks, from `offset`; None if the page is decompressed whole.
    """

    offset: int
    size: int
    uncompressed_size: int
    codec: str
    block_offsets: NDArray[np.int64] | None


class ChunkValues:
    """The values of a column chunk by row: bytes, or None for a null."""

    def __init__(self, chunk: ColumnChunk) -> None:
        self._path = chunk.path
        self._pages: list[_Page] = []
        locations: list[NDArray[np.int64]] = []  # of each row: page, offset in it, size; size -1 for a null
        dictionary = np.zeros((0, 3), np.int64)
        _limit_expansion(chunk.size, chunk.uncompressed_size)
        for page in _iterate_pages(chunk):
            if (
                page.count > chunk.rows
                or page.uncompressed_size > chunk.uncompressed_size
                or not 0 <= page.levels_size <= page.uncompressed_size
            ):
                raise UnreadableChunk("its page headers are damaged")
            codec = chunk.codec if page.compressed else "UNCOMPRESSED"
            data = read_range(chunk.path, page.start, page.end - page.start, _MAX_PAGE_BYTES)
            levels, packed = data[: page.levels_size], data[page.levels_size :]
            body = _decompress(packed, page.uncompressed_size - page.levels_size, codec)
            if page.kind == _DICTIONARY_PAGE:
                dictionary = self._index_plain_values(body, 0, page.count)
                self._add_page(page.start, packed, body, codec)
                continue
            present, offset = _rows_with_value(levels, body, page, chunk.max_level)
            rows = np.full((page.count, 3), -1, np.int64)
            if page.encoding == _PLAIN:
                rows[present] = self._index_plain_values(body, offset, int(present.sum()))
                self._add_page(page.start + page.levels_size, packed, body, codec)
            elif page.encoding in (_PLAIN_DICTIONARY, _RLE_DICTIONARY):
                rows[present] = dictionary[_decode_hybrid(body, offset + 1, body[offset], int(present.sum()))]
            else:
                raise UnreadableChunk(f"its pages are in encoding {page.encoding}")
            locations.append(rows)
        self._locations = np.concatenate(locations)
        if len(self) != chunk.rows:
            raise UnreadableChunk(f"it has {len(self)} of {chunk.rows} rows")

    def __len__(self) -> int:
        return len(self._locations)

    def __getitem__(self, row: int) -> bytes | None:
        number, start, size = self._locations[row].tolist()
        return None if size < 0 else self._read_range(self._pages[number], start, start + size)

    def _index_plain_values(self, body: bytes, offset: int, count: int) -> NDArray[np.int64]:
        """Return (page, offset, size) of each PLAIN value of the next page to be added; a length precedes each value."""
        locations, length = np.empty((count, 3), np.int64), struct.Struct("<I").unpack_from
        for i in range(count):
            (size,) = length(body, offset)
            locations[i] = len(self._pages), offset + 4, size
            offset += 4 + size
        if offset > len(body):
            raise UnreadableChunk("its values are longer than their page")
        return locations

    def _add_page(self, offset: int, packed: bytes, body: bytes, codec: str) -> None:
        block_offsets = _snappy_block_offsets(packed) if codec == "SNAPPY" and len(body) > _SMALL_PAGE else None
        self._pages.append(_Page(offset, len(packed), len(body), codec, block_offsets))

    def _read_range(self, page: _Page, start: int, end: int) -> bytes:
        """Return bytes `start` to `end` of a decompressed page."""
        if page.codec == "UNCOMPRESSED":
            return read_range(self._path, page.offset + start, end - start)
        if page.block_offsets is None:
            body = _PAGE_CACHE.get((self._path, page.offset), lambda: self._read_page(page))
            return body[start:end]
        first, last = start // _SNAPPY_BLOCK, -(-end // _SNAPPY_BLOCK)
        begin, stop = int(page.block_offsets[first]), int(page.block_offsets[last])
        size = min(last * _SNAPPY_BLOCK, page.uncompressed_size) - first * _SNAPPY_BLOCK
        packed = _write_varint(size) + read_range(self._path, page.offset + begin, stop - begin)
        return _decompress(packed, size, "SNAPPY")[start - first * _SNAPPY_BLOCK : end - first * _SNAPPY_BLOCK]

    def _read_page(self, page: _Page) -> bytes:
        return _decompress(
            read_range(self._path, page.offset, page.size, _MAX_PAGE_BYTES), page.uncompressed_size, page.codec
        )


class _PageCache:
    """A least-recently-used cache of decompressed pages.  max_bytes: of all pages together; one page is kept even so."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._used, self._lock = max_bytes, 0, threading.Lock()
        self._pages: OrderedDict[Any, bytes] = OrderedDict()

    def get(self, key: Any, load: Any) -> bytes:
        """Return the page of a key, from `load()` if it is not in the cache."""
        with self._lock:
            if key in self._pages:
                self._pages.move_to_end(key)
                return self._pages[key]
        page: bytes = load()
        with self._lock:
            if key not in self._pages:
                self._pages[key] = page
                self._used += len(page)
            while self._used > self._max_bytes and len(self._pages) > 1:
                self._used -= len(self._pages.popitem(last=False)[1])
        return page


_PAGE_CACHE = _PageCache(_CACHE_BYTES)


def check_page_sizes(chunk: ColumnChunk) -> None:
    """Refuse a column chunk whose pages together decompress to far more than its size, by the headers of the pages.

    Raises:
        UnreadableChunk, EOFError, OSError: such a chunk, or a damaged one.
    """
    _limit_expansion(chunk.size, sum(max(page.uncompressed_size, 0) for page in _iterate_pages(chunk)))


def _limit_expansion(size: int, uncompressed_size: int) -> None:
    if uncompressed_size > _CACHE_BYTES + _MAX_RATIO * size:
        raise UnreadableChunk(f"{size:,} bytes would become {uncompressed_size:,}, which no images do")


# Pages ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PageHeader:
    """A page header, with the page's range of bytes in its file.

    kind: the page type.
    count: values, with nulls.
    levels_size: bytes of uncompressed definition levels in front of the compressed values.
    """

    kind: int
    count: int
    encoding: int
    start: int
    end: int
    uncompressed_size: int
    levels_size: int
    compressed: bool


def _iterate_pages(chunk: ColumnChunk) -> Iterator[_PageHeader]:
    """Yield the headers of the pages of a chunk that contain values or a dictionary, without reading the pages."""
    offset, chunk_end = chunk.offset, chunk.offset + chunk.size
    window, window_start = b"", offset
    while offset < chunk_end:
        for size in (0, *_HEADER_BYTES):  # 0: small pages may all be in the window of the last header
            if size:
                window, window_start = read_range(chunk.path, offset, min(size, chunk_end - offset)), offset
            try:
                fields, position = _read_thrift_struct(window, offset - window_start)
                break
            except IndexError:  # the header does not end in the window
                continue
        else:
            raise UnreadableChunk("its page headers are damaged")
        if not {1, 3} <= fields.keys():  # kind and size of the page
            raise UnreadableChunk("its page headers are damaged")
        offset = window_start + position
        end = offset + fields[3]
        if end > chunk_end or fields[3] < 0:
            raise UnreadableChunk("its pages are cut short")
        if (kind := fields[1]) in (_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2):
            detail = fields[{_DATA_PAGE: 5, _DICTIONARY_PAGE: 7, _DATA_PAGE_V2: 8}[kind]]
            second = fields[1] == _DATA_PAGE_V2
            levels_size = detail[5] + detail[6] if second else 0
            encoding = detail[4 if second else 2]
            compressed = detail.get(7, True) if second else True
            yield _PageHeader(fields[1], detail[1], encoding, offset, end, fields[2], levels_size, compressed)
        offset = end


def _rows_with_value(levels: bytes, body: bytes, page: _PageHeader, max_level: int) -> tuple[NDArray[np.bool_], int]:
    """Return which rows of a page are not null, (N,) bool, and the offset of the values in its decompressed body."""
    if not max_level:
        return np.ones(page.count, bool), 0
    width = max_level.bit_length()
    if page.kind == _DATA_PAGE_V2:
        return _decode_hybrid(levels, 0, width, page.count) == max_level, 0
    (size,) = struct.unpack_from("<I", body)
    return _decode_hybrid(body, 4, width, page.count) == max_level, 4 + size


def _decode_hybrid(data: bytes, offset: int, width: int, count: int) -> NDArray[np.int64]:
    """Read `count` integers of `width` bits from runs of a repeated integer and runs of bit-packed integers.

    https://parquet.apache.org/docs/file-format/data-pages/encodings/, "Run Length Encoding / Bit-Packing Hybrid".
    """
    parts: list[NDArray[np.int64]] = []
    left, size = count, -(-width // 8)
    while left > 0:
        head, offset = _read_varint(data, offset)
        if head & 1:
            length = (head >> 1) * width
            bits = np.unpackbits(np.frombuffer(data, np.uint8, length, offset), bitorder="little").reshape(
                -1, max(width, 1)
            )
            parts.append(bits[:left] @ (1 << np.arange(width, dtype=np.int64)))
            offset += length
            left -= (head >> 1) * 8
        else:
            parts.append(np.full(min(head >> 1, left), int.from_bytes(data[offset : offset + size], "little"), np.int64))
            offset += size
            left -= head >> 1
            if not head >> 1:
                raise UnreadableChunk("it has an empty run")
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


# Bytes ----------------------------------------------------------------------------------------------------------------


def _decompress(data: bytes, size: int, codec: str) -> bytes:
    if codec == "UNCOMPRESSED":
        return data
    import pyarrow as pa

    try:
        return bytes(pa.Codec(_CODECS.get(codec, codec.lower())).decompress(data, decompressed_size=size, asbytes=True))
    except (OSError, ValueError) as error:
        raise UnreadableChunk(f"its pages cannot be unpacked ({error_text(error)})") from None


_CODECS = {"LZ4": "lz4_raw"}  # the other codecs have the same name in files and in pyarrow


def _snappy_block_offsets(data: bytes) -> NDArray[np.int64] | None:
    """Return the offset of each block in Snappy data, and the end of the last; None if a copy refers to an earlier block.

    Each element begins with a tag byte: two bits for its kind, six for its length or for the number of bytes of its length.
    """
    size, offset = _read_varint(data, 0)
    offsets, out, end, edge = [offset], 0, len(data), _SNAPPY_BLOCK
    while offset < end:
        tag = data[offset]
        kind = tag & 3
        if kind == 0:
            length, extra = (tag >> 2) + 1, 0
            if length > 60:
                extra = length - 60
                length = int.from_bytes(data[offset + 1 : offset + 1 + extra], "little") + 1
            offset += 1 + extra + length
        else:
            length = 4 + (tag >> 2 & 7) if kind == 1 else (tag >> 2) + 1
            extra = (0, 1, 2, 4)[kind]
            distance = int.from_bytes(data[offset + 1 : offset + 1 + extra], "little") | (tag >> 5 << 8 if kind == 1 else 0)
            if distance > out % _SNAPPY_BLOCK:
                return None
            offset += 1 + extra
        out += length
        if out == edge:
            offsets.append(offset)
            edge += _SNAPPY_BLOCK
        elif out > edge:
            return None
    if out % _SNAPPY_BLOCK:
        offsets.append(offset)
    return np.array(offsets, np.int64) if out == size and offset == end else None


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Read a varint, seven bits per byte, lowest first; return it and the offset behind it."""
    value = shift = 0
    while True:
        byte = data[offset]
        if shift > _MAX_VARINT_SHIFT:
            raise UnreadableChunk("it has a number of more than 64 bits")
        value, shift, offset = value | (byte & 127) << shift, shift + 7, offset + 1
        if byte < 128:
            return value, offset


def _write_varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def _read_thrift_struct(data: bytes, offset: int) -> tuple[dict[int, Any], int]:
    """Read a struct of Thrift's compact protocol; return its fields by number, and the offset behind it.

    Fields are integers, booleans and structs; binary fields are skipped.

    https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
    """
    fields: dict[int, Any] = {}
    number = 0
    while head := data[offset]:
        offset += 1
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            raw, offset = _read_varint(data, offset)
            number = raw >> 1 ^ -(raw & 1)
        if kind in (1, 2):
            fields[number] = kind == 1
        elif kind in (4, 5, 6):
            raw, offset = _read_varint(data, offset)
            fields[number] = raw >> 1 ^ -(raw & 1)
        elif kind == 8:
            size, offset = _read_varint(data, offset)
            offset += size
        elif kind == 12:
            fields[number], offset = _read_thrift_struct(data, offset)
        else:
            raise UnreadableChunk(f"its page headers have a field of kind {kind}")
    return fields, offset + 1
