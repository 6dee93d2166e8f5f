"""Orbax checkpoints: folders of zarr arrays, plain or in an OCDBT store, read through tensorstore alone.

The tree is in `_METADATA`, as JSON; an array's name is its keys joined with dots.  See
https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html.
"""

import errno
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from parity.containers.budget import Budget
from parity.containers.container import Container, Contents, Sink, Slot, Stored, Words
from parity.containers.scratch import Scratch
from parity.layout import Array
from vit_spec import InputError, bounded_json

_TREE, _CHECKPOINT, _TEXTS = "_METADATA", "_CHECKPOINT_METADATA", "_strings.json"
_CACHE = 1 << 26  # bytes of chunks kept besides the largest


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
    ts, budget = _tensorstore(path), budget or Budget()
    folder = _item(path)
    stored, longest = _check_files(folder, budget)
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

    arrays: dict[Words, Stored] = {}
    blosc = {words: _check_described(ts, folder, words, spec) for words, spec in specs.items()}
    pending = {words: ts.open(spec, open=True, read=True) for words, spec in specs.items()}  # all at once
    for words, future in pending.items():
        arrays[words] = _opened(folder, words, specs[words], future, stored, budget, longest, blosc[words])
    largest = max((array.chunk for array in arrays.values() if isinstance(array, _Zarr)), default=0)
    context = ts.Context({"cache_pool": {"total_bytes_limit": largest + _CACHE}})
    for array in arrays.values():
        if isinstance(array, _Zarr):
            array.context = context
    for words, kind in leaves:
        if kind == "scalar":
            scalar = arrays.pop(words)
            if scalar.shape or scalar.nbytes > _SCALAR:
                raise InputError(f"{folder}: {'/'.join(words)} is a scalar of shape {scalar.shape}: write it again")
            notes["/".join(words)] = np.asarray(scalar).item()
    return Contents("orbax", arrays, notes)


def _check_files(folder: Path, budget: Budget) -> tuple[int, int]:
    """Return the bytes that all files in a folder take on disk, and those of the longest file.

    Anything else in it is refused: to open a pipe is to wait for its writer, also where a link to a folder leads to it.
    So is a file of holes, which take no room on disk, and memory when it is read.
    """
    total, longest, todo = 0, 0, [folder]
    while todo:
        for entry in os.scandir(todo.pop()):
            budget.make()
            if entry.is_dir(follow_symlinks=False):
                todo.append(Path(entry.path))
            elif entry.is_file():  # a link to one is a file too: hub caches are made of links
                size = entry.stat().st_size
                stored = _on_disk(entry.path, size)
                if size > _LARGEST + _DENSE * stored:
                    what = f"{size:,} bytes, of which {stored:,} are on disk"
                    raise InputError(f"{entry.path} is {what}: do not trust this checkpoint, or write it again")
                if entry.name == _MANIFEST and size > _JSON:
                    raise InputError(f"{entry.path} is {size:,} bytes, at most {_JSON:,} are read: write it again")
                total, longest = total + stored, max(longest, size)
            else:
                what = "a link to a folder" if entry.is_dir() else "no file and no folder"
                raise InputError(f"{entry.path} is {what}: do not trust this checkpoint, or write it again")
    return total, longest


def _on_disk(path: str, size: int) -> int:
    """Return how many bytes of a file are in no hole."""
    if size <= _SMALL:
        return size
    found = at = 0
    try:
        with open(path, "rb", buffering=0) as file:
            for _ in range(_EXTENTS):
                start = file.seek(at, os.SEEK_DATA)
                at = file.seek(start, os.SEEK_HOLE)
                found += at - start
    except OSError as error:
        return found if error.errno == errno.ENXIO else size  # ENXIO: no more data; others: a system without holes
    return found


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


