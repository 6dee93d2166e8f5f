"""torch.distributed.checkpoint folders: tensors in shards, one file or more a process, and `.metadata` beside them.

`.metadata` is a pickle, which torch's own reader runs; here it is read as data.  It says of every tensor which chunks
it has, and of every chunk the file, offset and length, where an archive of torch.save with one tensor lies.  See
https://github.com/pytorch/pytorch/blob/main/torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from parity.checkpoints.containers.archive import DTYPES, read
from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import Container, Contents, File, Sink, Slot, Stored, Window, Words
from parity.checkpoints.containers.pickles import LIMIT, Global, load, table
from parity.checkpoints.containers.scratch import Scratch
from parity.checkpoints.layout import Array
from vit_spec import InputError

_METADATA = ".metadata"
_SHARDS = 1 << 14  # of one tensor
_DEPTH = 64  # of a state dict
_CHUNK = 8  # objects of the budget that a part of a tensor counts as
_PART_NODES, _PART_BYTES = 1 << 10, 1 << 16  # what opening the archive of one part may cost; torch's take a tenth of it
_CLASSES = (
    "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta"
)
_HOME = "torch.distributed.checkpoint"
_TABLE = table(
    {
        f"{_HOME}.metadata._MEM_FORMAT_ENCODING": lambda code: code,
        "torch.serialization._get_layout": lambda name: name,
    },
    records=[*(f"{_HOME}.metadata.{name}" for name in _CLASSES.split()), f"{_HOME}.filesystem._StorageInfo"],
    values=[*(f"torch.{name}" for name in DTYPES), "torch.strided", "torch.preserve_format", "torch.contiguous_format"],
)


def recognises(path: Path, head: bytes) -> bool:
    """Return whether a folder has the metadata of a distributed checkpoint."""
    return path.is_dir() and (path / _METADATA).is_file()


def open_(path: Path, budget: Budget | None = None) -> Contents:
    """Read the metadata of a distributed checkpoint.

    Tensors have the path that they had in the state dict.  Entries that are no tensors are pickles of anything: they
    are not read, which is their note.

    Raises:
        InputError: a folder that is damaged or incomplete, or metadata that asks for more than their own classes.
    """
    where, budget = path / _METADATA, budget or Budget()
    root = load(File(where).read(0, LIMIT + 1), str(where), _TABLE, budget)
    try:
        return _contents(path, root.state, budget)
    except InputError as error:
        raise InputError(str(error) if str(path) in str(error) else f"{where}: {error}") from None
    except Exception as error:  # metadata of the right classes with anything in their places
        what = f"{where} is damaged, or of a torch that is not known ({type(error).__name__})"
        raise InputError(f"{what}: write it again") from None


@contextmanager
def create(path: Path, slots: Mapping[str, Slot], notes: Mapping[str, str]) -> Iterator[Sink]:
    """Write a state dict of tensors with torch.distributed.checkpoint.save, from one process.

    It has no place for `notes`: they are left out, and whoever calls writes them beside it.  The pieces gather in a
    scratch file as large as the arrays.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    with Scratch(path, slots) as scratch:
        yield scratch
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # which is what is meant
            failures: list[BaseException] = []
            try:
                save(scratch.tensors(), checkpoint_id=path, no_dist=True)
            except CheckpointException as error:  # which has those of every process: here there is one
                failures += [failure for failure, _ in error.failures.values()]
            if failures:  # raised out here, it keeps what it came of
                raise failures[0]


CONTAINER = Container(
    name="dcp",
    what="torch.distributed.checkpoint, a folder",
    recognises=recognises,
    open=open_,
    suffixes=(),
    create=create,
    any_order=True,
    entries=r"\.metadata|\w+\.distcp|parity\.json",
)


@dataclass(eq=False)
class _Chunk:
    """A part of a tensor: its place in it, and in a file."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: np.dtype[Any]
    window: Window

    @cached_property
    def stored(self) -> Stored:
        tensor = read(self.window, Budget(_PART_NODES, _PART_BYTES))
        if not isinstance(tensor, Stored) or tensor.shape != self.sizes or tensor.dtype != self.dtype:
            file = self.window.file.path
            raise InputError(
                f"{file} has not the part of {self.name} that the metadata announce: write the checkpoint again"
            )
        return tensor


class _Sharded(Stored):
    """A tensor in chunks; those that hold wanted entries are opened when these are read."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], chunks: list[_Chunk]) -> None:
        self.shape, self.dtype, self.chunks = shape, dtype, chunks

    def read(self, first: int, last: int) -> Array:
        if first == last:
            return np.empty(0, self.dtype)
        if len(self.chunks) == 1:
            return self.chunks[0].stored.read(first, last)
        row = prod(self.shape[1:])
        top, bottom = first // row, -(-last // row)  # the rows that hold the entries
        rows = np.empty((bottom - top, *self.shape[1:]), self.dtype)
        bits = f"u{self.dtype.itemsize}" if self.dtype.itemsize <= 8 else self.dtype  # numpy then copies bits
        for chunk in self.chunks:
            start, stop = max(top, chunk.offsets[0]), min(bottom, chunk.offsets[0] + chunk.sizes[0])
            if start < stop:
                inner = prod(chunk.sizes[1:])
                part = chunk.stored.read((start - chunk.offsets[0]) * inner, (stop - chunk.offsets[0]) * inner)
                place = (slice(o, o + n) for o, n in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True))
                target = rows.view(bits)[(slice(start - top, stop - top), *place)]
                target[...] = part.view(bits).reshape(target.shape)
        return rows.reshape(-1)[first - top * row : last - top * row].copy()


