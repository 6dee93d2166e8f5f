"""The origin of a difference between two models: the first operations whose results differ although their inputs agree.

Both models are recorded operation by operation.  A value of one model agrees if the other model computes the same numbers
somewhere, in whatever order of axes.  Models compute the same function by different operations, so a value without a
counterpart says nothing, as long as a value that is computed from it agrees.  The origin is the first operation whose
result has no counterpart and leads to none, although everything that it reads agrees.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.any_model.trace.agreement import classes_of_values, have_same_places
from parity.comparison.any_model.trace.graph import (
    CONSTANT,
    INPUTS,
    WEIGHTS,
    Graph,
    Operation,
)
from parity.comparison.any_model.trace.operation_places import calling_module, contains_module, make_place, operation_place
from parity.comparison.any_model.trace.places import Place, SourceLine
from parity.comparison.tolerances import FLOAT64_TOLERANCE, ErrorNorms

_STEPS = ("between", "layers")  # kinds of origins at which a step may be missing
_NEXT_OPERATIONS = 16  # how many operations one model may take for what the other computes in one


@dataclass(frozen=True)
class Origin:
    """Where two models part.

    Attributes:
        flax, torch: the place in each model; None if it has no operation there.
        kind: "operation" if the same values enter both places; "layers" if the same values enter layers with different
            weights, so that one model leaves out a layer or has another order; "between" if the models part between two
            modules;
            "constant" if an array that depends neither on inputs nor on weights differs, such as a table of positions;
            "missing" if one model returns without the operations with which the other goes on;
            "order" if the outputs are the same numbers in another order; "gradient" if only gradients differ;
            "precision" if the models compute the same function, and one of them rounds more.
        difference: relRMS between the results, if they can be compared; else 0.
        is_transposed: whether a value that enters both places has the same shape, and its axes in another order.
    """

    flax: Place | None
    torch: Place | None
    kind: str = "operation"
    difference: float = 0.0
    is_transposed: bool = False

    def __str__(self) -> str:
        sides = (("torch", self.torch), ("flax", self.flax))
        places = [f"{place} of {side}" for side, place in sides if place]
        where = " and ".join(places)
        if self.kind == "precision" and all(place.operation == "gradient" for _, place in sides if place):
            return f"in float32 the outputs have small errors; the first large one in the backward pass is in the {where}"
        if self.kind == "precision":
            return f"in float32 the error is large after {where}, and small in everything that it reads"
        if self.kind == "missing":
            return f"{where}: one model returns the values with which the other goes on"
        if self.kind == "order":
            return f"the outputs are the same numbers in another order; they are returned by {where}"
        if self.kind == "gradient":
            return f"the outputs agree; the first that is wrong in the backward pass is the {where}"
        if self.kind == "constant":
            return f"an array that does not depend on the inputs differs: {where}"
        if self.kind == "between":
            passed = [f"{name} of {side}" for side, place in sides if place for name in place.passed]
            note = f"; {', '.join(passed)} returns what it is given" if passed else ""
            return f"what enters {where} differs, and what the models compute last before it agrees{note}"
        if self.kind == "layers":
            return f"{where}: the same values enter, and the weights of different layers follow"
        if 0 < self.difference <= FLOAT64_TOLERANCE:
            return f"{where}: the same values enter, and the results are the same numbers in another order"
        by = f" by {self.difference:.1e}" if self.difference else ""
        if self.is_transposed:
            return f"{where}: the same numbers in another order of axes enter, and the results differ{by}"
        return f"{where}: the same values enter, and the results differ{by}"

    def facts(self) -> dict[str, Any]:
        """Return the operations where the models first differ, for JSON; null for a framework in which none was found."""
        names = ("module", "operation", "file", "line", "function")
        places = {side: getattr(self, side) for side in ("flax", "torch")}
        sides = {
            side: None
            if place is None
            else {**{name: getattr(place, name) for name in names}, "caller": str(place.caller or "")}
            for side, place in places.items()
        }
        return {"kind": self.kind, "difference": self.difference, **sides}


def find_origin(flax: Graph, torch: Graph) -> Origin | None:
    """Return the origin of the difference between the outputs of two graphs; None if no value differs."""
    classes = classes_of_values(flax, torch)
    sides = [_Side(graph, each) for graph, each in zip((flax, torch), classes, strict=True)]
    first_flax, first_torch = firsts = [side.first_difference() for side in sides]
    if first_flax is None and first_torch is None:
        return None
    kind, difference = "missing" if first_flax is None or first_torch is None else "between", 0.0
    is_transposed = False
    if kind == "missing" and _have_same_entries(flax, torch):
        return find_order(flax, torch)
    if first_flax is not None and first_torch is not None:
        if sides[0].entering(first_flax) & sides[1].entering(first_torch):
            kind, difference = "operation", _difference(flax, torch, first_flax, first_torch)
            both = ((sides[0], first_flax), (sides[1], first_torch))
            weights = [side.weights(first) for side, first in both]
            if any(weights):  # one model may multiply by the scale of a norm before, the other after the normalization
                weights = [own or side.next_weights(first) for own, (side, first) in zip(weights, both, strict=True)]
            if all(weights) and not weights[0] & weights[1]:
                kind = "layers"
            is_transposed = _enters_transposed(sides[0], sides[1], first_flax, first_torch)
    if any(first is not None and side.enters_as_constant(first) for side, first in zip(sides, firsts, strict=True)):
        kind = "constant"
    places = [
        side.place_of_return() if first is None else side.place(first, kind)
        for side, first in zip(sides, firsts, strict=True)
    ]
    return Origin(places[0], places[1], kind, difference, is_transposed)


def find_wrong_integers(flax: Graph, torch: Graph) -> Origin | None:
    """Return the operations that compute the first output of integers that differs, if the same values enter both.

    Integers have no fingerprint, so that `find_origin` does not see them.
    """
    classes = classes_of_values(flax, torch)
    sides = [_Side(graph, each) for graph, each in zip((flax, torch), classes, strict=True)]
    outputs = [[n for n in side.graph.outputs if side.graph.values[n].fingerprint is None] for side in sides]
    for both in zip(*outputs, strict=False):
        arrays = [side.graph.values[n].array for side, n in zip(sides, both, strict=True)]
        if not any(array is None for array in arrays) and not np.array_equal(arrays[0], arrays[1]):
            of_flax, of_torch = (side.operation_after_agreement(n) for side, n in zip(sides, both, strict=True))
            if of_flax is None or of_torch is None or not sides[0].entering(of_flax) & sides[1].entering(of_torch):
                return None
            return Origin(operation_place(flax, of_flax), operation_place(torch, of_torch))
    return None


def _have_same_entries(flax: Graph, torch: Graph) -> bool:
    """Return whether the outputs of two models are the same numbers, in whatever order."""
    found = [[graph.values[n].fingerprint for n in graph.outputs] for graph in (flax, torch)]
    return all(a and b and a.matches(b) for a, b in zip(*found, strict=True))


def count_agreeing_operations(flax: Graph, torch: Graph) -> int:
    """Return the number of PyTorch's operations before the first that differs."""
    first = _Side(torch, classes_of_values(flax, torch)[1]).first_difference()
    return len(torch.operations) if first is None else first


