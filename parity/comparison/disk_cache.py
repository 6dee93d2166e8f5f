"""Tensors that wait on disk: all of a pass over a large model would not fit in memory twice."""

import ctypes
import gc
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping

import numpy as np

from parity.comparison.tolerances import Array

SMALL = 64 << 20  # bytes that may as well stay in memory


class Spool(Mapping[str, Array]):
    """Arrays by name, in a file without one; each is read anew when it is asked for."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._file = tempfile.TemporaryFile()
        weakref.finalize(self, self._file.close)  # which removes it
        self._places: dict[str, tuple[int, np.dtype, tuple[int, ...]]] = {}
        for name, array in arrays.items():
            self._places[name] = self._file.tell(), array.dtype, array.shape
            self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def __getitem__(self, name: str) -> Array:
        start, dtype, shape = self._places[name]
        array = np.empty(shape, dtype)
        self._file.seek(start)
        self._file.readinto(array.reshape(-1).view(np.uint8).data)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places


def give_back(nbytes: int) -> None:
    """Return to the system what is free, if that is much: glibc keeps freed tensors, and the next pass asks for more."""
    if nbytes <= SMALL:
        return
    gc.collect()  # hooks make cycles, which hold tensors
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def spooled(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return arrays on disk, or as they are if they are small."""
    return arrays if size(arrays) <= SMALL else Spool(arrays)


def size(arrays: Mapping[str, Array]) -> int:
    """Return the bytes of arrays in memory; of those on disk 0."""
    return 0 if isinstance(arrays, Spool) else sum(array.nbytes for array in arrays.values())
