"""The values that a model computes, as a graph of operations, and fingerprints that recognize the same values elsewhere."""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.any_model.trace.places import Stack

# Two fingerprints in float64 are of the same values if their sums differ by at most this, relative to the sum of
# magnitudes.  Rounding errors change the sums by 1e-16 to 1e-13, and numbers that were rounded to float32 by 1e-9.
TOLERANCE = 1e-12
IDENTITY = "identity"  # the name of an operation that stands for a module that returns what it is given
CONSTANT, WEIGHTS, INPUTS = range(3)  # what a value depends on
MASKED = 1e8  # magnitudes from here on are those of masked entries: -1e9, the least number of float32, minus infinity
MAX_KEPT = 1 << 27  # entries of all arrays that a graph keeps; beyond these it keeps fingerprints only


@dataclass(frozen=True)
class Fingerprint:
    """Sums over the entries of an array, which do not depend on their order.

    Two arrays have the same sums if one is the other with its axes permuted, reshaped or split.  The second group of sums
    is of x / (1 + |x|), so that a few huge entries do not hide the others.  Entries that a mask has made huge are left out,
    because every model has a number of its own for them.

    sums: the sums; each is compared relative to the sum of magnitudes in `scales`.
    """

    size: int
    sums: tuple[float, ...]
    scales: tuple[float, ...]

    @classmethod
    def of(cls, array: Array) -> "Fingerprint | None":
        """Return the fingerprint of an array; None if it is not floating-point, or has a single value."""
        if array.dtype.kind != "f" or array.size < 2:
            return None
        x = np.asarray(array, np.float64).ravel()
        known = np.abs(x) < MASKED  # not NaN either
        x = x if known.all() else x[known]
        if not x.size or x.min() == x.max():
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            magnitude = np.abs(x)
            bounded = x / (1 + magnitude)
            squares = (float(np.vdot(x, x)), float(np.vdot(bounded, bounded)))
            absolute = (float(magnitude.sum()), float(np.abs(bounded).sum()))
            sums = (absolute[0], float(x.sum()), squares[0], absolute[1], float(bounded.sum()), squares[1])
        return cls(array.size, sums, (absolute[0], absolute[0], squares[0], absolute[1], absolute[1], squares[1]))

    def matches(self, other: "Fingerprint") -> bool:
        """Return whether both are of the same values."""
        return self.size == other.size and self.repeats(other)

    def repeats(self, other: "Fingerprint") -> bool:
        """Return whether this is of the values of another one, each of them as often as any other."""
        times = self.size / other.size
        return times == int(times) and all(
            abs(a - times * b) <= TOLERANCE * max(scale, times * other_scale) or a == b
            for a, b, scale, other_scale in zip(self.sums, other.sums, self.scales, other.scales, strict=True)
        )


@dataclass(frozen=True)
class Value:
    """An array that a model computes or is given.

    operation: index of the operation that computes it; -1 for an input, a parameter or a constant.
    source: what it depends on: `CONSTANT`, `WEIGHTS` for weights but no inputs, or `INPUTS`.
    fingerprint: that of its entries; without repetitions if it does not depend on the inputs.
    array: its entries, if the graph keeps them.
    """

    operation: int
    source: int
    fingerprint: Fingerprint | None
    array: Array | None = None


@dataclass(frozen=True)
class Operation:
    """An operation of a framework, with indices of the values that it reads and computes."""

    name: str
    module: str
    stack: Stack
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass
class Graph:
    """The operations of one forward pass, in the order of execution.

    Attributes:
        separator: what separates the names in the path of a module.
        outputs: indices of the values that the model returns.
        numbers: scalar constants; in Flax only those that were rounded to float32.
    """

    separator: str
    values: list[Value] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    numbers: set[float] = field(default_factory=set)
    _kept: int = 0

    def add_source(self, array: Array, source: int) -> int:
        """Add an input, a parameter or a constant, and return its index."""
        self.values.append(self._value(-1, source, array))
        return len(self.values) - 1

    def add(self, name: str, module: str, stack: Stack, inputs: Iterable[int], arrays: Sequence[Array]) -> list[int]:
        """Add an operation with the arrays that it computes, and return the indices of these."""
        inputs = tuple(inputs)
        source = max((self.values[n].source for n in inputs), default=CONSTANT)
        first = len(self.values)
        for array in arrays:
            self.values.append(self._value(len(self.operations), source, array))
        outputs = range(first, len(self.values))
        self.operations.append(Operation(name, module, stack, inputs, tuple(outputs)))
        return list(outputs)

    def sources_by_use(self) -> list[int]:
        """Return the indices of the values that no operation computes, in the order in which operations first read them."""
        used = dict.fromkeys(n for operation in self.operations for n in operation.inputs)
        return [n for n in used if self.values[n].operation < 0]

    def ancestors(self, values: Iterable[int], known: Container[int] = ()) -> set[int]:
        """Return the indices of these values and of all that they are computed from, except through those of `known`."""
        found: set[int] = set()
        left = list(values)
        while left:
            value = left.pop()
            if value not in found and value not in known:
                found.add(value)
                left += self.inputs_of(value)
        return found

    def inputs_of(self, value: int) -> tuple[int, ...]:
        """Return the values that the operation reads which computes a value."""
        operation = self.values[value].operation
        return self.operations[operation].inputs if operation >= 0 else ()

    def _value(self, operation: int, source: int, array: Array) -> Value:
        # One model may repeat positions for each example, and the other broadcast them.
        known = array if source == INPUTS else without_repetition(array)
        return Value(operation, source, Fingerprint.of(known), self._keep(array))

    def _keep(self, array: Array) -> Array | None:
        self._kept += array.size
        return array if self._kept <= MAX_KEPT else None


def without_repetition(array: Array) -> Array:
    """Return an array with one entry along each axis along which all of its entries are the same."""
    for axis, n in enumerate(array.shape):
        first = array.take([0], axis) if n > 1 else array
        if n > 1 and np.array_equal(first, array.take([1], axis)) and (array == first).all():
            array = first
    return array


class Index:
    """The fingerprints of a graph's values, searchable."""

    def __init__(self, values: Sequence[Value]) -> None:
        found: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for n, value in enumerate(values):
            if value.fingerprint is not None:
                found[value.fingerprint.size].append((value.fingerprint.sums[0], n))
        self._values = values
        self._sums = {
            size: (np.array([s for s, _ in sorted(each)]), [n for _, n in sorted(each)]) for size, each in found.items()
        }

    def find(self, fingerprint: Fingerprint) -> Iterator[int]:
        """Yield the indices of all values with a fingerprint, by their order in the search."""
        if fingerprint.size not in self._sums:
            return
        sums, numbers = self._sums[fingerprint.size]
        width = 2 * TOLERANCE * abs(fingerprint.sums[0])
        low, high = np.searchsorted(sums, [fingerprint.sums[0] - width, fingerprint.sums[0] + width * (1 + TOLERANCE)])
        for n in range(low, len(numbers)):
            if n >= high and sums[n] > fingerprint.sums[0] + width:
                break
            other = self._values[numbers[n]].fingerprint
            if other is not None and fingerprint.matches(other):
                yield numbers[n]
