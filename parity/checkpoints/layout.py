"""Where a parameter lives in a format, in one line, and the one function that moves arrays between two such lines.

A parameter is an array with named axes.  A format decides where each axis goes: into the key or into the array,
and merged with which neighbours.  A layout says so as `key | axes`:

    blocks/attn/qkv/kernel            | block width qkv head dim      a bare word is an axis of the array
    blocks.{block}.attn.qkv.weight    | (qkv head dim) width          a {braced} word is spelled out in the key,
    layer.{block}.attn.{qkv}.weight   | (head dim) width              (several) words are merged into one dimension,
    cls_token                         | 1 1 width                     and 1 is a dimension of length one
    blocks.{block}.attn.qkv.bias      | (qkv=2 head dim)              the parameter is a part: place 2 of qkv,
    head.attention.in_proj_bias       | (qkv=1:kv head dim)           or its axis kv lies on qkv from place 1 on

Two layouts that hold the same words are two addresses of the same numbers.  So a conversion is a strided copy from
one to the other: it computes nothing, it is lossless in every dtype, and its inverse is the two layouts swapped.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from vit_spec import InputError

Array = NDArray[Any]
Sizes = Mapping[str, int]  # axis word -> its length
Place = Mapping[str, int]  # axis word -> where on it
Spellings = Mapping[str, tuple[str, ...]]  # axis word -> how its places are spelled in keys; others count from zero
Read = Callable[[str, int, int], Array]  # a key, and which of its entries in C order: first, and one past the last

_WORD = r"[a-z]\w*"
_AXIS = re.compile(rf"({_WORD})(?:=(\d+)(?::({_WORD}))?)?")

PIECE = 16 << 20  # bytes read at once where more are not needed
STRIP = 2 << 20  # bytes reordered at once, so that they are still in the cache when they are used
LINES, TILE = 512, 512  # of what is transposed at once: rows, and bytes of each


class Axis(NamedTuple):
    """One axis of an array: all of `holder`, or the part of it from place `start` on that the parameter is.

    word: the parameter's own axis; None where it is one place of `holder` and has no such axis.
    """

    holder: str
    word: str | None
    start: int

    def __str__(self) -> str:
        if self.word == self.holder:
            return self.holder
        return f"{self.holder}={self.start}" + (f":{self.word}" if self.word else "")

    def place(self, at: Place) -> int | None:
        """Return the one place of `holder` that is meant, if it is one."""
        if self.word is None:
            return self.start
        return self.start + at[self.word] if self.word in at else None

    def part(self, sizes: Sizes) -> slice:
        """Return the places of `holder` that the word takes."""
        return slice(self.start, self.start + sizes[self.word or self.holder])


@dataclass(frozen=True)
class Layout:
    """One parameter's place in a format.

    key: the key, or the pattern of the keys, with {braced} axis words.
    dims: for each dimension of the array, the axes merged into it; none for a dimension of length one.
    spellings: how axis words are spelled in the key.
    """

    key: str
    dims: tuple[tuple[Axis, ...], ...]
    spellings: Spellings = field(default_factory=dict)

    @classmethod
    def parse(cls, line: str, spellings: Spellings | None = None) -> Self:
        """Read a line such as "blocks.{block}.attn.qkv.weight | (qkv head dim) width".

        Raises:
            InputError: quoting the line and what is wrong in it.
        """

        def wrong(what: str) -> InputError:
            return InputError(f"layout {line.strip()!r}: {what}")

        key, bar, axes = (part.strip() for part in line.partition("|"))
        if not bar or not key or not axes or "|" in axes:
            raise wrong("write it as `key | axes`, with one bar")
        if re.search(r"\s", key) or re.search(r"[{}]", re.sub(rf"{{{_WORD}}}", "", key)):
            raise wrong("a key has no blanks, and braces only around one axis word, as in blocks.{block}.norm1.weight")
        dims = []
        for dim in re.findall(r"\([^()]*\)|\S+", axes):
            texts = dim[1:-1].split() if dim[0] == "(" and dim[-1] == ")" else [dim]
            matches = [_AXIS.fullmatch(text) for text in ([] if dim == "1" else texts or [dim])]
            if not all(matches):
                raise wrong(f"{dim!r} is not an axis: write a word, (words to merge), 1, word=place or word=place:part")
            found = [match.groups() for match in matches if match]
            dims.append(tuple(Axis(a, part or (None if n else a), int(n or 0)) for a, n, part in found))
        layout = cls(key, tuple(dims), spellings or {})
        if repeated := sorted({word for word in layout.words if layout.words.count(word) > 1}):
            raise wrong(f"{', '.join(repeated)} appears more than once")
        return layout

    @property
    def spelled(self) -> list[str]:
        """The axis words in the key, in order."""
        return re.findall(rf"{{({_WORD})}}", self.key)

    @property
    def flat(self) -> list[Axis]:
        """The axes of the array, in order, none merged."""
        return [axis for dim in self.dims for axis in dim]

    @property
    def words(self) -> list[str]:
        """Every axis word of the parameter, of the key and of the array."""
        return self.spelled + [axis.word for axis in self.flat if axis.word]

    @property
    def is_part(self) -> bool:
        """Whether the arrays hold more than this parameter."""
        return any(axis.word != axis.holder for axis in self.flat)

    @property
    def axes(self) -> str:
        """The array's side of the line, e.g. "(qkv head dim) width"."""
        dims = (" ".join(map(str, dim)) or "1" for dim in self.dims)
        return " ".join(f"({text})" if " " in text else text for text in dims)

    def __str__(self) -> str:
        return f"{self.key} | {self.axes}"

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Shape of each array."""
        return tuple(prod(sizes[axis.holder] for axis in dim) for dim in self.dims)

    def keys(self, sizes: Sizes) -> list[str]:
        """Every key, in order."""
        return [key for key, _ in self.places(sizes, {})]

    def places(self, sizes: Sizes, at: Place) -> Iterator[tuple[str, Place]]:
        """Yield the keys that lie at `at`, each with its place on every axis that the key spells out."""
        spelled = self.spelled
        for numbers in product(*([at[word]] if word in at else range(sizes[word]) for word in spelled)):
            place = dict(zip(spelled, numbers, strict=True))
            spelling = {word: self.spellings[word][n] if word in self.spellings else n for word, n in place.items()}
            yield self.key.format_map(spelling), place

    def view(self, array: Array, sizes: Sizes, at: Place, words: list[str]) -> Array:
        """Return a view of the part of an array that lies at `at`, one dimension for each of `words`, in their order.

        array: `shape(sizes)`; splitting a dimension never needs a copy.
        """
        split = array.reshape([sizes[axis.holder] for axis in self.flat])
        return _view(split, self.flat, sizes, at, words)


Column = Mapping[str, Layout]  # parameter -> its layout in one format


def _view(split: Array, axes: list[Axis], sizes: Sizes, at: Place, words: list[str]) -> Array:
    places = [axis.place(at) for axis in axes]
    index = [axis.part(sizes) if n is None else n for axis, n in zip(axes, places, strict=True)]
    left = [axis.word for axis, n in zip(axes, places, strict=True) if n is None]
    view: Array = split[(*index, ...)].transpose([left.index(word) for word in words])  # `...`: a view even of one entry
    return view


def runs(source: Layout, target: Layout, sizes: Sizes, at: Place) -> list[tuple[int, Place]]:
    """Return the runs of the target's array at `at` that come from different arrays of the source.

    Each is its first entry in C order, and its place: what `parts` takes.  They can be made independently.
    """
    words = [axis.holder for axis in target.flat]
    if not words or words[0] not in source.spelled:
        return [(0, at)]
    stride = prod(sizes[word] for word in words[1:])
    return [(n * stride, {**at, words[0]: n}) for n in range(sizes[words[0]])]


def parts(source: Layout, target: Layout, sizes: Sizes, at: Place, read: Read) -> Iterator[tuple[int, Array]]:
    """Yield what lies at `at` in the target's array, bit by bit: a first entry in C order, and the entries from there on.

    Entries come in order.  No more than what one key of the source holds at `at` is in memory at a time, and only a
    piece of that wherever source and target run through it alike.

    at: the place on every axis that the target's key spells out, and of a run on the first of the array's own.
    read: gives entries of the source's array at a key, in one dimension.

    Raises:
        ValueError: layouts that do not hold the same words, or a target of which the parameter is a part.
    """
    if sorted(source.words) != sorted(target.words):
        raise ValueError(f"{source} and {target} do not hold the same axes")
    if target.is_part:
        raise ValueError(f"{target} holds more than one parameter: fill a view of it")
    yield from _parts(source, [axis.holder for axis in target.flat if axis.holder not in at], sizes, at, read)


def _parts(source: Layout, words: list[str], sizes: Sizes, at: Place, read: Read) -> Iterator[tuple[int, Array]]:
    """Yield the entries at `at`, the axes of `words` in their order."""
    if words and words[0] in source.spelled:  # the source has an array for each place on the target's first axis
        stride = prod(sizes[word] for word in words[1:])
        for n in range(sizes[words[0]]):
            for first, entries in _parts(source, words[1:], sizes, {**at, words[0]: n}, read):
                yield n * stride + first, entries
        return
    inner = [word for word in words if word not in source.spelled]
    if inner == words:
        [(key, place)] = source.places(sizes, at)
        for first, view in _reads(source, key, words, sizes, {**at, **place}, read):
            for offset, entries in _strips(view):
                yield first + offset, entries
        return
    whole = None
    for key, place in source.places(sizes, at):  # the source has arrays that interleave in the target's
        [(_, view)] = _reads(source, key, inner, sizes, {**at, **place}, read, at_once=True)
        if whole is None:
            whole = np.empty([sizes[word] for word in words], view.dtype)
        _copy(whole[(*(place.get(word, slice(None)) for word in words), ...)], view)
    if whole is not None:
        yield 0, whole.reshape(-1)


def _reads(
    source: Layout, key: str, words: list[str], sizes: Sizes, at: Place, read: Read, at_once: bool = False
) -> Iterator[tuple[int, Array]]:
    """Yield views of what lies at `at` in the array of a key, a range of the first word at a time."""
    axes, lengths = source.flat, [sizes[axis.holder] for axis in source.flat]
    offset = depth = 0
    while depth < len(axes) and (n := axes[depth].place(at)) is not None:  # the outermost axes: one contiguous run
        offset += n * prod(lengths[depth + 1 :])
        depth += 1
    rest, stride = axes[depth:], prod(lengths[depth + 1 :])
    if not rest:
        yield 0, read(key, offset, offset + 1).reshape(())
        return
    span = rest[0].part(sizes)
    count, step = span.stop - span.start, span.stop - span.start
    if not at_once and words and rest[0].word == words[0]:
        step = max(1, PIECE // (8 * stride))  # of the widest dtype
    inner = prod(sizes[word] for word in words[1:])
    for n in range(0, count, step):
        rows = min(step, count - n)
        start = offset + (span.start + n) * stride
        split = read(key, start, start + rows * stride).reshape([rows, *lengths[depth + 1 :]])
        window = Axis(rest[0].holder, rest[0].word, 0)
        yield n * inner, _view(split, [window, *rest[1:]], {**sizes, str(window.word): rows}, at, words)


def _strips(view: Array) -> Iterator[tuple[int, Array]]:
    """Yield the entries of a view in C order, as they are or a cache's worth at a time."""
    if view.flags.c_contiguous:
        yield 0, view.reshape(-1)
        return
    row = view.size // len(view)
    step = STRIP // (row * view.itemsize)
    if step == 0:
        for n, inner in enumerate(view):
            for first, entries in _strips(inner):
                yield n * row + first, entries
        return
    for n in range(0, len(view), step):
        part = view[n : n + step]
        out = np.empty(part.shape, view.dtype)
        _copy(out, part)
        yield n * row, out.reshape(-1)


