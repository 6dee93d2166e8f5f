"""The layout language: where a format stores a parameter, in one line, and the copy from one layout to another.

A parameter is an array with named axes, which `vit_spec.rows` declares.  The weight that produces queries, keys and values
has the axes `block`, `qkv`, `head`, `dim` and `width`.  A checkpoint format decides which of them go into the key, which
become dimensions of the array and in which order, and which are merged into one dimension.  A layout states this as
`key | dimensions`.  For 12 blocks, 3 heads of 64 dims and a width of 192:

    layout                                                      arrays
    blocks/attn/qkv/kernel          | block width qkv head dim  1, of shape (12, 192, 3, 3, 64)
    blocks.{block}.attn.qkv.weight  | (qkv head dim) width      12, of shape (576, 192): blocks.0.attn.qkv.weight, ...
    layer.{block}.attn.{qkv}.weight | (head dim) width          36, of shape (192, 192): layer.0.attn.query.weight, ...

The notation:

    width           a dimension of the array: this axis
    (head dim)      a dimension of the array: these axes merged, the last one varying fastest
    1               a dimension of the array of length one
    {block}         an axis in the key: one array for each index, written 0, 1, 2, ... or as the words in `spellings`
    {block+1}       the same, written 1, 2, 3, ...
    qkv=2           the parameter is index 2 of the array's axis qkv; other parameters are stored in the rest of the array
    qkv=1:kv        the parameter's axis kv is stored on the array's axis qkv, from index 1 on
    [~ff (kv dim)]  the first dimension of the array: ff entries of other parameters, then the parameter's entries (kv dim)

The layouts of all parameters in one format are its column.  Two layouts with the same axes store the same numbers, so a
conversion is a strided copy from one to the other.  It computes nothing, it is lossless in every dtype, and its inverse is
the same copy with the two layouts swapped.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from vit_spec import InputError

Array = NDArray[Any]
Sizes = Mapping[str, int]  # axis -> its length
Indices = Mapping[str, int]  # axis -> an index on it
Spellings = Mapping[str, tuple[str, ...]]  # axis -> the word for each of its indices in keys; default: 0, 1, 2, ...
ReadRange = Callable[[str, int, int], Array]  # (key, start, stop) -> entries start to stop of its array in C order, 1-d

FIXED_SIZES = {"qkv": 3, "kv": 2, "glu": 2, "xy": 2, "yx": 2}  # axes whose length is the same in every model

# What checkpoints of an NNX state have behind the key of each variable, by version of flax.
NNX_VALUES = ("value", "raw_value")
KERAS_GROUPS = ("trainable_variables/", "non_trainable_variables/")  # of `keras.Model.get_state_tree`; a frozen part moves

_NAME = r"[a-z]\w*"
_SEGMENT = re.compile(r"(~?)(\([^()]*\)|[^\s()]+)")
_AXIS = re.compile(rf"({_NAME})(?:=(\d{{1,6}})(?::({_NAME}))?)?")
_KEY_AXIS = re.compile(rf"{{({_NAME})(?:\+(\d+))?}}")

READ_CHUNK = 16 << 20  # bytes to read at a time where the order of entries allows it
COPY_CHUNK = 2 << 20  # bytes to reorder at a time: few enough to stay in the CPU cache until they are used
TILE_ROWS, TILE_BYTES = 512, 512  # a tile of a transposition: its rows, and the bytes of each


class Axis(NamedTuple):
    """One axis of a stored array; the parameter takes all of it or a part of it.

    Attributes:
        name: the axis of the array.
        parameter_axis: the axis of the parameter that is stored on it; None if the parameter takes a single index.
        start: the index on the array's axis at which the parameter begins.
    """

    name: str
    parameter_axis: str | None
    start: int

    def __str__(self) -> str:
        if self.parameter_axis == self.name:
            return self.name
        return f"{self.name}={self.start}" + (f":{self.parameter_axis}" if self.parameter_axis else "")

    def fixed_index(self, indices: Indices) -> int | None:
        """Return the one index on this axis that `indices` select; None if they select no single one."""
        if self.parameter_axis is None:
            return self.start
        return self.start + indices[self.parameter_axis] if self.parameter_axis in indices else None

    def index_range(self, sizes: Sizes) -> slice:
        """Return the indices on this axis that belong to the parameter."""
        return slice(self.start, self.start + sizes[self.parameter_axis or self.name])


@dataclass(frozen=True)
class Layout:
    """The location of one parameter in the checkpoints of a format.

    Attributes:
        key: the key, or the pattern of the keys, with axes in {braces}.
        dims: for each dimension of the array, the axes merged into it; empty for a dimension of length one.
        spellings: the words for the indices of axes in the key.
        before: the merged axes of each segment of other parameters that precedes this one on the array's first dimension.
        after: the same for the segments that follow.
    """

    key: str
    dims: tuple[tuple[Axis, ...], ...]
    spellings: Spellings = field(default_factory=dict)
    before: tuple[tuple[str, ...], ...] = ()
    after: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def parse(cls, line: str, spellings: Spellings | None = None) -> Self:
        """Parse a line such as "blocks.{block}.attn.qkv.weight | (qkv head dim) width".

        Raises:
            InputError: the line is malformed; the message quotes it and says what is wrong.
        """

        def error(what: str) -> InputError:
            return InputError(f"layout {line.strip()!r}: {what}")

        key, bar, axes = (part.strip() for part in line.partition("|"))
        if not bar or not key or not axes or "|" in axes:
            raise error("write it as `key | axes`, with one bar")
        if re.search(r"\s", key) or re.search(r"[{}]", _KEY_AXIS.sub("", key)):
            raise error("a key has no blanks, and braces only around one axis, as in blocks.{block}.norm1.weight")
        segments, bracket = [("", "")], re.fullmatch(r"\[([^\[\]]*)\](.*)", axes)
        if bracket:
            segments = _SEGMENT.findall(bracket[1])
            own = [text for mark, text in segments if not mark]
            others_empty = any(mark and not text.strip("() ") for mark, text in segments)
            if len(own) != 1 or others_empty or _SEGMENT.sub("", bracket[1]).strip():
                raise error("write [segments], each an axis or (axes to merge), with ~ before all but the parameter's")
            axes = f"{own[0]} {bracket[2]}"
        own_at = next(n for n, (mark, _) in enumerate(segments) if not mark)
        others = [tuple(text.strip("()").split()) for _, text in segments]
        if spelled := [axis for axis, first in _KEY_AXIS.findall(key) if first and axis in (spellings or {})]:
            raise error(f"{spelled[0]} is written as words, so that no number can be added to it")
        dims = []
        for dim in re.findall(r"\([^()]*\)|\S+", axes):
            texts = dim[1:-1].split() if dim[0] == "(" and dim[-1] == ")" else [dim]
            matches = [_AXIS.fullmatch(text) for text in ([] if dim == "1" else texts or [dim])]
            if not all(matches):
                raise error(f"{dim!r} is not an axis: write a name, (names to merge), 1, name=index or name=index:axis")
            found = [match.groups() for match in matches if match]
            if same := [a for a, n, part in found if part == a]:
                raise error(f"{same[0]}={{index}}:{same[0]} is all of the axis: write {same[0]}")
            dims.append(tuple(Axis(a, part or (None if n else a), int(n or 0)) for a, n, part in found))
        layout = cls(key, tuple(dims), spellings or {}, tuple(others[:own_at]), tuple(others[own_at + 1 :]))
        if repeated := sorted({axis for axis in layout.parameter_axes if layout.parameter_axes.count(axis) > 1}):
            raise error(f"{', '.join(repeated)} appears more than once")
        return layout

    @cached_property
    def key_axes(self) -> list[str]:
        """The axes in the key, in order."""
        return [axis for axis, _ in _KEY_AXIS.findall(self.key)]

    @cached_property
    def array_axes(self) -> list[Axis]:
        """The axes of the array, in order, with merged dimensions split."""
        return [axis for dim in self.dims for axis in dim]

    @cached_property
    def parameter_axes(self) -> list[str]:
        """All axes of the parameter: those in the key, then those in the array."""
        return self.key_axes + [axis.parameter_axis for axis in self.array_axes if axis.parameter_axis]

    @property
    def is_part(self) -> bool:
        """Whether the arrays have room for more than this parameter."""
        return bool(self.before or self.after) or any(axis.parameter_axis != axis.name for axis in self.array_axes)

    @property
    def axes_text(self) -> str:
        """The right-hand side of the line, e.g. "(qkv head dim) width"."""
        texts = [_merged_text(map(str, dim)) for dim in self.dims]
        if self.before or self.after:
            others = [[f"~{_merged_text(segment)}" for segment in segments] for segments in (self.before, self.after)]
            texts[0] = f"[{' '.join([*others[0], texts[0], *others[1]])}]"
        return " ".join(texts)

    def __str__(self) -> str:
        return f"{self.key} | {self.axes_text}"

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the shape of each array."""
        shape = [prod(sizes[axis.name] for axis in dim) for dim in self.dims]
        if self.before or self.after:
            shape[0] += _count_entries(self.before, sizes) + _count_entries(self.after, sizes)
        return tuple(shape)

    def offset(self, sizes: Sizes) -> int:
        """Return the number of entries of each array that precede this parameter on the first dimension."""
        return _count_entries(self.before, sizes) * prod(self.shape(sizes)[1:])

    def keys(self, sizes: Sizes) -> list[str]:
        """Return every key, in order."""
        return [key for key, _ in self.indexed_keys(sizes, {})]

    def indexed_keys(self, sizes: Sizes, indices: Indices) -> Iterator[tuple[str, Indices]]:
        """Yield the keys that agree with `indices`, each with its index on every axis in the key."""
        key_axes, starts = self.key_axes, re.findall(rf"{{({_NAME})((?:\+\d+)?)}}", self.key)
        for numbers in product(*([indices[axis]] if axis in indices else range(sizes[axis]) for axis in key_axes)):
            key_indices = dict(zip(key_axes, numbers, strict=True))
            words = {
                axis + first: self.spellings[axis][key_indices[axis]]
                if axis in self.spellings
                else key_indices[axis] + int(first or 0)
                for axis, first in starts
            }
            yield self.key.format_map(words), key_indices

    def cut(self, axis: str, start: int, part: str | None) -> "Layout":
        """Return the layout of one index of a parameter's axis, or of the indices from `start` on, as the axis `part`."""

        def in_key(match: re.Match[str]) -> str:
            if match[1] != axis:
                return match[0]
            first = int(match[2] or 0) + start
            if part is None:
                return self.spellings[axis][start] if axis in self.spellings else str(first)
            return f"{{{part}+{first}}}" if first and axis not in self.spellings else f"{{{part}}}"

        words = {part: self.spellings[axis][start:]} if part is not None and axis in self.spellings else {}
        dims = tuple(
            tuple(Axis(each.name, part, each.start + start) if each.parameter_axis == axis else each for each in dim)
            for dim in self.dims
        )
        return replace(self, key=_KEY_AXIS.sub(in_key, self.key), dims=dims, spellings={**self.spellings, **words})

    def split(self, axis: str, parts: tuple[str, ...]) -> "Layout":
        """Return the layout with an axis of the array, of which the parameter takes all, split into several axes."""
        whole, split = (Axis(axis, axis, 0),), tuple(Axis(part, part, 0) for part in parts)
        dims = tuple(tuple(each for old in dim for each in (split if (old,) == whole else (old,))) for dim in self.dims)
        return replace(self, dims=dims)

    def view(self, array: Array, sizes: Sizes, indices: Indices, axes: list[str]) -> Array:
        """Return a view of the parameter in an array at `indices`, with one dimension for each of `axes`, in their order.

        Splitting the dimensions of the array never needs a copy.

        Args:
            array: an array of the shape `shape(sizes)`.
            sizes: the length of each axis.
            indices: the index on each axis that is not in `axes`.
            axes: the axes of the parameter, in the order of the dimensions of the view.
        """
        if self.before or self.after:
            start = _count_entries(self.before, sizes)
            array = array[start : start + prod(sizes[axis.name] for axis in self.dims[0])]
        split = array.reshape([sizes[axis.name] for axis in self.array_axes])
        return _view(split, self.array_axes, sizes, indices, axes)