def _contents(path: Path, state: dict[str, Any], budget: Budget) -> Contents:
    places = {}
    for index, info in state["storage_data"].items():
        budget.make(_CHUNK)
        offset = index.state.get("offset")
        places[_name(index.state["fqn"]), None if offset is None else _place(_sizes(offset))] = info.state
    files: dict[str, File] = {}
    arrays: dict[Words, Stored] = {}
    notes: dict[str, Any] = {}
    for name, entry in state["state_dict_metadata"].items():
        words = _words(_name(name), (state.get("planner_data") or {}).get(name))
        budget.make(_CHUNK, len(name) + sum(map(len, words)) + len(words))
        if entry.name.endswith("BytesStorageMetadata"):
            notes["/".join(words)] = "not read"
            continue
        if words in arrays:
            raise InputError(f"{path} holds {'/'.join(words)!r} twice: keep one of them")
        shape, dtype = _sizes(entry.state["size"]), _dtype(entry.state["properties"].state)
        chunks = []
        if len(entry.state["chunks"]) > _SHARDS:
            raise InputError(f"{path / _METADATA} cuts {name} into more than {_SHARDS} parts: write it in fewer")
        for chunk in entry.state["chunks"]:
            budget.make(_CHUNK)
            offsets, sizes = _sizes(chunk.state["offsets"]), _sizes(chunk.state["sizes"])
            window = _window(path, name, places.get((name, _place(offsets))), files)
            chunks.append(_Chunk(name, offsets, sizes, dtype, window))
        _check_cover(path, name, shape, chunks, budget)
        arrays[words] = _Sharded(shape, dtype, chunks)
    return Contents("dcp", arrays, notes)


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError("not a name")
    return name


def _place(offsets: tuple[int, ...]) -> str:
    """Return offsets as a key: tuples of chosen integers can all have the same hash, and text cannot."""
    return ",".join(map(str, offsets))


def _words(name: str, path: Any) -> Words:
    """Return the path in the state dict that a flattened name had."""
    if not isinstance(path, tuple) or not path:
        return (name,)
    if len(path) > _DEPTH or not all(isinstance(word, str) or (type(word) is int and 0 <= word < 1 << 62) for word in path):
        raise ValueError("not a path")
    return tuple(map(str, path))


def _sizes(sizes: Any) -> tuple[int, ...]:
    if len(sizes) > 63 or not all(type(n) is int and 0 <= n < 1 << 62 for n in sizes):
        raise ValueError("impossible sizes")
    if prod(max(n, 1) for n in sizes) >= 1 << 58:
        raise ValueError("impossible sizes")
    return tuple(sizes)


def _dtype(properties: Any) -> np.dtype[Any]:
    kind = properties[0]
    if not isinstance(kind, Global):
        raise ValueError("no dtype")
    dtype: np.dtype[Any] = DTYPES[kind.name.removeprefix("torch.")]
    return dtype


def _window(path: Path, name: str, info: dict[str, Any] | None, files: dict[str, File]) -> Window:
    if info is None:
        raise InputError(f"{path / _METADATA} says not where a part of {name} lies: write the checkpoint again")
    if info.get("transform_descriptors"):
        raise InputError(f"{path} keeps {name} compressed: save it without extensions")
    file, offset, length = info["relative_path"], info["offset"], info["length"]
    if file != Path(file).name or file in ("", ".", ".."):
        raise InputError(f"{path / _METADATA} names the file {file!r}, which may lie outside: do not trust it")
    if file not in files:
        if not (path / file).is_file():
            raise InputError(f"{path} lacks {file!r}: it is incomplete, so fetch or write it again")
        files[file] = File(path / file)
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0 or offset + length > files[file].size:
        raise InputError(f"{path / file} ends before {name} does: it is incomplete, so fetch or write it again")
    return Window(files[file], offset, length)


def _check_cover(path: Path, name: str, shape: tuple[int, ...], chunks: list[_Chunk], budget: Budget) -> None:
    """Refuse chunks that do not tile the tensor: within it, disjoint, and as many entries as it has."""
    if any(len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape) for chunk in chunks):
        raise ValueError("chunks of other dimensions")
    starts = np.array([chunk.offsets for chunk in chunks], np.int64).reshape(len(chunks), len(shape))
    ends = starts + np.array([chunk.sizes for chunk in chunks], np.int64).reshape(starts.shape)
    tiled = sum(prod(chunk.sizes) for chunk in chunks) == prod(shape) and bool((ends <= np.array(shape, np.int64)).all())
    if tiled and len(chunks) > 1 and shape:
        order = np.argsort(starts[:, 0], kind="stable")
        starts, ends = starts[order], ends[order]
        # A chunk can only overlap those that begin, along the first axis, before it ends.
        last = np.searchsorted(starts[:, 0], ends[:, 0], side="left")
        budget.compare(int((last - np.arange(len(chunks)) - 1).clip(0).sum()) * len(shape))
        tiled = not any(
            bool(((starts[i] < ends[i + 1 : last[i]]) & (starts[i + 1 : last[i]] < ends[i])).all(-1).any())
            for i in range(len(chunks) - 1)
        )
    if not tiled:
        raise InputError(
            f"{path / _METADATA}: the parts of {name} do not make up {shape}: it is incomplete, write it again"
        )
