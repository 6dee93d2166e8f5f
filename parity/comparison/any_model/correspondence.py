"""The mapping between the parameters of any Flax model and any PyTorch module, as pairs of layouts.

    encoder/layer_{n}/attn/query/kernel | in head dim  <->  layers.{n}.attn.in_proj_weight | (qkv=0 head dim) in

Each side is a line in the layout language of `parity.checkpoints.layout`.  Both sides of a pair have the same axes, so
weights and gradients are copied in either direction without arithmetic.  `match` first applies the lines that the caller
gives, and finds the other pairs by names, order and shapes.  It does not guess: an ambiguous parameter is an error, whose
message quotes a line that resolves the ambiguity.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints.layout import Indices, Layout, Sizes
from parity.comparison.any_model import matching
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

        Raises:
            InputError: the line is wrong; the message quotes it.
        """
        left, arrow, right = line.partition(ARROW)
        if not arrow:
            raise InputError(f"layout {line.strip()!r}: write it as `flax key | axes {ARROW} torch key | axes`")
        a, b = Layout.parse(left), Layout.parse(right)
        if sorted(a.parameter_axes) != sorted(b.parameter_axes):
            raise InputError(f"layout {line.strip()!r}: both sides must have the same axes")
        return cls(a, b, _axis_sizes(line.strip(), (a, flax, "flax"), (b, torch, "torch")), note)

    def arrays(self) -> Iterator[tuple[str, str, Indices, list[str]]]:
        """Yield for each pair of arrays flax key, torch key, indices on the axes in the keys, and the other axes."""
        in_keys = list(dict.fromkeys(self.flax.key_axes + self.torch.key_axes))
        axes = [axis for axis in self.flax.parameter_axes if axis not in in_keys]
        for numbers in product(*(range(self.sizes[axis]) for axis in in_keys)):
            indices = dict(zip(in_keys, numbers, strict=True))
            [(a, _)], [(b, _)] = self.flax.indexed_keys(self.sizes, indices), self.torch.indexed_keys(self.sizes, indices)
            yield a, b, indices, axes

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
    uses: matching.Uses | None = None,
) -> Correspondence:
    """Match the parameters of both sides.

    Args:
        flax: shapes by path, e.g. {"encoder/layer_0/attn/query/kernel": (16, 2, 8), "batch_stats/bn/mean": (16,)}.
        torch: shapes by key of the state dict.
        layouts: lines "flax key | axes <-> torch key | axes" for parameters that names and shapes do not match; an axis in
            braces in both keys counts from 0.
        skipped: torch keys that are left out of `torch`, and why; they are only printed.
        optional: torch keys that need no counterpart, such as a mask in a buffer.
        uses: the keys of flax and of torch in the order in which a forward pass first uses them; it decides where names do
            not, and then the line has a note.

    Raises:
        InputError: a parameter is ambiguous (the message quotes a line that resolves the ambiguity) or has no counterpart,
            or a line of `layouts` is wrong.
    """
    shapes, (flax, torch) = (flax, torch), ({key: shape or (1,) for key, shape in side.items()} for side in (flax, torch))
    given = tuple(Pair.parse(line, flax, torch) for line in layouts)
    matched = _mark_matched_entries(given, flax, torch)
    known_keys = [keys[:2] for pair in given for keys in pair.arrays()]
    lines, unmatched = matching.match_lines(flax, torch, matched, known_keys, set(optional), uses)
    inferred = tuple(Pair.parse(line, flax, torch, note) for line, note in matching.fold_lines(lines, flax, torch))
    _mark_matched_entries(given + inferred, flax, torch, complete=set(torch) - unmatched)
    reasons = {key: "a buffer without a counterpart: it keeps its own values" for key in sorted(unmatched)}
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


def _axis_sizes(line: str, *sides: tuple[Layout, Shapes, str]) -> dict[str, int]:
    """Return the length of every axis, solved from the shapes of the arrays.

    Raises:
        InputError: a key is missing, or the shapes do not determine the lengths or do not fit.
    """
    sizes: dict[str, int] = {}
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
    while True:
        unknown = [([axis for axis in axes if axis not in sizes], axes, n) for axes, n in equations]
        solved = {
            left[0]: n // max(1, prod(sizes.get(axis, 1) for axis in axes)) for left, axes, n in unknown if len(left) == 1
        }
        if not solved:
            break
        sizes |= solved
    axes = {axis for layout, _, _ in sides for axis in layout.parameter_axes} | {a for axes, _ in equations for a in axes}
    if missing := sorted(axes - sizes.keys()):
        raise InputError(
            f"layout {line!r}: the shapes do not determine the lengths of {', '.join(missing)}; write them as one axis"
        )
    if not all(_fits(layout, sizes, shapes) for layout, shapes, _ in sides):
        (a, left, _), (b, right, _) = sides
        found = [f"{key} {shapes.get(key)}" for layout, shapes in ((a, left), (b, right)) for key in layout.keys(sizes)[:1]]
        raise InputError(f"layout {line!r}: its axes do not fit {' and '.join(found)}, or do not fit all of its keys")
    return sizes


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
