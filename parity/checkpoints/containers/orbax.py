"""Orbax checkpoints: folders of zarr arrays, plain or in an OCDBT store, read with tensorstore and without Orbax.

The tree is in the JSON file `_METADATA`; the name of an array is its keys, joined with dots.  See
https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html.
"""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from parity.checkpoints.containers import ocdbt, zarr
from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import ArraySpec, Container, Contents, KeyPath, Writer
from parity.checkpoints.containers.scratch import ScratchFile
from parity.checkpoints.layout import Array
from vit_spec import InputError, bounded_json

_TREE_FILE, _CHECKPOINT_FILE, _STRINGS_FILE = "_METADATA", "_CHECKPOINT_METADATA", "_strings.json"


def recognises(path: Path, head: bytes) -> bool:
    """Return whether a folder is an Orbax checkpoint or an item of one, or has a subfolder that is one of these."""
    return path.is_dir() and (is_item(path) or any(is_item(folder) for folder in _list_subfolders(path)))


def open_(path: Path, budget: Budget | None = None) -> Contents:
    """Read the metadata of a checkpoint.

    Scalars and text in the tree become metadata, and so does the custom metadata.

    Args:
        path: a checkpoint with one item, one item of a checkpoint (`checkpoint/params`), or a folder with one step.
        budget: limits on what opening may cost.

    Raises:
        InputError: the folder is damaged; it has several steps or items, which the message lists; or tensorstore cannot
            open the path.
    """
    check_tensorstore(path)
    zarr.check_path(path)
    budget, folder = budget or Budget(), _find_item(path)
    disk_usage = zarr.scan_files(folder, budget)
    tree, custom_metadata = _read_json(folder / _TREE_FILE), _read_custom_metadata(folder)
    try:
        leaves = [_parse_leaf(leaf, budget) for leaf in tree["tree_metadata"].values()]
        ts_specs = {
            key_path: _ts_spec(folder, key_path, tree)
            for key_path, value_type in leaves
            if value_type in _ARRAY_TYPES or value_type == "scalar"
        }
        string_paths = [key_path for key_path, value_type in leaves if value_type == "string"]
    except (KeyError, TypeError, AttributeError):
        raise InputError(
            f"{folder / _TREE_FILE} is damaged, or was written by an unknown version of Orbax: write it again"
        ) from None
    if len(ts_specs) + len(string_paths) < sum(
        value_type in (*_ARRAY_TYPES, "scalar", "string") for _, value_type in leaves
    ):
        raise InputError(f"{folder / _TREE_FILE} names an array twice: write it again")
    metadata = {
        **custom_metadata,
        **{"/".join(key_path): text for key_path, text in _read_strings(folder, string_paths).items()},
    }
    if _uses_ocdbt(tree):
        ocdbt.check_tree(folder)
    arrays = zarr.open_arrays(folder, ts_specs, disk_usage, budget)
    for key_path, value_type in leaves:
        if value_type == "scalar":
            scalar = arrays.pop(key_path)
            if scalar.shape or scalar.nbytes > _MAX_SCALAR_BYTES:
                raise InputError(f"{folder}: {'/'.join(key_path)} is a scalar of shape {scalar.shape}: write it again")
            metadata["/".join(key_path)] = np.asarray(scalar).item()
    return Contents("orbax", arrays, metadata)


def _read_custom_metadata(folder: Path) -> dict[str, Any]:
    """Return the custom metadata of a checkpoint; `folder` is the checkpoint or an item of it."""
    for parent in (folder, folder.parent):
        if (parent / _CHECKPOINT_FILE).is_file():
            custom_metadata = _read_json(parent / _CHECKPOINT_FILE).get("custom_metadata") or {}
            if not isinstance(custom_metadata, dict):
                raise InputError(
                    f"{parent / _CHECKPOINT_FILE} has custom_metadata that are not a JSON object: write it again"
                )
            return custom_metadata
    return {}


