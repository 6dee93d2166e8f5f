"""Containers: file formats and folder layouts that store named arrays, independent of the model.

To add one, write a module with a `CONTAINER` in this package, and list it in `_MODULES`.
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from parity.checkpoints.containers import dcp, folders, msgpack, npz, orbax, pth, safetensors, shards
from parity.checkpoints.containers.budget import Budget, max_array_bytes
from parity.checkpoints.containers.container import ArraySpec, Container, Contents, StoredArray, Writer, refuse_lfs_pointer
from vit_spec import InputError, bounded_json, nearest

__all__ = [
    "ArraySpec",
    "Container",
    "Contents",
    "StoredArray",
    "Writer",
    "by_suffix",
    "bytes_on_disk",
    "choose",
    "find",
    "get",
    "max_array_bytes",
    "names",
    "open",
]

_MODULES = (safetensors, pth, npz, msgpack, orbax, dcp)
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_PICKLE_STARTS = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
_LZ4_MAGIC = b"\x04\x22\x4d\x18"
_EQUINOX_SUFFIX = ".eqx"  # equinox.tree_serialise_leaves writes the arrays one after another; Equimo's is weights.eqx
_EQUINOX_REMEDY = (
    "load it into its model, and save the arrays by the names that jax.tree_util.tree_leaves_with_path gives, with "
    "safetensors or numpy.savez"
)
_KERAS_SUFFIX = ".keras"  # a zip archive with an HDF5 file
_KERAS_PRESET_FILE = "model.weights.h5"
_KERAS_REMEDY = (
    "save its arrays by their names with numpy.savez; in Keras, "
    "numpy.savez(FILE, **{variable.path: variable.numpy() for variable in model.weights})"
)
_CONTAINERS: dict[str, Container] = {module.CONTAINER.name: module.CONTAINER for module in _MODULES}


def names() -> list[str]:
    """Return the names of all containers."""
    return list(_CONTAINERS)


def get(name: str) -> Container:
    """Return the container with a name.

    Raises:
        InputError: the name is unknown; the message suggests the nearest one.
    """
    if name not in _CONTAINERS:
        hint = nearest(name, _CONTAINERS) or f": give one of {', '.join(_CONTAINERS)}"
        raise InputError(f"unknown container {name!r}{hint}")
    return _CONTAINERS[name]


def by_suffix(path: Path) -> Container | None:
    """Return the container that the suffix of a path selects, or None."""
    matches = (each for each in _CONTAINERS.values() if path.suffix and path.suffix in each.suffixes)
    return next(matches, None)


def find(path: Path, budget: Budget | None = None) -> Path:
    """Return the path of the weights in a folder; other paths unchanged.

    1. The file that transformers, timm or OpenCLIP reads: the first that exists of the names that the library looks for.
    2. The folder itself, if it is a checkpoint of torch.distributed.checkpoint or Orbax.
    3. The only weight file, or the only subfolder that is a checkpoint.

    A folder without weights is returned unchanged.

    Raises:
        InputError: it is not clear which file has the weights; the message lists the candidates.
    """
    if not path.is_dir():
        return path
    names, budget = [], budget or Budget()
    for entry in path.iterdir():
        budget.spend()
        if entry.is_file():  # also a symbolic link to a file: hub caches consist of links
            names.append(entry.name)
    is_checkpoint = dcp.recognises(path, b"") or orbax.is_item(path)
    try:
        library_file = folders.library_file(names, _read_config(path / folders.CONFIG_FILE))
        if library_file and is_checkpoint and folders.CONFIG_FILE not in names:
            raise InputError(f"holds {library_file} and is a checkpoint itself: give the path of the file, or move it")
        if library_file or is_checkpoint:
            return path / (library_file or "")
        steps = ["an Orbax checkpoint"] if orbax.recognises(path, b"") else []
        visible = [name for name in names if name[0] != "."]
        only = folders.only_file(visible, suffixes(), lambda index: shards.shard_names(path / index), steps)
    except InputError as error:
        names_file = any(str(error).startswith(str(path / name)) for name in names)  # as errors of an index do
        raise InputError(str(error) if names_file else f"{path} {error}") from None
    return path if only is None or only in steps else path / only


def choose(names: Sequence[str]) -> str | None:
    """Return the name of the file that `find` would choose in a folder of which only the names are known.

    Raises:
        InputError: see `find`.
    """
    return folders.library_file(names, {}) or folders.only_file(names, suffixes(), partial(_numbered_shards, names))


def suffixes() -> tuple[str, ...]:
    """Return the suffixes of the files of all containers."""
    return tuple(suffix for container in _CONTAINERS.values() for suffix in container.suffixes)


def _numbered_shards(names: Sequence[str], index: str) -> list[str]:
    """Return the names that are those of shards of an index: a-00001-of-00002.bin of a.bin.index.json."""
    stem, dot, suffix = index.removesuffix(shards.INDEX).rpartition(".")
    return [name for name in names if name.startswith(f"{stem}-") and name.endswith(dot + suffix)]


def _read_config(path: Path) -> dict[str, Any]:
    """Return the object in a config.json; {} if there is none, or if it cannot be read, which its reader reports."""
    try:
        return bounded_json.read_object(path, max_bytes=folders.MAX_JSON_BYTES) if path.is_file() else {}
    except InputError:
        return {}


def open(path: Path, budget: Budget | None = None) -> Contents:
    """Read the headers of a file or folder, whose container is detected from its content.

    In a folder, `find` chooses the file.

    Args:
        path: the file or folder.
        budget: limits on what opening may cost; a new budget by default.

    Raises:
        InputError: the path does not exist, is not in the format of any container, is damaged, or describes far more bytes
            of arrays than it has on disk.
    """
    budget = budget or Budget()
    try:
        found = find(path, budget)
        shards.refuse_single_shard(found)
        contents = _detect_and_open(found, budget)
        _check_size(found, contents, budget)
    except InputError as error:
        raise InputError(str(error) if str(InputError(path)) in str(error) else f"{path}: {error}") from None
    return contents


def _detect_and_open(path: Path, budget: Budget) -> Contents:
    if path.is_dir():
        head = b""
    elif not path.is_file():  # opening a pipe would block until something writes to it
        raise InputError(f"{path} is neither a file nor a folder: give the path of a checkpoint")
    else:
        with path.open("rb") as file:
            head = file.read(4096)
        refuse_lfs_pointer(path, head)
    if path.suffix == _EQUINOX_SUFFIX or (path / f"weights{_EQUINOX_SUFFIX}").is_file():
        raise InputError(f"{path} has arrays without names, as Equinox writes them: {_EQUINOX_REMEDY}")
    if path.suffix == _KERAS_SUFFIX or (path / _KERAS_PRESET_FILE).is_file():
        raise InputError(f"{path} contains an HDF5 file, which is not a known container: {_KERAS_REMEDY}")
    for container in _CONTAINERS.values():
        if container.recognises(path, head):
            return container.open(path, budget)
    if head.startswith(_LZ4_MAGIC):
        raise InputError(f"{path} is an LZ4 archive; those of Equimo have arrays without names: {_EQUINOX_REMEDY}")
    if head.startswith(_HDF5_SIGNATURE):
        raise InputError(f"{path} is an HDF5 file, which is not a known container: {_KERAS_REMEDY}")
    if head.startswith(_PICKLE_STARTS):
        raise InputError(
            f"{path} is a plain pickle, as of pickle.dump, and no file of torch.save: load it where you trust it, and save "
            "its arrays with torch.save or as safetensors"
        )
    if not path.is_dir() and (expected := by_suffix(Path(path.name.removesuffix(shards.INDEX)))):
        return expected.open(path, budget)  # raises an error that says what is wrong
    what = "folder" if path.is_dir() else "file"
    known = f"a {what} of a known container ({', '.join(_CONTAINERS)})"
    raise InputError(f"{path} is not {known}, or is damaged: give the file or folder that has the weights")


def _check_size(path: Path, contents: Contents, budget: Budget) -> None:
    """Refuse contents whose arrays take far more bytes than the file or folder has on disk.

    Such a file could fill a disk when it is converted, or the memory when it is read.  There are several ways to make one:
    tensors that share one storage, chunks that share one byte range, compressed members that are long runs of zeros,
    missing chunks, which are read as zeros, sparse files, and tensors with large strides in sparse files.
    """
    arrays = contents.arrays.values()
    total = max(sum(array.nbytes for array in arrays), *(array.span_bytes for array in arrays), 0)
    if total <= max_array_bytes(0):  # accepted for any size on disk, so large folders need not be searched
        return
    stored = _stored_bytes(path.parent if shards.is_index(path) else path, budget)
    if total > max_array_bytes(stored):
        raise InputError(
            f"{path} has {stored:,} bytes but describes {total:,} bytes of arrays, too many for a checkpoint of this size: "
            "save each array whole"
        )


def _stored_bytes(path: Path, budget: Budget) -> int:
    """Return the bytes on disk of a file, or of all files below a folder."""
    if not path.is_dir():
        return bytes_on_disk(path.stat())
    total, folders = 0, [str(path)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                budget.spend()
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file():  # also a symbolic link to a file: hub caches consist of links
                    total += bytes_on_disk(entry.stat())
    return total


def bytes_on_disk(status: os.stat_result) -> int:
    """Return the size of a file in bytes, without its holes where the file system reports them."""
    blocks = getattr(status, "st_blocks", 0)  # missing on some systems, and 0 on some network file systems
    return min(status.st_size, 512 * blocks) if blocks else status.st_size
