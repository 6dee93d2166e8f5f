"""`idx:PATH`: a folder with the files that MNIST comes in, and Fashion-MNIST, KMNIST and EMNIST after it.

train-images-idx3-ubyte with train-labels-idx1-ubyte, t10k-... for the test split, each as it is or as .gz; one of the
splits may be absent.  EMNIST puts its name before them, emnist-letters-train-..., and stores each image with rows and
columns exchanged, which is undone here.

The format is on Yann LeCun's page of MNIST: two zeros, the kind of number (8: uint8), the number of dimensions, each
dimension as four bytes, most significant first, then the numbers.  What is not compressed is mapped, and then shared by
all processes; .gz is unpacked into the memory of each process that reads images.
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

from train.data.sources.decoding import said
from train.data.sources.examples import Examples, Pixels, examples, stored
from train.data.sources.files import unless_damaged
from train.data.sources.splitting import Found, numbered
from vit_spec import InputError

_IMAGES = re.compile(r"(?:(.+)-)?(train|t10k|test)-images[-.]idx3-ubyte(\.gz)?")
_SMALL, _DENSE = 1 << 24, 64  # bytes that any file may become, and times its compressed size besides
_EXPECTED = "train-images-idx3-ubyte and train-labels-idx1-ubyte, or the same with t10k, as they are or as .gz"


def find(place: str) -> Found:
    """Look into a folder.

    Raises:
        InputError: no such folder, files that are missing, damaged, or of several data sets.
    """
    path = Path(place).expanduser()
    matches = [
        match for file in (sorted(path.iterdir()) if path.is_dir() else ()) if (match := _IMAGES.fullmatch(file.name))
    ]
    if not matches:
        raise InputError(f"{path} is no folder with MNIST's files: expected {_EXPECTED}")
    if len(sets := sorted({match[1] or "" for match in matches})) > 1:
        raise InputError(f"{path} holds several data sets ({', '.join(sets)}): give each a folder of its own")
    swapped = sets[0].startswith("emnist")

    def asked(name: str) -> Callable[[], Examples]:
        return lambda: _part(path / name, swapped)

    parts = {"test" if match[2] == "t10k" else match[2]: asked(match[0]) for match in matches}
    first = next(iter(sorted(parts.items(), reverse=True)))  # train, where it is there
    shown = first[1]()
    parts[first[0]] = lambda: shown
    width, height = shown.read(0).size
    notes = ("EMNIST's images are turned upright: rows and columns are exchanged in its files",) if swapped else ()
    return Found(str(path), parts, "classes", numbered(shown.answers, path), (height, width), notes=notes)


def _part(file: Path, swapped: bool) -> Examples:
    answers = _array(_labels(file))
    images = _images(file, swapped)
    if images.ndim != 3 or answers.ndim != 1 or len(images) != len(answers):
        raise InputError(
            f"{file} has images {images.shape} and {_labels(file).name} {answers.shape}: one label for each is needed"
        )
    if not len(images):
        raise InputError(f"{file} holds no images: fetch it again")
    files = stored([file], file.name.removesuffix(".gz"))
    return examples(Pixels(partial(_images, file, swapped), f"{file} image", files), answers.astype(np.int64))


def _labels(file: Path) -> Path:
    """Return the file of labels beside one of images, whichever of the two is compressed."""
    name = file.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    for found in (file.with_name(name), file.with_name(f"{name}.gz")):
        if found.is_file():
            return found
    raise InputError(f"{file} has no labels beside it: expected {name} or {name}.gz")


def _images(file: Path, swapped: bool) -> NDArray[np.uint8]:
    images = _array(file)
    return images.swapaxes(1, 2) if swapped and images.ndim == 3 else images


def _array(file: Path) -> NDArray[np.uint8]:
    if not file.is_file():  # of a pipe one would wait for the writer
        raise InputError(f"{file} is no file: fetch it again")
    try:
        if file.suffix == ".gz":
            with gzip.open(file) as packed:
                longest = _SMALL + _DENSE * file.stat().st_size
                data: NDArray[np.uint8] = np.frombuffer(packed.read(longest + 1), np.uint8)
            if len(data) > longest:
                raise InputError(f"{file} becomes more than {longest:,} bytes, which no images do: decompress it yourself")
        else:
            data = np.memmap(file, np.uint8, "r")
    except InputError:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:
        unless_damaged(error, file)
        raise InputError(f"{file} cannot be read ({said(error)}): fetch it again") from None
    start = bytes(data[:4])
    dimensions = start[3] if len(start) == 4 and start[:3] == b"\0\0\x08" else 0
    end = 4 + 4 * dimensions
    shape = np.frombuffer(bytes(data[4:end]), ">u4") if dimensions and len(data) >= end else None
    if shape is not None and len(data) - end == np.prod(shape, dtype=np.float64):
        with suppress(ValueError):  # of a shape that no array has: too many dimensions, or 2**64 entries times none
            return data[end:].reshape(tuple(map(int, shape)))
    raise InputError(f"{file} is no idx file of uint8, or is cut short: fetch it again")