def _merged_text(axes: Iterable[str]) -> str:
    """Return merged axes as they are written: "1", "width" or "(head dim)"."""
    text = " ".join(axes) or "1"
    return f"({text})" if " " in text else text


def _count_entries(segments: Iterable[tuple[str, ...]], sizes: Sizes) -> int:
    """Return the number of entries of segments on the first dimension."""
    return sum(prod(sizes[axis] for axis in segment) for segment in segments)


def _view(split: Array, array_axes: list[Axis], sizes: Sizes, indices: Indices, axes: list[str]) -> Array:
    fixed = [axis.fixed_index(indices) for axis in array_axes]
    selection = [axis.index_range(sizes) if n is None else n for axis, n in zip(array_axes, fixed, strict=True)]
    remaining = [axis.parameter_axis for axis, n in zip(array_axes, fixed, strict=True) if n is None]
    # The ellipsis makes numpy return a view even where the selection is one entry.
    view: Array = split[(*selection, ...)].transpose([remaining.index(axis) for axis in axes])
    return view


def split_by_source(source: Layout, target: Layout, sizes: Sizes, indices: Indices) -> list[tuple[int, Indices]]:
    """Split a target array into the parts that come from different source arrays.

    The parts are independent of each other: threads may convert them at the same time.

    Args:
        source: the layout of the source.
        target: the layout of the target.
        sizes: the length of each axis.
        indices: the index on every axis in the target's key.

    Returns:
        For each part, the offset of its first entry in C order, and its indices for `convert_chunks`.
    """
    axes = [axis.name for axis in target.array_axes]
    if not axes or axes[0] not in source.key_axes:
        return [(0, indices)]
    stride = prod(sizes[axis] for axis in axes[1:])
    return [(n * stride, {**indices, axes[0]: n}) for n in range(sizes[axes[0]])]