def find_order(flax: Graph, torch: Graph) -> Origin:
    """Return the operations that return the outputs, of two models whose outputs differ in the order of their numbers."""
    places = []
    for graph in (flax, torch):
        operations = [graph.values[n].operation for n in graph.outputs if graph.values[n].operation >= 0]
        places.append(operation_place(graph, operations[0]) if operations else None)
    return Origin(places[0], places[1], "order")


def find_wrong_gradient(keys: Sequence[str], correspondence: Any, kind: str = "gradient") -> Origin | None:
    """Return the module of the first wrong gradient on the way back, as an origin; None if none is of a parameter.

    Args:
        keys: keys of PyTorch's parameters whose gradients are wrong, from the last parameter to the first.
        correspondence: the mapping of the parameters.
        kind: "precision" if they are wrong in float32 only.
    """
    partners = {of_torch: of_flax for of_flax, of_torch in correspondence.keys()}
    for key in keys:
        if key in partners:
            of_flax, of_torch = partners[key].rpartition("/")[0], key.rpartition(".")[0]
            return Origin(Place(of_flax, "gradient"), Place(of_torch, "gradient"), kind)
    return None


class _Side:
    """One of the two graphs.

    classes: for each value that agrees with one of the other graph, the number of its class of equal values.
    """

    def __init__(self, graph: Graph, classes: dict[int, int]) -> None:
        self.graph, self.classes = graph, classes
        self.differing = self._find_differing()

    def _find_differing(self) -> set[int]:
        """Return the values that do not agree, and from which nothing is computed that does."""
        values = self.graph.values
        agreeing = self.graph.ancestors(n for n in self.classes if values[n].source == INPUTS) | self.classes.keys()
        wrong = [n for n in self.graph.outputs if values[n].fingerprint is None or n not in self.classes]
        differing = self.graph.ancestors(wrong) - agreeing
        return {n for n in differing if values[n].fingerprint is not None and not self._is_stored_apart(n)}

    def _is_stored_apart(self, value: int) -> bool:
        """Return whether a value is computed from weights alone, one of which the other model stores in another array.

        The other model may fuse the weights of several layers, which says nothing about what it computes with them.
        """
        if self.graph.values[value].source != WEIGHTS:
            return False
        given = [n for n in self.graph.ancestors([value]) if self.graph.values[n].operation < 0]
        return any(n not in self.classes for n in given if self.graph.values[n].source == WEIGHTS)

    def first_difference(self) -> int | None:
        """Return the first operation that differs and reads no differing value that depends on the inputs; else None.

        If none depends on the inputs, it is the first that differs, and that leads to no value that agrees.
        """
        first = self._first_difference()
        if first is None:
            left = self.differing - self.graph.ancestors(self.classes)
            return next((n for n, each in enumerate(self.graph.operations) if left.intersection(each.outputs)), None)
        # A norm may hide a difference from all that it leads to, or from a sum that happens to be a mean in the other
        # model, until the value itself is read again, as in a residual.
        differing = [each for each in self.graph.operations if self.differing.intersection(each.outputs)]
        hidden = {n for each in differing for n in each.inputs} - self.classes.keys()
        hidden = {n for n in hidden if self._varies(n) and self.graph.values[n].fingerprint is not None}
        self.differing |= self._ancestors_that_differ(hidden)
        return self._first_difference()

    def _first_difference(self) -> int | None:
        for n, operation in enumerate(self.graph.operations):
            differs = self.differing.intersection(operation.outputs) and any(map(self._varies, operation.outputs))
            if differs and not any(map(self._varies, self.differing.intersection(operation.inputs))):
                return n
        return None

    def _varies(self, value: int) -> bool:
        return self.graph.values[value].source == INPUTS

    def _ancestors_that_differ(self, values: Iterable[int]) -> set[int]:
        """Return these values, and those that they are computed from without a value that agrees between."""
        found: set[int] = set()
        left = list(values)
        while left:
            n = left.pop()
            is_known = self.graph.values[n].fingerprint is not None and not self._is_stored_apart(n)
            if is_known and n not in found and n not in self.classes:
                found.add(n)
                left += self.graph.inputs_of(n)
        return found

    def operation_after_agreement(self, value: int) -> int | None:
        """Return the operation before a value without fingerprint that reads a value that agrees; None if there is none."""
        left = [value]
        for n in left:  # which grows
            operation = self.graph.values[n].operation
            if operation >= 0:
                inputs = [each for each in self.graph.operations[operation].inputs if self._varies(each)]
                if self.classes.keys() & inputs:
                    return operation
                left += [each for each in inputs if self.graph.values[each].fingerprint is None and each not in left]
        return None

    def differing_constants(self, operation: int) -> list[int]:
        """Return the differing values that an operation reads and that do not depend on the inputs."""
        inputs = self.graph.operations[operation].inputs
        return [n for n in inputs if n in self.differing and self.graph.values[n].source != INPUTS]

    def enters_as_constant(self, operation: int) -> bool:
        """Return whether a table or a constant differs that an operation reads, or a value computed from weights alone."""
        return bool(self.differing_constants(operation))

    def entering(self, operation: int) -> set[Any]:
        """Return the classes of the values that an operation reads, and of those that enter its module, as two items."""
        of_operation = self._of_inputs(self.graph.operations[operation].inputs)
        of_module = self._of_inputs(self._entering_module(operation))
        return {each for each in (of_operation, of_module) if each}

    def arrays_by_class(self, operation: int) -> dict[int, list[Array]]:
        """Return the arrays that an operation reads and that depend on the inputs, by the class of their values."""
        found: dict[int, list[Array]] = {}
        for n in self.graph.operations[operation].inputs:
            array = self.graph.values[n].array
            if n in self.classes and self._varies(n) and array is not None:
                found.setdefault(self.classes[n], []).append(array)
        return found

    def weights(self, operation: int) -> set[int]:
        """Return the classes of the weights that an operation reads."""
        inputs = self.graph.operations[operation].inputs
        return {self.classes[n] for n in inputs if n in self.classes and self.graph.values[n].source == WEIGHTS}

    def next_weights(self, operation: int) -> set[int]:
        """Return the classes of the weights that an operation leads to first, in its module; none if it reads weights."""
        reached = {*self.graph.operations[operation].outputs}
        if any(self.graph.values[n].source == WEIGHTS for n in self.graph.operations[operation].inputs):
            return set()
        for n, each in enumerate(self.graph.operations[operation + 1 :], operation + 1):
            if each.module == self.graph.operations[operation].module and reached.intersection(each.inputs):
                if any(self.graph.values[given].source == WEIGHTS for given in each.inputs):
                    return self.weights(n)
                reached.update(each.outputs)
        return set()

    def _of_inputs(self, values: Iterable[int]) -> frozenset[Any]:
        return frozenset(self.classes[n] for n in values if n in self.classes and self.graph.values[n].source == INPUTS)

    def _entering_module(self, operation: int) -> set[int]:
        """Return the values from outside that the module of an operation reads up to this operation."""
        module, operations, values = self.graph.operations[operation].module, self.graph.operations, self.graph.values
        found: set[int] = set()
        for each in reversed(operations[: operation + 1]):
            if each.module != module:
                break
            for n in each.inputs:
                if values[n].operation < 0 or operations[values[n].operation].module != module:
                    found.add(n)
        return found

    def place(self, operation: int, kind: str) -> Place:
        """Return the place of the first operation that differs."""
        here = self.graph.operations[operation]
        if constants := self.differing_constants(operation):
            here = self._first_of(constants) or here
            return make_place(here, here.module, [], self.graph.separator, unknown=self._unknown_before(here))
        inside, module, separator = self._producers(here.inputs), here.module, self.graph.separator
        if kind == "between" and not any(self._is_within(module, each) for each in inside):
            module = calling_module(module, separator)
        # Where no single operation is wrong, the step that is missing may lie before the module.
        outside = self._producers(self._entering_module(operation)) if kind in _STEPS else inside
        before = [*inside, *outside]
        last = max((each for each in outside if self._varies_after(each)), default=-1)
        return make_place(
            here,
            module,
            [self.graph.operations[n] for n in before],
            separator,
            unknown=self._unknown_before(here),
            after=self.graph.operations[last] if last >= 0 else None,
        )

    def _unknown_before(self, here: Operation) -> list[Operation]:
        """Return the operations that compute what an operation reads and that has no fingerprint, such as a mask."""
        values, found = self.graph.values, dict[int, Operation]()
        left = list(here.inputs)
        while left:
            n = left.pop()
            operation = values[n].operation
            if values[n].fingerprint is None and operation >= 0 and operation not in found:
                found[operation] = self.graph.operations[operation]
                left += self.graph.operations[operation].inputs
        return list(found.values())

    def _is_within(self, module: str, operation: int) -> bool:
        """Return whether an operation that depends on the inputs is in a module."""
        other = self.graph.operations[operation].module
        return self._varies_after(operation) and (other == module or contains_module(module, other, self.graph.separator))

    def _varies_after(self, operation: int) -> bool:
        return any(map(self._varies, self.graph.operations[operation].outputs))

    def place_of_return(self) -> Place | None:
        """Return the place after all operations, for a model that computes nothing but what agrees; None if it has none."""
        last = [self.graph.values[n].operation for n in self.graph.outputs if self.graph.values[n].operation >= 0]
        if not last:
            return None
        here = self.graph.operations[last[0]]
        before = [here, *(self.graph.operations[n] for n in self._producers(here.inputs))]
        end = Operation("the end", "", (), (), ())
        place = make_place(end, "", before, self.graph.separator, after=here)
        line = here.stack[0] if here.stack else SourceLine("", 0, "")
        return replace(place, file=line.file, line=line.line, function=line.function, caller=None)

    def _first_of(self, constants: Sequence[int]) -> Operation | None:
        """Return the first differing operation that these values are computed with; None if they are given.

        An operation that leads to a value that agrees, and only through it to these, is another way to compute this value.
        """
        numbers = [
            self.graph.values[n].operation
            for n in self.graph.ancestors(constants, self.classes)
            if n in self.differing and self.graph.values[n].operation >= 0
        ]
        return self.graph.operations[min(numbers)] if numbers else None

    def _producers(self, given: Iterable[int]) -> list[int]:
        """Return the operations that compute these values, and those that computed what others only rearranged.

        Constants count if no value depends on anything else.
        """
        values, operations = self.graph.values, self.graph.operations
        left, seen, found = list(given), set(), []
        least = WEIGHTS if any(values[n].source != CONSTANT for n in left) else CONSTANT
        while left:
            n = left.pop()
            if n in seen or values[n].source < least or values[n].operation < 0:
                continue
            seen.add(n)
            producer = values[n].operation
            found.append(producer)
            # An operation that returns the numbers that it reads has only rearranged them, rightly or wrongly.
            left += [each for each in operations[producer].inputs if self.classes.get(each, each) == self.classes.get(n)]
        return found


