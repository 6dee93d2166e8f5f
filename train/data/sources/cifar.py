"""`cifar:PATH`: a folder with CIFAR-10 or CIFAR-100 as published (https://www.cs.toronto.edu/~kriz/cifar.html).

As pickles: data_batch_1 to data_batch_5, test_batch, batches.meta; for CIFAR-100 train, test, meta, with the fine labels.
As binary records: data_batch_1.bin to data_batch_5.bin, test_batch.bin, batches.meta.txt; for CIFAR-100 train.bin,
test.bin, fine_label_names.txt.  PATH is the folder of these files, or the folder that the archive was unpacked in.

Python's unpickling runs code that the file chooses.  These files come from strangers, so
`parity.checkpoints.containers.pickles` reads them without running anything.  Each process that reads images holds all of
them in memory, 154 MB.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints.containers.budget import MAX_TEXT_BYTES, Budget
from parity.checkpoints.containers.pickle_globals import PickledObject, allowlist
from parity.checkpoints.containers.pickles import load
from train.data.sources.examples import ArrayImages, DatasetSplits, Examples, make_examples
from train.data.sources.files import read_file
from train.data.sources.splitting import numbered_classes
from vit_spec import InputError

_IMAGE_BYTES = 3 * 32 * 32  # the planes red, green and blue, each row by row
_EXPECTED = "data_batch_1 to 5 and test_batch (CIFAR-10), or train and test (CIFAR-100), as they are or as .bin"


class _Layout(NamedTuple):
    """The files of one form of CIFAR.

    train, test: the names of the files of images.
    names: the key of the class names in the pickle of metadata; "" if that file is text.
    labels: the key of the labels in a pickle, or the number of label bytes before each image of a binary record, of which
        the last is taken.
    """

    train: tuple[str, ...]
    test: str
    names: str
    labels: str | int


_CIFAR10_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
_LAYOUTS = {
    "batches.meta": _Layout(_CIFAR10_BATCHES, "test_batch", "label_names", "labels"),
    "meta": _Layout(("train",), "test", "fine_label_names", "fine_labels"),
    "batches.meta.txt": _Layout(tuple(f"{name}.bin" for name in _CIFAR10_BATCHES), "test_batch.bin", "", 1),
    "fine_label_names.txt": _Layout(("train.bin",), "test.bin", "", 2),
}


def open_splits(place: str) -> DatasetSplits:
    """Open a folder.

    Raises:
        InputError: a missing folder; files that are missing, damaged, or of several data sets; or a pickle that contains
            anything else than arrays.
    """
    path = Path(place)
    sets = [
        (folder, folder / meta, layout)
        for folder in (path, *sorted(path.glob("cifar-*")))
        for meta, layout in _LAYOUTS.items()
        if all((folder / name).is_file() for name in (*layout.train, layout.test))
    ]
    if not sets:
        raise InputError(f"{path} is not a folder with CIFAR's files: expected {_EXPECTED}")
    if len(sets) > 1:
        raise InputError(f"{path} holds several data sets, {sets[0][1]} and {sets[1][1]}: give each a folder of its own")
    return _open_layout(*sets[0])


def _open_layout(folder: Path, meta: Path, layout: _Layout) -> DatasetSplits:
    def load_split(names: tuple[str, ...]) -> Examples:
        files = [folder / name for name in names]
        targets = np.concatenate([_read_batch(file, layout.labels)[1] for file in files])
        label = f"{folder / names[0].rstrip('1')} image"
        reader = ArrayImages(partial(_load_images, files, layout.labels), label, [(file.name, str(file)) for file in files])
        return make_examples(reader, targets)

    def load_later(names: tuple[str, ...]) -> Callable[[], Examples]:
        return lambda: load_split(names)

    train = load_split(layout.train)
    classes = _class_names(meta, layout.names) if meta.is_file() else numbered_classes(train.targets, folder)
    return DatasetSplits(
        str(folder), {"train": lambda: train, "test": load_later((layout.test,))}, "classes", classes, (32, 32)
    )


def _class_names(meta: Path, key: str) -> tuple[str, ...]:
    if not key:
        return tuple(read_file(meta).decode(errors="replace").split())
    names = _read_pickle(meta).get(key)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{meta} has no {key}: expected CIFAR's own file")
    return tuple(names)


def _load_images(files: list[Path], labels: str | int) -> NDArray[np.uint8]:
    """Return the images of several batches, (N, 32, 32, 3) uint8."""
    pixels = np.concatenate([_read_batch(file, labels)[0] for file in files])
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _read_batch(file: Path, labels: str | int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the images (N, 3072) and the labels (N,) of a file."""
    if isinstance(labels, int):
        data = np.frombuffer(read_file(file, _MAX_FILE_BYTES), np.uint8)
        if not len(data) or len(data) % (labels + _IMAGE_BYTES):
            raise InputError(f"{file} has {len(data):,} bytes, not a multiple of {labels + _IMAGE_BYTES}: fetch it again")
        records = data.reshape(-1, labels + _IMAGE_BYTES)
        return records[:, labels:], records[:, labels - 1].astype(np.int64)
    batch = _read_pickle(file)
    pixels, targets = _pickled_array(batch.get("data"), file), batch.get(labels)
    if (
        pixels is None
        or pixels.shape[1:] != (_IMAGE_BYTES,)
        or not isinstance(targets, list)
        or len(targets) != len(pixels)
    ):
        raise InputError(f"{file} has no data (N, {_IMAGE_BYTES}) with {labels} for each: expected CIFAR's own file")
    if not all(isinstance(target, int) and abs(target) < 1 << 63 for target in targets):
        raise InputError(f"{file} has {labels} that are not integers: expected CIFAR's own file")
    return pixels, np.array(targets, np.int64)


