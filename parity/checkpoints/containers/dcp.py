"""torch.distributed.checkpoint folders: the file `.metadata`, and for each process files with chunks of tensors.

`.metadata` is a pickle.  torch's own reader runs it; this one reads it as data.  It lists the chunks of each tensor.  Each
chunk is a torch.save archive with one tensor, which lies at an offset in a file.  See
https://github.com/pytorch/pytorch/blob/main/torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import (
    ArraySpec,
    Container,
    Contents,
    File,
    FileSlice,
    KeyPath,
    StoredArray,
    Writer,
)
from parity.checkpoints.containers.pickle_globals import Global, allowlist
from parity.checkpoints.containers.pickles import MAX_PICKLE_BYTES, load
from parity.checkpoints.containers.scratch import ScratchFile, check_torch
from parity.checkpoints.containers.torch_zip import DTYPES, read
from parity.checkpoints.layout import Array
from vit_spec import InputError

_METADATA = ".metadata"
_MAX_CHUNKS = 1 << 14  # of one tensor
_MAX_DEPTH = 64  # of a state dict
_CHUNK_COST = 8  # objects charged to the budget
_CHUNK_OBJECTS, _CHUNK_TEXT_BYTES = (
    1 << 10,
    1 << 16,
)  # budget for the archive of one chunk; an archive that torch wrote takes a tenth of it
_CLASS_NAMES = (
    "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta"
)
_PACKAGE = "torch.distributed.checkpoint"
_ALLOWED_GLOBALS = allowlist(
    {
        f"{_PACKAGE}.metadata._MEM_FORMAT_ENCODING": lambda code: code,
        "torch.serialization._get_layout": lambda name: name,
    },
    classes=[*(f"{_PACKAGE}.metadata.{name}" for name in _CLASS_NAMES.split()), f"{_PACKAGE}.filesystem._StorageInfo"],
    constants=[*(f"torch.{name}" for name in DTYPES), "torch.strided", "torch.preserve_format", "torch.contiguous_format"],
)


def recognises(path: Path, head: bytes) -> bool:
    """Return whether a folder has the metadata of a distributed checkpoint."""
    return path.is_dir() and (path / _METADATA).is_file()


def open_(path: Path, budget: Budget | None = None) -> Contents:
    """Read the metadata of a distributed checkpoint.

    Tensors have the key path that they had in the state dict.  Other entries are arbitrary pickles: they are not read, and
    their value in the metadata is "not read".

    Raises:
        InputError: the folder is damaged or incomplete, or its `.metadata` names classes or functions that no distributed
            checkpoint needs.
    """
    metadata_path, budget = path / _METADATA, budget or Budget()
    root = load(File(metadata_path).read(0, MAX_PICKLE_BYTES + 1), str(metadata_path), _ALLOWED_GLOBALS, budget)
    try:
        return _parse_metadata(path, root.state, budget)
    except InputError as error:
        raise InputError(str(error) if str(path) in str(error) else f"{metadata_path}: {error}") from None
    except Exception as error:  # the classes are right, but their attributes can be anything
        what = f"{metadata_path} is damaged, or was written by an unknown version of torch ({type(error).__name__})"
        raise InputError(f"{what}: write it again") from None


@contextmanager
def create(path: Path, specs: Mapping[str, ArraySpec], metadata: Mapping[str, str]) -> Iterator[Writer]:
    """Write a state dict of tensors with torch.distributed.checkpoint.save, from one process.

    `metadata` is not written, because the folder has no place for it: the caller writes it to a file beside it.  The arrays
    are collected in a scratch file, which takes as much disk space as all arrays.

    Raises:
        InputError: torch is not installed.
    """
    check_torch(path)
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    with ScratchFile(path, specs) as scratch:
        yield scratch
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as intended
            errors: list[BaseException] = []
            try:
                save(scratch.tensors(), checkpoint_id=path, no_dist=True)
            except CheckpointException as error:  # has the errors of all processes, and here there is one process
                errors += [failure for failure, _ in error.failures.values()]
            if errors:  # raised outside of the except block, so that its own cause is kept
                raise errors[0]


def data_files(path: Path) -> list[Path]:
    """Return the files of the checkpoint in a folder."""
    return [path / _METADATA, *(file for file in path.glob("*.distcp") if file.is_file())]


CONTAINER = Container(
    name="dcp",
    description="torch.distributed.checkpoint, a folder",
    recognises=recognises,
    open=open_,
    suffixes=(),
    create=create,
    any_order=True,
    data_files=data_files,
    entry_pattern=r"\.metadata|\w+\.distcp|parity\.json",
)


@dataclass(eq=False)
class _Chunk:
    """A chunk of a tensor: its position in the tensor, and its byte range in a file."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: np.dtype[Any]
    file_slice: FileSlice

    @cached_property
    def array(self) -> StoredArray:
        tensor = read(self.file_slice, Budget(_CHUNK_OBJECTS, _CHUNK_TEXT_BYTES))
        if not isinstance(tensor, StoredArray) or tensor.shape != self.sizes or tensor.dtype != self.dtype:
            file = self.file_slice.file.path
            raise InputError(
                f"{file} lacks the chunk of {self.name} that the metadata describe: write the checkpoint again"
            )
        return tensor


