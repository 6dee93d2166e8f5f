"""`idx:PATH`: a folder of files in the format of MNIST, which Fashion-MNIST, KMNIST and EMNIST also use.

train-images-idx3-ubyte with train-labels-idx1-ubyte, and t10k-... for the test split; each file plain or as .gz.  One of
the splits may be absent.  EMNIST's files have a prefix, emnist-letters-train-..., and store each image with rows and
columns exchanged, which is undone here.

The format is described on Yann LeCun's page of MNIST: two zero bytes, the type of number (8: uint8), the number of
dimensions, each dimension as four big-endian bytes, then the numbers.  Images of a plain file are read one at a time;
.gz files are decompressed into the memory of each process that reads images.
"""

import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints.containers import header_checks
from train.data.sources.decoding import check_image_size, error_text
from train.data.sources.examples import ArrayImages, DatasetSplits, Examples, ImageRows, make_examples, name_files
from train.data.sources.files import FileRows, raise_if_inaccessible, read_range, refuse_holes
from train.data.sources.splitting import numbered_classes
from vit_spec import InputError

_IMAGES = re.compile(r"(?:(.+)-)?(train|t10k|test)-images[-.]idx3-ubyte(\.gz)?")
_MAX_BYTES, _MAX_RATIO = 1 << 24, 64  # limit of decompressed bytes: the first, plus the second times the compressed size
_MAX_MEMBERS = 1 << 16  # of a .gz file; bgzip makes one for each 64 KB
_MAX_HEADER_BYTES = 4 + 4 * 255
_READ_BYTES, _DECOMPRESS_BYTES = 1 << 16, 1 << 20  # at once
_GZIP = zlib.MAX_WBITS | 16  # zlib's code for the gzip format
_EXPECTED = "train-images-idx3-ubyte and train-labels-idx1-ubyte, or the same with t10k, as they are or as .gz"


def open_splits(place: str) -> DatasetSplits:
    """Open a folder.

    Raises:
        InputError: a missing folder; files that are missing, damaged, or of several data sets.
    """
    path = Path(place)
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
    targets = _read_labels(_labels_file(file))
    shape, size = _open_array(file).shape, file.stat().st_size
    if len(shape) != 3 or targets.ndim != 1 or shape[0] != len(targets):
        raise InputError(
            f"{file} has images {shape} and {_labels_file(file).name} {targets.shape}: one label for each is needed"
        )
    if not shape[0]:
        raise InputError(f"{file} holds no images: fetch it again")
    check_image_size(shape[1], shape[2], file)
    if shape[0] > size:  # blank images compress so well, and each label takes eight times as much in memory
        raise InputError(f"{file} has {shape[0]:,} images in {size:,} bytes, too few for as many: fetch it again")
    files = name_files([file], file.name.removesuffix(".gz"))
    reader = ArrayImages(partial(_load_images, file, transposed), f"{file} image", files)
    return make_examples(reader, targets.astype(np.int64))


def _labels_file(file: Path) -> Path:
    """Return the file of labels that belongs to a file of images; either of the two may be compressed."""
    name = file.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    for labels in (file.with_name(name), file.with_name(f"{name}.gz")):
        if labels.is_file():
            return labels
    raise InputError(f"{file} has no labels beside it: expected {name} or {name}.gz")


class _Transposed:
    """Images whose rows and columns are exchanged."""

    def __init__(self, rows: ImageRows) -> None:
        self._rows = rows

    def __getitem__(self, i: int) -> NDArray[np.uint8]:
        return self._rows[i].T


def _load_images(file: Path, transposed: bool) -> ImageRows:
    images = _open_array(file)
    return _Transposed(images) if transposed else images


def _read_labels(file: Path) -> NDArray[np.uint8]:
    labels = _open_array(file)
    return labels.read_all() if isinstance(labels, FileRows) else labels


def _open_array(file: Path) -> NDArray[np.uint8] | FileRows:
    """Return the array of an idx file, in memory if the file is compressed."""
    if not file.is_file():  # opening a pipe would wait for its writer
        raise InputError(f"{file} is not a file: fetch it again")
    try:
        refuse_holes(file)
        data, size = (_decompress(file), 0) if file.suffix == ".gz" else (None, file.stat().st_size)
        start = read_range(str(file), 0, min(size, _MAX_HEADER_BYTES)) if data is None else bytes(data[:_MAX_HEADER_BYTES])
    except InputError:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise_if_inaccessible(error, file)
        raise InputError(f"{file} cannot be read ({error_text(error)}): fetch it again") from None
    offset, shape = _parse_header(start, size if data is None else len(data), file)
    return FileRows(file, offset, shape) if data is None else data[offset:].reshape(shape)


def _parse_header(start: bytes, size: int, file: Path) -> tuple[int, tuple[int, ...]]:
    """Return the offset and the shape of the array of an idx file, given its first bytes and its size in bytes."""
    dimensions = start[3] if len(start) >= 4 and start[:3] == b"\0\0\x08" else 0
    offset = 4 + 4 * dimensions
    if dimensions and len(start) >= offset:
        with suppress(InputError):  # an impossible shape
            shape = header_checks.parse_shape(np.frombuffer(start, ">u4", dimensions, 4).tolist(), 1)
            if size - offset == prod(shape):
                return offset, shape
    raise InputError(f"{file} is not an idx file of uint8, or is cut short: fetch it again")


def _decompress(file: Path) -> NDArray[np.uint8]:
    """Return the decompressed bytes of a .gz file.

    The limit grows with the bytes that are decompressed: `gzip.open` also reads zeros behind them, which cost nothing.

    Raises:
        InputError: more bytes than the limit.
        EOFError, OSError, zlib.error: a damaged file.
    """
    data, consumed, members = bytearray(), 0, 1
    stream = zlib.decompressobj(_GZIP)
    with file.open("rb") as packed:
        while rest := packed.read(_READ_BYTES):
            while chunk := rest.lstrip(b"\0") if stream.eof else rest:  # zeros may follow a member
                if stream.eof:
                    stream, members = zlib.decompressobj(_GZIP), members + 1
                data += stream.decompress(chunk, _DECOMPRESS_BYTES)
                rest = stream.unused_data or stream.unconsumed_tail
                consumed += len(chunk) - len(rest)
                if len(data) > (limit := _MAX_BYTES + _MAX_RATIO * consumed) or members > _MAX_MEMBERS:
                    what = f"becomes more than {limit:,} bytes" if len(data) > limit else f"has {members:,} gzip members"
                    raise InputError(f"{file} {what}, which no images do: decompress it yourself")
    if not stream.eof:
        raise EOFError("it is cut short")
    return np.frombuffer(data, np.uint8)
