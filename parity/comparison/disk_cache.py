"""A cache of tensors on disk, because two passes over a large model would not fit in memory."""

import ctypes
import gc
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from parity.checkpoints.layout import Array

MAX_BYTES_IN_MEMORY = 64 << 20  # smaller results are not worth a file


class DiskCache(Mapping[str, Array]):
    """Read-only mapping of names to arrays in an unnamed temporary file; each access reads the file again."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._file = tempfile.TemporaryFile()
        weakref.finalize(self, self._file.close)  # closing it removes it
        self._entries: dict[str, tuple[int, np.dtype, tuple[int, ...]]] = {}
        for name, array in arrays.items():
            self._entries[name] = self._file.tell(), array.dtype, array.shape
            self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def __getitem__(self, name: str) -> Array:
        start, dtype, shape = self._entries[name]
        array = np.empty(shape, dtype)
        self._file.seek(start)
        self._file.readinto(array.reshape(-1).view(np.uint8).data)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries


def available_memory() -> int:
    """Return the bytes of memory that new processes can use."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def release_memory(nbytes: int) -> None:
    """Return freed memory to the system, if more than `MAX_BYTES_IN_MEMORY` was freed.

    glibc keeps the memory of freed tensors, and the next pass allocates more.
    """
    if nbytes <= MAX_BYTES_IN_MEMORY:
        return
    gc.collect()  # hooks make reference cycles that keep tensors alive
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def cache_on_disk(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return the same arrays, on disk if they take more than `MAX_BYTES_IN_MEMORY`."""
    return arrays if bytes_in_memory(arrays) <= MAX_BYTES_IN_MEMORY else DiskCache(arrays)


def bytes_in_memory(arrays: Mapping[str, Array]) -> int:
    """Return the size of arrays in memory in bytes; 0 for those on disk."""
    return 0 if isinstance(arrays, DiskCache) else sum(array.nbytes for array in arrays.values())