def _parse_leaf(leaf: dict[str, Any], budget: Budget) -> tuple[KeyPath, str]:
    """Return the key path and the type of a leaf of the tree."""
    keys = [key["key"] for key in leaf["key_metadata"]]
    if len(keys) > _MAX_DEPTH or not all(isinstance(key, str) or type(key) is int for key in keys):
        raise TypeError("not a key path")
    key_path = tuple(map(str, keys))
    budget.spend(_LEAF_COST, sum(map(len, key_path)))
    return key_path, str(leaf["value_metadata"]["value_type"])


@contextmanager
def create(path: Path, specs: Mapping[str, ArraySpec], metadata: Mapping[str, str]) -> Iterator[Writer]:
    """Write a checkpoint of nested dictionaries, splitting keys at "/"; `ocp.load(path)` reads it.

    `metadata` becomes the custom metadata.  The arrays are collected in a scratch file, which takes as much disk space as
    all arrays.  Orbax writes each array as one chunk, so it then has the largest array in memory, compressed.

    Raises:
        InputError: an array has no elements, and Orbax does not store such arrays; a key is both an array and a group of
            arrays; the disk has too few inodes for the files; or tensorstore cannot open the path.
    """
    zarr.check_path(path)
    if empty_keys := [key for key, spec in specs.items() if 0 in spec.shape]:
        raise InputError(
            f"Orbax does not store arrays without elements: leave out {', '.join(empty_keys)}, or write safetensors"
        )
    nested: dict[str, Any] = {}
    for key in specs:
        *parents, leaf = key.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise InputError(f"{parent!r} in {key!r} would be both an array and a group: rename one of them")
        if leaf in node:
            raise InputError(f"{key!r} would be both an array and a group: rename one of them")
        node[leaf] = key
    _check_inodes(path, specs)
    with ScratchFile(path, specs) as scratch:
        yield scratch
        _save(path, nested, scratch.arrays(), metadata)


def data_files(path: Path) -> list[Path]:
    """Return the files of the checkpoint in a folder."""
    item = _find_item(path)
    parents = {parent / _CHECKPOINT_FILE for parent in (path, item.parent)}
    return [*(file for file in item.rglob("*") if file.is_file()), *(file for file in parents if file.is_file())]


CONTAINER = Container(
    name="orbax",
    description="Orbax checkpoint, a folder",
    recognises=recognises,
    open=open_,
    suffixes=(),
    create=create,
    any_order=True,
    data_files=data_files,
    # Arrays of zarr 3 and 2, each in a folder, or an OCDBT store.
    entry_pattern=r"_CHECKPOINT_METADATA|commit_success\.txt|orbax\.checkpoint|parity\.json|state/("
    r"_METADATA|_strings\.json|_sharding|([^/]+/(zarr\.json|\.z(array|attrs|group)|\d+(\.\d+)*|c(/\d+)*/?)?)|"
    r"(ocdbt\.process_\d+/)?(manifest\.ocdbt|d/([0-9a-f]{32})?)?|"
    r"array_metadatas/(process_\d+)?)?",
)


_ARRAY_TYPES = {"np.ndarray", "jax.Array"}
_MAX_JSON_BYTES = 1 << 24  # of a metadata file
_MAX_SCALAR_BYTES = 16
_MAX_DEPTH = 64  # of the tree
_OTHER_INODES = 20  # files and folders besides those of the arrays; Orbax 0.12 creates 8
_LEAF_COST = 64  # objects charged to the budget, because tensorstore opens a store for each array


def _ts_spec(folder: Path, key_path: KeyPath, tree: dict[str, Any]) -> zarr.TensorStoreSpec:
    """Return the tensorstore spec of an array.

    Older versions of Orbax leave out chunks of zeros.  Only newer ones say in the tree that they store all chunks.
    """
    name, base = ".".join(key_path), folder.resolve()  # tensorstore refuses ".."
    if _uses_ocdbt(tree):
        base_store = {"driver": "file", "path": f"{base}/"}  # not a URL, in which "%" or "?" has a special meaning
        store: dict[str, Any] = {"driver": "ocdbt", "base": base_store, "path": f"{name}/"}
    else:
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise InputError(
                f"{folder / _TREE_FILE} names the array {name!r}, which may be outside of the folder: do not trust it"
            )
        zarr.check_path(base / name)
        store = {"driver": "file", "path": f"{base}/{name}/"}
    is_complete = bool(tree.get("store_array_data_equal_to_fill_value", False))
    driver = "zarr3" if tree.get("use_zarr3", False) else "zarr"
    return {"driver": driver, "kvstore": store, "fill_missing_data_reads": not is_complete}