# Pickles --------------------------------------------------------------------------------------------------------------


def _read_pickle(file: Path) -> dict[str, Any]:
    """Return the dictionary in a pickle, with its keys as text, without running code."""
    data = read_file(file, _MAX_FILE_BYTES)
    budget = Budget(text_bytes=MAX_TEXT_BYTES + len(data))  # Python 3 pickles bytes as text, which is encoded once
    try:
        content = load(data, str(file), _ALLOWED_CALLS, budget, max_bytes=_MAX_FILE_BYTES, encoding="latin1")
    except InputError as error:
        raise InputError(
            f"{str(error).partition(': weights never')[0]}: CIFAR's files never do, fetch them again"
        ) from None
    if not isinstance(content, dict):
        raise InputError(f"{file} holds no dictionary: expected CIFAR's own file")
    return {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in content.items()}


def _pickled_array(value: Any, file: Path) -> NDArray[np.uint8] | None:
    """Return the array of a pickle; its state is (version, shape, dtype, whether in Fortran order, bytes)."""
    if not isinstance(value, PickledObject) or value.name != _ARRAY:
        return None
    try:
        _, shape, descriptor, fortran, data = value.state
        data = data.encode("latin1") if isinstance(data, str) else data  # Python 2 pickled bytes as text
        if descriptor.dtype == np.uint8 and not fortran:
            return np.frombuffer(data, np.uint8).reshape(shape)
    except (ValueError, TypeError, AttributeError):  # a hostile file has anything in these places
        pass
    raise InputError(f"{file} has an array that is not uint8, row by row: expected CIFAR's own file")


_ARRAY = "numpy.ndarray"
_MAX_FILE_BYTES = 1 << 28  # CIFAR-100's training images take 155 MB
_RECONSTRUCT = {f"numpy.{core}.multiarray._reconstruct": lambda *_: PickledObject(_ARRAY) for core in ("core", "_core")}
_ALLOWED_CALLS = allowlist(_RECONSTRUCT, constants=[_ARRAY])