def _check_described(ts: Any, folder: Path, words: Words, spec: dict[str, Any]) -> bool:
    """Hold the description of an array to the limits of JSON before tensorstore parses it, which has none.

    Return whether its chunks are packed with blosc.
    """
    name, key = f"{folder}: {'/'.join(words)}", _DESCRIPTION[spec["driver"]]
    try:
        store = ts.KvStore.open(spec["kvstore"]).result()
        longer = _is_longer(store, key, bounded_json.BYTES)
        text = b"" if longer else store.read(key).result().value
    except Exception as error:  # tensorstore has one kind of error for damage, and several for its absence
        raise InputError(f"{name} cannot be opened ({_line(error)}): it is incomplete, so write it again") from None
    try:
        if longer:
            raise InputError(f"more than {bounded_json.BYTES:,} bytes")
        return _is_blosc(bounded_json.parse_object(text))
    except InputError as error:
        raise InputError(f"{name} is described by what is no description ({error}): write it again") from None


def _is_blosc(described: dict[str, Any]) -> bool:
    """Return whether chunks begin with blosc's own header, in which stands how much memory it takes to unpack them.

    Raises:
        InputError: they have one that something else is around, so that it cannot be read ahead.
    """
    codecs = described.get("codecs", [described.get("compressor")])  # of zarr 3, and of zarr 2
    last = codecs[-1] if isinstance(codecs, list) and codecs else None
    outermost = last.get("id", last.get("name")) if isinstance(last, dict) else last
    inside = [codecs[:-1], last.get("configuration") if isinstance(last, dict) else None] if last else []
    if '"blosc"' in json.dumps(inside):
        raise InputError("blosc within another codec")
    return bool(outermost == "blosc")


def _is_longer(store: Any, key: str | bytes, length: int) -> bool:
    """Return whether a value of a store has more bytes, without reading it."""
    try:
        return bool(store.read(key, byte_range=slice(length, length + 1)).result().value)
    except ValueError as error:
        if "OUT_OF_RANGE" in str(error):
            return False
        raise


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
_DESCRIPTION = {"zarr": ".zarray", "zarr3": "zarr.json"}
_JSON = 1 << 24  # bytes of a file of metadata
_SCALAR = 16  # bytes at most
_DEPTH = 64  # of the tree
_LEAF = 64  # objects of the budget that an array counts as: tensorstore makes a store of it
_PIECE = 16  # and a chunk that may be missing: it is looked for
_PLACE = 16  # bytes that a shard says of a chunk in it
_LARGEST, _DENSE = 1 << 28, 64  # bytes of a chunk or a file, and times of the bytes that are on disk
_SMALL = 1 << 20  # bytes of a file whose holes are not looked for
_EXTENTS = 1 << 16  # that are looked for in one
_MANIFEST = "manifest.ocdbt"  # which is read whole
_SLACK = 1 << 16  # bytes that a chunk may be longer packed than it is, besides an eighth of it
_CHUNK = re.compile(rb"c|(c[/.])?\d+([/.]\d+)*")  # what a chunk of an array is called
_HEADER = 16  # bytes of a chunk of blosc ahead of what is packed; the second four of them are its bytes unpacked


