"""Helpers for the tests of containers: make arrays of every dtype, write them, and read them back."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import parity
from parity.checkpoints.containers.container import ArraySpec, Container, Contents
from parity.checkpoints.formats import get
from vit_spec import InputError

FLOATS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
INTEGERS = {f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}
DTYPES = {name: np.dtype(dtype) for name, dtype in {**FLOATS, **INTEGERS, "bool": np.bool_}.items()}


def save_random_weights(path, config):
    """Write random float32 weights of a model to a file, in the torch format."""
    rng, layouts = np.random.default_rng(0), get("torch").layouts(config)
    arrays = {
        key: rng.standard_normal(layout.shape(config.sizes), np.float32)
        for layout in layouts.values()
        for key in layout.keys(config.sizes)
    }
    parity.save(path, arrays, config, "torch")


def random_arrays(seed=0):
    """Return arrays of random bits, which include NaNs, by key: for each dtype a matrix, a scalar and an empty array."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, dtype in DTYPES.items():
        for what, shape in {"matrix": (3, 5), "scalar": (), "empty": (2, 0, 3)}.items():
            bits = rng.integers(0, 2 if name == "bool" else 256, (*shape, dtype.itemsize), np.uint8)
            arrays[f"{what}/{name}"] = bits.view(dtype)[..., 0]
    return arrays


def specs_of(arrays):
    """Return the shape and dtype of each array, by key."""
    return {key: ArraySpec(array.shape, array.dtype) for key, array in arrays.items()}


def write_in_pieces(writer, arrays, piece=7):
    """Write arrays in pieces of `piece` elements."""
    for key, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1)
        for first in range(0, flat.size, piece):
            writer.write(key, first, flat[first : first + piece])


def write_arrays(container: Container, path: Path, arrays, metadata=None) -> Path:
    """Write arrays to a file of a container, and return its path."""
    with container.create(path, specs_of(arrays), metadata or {}) as writer:
        write_in_pieces(writer, arrays)
    return path


def read_all(contents: Contents):
    """Return all arrays of an opened file, with the words of their keys joined by "/"."""
    return {"/".join(path): np.asarray(array) for path, array in contents.arrays.items()}


def have_same_bits(a, b):
    """Return whether two dicts of arrays have the same keys, dtypes, shapes and bytes."""
    return a.keys() == b.keys() and all(
        a[key].dtype == b[key].dtype and a[key].shape == b[key].shape and a[key].tobytes() == b[key].tobytes() for key in a
    )


def find_wrong_refusals(
    container: Container, path: Path, files: dict[str, bytes], message: str = "", written_to: Path | None = None
) -> list[str]:
    """Write several invalid files one after another, read each, and list the files that are not refused as expected.

    Args:
        container: the container that reads the files.
        path: the file, or the folder, that is read.
        files: name of a file -> its content.
        message: text that the error for each file must have, besides the path; the error must be one line.
        written_to: the file in the folder that is written; by default `path` itself is written.

    Returns:
        "NAME: the file is read" or "NAME: EXCEPTION" for each file without such an InputError.
    """
    wrong = []
    for name, content in files.items():
        (written_to or path).write_bytes(content)
        try:
            read_all(container.open(path))
            wrong.append(f"{name}: the file is read")
        except Exception as error:
            text = str(error)
            if not isinstance(error, InputError) or "\n" in text or str(path) not in text or message not in text:
                wrong.append(f"{name}: {error!r}")
    return wrong


def error_message(container: Container, path: Path, path_in_message: Path | None = None) -> str:
    """Return the message of the InputError that reading a path raises; assert that it is one line with the path."""
    with pytest.raises(InputError) as error:
        read_all(container.open(path))
    assert "\n" not in str(error.value) and str(path_in_message or path) in str(error.value)
    return str(error.value)


def assert_read_or_refused(container: Container, path: Path) -> None:
    """Assert that reading a file returns arrays of the declared sizes, or raises an InputError of one line."""
    try:
        for array in container.open(path).arrays.values():
            assert array.read(0, array.size).shape == (array.size,)
    except InputError as error:
        assert "\n" not in str(error)


class CountReadBytes:
    """A context manager that counts the bytes that the system calls of this process read; `bytes` has the count at exit."""

    def __enter__(self):
        if not Path("/proc/self/io").exists():
            pytest.skip("only Linux counts the bytes that a process reads")
        self._before = self._bytes_read()
        return self

    def __exit__(self, *_):
        self.bytes = self._bytes_read() - self._before

    @staticmethod
    def _bytes_read():
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["rchar"])


def write_sparse_file(path: Path, head: bytes, size: int) -> Path:
    """Write a file that begins with some bytes and continues as a hole."""
    path.write_bytes(head)
    os.truncate(path, size)
    return path
