"""The graph of the operations of a Flax model, or of any function of JAX."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.any_model.trace.flax_modules import scopes_for_modules
from parity.comparison.any_model.trace.graph import CONSTANT, IDENTITY, INPUTS, WEIGHTS, Graph
from parity.comparison.any_model.trace.jaxpr import UnrolledEvaluator
from parity.comparison.any_model.trace.numbers import is_rounded
from parity.comparison.any_model.trace.scope import Scope


def trace(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the ClosedJaxpr of a function, with the paths of its modules in the name stacks.

    arguments: pytrees of arrays or of shapes.
    """
    import jax

    with scopes_for_modules():
        return jax.make_jaxpr(function)(*arguments)


def record_flax(
    closed: Any,
    weights: Sequence[Any],
    inputs: Sequence[Any],
    *,
    constants: Collection[int] = (),
    replace: Any = None,
    exact: bool = True,
) -> Graph:
    """Return the graph of a jaxpr that takes weights and then inputs.

    constants: indices of weights without a counterpart in the other model.
    replace, exact: see `JaxprEvaluator`.
    """
    graph = Graph("/")
    recorder = _Recorder(graph, replace, exact)
    sources = [CONSTANT if n in constants else WEIGHTS for n in range(len(weights))]
    arguments = [_Recorded(x, graph.add_source(np.asarray(x), each)) for x, each in zip(weights, sources, strict=True)]
    arguments += [_Recorded(x, graph.add_source(np.asarray(x), INPUTS)) for x in inputs]
    graph.outputs = [each.value for each in recorder.run(closed, arguments, Scope())]
    return graph


class _Recorded(NamedTuple):
    """An array, and the index of its value in the graph."""

    array: Any
    value: int


class _Recorder(UnrolledEvaluator):
    """Evaluates a jaxpr operation by operation, and adds the operations to a graph."""

    def __init__(self, graph: Graph, replace: Any, exact: bool) -> None:
        super().__init__(replace, exact)
        self._graph = graph

    def constant(self, value: Any) -> _Recorded:
        array = super().constant(value)
        if (scalar := _host(value)).ndim == 0 and is_rounded(scalar):
            self._graph.numbers.add(float(array))
        return _Recorded(array, self._graph.add_source(_host(array), CONSTANT))

    def bind(self, equation: Any, values: list[Any], scope: Scope) -> list[Any]:
        arrays = [each.array for each in values]
        is_constant = all(self._graph.values[each.value].source == CONSTANT for each in values)
        results = super().bind(equation, arrays, scope) if is_constant else self.operation(equation, arrays)
        return self._add(equation, scope, values, results)

    def _add(self, equation: Any, scope: Scope, inputs: Sequence[_Recorded], arrays: Sequence[Any]) -> list[_Recorded]:
        numbers = [each.value for each in inputs]
        known = [_host(each) for each in arrays]
        name = IDENTITY if equation.primitive.name == "copy" else equation.primitive.name
        outputs = self._graph.add(name, scope.module, scope.stack, numbers, known)
        return [_Recorded(array, n) for array, n in zip(arrays, outputs, strict=True)]

    def array(self, value: _Recorded) -> Any:
        return value.array

    def entry(self, equation: Any, scope: Scope, sequence: _Recorded, n: int) -> _Recorded:
        return self._add(equation, scope, [sequence], [super().entry(equation, scope, sequence.array, n)])[0]

    def stack(self, equation: Any, scope: Scope, steps: Sequence[_Recorded]) -> _Recorded:
        return self._add(equation, scope, steps, [super().stack(equation, scope, [each.array for each in steps])])[0]


def _host(array: Any) -> Array:
    """Return an array of JAX as one of NumPy; a random number generator's key as an empty array."""
    import jax

    if jax.numpy.issubdtype(getattr(array, "dtype", np.float64), jax.dtypes.extended):
        return np.zeros(0, np.int32)
    return np.asarray(array)
