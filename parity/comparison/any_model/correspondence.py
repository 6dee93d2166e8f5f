"""The mapping between the parameters of any Flax model and any PyTorch module, as pairs of layouts.

    encoder/layer_{n}/attn/query/kernel | in head dim  <->  layers.{n}.attn.in_proj_weight | (qkv=0 head dim) in

Each side is a line in the layout language of `parity.checkpoints.layout`.  Both sides of a pair have the same axes, so
weights and gradients are copied in either direction without arithmetic.  `match` first applies the lines that the caller
gives, and finds the other pairs by names, order and shapes.  It does not guess: an ambiguous parameter is an error, whose
message quotes a line that resolves the ambiguity.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints.layout import Indices, Layout, Sizes
from parity.comparison.any_model import matching
from parity.comparison.any_model.parameters import FUSED
from vit_spec import InputError, nearest

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Shapes = Mapping[str, tuple[int, ...]]

ARROW = "<->"


@dataclass(frozen=True)
class Pair:
    """The layouts of the same parameter on both sides, and the lengths of its axes.

    note: the rule that decided, if names and shapes alone did not; it is printed after the line.
    """

    flax: Layout
    torch: Layout
    sizes: Sizes
    note: str = ""

    @classmethod
    def parse(cls, line: str, flax: Shapes, torch: Shapes, note: str = "") -> "Pair":
        """Parse "flax key | axes <-> torch key | axes", and derive the lengths of its axes from the shapes of the arrays.

        An axis may be followed by its length, as in "(c:3 y:4 x:4)", where the shapes do not determine it.

        Raises:
            InputError: the line is wrong; the message quotes it.
        """
        stripped, lengths = _split_lengths(line)
        left, arrow, right = stripped.partition(ARROW)
        if not arrow:
            raise InputError(f"layout {line.strip()!r}: write it as `flax key | axes {ARROW} torch key | axes`")
        a, b = Layout.parse(left), Layout.parse(right)
        if sorted(a.parameter_axes) != sorted(b.parameter_axes):
            raise InputError(f"layout {line.strip()!r}: both sides must have the same axes")
        return cls(a, b, _axis_sizes(line.strip(), lengths, (a, flax, "flax"), (b, torch, "torch")), note)

    def arrays(self) -> Iterator[tuple[str, str, Indices, list[str]]]:
        """Yield for each pair of arrays flax key, torch key, indices on the axes in the keys, and the other axes."""
        in_keys = list(dict.fromkeys(self.flax.key_axes + self.torch.key_axes))
        axes = [axis for axis in self.flax.parameter_axes if axis not in in_keys]
        for numbers in product(*(range(self.sizes[axis]) for axis in in_keys)):
            indices = dict(zip(in_keys, numbers, strict=True))
            [(a, _)], [(b, _)] = self.flax.indexed_keys(self.sizes, indices), self.torch.indexed_keys(self.sizes, indices)
            yield a, b, indices, axes

    def matrix_axes(self, side: str) -> list[str]:
        """Return the axes of the parameter in one array, "flax" or "torch", without those in its key."""
        layout: Layout = getattr(self, side)
        return [axis.parameter_axis for axis in layout.array_axes if axis.parameter_axis]

    def __str__(self) -> str:
        return f"{self.flax}  {ARROW}  {self.torch}"


@dataclass(frozen=True)
class Correspondence:
    """The mapping of all parameters; `str` gives its lines.

    flax, torch: shapes by key; a flax key is the path joined by "/", without the collection "params".
    skipped: torch keys without a counterpart, and why they need none.
    """

    pairs: tuple[Pair, ...]
    flax: Shapes
    torch: Shapes
    skipped: Mapping[str, str] = field(default_factory=dict)

    def squares(self) -> list[tuple[str, ...]]:
        """Return groups of torch keys of square matrices: those whose order of axes a convention gives, then the others.

        The order of the others is that of the class of their module, which Flax's need not have.
        """
        groups: dict[str, list[str]] = {}
        for pair in self.pairs:
            keys = [b for _, b, *_ in pair.arrays()]
            if matching.SQUARE in pair.note or matching.SQUARE_AS_IT_IS in pair.note:
                groups.setdefault(pair.torch.key.rpartition(".")[2], []).extend(keys)
            elif pair.matrix_axes("flax") == ["in", "out"] and pair.sizes["in"] == pair.sizes["out"]:
                groups.setdefault("", []).extend(keys)
        return [tuple(dict.fromkeys(groups[name])) for name in sorted(groups, key=lambda name: not name)]

    def order_of_siblings(self, known: Container[str]) -> str:
        """Return the order of axes that all matrices have whose class does not fix it, "in out" or "out in"; "" if none.

        known: torch keys of matrices whose class fixes the order.
        """
        orders = set()
        for pair in self.pairs:
            if pair.matrix_axes("flax") == ["in", "out"] and not pair.note:
                if not any(key in known for _, key, *_ in pair.arrays()):
                    orders.add(" ".join(pair.matrix_axes("torch")))
        return orders.pop() if len(orders) == 1 else ""

    def to_torch(self, arrays: Arrays) -> dict[str, Array]:
        """Return arrays (weights or gradients) by torch key, C-contiguous, from arrays by flax key."""
        return self._convert(arrays, self.torch, 0, 1)

    def to_flax(self, arrays: Arrays) -> dict[str, Array]:
        """Return arrays (weights or gradients) by flax key, C-contiguous, from arrays by torch key."""
        return self._convert(arrays, self.flax, 1, 0)

    def _convert(self, arrays: Arrays, shapes: Shapes, source: int, target: int) -> dict[str, Array]:
        """Return arrays with the keys and shapes of the other side; `source` and `target` are 0 for flax, 1 for torch."""
        out: dict[str, Array] = {}
        for pair in self.pairs:
            layouts = (pair.flax, pair.torch)
            for *keys, indices, axes in pair.arrays():
                array = np.asarray(arrays[keys[source]])
                if keys[target] not in out:
                    out[keys[target]] = np.zeros(shapes[keys[target]], array.dtype)
                view = layouts[target].view(out[keys[target]], pair.sizes, indices, axes)
                view[...] = layouts[source].view(array, pair.sizes, indices, axes)
        return out

    def __str__(self) -> str:
        """Return a line for each pair, with its note, and one for each torch key without a counterpart."""
        left = max((len(str(pair.flax)) for pair in self.pairs), default=0)
        lines = [
            f"  {pair.flax!s:{left}}  {ARROW}  {pair.torch}" + (f"    ({pair.note})" if pair.note else "")
            for pair in self.pairs
        ]
        return "\n".join([*lines, *(f"  {key}: {why}" for key, why in self.skipped.items())])


def match(
    flax: Shapes,
    torch: Shapes,
    *,
    layouts: Iterable[str] = (),
    skipped: Mapping[str, str] | None = None,
    optional: Iterable[str] = (),
    evidence: matching.Evidence | None = None,
) -> Correspondence:
    """Match the parameters of both sides.

    Args:
        flax: shapes by path, e.g. {"encoder/layer_0/attn/query/kernel": (16, 2, 8), "batch_stats/bn/mean": (16,)}.
        torch: shapes by key of the state dict.
        layouts: lines "flax key | axes <-> torch key | axes" for parameters that names and shapes do not match; an axis in
            braces in both keys counts from 0.
        skipped: torch keys that are left out of `torch`, and why; they are only printed.
        optional: torch keys that need no counterpart, such as a mask in a buffer.
        evidence: what is known of the models besides names and shapes; a line that it decides has a note.

    Raises:
        InputError: a parameter is ambiguous (the message quotes a line that resolves the ambiguity) or has no counterpart,
            or a line of `layouts` is wrong.
    """
    shapes, (flax, torch) = (flax, torch), ({key: shape or (1,) for key, shape in side.items()} for side in (flax, torch))
    given = tuple(Pair.parse(line, flax, torch) for line in layouts)
    matched = _mark_matched_entries(given, flax, torch)
    known_keys = [keys[:2] for pair in given for keys in pair.arrays()]
    lines, unmatched = matching.match_lines(
        flax, torch, matched, known_keys, set(optional), evidence or matching.Evidence()
    )
    inferred = tuple(Pair.parse(line, flax, torch, note) for line, note in matching.fold_lines(lines, flax, torch))
    _mark_matched_entries(given + inferred, flax, torch, complete=set(torch) - unmatched)
    reasons = {
        key: "a buffer or frozen parameter without a counterpart: it keeps its own values" for key in sorted(unmatched)
    }
    return Correspondence(given + inferred, shapes[0], shapes[1], {**(skipped or {}), **reasons})


def _mark_matched_entries(
    pairs: tuple[Pair, ...], flax: Shapes, torch: Shapes, complete: set[str] | None = None
) -> matching.MatchedEntries:
    """Return boolean arrays by key, of flax and of torch, which mark the entries that the pairs cover.

    complete: if given, the pairs must cover every entry of these torch keys, and every entry of all flax keys.

    Raises:
        InputError: two pairs cover the same entry, or an entry that must be covered is not.
    """
    matched: matching.MatchedEntries = ({}, {})
    for pair in pairs:
        for a, b, indices, axes in pair.arrays():
            for masks, shapes, key, layout in ((matched[0], flax, a, pair.flax), (matched[1], torch, b, pair.torch)):
                view = layout.view(masks.setdefault(key, np.zeros(shapes[key], bool)), pair.sizes, indices, axes)
                if view.any():
                    raise InputError(
                        f"layout '{pair}': another line also covers entries of {key}; each entry needs exactly one line"
                    )
                view[...] = True
    if complete is not None:
        for masks, keys in ((matched[0], set(flax)), (matched[1], complete)):
            for key in sorted(keys):
                if key not in masks or not masks[key].all():
                    raise InputError(f"{key}: some of its entries have no counterpart; add a line for them to layouts")
    return matched


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
        key = layout.key.format_map(dict.fromkeys(layout.key_axes, 0))
        if key not in shapes:
            raise InputError(f"layout {line!r}: {side} has no {key}{nearest(key, shapes)}")
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
        (a, left, _), (b, right, _) = sides
        found = [f"{key} {shapes.get(key)}" for layout, shapes in ((a, left), (b, right)) for key in layout.keys(sizes)[:1]]
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
    return inside and all(shapes.get(key) == layout.shape(sizes) for key in layout.keys(sizes))


def _count_keys(layout: Layout, axis: str, shapes: Shapes) -> int:
    """Return the number of keys, counted from 0, that exist for an axis in the key."""
    n = 0
    while layout.key.format_map({**dict.fromkeys(layout.key_axes, 0), axis: n}) in shapes:
        n += 1
    return n
