"""Writing a file in which the place of every array is known beforehand, in any order and from several threads."""

import errno
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np

from parity.checkpoints.containers.container import Sink, Slot
from parity.checkpoints.layout import Array
from vit_spec import InputError


@dataclass(frozen=True)
class Place:
    """Where an array goes in a file.

    slot: the array.
    offsets: of its parts, mostly one.
    entries: how many entries each part but the last has.
    """

    slot: Slot
    offsets: Sequence[int]
    entries: int = sys.maxsize


@contextmanager
def placed(path: Path, size: int, headers: Sequence[tuple[int, bytes]], places: Mapping[str, Place]) -> Iterator[Sink]:
    """Write a new file of `size` bytes: the headers, each at its offset, at once, and the arrays as they are put.

    Raises:
        InputError: there is no room for it, which is known before anything is put.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        reserve(descriptor, path, size)
        for offset, text in headers:
            _write(descriptor, memoryview(text), offset)
        sink = _Placed(descriptor, places)
        yield sink
        if sink.missing:
            raise ValueError(f"{sink.missing} bytes of {path} were never put")
    finally:
        os.close(descriptor)


class _Placed:
    """The sink."""

    def __init__(self, descriptor: int, places: Mapping[str, Place]) -> None:
        self._descriptor, self._places, self._lock = descriptor, places, Lock()
        self.missing = sum(place.slot.nbytes for place in places.values())

    def put(self, key: str, first: int, entries: Array) -> None:
        place = self._places[key]
        itemsize = place.slot.dtype.itemsize
        if entries.dtype != place.slot.dtype or (first + entries.size) * itemsize > place.slot.nbytes:
            raise ValueError(f"{entries.size} entries of {entries.dtype} from {first} do not fit {key}, {place.slot}")
        with self._lock:
            self.missing -= entries.nbytes
        while entries.size:
            part, start = divmod(first, place.entries)
            piece = entries[: place.entries - start]
            _write(self._descriptor, piece.view(np.uint8).data, place.offsets[part] + start * itemsize)
            first, entries = first + piece.size, entries[piece.size :]


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:  # one call writes 2 GiB at most
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def reserve(descriptor: int, path: Path, size: int) -> None:
    """Give a new file its size, and the room for it where the file system can promise that."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except (OSError, AttributeError) as error:  # AttributeError: macOS has no such function
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            what = f"{path} takes {size} bytes, for which there is no room ({error.strerror})"
            raise InputError(f"{what}: make room, or write it elsewhere") from None
        os.ftruncate(descriptor, size)
