"""msgpack: nested maps of arrays as `flax.serialization` writes them; one file, or the shards of transformers 4.

Flax makes an array an extension of type 1 that holds (shape, dtype name, bytes); a numpy scalar likewise, of type 3; a
complex number (real, imaginary), of type 2.  An array of more than 2**30 bytes it cuts into flat parts, which stand by
number in a map that says so with its first key.  See https://flax.readthedocs.io/en/latest/api_reference/flax.serialization.html.
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

from parity.checkpoints.containers import msgpack_tokens as tokens
from parity.checkpoints.containers import shards, strict
from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import Container, Contents, File, Sink, Slot, Span, Stored, Words
from parity.checkpoints.containers.msgpack_tokens import Reader
from parity.checkpoints.containers.placed import Place, placed
from parity.checkpoints.layout import Array
from vit_spec import InputError

NAME = "msgpack"
SUFFIX = ".msgpack"

_PART = 2**30  # bytes; flax cuts what is larger
_CUT = "__msgpack_chunked_array__"
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # types of extensions
_DEPTH = 64  # of maps
_ENTRY = 16  # objects of the budget that an entry of a map counts as
_NAME = 4096  # bytes of a key
_KINDS = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.bool_)
_INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
_DTYPES: dict[str, np.dtype[Any]] = {np.dtype(kind).name: np.dtype(kind) for kind in (*_KINDS, *_INTEGERS)}


def _recognises(path: Path, head: bytes) -> bool:
    return tokens.begins_named_map(head) or shards.recognises(path, head, SUFFIX)


def _open(path: Path, budget: Budget | None = None) -> Contents:
    path, budget = shards.find(path, SUFFIX), budget or Budget()
    if shards.is_index(path):
        return shards.gather(path, SUFFIX, NAME, partial(_shard, budget=budget))
    return _file(path, budget)


def _shard(path: Path, budget: Budget) -> Contents:
    """Open one of several files, in which arrays may stand under their joined paths."""
    contents = _file(path, budget)
    arrays = {tuple("/".join(words).split("/")): array for words, array in contents.arrays.items()}
    if len(arrays) < len(contents.arrays):
        raise InputError(f"{path} holds an array twice, nested and under its joined path: fetch or write it again")
    return Contents(NAME, arrays, contents.notes)


def _file(path: Path, budget: Budget) -> Contents:
    reader = Reader(File(path))
    index = _Index(reader, budget)
    try:
        top = reader.token()
        if top.kind != "map":
            raise InputError(f"a map expected, and not a {top.kind}")
        index.map(top.value, ())
        if reader.left:
            raise InputError(f"{reader.left} bytes too many")
    except InputError as error:
        what = f"is not a Flax msgpack file, or is damaged ({error}, at byte {reader.at})"
        raise InputError(f"{path} {what}: fetch or write it again") from None
    return Contents(NAME, index.arrays, index.notes)


class _Index:
    """What a file holds, found by walking over its maps and stepping over its arrays."""

    def __init__(self, reader: Reader, budget: Budget) -> None:
        self._reader, self._budget = reader, budget
        self.arrays: dict[Words, Stored] = {}
        self.notes: dict[str, Any] = {}

    def map(self, count: int, path: Words) -> None:
        """Take in a map of so many entries."""
        if len(path) >= _DEPTH:
            raise InputError(f"more than {_DEPTH} maps in one another")
        self._budget.make(_ENTRY * count)
        keys = set()
        for number in range(count):
            key = self._reader.text(self._reader.token(), _NAME)
            if key in keys:
                raise InputError(f"{strict.quoted(key)} is there twice")
            keys.add(key)
            if key == _CUT:
                if number or count != 3:
                    raise InputError("an array that is not cut as flax cuts it")
                self.arrays[path] = self._parts()
                return
            self._value((*path, key))

    def _value(self, path: Words) -> None:
        self._budget.make(0, sum(map(len, path)) + len(path))
        token = self._reader.token()
        if token.kind == "map":
            self.map(token.value, path)
        elif token.kind == "extension" and token.code == _ARRAY:
            self.arrays[path] = self._array(token.value)
        else:
            name = "/".join(path)
            if name in self.notes:
                raise InputError(f"{strict.quoted(name)} is there twice")
            self.notes[name] = self._note(token)

    def _note(self, token: tokens.Token) -> Any:
        if token.kind == "value":
            return token.value
        if token.kind == "text":
            self._budget.make(0, token.value)
            return self._reader.text(token, token.value)
        if token.kind == "extension" and token.code == _SCALAR:
            array = self._array(token.value)
            if array.shape:
                raise InputError("a scalar of several entries")
            return array.read(0, 1)[0].item()
        if token.kind == "extension" and token.code == _COMPLEX:
            pair, real, imaginary = self._reader.token(), self._reader.token().value, self._reader.token().value
            if pair != tokens.Token("array", 2) or not type(real) is type(imaginary) is float:
                raise InputError("a complex number that is not two numbers")
            return complex(real, imaginary)
        raise InputError(f"a {token.kind}, where flax writes maps, arrays, numbers and text")

    def _array(self, count: int) -> Span:
        """Take in the `count` bytes of an array."""
        reader = self._reader
        end = reader.at + count
        if reader.token() != tokens.Token("array", 3):
            raise InputError("an array that is not (shape, dtype, bytes)")
        dimensions = reader.token()
        if dimensions.kind != "array" or dimensions.value > 64:
            raise InputError("an array without a shape")
        lengths = [reader.token() for _ in range(dimensions.value)]
        name = reader.text(reader.token(), _NAME)
        if name not in _DTYPES:
            raise InputError(f"of dtype {strict.quoted(name)}, expected one of {', '.join(_DTYPES)}")
        dtype = _DTYPES[name]
        shape = strict.shape([token.value if token.kind == "value" else None for token in lengths], dtype.itemsize)
        data = reader.token()
        if data != tokens.Token("bytes", Slot(shape, dtype).nbytes) or reader.at + data.value != end:
            raise InputError(f"its bytes are not those of {dtype} {shape}")
        span = Span(reader.file, reader.at, shape, dtype)
        reader.at = end
        return span

    def _parts(self) -> Stored:
        """Take in what follows the key that says that an array is cut."""
        reader = self._reader
        flag = reader.token()
        lengths = self._numbered("shape", lambda: reader.token().value)
        parts = self._numbered("chunks", self._part)
        if flag.value is not True or not parts or len({part.dtype for part in parts}) > 1:
            raise InputError("an array that is not cut as flax cuts it")
        shape = strict.shape(lengths, parts[0].dtype.itemsize)
        if sum(part.size for part in parts) != Slot(shape, np.dtype(np.uint8)).nbytes:
            raise InputError(f"its parts are not those of {parts[0].dtype} {shape}")
        return _Cut(parts, shape)

    def _part(self) -> Span:
        token = self._reader.token()
        if token.kind != "extension" or token.code != _ARRAY:
            raise InputError("a part that is no array")
        return self._array(token.value)

    def _numbered(self, name: str, take: Any) -> list[Any]:
        """Take in a key and its map of "0", "1", ... to whatever is taken."""
        reader = self._reader
        if reader.text(reader.token(), _NAME) != name or (token := reader.token()).kind != "map":
            raise InputError(f"an array that is cut, without its {name}")
        self._budget.make(_ENTRY * token.value)
        found = {reader.text(reader.token(), _NAME): take() for _ in range(token.value)}
        if found.keys() != {str(number) for number in range(token.value)}:
            raise InputError(f"an array that is cut, whose {name} is not numbered")
        return [found[str(number)] for number in range(token.value)]


class _Cut(Stored):
    """An array in several parts."""

    def __init__(self, parts: list[Span], shape: tuple[int, ...]) -> None:
        self._parts, self.shape, self.dtype = parts, shape, parts[0].dtype
        self._starts = [0, *accumulate(part.size for part in parts)]

    def read(self, first: int, last: int) -> Array:
        out = np.empty(last - first, self.dtype)
        at = first
        while at < last:
            number = bisect_right(self._starts, at) - 1
            part, start = self._parts[number], self._starts[number]
            end = min(last, start + part.size)
            out[at - first : end - first] = part.read(at - start, end - start)
            at = end
        return out


@contextmanager
def _create(path: Path, slots: Mapping[str, Slot], notes: Mapping[str, str]) -> Iterator[Sink]:
    """Write one file, nested at "/".

    The notes are not written: `flax.serialization.from_bytes` refuses a file with more in it than its target has.
    Whoever has some writes them beside it, as config.json.
    """
    layout = _Layout()
    try:
        layout.map(_nested(slots))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    layout.leave_out(0)
    with placed(path, layout.size, layout.headers, layout.places) as sink:
        yield sink


class _Layout:
    """A file's words, and the places that they leave for arrays."""

    def __init__(self) -> None:
        self.size = 0
        self.headers: list[tuple[int, bytes]] = []
        self.places: dict[str, Place] = {}
        self._words: list[bytes] = []  # that are to be written at `size`

    def map(self, tree: Mapping[str, Any]) -> None:
        """Add a map of maps and of (key, slot)."""
        self._words.append(tokens.map_of(len(tree)))
        for word, value in tree.items():
            self._words.append(tokens.text(word))
            if isinstance(value, dict):
                self.map(value)
            else:
                self._slot(*value)

    def leave_out(self, count: int) -> int:
        """Leave the next bytes to an array, and return where they begin."""
        header = b"".join(self._words)
        self.headers.append((self.size, header))
        self._words = []
        begin = self.size + len(header)
        self.size = begin + count
        return begin

    def _slot(self, key: str, slot: Slot) -> None:
        if slot.nbytes <= _PART:
            self.places[key] = Place(slot, [self._array(slot)])
            return
        entries, size = max(1, _PART // slot.dtype.itemsize), Slot(slot.shape, np.dtype(np.uint8)).nbytes
        self._words += [tokens.map_of(3), tokens.text(_CUT), b"\xc3", tokens.text("shape"), tokens.map_of(len(slot.shape))]
        for number, length in enumerate(slot.shape):
            self._words += [tokens.text(str(number)), tokens.integer(length)]
        starts = range(0, size, entries)
        self._words += [tokens.text("chunks"), tokens.map_of(len(starts))]
        offsets = []
        for number, start in enumerate(starts):
            self._words.append(tokens.text(str(number)))
            offsets.append(self._array(Slot((min(entries, size - start),), slot.dtype)))
        self.places[key] = Place(slot, offsets, entries)

    def _array(self, slot: Slot) -> int:
        head = tokens.array_of(3) + tokens.array_of(len(slot.shape)) + b"".join(map(tokens.integer, slot.shape))
        head += tokens.text(slot.dtype.name) + tokens.bytes_of(slot.nbytes)
        self._words += [tokens.extension_of(_ARRAY, len(head) + slot.nbytes), head]
        return self.leave_out(slot.nbytes)


def _nested(slots: Mapping[str, Slot]) -> dict[str, Any]:
    """Return maps of maps and of (key, slot), from keys joined with "/"."""
    tree: dict[str, Any] = {}
    for key, slot in slots.items():
        if _DTYPES.get(slot.dtype.name) != slot.dtype:
            raise InputError(f"{strict.quoted(key)} is {slot.dtype}, which flax does not read: write safetensors")
        *parents, leaf = key.split("/")
        if len(parents) >= _DEPTH:
            raise InputError(f"{strict.quoted(key)} is more than {_DEPTH} maps deep")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {}) if isinstance(node, dict) else {}
        if not isinstance(node, dict) or leaf in node:
            raise InputError(f"{strict.quoted(key)} is both an array and a map of arrays: rename one")
        node[leaf] = (key, slot)
    return tree


CONTAINER = Container(
    name=NAME,
    what="msgpack: what Flax serialises, one file or transformers' shards of it",
    recognises=_recognises,
    open=_open,
    suffixes=(SUFFIX,),
    create=_create,
    any_order=True,
)
