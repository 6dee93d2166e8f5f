"""A scratch file: where pieces of arrays gather for libraries that can only write whole ones."""

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

from parity.checkpoints.containers.container import Slot
from parity.checkpoints.containers.placed import reserve as reserve
from parity.checkpoints.layout import Array
from vit_spec import InputError

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64
_OVERHEAD, _PER_ARRAY = 1 << 16, 1 << 13  # bytes of headers and blocks that a library's file takes besides the arrays


class Scratch:
    """Arrays in a file beside the target, which has lost its name before anything is in it: it cannot be left behind.

    Its pieces come in any order and from any thread.  Room for it, and for the library's own file beside it, is taken at
    once, so a full disk is told before any work.
    """

    def __init__(self, beside: Path, slots: Mapping[str, Slot]) -> None:
        self._slots = slots
        self._starts: dict[str, int] = {}
        self._size = 0
        self._missing, self._lock = sum(slot.nbytes for slot in slots.values()), Lock()
        for key, slot in slots.items():
            self._starts[key] = self._size
            self._size += -(-slot.nbytes // _ALIGNMENT) * _ALIGNMENT
        name = beside.with_name(f".{uuid.uuid4().hex}.scratch")
        self._descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.unlink(name)
            reserve(self._descriptor, beside, 2 * self._size + _OVERHEAD + _PER_ARRAY * len(slots))
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._descriptor)

    def put(self, key: str, first: int, entries: Array) -> None:
        """Keep a piece of an array; see `Sink.put`."""
        slot = self._slots[key]
        if entries.dtype != slot.dtype or (first + entries.size) * slot.dtype.itemsize > slot.nbytes:
            raise ValueError(f"{entries.size} entries of {entries.dtype} from {first} do not fit {key}, {slot}")
        with self._lock:
            self._missing -= entries.nbytes
        place = self._starts[key] + first * slot.dtype.itemsize
        buffer = entries.view(np.uint8).data
        while buffer:
            count = os.pwrite(self._descriptor, buffer, place)
            buffer, place = buffer[count:], place + count

    def arrays(self) -> dict[str, Array]:
        """Return every array, mapped: the system writes it back to the file when memory is short.

        Raises:
            ValueError: entries that were never put.
        """
        if self._missing:
            raise ValueError(f"{self._missing} bytes were never put")
        os.ftruncate(self._descriptor, max(self._size, 1))  # from here on the library needs the room
        mapped = mmap.mmap(self._descriptor, max(self._size, 1))
        return {
            key: np.frombuffer(mapped, np.uint8, slot.nbytes, self._starts[key]).view(slot.dtype).reshape(slot.shape)
            for key, slot in self._slots.items()
        }

    def tensors(self) -> "dict[str, torch.Tensor]":
        """Return every array as a tensor of torch, on the same memory.

        Raises:
            InputError: a dtype that torch has not.
        """
        return {key: _tensor(key, array) for key, array in self.arrays().items()}


def _tensor(key: str, array: Array) -> "torch.Tensor":
    import torch

    dtype: Any = getattr(torch, array.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"{key} is {array.dtype}, which torch has not: convert it, or leave it out")
    if array.dtype == ml_dtypes.bfloat16 or array.dtype.name.startswith("float8"):  # of which numpy's torch knows nothing
        return torch.from_numpy(array.view(f"i{array.itemsize}")).view(dtype)
    return torch.from_numpy(array)
