"""Which leaf of any Flax tree is which tensor of any PyTorch module, as pairs of layout lines that move values both ways.

    encoder/layer_{n}/attn/query/kernel | in head dim  <->  layers.{n}.attn.in_proj_weight | (qkv=0 head dim) in

Each side is a line of `parity.checkpoints.layout`; a pair holds the same axes on both, so values and gradients move
through it in either direction and nothing is computed.  `match` finds the pairs by names, order and shapes; lines that are
given come first, and what is ambiguous is refused with a line that would settle it, never guessed.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints.layout import Layout, Place, Sizes
from parity.comparison.any_model import matching
from vit_spec import InputError, nearest

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Shapes = Mapping[str, tuple[int, ...]]

ARROW = "<->"


@dataclass(frozen=True)
class Pair:
    """One parameter's two places, and how long its axes are.

    note: why these two, where names and shapes alone do not say it.
    """

    flax: Layout
    torch: Layout
    sizes: Sizes
    note: str = ""

    @classmethod
    def parse(cls, line: str, flax: Shapes, torch: Shapes, note: str = "") -> "Pair":
        """Read "flax key | axes <-> torch key | axes", and the sizes of its axes off the arrays' shapes.

        Raises:
            InputError: quoting the line and what is wrong in it.
        """
        left, arrow, right = line.partition(ARROW)
        if not arrow:
            raise InputError(f"layout {line.strip()!r}: write it as `flax key | axes {ARROW} torch key | axes`")
        a, b = Layout.parse(left), Layout.parse(right)
        if sorted(a.words) != sorted(b.words):
            raise InputError(f"layout {line.strip()!r}: both sides must hold the same axes")
        return cls(a, b, _sizes(line.strip(), (a, flax, "flax"), (b, torch, "torch")), note)

    def places(self) -> Iterator[tuple[str, str, Place, list[str]]]:
        """Yield the keys in flax and in torch, the place that they are at, and the axes that are left of both arrays."""
        spelled = list(dict.fromkeys(self.flax.spelled + self.torch.spelled))
        words = [word for word in self.flax.words if word not in spelled]
        for numbers in product(*(range(self.sizes[word]) for word in spelled)):
            at = dict(zip(spelled, numbers, strict=True))
            [(a, _)], [(b, _)] = self.flax.places(self.sizes, at), self.torch.places(self.sizes, at)
            yield a, b, at, words

    def __str__(self) -> str:
        return f"{self.flax}  {ARROW}  {self.torch}"


@dataclass(frozen=True)
class Correspondence:
    """Where every number of a Flax tree is in a PyTorch module; print it for the lines.

    flax, torch: shapes by key; a flax key is its path joined by "/", without the collection "params".
    skipped: torch keys that have no counterpart, and why they need none.
    """

    pairs: tuple[Pair, ...]
    flax: Shapes
    torch: Shapes
    skipped: Mapping[str, str] = field(default_factory=dict)

    def to_torch(self, arrays: Arrays) -> dict[str, Array]:
        """Return a state dict of flax's arrays, by key, in C order; weights and gradients alike."""
        return self._moved(arrays, self.torch, 0, 1)

    def to_flax(self, arrays: Arrays) -> dict[str, Array]:
        """Return flax's arrays by key from those of a state dict."""
        return self._moved(arrays, self.flax, 1, 0)

    def _moved(self, arrays: Arrays, shapes: Shapes, source: int, target: int) -> dict[str, Array]:
        out: dict[str, Array] = {}
        for pair in self.pairs:
            layouts = (pair.flax, pair.torch)
            for *keys, at, words in pair.places():
                array = np.asarray(arrays[keys[source]])
                if keys[target] not in out:
                    out[keys[target]] = np.zeros(shapes[keys[target]], array.dtype)
                made = layouts[target].view(out[keys[target]], pair.sizes, at, words)
                made[...] = layouts[source].view(array, pair.sizes, at, words)
        return out

    def __str__(self) -> str:
        """A line a pair, with what decided where names and shapes did not, and what has no counterpart."""
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
) -> Correspondence:
    """Find which flax leaf is which torch tensor.

    Args:
        flax: shapes by path, e.g. {"encoder/layer_0/attn/query/kernel": (16, 2, 8), "batch_stats/bn/mean": (16,)}.
        torch: shapes by key of the state dict.
        layouts: lines "flax key | axes <-> torch key | axes" that settle what names and shapes do not; a braced word
            in both keys counts from zero.
        skipped: torch keys that were left out, and why; only to be shown.
        optional: torch keys that may be without a counterpart, such as the buffer of a mask.

    Raises:
        InputError: naming what is ambiguous, with a line that would settle it; what has no counterpart; a line that is
            wrong.
    """
    given, (flax, torch) = (flax, torch), ({key: shape or (1,) for key, shape in side.items()} for side in (flax, torch))
    known = tuple(Pair.parse(line, flax, torch) for line in layouts)
    taken = _taken(known, flax, torch)
    lines, left = matching.lines(
        flax, torch, taken, [place[:2] for pair in known for place in pair.places()], set(optional)
    )
    found = tuple(Pair.parse(line, flax, torch, note) for line, note in matching.folded(lines, flax, torch))
    _taken(known + found, flax, torch, complete=set(torch) - left)
    why = {key: "a buffer without a counterpart: it keeps its own values" for key in sorted(left)}
    return Correspondence(known + found, given[0], given[1], {**(skipped or {}), **why})


