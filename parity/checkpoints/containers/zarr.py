"""Arrays of zarr stores, read with tensorstore after checking that their sizes are plausible for the files on disk.

tensorstore allocates as much memory as a file claims to need: for a hole in a file, for the size in the header of a chunk,
and for metadata of any length.

See https://google.github.io/tensorstore/driver/zarr3 and, for the headers of chunks,
https://www.blosc.org/c-blosc/c-blosc.html.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from parity.checkpoints.containers import ocdbt, sparse_files
from parity.checkpoints.containers.budget import Budget, max_array_bytes
from parity.checkpoints.containers.container import KeyPath, StoredArray
from parity.checkpoints.layout import Array
from vit_spec import InputError, bounded_json
from vit_spec.printable import is_utf8

TensorStoreSpec = Mapping[str, Any]  # https://google.github.io/tensorstore/spec.html

_METADATA_KEYS = {"zarr": ".zarray", "zarr3": "zarr.json"}
_CACHE_BYTES = 1 << 26  # of chunks in memory, in addition to the largest chunk
_CHUNK_COST = 16  # objects charged to the budget for looking up a chunk that may be missing
_INDEX_ENTRY_BYTES = 16  # for each chunk, in the index of a shard
_MAX_MANIFEST_BYTES = 1 << 24  # the manifest is read whole
_CHUNK_SLACK_BYTES = 1 << 16  # a compressed chunk may be larger than the chunk by this and an eighth
_CHUNK_KEY = re.compile(rb"c|(c[/.])?\d+([/.]\d+)*")  # names of chunks
_BLOSC_HEADER_BYTES = 16  # bytes 4 to 8 are the decompressed size


@dataclass(frozen=True)
class DiskUsage:
    """The sizes of the files in a folder.

    stored_bytes: bytes of all files without their holes.
    max_file_bytes: bytes of the largest file with its holes.
    """

    stored_bytes: int
    max_file_bytes: int


def scan_files(folder: Path, budget: Budget) -> DiskUsage:
    """Measure and check all files in a folder.

    Raises:
        InputError: the folder has something other than files and folders; or a file consists mostly of holes, which take no
            disk space, but memory when they are read.  Links to folders are refused too.  For example, opening a pipe would
            wait for a process that writes to it, and a link to a folder can lead to a pipe.
    """
    total, max_file_bytes, folders = 0, 0, [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                budget.spend()
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                    continue
                size, stored_bytes = _check_file(entry)
                total, max_file_bytes = total + stored_bytes, max(max_file_bytes, size)
    return DiskUsage(total, max_file_bytes)


def _check_file(entry: os.DirEntry[str]) -> tuple[int, int]:
    """Return the size of a file in bytes, with its holes and without them; raise InputError as in `scan_files`."""
    if not entry.is_file():  # also a symbolic link to a file is one: hub caches consist of links
        what = "a link to a folder" if entry.is_dir() else "neither a file nor a folder"
        raise InputError(f"{entry.path} is {what}: do not trust this checkpoint, or write it again")
    size = entry.stat().st_size
    stored_bytes = sparse_files.stored_bytes(entry.path, size)
    if size > max_array_bytes(stored_bytes):
        what = f"{size:,} bytes, of which only {stored_bytes:,} are on disk"
        raise InputError(f"{entry.path} is {what}: do not trust this checkpoint, or write it again")
    if entry.name == ocdbt.MANIFEST_NAME and size > _MAX_MANIFEST_BYTES:
        raise InputError(f"{entry.path} has {size:,} bytes, at most {_MAX_MANIFEST_BYTES:,} are read: write it again")
    return size, stored_bytes


def check_path(path: Path) -> None:
    """Refuse a path that tensorstore takes for another one: it reads a backslash as a slash, also on Linux.

    Raises:
        InputError: the resolved path has a backslash, or is not UTF-8, which tensorstore does not accept.
    """
    text = str(path.resolve())
    what = "a backslash" if "\\" in text else "" if is_utf8(text) else "characters that are not UTF-8"
    if what:
        raise InputError(f"{text} has {what}, and tensorstore cannot open such a path: rename the folder")


def open_arrays(
    folder: Path, ts_specs: Mapping[KeyPath, TensorStoreSpec], disk_usage: DiskUsage, budget: Budget
) -> dict[KeyPath, StoredArray]:
    """Open arrays, all at the same time.

    Args:
        folder: for error messages.
        ts_specs: the tensorstore spec of each array; "fill_missing_data_reads" is whether its writer may have left out
            chunks of zeros.
        disk_usage: sizes of the files in the folder.
        budget: limits on what opening may cost.

    An array without any chunk, whose writer may have left out zeros, is read as zeros, and its `is_assumed_zero` is true.
    It is not refused, because biases and heads often begin as zeros, with any number of axes.  But no model has only zeros
    in all arrays of two or more axes: then their chunks are lost.  An array that has some of its chunks raises an error
    when another is read, as one of any other writer does: trained weights have no chunk of exact zeros beside other
    values.

    Raises:
        InputError: an array is incomplete or damaged, or claims sizes that are implausible for the files on disk; or no
            array of two or more axes has a chunk.
    """
    import tensorstore as ts

    uses_blosc = {key_path: _check_metadata(folder, key_path, ts_spec) for key_path, ts_spec in ts_specs.items()}
    futures = {key_path: ts.open(ts_spec, open=True, read=True) for key_path, ts_spec in ts_specs.items()}
    opened: dict[KeyPath, _ZarrArray] = {}
    statistics = {}
    for key_path, future in futures.items():
        name, ts_spec = f"{folder}: {'/'.join(key_path)}", ts_specs[key_path]
        try:
            store = future.result()
            opened[key_path] = array = _ZarrArray(name, ts_spec, store, disk_usage, uses_blosc[key_path])
        except Exception as error:  # tensorstore raises one type of error for damage and several for missing files
            raise InputError(
                f"{name} cannot be opened ({_first_line(error)}): it is incomplete, so write it again"
            ) from None
        if (
            array.chunk_bytes > min(max(array.nbytes, 1), max_array_bytes(disk_usage.stored_bytes))
            or array.nbytes > 1 << 62
        ):
            what = "chunks larger than the array, or an impossible shape"
            raise InputError(f"{name} has {what}: it is damaged, so write it again")
        if array.index_bytes > disk_usage.stored_bytes:
            raise InputError(f"{name} has shards without their index: it is damaged, so write it again")
        if ts_spec["fill_missing_data_reads"]:  # without it, the first missing chunk is an error
            budget.spend(_CHUNK_COST * (array.nbytes // max(array.chunk_bytes, 1)))
            if store.fill_value is None or not store.fill_value.any():
                statistics[key_path] = store.storage_statistics(query_not_stored=True)
    for key_path, statistic in statistics.items():
        opened[key_path].is_assumed_zero = _is_without_chunks(opened[key_path].name, statistic)
    matrices = [array for array in opened.values() if len(array.shape) > 1 and array.nbytes]
    if matrices and all(array.is_assumed_zero for array in matrices):
        what = "they are all zero, which those of no model are, or their chunks are lost"
        raise InputError(f"{folder} has no data of any array of two or more axes: {what}; fetch or write it again")
    largest = max((array.chunk_bytes for array in opened.values()), default=0)
    context = ts.Context({"cache_pool": {"total_bytes_limit": largest + _CACHE_BYTES}})
    for array in opened.values():
        array.context = context
    return dict(opened)


def _is_without_chunks(name: str, statistics: Any) -> bool:
    """Return whether an array has no chunk; `statistics` is the future of its `storage_statistics`."""
    try:
        return bool(statistics.result().not_stored)
    except Exception as error:  # as in open_arrays
        raise InputError(f"{name} cannot be opened ({_first_line(error)}): it is incomplete, so write it again") from None


def _check_metadata(folder: Path, key_path: KeyPath, ts_spec: TensorStoreSpec) -> bool:
    """Check the JSON metadata of an array, and return whether its chunks are compressed with blosc.

    Length and nesting are limited here, because tensorstore, which parses the metadata later, has no limits.
    """
    import tensorstore as ts

    name, key = f"{folder}: {'/'.join(key_path)}", _METADATA_KEYS[ts_spec["driver"]]
    try:
        store = ts.KvStore.open(ts_spec["kvstore"]).result()
        is_too_long = _is_longer_than(store, key, bounded_json.MAX_BYTES)
        metadata = None if is_too_long else store.read(key).result()
    except Exception as error:  # as in open_arrays
        raise InputError(f"{name} cannot be opened ({_first_line(error)}): it is incomplete, so write it again") from None
    if metadata is not None and metadata.state == "missing":
        where = "the OCDBT store" if ts_spec["kvstore"]["driver"] == "ocdbt" else "its folder"
        raise InputError(
            f"{name} has no {key} in {where}: the checkpoint is incomplete, or its metadata state another kind of store, "
            "so fetch or write it again"
        )
    try:
        if metadata is None:
            raise InputError(f"it has more than {bounded_json.MAX_BYTES:,} bytes")
        return _is_blosc_compressed(bounded_json.parse_object(metadata.value))
    except InputError as error:
        raise InputError(f"the metadata of {name} are invalid ({error}): write it again") from None


def _is_blosc_compressed(metadata: dict[str, Any]) -> bool:
    """Return whether chunks begin with a header of blosc, which states their decompressed size.

    Raises:
        InputError: another codec is around blosc, so that its header cannot be read in advance.
    """
    codecs = metadata.get("codecs", [metadata.get("compressor")])  # "codecs" in zarr 3, "compressor" in zarr 2
    last_codec = codecs[-1] if isinstance(codecs, list) and codecs else None
    outermost = last_codec.get("id", last_codec.get("name")) if isinstance(last_codec, dict) else last_codec
    inner_codecs = (
        [codecs[:-1], last_codec.get("configuration") if isinstance(last_codec, dict) else None] if last_codec else []
    )
    if '"blosc"' in json.dumps(inner_codecs):
        raise InputError("blosc inside another codec")
    return bool(outermost == "blosc")


def _is_longer_than(store: Any, key: str | bytes, length: int) -> bool:
    """Return whether a value in a store has more than `length` bytes, without reading it."""
    try:
        return bool(store.read(key, byte_range=slice(length, length + 1)).result().value)
    except ValueError as error:
        if "OUT_OF_RANGE" in str(error):
            return False
        raise


class _ZarrArray(StoredArray):
    """An array of a zarr store.

    chunk_bytes: size of a decompressed chunk, which is read at once.
    index_bytes: size of the index of a shard; 0 if the array has no shards.
    context: the tensorstore context with the cache of chunks: a chunk that is read in pieces is decompressed once.
    """

    context: Any = None

    def __init__(self, name: str, ts_spec: TensorStoreSpec, store: Any, disk_usage: DiskUsage, uses_blosc: bool) -> None:
        """Store the properties of an opened array.

        Args:
            name: name of the array in error messages.
            ts_spec: the tensorstore spec.
            store: the array, opened by tensorstore.
            disk_usage: sizes of the files in the folder of the array.
            uses_blosc: whether its chunks are compressed with blosc.
        """
        self.name, self.ts_spec, self._uses_blosc = name, ts_spec, uses_blosc
        self.shape, self.dtype = tuple(store.shape), np.dtype(store.dtype.numpy_dtype)
        if not self.dtype.itemsize or self.dtype.hasobject:
            raise ValueError(f"its elements are {store.dtype.name}, not numbers")
        self.chunk_bytes = prod(store.chunk_layout.read_chunk.shape or ()) * self.dtype.itemsize
        shard_bytes = prod(store.chunk_layout.write_chunk.shape or ()) * self.dtype.itemsize
        self.index_bytes = (
            _INDEX_ENTRY_BYTES * (shard_bytes // max(self.chunk_bytes, 1)) if shard_bytes > self.chunk_bytes else 0
        )
        self._shard_bytes = max(shard_bytes, self.chunk_bytes)
        max_chunk_file_bytes = self._shard_bytes + self._shard_bytes // 8 + self.index_bytes + _CHUNK_SLACK_BYTES
        # None if no file in the folder is larger.
        self._max_chunk_file_bytes = None if disk_usage.max_file_bytes <= max_chunk_file_bytes else max_chunk_file_bytes

    @cached_property
    def _store(self) -> Any:
        import tensorstore as ts

        self._check_chunks(ts.KvStore.open(self.ts_spec["kvstore"]).result())
        ts_spec = {**self.ts_spec, "fill_missing_data_reads": self.is_assumed_zero}
        return ts.open(ts_spec, open=True, read=True, context=self.context).result()

    def _check_chunks(self, store: Any) -> None:
        """Refuse chunks with more bytes, compressed or not, than their shape needs; tensorstore would allocate them all."""
        keys = store.list().result() if self._uses_blosc or self._max_chunk_file_bytes is not None else []
        for key in filter(_CHUNK_KEY.fullmatch, keys):
            if self._max_chunk_file_bytes is not None and _is_longer_than(store, key, self._max_chunk_file_bytes):
                raise ValueError(
                    f"a chunk of more than {self._max_chunk_file_bytes:,} bytes, of {self._shard_bytes:,} decompressed"
                )
            if self._uses_blosc and _is_longer_than(store, key, _BLOSC_HEADER_BYTES):
                header = store.read(key, byte_range=slice(0, _BLOSC_HEADER_BYTES)).result().value
                if int.from_bytes(header[4:8], "little") > self._shard_bytes:
                    raise ValueError(f"a chunk that decompresses to more than {self._shard_bytes:,} bytes")

    def read(self, start: int, stop: int) -> Array:
        if start == stop:
            return np.empty(0, self.dtype)
        row_size = prod(self.shape[1:])
        top, bottom = start // row_size, -(-stop // row_size)
        try:
            store = self._store
            rows = (store[top:bottom] if self.shape else store).read().result()
        except Exception as error:  # as in open_arrays
            raise InputError(
                f"{self.name} cannot be read ({_first_line(error)}): it is damaged, so write it again"
            ) from None
        values: Array = np.ascontiguousarray(rows).reshape(-1)[start - top * row_size : stop - top * row_size].copy()
        return values


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0].split(" [")[0][:200]
