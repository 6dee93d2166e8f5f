"""The column of a format: the layouts of all parameters, which may have a layout of their own for each of several pieces.

A format may store one parameter in arrays that differ in more than an index: queries in one, keys and values in another.
Then its table has a line for each piece, and the name of the parameter is followed by the part of an axis that the line is
for, in the notation of `layout.py`:

    blocks.attn.qkv.weight[qkv=0]    | blocks.{block}.attn.to_q.weight  | (head dim) width
    blocks.attn.qkv.weight[qkv=1:kv] | blocks.{block}.attn.to_kv.weight | (kv head dim) width

A table of positions without rows for prefix tokens may be stored as a grid: `row column` in place of `token`.

Before a conversion, `align` cuts the layouts of both formats into the same pieces, and splits the same axes.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints.layout import FIXED_SIZES, Axis, Layout, Sizes
from vit_spec import InputError, ViTConfig, rows

Column = Mapping[str, Layout]  # parameter, or piece of one as text -> its layout in one format

SPLIT_AXES = {"token": ("row", "column")}  # axis -> the axes that a format may store in its place

_PIECE = re.compile(r"([\w.]+)(?:\[([a-z]\w*)=(\d{1,6})(?::([a-z]\w*))?\])?")


class Piece(NamedTuple):
    """A parameter, or a part of it that has a layout of its own.

    Attributes:
        parameter: the name of its row.
        axis: the axis of which it is a part; "" for the whole parameter.
        start: the first index on this axis.
        part: the axis of the piece for the indices from `start` on; None for the single index `start`.
    """

    parameter: str
    axis: str = ""
    start: int = 0
    part: str | None = None

    @classmethod
    @lru_cache(maxsize=1024)  # the same few names are parsed for every config
    def parse(cls, text: str) -> Self:
        """Parse "blocks.attn.qkv.weight" or "blocks.attn.qkv.weight[qkv=1:kv]".

        Raises:
            InputError: the text is malformed, or names an axis whose length depends on the config.
        """
        match = _PIECE.fullmatch(text)
        if not match:
            raise InputError(f"{text!r} is not a parameter: write its name, name[axis=index] or name[axis=index:axis]")
        parameter, axis, start, part = match.groups()
        if unknown := [each for each in (axis, part) if each and each not in FIXED_SIZES]:
            raise InputError(f"{text}: {unknown[0]} is not one of {', '.join(FIXED_SIZES)}, whose indices can be divided")
        piece = cls(parameter, axis or "", int(start or 0), part)
        if axis and piece.start + piece.length > FIXED_SIZES[axis]:
            raise InputError(f"{text} is beyond the end of {axis}, which has {FIXED_SIZES[axis]} indices")
        return piece

    def __str__(self) -> str:
        part = f":{self.part}" if self.part else ""
        return f"{self.parameter}[{self.axis}={self.start}{part}]" if self.axis else self.parameter

    @property
    def length(self) -> int:
        """The number of its indices on `axis`."""
        return FIXED_SIZES[self.part] if self.part else 1

    def axes(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return the axes of the piece, from those of the parameter."""
        return tuple(each for axis in axes for each in ((axis,) if axis != self.axis else (self.part,)) if each)


def parameter_of(text: str) -> str:
    """Return the parameter of a piece that is given as text."""
    return text.partition("[")[0]


def pieces_of(names: Iterable[str], parameter: str) -> list[str]:
    """Return the names, as in a column, that are a parameter or pieces of it, in the order of their indices."""
    return sorted((name for name in names if parameter_of(name) == parameter), key=lambda name: Piece.parse(name).start)


