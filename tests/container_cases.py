"""Helpers for the tests of containers: arrays of every dtype, writing them, and reading them back."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from parity.checkpoints.containers.container import ArraySpec, Container, Contents
from vit_spec import InputError

FLOATS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
INTEGERS = {f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}
DTYPES = {name: np.dtype(dtype) for name, dtype in {**FLOATS, **INTEGERS, "bool": np.bool_}.items()}


def random_arrays(seed=0):
    """Return arrays of random bits, including NaNs: for each dtype a matrix, a scalar and an empty array."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, dtype in DTYPES.items():
        for what, shape in {"matrix": (3, 5), "scalar": (), "empty": (2, 0, 3)}.items():
            bits = rng.integers(0, 2 if name == "bool" else 256, (*shape, dtype.itemsize), np.uint8)
            arrays[f"{what}/{name}"] = bits.view(dtype)[..., 0]
    return arrays


def specs_of(arrays):
    return {key: ArraySpec(array.shape, array.dtype) for key, array in arrays.items()}


def write_in_pieces(writer, arrays, piece=7):
    """Write arrays in pieces of `piece` elements."""
    for key, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1)
        for first in range(0, flat.size, piece):
            writer.write(key, first, flat[first : first + piece])


def write_arrays(container: Container, path: Path, arrays, metadata=None) -> Path:
    with container.create(path, specs_of(arrays), metadata or {}) as writer:
        write_in_pieces(writer, arrays)
    return path


def read_all(contents: Contents):
    return {"/".join(path): np.asarray(array) for path, array in contents.arrays.items()}


def have_same_bits(a, b):
    return a.keys() == b.keys() and all(
        a[key].dtype == b[key].dtype and a[key].shape == b[key].shape and a[key].tobytes() == b[key].tobytes() for key in a
    )


def error_message(container: Container, path: Path, path_in_message: Path | None = None) -> str:
    """Return the error for a path that is refused when it is opened or read: one line that has the path."""
    with pytest.raises(InputError) as error:
        read_all(container.open(path))
    assert "\n" not in str(error.value) and str(path_in_message or path) in str(error.value)
    return str(error.value)


def assert_read_or_refused(container: Container, path: Path) -> None:
    """Assert that a file, whatever its contents, gives arrays of the declared shapes, or an InputError of one line."""
    try:
        for array in container.open(path).arrays.values():
            assert array.read(0, array.size).shape == (array.size,)
    except InputError as error:
        assert "\n" not in str(error)


class CountReadBytes:
    """A context manager that counts the bytes that all system calls of this process read."""

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