def _enters_transposed(flax: _Side, torch: _Side, first_flax: int, first_torch: int) -> bool:
    """Return whether two operations read a value that agrees and has the same shape, but not the same entries in place."""
    of_flax, of_torch = flax.arrays_by_class(first_flax), torch.arrays_by_class(first_torch)
    return any(
        all(
            one.shape == other.shape and not have_same_places(one, other)
            for one in of_flax[each]
            for other in of_torch[each]
        )
        for each in of_flax.keys() & of_torch.keys()
    )


def _difference(flax: Graph, torch: Graph, first_flax: int, first_torch: int) -> float:
    """Return the relRMS between the results that two operations lead to, in the order of their numbers; 0 if none compare.

    One model may compute in one operation what the other computes in several.  The result of each first operation is
    therefore compared with the nearest result among the next operations of the other model.
    """
    found = []
    for one, first_one, other, first_other in (
        (flax, first_flax, torch, first_torch),
        (torch, first_torch, flax, first_flax),
    ):
        result = one.values[one.operations[first_one].outputs[0]].array
        for operation in other.operations[first_other : first_other + _NEXT_OPERATIONS]:
            array = other.values[operation.outputs[0]].array if operation.outputs else None
            if result is not None and array is not None and result.size == array.size and array.dtype.kind == "f":
                found.append(_difference_of_entries(array, result))
    return min(found, default=0.0)


def _difference_of_entries(array: Array, reference: Array) -> float:
    """Return the relRMS between two arrays in the order of their entries; 0 if it is not finite."""
    one, other = (np.sort(each, axis=None).astype(np.float64) for each in (array, reference))
    error = ErrorNorms.of(one, other).relative_rms()
    if error <= FLOAT64_TOLERANCE:  # a few huge entries, such as those of a mask, may hide the others
        error = max(error, ErrorNorms.of(one / (1 + np.abs(one)), other / (1 + np.abs(other))).relative_rms())
    return error if np.isfinite(error) else 0.0