def convert_chunks(
    source: Layout, target: Layout, sizes: Sizes, indices: Indices, read: ReadRange
) -> Iterator[tuple[int, Array]]:
    """Yield a target array, or a part of one, in chunks copied bit by bit from the source.

    A chunk is the offset of its first entry in C order, and its entries in one dimension.  Chunks are yielded in order.  At
    most the selected entries of one source array are in memory at a time; if the target stores them in the same order, at
    most `READ_CHUNK` bytes of them.  Source arrays that interleave in the target are first assembled in memory.

    Args:
        source: the layout of the source.
        target: the layout of the target.
        sizes: the length of each axis.
        indices: the index on every axis in the target's key, and for a part also on the first axis of the array.
        read: returns a range of the entries of the source array at a key.

    Raises:
        ValueError: the layouts do not have the same axes, or the target array has room for more than this parameter.
    """
    if sorted(source.parameter_axes) != sorted(target.parameter_axes):
        raise ValueError(f"{source} and {target} do not have the same axes")
    if target.is_part:
        raise ValueError(f"{target} has room for more than one parameter: fill a view of it")
    axes = [axis.name for axis in target.array_axes if axis.name not in indices]
    yield from _chunks(source, axes, sizes, indices, read)


def _chunks(
    source: Layout, axes: list[str], sizes: Sizes, indices: Indices, read: ReadRange
) -> Iterator[tuple[int, Array]]:
    """Yield the entries at `indices` in chunks, with `axes` in C order."""
    if axes and axes[0] in source.key_axes:  # the source has an array for each index on the target's first axis
        stride = prod(sizes[axis] for axis in axes[1:])
        for n in range(sizes[axes[0]]):
            for first, entries in _chunks(source, axes[1:], sizes, {**indices, axes[0]: n}, read):
                yield n * stride + first, entries
        return
    inner = [axis for axis in axes if axis not in source.key_axes]
    if inner == axes:
        [(key, key_indices)] = source.indexed_keys(sizes, indices)
        for first, view in _read_views(source, key, axes, sizes, {**indices, **key_indices}, read):
            for offset, entries in _contiguous_chunks(view):
                yield first + offset, entries
        return
    assembled = None
    for key, key_indices in source.indexed_keys(sizes, indices):  # source arrays that interleave in the target
        [(_, view)] = _read_views(source, key, inner, sizes, {**indices, **key_indices}, read, at_once=True)
        if assembled is None:
            assembled = np.empty([sizes[axis] for axis in axes], view.dtype)
        _copy(assembled[(*(key_indices.get(axis, slice(None)) for axis in axes), ...)], view)
    if assembled is not None:
        yield 0, assembled.reshape(-1)


