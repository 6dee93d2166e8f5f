"""The types that every data source uses: lazily read images, their targets, and the splits that a source returns.

A source returns `DatasetSplits`, in which each split is `Examples` made from an `ImageReader`.  `splitting` turns them into
a `Dataset`.  Nothing here decodes an image or builds a list of all names before it is needed, and everything that worker
processes receive pickles cheaply.

A complete source, as a guide: pets:PATH reads the photographs PATH/cat-1.jpg, PATH/dog-1.jpg and so on.

    from pathlib import Path

    import numpy as np

    from train.data.sources.examples import UNSPLIT, DatasetSplits, ImageFiles, make_examples
    from vit_spec import InputError

    def open_splits(place: str) -> DatasetSplits:
        folder = Path(place)
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder: give pets:PATH with PATH/CLASS-NUMBER.jpg inside")
        names = sorted(path.name for path in folder.glob("*-*.jpg"))
        classes, targets = np.unique([name.split("-")[0] for name in names], return_inverse=True)
        train = make_examples(ImageFiles(folder, names), targets.astype(np.int64))
        return DatasetSplits(str(folder), {UNSPLIT: lambda: train}, "classes", tuple(map(str, classes)))
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from train.data.sources.decoding import decode, error_text
from train.data.sources.files import raise_if_inaccessible
from train.recipes import Task
from vit_spec import InputError

Targets = NDArray[np.int64] | NDArray[np.float32]
NamedFiles = Sequence[tuple[str, str]]
T = TypeVar("T")

UNSPLIT = ""  # the name of the only split, where data comes without splits


@dataclass(frozen=True)
class Examples:
    """Images with their targets.

    read: decodes image i, in mode L or RGB; raises `InputError` naming the image if it cannot be read.  It pickles cheaply,
        because it opens its files where it reads them.
    targets: (N,) int64 class numbers; (N, K) float32 of 0 and 1 for labels; (N, K) float32 for values.
    names: the name of image i in messages.
    notes: defaults and assumptions that the user should know of, a sentence each.
    files: (name, path) of each file that the images come from.  The name does not change when the data set is moved or
        copied.
    rows: (N,) int64, the indices of the examples among the images in these files; None: all, in order.
    groups: (N,) int64, the same numbers in all splits: images of one group, such as a patient's, stay on one side where a
        share is held out.  None: the data has no groups.
    """

    read: Callable[[int], Image.Image]
    targets: Targets
    names: Sequence[str]
    notes: tuple[str, ...] = ()
    files: NamedFiles = ()
    rows: NDArray[np.int64] | None = None
    groups: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: ArrayLike) -> "Examples":
        """Return the examples at these indices, in their order."""
        chosen = np.asarray(rows, np.int64)
        names = LazyNames(partial(_get_row, self.names.__getitem__, chosen), len(chosen))
        original_rows = chosen if self.rows is None else self.rows[chosen]
        groups = None if self.groups is None else self.groups[chosen]
        read = partial(_get_row, self.read, chosen)
        return Examples(read, self.targets[chosen], names, files=self.files, rows=original_rows, groups=groups)


@dataclass(frozen=True)
class DatasetSplits:
    """The result of opening a data source: its splits, before held-out images are chosen.

    place: the path or name of the data, for messages.
    splits: a function for each split that returns its `Examples`, called only if the split is used; by the split's name in
        the data ("train", "val", "test" and the like; see `splitting.SPLIT_NAMES`), or `UNSPLIT` alone.
    task: the kind of targets.
    classes: the names of the classes, labels or values.
    size: (height, width) of the images, if all are alike and it is known without decoding any; else None.
    notes: defaults and assumptions that the user should know of, a sentence each.
    advice: what else to do if each class has one image, so that the targets may not be meant as classes; "" for nothing.
    """

    place: str
    splits: Mapping[str, Callable[[], Examples]]
    task: Task
    classes: tuple[str, ...]
    size: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    advice: str = ""


@dataclass(frozen=True)
class Dataset:
    """A data set with training and held-out images.

    task: the kind of targets.
    classes: the names of the classes, labels or values.
    channels: 1 for grey, 3 for colour, as in the first image.
    size: (height, width) of the images, if all are assumed to be alike: `DatasetSplits.size`, or the size of the first
        image if that is small; else None.
    notes: defaults and assumptions that the user should know of, a sentence each.
    split: the name of the split that is held out; None: a share of the training images.
    """

    train: Examples
    held_out: Examples
    task: Task
    classes: tuple[str, ...]
    channels: int
    size: tuple[int, int] | None
    notes: tuple[str, ...]
    split: str | None = None


class ImageReader(Protocol):
    """Images by index, and their names.  It pickles small, because it opens its files where it reads them.

    files: see `Examples`.
    """

    @property
    def files(self) -> NamedFiles: ...

    def __call__(self, i: int) -> Image.Image: ...

    def name(self, i: int) -> str: ...


class ImageRows(Protocol):
    """Images (H, W) or (H, W, 3) uint8 by index: an array, or `files.FileRows`."""

    def __getitem__(self, i: int, /) -> NDArray[np.uint8]: ...


class LazyName:
    """The name of one image, computed only when it is converted to text."""

    def __init__(self, reader: ImageReader, i: int) -> None:
        self._reader, self._i = reader, i

    def __str__(self) -> str:
        return self._reader.name(self._i)


def make_examples(reader: ImageReader, targets: Targets, notes: tuple[str, ...] = ()) -> Examples:
    """Return the images of a reader with their targets."""
    return Examples(reader, targets, LazyNames(reader.name, len(targets)), notes, reader.files)


def name_files(paths: Iterable[str | Path], part: str = "") -> NamedFiles:
    """Return (name, path) of files: the name is the path below their common folder, and empty for a single file.

    part: which part of the files the images are, if not all; it is added to the names.
    """
    several = list(dict.fromkeys(map(str, paths)))
    if len(several) < 2:
        return [(part, path) for path in several]
    root = os.path.commonpath(several)
    return [(f"{os.path.relpath(path, root)}{f' {part}' if part else ''}", path) for path in several]


def shared_groups(one: Examples, other: Examples) -> list[tuple[int, int]]:
    """Return the index of an image of each of two sets of examples, for each group that is in both."""
    if one.groups is None or other.groups is None:
        return []
    _, rows, other_rows = np.intersect1d(one.groups, other.groups, return_indices=True)
    return list(zip(rows.tolist(), other_rows.tolist(), strict=True))


class LazyNames(Sequence[str]):
    """Names that are computed when they are read: a list of a million names would take a hundred megabytes."""

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


class PackedStrings(Sequence[str]):
    """Many short strings, such as paths, in one block of bytes: a tenth of the size of str objects, and quick to pickle."""

    def __init__(self, strings: Iterable[str]) -> None:
        block, ends = bytearray(), [0]
        for string in strings:
            block += os.fsencode(string)
            ends.append(len(block))
        self._block, self._ends = bytes(block), np.array(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self._ends[1:].tolist():  # four times as fast as indexing
            yield os.fsdecode(self._block[start:end])
            start = end

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        rows = range(len(self))[i]
        return [self[row] for row in rows] if isinstance(rows, range) else self._decode(rows)

    def _decode(self, row: int) -> str:
        return os.fsdecode(self._block[self._ends[row] : self._ends[row + 1]])


class LazyValue(Generic[T]):
    """A value that each process computes when it first needs it; only the function that computes it is pickled."""

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute = compute
        self._value: T | None = None

    def __call__(self) -> T:
        if self._value is None:
            self._value = self._compute()
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyValue, (self._compute,)


class ImageFiles:
    """An `ImageReader` of one file per image, given by their paths below a folder."""

    def __init__(self, root: Path, paths: Iterable[str]) -> None:
        self._root, self._paths = str(root), PackedStrings(paths)

    def __call__(self, i: int) -> Image.Image:
        name = self.name(i)
        return decode(name, name)

    def name(self, i: int) -> str:
        return os.path.join(self._root, self._paths[i])

    @property
    def files(self) -> NamedFiles:
        """(name, path) of each image's file; the name is its path below the folder."""
        return _NamedImageFiles(self)

    def named_file(self, i: int) -> tuple[str, str]:
        """Return the path of image i below the folder, and its whole path."""
        return self._paths[i], self.name(i)

    def iterate_named_files(self) -> Iterator[tuple[str, str]]:
        """Yield `named_file` of every image."""
        for path in self._paths:
            yield path, os.path.join(self._root, path)

    def __len__(self) -> int:
        return len(self._paths)


