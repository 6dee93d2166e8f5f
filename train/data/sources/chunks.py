"""Single values out of a Parquet column of byte strings, without unpacking the values around them.

Parquet (https://parquet.apache.org/docs/file-format/) packs the images of a row group into pages, and writers make one
page of them: 10 to 100 MB, which would be unpacked for each image of a random order.  Here the first look at a column chunk
notes where each value lies.  From then on an uncompressed value is one read of its bytes, and of a large page in Snappy
only the blocks that the value lies in are unpacked: it compresses each 64 KB on their own
(https://github.com/google/snappy/blob/main/format_description.txt).  Pages that are small, or in another codec, are
unpacked whole and kept while there is room.
"""

import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.data.sources.decoding import said
from train.data.sources.files import stretch

_WHOLE = 4 << 20  # bytes of a page that is unpacked at once and kept
_ROOM = 256 << 20  # bytes of unpacked pages that are kept in a process
_DENSE = 64  # bytes that a packed one may become, besides
_BLOCK = 1 << 16  # bytes that Snappy compresses on their own

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3  # parquet.thrift, PageType
_PLAIN, _PLAIN_DICTIONARY, _RLE_DICTIONARY = 0, 2, 8  # parquet.thrift, Encoding


class Unreadable(ValueError):
    """A chunk in a form that is not read here, or a damaged one; the message says what."""


class Chunk(NamedTuple):
    """Where a column chunk lies, and what its file says of it.

    size, unpacked: its bytes as they are, and unpacked.
    codec: as pyarrow names it.
    levels: the column's highest definition level.
    """

    path: str
    start: int
    size: int
    unpacked: int
    rows: int
    codec: str
    levels: int


@dataclass(frozen=True)
class _Page:
    """Where the values of a page lie, packed.  cuts: of Snappy's blocks; None where the page is unpacked whole."""

    start: int
    packed: int
    unpacked: int
    codec: str
    cuts: NDArray[np.int64] | None


class Values:
    """The values of a column chunk by row, each bytes, or None where there is none."""

    def __init__(self, chunk: Chunk) -> None:
        self._path = chunk.path
        self._pages: list[_Page] = []
        places: list[NDArray[np.int64]] = []  # of each row: page, start in it, size; size -1 where there is none
        dictionary = np.zeros((0, 3), np.int64)
        if chunk.unpacked > _ROOM + _DENSE * chunk.size:
            raise Unreadable(f"{chunk.size:,} bytes would become {chunk.unpacked:,}, which no images do")
        data = stretch(chunk.path, chunk.start, chunk.size)
        for page in _pages(data):
            if page.count > chunk.rows or page.unpacked > chunk.unpacked or not 0 <= page.levels <= page.unpacked:
                raise Unreadable("its page headers are damaged")
            codec = chunk.codec if page.compressed else "UNCOMPRESSED"
            levels = data[page.start : page.start + page.levels]
            packed = data[page.start + page.levels : page.end]
            body = _unpack(packed, page.unpacked - page.levels, codec)
            if page.kind == _DICTIONARY:
                dictionary = self._values(body, 0, page.count)
                self._keep(chunk.start + page.start, packed, body, codec)
                continue
            there, at = _present(levels, body, page, chunk.levels)
            found = np.full((page.count, 3), -1, np.int64)
            if page.encoding == _PLAIN:
                found[there] = self._values(body, at, int(there.sum()))
                self._keep(chunk.start + page.start + page.levels, packed, body, codec)
            elif page.encoding in (_PLAIN_DICTIONARY, _RLE_DICTIONARY):
                found[there] = dictionary[_hybrid(body, at + 1, body[at], int(there.sum()))]
            else:
                raise Unreadable(f"its pages are in encoding {page.encoding}")
            places.append(found)
        self._places = np.concatenate(places)
        if len(self) != chunk.rows:
            raise Unreadable(f"it has {len(self)} of {chunk.rows} rows")

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, row: int) -> bytes | None:
        number, start, size = self._places[row].tolist()
        return None if size < 0 else self._stretch(self._pages[number], start, start + size)

    def _values(self, body: bytes, at: int, count: int) -> NDArray[np.int64]:
        """Return page, start and size of PLAIN values in the page that comes next; each has its length ahead."""
        places, length = np.empty((count, 3), np.int64), struct.Struct("<I").unpack_from
        for i in range(count):
            (size,) = length(body, at)
            places[i] = len(self._pages), at + 4, size
            at += 4 + size
        if at > len(body):
            raise Unreadable("its values are longer than their page")
        return places

    def _keep(self, start: int, packed: bytes, body: bytes, codec: str) -> None:
        cuts = _cuts(packed) if codec == "SNAPPY" and len(body) > _WHOLE else None
        self._pages.append(_Page(start, len(packed), len(body), codec, cuts))

    def _stretch(self, page: _Page, start: int, end: int) -> bytes:
        """Return bytes `start` to `end` of an unpacked page."""
        if page.codec == "UNCOMPRESSED":
            return stretch(self._path, page.start + start, end - start)
        if page.cuts is None:
            body = _RECENT.get((self._path, page.start), lambda: self._whole(page))
            return body[start:end]
        first, last = start // _BLOCK, -(-end // _BLOCK)
        begin, stop = int(page.cuts[first]), int(page.cuts[last])
        size = min(last * _BLOCK, page.unpacked) - first * _BLOCK
        packed = _varint(size) + stretch(self._path, page.start + begin, stop - begin)
        return _unpack(packed, size, "SNAPPY")[start - first * _BLOCK : end - first * _BLOCK]

    def _whole(self, page: _Page) -> bytes:
        return _unpack(stretch(self._path, page.start, page.packed), page.unpacked, page.codec)


