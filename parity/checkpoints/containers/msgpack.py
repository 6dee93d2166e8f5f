"""msgpack: nested maps of arrays as `flax.serialization` writes them; one file, or the shards of transformers 4.

Flax writes an array as an extension of type 1 with (shape, dtype name, bytes), a numpy scalar in the same way as type 3,
and a complex number as type 2 with (real, imaginary).  It splits an array of more than 2**30 bytes into flat chunks, in a
map with the chunk numbers as keys; the first key of the map around it is `_CHUNKED_KEY`.  See
https://flax.readthedocs.io/en/latest/api_reference/flax.serialization.html.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from parity.checkpoints.containers import header_checks, shards
from parity.checkpoints.containers import msgpack_tokens as tokens
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
from parity.checkpoints.containers.msgpack_tokens import Reader
from parity.checkpoints.containers.preallocated import Placement, preallocated_file
from parity.checkpoints.layout import Array
from vit_spec import InputError

NAME = "msgpack"
SUFFIX = ".msgpack"

_MAX_CHUNK_BYTES = 2**30  # flax splits larger arrays
_CHUNKED_KEY = "__msgpack_chunked_array__"
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # extension types
_MAX_DEPTH = 64  # of maps
_ENTRY_COST = 16  # objects charged to the budget
_MAX_KEY_BYTES = 4096
_FLOATS_AND_BOOL = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.bool_)
_INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
_DTYPES: dict[str, np.dtype[Any]] = {np.dtype(kind).name: np.dtype(kind) for kind in (*_FLOATS_AND_BOOL, *_INTEGERS)}


def _recognises(path: Path, head: bytes) -> bool:
    return tokens.starts_with_string_key_map(head) or shards.recognises(path, head, SUFFIX)


def _open(path: Path, budget: Budget | None = None) -> Contents:
    budget = budget or Budget()
    if shards.is_index(path):
        return shards.open_shards(path, SUFFIX, NAME, partial(_open_shard, budget=budget))
    return _open_file(path, budget)


def _open_shard(path: Path, budget: Budget) -> Contents:
    """Open a shard, whose keys may be joined key paths."""
    contents = _open_file(path, budget)
    arrays = {tuple("/".join(key_path).split("/")): array for key_path, array in contents.arrays.items()}
    if len(arrays) < len(contents.arrays):
        raise InputError(f"{path} has an array twice, nested and under its joined key path: fetch or write it again")
    return Contents(NAME, arrays, contents.metadata)


def _open_file(path: Path, budget: Budget) -> Contents:
    reader = Reader(File(path))
    parser = _Parser(reader, budget)
    try:
        top = reader.read_token()
        if top.kind != "map":
            raise InputError(f"it has a {top.kind}, expected a map")
        parser.parse_map(top.value, ())
        if reader.bytes_left:
            raise InputError(f"it has {reader.bytes_left} bytes after its map")
    except InputError as error:
        what = f"is not a Flax msgpack file, or is damaged ({error}, at byte {reader.position})"
        raise InputError(f"{path} {what}: fetch or write it again") from None
    return Contents(NAME, parser.arrays, parser.metadata)


class _Parser:
    """A parser that finds all arrays and values of a file: it reads the maps and skips the bytes of the arrays."""

    def __init__(self, reader: Reader, budget: Budget) -> None:
        self._reader, self._budget = reader, budget
        self.arrays: dict[KeyPath, StoredArray] = {}
        self.metadata: dict[str, Any] = {}

    def parse_map(self, count: int, path: KeyPath) -> None:
        """Parse a map of `count` entries."""
        if len(path) >= _MAX_DEPTH:
            raise InputError(f"it has more than {_MAX_DEPTH} nested maps")
        self._budget.spend(_ENTRY_COST * count)
        keys = set()
        for index in range(count):
            key = self._reader.read_text(self._reader.read_token(), _MAX_KEY_BYTES)
            if key in keys:
                raise InputError(f"{header_checks.quote(key)} occurs twice")
            keys.add(key)
            if key == _CHUNKED_KEY:
                if index or count != 3:
                    raise InputError("it has an array that is not split as flax splits arrays")
                self.arrays[path] = self._parse_chunked_array()
                return
            self._parse_value((*path, key))

    def _parse_value(self, path: KeyPath) -> None:
        self._budget.spend(0, sum(map(len, path)) + len(path))
        token = self._reader.read_token()
        if token.kind == "map":
            self.parse_map(token.value, path)
        elif token.kind == "extension" and token.extension_type == _ARRAY:
            self.arrays[path] = self._parse_array(token.value)
        else:
            name = "/".join(path)
            if name in self.metadata:
                raise InputError(f"{header_checks.quote(name)} occurs twice")
            self.metadata[name] = self._parse_scalar(token)

    def _parse_scalar(self, token: tokens.Token) -> Any:
        if token.kind == "value":
            return token.value
        if token.kind == "text":
            self._budget.spend(0, token.value)
            return self._reader.read_text(token, token.value)
        if token.kind == "extension" and token.extension_type == _SCALAR:
            array = self._parse_array(token.value)
            if array.shape:
                raise InputError("it has a scalar of several elements")
            return array.read(0, 1)[0].item()
        if token.kind == "extension" and token.extension_type == _COMPLEX:
            pair, real, imaginary = (
                self._reader.read_token(),
                self._reader.read_token().value,
                self._reader.read_token().value,
            )
            if pair != tokens.Token("array", 2) or not type(real) is type(imaginary) is float:
                raise InputError("it has a complex number that is not two numbers")
            return complex(real, imaginary)
        raise InputError(f"it has a {token.kind}, expected maps, arrays, numbers and text")

    def _parse_array(self, count: int) -> ContiguousArray:
        """Parse the header of an array of `count` bytes, and skip its data."""
        reader = self._reader
        end = reader.position + count
        if reader.read_token() != tokens.Token("array", 3):
            raise InputError("it has an array that is not (shape, dtype, bytes)")
        dimensions = reader.read_token()
        if dimensions.kind != "array" or dimensions.value > 64:
            raise InputError("it has an array without a shape")
        lengths = [reader.read_token() for _ in range(dimensions.value)]
        name = reader.read_text(reader.read_token(), _MAX_KEY_BYTES)
        if name not in _DTYPES:
            raise InputError(f"it has the dtype {header_checks.quote(name)}, expected one of {', '.join(_DTYPES)}")
        dtype = _DTYPES[name]
        shape = header_checks.parse_shape(
            [token.value if token.kind == "value" else None for token in lengths], dtype.itemsize
        )
        data = reader.read_token()
        if data != tokens.Token("bytes", ArraySpec(shape, dtype).nbytes) or reader.position + data.value != end:
            raise InputError(f"it has an array whose bytes are not those of {dtype} {shape}")
        array = ContiguousArray(reader.file, reader.position, shape, dtype)
        reader.position = end
        return array

    def _parse_chunked_array(self) -> StoredArray:
        """Parse the rest of a map that represents a split array."""
        reader = self._reader
        is_chunked = reader.read_token()
        lengths = self._parse_numbered_map("shape", lambda: reader.read_token().value)
        chunks = self._parse_numbered_map("chunks", self._parse_chunk)
        if is_chunked.value is not True or not chunks or len({chunk.dtype for chunk in chunks}) > 1:
            raise InputError("it has an array that is not split as flax splits arrays")
        shape = header_checks.parse_shape(lengths, chunks[0].dtype.itemsize)
        if sum(chunk.size for chunk in chunks) != ArraySpec(shape, np.dtype(np.uint8)).nbytes:
            raise InputError(f"it has an array whose chunks are not those of {chunks[0].dtype} {shape}")
        return _ChunkedArray(chunks, shape)

    def _parse_chunk(self) -> ContiguousArray:
        token = self._reader.read_token()
        if token.kind != "extension" or token.extension_type != _ARRAY:
            raise InputError("it has a chunk that is not an array")
        return self._parse_array(token.value)

    def _parse_numbered_map(self, name: str, parse_item: Any) -> list[Any]:
        """Parse the key `name` and its map with the keys "0", "1", ...; return the values in the order of the keys."""
        reader = self._reader
        if reader.read_text(reader.read_token(), _MAX_KEY_BYTES) != name or (token := reader.read_token()).kind != "map":
            raise InputError(f"it has a split array without its {name}")
        self._budget.spend(_ENTRY_COST * token.value)
        items = {reader.read_text(reader.read_token(), _MAX_KEY_BYTES): parse_item() for _ in range(token.value)}
        if items.keys() != {str(index) for index in range(token.value)}:
            raise InputError(f"it has a split array whose {name} is not numbered")
        return [items[str(index)] for index in range(token.value)]


class _ChunkedArray(StoredArray):
    """An array in several chunks."""

    def __init__(self, chunks: list[ContiguousArray], shape: tuple[int, ...]) -> None:
        self._chunks, self.shape, self.dtype = chunks, shape, chunks[0].dtype
        self._starts = [0, *accumulate(chunk.size for chunk in chunks)]

    def read(self, start: int, stop: int) -> Array:
        values = np.empty(stop - start, self.dtype)
        position = start
        while position < stop:
            index = bisect_right(self._starts, position) - 1
            chunk, chunk_start = self._chunks[index], self._starts[index]
            end = min(stop, chunk_start + chunk.size)
            values[position - start : end - start] = chunk.read(position - chunk_start, end - chunk_start)
            position = end
        return values


@contextmanager
def _create(path: Path, specs: Mapping[str, ArraySpec], metadata: Mapping[str, str]) -> Iterator[Writer]:
    """Write one file of nested maps, splitting keys at "/".

    `metadata` is not written, because `flax.serialization.from_bytes` refuses files with more keys than its target: the
    caller writes it to a file beside it, such as config.json.
    """
    layout = _Layout()
    try:
        layout.add_map(_nest(specs))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    layout.reserve(0)
    with preallocated_file(path, layout.size, layout.headers, layout.placements) as writer:
        yield writer


class _Layout:
    """The headers of a file, and the byte ranges of its arrays between them."""

    def __init__(self) -> None:
        self.size = 0
        self.headers: list[tuple[int, bytes]] = []
        self.placements: dict[str, Placement] = {}
        self._pending: list[bytes] = []  # parts of the next header, at offset `size`

    def add_map(self, tree: Mapping[str, Any]) -> None:
        """Add a map whose values are maps or (key, spec)."""
        self._pending.append(tokens.map_header(len(tree)))
        for name, value in tree.items():
            self._pending.append(tokens.encode_text(name))
            if isinstance(value, dict):
                self.add_map(value)
            else:
                self._add_array(*value)

    def reserve(self, count: int) -> int:
        """End a header, reserve `count` bytes after it for an array, and return their offset."""
        header = b"".join(self._pending)
        self.headers.append((self.size, header))
        self._pending = []
        start = self.size + len(header)
        self.size = start + count
        return start

    def _add_array(self, key: str, spec: ArraySpec) -> None:
        if spec.nbytes <= _MAX_CHUNK_BYTES:
            self.placements[key] = Placement(spec, [self._add_array_header(spec)])
            return
        chunk_size, size = max(1, _MAX_CHUNK_BYTES // spec.dtype.itemsize), ArraySpec(spec.shape, np.dtype(np.uint8)).nbytes
        self._pending += [
            tokens.map_header(3),
            tokens.encode_text(_CHUNKED_KEY),
            b"\xc3",
            tokens.encode_text("shape"),
            tokens.map_header(len(spec.shape)),
        ]
        for index, length in enumerate(spec.shape):
            self._pending += [tokens.encode_text(str(index)), tokens.encode_integer(length)]
        starts = range(0, size, chunk_size)
        self._pending += [tokens.encode_text("chunks"), tokens.map_header(len(starts))]
        offsets = []
        for index, start in enumerate(starts):
            self._pending.append(tokens.encode_text(str(index)))
            offsets.append(self._add_array_header(ArraySpec((min(chunk_size, size - start),), spec.dtype)))
        self.placements[key] = Placement(spec, offsets, chunk_size)

    def _add_array_header(self, spec: ArraySpec) -> int:
        head = (
            tokens.array_header(3) + tokens.array_header(len(spec.shape)) + b"".join(map(tokens.encode_integer, spec.shape))
        )
        head += tokens.encode_text(spec.dtype.name) + tokens.bytes_header(spec.nbytes)
        self._pending += [tokens.extension_header(_ARRAY, len(head) + spec.nbytes), head]
        return self.reserve(spec.nbytes)


def _nest(specs: Mapping[str, ArraySpec]) -> dict[str, Any]:
    """Return nested dictionaries of (key, spec), from keys joined with "/"."""
    tree: dict[str, Any] = {}
    for key, spec in specs.items():
        if _DTYPES.get(spec.dtype.name) != spec.dtype:
            raise InputError(f"{header_checks.quote(key)} is {spec.dtype}, which flax does not read: write safetensors")
        *parents, leaf = key.split("/")
        if len(parents) >= _MAX_DEPTH:
            raise InputError(f"{header_checks.quote(key)} is in more than {_MAX_DEPTH} nested maps")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {}) if isinstance(node, dict) else {}
        if not isinstance(node, dict) or leaf in node:
            raise InputError(f"{header_checks.quote(key)} is both an array and a map of arrays: rename one")
        node[leaf] = (key, spec)
    return tree


CONTAINER = Container(
    name=NAME,
    description="msgpack: arrays as Flax serialises them, one file or the shards of transformers",
    recognises=_recognises,
    open=_open,
    suffixes=(SUFFIX,),
    create=_create,
    any_order=True,
)
