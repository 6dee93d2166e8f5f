"""A scratch file in which pieces of arrays are collected, for libraries that can only write whole arrays."""

import mmap
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import ml_dtypes
import numpy as np

from parity.checkpoints.containers.container import ArraySpec
from parity.checkpoints.containers.preallocated import reserve_space
from parity.checkpoints.layout import Array
from vit_spec import InputError
from vit_spec.missing_packages import missing_packages, not_installed

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64
_OVERHEAD, _OVERHEAD_PER_ARRAY = 1 << 16, 1 << 13  # bytes of headers and padding in the library's own file


def check_torch(path: Path) -> None:
    """Raise InputError if torch, which writes the file or folder at `path`, is not installed."""
    if missing := missing_packages("torch"):
        raise InputError(f"torch writes {path}, and {not_installed(missing)}; or write safetensors")


class ScratchFile:
    """A writer that collects arrays in a temporary file next to the target.

    The file is unlinked when it is created, so that even a crash leaves no file.  Pieces may come in any order and from any
    thread.  Disk space for this file and for the file that the library will write is reserved at once, so that a full disk
    is reported before any work is done.
    """

    def __init__(self, target: Path, specs: Mapping[str, ArraySpec]) -> None:
        self._specs = specs
        self._starts: dict[str, int] = {}
        self._size = 0
        self._unwritten_bytes, self._lock = sum(spec.nbytes for spec in specs.values()), Lock()
        for key, spec in specs.items():
            self._starts[key] = self._size
            self._size += -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT
        name = target.with_name(f".{uuid.uuid4().hex}.scratch")
        self._descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.unlink(name)
            reserve_space(self._descriptor, target, 2 * self._size + _OVERHEAD + _OVERHEAD_PER_ARRAY * len(specs))
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def write(self, key: str, start: int, values: Array) -> None:
        """Store a piece of an array; see `Writer.write`."""
        spec = self._specs[key]
        if values.dtype != spec.dtype or (start + values.size) * spec.dtype.itemsize > spec.nbytes:
            raise ValueError(f"{values.size} elements of {values.dtype} from {start} do not fit {key}, {spec}")
        with self._lock:
            self._unwritten_bytes -= values.nbytes
        offset = self._starts[key] + start * spec.dtype.itemsize
        data = values.view(np.uint8).data
        while data:
            num_written = os.pwrite(self._descriptor, data, offset)
            data, offset = data[num_written:], offset + num_written

    def arrays(self) -> dict[str, Array]:
        """Return all arrays as memory maps, which the operating system can page out to the file.

        Raises:
            ValueError: some elements were never written.
        """
        if self._unwritten_bytes:
            raise ValueError(f"{self._unwritten_bytes} bytes were never written")
        os.ftruncate(self._descriptor, max(self._size, 1))  # frees the space that was reserved for the library's own file
        mapping = mmap.mmap(self._descriptor, max(self._size, 1))
        return {
            key: np.frombuffer(mapping, np.uint8, spec.nbytes, self._starts[key]).view(spec.dtype).reshape(spec.shape)
            for key, spec in self._specs.items()
        }

    def tensors(self) -> "dict[str, torch.Tensor]":
        """Return all arrays as torch tensors that share the memory of `arrays`.

        Raises:
            InputError: torch does not have the dtype of an array.
        """
        return {key: _tensor(key, array) for key, array in self.arrays().items()}


def _tensor(key: str, array: Array) -> "torch.Tensor":
    import torch

    dtype: Any = getattr(torch, array.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"{key} is {array.dtype}, which torch does not have: convert it, or leave it out")
    if array.dtype == ml_dtypes.bfloat16 or array.dtype.name.startswith("float8"):  # torch.from_numpy does not know these
        return torch.from_numpy(array.view(f"i{array.itemsize}")).view(dtype)
    return torch.from_numpy(array)
