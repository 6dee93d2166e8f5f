"""Constants of two models that differ only because one model has rounded them to float32, such as a table of positions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice, product
from typing import Any

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.any_model.trace.graph import CONSTANT, Graph, Index, Value, without_repetition
from parity.comparison.any_model.trace.places import SourceLine

# Largest error of an entry that is computed in float32, relative to itself, or to 1 as for the sine of an angle: rounding
# an angle of up to 8 changes its sine by 8 * 2**-24.
_ROUNDINGS = 8 * 2.0**-24
# For each unit of an angle: rounding the exponent of its frequency, which is up to log(10000), the frequency, the position
# and their product.
_ROUNDINGS_PER_UNIT = 12 * 2.0**-24

# The largest `_roughness` of an axis of positions, between those of the two kinds of axes: up to 2,048 positions in float32
# have at most 2e-6, and frequencies at least 4e-5 from 5 positions on.
_SMOOTH = 1e-5
_LINES = 64  # of a large table, that tell whether an axis counts positions
_EPSILONS = tuple(float(np.finfo(dtype).eps) for dtype in (np.float32, np.float64))
_SAME_RATIO = 1e-5  # relative difference of two ratios of frequencies that are rounded to float32
_NEAR_ZERO = 1e-3  # of the largest entry: the ratio of smaller ones says little about the frequency


@dataclass(frozen=True)
class Table:
    """A constant of both models, an array or a number.

    flax: its entries in Flax.
    torch: its entries in PyTorch, in the order of Flax's.
    rounded: the framework whose entries are numbers of float32: "flax", "torch" or "both".
    module, line: where Flax computes it.
    """

    flax: Array
    torch: Array
    rounded: str
    module: str
    line: SourceLine | None

    def __str__(self) -> str:
        if not self.flax.shape and {float(self.flax), float(self.torch)} == {*_EPSILONS}:
            return f"the epsilon of the dtype, for which {self.rounded} has that of float32, {_EPSILONS[0]:.1e}"
        if not self.flax.shape:
            return f"the number {float(self.torch)!r} of torch, which flax has in float32"
        where = f" ({self.line}, in {self.line.function})" if self.line else ""
        return (
            f"a constant {self.flax.shape} in {self.module or 'the model itself'} of flax{where}, float32 in {self.rounded}"
        )


def find_rounded_tables(flax: Graph, torch: Graph) -> tuple[Table, ...]:
    """Return the constants of Flax that no constant of PyTorch equals, and that one equals up to rounding to float32.

    They include numbers of PyTorch that Flax has rounded to float32.  The real and imaginary parts of complex constants,
    such as rotations, are tables of their own.
    """
    others = [part for value in torch.values if _is_table(value) for part in _real_parts(value.array)]
    index = Index(torch.values)
    candidates = [
        n for n, value in enumerate(flax.values) if _is_table(value) and not _has_equal(index, torch.values, value)
    ]
    found: dict[int, Array] = {}
    # The same entries at the same places first: the part of a table that a model uses is found more surely than the table.
    for partners in (_partners_by_place, _partners_by_entry):
        related = flax.ancestors(found)
        for n in candidates:
            if n in related or found.keys() & flax.ancestors([n]):  # computed from a table that is replaced already
                continue
            parts = _real_parts(flax.values[n].array)
            entries = [each for part in parts for each in islice(partners(part, others), 1)]
            if len(entries) == len(parts) and not np.array_equal(entries, parts):
                found[n] = entries[0] if len(parts) == 1 else entries[0] + 1j * entries[1]
    tables = [_table(flax, n, flax.values[n].array, entries) for n, entries in sorted(found.items())]
    numbers = [
        Table(np.array(a), np.array(b), "flax", "", None)
        for a, b in product(sorted(flax.numbers), sorted(torch.numbers))
        if a != b and np.float32(a) == np.float32(b)
    ]
    return (*tables, *numbers)


def find_epsilons(flax: Graph, torch: Graph, in_float32: Callable[[str], Graph]) -> Iterator[Table]:
    """Yield the epsilon of float32 that one model has where the other has that of its dtype, as `jnp.finfo(x.dtype).eps`.

    in_float32: returns the graph of "flax" or "torch" in float32.  The epsilon of float64 is a constant of the model if it
        is in that graph too, and then a wrong one.
    """
    narrow, wide = _EPSILONS
    of_flax, of_torch = flax.numbers - torch.numbers, torch.numbers - flax.numbers
    if wide in of_flax and narrow in of_torch and wide not in in_float32("flax").numbers:
        yield Table(np.array(wide), np.array(narrow), "torch", "", None)
    if narrow in of_flax and wide in of_torch and wide not in in_float32("torch").numbers:
        yield Table(np.array(narrow), np.array(wide), "flax", "", None)


def _has_equal(index: Index, values: Sequence[Value], value: Value) -> bool:
    """Return whether another value has the same entries in any order, to the rounding of float64."""
    if value.fingerprint is None:
        return False
    entries = np.sort(without_repetition(np.asarray(value.array, np.float64)), axis=None)
    others = [array for n in index.find(value.fingerprint) if (array := values[n].array) is not None]
    sorted_others = [np.sort(without_repetition(each), axis=None) for each in others]
    return any(each.size == entries.size and np.allclose(entries, each, rtol=1e-12, atol=0.0) for each in sorted_others)


def _is_table(value: Value) -> bool:
    if value.source != CONSTANT or value.array is None:
        return False
    return value.fingerprint is not None or (value.array.dtype.kind == "c" and value.array.size > 1)


def _real_parts(array: Any) -> list[Array]:
    """Return a real array as float64, or the real and the imaginary part of a complex one."""
    parts = (array.real, array.imag) if array.dtype.kind == "c" else (array,)
    return [np.asarray(part, np.float64) for part in parts]


def _partners_by_place(array: Array, others: list[Array]) -> Iterator[Array]:
    """Yield each constant that has the entries of an array at the same places, up to the error of a table of positions.

    Along one of the axes, which counts the positions, the error may grow.
    """
    for other in chain.from_iterable(_with_columns_of(each, array) for each in others):
        entries = _repeated(other, array.shape)
        if entries is not None and any(_agree(array, entries, error) for error in _errors_along_an_axis(entries)):
            yield entries


def _with_columns_of(table: Array, array: Array) -> Iterator[Array]:
    """Yield a table, and where an array has half or twice as many columns, the table with each column once or twice.

    Rotations turn pairs of features, and a model may have the angle of each pair or that of each feature.
    """
    yield table
    own, n = (each.shape[-1] if each.ndim else 0 for each in (table, array))
    if 2 * own == n > 0:
        yield from (np.concatenate([table, table], -1), np.repeat(table, 2, -1))
    if own == 2 * n > 0:
        yield from (table[..., :n],) * np.array_equal(table[..., :n], table[..., n:])
        yield from (table[..., ::2],) * np.array_equal(table[..., ::2], table[..., 1::2])


def _errors_along_an_axis(array: Array) -> Iterator[Array]:
    """Yield for each axis of a table that may count the positions the errors of its entries.

    An entry is then a function of an angle, position times frequency, and the largest change from one position to the
    next, relative to the largest entry, tells the frequency.  A window, whose angle is at most 2 pi, has small errors at
    any length.
    """
    size = np.abs(array[np.isfinite(array)]).max(initial=0.0)
    axes = [axis for axis, n in enumerate(array.shape) if n > 1 and size > 0]
    # If frequencies counted as positions, their large errors would hide those of a table with another base.
    for axis in [each for each in axes if _roughness(array / size, each) <= _SMOOTH] or axes:
        with np.errstate(invalid="ignore"):
            steps = np.abs(np.diff(array, axis=axis))
        frequency = np.where(np.isfinite(steps), steps, 0.0).max(axis, keepdims=True) / size
        positions = np.arange(array.shape[axis]).reshape([-1 if k == axis else 1 for k in range(array.ndim)])
        yield _ROUNDINGS + _ROUNDINGS_PER_UNIT * positions * frequency


def _roughness(array: Array, axis: int) -> float:
    """Return how far the lines of an array along an axis are from sinusoids, of which x[p-1] + x[p+1] = 2 cos(w) x[p].

    The positions may be those of a grid, row by row and after one other token: the ends of its rows do not count.  Four
    fifths of the entries have at most this error, which is relative to the largest entry, 1.
    """
    if (n := array.shape[axis]) < 3:
        return np.inf
    x = np.moveaxis(np.where(np.isfinite(array), array, 0.0), axis, -1).reshape(-1, n)
    x = x[:: max(1, len(x) // _LINES)]
    middle, sums = x[..., 1:-1], x[..., 2:] + x[..., :-2]
    ratios = np.divide(sums, middle, out=np.full_like(middle, 2.0), where=np.abs(middle) > _NEAR_ZERO)
    found = []
    for first in (0, 1):
        for length in (each for each in range(3, n - first + 1) if (n - first) % each == 0):
            column = (np.arange(1, n - 1) - first) % length  # of the middle of three entries
            inside = (column > 0) & (column < length - 1) & (np.arange(1, n - 1) > first)
            factors = np.clip(np.median(ratios[..., inside], axis=-1, keepdims=True), -2.0, 2.0)
            errors = np.abs(sums[..., inside] - factors * middle[..., inside])
            found.append(float(np.quantile(errors, 0.8)))
    return min(found)


def _partners_by_entry(array: Array, others: list[Array]) -> Iterator[Array]:
    """Yield for each constant that has all entries of an array, up to rounding, its entries in the order of the array."""
    finite = np.isfinite(array)
    for other in others:
        known = np.unique(other[np.isfinite(other)])
        if known.size:
            above = np.clip(np.searchsorted(known, array), 1, max(1, known.size - 1))
            below, above = known[above - 1], known[np.minimum(above, known.size - 1)]
            nearest = np.where(np.abs(array - below) <= np.abs(above - array), below, above)
            entries = np.where(finite, nearest, array)
            if _agree(array, entries, np.full(array.shape, _ROUNDINGS)):
                yield entries


def _agree(array: Array, entries: Array, errors: Array) -> bool:
    """Return whether the entries of two arrays differ at most by these errors."""
    finite = np.isfinite(array)
    if _has_frequencies(array):  # each is the angle of the position 1, of which a table has the multiples
        size, errors = np.abs(array)[finite], np.full(array.shape, _ROUNDINGS + _ROUNDINGS_PER_UNIT)
    else:
        # Not relative to the largest entry, which may be that of a mask beside the biases of positions.
        size = np.maximum(np.abs(array), min(1.0, np.abs(array[finite]).max(initial=0.0)))[finite]
    same_elsewhere = np.array_equal(array[~finite], entries[~finite], equal_nan=True)
    return same_elsewhere and bool((np.abs(array - entries)[finite] <= errors[finite] * size).all())


def _has_frequencies(array: Array) -> bool:
    """Return whether an array is a row of frequencies: positive, and most of them in the same ratio to the one before."""
    row = array.ravel()
    if row.size not in array.shape or row.size < 3 or not (np.isfinite(row) & (row > 0)).all():
        return False
    ratios = row[1:] / row[:-1]
    return bool((np.abs(ratios / np.median(ratios) - 1) <= _SAME_RATIO).mean() > 0.5 and row.min() != row.max())


def _repeated(array: Array, shape: tuple[int, ...]) -> Array | None:
    """Return an array of another shape with the same entries, repeated along other axes; None if it does not fit."""
    lengths = [n for n in array.shape if n > 1]
    for axes in combinations(range(len(shape)), len(lengths)):
        own = [1] * len(shape)
        for axis, n in zip(axes, lengths, strict=True):
            own[axis] = n
        if all(n in (1, length) for n, length in zip(own, shape, strict=True)):
            return np.broadcast_to(array.reshape(own), shape)
    return None


def _table(flax: Graph, n: int, array: Any, entries: Array) -> Table:
    narrow = np.complex64 if entries.dtype.kind == "c" else np.float32
    rounded = [side for side, each in (("flax", array), ("torch", entries)) if (narrow(each) == each).all()]
    operation = flax.operations[flax.values[n].operation] if flax.values[n].operation >= 0 else None
    stack = operation.stack if operation else ()
    return Table(
        np.asarray(array),
        entries,
        "both" if len(rounded) != 1 else rounded[0],
        operation.module if operation else "",
        stack[0] if stack else None,
    )