class _NamedImageFiles(Sequence[tuple[str, str]]):
    """(name, path) of `ImageFiles`, computed when read: a list of a million pairs would take two hundred megabytes."""

    def __init__(self, files: ImageFiles) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return self._files.iterate_named_files()

    @overload
    def __getitem__(self, i: int) -> tuple[str, str]: ...
    @overload
    def __getitem__(self, i: slice) -> list[tuple[str, str]]: ...
    def __getitem__(self, i: int | slice) -> tuple[str, str] | list[tuple[str, str]]:
        rows = range(len(self))[i]
        return [self[row] for row in rows] if isinstance(rows, range) else self._files.named_file(rows)


class ArrayImages:
    """An `ImageReader` of the rows of an array, (N, H, W) or (N, H, W, 3) uint8, in memory or in a file.

    load: returns the array or its rows; called once in each process, and only when an image is read.
    label: precedes an image's number in its name.
    files: see `Examples`.
    """

    def __init__(self, load: Callable[[], ImageRows], label: str, files: NamedFiles = ()) -> None:
        self._rows, self._label, self.files = LazyValue(load), label, files

    def __call__(self, i: int) -> Image.Image:
        rows = self._rows()
        try:
            return Image.fromarray(rows[i])
        except (OSError, EOFError) as error:
            raise_if_inaccessible(error, self.name(i))
            raise InputError(
                f"{self.name(i)} cannot be read ({error_text(error)}): fetch or write the file again"
            ) from None

    def name(self, i: int) -> str:
        return f"{self._label} {i}"


def _get_row(get: Callable[[int], T], rows: NDArray[np.int64], i: int) -> T:
    return get(int(rows[i]))