class _Zarr(Stored):
    """An array of a zarr store."""

    context: Any = None  # where chunks are kept that were read, so that one read in pieces is unpacked once

    def __init__(self, name: str, spec: dict[str, Any], store: Any, longest: int, blosc: bool) -> None:
        """Take in an opened store.

        longest: bytes of the longest file that it may lie in.
        blosc: whether its chunks are packed so.
        """
        self.name, self.spec, self._blosc = name, spec, blosc
        self.shape, self.dtype = tuple(store.shape), np.dtype(store.dtype.numpy_dtype)
        if not self.dtype.itemsize or self.dtype.hasobject:
            raise ValueError(f"its entries are {store.dtype.name}, no numbers")
        self.chunk = prod(store.chunk_layout.read_chunk.shape or ()) * self.dtype.itemsize
        shard = prod(store.chunk_layout.write_chunk.shape or ()) * self.dtype.itemsize
        self.index = _PLACE * (shard // max(self.chunk, 1)) if shard > self.chunk else 0  # bytes, of each shard
        self._whole = max(shard, self.chunk)
        most = self._whole + self._whole // 8 + self.index + _SLACK
        self._most = None if longest <= most else most  # bytes of a stored chunk; None: none has more

    @cached_property
    def _store(self) -> Any:
        import tensorstore as ts

        self._check_chunks(ts.KvStore.open(self.spec["kvstore"]).result())
        return ts.open(self.spec, open=True, read=True, context=self.context).result()

    def _check_chunks(self, store: Any) -> None:
        """Refuse chunks that are longer than what they hold, or unpack to more: tensorstore makes room for all of it."""
        keys = store.list().result() if self._blosc or self._most is not None else []
        for key in filter(_CHUNK.fullmatch, keys):
            if self._most is not None and _is_longer(store, key, self._most):
                raise ValueError(f"a chunk of more than {self._most:,} bytes, of {self._whole:,} unpacked")
            if self._blosc and _is_longer(store, key, _HEADER):
                head = store.read(key, byte_range=slice(0, _HEADER)).result().value
                if int.from_bytes(head[4:8], "little") > self._whole:
                    raise ValueError(f"a chunk that unpacks to more than {self._whole:,} bytes")

    def read(self, first: int, last: int) -> Array:
        if first == last:
            return np.empty(0, self.dtype)
        row = prod(self.shape[1:])
        top, bottom = first // row, -(-last // row)
        try:
            store = self._store
            rows = (store[top:bottom] if self.shape else store).read().result()
        except Exception as error:  # tensorstore has one kind of error for damage, and several for its absence
            raise InputError(f"{self.name} cannot be read ({_line(error)}): it is damaged, so write it again") from None
        entries: Array = np.ascontiguousarray(rows).reshape(-1)[first - top * row : last - top * row].copy()
        return entries


def _opened(
    folder: Path, words: Words, spec: dict[str, Any], future: Any, stored: int, budget: Budget, longest: int, blosc: bool
) -> _Zarr:
    """Return an array, held to the bytes that are stored of all; `longest` and `blosc` as of `_Zarr`."""
    name = f"{folder}: {'/'.join(words)}"
    try:
        array = _Zarr(name, spec, future.result(), longest, blosc)
    except Exception as error:  # as above
        raise InputError(f"{name} cannot be opened ({_line(error)}): it is incomplete, so write it again") from None
    if array.chunk > min(max(array.nbytes, 1), _LARGEST + _DENSE * stored) or array.nbytes > 1 << 62:
        raise InputError(f"{name} has a chunk larger than itself, or an impossible shape: it is damaged, so write it again")
    if array.index > stored:
        raise InputError(f"{name} has shards whose index is not there: it is damaged, so write it again")
    if spec["fill_missing_data_reads"]:  # of others the first that is missing ends reading
        budget.make(_PIECE * (array.nbytes // max(array.chunk, 1)))
    return array


def _spec(folder: Path, words: Words, tree: dict[str, Any]) -> dict[str, Any]:
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


def _path(leaf: dict[str, Any]) -> Words:
    return tuple(str(key["key"]) for key in leaf["key_metadata"])


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


def _line(error: Exception) -> str:
    return str(error).split("\n")[0].split(" [")[0][:200]


def _tensorstore(path: Path) -> Any:
    try:
        import tensorstore
    except ImportError:
        raise InputError(f"{path} is an Orbax checkpoint: to read it, pip install orbax-checkpoint") from None
    return tensorstore


def _check_inodes(path: Path, slots: Mapping[str, Slot]) -> None:
    """Refuse a disk that cannot hold so many files.

    tensorstore's threads go on for a while after one of them has failed: they print what they meet, and write into a folder
    that is being removed.
    """
    # Of each array: its folder, zarr.json, c, and a folder or a file for each axis.  Then groups, and what Orbax adds.
    groups = {"/".join(key.split("/")[: n + 1]) for key in slots for n in range(key.count("/"))}
    needed = sum(3 + len(slot.shape) for slot in slots.values()) + len(groups) + 20
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
