"""A container: how arrays lie in a file or a folder, whatever model and whatever names they belong to.

Reading gives `Contents`: every array by its path, known from headers alone and read when it is asked for.
Writing goes through a `Sink`, a piece of an array at a time.  So a conversion never holds a model.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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

Words = tuple[str, ...]  # the path of an array in a nested container; a flat one has paths of one word


class Stored(ABC):
    """An array that is known and not yet read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Number of entries."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * self.dtype.itemsize

    @abstractmethod
    def read(self, first: int, last: int) -> Array:
        """Return entries `first` to `last` in C order, (last - first,), as a new array.

        Raises:
            InputError: a file that is damaged, or that changed since it was opened; names it.
        """

    def __getitem__(self, index: Any) -> Any:
        """Read the array, and index it as numpy does."""
        return np.asarray(self)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        whole = self.read(0, self.size).reshape(self.shape)
        return whole if dtype is None else whole.astype(dtype, copy=False)


class Span(Stored):
    """Bytes that lie in a file one after the other.

    They are read and not mapped: a mapped file that another process cuts short kills its reader with SIGBUS.
    """

    def __init__(self, file: "File", offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.file, self.offset, self.shape, self.dtype = file, offset, shape, dtype
        if offset < 0 or offset + self.nbytes > file.size:
            raise InputError(f"{file.path} ends before its arrays do, or is damaged: fetch or write it again")

    def read(self, first: int, last: int) -> Array:
        out = np.empty(last - first, self.dtype)
        self.file.read_into(out, self.offset + first * self.dtype.itemsize)
        return out

    def mapped(self) -> Array:
        """Return all entries without reading them, of a file that nobody else writes to."""
        return np.memmap(self.file.path, self.dtype, "r", self.offset, (self.size,))


class File:
    """A file open for reading at any place, by any thread; closed when nothing refers to it any more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # which does not wait for who writes to a pipe
        status = os.fstat(self._descriptor)
        if not S_ISREG(status.st_mode):
            os.close(self._descriptor)
            raise InputError(f"{path} is no file: give the path of weights")
        self.size, self._modified = status.st_size, status.st_mtime_ns
        finalize(self, os.close, self._descriptor)  # and no __del__: at the interpreter's end it finds no os.close any more

    def read_into(self, out: Array, offset: int) -> None:
        """Fill an array with the bytes at `offset`.

        Raises:
            InputError: a file that somebody writes to meanwhile.
        """
        buffer = out.reshape(-1).view(np.uint8).data
        while buffer:
            count = os.preadv(self._descriptor, [buffer], offset)
            if count == 0:
                what = f"{self.path} was cut short while it was read"
                raise InputError(f"{what}: wait until it is complete, then start again")
            buffer, offset = buffer[count:], offset + count
        if os.fstat(self._descriptor).st_mtime_ns != self._modified:
            what = f"{self.path} was written to while it was read"
            raise InputError(f"{what}: wait until it is complete, then start again")

    def read(self, offset: int, count: int) -> bytes:
        """Return `count` bytes at `offset`; fewer where the file ends."""
        return os.pread(self._descriptor, count, offset)


@dataclass(frozen=True, slots=True)
class Window:
    """Some bytes of a file, as if they were one."""

    file: File
    start: int
    length: int

    @classmethod
    def of(cls, file: File) -> "Window":
        """Return the whole file."""
        return cls(file, 0, file.size)

    def read(self, offset: int, count: int) -> bytes:
        """Return `count` bytes at `offset` of the window; fewer where it ends, none outside."""
        inside = 0 <= offset < self.length
        return self.file.read(self.start + offset, min(count, self.length - offset)) if inside else b""


@dataclass(frozen=True)
class Contents:
    """What is in a file or folder.

    container: the name of the container.
    arrays: path -> array.
    notes: what else it holds that is text, number or flag, by path joined with "/": "config", "args/model", "epoch".
    """

    container: str
    arrays: dict[Words, Stored]
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Slot:
    """An array to be written."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def facts(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """What of the array is known once it is written."""
        return self.shape, self.dtype


class Sink(Protocol):
    """A container being written."""

    def put(self, key: str, first: int, entries: Array) -> None:
        """Write entries `first`, `first + 1`, ... in C order of the array at `key`.

        entries: one-dimensional, contiguous, of the slot's dtype.
        A key's entries come in order, and keys in the order of the slots, unless the container says `any_order`:
        then in any order and from several threads.
        """


class Opener(Protocol):
    """What reads the headers of a container."""

    def __call__(self, path: Path, budget: Budget | None = None, /) -> Contents:
        """Return what a file or folder holds; see `Container`."""


@dataclass(frozen=True)
class Container:
    """A kind of file or folder.

    name, what: as on the command line; one line for a person.
    recognises: whether a path (a file with its first 4096 bytes, or a folder and b"") is one, judged by content alone.
    open: read its headers, within a budget (by default a new one).  Raises InputError: damaged, hostile, or holding what
        cannot be read; names path and remedy.
    suffixes: what names of such files end in; () for a folder, which has to be asked for by name.
    create: write one at a path that is free (the caller renames it when all is well): slots by key, in the order in
        which they are written, and the notes to carry, as text.  The context, left without an exception, has written all.
    any_order: see `Sink.put`.
    carries_notes: whether what is written has room for the notes; otherwise the caller keeps them beside it.
    entries: a regular expression of what a folder of it holds; one that holds anything else is never replaced.
    """

    name: str
    what: str
    recognises: Callable[[Path, bytes], bool]
    open: Opener
    suffixes: tuple[str, ...]
    create: Callable[[Path, Mapping[str, Slot], Mapping[str, str]], AbstractContextManager[Sink]]
    any_order: bool = False
    carries_notes: bool = False
    entries: str = ""
