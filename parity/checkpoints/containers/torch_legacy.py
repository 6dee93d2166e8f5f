"""Files of torch.save older than torch 1.6 (or with `_use_new_zipfile_serialization=False`), read without torch.

Such a file begins with five pickles: a magic number, the version, a description of the machine, the object, and the keys of
its storages.  The storages follow.  Each has eight bytes with its number of elements, and the elements.  See
https://github.com/pytorch/pytorch/blob/main/torch/serialization.py, `_legacy_save`.
"""

from typing import Any

import numpy as np

from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import File, FileSlice
from parity.checkpoints.containers.pickles import MAX_PICKLE_BYTES, load_first
from parity.checkpoints.containers.torch_zip import ALLOWED_GLOBALS, Storage, parse_storage_id
from vit_spec import InputError

MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the pickled magic number

_VERSION = 1001
_MAX_SHORT_BYTES = 4096  # for the pickles of the version and of the machine


def read(file: File, budget: Budget) -> Any:
    """Return what torch.save wrote: dictionaries, lists, `PickledObject`s, and tensors as `StoredArray`.

    The offsets of the storages are only known after the object was parsed.  The object is therefore parsed twice: first
    without its storages, then with them.

    Raises:
        InputError: the file is damaged, or its pickles ask for anything else.
    """
    path = str(file.path)
    declared: dict[str, tuple[np.dtype[Any] | None, int]] = {}

    def declare_storage(pid: Any) -> Storage:
        dtype, key, num_elements = parse_storage_id(pid)
        if len(pid) != 6 or pid[5] is not None or declared.setdefault(key, (dtype, num_elements)) != (dtype, num_elements):
            raise ValueError("a view of a storage, or a storage declared in two ways")
        return Storage(FileSlice(file, 0, num_elements * _itemsize(dtype)), dtype, None)

    offset = len(MAGIC)
    version, offset = _read_pickle(file, offset, _MAX_SHORT_BYTES, budget)
    system_info, offset = _read_pickle(file, offset, _MAX_SHORT_BYTES, budget)
    if version != _VERSION or not isinstance(system_info, dict):
        raise InputError(
            f"{path} is damaged, or was written by an unknown version of torch: load it in torch and save it again"
        )
    if system_info.get("little_endian") is not True:
        raise InputError(f"{path} was written by a big-endian machine: load it in torch and save it on a little-endian one")
    data = file.read(offset, MAX_PICKLE_BYTES)
    _, length = load_first(data, path, ALLOWED_GLOBALS, budget, declare_storage)
    keys, storages_start = _read_pickle(file, offset + length, MAX_PICKLE_BYTES, budget)
    slices = _locate_storages(file, keys, declared, storages_start)

    def load_storage(pid: Any) -> Storage:
        dtype, key, _ = parse_storage_id(pid)
        return Storage(slices[key], dtype, None)

    return load_first(data[:length], path, ALLOWED_GLOBALS, budget, load_storage)[0]


def _read_pickle(file: File, offset: int, max_bytes: int, budget: Budget) -> tuple[Any, int]:
    """Return the contents of the pickle at an offset, and the offset of its end."""
    result, length = load_first(file.read(offset, max_bytes), str(file.path), {}, budget)
    return result, offset + length


def _locate_storages(
    file: File, keys: Any, declared: dict[str, tuple[np.dtype[Any] | None, int]], offset: int
) -> dict[str, FileSlice]:
    """Return the byte range of each storage; the first one starts at `offset`."""
    if not isinstance(keys, list) or len(keys) != len(declared) or not all(isinstance(key, str) for key in keys):
        raise InputError(f"{file.path} is damaged (its storages do not match its tensors): fetch or write it again")
    slices: dict[str, FileSlice] = {}
    for key in keys:
        dtype, num_elements = declared.get(key, (None, -1))
        size = num_elements * _itemsize(dtype)
        if num_elements < 0 or key in slices or file.read(offset, 8) != num_elements.to_bytes(8, "little"):
            raise InputError(f"{file.path} is damaged (storage {key[:40]!r} is not as declared): fetch or write it again")
        offset += 8
        if offset + size > file.size:
            raise InputError(f"{file.path} ends before its arrays do: fetch or write it again")
        slices[key] = FileSlice(file, offset, size)
        offset += size
    return slices


def _itemsize(dtype: np.dtype[Any] | None) -> int:
    return 1 if dtype is None else dtype.itemsize
