"""What a source hands over: images that are read when asked for, the answers to them, and what they are called."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from train.data.sources.decoding import decode
from train.recipes import Task

Answers = NDArray[np.int64] | NDArray[np.float32]
Stored = Sequence[tuple[str, str]]
T = TypeVar("T")


@dataclass(frozen=True)
class Examples:
    """Images with what a model should answer.

    read: gives image i in mode L or RGB; raises `InputError` naming the image when it cannot be read.  It pickles cheaply:
        files are opened where they are read.
    answers: (N,) int64 class numbers; (N, K) float32 of 0 and 1 for labels; (N, K) float32 for values.
    names: what image i is called in messages.
    notes: what was decided about these images without being asked, a sentence each.
    files: name and path of each file that the images lie in; the name is what stays where the data set is moved or copied.
    rows: which of the images of these files they are, (N,) int64; None: all, in order.
    """

    read: Callable[[int], Image.Image]
    answers: Answers
    names: Sequence[str]
    notes: tuple[str, ...] = ()
    files: Stored = ()
    rows: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.answers)

    def take(self, rows: ArrayLike) -> "Examples":
        """Return the examples of these rows, in their order."""
        chosen = np.asarray(rows, np.int64)
        names = Names(partial(_taken, self.names.__getitem__, chosen), len(chosen))
        among = chosen if self.rows is None else self.rows[chosen]
        return Examples(partial(_taken, self.read, chosen), self.answers[chosen], names, files=self.files, rows=among)


@dataclass(frozen=True)
class Source:
    """A data set: what is trained on, what is held out, and what a model should know about it.

    kind: what the answers are.
    classes: the names of the classes, labels or values.
    channels: 1 grey, 3 colour, as the first image is.
    size: height and width of the images where all are alike and small: known without decoding one, or of the first.
    notes: what was decided about the data without being asked, a sentence each.
    split: which split of the data is held out; None: a share of the training images.
    """

    train: Examples
    held_out: Examples
    kind: Task
    classes: tuple[str, ...]
    channels: int
    size: tuple[int, int] | None
    notes: tuple[str, ...]
    split: str | None = None


class Reader(Protocol):
    """Images by number, and what they are called.  Pickled it is small, for it opens its files where it reads them.

    files: as of `Examples`.
    """

    @property
    def files(self) -> Stored: ...

    def __call__(self, i: int) -> Image.Image: ...

    def name(self, i: int) -> str: ...


class Name:
    """What an image of a reader is called, found out when somebody asks."""

    def __init__(self, reader: Reader, i: int) -> None:
        self._reader, self._i = reader, i

    def __str__(self) -> str:
        return self._reader.name(self._i)


def examples(reader: Reader, answers: Answers, notes: tuple[str, ...] = ()) -> Examples:
    """The images of a reader with their answers."""
    return Examples(reader, answers, Names(reader.name, len(answers)), notes, reader.files)


def stored(paths: Iterable[str | Path], what: str = "") -> Stored:
    """Return files with what their paths have below their common folder for names; one file alone may have any.

    what: which part of the files the images are, if not all.
    """
    several = list(dict.fromkeys(map(str, paths)))
    if len(several) < 2:
        return [(what, path) for path in several]
    root = os.path.commonpath(several)
    return [(f"{os.path.relpath(path, root)}{f' {what}' if what else ''}", path) for path in several]


class Names(Sequence[str]):
    """Names that are made when asked for: a million of them at once would take a hundred megabytes."""

    def __init__(self, name: Callable[[int], str], count: int) -> None:
        self._name, self._count = name, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        rows = range(self._count)[i]
        return [self._name(row) for row in rows] if isinstance(rows, range) else self._name(rows)


class Texts(Sequence[str]):
    """Many short texts, such as paths, in one block of bytes: a tenth of the objects' size, and pickled at once."""

    def __init__(self, texts: Iterable[str]) -> None:
        block, ends = bytearray(), [0]
        for text in texts:
            block += os.fsencode(text)
            ends.append(len(block))
        self._block, self._ends = bytes(block), np.array(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self._ends[1:].tolist():  # four times as fast as by number
            yield os.fsdecode(self._block[start:end])
            start = end

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        rows = range(len(self))[i]
        return [self[row] for row in rows] if isinstance(rows, range) else self._text(rows)

    def _text(self, row: int) -> str:
        return os.fsdecode(self._block[self._ends[row] : self._ends[row + 1]])


class Lazy(Generic[T]):
    """Something that each process makes for itself when it first needs it; pickled, only the recipe goes along."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: T | None = None

    def __call__(self) -> T:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __reduce__(self) -> tuple[Any, ...]:
        return Lazy, (self._make,)


class Files:
    """Images that are files of their own, by their paths below a folder."""

    def __init__(self, root: Path, paths: Iterable[str]) -> None:
        self._root, self._paths = str(root), Texts(paths)

    def __call__(self, i: int) -> Image.Image:
        name = self.name(i)
        return decode(name, name)

    def name(self, i: int) -> str:
        return os.path.join(self._root, self._paths[i])

    @property
    def files(self) -> Stored:
        """Each image's file by its path below the folder."""
        return _Below(self)

    def stored(self, i: int) -> tuple[str, str]:
        """Return the path of image i below the folder, and the path itself."""
        return self._paths[i], self.name(i)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield what `stored` returns of every image."""
        for path in self._paths:
            yield path, os.path.join(self._root, path)

    def __len__(self) -> int:
        return len(self._paths)


class _Below(Sequence[tuple[str, str]]):
    """The files of `Files`: a million pairs at once would take two hundred megabytes."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return self._files.pairs()

    @overload
    def __getitem__(self, i: int) -> tuple[str, str]: ...
    @overload
    def __getitem__(self, i: slice) -> list[tuple[str, str]]: ...
    def __getitem__(self, i: int | slice) -> tuple[str, str] | list[tuple[str, str]]:
        rows = range(len(self))[i]
        return [self[row] for row in rows] if isinstance(rows, range) else self._files.stored(rows)


class Pixels:
    """Images that are the rows of an array, (N, H, W) or (N, H, W, 3) uint8.

    load: gives the array; called once in each process, and not before an image is read.
    where: what the array is called in messages.
    files: as of `Examples`.
    """

    def __init__(self, load: Callable[[], NDArray[np.uint8]], where: str, files: Stored = ()) -> None:
        self._array, self._where, self.files = Lazy(load), where, files

    def __call__(self, i: int) -> Image.Image:
        return Image.fromarray(self._array()[i])

    def name(self, i: int) -> str:
        return f"{self._where} {i}"


def _taken(get: Callable[[int], T], rows: NDArray[np.int64], i: int) -> T:
    return get(int(rows[i]))