def _read_views(
    source: Layout, key: str, axes: list[str], sizes: Sizes, indices: Indices, read: ReadRange, at_once: bool = False
) -> Iterator[tuple[int, Array]]:
    """Yield views of the entries at `indices` in the array of a key, a range of the first axis at a time."""
    array_axes, lengths = source.array_axes, [sizes[axis.name] for axis in source.array_axes]
    offset, depth = source.offset(sizes), 0
    while depth < len(array_axes) and (n := array_axes[depth].fixed_index(indices)) is not None:
        offset += n * prod(lengths[depth + 1 :])  # fixed outermost axes select one contiguous range
        depth += 1
    rest, stride = array_axes[depth:], prod(lengths[depth + 1 :])
    if not rest:
        yield 0, read(key, offset, offset + 1).reshape(())
        return
    span = rest[0].index_range(sizes)
    count, step = span.stop - span.start, span.stop - span.start
    if not at_once and axes and rest[0].parameter_axis == axes[0]:
        step = max(1, READ_CHUNK // (8 * stride))  # 8 bytes: the widest dtype
    inner = prod(sizes[axis] for axis in axes[1:])
    for n in range(0, count, step):
        rows = min(step, count - n)
        start = offset + (span.start + n) * stride
        split = read(key, start, start + rows * stride).reshape([rows, *lengths[depth + 1 :]])
        window = Axis(rest[0].name, rest[0].parameter_axis, 0)
        view_sizes = {**sizes, str(window.parameter_axis): rows}
        yield n * inner, _view(split, [window, *rest[1:]], view_sizes, indices, axes)


def _contiguous_chunks(view: Array) -> Iterator[tuple[int, Array]]:
    """Yield the entries of a view in C order: the view itself if it is contiguous, else copies of `COPY_CHUNK` bytes."""
    if view.flags.c_contiguous:
        yield 0, view.reshape(-1)
        return
    row = view.size // len(view)
    step = COPY_CHUNK // (row * view.itemsize)
    if step == 0:
        for n, inner in enumerate(view):
            for first, entries in _contiguous_chunks(inner):
                yield n * row + first, entries
        return
    for n in range(0, len(view), step):
        part = view[n : n + step]
        out = np.empty(part.shape, view.dtype)
        _copy(out, part)
        yield n * row, out.reshape(-1)


def _copy(target: Array, source: Array) -> None:
    """Copy the bits of `source` to `target`, which has the same shape and may have another order of entries in memory.

    A transposition copies tiles through a buffer whose rows are an odd number of cache lines apart.  A tile stays in the
    cache between the reading of its rows and the writing of its columns.  Rows a power of two apart would compete for the
    same cache lines.  A plain copy of the transposed array takes several times as long.
    """
    target, source = _as_unsigned(target), _as_unsigned(source)
    last, strides = source.ndim - 1, [abs(stride) for stride in source.strides]
    long = [axis for axis, length in enumerate(source.shape) if length > 1]
    k = min(long, key=strides.__getitem__, default=last)  # the axis along which the source is contiguous
    if k == last:
        target[...] = source
        return
    order = [*sorted((axis for axis in range(source.ndim) if axis != k), key=lambda axis: -strides[axis]), k]
    back, columns = np.argsort(order), TILE_BYTES // source.itemsize
    tile = [source.shape[axis] for axis in order]
    tile[order.index(last)], tile[-1] = min(TILE_ROWS, source.shape[last]), min(columns, source.shape[k])
    buffer = np.empty((*tile[:-1], tile[-1] + 64 // source.itemsize), source.dtype)
    region = [slice(None)] * source.ndim
    for n in range(0, source.shape[k], columns):
        for m in range(0, source.shape[last], TILE_ROWS):
            region[k], region[last] = slice(n, n + columns), slice(m, m + TILE_ROWS)
            part = source[tuple(region)].transpose(order)
            padded = buffer[tuple(slice(0, length) for length in part.shape)]
            padded[...] = part
            target[tuple(region)] = padded.transpose(back)


def _as_unsigned(array: Array) -> Array:
    """Return the same memory as unsigned integers, so that numpy copies bits and converts no number."""
    return array.view(f"u{array.itemsize}")