class _Recent:
    """The pages that were used last, within so many bytes."""

    def __init__(self, room: int) -> None:
        self._room, self._used, self._lock = room, 0, threading.Lock()
        self._kept: OrderedDict[Any, bytes] = OrderedDict()

    def get(self, key: Any, make: Any) -> bytes:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made: bytes = make()
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self._used += len(made)
            while self._used > self._room and len(self._kept) > 1:
                self._used -= len(self._kept.popitem(last=False)[1])
        return made


_RECENT = _Recent(_ROOM)


# Pages ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Header:
    """A page: what it is, and where it lies in its chunk; levels: bytes of definition levels ahead of what is packed."""

    kind: int
    count: int
    encoding: int
    start: int
    end: int
    unpacked: int
    levels: int
    compressed: bool


def _pages(data: bytes) -> Iterator[_Header]:
    """Yield the pages of a chunk that hold values or a dictionary."""
    at = 0
    while at < len(data):
        try:
            fields, at = _thrift(data, at)
        except IndexError:
            raise Unreadable("its page headers are damaged") from None
        end = at + fields[3]
        detail = fields.get({_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}.get(fields[1], 0))
        if end > len(data) or fields[3] < 0:
            raise Unreadable("its pages are cut short")
        if detail is not None:
            second = fields[1] == _DATA_V2
            levels = detail[5] + detail[6] if second else 0
            encoding = detail[4 if second else 2]
            yield _Header(
                fields[1], detail[1], encoding, at, end, fields[2], levels, detail.get(7, True) if second else True
            )
        at = end


def _present(levels: bytes, body: bytes, page: _Header, highest: int) -> tuple[NDArray[np.bool_], int]:
    """Return which rows of a page have a value, (N,) bool, and where in its body the values begin."""
    if not highest:
        return np.ones(page.count, bool), 0
    width = highest.bit_length()
    if page.kind == _DATA_V2:
        return _hybrid(levels, 0, width, page.count) == highest, 0
    (size,) = struct.unpack_from("<I", body)
    return _hybrid(body, 4, width, page.count) == highest, 4 + size


def _hybrid(data: bytes, at: int, width: int, count: int) -> NDArray[np.int64]:
    """Read `count` numbers of `width` bits: runs of one number, or eight at a time packed bit by bit.

    https://parquet.apache.org/docs/file-format/data-pages/encodings/, "Run Length Encoding / Bit-Packing Hybrid".
    """
    parts: list[NDArray[np.int64]] = []
    left, size = count, -(-width // 8)
    while left > 0:
        head, at = _number(data, at)
        if head & 1:
            length = (head >> 1) * width
            bits = np.unpackbits(np.frombuffer(data, np.uint8, length, at), bitorder="little").reshape(-1, max(width, 1))
            parts.append(bits[:left] @ (1 << np.arange(width, dtype=np.int64)))
            at += length
            left -= (head >> 1) * 8
        else:
            parts.append(np.full(min(head >> 1, left), int.from_bytes(data[at : at + size], "little"), np.int64))
            at += size
            left -= head >> 1
            if not head >> 1:
                raise Unreadable("it has an empty run")
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


# Bytes ----------------------------------------------------------------------------------------------------------------


def _unpack(data: bytes, size: int, codec: str) -> bytes:
    if codec == "UNCOMPRESSED":
        return data
    import pyarrow as pa

    try:
        return bytes(pa.Codec(_CODECS.get(codec, codec.lower())).decompress(data, decompressed_size=size, asbytes=True))
    except (OSError, ValueError) as error:
        raise Unreadable(f"its pages cannot be unpacked ({said(error)})") from None


_CODECS = {"LZ4": "lz4_raw"}  # the others go by one name in files and in pyarrow


def _cuts(data: bytes) -> NDArray[np.int64] | None:
    """Return where each block of Snappy's data begins, and where the last ends; None where a copy reaches out of its block.

    Elements begin with a tag: two bits for the kind, the others for the length or for how many bytes it takes.
    """
    size, at = _number(data, 0)
    cuts, out, end, edge = [at], 0, len(data), _BLOCK
    while at < end:
        tag = data[at]
        kind = tag & 3
        if kind == 0:
            length, extra = (tag >> 2) + 1, 0
            if length > 60:
                extra = length - 60
                length = int.from_bytes(data[at + 1 : at + 1 + extra], "little") + 1
            at += 1 + extra + length
        else:
            length = 4 + (tag >> 2 & 7) if kind == 1 else (tag >> 2) + 1
            extra = (0, 1, 2, 4)[kind]
            offset = int.from_bytes(data[at + 1 : at + 1 + extra], "little") | (tag >> 5 << 8 if kind == 1 else 0)
            if offset > out % _BLOCK:
                return None
            at += 1 + extra
        out += length
        if out == edge:
            cuts.append(at)
            edge += _BLOCK
        elif out > edge:
            return None
    if out % _BLOCK:
        cuts.append(at)
    return np.array(cuts, np.int64) if out == size and at == end else None


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Read a varint: seven bits a byte, the lowest first; return it and where the next thing begins."""
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def _thrift(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """Read a struct of Thrift's compact protocol: numbers, flags and structs by field number; text is passed over.

    https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
    """
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at += 1
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            raw, at = _number(data, at)
            number = raw >> 1 ^ -(raw & 1)
        if kind in (1, 2):
            fields[number] = kind == 1
        elif kind in (4, 5, 6):
            raw, at = _number(data, at)
            fields[number] = raw >> 1 ^ -(raw & 1)
        elif kind == 8:
            size, at = _number(data, at)
            at += size
        elif kind == 12:
            fields[number], at = _thrift(data, at)
        else:
            raise Unreadable(f"its page headers have a field of kind {kind}")
    return fields, at + 1
