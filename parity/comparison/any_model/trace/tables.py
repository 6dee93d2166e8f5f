"""Constants of two models that differ only because one model has rounded them to float32, such as a table of positions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.comparison.any_model.trace.graph import CONSTANT, Graph, Index, Value
from parity.comparison.any_model.trace.places import Line

Array = NDArray[Any]

# Largest error of a table that is computed in float32, relative to its largest entry: that of the sine of an angle of up to
# 8, which rounding the angle changes by 8 * 2**-24.
_ROUNDINGS = 8 * 2.0**-24


@dataclass(frozen=True)
class Table:
    """A constant of both models.

    flax: its entries in Flax.
    torch: its entries in PyTorch, in the order of Flax's.
    rounded: the framework whose entries are numbers of float32: "flax", "torch" or "both".
    module, line: where Flax computes it.
    """

    flax: Array
    torch: Array
    rounded: str
    module: str
    line: Line | None

    def __str__(self) -> str:
        where = f" ({self.line}, in {self.line.function})" if self.line else ""
        return (
            f"a constant {self.flax.shape} in {self.module or 'the model itself'} of flax{where}, float32 in {self.rounded}"
        )


def find_rounded_tables(flax: Graph, torch: Graph) -> tuple[Table, ...]:
    """Return the constants of Flax that no constant of PyTorch equals, and that one equals up to rounding to float32."""
    index = Index(torch.values)
    others = [value for value in torch.values if _is_table(value)]
    found: dict[int, Table] = {}
    for n, value in enumerate(flax.values):
        if not _is_table(value) or value.fingerprint is None or next(index.find(value.fingerprint), None) is not None:
            continue
        if found.keys() & flax.ancestors([n]):  # computed from a table that is replaced already
            continue
        entries = next(_rounded_partners(value.array, others), None)
        if entries is not None and not np.array_equal(entries, np.asarray(value.array)):
            found[n] = _table(flax, n, value.array, entries)
    return tuple(found.values())


def _is_table(value: Value) -> bool:
    return value.source == CONSTANT and value.fingerprint is not None and value.array is not None


def _rounded_partners(array: Any, others: list[Value]) -> Iterator[Array]:
    """Yield for each constant that has all entries of an array up to rounding its entries, in the order of the array."""
    for other in others:
        known = np.unique(np.asarray(other.array))
        known = known[np.isfinite(known)]
        if not known.size:
            continue
        above = np.clip(np.searchsorted(known, array), 1, max(1, known.size - 1))
        below, above = known[above - 1], known[np.minimum(above, known.size - 1)]
        nearest = np.where(np.abs(array - below) <= np.abs(above - array), below, above)
        nearest = np.where(np.isfinite(array), nearest, array)
        finite = np.isfinite(array)
        if (np.abs(array - nearest)[finite] <= _ROUNDINGS * np.abs(array[finite]).max(initial=0.0)).all():
            yield nearest


def _table(flax: Graph, n: int, array: Any, entries: Array) -> Table:
    rounded = [side for side, each in (("flax", array), ("torch", entries)) if (np.float32(each) == each).all()]
    operation = flax.operations[flax.values[n].operation] if flax.values[n].operation >= 0 else None
    stack = operation.stack if operation else ()
    return Table(
        np.asarray(array),
        entries,
        "both" if len(rounded) != 1 else rounded[0],
        operation.module if operation else "",
        stack[0] if stack else None,
    )
