"""A writer of files whose layout is known in advance: arrays may be written in any order and from several threads."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np

from parity.checkpoints.containers.container import ArraySpec, Writer
from parity.checkpoints.layout import Array
from vit_spec import InputError
from vit_spec.errors import DISK_FULL_ERRNOS


@dataclass(frozen=True)
class Placement:
    """Where an array goes in a file.

    spec: shape and dtype of the array.
    offsets: byte offset of each chunk of the array; usually there is one chunk.
    chunk_size: number of elements in each chunk except the last.
    """

    spec: ArraySpec
    offsets: Sequence[int]
    chunk_size: int = sys.maxsize


@contextmanager
def preallocated_file(
    path: Path, size: int, headers: Sequence[tuple[int, bytes]], placements: Mapping[str, Placement]
) -> Iterator[Writer]:
    """Create a file of `size` bytes, write its headers, and yield a writer for its arrays.

    Args:
        path: the file, which does not exist yet.
        size: size of the file in bytes.
        headers: offset and bytes of everything except the arrays.
        placements: key -> place of the array in the file.

    Raises:
        InputError: the disk has too little free space; raised before anything is written.
        ValueError: when the context ends, some bytes of the arrays were not written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        reserve_space(descriptor, path, size)
        for offset, text in headers:
            _write(descriptor, memoryview(text), offset)
        writer = _PreallocatedWriter(descriptor, placements)
        yield writer
        if writer.unwritten_bytes:
            raise ValueError(f"{writer.unwritten_bytes} bytes of {path} were never written")
    finally:
        os.close(descriptor)


class _PreallocatedWriter:
    """The `Writer` of a preallocated file."""

    def __init__(self, descriptor: int, placements: Mapping[str, Placement]) -> None:
        self._descriptor, self._placements, self._lock = descriptor, placements, Lock()
        self.unwritten_bytes = sum(placement.spec.nbytes for placement in placements.values())

    def write(self, key: str, start: int, values: Array) -> None:
        placement = self._placements[key]
        itemsize = placement.spec.dtype.itemsize
        if values.dtype != placement.spec.dtype or (start + values.size) * itemsize > placement.spec.nbytes:
            raise ValueError(f"{values.size} elements of {values.dtype} from {start} do not fit {key}, {placement.spec}")
        with self._lock:
            self.unwritten_bytes -= values.nbytes
        while values.size:
            chunk, start_in_chunk = divmod(start, placement.chunk_size)
            piece = values[: placement.chunk_size - start_in_chunk]
            _write(self._descriptor, piece.view(np.uint8).data, placement.offsets[chunk] + start_in_chunk * itemsize)
            start, values = start + piece.size, values[piece.size :]


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:  # one call writes at most 2 GiB
        num_written = os.pwrite(descriptor, data, offset)
        data, offset = data[num_written:], offset + num_written


def reserve_space(descriptor: int, path: Path, size: int) -> None:
    """Set the size of a new file, and reserve the disk space if the file system can.

    Raises:
        InputError: there is too little free space.
    """
    try:
        os.posix_fallocate(descriptor, 0, size)
    except (OSError, AttributeError) as error:  # AttributeError: macOS has no such function
        if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
            what = f"{path} needs {size} bytes of disk space, which are not free ({error.strerror})"
            raise InputError(f"{what}: make room, or write to another disk") from None
        os.ftruncate(descriptor, size)