def pieces_by_parameter(names: Iterable[str]) -> dict[str, list[str]]:
    """Return `pieces_of` each parameter of the names."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(parameter_of(name), []).append(name)
    return {parameter: pieces_of(several, parameter) for parameter, several in found.items()}


def check_pieces(names: Iterable[str]) -> None:
    """Raise InputError unless the pieces of each parameter have all its indices on one axis, each once.

    names: names as in a column, or in a table that has no pieces and whole parameters at once.
    """
    pieces: dict[str, list[Piece]] = {}
    for name in names:
        piece = Piece.parse(name)
        pieces.setdefault(piece.parameter, []).append(piece)
    for parameter, several in pieces.items():
        axes = {piece.axis for piece in several}
        if axes == {""}:
            continue
        if len(axes) > 1:
            raise InputError(f"{parameter} has lines for {' and '.join(map(str, several))}: divide one axis, or none")
        [axis] = axes
        indices = sorted(n for piece in several for n in range(piece.start, piece.start + piece.length))
        if indices != list(range(FIXED_SIZES[axis])):
            given = ", ".join(map(str, several))
            singles = ", ".join(f"{parameter}[{axis}={n}]" for n in range(FIXED_SIZES[axis]))
            raise InputError(
                f"{given}: write a line for each of the {FIXED_SIZES[axis]} indices of {axis}, once, as in {singles}"
            )


def row_column(config: ViTConfig, names: Iterable[str] | None = None) -> Column:
    """Return the layouts of parameters as `vit_spec.rows` declares them: an array with a dimension for each axis.

    names: the parameters; None for all.
    """
    declared = rows(config)
    return {
        name: Layout(name, tuple((Axis(axis, axis, 0),) for axis in declared[name].axes))
        for name in (declared if names is None else names)
    }


def align(source: Column, target: Column) -> tuple[Column, Column]:
    """Return both columns with the same pieces, whose layouts have the same axes; in the order of the target.

    Parameters that the target lacks are left out.
    """
    aligned: tuple[dict[str, Layout], dict[str, Layout]] = ({}, {})
    pieces = [pieces_by_parameter(column) for column in (source, target)]
    for parameter in pieces[1]:
        both = [each.get(parameter, []) for each in pieces]
        names = both[1] if both[0] == [parameter] else both[0]
        if parameter not in both[0] and parameter not in both[1] and both[0] != both[1]:  # divided in two ways
            axis = Piece.parse(names[0]).axis
            names = [str(Piece(parameter, axis, n)) for n in range(FIXED_SIZES[axis])]
        for name in names:
            layouts = [_cut(column, given, name) for column, given in zip((source, target), both, strict=True)]
            for found, layout, other in zip(aligned, layouts, reversed(layouts), strict=True):
                found[name] = _split(layout, other.parameter_axes)
    return aligned


def _cut(column: Column, given: Sequence[str], name: str) -> Layout:
    """Return the layout of the piece `name` from the layouts of the pieces `given`, one of which contains it."""
    if name in column:
        return column[name]
    wanted = Piece.parse(name)
    for text in given:
        piece = Piece.parse(text)
        if not piece.axis:
            return column[text].cut(wanted.axis, wanted.start, wanted.part)
        if piece.start <= wanted.start < piece.start + piece.length:
            assert wanted.part is None
            assert piece.part is not None
            return column[text].cut(piece.part, wanted.start - piece.start, None)
    raise ValueError(f"no piece of {', '.join(given)} contains {name}")


def _split(layout: Layout, others: Sequence[str]) -> Layout:
    """Return a layout with the axes split that another layout has split."""
    for axis, parts in SPLIT_AXES.items():
        if axis in layout.parameter_axes and set(parts) <= set(others):
            layout = layout.split(axis, parts)
    return layout


def check_unique_keys(column: Column, sizes: Sizes) -> None:
    """Raise InputError if two keys of a table, or two indices in one of them, give the same key of a checkpoint.

    "h{block}{head}" gives h111 for head 11 of block 1 and for head 1 of block 11.  Parts of one array share a key.
    """
    seen: dict[str, str] = {}  # key -> the key in the table
    for pattern, layout in {layout.key: layout for layout in column.values()}.items():
        for key in layout.keys(sizes):
            if key in seen:
                twice = f"of {seen[key]} and of {pattern}" if seen[key] != pattern else f"for two indices of {pattern}"
                raise InputError(f"{key} is the key {twice}: correct the table of the format")
            seen[key] = pattern


def check_parts(column: Column, sizes: Sizes, places: Mapping[str, str]) -> None:
    """Raise InputError if parameters share entries of an array, give it different shapes, or do not fit into it.

    places: parameter -> where its line is, for messages.
    """
    for name, layout in column.items():
        for axis in layout.array_axes:
            end = axis.start + (sizes[axis.parameter_axis] if axis.parameter_axis else 1)
            if end > sizes[axis.name]:
                raise InputError(
                    f"{places[name]}: {axis} ends at {end}, beyond the {sizes[axis.name]} indices of {axis.name}"
                )
    for key, layouts in shared_arrays(column).items():
        lines = " and ".join(places[name] for name, layout in column.items() if layout.key == key)
        if len({layout.shape(sizes) for layout in layouts}) > 1:
            raise InputError(f"{lines}: the lines give the array {key} different shapes: correct them")
        if (count_parameters(layouts, sizes) > 1).any():
            raise InputError(f"{lines}: the same entries of {key} belong to two parameters: correct the lines")


def shared_arrays(column: Column) -> dict[str, list[Layout]]:
    """Return the key of each array that has room for more than one parameter, with the layouts of its parameters."""
    shared: dict[str, list[Layout]] = {}
    for layout in column.values():
        if layout.is_part:
            shared.setdefault(layout.key, []).append(layout)
    return shared


def count_parameters(layouts: Sequence[Layout], sizes: Sizes) -> NDArray[np.uint8]:
    """Return an array of the shape of those at one key, with the number of parameters that each entry belongs to.

    layouts: the layouts of the parameters that share the key.
    """
    counts = np.zeros(layouts[0].shape(sizes), np.uint8)
    for layout in layouts:
        axes = [axis.parameter_axis for axis in layout.array_axes if axis.parameter_axis]
        view = layout.view(counts, sizes, dict.fromkeys(layout.key_axes, 0), axes)
        view += 1
    return counts
