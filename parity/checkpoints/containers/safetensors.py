"""safetensors: a length, a JSON header of keys, dtypes, shapes and offsets, and the arrays' bytes; one file, or shards.

See https://github.com/huggingface/safetensors#format.  Free text goes into the header's `__metadata__`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from parity.checkpoints.containers import shards, strict
from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import Container, Contents, File, Sink, Slot, Span, Stored, Words
from parity.checkpoints.containers.placed import Place, placed
from parity.checkpoints.layout import Array
from vit_spec import InputError, bounded_json

NAME = "safetensors"
SUFFIX = ".safetensors"

_LIMIT = 25_000_000  # bytes of a header; the format allows four times that, and ViT-22B takes 0.1 MB
_OPEN = 500  # files that are written at once
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
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def create_sharded(
    path: Path, slots: Mapping[str, Slot], notes: Mapping[str, str], max_bytes: int
) -> AbstractContextManager[Sink]:
    """Write a folder of shards and their index, named as Hugging Face names them; one file without an index if all fits.

    path: the folder, which is not there yet.
    slots, notes: as of `Container.create`; every shard carries the notes.
    max_bytes: of arrays in a shard; a larger array has a shard of its own.

    Raises:
        InputError: as `Container.create`; or more shards than can be written at once.
    """
    plan = shards.plan(slots, max_bytes)
    if len(plan) > _OPEN:
        raise InputError(f"{path} would have {len(plan)} shards of {max_bytes} bytes: let them be larger")
    return _create_sharded(path, slots, notes, plan)


@contextmanager
def _create_sharded(
    path: Path, slots: Mapping[str, Slot], notes: Mapping[str, str], plan: list[list[str]]
) -> Iterator[Sink]:
    numbers = [f"-{n:05d}-of-{len(plan):05d}" for n in range(1, len(plan) + 1)] if len(plan) > 1 else [""]
    files = {f"model{number}{SUFFIX}": keys for number, keys in zip(numbers, plan, strict=True)}
    path.mkdir()
    with ExitStack() as stack:
        sinks: dict[str, Sink] = {}
        for name, keys in files.items():
            sink = stack.enter_context(_create(path / name, {key: slots[key] for key in keys}, notes))
            sinks |= dict.fromkeys(keys, sink)
        yield _Sharded(sinks)
    if len(files) > 1:
        shards.write_index(path / f"model{SUFFIX}{shards.INDEX}", files, slots)


class _Sharded:
    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = sinks

    def put(self, key: str, first: int, entries: Array) -> None:
        self._sinks[key].put(key, first, entries)


@contextmanager
def _create(path: Path, slots: Mapping[str, Slot], notes: Mapping[str, str]) -> Iterator[Sink]:
    if foreign := [key for key, slot in slots.items() if slot.dtype not in _CODES]:
        raise InputError(
            f"{path}: {strict.quoted(foreign[0])} is {slots[foreign[0]].dtype}, which safetensors has no word for"
        )
    header: dict[str, Any] = {"__metadata__": dict(notes)} if notes else {}
    if overlap := header.keys() & slots.keys():
        raise InputError(f"{path}: {strict.listed(overlap)} is no key for an array in a safetensors file: rename it")
    end, starts = 0, {}
    for key, slot in sorted(slots.items(), key=lambda item: -item[1].dtype.itemsize):  # so that every array is aligned
        starts[key], end = end, end + slot.nbytes
        header[key] = {"dtype": _CODES[slot.dtype], "shape": slot.shape, "data_offsets": (starts[key], end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    places = {key: Place(slot, [begin + starts[key]]) for key, slot in slots.items()}
    with placed(path, begin + end, [(0, len(text).to_bytes(8, "little") + text)], places) as sink:
        yield sink


def _recognises(path: Path, head: bytes) -> bool:
    begins = head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _LIMIT
    return begins or shards.recognises(path, head, SUFFIX)


def _open(path: Path, budget: Budget | None = None) -> Contents:
    path, budget = shards.find(path, SUFFIX), budget or Budget()
    if shards.is_index(path):
        return shards.gather(path, SUFFIX, NAME, partial(_file, budget=budget))
    return _file(path, budget)


def _file(path: Path, budget: Budget) -> Contents:
    file = File(path)
    try:
        length = int.from_bytes(file.read(0, 8), "little")
        if not 2 <= length <= min(_LIMIT, file.size - 8):
            raise InputError(f"a header of {length} bytes")
        text = file.read(8, length)
        budget.make(text.count(b":"))
        return _contents(file, bounded_json.parse_object(text, longest=_LIMIT), 8 + length)
    except InputError as error:
        raise InputError(f"{path} is not a safetensors file, or is damaged ({error}): fetch or write it again") from None


def _contents(file: File, header: dict[str, Any], begin: int) -> Contents:
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(text, str) for text in notes.values()):
        raise InputError("its __metadata__ is not text by name")
    arrays: dict[Words, Stored] = {}
    spans = []
    for key, entry in header.items():
        try:
            dtype, shape, (first, last) = _entry(entry)
            if first + Slot(shape, dtype).nbytes != last or begin + last > file.size:
                raise InputError(f"its {last - first} bytes are not those of {dtype} {shape} in this file")
        except InputError as error:
            raise InputError(f"{strict.quoted(key)}: {error}") from None
        spans.append((first, last, key))
        arrays[(key,)] = Span(file, begin + first, shape, dtype)
    end = 0
    for first, last, key in sorted(spans):
        if first != end:
            raise InputError(f"{strict.quoted(key)} begins at byte {first} of the arrays, where {end} is next")
        end = last
    if begin + end != file.size:
        raise InputError(f"{file.size - begin - end} bytes after its arrays")
    return Contents(NAME, arrays, notes)


def _entry(entry: Any) -> tuple[np.dtype[Any], tuple[int, ...], tuple[int, int]]:
    """Return dtype, shape and offsets of an entry of the header."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise InputError("not described by dtype, shape and data_offsets")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPES:
        raise InputError(f"of dtype {strict.quoted(str(entry['dtype']))}, expected one of {', '.join(_DTYPES)}")
    dtype, offsets = _DTYPES[entry["dtype"]], entry["data_offsets"]
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(place) is int and place >= 0 for place in offsets)
    ):
        raise InputError("its data_offsets are not two places")
    return dtype, strict.shape(entry["shape"], dtype.itemsize), (offsets[0], offsets[1])


CONTAINER = Container(
    name=NAME,
    what="safetensors: one file, or a folder of shards with their index",
    recognises=_recognises,
    open=_open,
    suffixes=(SUFFIX,),
    create=_create,
    any_order=True,
    carries_notes=True,
)
