"""Orbax checkpoints: folders of zarr arrays, plain or in an OCDBT store, read through tensorstore alone.

The tree is in `_METADATA`, as JSON; an array's name is its keys joined with dots.  See
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

from parity.checkpoints.containers import zarr
from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import Container, Contents, Sink, Slot, Words
from parity.checkpoints.containers.scratch import Scratch
from parity.checkpoints.layout import Array
from vit_spec import InputError, bounded_json

_TREE, _CHECKPOINT, _TEXTS = "_METADATA", "_CHECKPOINT_METADATA", "_strings.json"


def recognises(path: Path, head: bytes) -> bool:
    """Return whether a folder is an Orbax checkpoint, an item of one, or holds some in folders of their own."""
    return path.is_dir() and (_is_part(path) or any(_is_part(folder) for folder in _folders(path)))


def open_(path: Path, budget: Budget | None = None) -> Contents:
    """Read the metadata of a checkpoint.

    path: a checkpoint with one item, an item of one with several (`checkpoint/params`), or a folder with one step.
    Arrays have the path of their keys; scalars and text of the tree are notes, and so is custom metadata.

    Raises:
        InputError: a folder that is damaged or that holds several steps or items; names them.
    """
    _check_installed(path)
    budget, folder = budget or Budget(), _item(path)
    there = zarr.files(folder, budget)
    tree, custom = _json(folder / _TREE), _custom(folder)
    try:
        leaves = [_leaf(leaf, budget) for leaf in tree["tree_metadata"].values()]
        specs = {words: _spec(folder, words, tree) for words, kind in leaves if kind in _ARRAYS or kind == "scalar"}
        texts = [words for words, kind in leaves if kind == "string"]
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{folder / _TREE} is damaged, or of an Orbax that is not known: write it again") from None
    if len(specs) + len(texts) < sum(kind in (*_ARRAYS, "scalar", "string") for _, kind in leaves):
        raise InputError(f"{folder / _TREE} names an array twice: write it again")
    notes = {**custom, **{"/".join(words): text for words, text in _texts(folder, texts).items()}}

    arrays = zarr.arrays(folder, specs, there, budget)
    for words, kind in leaves:
        if kind == "scalar":
            scalar = arrays.pop(words)
            if scalar.shape or scalar.nbytes > _SCALAR:
                raise InputError(f"{folder}: {'/'.join(words)} is a scalar of shape {scalar.shape}: write it again")
            notes["/".join(words)] = np.asarray(scalar).item()
    return Contents("orbax", arrays, notes)


def _custom(folder: Path) -> dict[str, Any]:
    """Return the custom metadata of a checkpoint, of which `folder` is an item or all."""
    for place in (folder, folder.parent):
        if (place / _CHECKPOINT).is_file():
            custom = _json(place / _CHECKPOINT).get("custom_metadata") or {}
            if not isinstance(custom, dict):
                raise InputError(f"{place / _CHECKPOINT} has custom_metadata that are no JSON object: write it again")
            return custom
    return {}


def _leaf(leaf: dict[str, Any], budget: Budget) -> tuple[Words, str]:
    """Return the path of a leaf of the tree, and what it is."""
    keys = [key["key"] for key in leaf["key_metadata"]]
    if len(keys) > _DEPTH or not all(isinstance(key, str) or type(key) is int for key in keys):
        raise TypeError("no path")
    words = tuple(map(str, keys))
    budget.make(_LEAF, sum(map(len, words)))
    return words, str(leaf["value_metadata"]["value_type"])


@contextmanager
def create(path: Path, slots: Mapping[str, Slot], notes: Mapping[str, str]) -> Iterator[Sink]:
    """Write a checkpoint of nested dictionaries, keys split at "/", that `ocp.load(path)` gives back.

    Notes become its custom metadata.  The pieces gather in a scratch file as large as the arrays; Orbax then holds
    the largest array in memory, compressed, for it writes each in one chunk.

    Raises:
        InputError: an array without entries, which Orbax does not keep, or one that is also a folder of others; a disk
            that has no room for so many files.
    """
    if empty := [key for key, slot in slots.items() if 0 in slot.shape]:
        raise InputError(f"Orbax keeps no array without entries: leave out {', '.join(empty)}, or write safetensors")
    nested: dict[str, Any] = {}
    for key in slots:
        *parents, leaf = key.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise InputError(f"{parent!r} in {key!r} would be both an array and a group: rename one of them")
        if leaf in node:
            raise InputError(f"{key!r} would be both an array and a group: rename one of them")
        node[leaf] = key
    _check_inodes(path, slots)
    with Scratch(path, slots) as scratch:
        yield scratch
        _save(path, nested, scratch.arrays(), notes)


CONTAINER = Container(
    name="orbax",
    what="Orbax checkpoint, a folder",
    recognises=recognises,
    open=open_,
    suffixes=(),
    create=create,
    any_order=True,
    entries=r"_CHECKPOINT_METADATA|commit_success\.txt|orbax\.checkpoint|state|parity\.json",
)


_ARRAYS = {"np.ndarray", "jax.Array"}
_JSON = 1 << 24  # bytes of a file of metadata
_SCALAR = 16  # bytes at most
_DEPTH = 64  # of the tree
_BESIDE = 20  # files and folders besides those of the arrays: Orbax 0.12 takes 8
_LEAF = 64  # objects of the budget that an array counts as: tensorstore makes a store of it


def _spec(folder: Path, words: Words, tree: dict[str, Any]) -> zarr.Spec:
    """Return where tensorstore finds an array, and that a missing piece is an error rather than zeros."""
    name, base = ".".join(words), folder.absolute()
    if tree.get("use_ocdbt", True):
        below = {"driver": "file", "path": f"{base}/"}  # no URL, in which some names are others
        place: dict[str, Any] = {"driver": "ocdbt", "base": below, "path": f"{name}/"}
    else:
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise InputError(f"{folder / _TREE} names the array {name!r}, which may lie outside: do not trust it")
        place = {"driver": "file", "path": f"{base}/{name}/"}
    complete = bool(tree.get("store_array_data_equal_to_fill_value", False))
    driver = "zarr3" if tree.get("use_zarr3", False) else "zarr"
    return {"driver": driver, "kvstore": place, "fill_missing_data_reads": not complete}


def _item(path: Path) -> Path:
    """Return the folder with the tree: `path`, or the only one in it."""
    for _ in range(3):  # steps / a step / its item
        if (path / _TREE).is_file():
            return path
        parts = [folder for folder in _folders(path) if _is_part(folder)]
        if len(parts) != 1:
            names = ", ".join(folder.name for folder in parts[:20])
            what = f"holds several checkpoints or items ({names}): give one of them" if parts else f"has no {_TREE}"
            raise InputError(f"{path} {what}" + ("" if parts else ": it is no Orbax checkpoint, or one never completed"))
        path = parts[0]
    raise InputError(f"{path} has no {_TREE}: it is no Orbax checkpoint, or one never completed")


def _is_part(folder: Path) -> bool:
    return (folder / _TREE).is_file() or (folder / _CHECKPOINT).is_file()


def _folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir())


def _json(path: Path) -> dict[str, Any]:
    try:
        return bounded_json.read_object(path, longest=_JSON)
    except (OSError, InputError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path} is no JSON object ({what}): the checkpoint is damaged, so write it again") from None


def _texts(folder: Path, keys: list[Words]) -> dict[Words, str]:
    if not keys:
        return {}
    texts = _json(folder / _TEXTS)
    found = {words: texts[".".join(words)] for words in keys if ".".join(words) in texts}
    return {words: text for words, text in found.items() if isinstance(text, str)}


def _check_installed(path: Path) -> None:
    if not find_spec("tensorstore"):
        raise InputError(f"{path} is an Orbax checkpoint: to read it, pip install orbax-checkpoint")


def _check_inodes(path: Path, slots: Mapping[str, Slot]) -> None:
    """Refuse a disk that cannot hold so many files.

    tensorstore's threads go on for a while after one of them has failed: they print what they meet, and write into a folder
    that is being removed.
    """
    # Of each array its folder, zarr.json, c, and a folder or a file for each axis.
    needed = sum(3 + len(slot.shape) for slot in slots.values()) + _BESIDE
    disk = os.statvfs(path.parent)
    if disk.f_files and disk.f_favail < needed:  # file systems that need no inodes say 0
        left = f"its disk has room for {disk.f_favail:,}"
        raise InputError(f"{path} takes up to {needed:,} files and folders, {left}: delete some there, or write elsewhere")


def _save(path: Path, tree: Any, arrays: Mapping[str, Array], notes: Mapping[str, str]) -> None:
    try:
        from orbax.checkpoint import v1 as ocp
    except ImportError:
        raise InputError(f"{path} would be an Orbax checkpoint: pip install orbax-checkpoint") from None

    def fill(node: Any) -> Any:
        return {key: fill(value) for key, value in node.items()} if isinstance(node, dict) else arrays[node]

    context = ocp.Context()
    context.memory.write_concurrent_bytes = max((array.nbytes for array in arrays.values()), default=0) + 1
    context.memory.deepcopy_host_arrays = False  # nobody else changes them
    context.array.saving.use_ocdbt = False  # whose store keeps all that it was given in memory until it is committed
    with warnings.catch_warnings(), _unlogged("absl", "asyncio"), context:
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # Orbax's own, about its own parts
        ocp.save(path.absolute(), fill(tree), custom_metadata=dict(notes))


@contextmanager
def _unlogged(*names: str) -> Iterator[None]:
    """Keep logs silent: Orbax warns that there is no OCDBT, and tells a failure, which it raises, in hundreds of lines."""
    logs = [logging.getLogger(name) for name in names]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
