"""The lines of a mapping: where both sides keep one parameter, or where one side keeps a parameter that is zero."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from parity.checkpoints.layout import Array, Indices, Layout, Sizes
from parity.comparison.any_model.names import quote_key, unquote_key
from parity.comparison.any_model.parameters import FUSED
from vit_spec import InputError, nearest

Shapes = Mapping[str, tuple[int, ...]]

ARROW = "<->"


@dataclass(frozen=True)
class Pair:
    """The layouts of the same parameter on both sides, and the lengths of its axes.

    reversed_axes: the axes whose entries the two sides have in opposite order; they are printed with "-" on flax's side.
    note: the rule that decided, if names and shapes alone did not; it is printed after the line.
    """

    flax: Layout
    torch: Layout
    sizes: Sizes
    reversed_axes: tuple[str, ...] = ()
    note: str = ""

    @classmethod
    def parse(cls, line: str, flax: Shapes, torch: Shapes, note: str = "") -> "Pair":
        """Parse "flax key | axes <-> torch key | axes", and derive the lengths of its axes from the shapes of the arrays.

        An axis may be followed by its length, as in "(c:3 y:4 x:4)", where the shapes do not determine it.  A minus before
        an axis reverses it, as in "-y -x in out".

        Raises:
            InputError: the line is wrong; the message quotes it.
        """
        stripped, lengths = _split_lengths(line)
        left, arrow, right = stripped.partition(ARROW)
        if not arrow:
            raise InputError(f"layout {line.strip()!r}: write it as `flax key | axes {ARROW} torch key | axes`")
        (left, of_left), (right, of_right) = _split_signs(left), _split_signs(right)
        a, b = _parse_layout(left), _parse_layout(right)
        if no_axes := sorted(
            (of_left | of_right) - {axis.name for axis in a.array_axes if axis.parameter_axis == axis.name}
        ):
            raise InputError(f"layout {line.strip()!r}: only a whole axis of an array can be reversed, not {no_axes[0]}")
        if sorted(a.parameter_axes) != sorted(b.parameter_axes):
            raise InputError(f"layout {line.strip()!r}: both sides must have the same axes")
        sizes = _axis_sizes(line.strip(), lengths, (a, flax, "flax"), (b, torch, "torch"))
        return cls(a, b, sizes, tuple(sorted(of_left ^ of_right)), note)

    def arrays(self) -> Iterator[tuple[str, str, Indices, list[str]]]:
        """Yield for each pair of arrays flax key, torch key, indices on the axes in the keys, and the other axes."""
        in_keys = list(dict.fromkeys(self.flax.key_axes + self.torch.key_axes))
        axes = [axis for axis in self.flax.parameter_axes if axis not in in_keys]
        for numbers in product(*(range(self.sizes[axis]) for axis in in_keys)):
            indices = dict(zip(in_keys, numbers, strict=True))
            [(a, _)], [(b, _)] = self.flax.indexed_keys(self.sizes, indices), self.torch.indexed_keys(self.sizes, indices)
            yield unquote_key(a), unquote_key(b), indices, axes

    def matrix_axes(self, side: str) -> list[str]:
        """Return the axes of the parameter in one array, "flax" or "torch", without those in its key."""
        layout: Layout = getattr(self, side)
        return [axis.parameter_axis for axis in layout.array_axes if axis.parameter_axis]

    @property
    def flax_line(self) -> str:
        """The line of flax's side."""
        key, bar, axes = str(self.flax).partition("|")
        for axis in self.reversed_axes:
            axes = re.sub(rf"\b{axis}\b", f"-{axis}", axes)
        return f"{key}{bar}{axes}"

    def views(self, arrays: tuple[Array, Array], indices: Indices, axes: list[str]) -> tuple[Array, Array]:
        """Return views of the parameter in flax's array and in torch's, with the same entries at the same places.

        Args:
            arrays: both arrays.
            indices, axes: as `arrays` yields them.
        """
        flax, torch = (
            layout.view(array, self.sizes, indices, axes)
            for layout, array in zip((self.flax, self.torch), arrays, strict=True)
        )
        if self.reversed_axes:
            flax = np.flip(flax, tuple(axes.index(axis) for axis in self.reversed_axes))
        return flax, torch

    def __str__(self) -> str:
        return f"{self.flax_line}  {ARROW}  {self.torch}"


