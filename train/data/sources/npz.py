"""`npz:FILE`: named arrays in one file, as MedMNIST or Keras lays them out.

MedMNIST (https://medmnist.com): train_images, train_labels, and the same with val and test; labels (N, 1) are class
numbers, labels (N, K) are 0 or 1 for each of K labels.  Keras (its mnist.npz): x_train, y_train, x_test, y_test.  Images
are (N, H, W) or (N, H, W, 3), uint8.

Uncompressed arrays (numpy.savez) are memory-mapped and so shared by all processes.  Compressed arrays
(numpy.savez_compressed) are decompressed into the memory of each process that reads images.
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

from train.data.sources.decoding import error_text
from train.data.sources.examples import ArrayImages, DatasetSplits, Examples, Targets, make_examples, name_files
from train.data.sources.files import raise_if_inaccessible, read_range
from train.data.sources.splitting import numbered_classes
from train.recipes import Task
from vit_spec import InputError

_LAYOUTS = ("{}_images", "{}_labels"), ("x_{}", "y_{}")
_MAX_BYTES, _MAX_RATIO = 1 << 28, 64  # limit of decompressed bytes: the first, plus the second times the compressed size
_METHODS = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
# The exceptions of zipfile and numpy for damaged files; numpy parses headers as Python.
_ZIP_ERRORS = (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
_HEADER_ERRORS = (tokenize.TokenError, SyntaxError, MemoryError)
_EXPECTED = "train_images and train_labels (MedMNIST), or x_train and y_train (Keras)"


class _NpyHeader(NamedTuple):
    """The header of an .npy file; see https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]

    @classmethod
    def read(cls, file: IO[bytes]) -> "_NpyHeader":
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        return cls(*read_header(file))


def open_splits(place: str) -> DatasetSplits:
    """Open a file; its images are not read yet.

    Raises:
        InputError: a missing or damaged file, or arrays of other names or shapes.
    """
    path = Path(place).expanduser()
    if not path.is_file():
        raise InputError(f"{path} is not a file: give npz:FILE with {_EXPECTED}")
    with _open_npz(path) as file:
        names = {name.removesuffix(".npy") for name in file.namelist()}
    for images, labels in _LAYOUTS:
        splits = [split for split in ("train", "val", "test") if {images.format(split), labels.format(split)} <= names]
        if splits:
            break
    else:
        raise InputError(f"{path} holds {', '.join(sorted(names)[:8]) or 'nothing'}: expected {_EXPECTED}")

    first = _load_split(path, images.format(splits[0]), labels.format(splits[0]))

    def load(split: str) -> Examples:
        found = _load_split(path, images.format(split), labels.format(split))
        if found.targets.shape[1:] != first.targets.shape[1:]:
            both = f"{first.targets.shape} and {labels.format(split)} {found.targets.shape}"
            raise InputError(f"{path} has {labels.format(splits[0])} {both}: as many columns are needed in both")
        return found

    def load_later(split: str) -> Callable[[], Examples]:
        return lambda: load(split)

    task: Task = "labels" if first.targets.ndim == 2 else "classes"
    classes = tuple(map(str, range(first.targets.shape[1]))) if task == "labels" else numbered_classes(first.targets, path)
    loaders = {splits[0]: lambda: first, **{split: load_later(split) for split in splits[1:]}}
    height, width = _read_header(path, images.format(splits[0])).shape[1:3]
    return DatasetSplits(str(path), loaders, task, classes, (height, width))


def _load_split(path: Path, images: str, labels: str) -> Examples:
    header, targets = _read_header(path, images), _load_targets(path, labels)
    if header.dtype != np.uint8 or (len(header.shape) != 3 and header.shape[3:] not in ((1,), (3,))):
        raise InputError(
            f"{path} has {images} {header.shape} {header.dtype}: expected (N, height, width) or (N, height, width, 3) uint8"
        )
    if len(targets) != header.shape[0]:
        raise InputError(f"{path} has {header.shape[0]:,} {images} but {len(targets):,} {labels}: one for each is needed")
    return make_examples(
        ArrayImages(partial(_load_images, path, images), f"{path} {images}", name_files([path], images)), targets
    )


def _load_targets(path: Path, name: str) -> Targets:
    count, size = math.prod(_read_header(path, name).shape), path.stat().st_size
    if count > size:
        raise InputError(f"{path} has {count:,} {name} in {size:,} bytes, too few for as many images: fetch it again")
    with _open_npz(path) as file:
        labels = _read_array(path, file, name)
    if labels.dtype.kind not in "biu" or labels.ndim not in (1, 2) or not labels.shape[-1]:
        raise InputError(f"{path} has {name} {labels.shape} {labels.dtype}: expected integers, (N,), (N, 1) or (N, K)")
    if labels.ndim == 2 and labels.shape[1] > 1:
        return labels.astype(np.float32)
    return labels.reshape(-1).astype(np.int64)


def _read_array(path: Path, file: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """Read an array into memory.  numpy alone would allocate the size in the header before reading any data."""
    info = file.getinfo(f"{name}.npy")
    if info.file_size > _MAX_BYTES + _MAX_RATIO * info.compress_size:
        raise InputError(f"{path} has {name} of {info.file_size:,} bytes, which no images compress to so few")
    with file.open(info) as member:
        header = _NpyHeader.read(member)
        if not header.dtype.hasobject and math.prod(header.shape) * header.dtype.itemsize + member.tell() != info.file_size:
            raise InputError(f"{path} has {name} {header.shape} of {header.dtype} in {info.file_size:,} bytes: replace it")
    with file.open(info) as member:
        return np.asarray(np.lib.format.read_array(member, allow_pickle=False))


def _read_header(path: Path, name: str) -> _NpyHeader:
    """Read the header of an array, without the array."""
    with _open_npz(path) as file, file.open(f"{name}.npy") as member:
        return _NpyHeader.read(member)


def _load_images(path: Path, name: str) -> NDArray[np.uint8]:
    """Return an array, memory-mapped if it is not compressed."""
    with _open_npz(path) as file:
        info = file.getinfo(f"{name}.npy")
        with file.open(info) as member:
            if info.compress_type != zipfile.ZIP_STORED:
                return _drop_grey_axis(_read_array(path, file, name))
            header, data_offset = _NpyHeader.read(member), member.tell()
        # A member's local header ends with its name and extra field, whose lengths are in it.
        name_length, extra_length = struct.unpack("<HH", read_range(str(path), info.header_offset + 26, 4))
        offset = info.header_offset + 30 + name_length + extra_length + data_offset
        data = np.memmap(path, np.uint8, "r")[offset : offset + math.prod(header.shape)]
    return _drop_grey_axis(data.reshape(header.shape, order="F" if header.fortran else "C"))


def _drop_grey_axis(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return (N, H, W, 1) as (N, H, W), and other shapes unchanged."""
    return array[..., 0] if array.ndim == 4 and array.shape[3] == 1 else array


@contextmanager
def _open_npz(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an npz file; errors of zipfile and numpy about damaged files become one-line InputErrors."""
    try:
        with zipfile.ZipFile(path) as file:
            # zipfile decompresses other methods without a limit.
            if any(info.compress_type not in _METHODS for info in file.infolist()):
                raise InputError(f"{path} is compressed in a way that numpy does not write: save it with numpy.savez")
            yield file
    except InputError:
        raise
    except (*_ZIP_ERRORS, *_HEADER_ERRORS) as error:
        raise_if_inaccessible(error, path)
        raise InputError(
            f"{path} cannot be read ({error_text(error)}): expected an npz file, as numpy.savez writes it"
        ) from None
