"""Arrays of zarr stores, read through tensorstore and held to what is on disk before it reads them.

tensorstore makes room for whatever a file says of itself: a hole in it, a chunk's own header, a description of any length.

See https://google.github.io/tensorstore/driver/zarr3 and https://www.blosc.org/c-blosc/c-blosc.html for headers of chunks.
"""

import errno
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

from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import Stored, Words
from parity.checkpoints.layout import Array
from vit_spec import InputError, bounded_json

Spec = Mapping[str, Any]  # where tensorstore finds an array, as it takes it

_DESCRIPTION = {"zarr": ".zarray", "zarr3": "zarr.json"}
_CACHE = 1 << 26  # bytes of chunks kept besides the largest
_PIECE = 16  # objects of the budget that a chunk counts as which may be missing: it is looked for
_PLACE = 16  # bytes that a shard says of a chunk in it
_LARGEST, _DENSE = 1 << 28, 64  # bytes of a chunk or a file, and times of the bytes that are on disk
_SMALL = 1 << 20  # bytes of a file whose holes are not looked for
_EXTENTS = 1 << 16  # that are looked for in one
_MANIFEST, _LONGEST = "manifest.ocdbt", 1 << 24  # of a store of many files, and its bytes, all of which are read
_SLACK = 1 << 16  # bytes that a chunk may be longer packed than it is, besides an eighth of it
_CHUNK = re.compile(rb"c|(c[/.])?\d+([/.]\d+)*")  # what a chunk of an array is called
_HEADER = 16  # bytes of a chunk of blosc ahead of what is packed; the second four of them are its bytes unpacked


@dataclass(frozen=True)
class Files:
    """What lies in a folder.

    stored: bytes that all files take on disk.
    longest: bytes of the longest, with its holes.
    """

    stored: int
    longest: int


def files(folder: Path, budget: Budget) -> Files:
    """Go through all files in a folder.

    Anything else in it is refused: to open a pipe is to wait for its writer, also where a link to a folder leads to it.
    So is a file of holes, which take no room on disk, and memory when it is read.

    Raises:
        InputError: names what is refused.
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
                if entry.name == _MANIFEST and size > _LONGEST:
                    raise InputError(f"{entry.path} is {size:,} bytes, at most {_LONGEST:,} are read: write it again")
                total, longest = total + stored, max(longest, size)
            else:
                what = "a link to a folder" if entry.is_dir() else "no file and no folder"
                raise InputError(f"{entry.path} is {what}: do not trust this checkpoint, or write it again")
    return Files(total, longest)


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


def arrays(folder: Path, specs: Mapping[Words, Spec], there: Files, budget: Budget) -> dict[Words, Stored]:
    """Open arrays, all at once.

    Args:
        folder: that errors name.
        specs: where each is.
        there: the files that all of them lie in.

    Raises:
        InputError: one that is incomplete or damaged, or says more of itself than is there.
    """
    import tensorstore as ts

    blosc = {words: _check_described(folder, words, spec) for words, spec in specs.items()}
    pending = {words: ts.open(spec, open=True, read=True) for words, spec in specs.items()}
    found: dict[Words, _Zarr] = {}
    for words, future in pending.items():
        name, spec = f"{folder}: {'/'.join(words)}", specs[words]
        try:
            found[words] = array = _Zarr(name, spec, future.result(), there, blosc[words])
        except Exception as error:  # tensorstore has one kind of error for damage, and several for its absence
            raise InputError(f"{name} cannot be opened ({_line(error)}): it is incomplete, so write it again") from None
        if array.chunk > min(max(array.nbytes, 1), _LARGEST + _DENSE * there.stored) or array.nbytes > 1 << 62:
            what = "a chunk larger than itself, or an impossible shape"
            raise InputError(f"{name} has {what}: it is damaged, so write it again")
        if array.index > there.stored:
            raise InputError(f"{name} has shards whose index is not there: it is damaged, so write it again")
        if spec["fill_missing_data_reads"]:  # of others the first that is missing ends reading
            budget.make(_PIECE * (array.nbytes // max(array.chunk, 1)))
    largest = max((array.chunk for array in found.values()), default=0)
    context = ts.Context({"cache_pool": {"total_bytes_limit": largest + _CACHE}})
    for array in found.values():
        array.context = context
    return dict(found)


def _check_described(folder: Path, words: Words, spec: Spec) -> bool:
    """Hold the description of an array to the limits of JSON before tensorstore parses it, which has none.

    Return whether its chunks are packed with blosc.
    """
    import tensorstore as ts

    name, key = f"{folder}: {'/'.join(words)}", _DESCRIPTION[spec["driver"]]
    try:
        store = ts.KvStore.open(spec["kvstore"]).result()
        longer = _is_longer(store, key, bounded_json.BYTES)
        text = b"" if longer else store.read(key).result().value
    except Exception as error:  # as above
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


class _Zarr(Stored):
    """An array of a zarr store.

    chunk: bytes of what is read at once.
    index: bytes that a shard says of the chunks in it.
    context: where chunks are kept that were read, so that one read in pieces is unpacked once.
    """

    context: Any = None

    def __init__(self, name: str, spec: Spec, store: Any, there: Files, blosc: bool) -> None:
        """Take in an opened store.

        there: the files that it may lie in.
        blosc: whether its chunks are packed so.
        """
        self.name, self.spec, self._blosc = name, spec, blosc
        self.shape, self.dtype = tuple(store.shape), np.dtype(store.dtype.numpy_dtype)
        if not self.dtype.itemsize or self.dtype.hasobject:
            raise ValueError(f"its entries are {store.dtype.name}, no numbers")
        self.chunk = prod(store.chunk_layout.read_chunk.shape or ()) * self.dtype.itemsize
        shard = prod(store.chunk_layout.write_chunk.shape or ()) * self.dtype.itemsize
        self.index = _PLACE * (shard // max(self.chunk, 1)) if shard > self.chunk else 0
        self._whole = max(shard, self.chunk)
        most = self._whole + self._whole // 8 + self.index + _SLACK
        self._most = None if there.longest <= most else most  # bytes of a stored chunk; None: none has more

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
        except Exception as error:  # as above
            raise InputError(f"{self.name} cannot be read ({_line(error)}): it is damaged, so write it again") from None
        entries: Array = np.ascontiguousarray(rows).reshape(-1)[first - top * row : last - top * row].copy()
        return entries


def _line(error: Exception) -> str:
    return str(error).split("\n")[0].split(" [")[0][:200]