def _copy(to: Array, source: Array) -> None:
    """Copy bits; where rows become columns, tile by tile, through rows that lie an odd number of cache lines apart.

    A tile stays in the cache between its rows and its columns.  Rows whose distance is a power of two would compete for the
    same lines of it, and a plain copy of the transposed array takes several times as long.
    """
    to, source = _bits(to), _bits(source)
    last, strides = source.ndim - 1, [abs(stride) for stride in source.strides]
    long = [axis for axis, length in enumerate(source.shape) if length > 1]
    k = min(long, key=strides.__getitem__, default=last)  # the axis along which the source is contiguous
    if k == last:
        to[...] = source
        return
    order = [*sorted((axis for axis in range(source.ndim) if axis != k), key=lambda axis: -strides[axis]), k]
    back, columns = np.argsort(order), TILE // source.itemsize
    tile = [source.shape[axis] for axis in order]
    tile[order.index(last)], tile[-1] = min(LINES, source.shape[last]), min(columns, source.shape[k])
    scratch = np.empty((*tile[:-1], tile[-1] + 64 // source.itemsize), source.dtype)
    here = [slice(None)] * source.ndim
    for n in range(0, source.shape[k], columns):
        for m in range(0, source.shape[last], LINES):
            here[k], here[last] = slice(n, n + columns), slice(m, m + LINES)
            part = source[tuple(here)].transpose(order)
            padded = scratch[tuple(slice(0, length) for length in part.shape)]
            padded[...] = part
            to[tuple(here)] = padded.transpose(back)


def _bits(array: Array) -> Array:
    """The same memory as unsigned integers: numpy then copies bits, and never a number."""
    return array.view(f"u{array.itemsize}")
