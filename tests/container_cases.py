"""What the tests of the containers share: arrays of every type and kind, writing them, and reading them back."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from parity.checkpoints.containers.container import Container, Contents, Slot
from vit_spec import InputError

FLOATS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
INTEGERS = {f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}
DTYPES = {name: np.dtype(dtype) for name, dtype in {**FLOATS, **INTEGERS, "bool": np.bool_}.items()}


def draw(seed=0):
    """Arrays of random bits, NaNs among them, of every dtype; one without dimensions and one without entries."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, dtype in DTYPES.items():
        for what, shape in {"matrix": (3, 5), "scalar": (), "empty": (2, 0, 3)}.items():
            bits = rng.integers(0, 2 if name == "bool" else 256, (*shape, dtype.itemsize), np.uint8)
            arrays[f"{what}/{name}"] = bits.view(dtype)[..., 0]
    return arrays


def slots(arrays):
    return {key: Slot(array.shape, array.dtype) for key, array in arrays.items()}


def put(sink, arrays, piece=7):
    """Put arrays in pieces of so many entries."""
    for key, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1)
        for first in range(0, flat.size, piece):
            sink.put(key, first, flat[first : first + piece])


def write(container: Container, path: Path, arrays, notes=None) -> Path:
    with container.create(path, slots(arrays), notes or {}) as sink:
        put(sink, arrays)
    return path


def read(contents: Contents):
    return {"/".join(path): np.asarray(array) for path, array in contents.arrays.items()}


def same_bits(a, b):
    return a.keys() == b.keys() and all(
        a[key].dtype == b[key].dtype and a[key].shape == b[key].shape and a[key].tobytes() == b[key].tobytes() for key in a
    )


def refusal(container: Container, path: Path, named: Path | None = None) -> str:
    """Return the one line with which a path is refused, by its headers or when its arrays are read."""
    with pytest.raises(InputError) as error:
        read(container.open(path))
    assert "\n" not in str(error.value) and str(named or path) in str(error.value)
    return str(error.value)


def survives(container: Container, path: Path) -> None:
    """A file, whatever is in it, gives arrays of the shapes that it says, or the one error."""
    try:
        for array in container.open(path).arrays.values():
            assert array.read(0, array.size).shape == (array.size,)
    except InputError as error:
        assert "\n" not in str(error)


class CountedReads:
    """How many bytes this process asked its files for, in all system calls that read."""

    def __enter__(self):
        if not Path("/proc/self/io").exists():
            pytest.skip("only Linux counts the bytes that a process reads")
        self._before = self._now()
        return self

    def __exit__(self, *_):
        self.bytes = self._now() - self._before

    @staticmethod
    def _now():
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["rchar"])


def sparse(path: Path, head: bytes, size: int) -> Path:
    """Write a file that begins with some bytes and is otherwise a hole."""
    path.write_bytes(head)
    os.truncate(path, size)
    return path
