"""`npz:FILE`: arrays by name in one file, in the layout of MedMNIST or of Keras.

MedMNIST (https://medmnist.com): train_images, train_labels, and the same with val and test; labels (N, 1) are class
numbers, (N, K) are 0 or 1 for each of K labels.  Keras (its mnist.npz): x_train, y_train, x_test, y_test.  Images are
(N, H, W) or (N, H, W, 3), uint8.

What lies uncompressed in the file (numpy.savez) is mapped, and then shared by all processes; what is compressed
(numpy.savez_compressed) is unpacked into the memory of each process that reads images.
"""

import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.data.sources.decoding import said
from train.data.sources.examples import Answers, Examples, Pixels, examples, stored
from train.data.sources.files import stretch, unless_damaged
from train.data.sources.splitting import Found, numbered
from train.recipes import Task
from vit_spec import InputError

_LAYOUTS = ("{}_images", "{}_labels"), ("x_{}", "y_{}")
_SMALL, _DENSE = 1 << 28, 64  # bytes that any array may become, and times its compressed size besides
_METHODS = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
# What zipfile and numpy raise of damaged files; numpy parses headers as Python.
_DAMAGED_ZIP = (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
_DAMAGED_HEADER = (tokenize.TokenError, SyntaxError, MemoryError)
_EXPECTED = "train_images and train_labels (MedMNIST), or x_train and y_train (Keras)"


class _Header(NamedTuple):
    """What an .npy file begins with; see https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, file: IO[bytes]) -> "_Header":
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        return cls(*read(file))


def find(place: str) -> Found:
    """Look into a file; its images stay there.

    Raises:
        InputError: no such file, a damaged one, or one with other names or shapes.
    """
    path = Path(place).expanduser()
    if not path.is_file():
        raise InputError(f"{path} is not a file: give npz:FILE with {_EXPECTED}")
    with _opened(path) as file:
        names = {name.removesuffix(".npy") for name in file.namelist()}
    for images, labels in _LAYOUTS:
        splits = [split for split in ("train", "val", "test") if {images.format(split), labels.format(split)} <= names]
        if splits:
            break
    else:
        raise InputError(f"{path} holds {', '.join(sorted(names)[:8]) or 'nothing'}: expected {_EXPECTED}")

    first = _part(path, images.format(splits[0]), labels.format(splits[0]))

    def part(split: str) -> Examples:
        found = _part(path, images.format(split), labels.format(split))
        if found.answers.shape[1:] != first.answers.shape[1:]:
            both = f"{first.answers.shape} and {labels.format(split)} {found.answers.shape}"
            raise InputError(f"{path} has {labels.format(splits[0])} {both}: as many columns are needed in both")
        return found

    def asked(split: str) -> Callable[[], Examples]:
        return lambda: part(split)

    kind: Task = "labels" if first.answers.ndim == 2 else "classes"
    classes = tuple(map(str, range(first.answers.shape[1]))) if kind == "labels" else numbered(first.answers, path)
    parts = {splits[0]: lambda: first, **{split: asked(split) for split in splits[1:]}}
    height, width = _header(path, images.format(splits[0])).shape[1:3]
    return Found(str(path), parts, kind, classes, (height, width))


def _part(path: Path, images: str, labels: str) -> Examples:
    header, answers = _header(path, images), _answers(path, labels)
    if header.dtype != np.uint8 or (len(header.shape) != 3 and header.shape[3:] not in ((1,), (3,))):
        raise InputError(
            f"{path} has {images} {header.shape} {header.dtype}: expected (N, height, width) or (N, height, width, 3) uint8"
        )
    if len(answers) != header.shape[0]:
        raise InputError(f"{path} has {header.shape[0]:,} {images} but {len(answers):,} {labels}: one for each is needed")
    return examples(Pixels(partial(_array, path, images), f"{path} {images}", stored([path], images)), answers)


def _answers(path: Path, name: str) -> Answers:
    count, size = math.prod(_header(path, name).shape), path.stat().st_size
    if count > size:
        raise InputError(f"{path} has {count:,} {name} in {size:,} bytes, which no images fit into: fetch it again")
    with _opened(path) as file:
        labels = _whole(path, file, name)
    if labels.dtype.kind not in "biu" or labels.ndim not in (1, 2) or not labels.shape[-1]:
        raise InputError(f"{path} has {name} {labels.shape} {labels.dtype}: expected whole numbers, (N,), (N, 1) or (N, K)")
    if labels.ndim == 2 and labels.shape[1] > 1:
        return labels.astype(np.float32)
    return labels.reshape(-1).astype(np.int64)


def _whole(path: Path, file: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """Read an array into memory, which numpy would take before it knows how much is there."""
    info = file.getinfo(f"{name}.npy")
    if info.file_size > _SMALL + _DENSE * info.compress_size:
        raise InputError(f"{path} has {name} of {info.file_size:,} bytes, which no images compress to so few")
    with file.open(info) as member:
        header = _Header.of(member)
        if not header.dtype.hasobject and math.prod(header.shape) * header.dtype.itemsize + member.tell() != info.file_size:
            raise InputError(f"{path} has {name} {header.shape} of {header.dtype} in {info.file_size:,} bytes: replace it")
    with file.open(info) as member:
        return np.asarray(np.lib.format.read_array(member, allow_pickle=False))


def _header(path: Path, name: str) -> _Header:
    """Return what the header of an array says, without the array."""
    with _opened(path) as file, file.open(f"{name}.npy") as member:
        return _Header.of(member)


def _array(path: Path, name: str) -> NDArray[np.uint8]:
    """Return an array, mapped if it lies in the file as it is."""
    with _opened(path) as file:
        info = file.getinfo(f"{name}.npy")
        with file.open(info) as member:
            if info.compress_type != zipfile.ZIP_STORED:
                return _without_one(_whole(path, file, name))
            header, inside = _Header.of(member), member.tell()
        # The zip's own header ahead of a member has two parts of any length.
        named, extra = struct.unpack("<HH", stretch(str(path), info.header_offset + 26, 4))
        offset = info.header_offset + 30 + named + extra + inside
        data = np.memmap(path, np.uint8, "r")[offset : offset + math.prod(header.shape)]
    return _without_one(data.reshape(header.shape, order="F" if header.fortran else "C"))


def _without_one(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return (N, H, W, 1) as (N, H, W)."""
    return array[..., 0] if array.ndim == 4 and array.shape[3] == 1 else array


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a file of arrays; what zipfile and numpy say of a damaged one becomes one line."""
    try:
        with zipfile.ZipFile(path) as file:
            if any(info.compress_type not in _METHODS for info in file.infolist()):  # others zipfile unpacks without limit
                raise InputError(f"{path} is compressed in a way that numpy does not write: save it with numpy.savez")
            yield file
    except InputError:
        raise
    except (*_DAMAGED_ZIP, *_DAMAGED_HEADER) as error:
        unless_damaged(error, path)
        raise InputError(f"{path} cannot be read ({said(error)}): expected an npz file, as numpy.savez writes it") from None