class Chunk(Protocol):
    """A chunk of a tensor: the index of its first element on each axis, its lengths, and its elements."""

    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def array(self) -> StoredArray: ...


class ShardedArray(StoredArray):
    """A tensor in chunks; a chunk is opened when some of its elements are read."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], chunks: Sequence[Chunk]) -> None:
        self.shape, self.dtype, self.chunks = shape, dtype, chunks

    def read(self, start: int, stop: int) -> Array:
        if start == stop:
            return np.empty(0, self.dtype)
        if len(self.chunks) == 1:
            return self.chunks[0].array.read(start, stop)
        row_size = prod(self.shape[1:])
        top, bottom = start // row_size, -(-stop // row_size)  # the rows with these elements
        rows = np.empty((bottom - top, *self.shape[1:]), self.dtype)
        # As unsigned integers, because numpy copies their bits unchanged.
        bits = f"u{self.dtype.itemsize}" if self.dtype.itemsize <= 8 else self.dtype
        for chunk in self.chunks:
            first, last = max(top, chunk.offsets[0]), min(bottom, chunk.offsets[0] + chunk.sizes[0])
            if first < last:
                chunk_row_size = prod(chunk.sizes[1:])
                part = chunk.array.read(
                    (first - chunk.offsets[0]) * chunk_row_size, (last - chunk.offsets[0]) * chunk_row_size
                )
                inner_slices = (slice(o, o + n) for o, n in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True))
                target = rows.view(bits)[(slice(first - top, last - top), *inner_slices)]
                target[...] = part.view(bits).reshape(target.shape)
        return rows.reshape(-1)[start - top * row_size : stop - top * row_size].copy()


def _parse_metadata(path: Path, state: dict[str, Any], budget: Budget) -> Contents:
    storage_infos = {}
    for index, storage_info in state["storage_data"].items():
        budget.spend(_CHUNK_COST)
        offset = index.state.get("offset")
        key = None if offset is None else _offsets_key(_parse_sizes(offset))
        storage_infos[_check_name(index.state["fqn"]), key] = storage_info.state
    files: dict[str, File] = {}
    arrays: dict[KeyPath, StoredArray] = {}
    metadata: dict[str, Any] = {}
    for name, entry in state["state_dict_metadata"].items():
        key_path = _key_path(_check_name(name), (state.get("planner_data") or {}).get(name))
        budget.spend(_CHUNK_COST, len(name) + sum(map(len, key_path)) + len(key_path))
        if entry.name.endswith("BytesStorageMetadata"):
            metadata["/".join(key_path)] = "not read"
            continue
        if key_path in arrays:
            raise InputError(f"{path} has {'/'.join(key_path)!r} twice: keep one of them")
        shape, dtype = _parse_sizes(entry.state["size"]), _parse_dtype(entry.state["properties"].state)
        chunks = []
        if len(entry.state["chunks"]) > _MAX_CHUNKS:
            raise InputError(f"{path / _METADATA} has more than {_MAX_CHUNKS} chunks of {name}: write it in fewer")
        for chunk in entry.state["chunks"]:
            budget.spend(_CHUNK_COST)
            offsets, sizes = _parse_sizes(chunk.state["offsets"]), _parse_sizes(chunk.state["sizes"])
            file_slice = _find_chunk(path, name, storage_infos.get((name, _offsets_key(offsets))), files)
            chunks.append(_Chunk(name, offsets, sizes, dtype, file_slice))
        _check_tiling(path, name, shape, chunks, budget)
        arrays[key_path] = ShardedArray(shape, dtype, chunks)
    return Contents("dcp", arrays, metadata)


def _check_name(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError("not a name")
    return name


def _offsets_key(offsets: tuple[int, ...]) -> str:
    """Return offsets as a dictionary key: text, because a file can choose integers whose tuples all have the same hash."""
    return ",".join(map(str, offsets))


def _key_path(name: str, path: Any) -> KeyPath:
    """Return the key path that a flattened name had in the state dict."""
    if not isinstance(path, tuple) or not path:
        return (name,)
    if len(path) > _MAX_DEPTH or not all(isinstance(key, str) or (type(key) is int and 0 <= key < 1 << 62) for key in path):
        raise ValueError("not a key path")
    return tuple(map(str, path))


def _parse_sizes(sizes: Any) -> tuple[int, ...]:
    if len(sizes) > 63 or not all(type(n) is int and 0 <= n < 1 << 62 for n in sizes):
        raise ValueError("impossible sizes")
    if prod(max(n, 1) for n in sizes) >= 1 << 58:
        raise ValueError("impossible sizes")
    return tuple(sizes)


def _parse_dtype(properties: Any) -> np.dtype[Any]:
    kind = properties[0]
    if not isinstance(kind, Global):
        raise ValueError("not a dtype")
    dtype: np.dtype[Any] = DTYPES[kind.name.removeprefix("torch.")]
    return dtype


def _find_chunk(path: Path, name: str, storage_info: dict[str, Any] | None, files: dict[str, File]) -> FileSlice:
    """Return the byte range of a chunk; `files` caches the files that are open, by name."""
    if storage_info is None:
        raise InputError(f"{path / _METADATA} does not say where a chunk of {name} is: write the checkpoint again")
    if storage_info.get("transform_descriptors"):
        raise InputError(f"{path} has {name} compressed: save it without extensions")
    file, offset, length = storage_info["relative_path"], storage_info["offset"], storage_info["length"]
    if file != Path(file).name or file in ("", ".", ".."):
        raise InputError(f"{path / _METADATA} names the file {file!r}, which may be outside of the folder: do not trust it")
    if file not in files:
        if not (path / file).is_file():
            raise InputError(f"{path} lacks {file!r}: it is incomplete, so fetch or write it again")
        files[file] = File(path / file)
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0 or offset + length > files[file].size:
        raise InputError(f"{path / file} ends before {name} does: it is incomplete, so fetch or write it again")
    return FileSlice(files[file], offset, length)


def _check_tiling(path: Path, name: str, shape: tuple[int, ...], chunks: list[_Chunk], budget: Budget) -> None:
    """Raise InputError unless the chunks tile the tensor: inside it, disjoint, and with its number of elements."""
    if any(len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape) for chunk in chunks):
        raise ValueError("chunks of another number of dimensions")
    starts = np.array([chunk.offsets for chunk in chunks], np.int64).reshape(len(chunks), len(shape))
    ends = starts + np.array([chunk.sizes for chunk in chunks], np.int64).reshape(starts.shape)
    is_tiled = sum(prod(chunk.sizes) for chunk in chunks) == prod(shape) and bool((ends <= np.array(shape, np.int64)).all())
    if is_tiled and len(chunks) > 1 and shape:
        order = np.argsort(starts[:, 0], kind="stable")
        starts, ends = starts[order], ends[order]
        # Along the first axis, a chunk can overlap only those later chunks that begin before its end.
        last = np.searchsorted(starts[:, 0], ends[:, 0], side="left")
        budget.spend_comparisons(int((last - np.arange(len(chunks)) - 1).clip(0).sum()) * len(shape))
        is_tiled = not any(
            bool(((starts[i] < ends[i + 1 : last[i]]) & (starts[i + 1 : last[i]] < ends[i])).all(-1).any())
            for i in range(len(chunks) - 1)
        )
    if not is_tiled:
        raise InputError(f"{path / _METADATA}: the chunks of {name} do not tile {shape}: it is incomplete, write it again")
