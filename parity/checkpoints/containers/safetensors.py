"""safetensors: the length of the header, a JSON header, and the bytes of the arrays; one file or several shards.

The header has the dtype, shape and offsets of the array at each key, and the metadata as strings in `__metadata__`.  See
https://github.com/huggingface/safetensors#format.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from parity.checkpoints.containers import header_checks, shards
from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import (
    ArraySpec,
    Container,
    Contents,
    ContiguousArray,
    File,
    KeyPath,
    StoredArray,
    Writer,
)
from parity.checkpoints.containers.preallocated import Placement, preallocated_file
from parity.checkpoints.layout import Array
from vit_spec import InputError, bounded_json

NAME = "safetensors"
SUFFIX = ".safetensors"

_MAX_HEADER_BYTES = 25_000_000  # the format allows four times as much; ViT-22B needs 0.1 MB
_MAX_OPEN_FILES = 500  # all shards are open at the same time while they are written
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    "BOOL": np.dtype(bool),
    "C64": np.dtype("<c8"),
}
_PACKED_DTYPES = ("F4", "F6_E2M3", "F6_E3M2")  # several elements share a byte
_DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def create_sharded(
    path: Path, specs: Mapping[str, ArraySpec], metadata: Mapping[str, str], max_bytes: int
) -> AbstractContextManager[Writer]:
    """Write a folder of shards and their index, with the names that Hugging Face uses.

    If all arrays fit into one shard, the folder has one file and no index.

    Args:
        path: the folder, which does not exist yet.
        specs, metadata: see `Container.create`; every shard stores the metadata.
        max_bytes: maximum sum of the bytes of the arrays in a shard; a larger array has its own shard.

    Raises:
        InputError: see `Container.create`; or there are more shards than files that can be open at the same time.
    """
    plan = shards.plan_shards(specs, max_bytes)
    if len(plan) > _MAX_OPEN_FILES:
        raise InputError(
            f"{path} would have {len(plan)} shards of {max_bytes} bytes, more than {_MAX_OPEN_FILES}: allow larger ones"
        )
    return _create_sharded(path, specs, metadata, plan)


@contextmanager
def _create_sharded(
    path: Path, specs: Mapping[str, ArraySpec], metadata: Mapping[str, str], plan: list[list[str]]
) -> Iterator[Writer]:
    numbers = [f"-{n:05d}-of-{len(plan):05d}" for n in range(1, len(plan) + 1)] if len(plan) > 1 else [""]
    files = {f"model{number}{SUFFIX}": keys for number, keys in zip(numbers, plan, strict=True)}
    path.mkdir()
    with ExitStack() as stack:
        writer_by_key: dict[str, Writer] = {}
        for name, keys in files.items():
            writer = stack.enter_context(_create(path / name, {key: specs[key] for key in keys}, metadata))
            writer_by_key |= dict.fromkeys(keys, writer)
        yield _ShardedWriter(writer_by_key)
    if len(files) > 1:
        shards.write_index(path / f"model{SUFFIX}{shards.INDEX}", files, specs)


class _ShardedWriter:
    """A `Writer` of several files."""

    def __init__(self, writer_by_key: Mapping[str, Writer]) -> None:
        self._writer_by_key = writer_by_key

    def write(self, key: str, start: int, values: Array) -> None:
        self._writer_by_key[key].write(key, start, values)


@contextmanager
def _create(path: Path, specs: Mapping[str, ArraySpec], metadata: Mapping[str, str]) -> Iterator[Writer]:
    if unsupported := [key for key, spec in specs.items() if spec.dtype not in _DTYPE_CODES]:
        key, dtype = unsupported[0], specs[unsupported[0]].dtype
        raise InputError(f"{path}: {header_checks.quote(key)} is {dtype}, which safetensors cannot store")
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    if overlap := header.keys() & specs.keys():
        raise InputError(
            f"{path}: {header_checks.quote_names(overlap)} is not a valid key in a safetensors file: rename it"
        )
    end, starts = 0, {}
    for key, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):  # aligns every array
        starts[key], end = end, end + spec.nbytes
        header[key] = {"dtype": _DTYPE_CODES[spec.dtype], "shape": spec.shape, "data_offsets": (starts[key], end)}
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    data_start = 8 + len(header_bytes)
    placements = {key: Placement(spec, [data_start + starts[key]]) for key, spec in specs.items()}
    with preallocated_file(
        path, data_start + end, [(0, len(header_bytes).to_bytes(8, "little") + header_bytes)], placements
    ) as writer:
        yield writer


def _recognises(path: Path, head: bytes) -> bool:
    starts_like_header = head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_HEADER_BYTES
    return starts_like_header or shards.recognises(path, head, SUFFIX)


def _open(path: Path, budget: Budget | None = None) -> Contents:
    budget = budget or Budget()
    if shards.is_index(path):
        return _restore_shared(shards.open_shards(path, SUFFIX, NAME, partial(_open_file, budget=budget)))
    return _restore_shared(_open_file(path, budget))


def _restore_shared(contents: Contents) -> Contents:
    """Return the contents with the omitted keys of shared tensors, which the metadata lists.

    `safetensors.torch.save_model` stores a shared tensor once.  For each other key of the tensor it adds an entry to the
    metadata, "omitted key": "stored key".  An entry without a dot that names a dotted key is other metadata, such as the
    name of a layer.
    """
    arrays = contents.arrays
    shared = {
        key: kept
        for key, kept in contents.metadata.items()
        if (kept,) in arrays and (key,) not in arrays and ("." in key or "." not in kept)
    }
    metadata = {key: value for key, value in contents.metadata.items() if key not in shared}
    return Contents(contents.container, {**arrays, **{(key,): arrays[kept,] for key, kept in shared.items()}}, metadata)


def _open_file(path: Path, budget: Budget) -> Contents:
    file = File(path)
    try:
        length = int.from_bytes(file.read(0, 8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, file.size - 8):
            raise InputError(f"its header would have {length} bytes")
        header_bytes = file.read(8, length)
        budget.spend(header_bytes.count(b":"))
        return _parse_header(file, bounded_json.parse_object(header_bytes, max_bytes=_MAX_HEADER_BYTES), 8 + length)
    except _PackedDtype as error:
        raise InputError(f"{path}: {error}") from None
    except InputError as error:
        raise InputError(f"{path} is not a safetensors file, or is damaged ({error}): fetch or write it again") from None


class _PackedDtype(InputError):
    """The file is valid, but has an array whose elements are not whole bytes."""


def _parse_header(file: File, header: dict[str, Any], data_start: int) -> Contents:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputError("its __metadata__ is not an object of strings")
    arrays: dict[KeyPath, StoredArray] = {}
    byte_ranges = []
    for key, entry in header.items():
        if isinstance(entry, dict) and entry.get("dtype") in _PACKED_DTYPES:
            what = f"{header_checks.quote(key)} has the dtype {entry['dtype']}, which is not read"
            raise _PackedDtype(f"{what}: leave it out of the file, or save it in one of {', '.join(_DTYPES)}")
        try:
            dtype, shape, (start, stop) = _parse_entry(entry)
            if start + ArraySpec(shape, dtype).nbytes != stop or data_start + stop > file.size:
                raise InputError(f"it has {stop - start} bytes, not those of {dtype} {shape} in this file")
        except InputError as error:
            raise InputError(f"{header_checks.quote(key)}: {error}") from None
        byte_ranges.append((start, stop, key))
        arrays[(key,)] = ContiguousArray(file, data_start + start, shape, dtype)
    end = 0
    for start, stop, key in sorted(byte_ranges):
        if start != end:
            raise InputError(f"{header_checks.quote(key)} begins at byte {start} of the arrays, expected {end}")
        end = stop
    if data_start + end != file.size:
        raise InputError(f"it has {file.size - data_start - end} bytes after its arrays")
    return Contents(NAME, arrays, metadata)


def _parse_entry(entry: Any) -> tuple[np.dtype[Any], tuple[int, ...], tuple[int, int]]:
    """Return dtype, shape and offsets of an entry of the header."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise InputError("its fields are not dtype, shape and data_offsets")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPES:
        raise InputError(f"its dtype is {header_checks.quote(str(entry['dtype']))}, expected one of {', '.join(_DTYPES)}")
    dtype, offsets = _DTYPES[entry["dtype"]], entry["data_offsets"]
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(offset) is int and offset >= 0 for offset in offsets)
    ):
        raise InputError("its data_offsets are not two offsets")
    return dtype, header_checks.parse_shape(entry["shape"], dtype.itemsize), (offsets[0], offsets[1])


CONTAINER = Container(
    name=NAME,
    description="safetensors: one file, or a folder of shards with their index",
    recognises=_recognises,
    open=_open,
    suffixes=(SUFFIX,),
    create=_create,
    any_order=True,
    stores_metadata=True,
)
