"""The containers that weights can lie in: kinds of files and folders, whatever the names inside.

To add one, write a module with a `CONTAINER` beside this file, and list it in `_MODULES`.
"""

import os
from pathlib import Path

from parity.checkpoints.containers import dcp as distributed
from parity.checkpoints.containers import msgpack, npz, orbax, pth, safetensors, shards
from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import Container, Contents, Sink, Slot, Stored
from vit_spec import InputError, nearest

__all__ = ["Container", "Contents", "Sink", "Slot", "Stored", "containers", "get", "named", "open"]

_MODULES = (safetensors, pth, npz, msgpack, orbax, distributed)
_FREE, _DENSE = 1 << 28, 64  # bytes that arrays may take whatever is on disk, and times the bytes on disk besides
_CONTAINERS: dict[str, Container] = {module.CONTAINER.name: module.CONTAINER for module in _MODULES}


def containers() -> list[str]:
    """Return the name of every container."""
    return list(_CONTAINERS)


def get(name: str) -> Container:
    """Return the container of this name.

    Raises:
        InputError: an unknown name; says the nearest.
    """
    if name not in _CONTAINERS:
        hint = nearest(name, _CONTAINERS) or f": give one of {', '.join(_CONTAINERS)}"
        raise InputError(f"unknown container {name!r}{hint}")
    return _CONTAINERS[name]


def named(path: Path) -> Container | None:
    """Return the container that a file of this name is to be, judged by its suffix."""
    fitting = (each for each in _CONTAINERS.values() if path.suffix and path.suffix in each.suffixes)
    return next(fitting, None)


def open(path: Path, budget: Budget | None = None) -> Contents:
    """Read the headers of a file or folder, whatever it is called, or of the one file of weights in a folder.

    budget: what that may cost; a new one by default.

    Raises:
        InputError: no such path, none of the containers, a damaged one, or one of few bytes that make many.
    """
    budget = budget or Budget()
    try:
        found = _opened(path, budget)
        _check_size(path, found, budget)
    except InputError as error:
        raise InputError(str(error) if str(InputError(path)) in str(error) else f"{path}: {error}") from None
    return found


def _opened(path: Path, budget: Budget) -> Contents:
    if path.is_dir():
        head = b""
    elif not path.is_file():  # to read a pipe is to wait for who writes to it
        raise InputError(f"{path} is neither a file nor a folder: give the path of weights")
    else:
        with path.open("rb") as file:
            head = file.read(4096)
    for container in _CONTAINERS.values():
        if container.recognises(path, head):
            return container.open(path, budget)
    if path.is_dir() and len(inside := [each for each in sorted(path.iterdir()) if each.is_file() and named(each)]) == 1:
        return _opened(inside[0], budget)
    if not path.is_dir() and (meant := named(path)):
        return meant.open(path, budget)  # which says what is wrong with it
    what = "folder" if path.is_dir() else "file"
    raise InputError(f"{path} is a {what} of no kind that is known here ({', '.join(_CONTAINERS)}), or is damaged")


def _check_size(path: Path, found: Contents, budget: Budget) -> None:
    """Refuse arrays of far more bytes than are on disk.

    Tensors can share a storage, parts a place in a file, compressed members a long run of zeros, and missing chunks are
    zeros: read or written out, a small file would then fill a disk.
    """
    total = sum(array.nbytes for array in found.arrays.values())
    if total <= _FREE:
        return
    stored = _size(path.parent if shards.is_index(path) else path, budget)
    if total > _FREE + _DENSE * stored:
        raise InputError(
            f"{path} is {stored:,} bytes that stand for {total:,} of arrays, which no weights do: save each array whole"
        )


def _size(path: Path, budget: Budget) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    if not path.is_dir():
        return path.stat().st_size
    total, todo = 0, [str(path)]
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                budget.make()
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                elif entry.is_file():  # a link to one is a file too: hub caches are made of links
                    total += entry.stat().st_size
    return total