def _uses_ocdbt(tree: dict[str, Any]) -> bool:
    return bool(tree.get("use_ocdbt", True))


def _find_item(path: Path) -> Path:
    """Return the folder with the tree: `path` itself, or its only checkpoint or item."""
    for _ in range(3):  # steps / a step / its item
        if (path / _TREE_FILE).is_file():
            return path
        items = [folder for folder in _list_subfolders(path) if is_item(folder)]
        if len(items) != 1:
            names = ", ".join(folder.name for folder in items[:20])
            what = f"has several checkpoints or items ({names}): give one of them" if items else f"has no {_TREE_FILE}"
            raise InputError(f"{path} {what}" + ("" if items else ": it is not an Orbax checkpoint, or an incomplete one"))
        path = items[0]
    raise InputError(f"{path} has no {_TREE_FILE}: it is not an Orbax checkpoint, or an incomplete one")


def is_item(folder: Path) -> bool:
    """Return whether a folder is itself a checkpoint or an item of one."""
    return (folder / _TREE_FILE).is_file() or (folder / _CHECKPOINT_FILE).is_file()


def _list_subfolders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return bounded_json.read_object(path, max_bytes=_MAX_JSON_BYTES)
    except (OSError, InputError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path} is not a JSON object ({what}): the checkpoint is damaged, so write it again") from None


def _read_strings(folder: Path, keys: list[KeyPath]) -> dict[KeyPath, str]:
    if not keys:
        return {}
    strings = _read_json(folder / _STRINGS_FILE)
    found = {key_path: strings[".".join(key_path)] for key_path in keys if ".".join(key_path) in strings}
    return {key_path: text for key_path, text in found.items() if isinstance(text, str)}


def check_tensorstore(path: Path) -> None:
    """Raise InputError if tensorstore, which reads a checkpoint, is not installed."""
    if not find_spec("tensorstore"):
        raise InputError(f"{path} is an Orbax checkpoint: to read it, pip install tensorstore")


def _check_inodes(path: Path, specs: Mapping[str, ArraySpec]) -> None:
    """Raise InputError if the disk has too few inodes for the files and folders of the arrays.

    This is checked in advance, because when one thread of tensorstore fails, the others continue for a while: they print
    errors, and write into a folder that is being removed.
    """
    # An array takes its folder, the file zarr.json, the folder c, and for each axis a folder or, for the last one, a file.
    needed = sum(3 + len(spec.shape) for spec in specs.values()) + _OTHER_INODES
    disk = os.statvfs(path.parent)
    if disk.f_files and disk.f_favail < needed:  # f_files is 0 on file systems without inodes
        left = f"its disk has space for {disk.f_favail:,}"
        raise InputError(f"{path} takes up to {needed:,} files and folders, {left}: delete some there, or write elsewhere")


def _save(path: Path, tree: Any, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    try:
        from orbax.checkpoint import v1 as ocp
    except ImportError:
        raise InputError(f"{path} would be an Orbax checkpoint: pip install orbax-checkpoint") from None

    def fill(node: Any) -> Any:
        return {key: fill(value) for key, value in node.items()} if isinstance(node, dict) else arrays[node]

    context = ocp.Context()
    context.memory.write_concurrent_bytes = max((array.nbytes for array in arrays.values()), default=0) + 1
    context.memory.deepcopy_host_arrays = False  # nothing else modifies them
    context.array.saving.use_ocdbt = False  # OCDBT keeps all data in memory until the commit
    with warnings.catch_warnings(), _silence_loggers("absl", "asyncio"), context:
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # from Orbax, about its own API
        ocp.save(path.resolve(), fill(tree), custom_metadata=dict(metadata))


@contextmanager
def _silence_loggers(*names: str) -> Iterator[None]:
    """Silence some loggers.

    Orbax warns that OCDBT is off, and it logs in hundreds of lines each error that it also raises.
    """
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
