"""Files of torch.save older than torch 1.6, or of its `_use_new_zipfile_serialization=False`, read without torch.

Five pickles follow one another: a number to know them by, the version, facts of the machine, the object, and the keys of
its storages; then, for every storage, the number of its entries in eight bytes and the entries themselves.  See
https://github.com/pytorch/pytorch/blob/main/torch/serialization.py, `_legacy_save`.
"""

from typing import Any

import numpy as np

from parity.checkpoints.containers.archive import TABLE, Storage, named
from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import File, Window
from parity.checkpoints.containers.pickles import LIMIT, load_first
from vit_spec import InputError

MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the number that such files begin with, pickled

_VERSION = 1001
_SHORT = 4096  # bytes of the version, and of the facts of the machine


def read(file: File, budget: Budget) -> Any:
    """Return what torch.save wrote: dictionaries, lists, `Record`s, and tensors as `Stored`.

    The places of the storages follow from all that is before them, so the object is parsed twice: without its storages,
    and with them.

    Raises:
        InputError: a file that is damaged, or that holds or asks for anything else.
    """
    path = str(file.path)
    wanted: dict[str, tuple[np.dtype[Any] | None, int]] = {}

    def announced(pid: Any) -> Storage:
        kind, key, count = named(pid)
        if len(pid) != 6 or pid[5] is not None or wanted.setdefault(key, (kind, count)) != (kind, count):
            raise ValueError("not a storage of its own")
        return Storage(Window(file, 0, count * _itemsize(kind)), kind, None)

    begin = len(MAGIC)
    version, begin = _next(file, begin, _SHORT, budget)
    machine, begin = _next(file, begin, _SHORT, budget)
    if version != _VERSION or not isinstance(machine, dict):
        raise InputError(f"{path} is damaged, or of a torch that is not known: load it in torch and save it again")
    if machine.get("little_endian") is not True:
        raise InputError(f"{path} was written by a big-endian machine: load it in torch and save it on a little-endian one")
    data = file.read(begin, LIMIT)
    _, length = load_first(data, path, TABLE, budget, announced)
    keys, end = _next(file, begin + length, LIMIT, budget)
    places = _places(file, keys, wanted, end)

    def storage(pid: Any) -> Storage:
        kind, key, _ = named(pid)
        return Storage(places[key], kind, None)

    return load_first(data[:length], path, TABLE, budget, storage)[0]


def _next(file: File, begin: int, longest: int, budget: Budget) -> tuple[Any, int]:
    """Return what the pickle at a place holds, and where the next begins."""
    value, length = load_first(file.read(begin, longest), str(file.path), {}, budget)
    return value, begin + length


def _places(file: File, keys: Any, wanted: dict[str, tuple[np.dtype[Any] | None, int]], begin: int) -> dict[str, Window]:
    """Return where the storages lie, the first of them at `begin`."""
    if not isinstance(keys, list) or len(keys) != len(wanted) or not all(isinstance(key, str) for key in keys):
        raise InputError(f"{file.path} is damaged (its storages are not those of its tensors): fetch or write it again")
    places: dict[str, Window] = {}
    for key in keys:
        kind, count = wanted.get(key, (None, -1))
        size = count * _itemsize(kind)
        if count < 0 or key in places or file.read(begin, 8) != count.to_bytes(8, "little"):
            raise InputError(f"{file.path} is damaged (storage {key[:40]!r} is not as announced): fetch or write it again")
        begin += 8
        if begin + size > file.size:
            raise InputError(f"{file.path} ends before its arrays do: fetch or write it again")
        places[key] = Window(file, begin, size)
        begin += size
    return places


def _itemsize(kind: np.dtype[Any] | None) -> int:
    return 1 if kind is None else kind.itemsize
