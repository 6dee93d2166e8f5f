"""`npz:FILE`: named arrays in one file, as MedMNIST or Keras lays them out.

MedMNIST (https://medmnist.com): train_images, train_labels, and the same with val and test; labels (N, 1) are class
numbers, labels (N, K) are 0 or 1 for each of K labels.  Keras (its mnist.npz): x_train, y_train, x_test, y_test.  Images
are (N, H, W) or (N, H, W, 3), uint8.

Images of uncompressed arrays (numpy.savez) are read one at a time.  Compressed arrays (numpy.savez_compressed), and
arrays in Fortran order, are read into the memory of each process that reads images.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parity.checkpoints.containers import npy, zip_directory
from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.checksum import Checksum
from parity.checkpoints.containers.container import File, FileSlice
from parity.checkpoints.containers.inflate import DeflatedFile
from train.data.sources.decoding import check_image_size, error_text
from train.data.sources.examples import ArrayImages, DatasetSplits, Examples, ImageRows, Targets, make_examples, name_files
from train.data.sources.files import FileRows, raise_if_inaccessible, refuse_holes
from train.data.sources.splitting import numbered_classes, to_class_numbers
from train.recipes import Task
from vit_spec import InputError

_SPLITS = ("train", "val", "test")
_LAYOUTS = ("{}_images", "{}_labels"), ("x_{}", "y_{}")
_MAX_BYTES, _MAX_RATIO = 1 << 28, 64  # limit of decompressed bytes: the first, plus the second times the compressed size
_MAX_OBJECTS = 1 << 15  # 4,096 arrays in a file: `zip_directory` charges eight objects for each
_METHODS = zip_directory.STORED, zip_directory.DEFLATED
_EXPECTED = "train_images and train_labels (MedMNIST), or x_train and y_train (Keras)"


class _NpyFile(NamedTuple):
    """An .npy file in an npz file, with its header.

    source: reads the bytes of the .npy file.
    offset: offset of the .npy file in the npz file.
    """

    source: npy.ByteSource
    header: npy.Header
    offset: int
    is_compressed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.header.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.header.descr)


def open_splits(place: str) -> DatasetSplits:
    """Open a file; its images are not read yet.

    Raises:
        InputError: a missing, damaged or sparse file, or arrays of other names or shapes.
    """
    path = Path(place)
    if not path.is_file():
        raise InputError(f"{path} is not a file: give npz:FILE with {_EXPECTED}")
    refuse_holes(path)
    names = {name.removesuffix(".npy") for name in _read_members(path)}
    for images, labels in _LAYOUTS:
        splits = [split for split in _SPLITS if {images.format(split), labels.format(split)} <= names]
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
    notes = [_describe_labels(first.targets, labels.format(splits[0]))] if task == "labels" else []
    used = {array.format(split) for split in splits for array in (images, labels)}
    known = {array.format(split) for layout in _LAYOUTS for array in layout for split in _SPLITS}
    if others := sorted(known & names - used):
        notes.append(f"arrays left out: {', '.join(others)}, beside {', '.join(sorted(used))}")
    classes = tuple(map(str, range(first.targets.shape[1]))) if task == "labels" else numbered_classes(first.targets, path)
    loaders = {splits[0]: lambda: first, **{split: load_later(split) for split in splits[1:]}}
    height, width = _open_array(path, images.format(splits[0])).shape[1:3]
    return DatasetSplits(str(path), loaders, task, classes, (height, width), tuple(notes))


def _describe_labels(targets: Targets, name: str) -> str:
    """Return a note on targets (N, K), which may be meant as classes in one-hot encoding."""
    is_one_hot = ((targets != 0).sum(1) == 1).all()
    hint = ", and a single 1 in every row; give class numbers, (N,), if each image has one class" if is_one_hot else ""
    return f"{name} has {targets.shape[1]} columns: labels of 0 and 1{hint}"


def _load_split(path: Path, images: str, labels: str) -> Examples:
    targets, header = _load_targets(path, labels), _open_array(path, images)
    if header.dtype != np.uint8 or (len(header.shape) != 3 and header.shape[3:] not in ((1,), (3,))):
        raise InputError(
            f"{path} has {images} {header.shape} {header.dtype}: expected (N, height, width) or (N, height, width, 3) uint8"
        )
    check_image_size(header.shape[1], header.shape[2], f"{path} {images}")
    if len(targets) != header.shape[0]:
        raise InputError(f"{path} has {header.shape[0]:,} {images} but {len(targets):,} {labels}: one for each is needed")
    return make_examples(
        ArrayImages(partial(_load_images, path, images), f"{path} {images}", name_files([path], images)), targets
    )


def _load_targets(path: Path, name: str) -> Targets:
    array = _open_array(path, name)
    count, size = math.prod(array.shape), path.stat().st_size
    if count > size:
        raise InputError(f"{path} has {count:,} {name} in {size:,} bytes, too few for as many images: fetch it again")
    if array.dtype.kind not in "biu" or len(array.shape) not in (1, 2) or not array.shape[-1]:
        raise InputError(f"{path} has {name} {array.shape} {array.dtype}: expected integers, (N,), (N, 1) or (N, K)")
    with _named_errors(path, name):
        labels = np.asarray(npy.open_array(array.source, array.header))
    if labels.ndim == 2 and labels.shape[1] > 1:
        return labels.astype(np.float32)
    return to_class_numbers(labels.reshape(-1), f"{path} {name}")


def _load_images(path: Path, name: str) -> ImageRows:
    """Return the images of an array, (H, W) or (H, W, 3) each."""
    array = _open_array(path, name)
    header = array.header
    with _named_errors(path, name):
        shape = header.shape[:3] if header.shape[3:] == (1,) else header.shape
        if not array.is_compressed and not header.is_fortran:
            return FileRows(path, array.offset + header.length, shape)
        data = array.source.array(header.length, (header.nbytes,), np.dtype(np.uint8)).read(0, header.nbytes)
    return data.reshape(shape, order="F" if header.is_fortran else "C")


class _MemberBudget(Budget):
    """A budget of `_MAX_OBJECTS`, with a message about data sets."""

    def spend(self, objects: int = 1, text_bytes: int = 0) -> None:
        if objects > self.objects:
            raise InputError("it holds more arrays than a data set has")
        super().spend(objects, text_bytes)


def _read_members(path: Path) -> dict[str, zip_directory.Member]:
    """Return the members of an npz file by name; the bytes of each are inside the file, and no two overlap."""
    with _named_errors(path):
        members = zip_directory.read_members(FileSlice.whole(File(path)), _MemberBudget(_MAX_OBJECTS))
    if any(member.method not in _METHODS for member in members.values()):
        raise InputError(f"{path} is compressed in a way that numpy does not write: save it with numpy.savez")
    return members


def _open_array(path: Path, name: str) -> _NpyFile:
    """Read the header of an array, without the array.

    Raises:
        InputError: a damaged file, a missing array, or an array whose header does not agree with its size.
    """
    member = _read_members(path).get(f"{name}.npy")
    if member is None:
        raise InputError(f"{path} has no {name}.npy: expected an npz file, as numpy.savez writes it")
    file_slice, is_compressed = member.file_slice, member.method == zip_directory.DEFLATED
    if member.size > _MAX_BYTES + _MAX_RATIO * file_slice.length:
        raise InputError(f"{path} has {name} of {member.size:,} bytes, which no images compress to so few")
    source: npy.ByteSource
    if is_compressed:
        source = DeflatedFile(file_slice.file, file_slice.start, file_slice.length, member.size, member.crc)
    else:
        source = npy.UncompressedFile(file_slice, Checksum(file_slice, member.crc))
    with _named_errors(path, name):
        header = npy.parse_header(source.head(npy.MAX_HEADER_BYTES))
    if header.length + header.nbytes != member.size:
        described = f"{header.shape} of {np.dtype(header.descr)}"
        raise InputError(f"{path} has {name} {described} in {member.size:,} bytes: replace it")
    return _NpyFile(source, header, file_slice.start, is_compressed)


@contextmanager
def _named_errors(path: Path, name: str = "") -> Iterator[None]:
    """Add the path of the file, and the name of the array, to the errors of the readers in `parity`."""
    try:
        yield
    except (InputError, OSError, ValueError) as error:
        raise_if_inaccessible(error, path)
        what = f"{name}: {error_text(error)}" if name else error_text(error)
        raise InputError(f"{path} cannot be read ({what}): expected an npz file, as numpy.savez writes it") from None
