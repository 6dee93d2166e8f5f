"""The interface of containers: how arrays are read from and written to a file or folder.

Opening a container returns `Contents`: every array by its key path, with shape and dtype from the headers; the data are
read on demand.  Writing goes through a `Writer`, one piece of an array at a time.  A conversion therefore never holds a
whole model in memory.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from stat import S_ISREG
from typing import Any, Protocol
from weakref import finalize

import numpy as np

from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.layout import Array
from vit_spec import InputError

KeyPath = tuple[str, ...]  # the keys that lead to an array in nested dictionaries; one key in a flat container


LFS_START = b"version https://git-lfs.github.com/spec/v1"


def refuse_lfs_pointer(path: Path, head: bytes) -> None:
    """Raise InputError if a file, which begins with `head`, is the small text file that Git LFS has in its place."""
    if head.startswith(LFS_START):
        raise InputError(f"{path} is a pointer of Git LFS, without the weights: fetch them with `git lfs pull`")


class StoredArray(ABC):
    """An array in a file: shape and dtype are known, and its data are read on demand."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_assumed_zero: bool = False  # the file has no data of the array, as if its writer left out arrays of zeros

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * self.dtype.itemsize

    @property
    def span_bytes(self) -> int:
        """Number of bytes in the file from the first to the last element: more than `nbytes` if there are gaps."""
        return self.nbytes

    @abstractmethod
    def read(self, start: int, stop: int) -> Array:
        """Return the elements from `start` up to but excluding `stop`, in C order, as a new array (stop - start,).

        Raises:
            InputError: the file is damaged, or was changed since it was opened; the message has its path.
        """

    def __getitem__(self, index: Any) -> Any:
        """Read the whole array and index it as numpy does."""
        return np.asarray(self)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array = self.read(0, self.size).reshape(self.shape)
        return array if dtype is None else array.astype(dtype, copy=False)


class ContiguousArray(StoredArray):
    """An uncompressed array whose bytes are contiguous in a file.

    It is read and not memory-mapped: if another process truncates a mapped file, its reader is killed by SIGBUS.
    """

    def __init__(self, file: "File", offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.file, self.offset, self.shape, self.dtype = file, offset, shape, dtype
        if offset < 0 or offset + self.nbytes > file.size:
            raise InputError(f"{file.path} ends before its arrays do, or is damaged: fetch or write it again")

    def read(self, start: int, stop: int) -> Array:
        out = np.empty(stop - start, self.dtype)
        self.file.read_into(out, self.offset + start * self.dtype.itemsize)
        return out

    def memmap(self) -> Array:
        """Return all elements as a memory map (size,).  No other process may write to the file."""
        return np.memmap(self.file.path, self.dtype, "r", self.offset, (self.size,))


class File:
    """A file open for reads at any offset and from any thread; closed when it is garbage-collected."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # With O_NONBLOCK, opening a pipe does not wait for a process that writes to it.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        status = os.fstat(self._descriptor)
        if not S_ISREG(status.st_mode):
            os.close(self._descriptor)
            raise InputError(f"{path} is not a regular file: give the path of a checkpoint")
        self.size, self._modified = status.st_size, status.st_mtime_ns
        finalize(self, os.close, self._descriptor)  # not __del__: at interpreter exit, os.close may already be gone
        refuse_lfs_pointer(path, self.read(0, len(LFS_START)))

    def read_into(self, out: Array, offset: int) -> None:
        """Fill an array with the bytes at `offset`.

        Raises:
            InputError: the file was truncated or written to since it was opened.
        """
        buffer = out.reshape(-1).view(np.uint8).data
        while buffer:
            count = os.preadv(self._descriptor, [buffer], offset)
            if count == 0:
                what = f"{self.path} was truncated while it was read"
                raise InputError(f"{what}: wait until it is complete, then start again")
            buffer, offset = buffer[count:], offset + count
        if os.fstat(self._descriptor).st_mtime_ns != self._modified:
            what = f"{self.path} was written to while it was read"
            raise InputError(f"{what}: wait until it is complete, then start again")

    def read(self, offset: int, count: int) -> bytes:
        """Return `count` bytes at `offset`, or fewer at the end of the file."""
        return os.pread(self._descriptor, count, offset)


@dataclass(frozen=True, slots=True)
class FileSlice:
    """A byte range of a file, read as if it were a file of its own.

    file: the file.
    start, length: offset and size of the range, in bytes.
    """

    file: File
    start: int
    length: int

    @classmethod
    def whole(cls, file: File) -> "FileSlice":
        """Return the slice that is the whole file."""
        return cls(file, 0, file.size)

    def read(self, offset: int, count: int) -> bytes:
        """Return `count` bytes at `offset` in the slice, fewer at the end of the slice, and b"" outside of it."""
        is_inside = 0 <= offset < self.length
        return self.file.read(self.start + offset, min(count, self.length - offset)) if is_inside else b""


@dataclass(frozen=True)
class Contents:
    """The contents of a file or folder.

    container: the name of the container.
    arrays: key path -> array.
    metadata: all other text, numbers and booleans, by key path joined with "/": "config", "args/model", "epoch".
    """

    container: str
    arrays: dict[KeyPath, StoredArray]
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ArraySpec:
    """The shape and dtype of an array to be written."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def shape_and_dtype(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype as a tuple, to compare with those of an array that was read."""
        return self.shape, self.dtype


class Writer(Protocol):
    """Writes arrays into a new container, piece by piece."""

    def write(self, key: str, start: int, values: Array) -> None:
        """Write elements `start`, `start + 1`, ... in C order of the array at `key`.

        The pieces of an array must come in order, and the arrays in the order of the specs, unless the container has
        `any_order`: then pieces may come in any order and from several threads.

        Args:
            key: a key of the specs.
            start: index of the first element.
            values: the elements, one-dimensional, contiguous, of the spec's dtype.
        """


class Opener(Protocol):
    """A function that opens a container."""

    def __call__(self, path: Path, budget: Budget | None = None, /) -> Contents:
        """Read the headers of a file or folder; see `Container`."""


@dataclass(frozen=True)
class Container:
    """A file format or folder layout that stores named arrays.

    name: its name on the command line.
    description: one line for the documentation.
    recognises: returns whether a path is in this format, judged by content alone.  Takes a file and its first 4096
        bytes, or a folder and b"".
    open: reads the headers within a budget, by default a new one.  Raises InputError, with the path and what to do, if
        the file is damaged or hostile, or has contents that cannot be read.
    suffixes: the suffixes of its files; () for a folder layout, which must be selected by name.
    create: returns a context manager that writes a new file or folder.  Takes a path that does not exist (the caller
        renames it when all is written), the specs by key in writing order, and the metadata as text.  When the context
        ends without an exception, everything is written.
    any_order: whether pieces may be written in any order and from several threads; see `Writer.write`.
    stores_metadata: whether `create` stores the metadata; if not, the caller writes them to a file beside it.
    data_files: returns the files of a folder that hold its arrays; None for containers of one file.
    entry_pattern: a regular expression for the paths of all files and folders in its folders; those of folders end in "/".
        A folder with any other file or folder is never replaced.
    """

    name: str
    description: str
    recognises: Callable[[Path, bytes], bool]
    open: Opener
    suffixes: tuple[str, ...]
    create: Callable[[Path, Mapping[str, ArraySpec], Mapping[str, str]], AbstractContextManager[Writer]]
    any_order: bool = False
    stores_metadata: bool = False
    data_files: Callable[[Path], Iterable[Path]] | None = None
    entry_pattern: str = ""
