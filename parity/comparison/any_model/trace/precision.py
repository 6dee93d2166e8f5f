"""The operation at which the rounding errors of a model in float32 become as large as those of its outputs."""

import math
from difflib import SequenceMatcher

from parity.comparison.any_model.trace.graph import INPUTS, Graph
from parity.comparison.any_model.trace.operation_places import operation_place
from parity.comparison.any_model.trace.places import Place
from parity.comparison.tolerances import UNIT_ROUNDOFF, ErrorNorms


def large_error(of_result: float) -> float:
    """Return the relRMS from which an error explains that of a result: its geometric mean with float32's unit roundoff."""
    return math.sqrt(UNIT_ROUNDOFF["float32"] * of_result)


def find_imprecise_operation(exact: Graph, rounded: Graph, limit: float) -> Place | None:
    """Return the first operation whose result has a large error although everything that it reads has a small one.

    Args:
        exact: the operations of the model in float64.
        rounded: the operations of the same model, with the same weights and inputs, in float32.
        limit: the relRMS above which an error counts as large.
    """
    errors = _errors(exact, rounded)
    for n, operation in enumerate(rounded.operations):
        is_large = any(errors.get(each, 0.0) > limit for each in operation.outputs)
        if is_large and not any(errors.get(each, 0.0) > limit for each in operation.inputs):
            return operation_place(rounded, _cast_before(rounded, errors, n))
    return None


def _errors(exact: Graph, rounded: Graph) -> dict[int, float]:
    """Return the relRMS of the values in float32 that depend on the inputs, from the same values in float64."""
    of_exact, of_rounded = ([operation.name for operation in graph.operations] for graph in (exact, rounded))
    errors: dict[int, float] = {}
    for a, b, length in SequenceMatcher(None, of_exact, of_rounded, autojunk=False).get_matching_blocks():
        for i in range(length):
            outputs = zip(exact.operations[a + i].outputs, rounded.operations[b + i].outputs, strict=False)
            for m, n in outputs:
                reference, array = exact.values[m].array, rounded.values[n].array
                if reference is None or array is None or array.dtype.kind != "f" or reference.shape != array.shape:
                    continue
                if rounded.values[n].source == INPUTS:
                    errors[n] = ErrorNorms.of(array, reference).relative_rms()
    return errors


def _cast_before(graph: Graph, errors: dict[int, float], operation: int) -> int:
    """Return the operation that converts what an operation reads, if float64 has no such operation; else itself."""
    for n in graph.operations[operation].inputs:
        producer = graph.values[n].operation
        if producer >= 0 and n not in errors and graph.values[n].source == INPUTS:
            return producer
    return operation
