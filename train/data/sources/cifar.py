"""`cifar:PATH`: a folder with CIFAR-10 or CIFAR-100 as its authors give them (https://www.cs.toronto.edu/~kriz/cifar.html).

As pickles: data_batch_1 to data_batch_5, test_batch, batches.meta; for CIFAR-100 train, test, meta, with the fine labels.
As bytes: data_batch_1.bin to data_batch_5.bin, test_batch.bin, batches.meta.txt; for CIFAR-100 train.bin, test.bin,
fine_label_names.txt.  PATH is that folder, or the one that the archive was unpacked in.

The pickles come from strangers, and a pickle is a program: they are read as data, see
`parity.checkpoints.containers.pickles`.  Images are held in the memory of each process that reads them, 154 MB.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints.containers.budget import BYTES, Budget
from parity.checkpoints.containers.pickles import Record, load, table
from train.data.sources.examples import Examples, Pixels, examples
from train.data.sources.files import content
from train.data.sources.splitting import Found, numbered
from vit_spec import InputError

_BYTES = 3 * 32 * 32  # of an image: red, green, blue, each row by row
_EXPECTED = "data_batch_1 to 5 and test_batch (CIFAR-10), or train and test (CIFAR-100), as they are or as .bin"


class _Layout(NamedTuple):
    """Where a form of CIFAR keeps what; labels: the key of a pickle's, or how many bytes lead to a record's last."""

    train: tuple[str, ...]
    test: str
    names: str
    labels: str | int


_TEN = tuple(f"data_batch_{i}" for i in range(1, 6))
_LAYOUTS = {
    "batches.meta": _Layout(_TEN, "test_batch", "label_names", "labels"),
    "meta": _Layout(("train",), "test", "fine_label_names", "fine_labels"),
    "batches.meta.txt": _Layout(tuple(f"{name}.bin" for name in _TEN), "test_batch.bin", "", 1),
    "fine_label_names.txt": _Layout(("train.bin",), "test.bin", "", 2),
}


def find(place: str) -> Found:
    """Look into a folder.

    Raises:
        InputError: no such folder, files that are missing, damaged, or of several data sets, or a pickle that asks for more
            than arrays.
    """
    path = Path(place).expanduser()
    sets = [
        (folder, folder / meta, layout)
        for folder in (path, *sorted(path.glob("cifar-*")))
        for meta, layout in _LAYOUTS.items()
        if all((folder / name).is_file() for name in (*layout.train, layout.test))
    ]
    if not sets:
        raise InputError(f"{path} is no folder with CIFAR's files: expected {_EXPECTED}")
    if len(sets) > 1:
        raise InputError(f"{path} holds several data sets, {sets[0][1]} and {sets[1][1]}: give each a folder of its own")
    return _found(*sets[0])


def _found(folder: Path, meta: Path, layout: _Layout) -> Found:
    def part(names: tuple[str, ...]) -> Examples:
        files = [folder / name for name in names]
        answers = np.concatenate([_batch(file, layout.labels)[1] for file in files])
        where = f"{folder / names[0].rstrip('1')} image"
        reader = Pixels(partial(_images, files, layout.labels), where, [(file.name, str(file)) for file in files])
        return examples(reader, answers)

    def asked(names: tuple[str, ...]) -> Callable[[], Examples]:
        return lambda: part(names)

    train = part(layout.train)
    classes = _names(meta, layout.names) if meta.is_file() else numbered(train.answers, folder)
    return Found(str(folder), {"train": lambda: train, "test": asked((layout.test,))}, "classes", classes, (32, 32))


def _names(meta: Path, key: str) -> tuple[str, ...]:
    if not key:
        return tuple(content(meta).decode(errors="replace").split())
    names = _unpickled(meta).get(key)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{meta} has no {key}: expected CIFAR's own file")
    return tuple(names)


def _images(files: list[Path], labels: str | int) -> NDArray[np.uint8]:
    """Return the images of some batches, (N, 32, 32, 3)."""
    pixels = np.concatenate([_batch(file, labels)[0] for file in files])
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _batch(file: Path, labels: str | int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the images (N, 3072) and the labels (N,) of a file."""
    if isinstance(labels, int):
        data = np.frombuffer(content(file, _LONGEST), np.uint8)
        if not len(data) or len(data) % (labels + _BYTES):
            raise InputError(f"{file} has {len(data):,} bytes, no multiple of {labels + _BYTES}: fetch it again")
        records = data.reshape(-1, labels + _BYTES)
        return records[:, labels:], records[:, labels - 1].astype(np.int64)
    batch = _unpickled(file)
    pixels, answers = _pixels(batch.get("data"), file), batch.get(labels)
    if pixels is None or pixels.shape[1:] != (_BYTES,) or not isinstance(answers, list) or len(answers) != len(pixels):
        raise InputError(f"{file} has no data (N, {_BYTES}) with {labels} for each: expected CIFAR's own file")
    if not all(isinstance(answer, int) and abs(answer) < 1 << 63 for answer in answers):
        raise InputError(f"{file} has {labels} that are no whole numbers: expected CIFAR's own file")
    return pixels, np.array(answers, np.int64)


# Pickles --------------------------------------------------------------------------------------------------------------


def _unpickled(file: Path) -> dict[str, Any]:
    data = content(file, _LONGEST)
    budget = Budget(nbytes=BYTES + len(data))  # Python 3 writes bytes as text, which is encoded once
    try:
        held = load(data, str(file), _TABLE, budget, longest=_LONGEST, encoding="latin1")
    except InputError as error:
        raise InputError(
            f"{str(error).partition(': weights never')[0]}: CIFAR's files never do, fetch them again"
        ) from None
    if not isinstance(held, dict):
        raise InputError(f"{file} holds no dictionary: expected CIFAR's own file")
    return {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in held.items()}


def _pixels(found: Any, file: Path) -> NDArray[np.uint8] | None:
    """Return the array of a pickle, whose state is (version, shape, dtype, whether in Fortran's order, bytes)."""
    if not isinstance(found, Record) or found.name != _ARRAY:
        return None
    try:
        _, shape, kind, fortran, data = found.state
        data = data.encode("latin1") if isinstance(data, str) else data  # text in Python 2
        if kind.dtype == np.uint8 and not fortran:
            return np.frombuffer(data, np.uint8).reshape(shape)
    except (ValueError, TypeError, AttributeError):  # anything may stand in their places
        pass
    raise InputError(f"{file} has an array that is not uint8, row by row: expected CIFAR's own file")


_ARRAY = "numpy.ndarray"
_LONGEST = 1 << 28  # bytes of a file; CIFAR-100's training images take 155 MB
_RECONSTRUCT = {f"numpy.{core}.multiarray._reconstruct": lambda *_: Record(_ARRAY) for core in ("core", "_core")}
_TABLE = table(_RECONSTRUCT, values=[_ARRAY])