@dataclass(frozen=True)
class Zero:
    """The layout of a parameter that one side has and the other has not, and that is zero.

    side: "flax" or "torch".
    """

    side: str
    layout: Layout
    sizes: Sizes

    @classmethod
    def parse(cls, line: str, flax: Shapes, torch: Shapes) -> "Zero | None":
        """Parse "flax key | axes <-> 0" or "0 <-> torch key | axes"; return None for any other line.

        Raises:
            InputError: the line is wrong; the message quotes it.
        """
        stripped, lengths = _split_lengths(line)
        left, _, right = (part.strip() for part in stripped.partition(ARROW))
        if (left == "0") == (right == "0"):
            return None
        side, text, shapes = ("torch", right, torch) if left == "0" else ("flax", left, flax)
        layout = _parse_layout(text)
        return cls(side, layout, _axis_sizes(line.strip(), lengths, (layout, shapes, side)))

    @property
    def keys(self) -> list[str]:
        """The keys of the arrays."""
        return _keys(self.layout, self.sizes)

    def views(self, arrays: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """Yield the key of each of these arrays that has entries of the parameter, with a view of them."""
        axes = [axis for axis in self.layout.parameter_axes if axis not in self.layout.key_axes]
        for quoted, indices in self.layout.indexed_keys(self.sizes, {}):
            if (key := unquote_key(quoted)) in arrays:
                yield key, self.layout.view(arrays[key], self.sizes, indices, axes)

    def __str__(self) -> str:
        return f"{self.layout}  {ARROW}  0" if self.side == "flax" else f"0  {ARROW}  {self.layout}"


def _parse_layout(text: str) -> Layout:
    """Return the layout that one side of a line describes.

    Raises:
        InputError: it is malformed.
    """
    key = text.partition("|")[0].strip()
    if re.search(r"\s", key):
        raise InputError(f"layout {text.strip()!r}: a key is written without blanks, as in {quote_key(key)}")
    return Layout.parse(text)


def _keys(layout: Layout, sizes: Sizes) -> list[str]:
    """Return the keys of the arrays of a layout, as the model has them."""
    return [unquote_key(key) for key in layout.keys(sizes)]


def _split_lengths(line: str) -> tuple[str, dict[str, int]]:
    """Return a line without the lengths that follow some of its axes, and these lengths.

    Raises:
        InputError: an axis has two lengths.
    """
    lengths: dict[str, int] = {}
    for axis, length in re.findall(r"\b([a-z_]\w*):([0-9]+)", line):
        if lengths.setdefault(axis, int(length)) != int(length):
            raise InputError(f"layout {line.strip()!r}: {axis} has the lengths {lengths[axis]} and {length}")
    return re.sub(r"\b([a-z_]\w*):[0-9]+", r"\1", line), lengths


def _split_signs(side: str) -> tuple[str, set[str]]:
    """Return one side of a line without the minus before some of its axes, and these axes."""
    key, bar, axes = side.partition("|")
    reversed_axes = set(re.findall(r"(?<![\w)])-([a-z_]\w*)", axes))
    return key + bar + re.sub(r"(?<![\w)])-(?=[a-z_])", "", axes), reversed_axes


def _axis_sizes(line: str, lengths: Mapping[str, int], *sides: tuple[Layout, Shapes, str]) -> dict[str, int]:
    """Return the length of every axis, solved from the shapes of the arrays.

    lengths: the lengths that the line gives.

    Raises:
        InputError: a key is missing, or the shapes do not determine the lengths or do not fit.
    """
    sizes: dict[str, int] = dict(lengths)
    equations: list[tuple[list[str], int]] = []
    for layout, shapes, side in sides:
        for axis in layout.key_axes:
            sizes.setdefault(axis, _count_keys(layout, axis, shapes))
        quoted = layout.key.format_map(dict.fromkeys(layout.key_axes, 0))
        if (key := unquote_key(quoted)) not in shapes:
            raise InputError(f"layout {line!r}: {side} has no {quoted}{nearest(quoted, [*map(quote_key, shapes)])}")
        if len(shapes[key]) != len(layout.dims):
            raise InputError(f"layout {line!r}: {side}'s {key} has shape {shapes[key]}, not {len(layout.dims)} dimensions")
        equations += [([axis.name for axis in dim], n) for dim, n in zip(layout.dims, shapes[key], strict=True)]
    _solve(sizes, equations)
    for axis, names in FUSED.items():  # which are known to be three or two, if both sides are fused in different ways
        if any(axis == name for axes, _ in equations for name in axes) and axis not in sizes:
            sizes[axis] = len(names)
    _solve(sizes, equations)
    axes = {axis for layout, _, _ in sides for axis in layout.parameter_axes} | {a for axes, _ in equations for a in axes}
    if no_axes := sorted(lengths.keys() - axes):
        raise InputError(f"layout {line!r}: {no_axes[0]} has a length, and is no axis")
    if missing := sorted(axes - sizes.keys()):
        raise InputError(
            f"layout {line!r}: the shapes do not determine the lengths of {', '.join(missing)}; write each length after "
            f"its axis, as in {missing[0]}:4"
        )
    if not all(_fits(layout, sizes, shapes) for layout, shapes, _ in sides):
        found = [f"{key} {shapes.get(key)}" for layout, shapes, _ in sides for key in _keys(layout, sizes)[:1]]
        raise InputError(f"layout {line!r}: its axes do not fit {' and '.join(found)}, or do not fit all of its keys")
    return sizes


def _solve(sizes: dict[str, int], equations: Sequence[tuple[list[str], int]]) -> None:
    """Add to `sizes` the lengths of all axes that follow from equations: axes whose lengths have a given product."""
    while True:
        unknown = [([axis for axis in axes if axis not in sizes], axes, n) for axes, n in equations]
        solved = {
            left[0]: n // max(1, prod(sizes.get(axis, 1) for axis in axes)) for left, axes, n in unknown if len(left) == 1
        }
        if not solved:
            return
        sizes |= solved


def _fits(layout: Layout, sizes: Sizes, shapes: Shapes) -> bool:
    """Return whether all arrays have the shape of the layout, and no part of an axis, such as qkv=2, is beyond its end."""
    inside = all(
        axis.start + (sizes[axis.parameter_axis] if axis.parameter_axis else 1) <= sizes[axis.name]
        for axis in layout.array_axes
    )
    return inside and all(shapes.get(key) == layout.shape(sizes) for key in _keys(layout, sizes))


def _count_keys(layout: Layout, axis: str, shapes: Shapes) -> int:
    """Return the number of keys, counted from 0, that exist for an axis in the key."""
    n = 0
    while unquote_key(layout.key.format_map({**dict.fromkeys(layout.key_axes, 0), axis: n})) in shapes:
        n += 1
    return n