def _taken(pairs: tuple[Pair, ...], flax: Shapes, torch: Shapes, complete: set[str] | None = None) -> matching.Taken:
    """Mark the entries that pairs hold; refuse one that two hold, and, of a complete mapping, one that none holds."""
    taken: matching.Taken = ({}, {})
    for pair in pairs:
        for a, b, at, words in pair.places():
            for marks, shapes, key, layout in ((taken[0], flax, a, pair.flax), (taken[1], torch, b, pair.torch)):
                view = layout.view(marks.setdefault(key, np.zeros(shapes[key], bool)), pair.sizes, at, words)
                if view.any():
                    raise InputError(f"layout '{pair}': another line holds entries of {key} too; each has one place")
                view[...] = True
    if complete is not None:
        for marks, keys in ((taken[0], set(flax)), (taken[1], complete)):
            for key in sorted(keys):
                if key not in marks or not marks[key].all():
                    raise InputError(f"{key}: not all of its entries have a counterpart; write a line for the others")
    return taken


def _sizes(line: str, *sides: tuple[Layout, Shapes, str]) -> dict[str, int]:
    """The length of every axis: what the shapes of the arrays leave as the only answer."""
    sizes: dict[str, int] = {}
    equations: list[tuple[list[str], int]] = []
    for layout, shapes, side in sides:
        for word in layout.spelled:
            sizes.setdefault(word, _count(layout, word, shapes))
        key = layout.key.format_map(dict.fromkeys(layout.spelled, 0))
        if key not in shapes:
            raise InputError(f"layout {line!r}: {side} has no {key}{nearest(key, shapes)}")
        if len(shapes[key]) != len(layout.dims):
            raise InputError(f"layout {line!r}: {side}'s {key} has shape {shapes[key]}, not {len(layout.dims)} dimensions")
        equations += [([axis.holder for axis in dim], n) for dim, n in zip(layout.dims, shapes[key], strict=True)]
    while True:
        unknown = [([word for word in words if word not in sizes], words, n) for words, n in equations]
        solved = {
            left[0]: n // max(1, prod(sizes.get(word, 1) for word in words)) for left, words, n in unknown if len(left) == 1
        }
        if not solved:
            break
        sizes |= solved
    words = {word for layout, _, _ in sides for word in layout.words} | {w for words, _ in equations for w in words}
    if missing := sorted(words - sizes.keys()):
        raise InputError(f"layout {line!r}: the shapes do not give the lengths of {', '.join(missing)}; write one axis")
    if not all(_holds(layout, sizes, shapes) for layout, shapes, _ in sides):
        (a, left, _), (b, right, _) = sides
        found = [f"{key} {shapes.get(key)}" for layout, shapes in ((a, left), (b, right)) for key in layout.keys(sizes)[:1]]
        raise InputError(f"layout {line!r}: its axes do not fit {' and '.join(found)}, or not every key of it")
    return sizes


def _holds(layout: Layout, sizes: Sizes, shapes: Shapes) -> bool:
    """Whether the arrays are as long as a layout says, and its parts lie within them."""
    inside = all(axis.start + (sizes[axis.word] if axis.word else 1) <= sizes[axis.holder] for axis in layout.flat)
    return inside and all(shapes.get(key) == layout.shape(sizes) for key in layout.keys(sizes))


def _count(layout: Layout, word: str, shapes: Shapes) -> int:
    """How many keys a braced word spells, from zero on."""
    n = 0
    while layout.key.format_map({**dict.fromkeys(layout.spelled, 0), word: n}) in shapes:
        n += 1
    return n
