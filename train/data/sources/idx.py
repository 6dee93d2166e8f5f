"""`idx:PATH`: a folder of files in the format of MNIST, which Fashion-MNIST, KMNIST and EMNIST also use.

train-images-idx3-ubyte with train-labels-idx1-ubyte, and t10k-... for the test split; each file plain or as .gz.  One of
the splits may be absent.  EMNIST's files have a prefix, emnist-letters-train-..., and store each image with rows and
columns exchanged, which is undone here.

The format is described on Yann LeCun's page of MNIST: two zero bytes, the type of number (8: uint8), the number of
dimensions, each dimension as four big-endian bytes, then the numbers.  Plain files are memory-mapped and so shared by all
processes; .gz files are decompressed into the memory of each process that reads images.
"""

import gzip
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.data.sources.decoding import error_text
from train.data.sources.examples import ArrayImages, DatasetSplits, Examples, make_examples, name_files
from train.data.sources.files import raise_if_inaccessible
from train.data.sources.splitting import numbered_classes
from vit_spec import InputError

_IMAGES = re.compile(r"(?:(.+)-)?(train|t10k|test)-images[-.]idx3-ubyte(\.gz)?")
_MAX_BYTES, _MAX_RATIO = 1 << 24, 64  # limit of decompressed bytes: the first, plus the second times the compressed size
_EXPECTED = "train-images-idx3-ubyte and train-labels-idx1-ubyte, or the same with t10k, as they are or as .gz"


def open_splits(place: str) -> DatasetSplits:
    """Open a folder.

    Raises:
        InputError: a missing folder; files that are missing, damaged, or of several data sets.
    """
    path = Path(place).expanduser()
    matches = [
        match for file in (sorted(path.iterdir()) if path.is_dir() else ()) if (match := _IMAGES.fullmatch(file.name))
    ]
    if not matches:
        raise InputError(f"{path} is not a folder with MNIST's files: expected {_EXPECTED}")
    if len(prefixes := sorted({match[1] or "" for match in matches})) > 1:
        raise InputError(f"{path} holds several data sets ({', '.join(prefixes)}): give each a folder of its own")
    transposed = prefixes[0].startswith("emnist")

    def load(name: str) -> Callable[[], Examples]:
        return lambda: _load_split(path / name, transposed)

    splits = {"test" if match[2] == "t10k" else match[2]: load(match[0]) for match in matches}
    base = next(iter(sorted(splits.items(), reverse=True)))  # train, if present
    first = base[1]()
    splits[base[0]] = lambda: first
    width, height = first.read(0).size
    notes = ("EMNIST's images are turned upright: rows and columns are exchanged in its files",) if transposed else ()
    return DatasetSplits(str(path), splits, "classes", numbered_classes(first.targets, path), (height, width), notes=notes)


def _load_split(file: Path, transposed: bool) -> Examples:
    targets = _read_idx(_labels_file(file))
    images = _read_images(file, transposed)
    if images.ndim != 3 or targets.ndim != 1 or len(images) != len(targets):
        raise InputError(
            f"{file} has images {images.shape} and {_labels_file(file).name} {targets.shape}: one label for each is needed"
        )
    if not len(images):
        raise InputError(f"{file} holds no images: fetch it again")
    files = name_files([file], file.name.removesuffix(".gz"))
    reader = ArrayImages(partial(_read_images, file, transposed), f"{file} image", files)
    return make_examples(reader, targets.astype(np.int64))


def _labels_file(file: Path) -> Path:
    """Return the file of labels that belongs to a file of images; either of the two may be compressed."""
    name = file.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    for labels in (file.with_name(name), file.with_name(f"{name}.gz")):
        if labels.is_file():
            return labels
    raise InputError(f"{file} has no labels beside it: expected {name} or {name}.gz")


def _read_images(file: Path, transposed: bool) -> NDArray[np.uint8]:
    images = _read_idx(file)
    return images.swapaxes(1, 2) if transposed and images.ndim == 3 else images


def _read_idx(file: Path) -> NDArray[np.uint8]:
    """Return the array of an idx file, memory-mapped if the file is not compressed."""
    if not file.is_file():  # opening a pipe would wait for its writer
        raise InputError(f"{file} is not a file: fetch it again")
    try:
        if file.suffix == ".gz":
            with gzip.open(file) as packed:
                limit = _MAX_BYTES + _MAX_RATIO * file.stat().st_size
                data: NDArray[np.uint8] = np.frombuffer(packed.read(limit + 1), np.uint8)
            if len(data) > limit:
                raise InputError(f"{file} becomes more than {limit:,} bytes, which no images do: decompress it yourself")
        else:
            data = np.memmap(file, np.uint8, "r")
    except InputError:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise_if_inaccessible(error, file)
        raise InputError(f"{file} cannot be read ({error_text(error)}): fetch it again") from None
    start = bytes(data[:4])
    dimensions = start[3] if len(start) == 4 and start[:3] == b"\0\0\x08" else 0
    end = 4 + 4 * dimensions
    shape = np.frombuffer(bytes(data[4:end]), ">u4") if dimensions and len(data) >= end else None
    if shape is not None and len(data) - end == np.prod(shape, dtype=np.float64):
        with suppress(ValueError):  # numpy refuses the shape: too many dimensions, or 2**64 entries times zero
            return data[end:].reshape(tuple(map(int, shape)))
    raise InputError(f"{file} is not an idx file of uint8, or is cut short: fetch it again")
