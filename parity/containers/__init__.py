"""The containers that weights can lie in: kinds of files and folders, whatever the names inside.

To add one, write a module with a `CONTAINER` beside this file, and list it in `_MODULES`.
"""

from pathlib import Path

from parity.containers import dcp as distributed
from parity.containers import msgpack, npz, orbax, pth, safetensors
from parity.containers.budget import Budget
from parity.containers.container import Container, Contents, Sink, Slot, Stored
from vit_spec import InputError, nearest

__all__ = ["Container", "Contents", "Sink", "Slot", "Stored", "containers", "get", "named", "open"]

_MODULES = (safetensors, pth, npz, msgpack, orbax, distributed)
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
        InputError: no such path, none of the containers, or a damaged one.
    """
    budget = budget or Budget()
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
        return open(inside[0], budget)
    if not path.is_dir() and (meant := named(path)):
        return meant.open(path, budget)  # which says what is wrong with it
    what = "folder" if path.is_dir() else "file"
    raise InputError(f"{path} is a {what} of no kind that is known here ({', '.join(_CONTAINERS)}), or is damaged")
