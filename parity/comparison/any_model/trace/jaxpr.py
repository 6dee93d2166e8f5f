"""Evaluation of a jaxpr with all of its parts in float64, also those that the model computes in a fixed lower precision.

A model may compute a softmax, a norm or a table in float32 whatever its weights are.  To compare the function with another
model's, these parts are evaluated in float64, and reported.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.any_model.trace.fixed_parts import NARROW_TYPES, RANDOM_BITS, narrow_float
from parity.comparison.any_model.trace.numbers import intended_numbers
from parity.comparison.any_model.trace.scope import Scope, inner_jaxprs

_INLINED = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")


class JaxprEvaluator:
    """Evaluates a jaxpr with floating-point values in float64.

    Subclasses override `bind`, which evaluates one operation, `scan`, `loop` and `branch`.

    replace: called with every array that depends neither on inputs nor on weights, and with every scalar constant; returns
        the array to use instead.
    exact: whether all floating-point values are in float64; otherwise they have the dtypes of the jaxpr.
    """

    def __init__(self, replace: Callable[[Array], Array] | None = None, exact: bool = True) -> None:
        self._replace, self._exact = replace, exact

    def run(self, closed: Any, arguments: Sequence[Any], scope: Scope) -> list[Any]:
        """Return the results of a ClosedJaxpr for its arguments."""
        return self.evaluate(closed.jaxpr, [self.constant(each) for each in closed.consts], arguments, scope)

    def evaluate(self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any], scope: Scope) -> list[Any]:
        """Return the results of a jaxpr, which is in a scope."""
        from jax.extend.core import Literal

        known: dict[Any, Any] = {}

        def read(variable: Any) -> Any:
            return self.constant(variable.val) if isinstance(variable, Literal) else known[variable]

        known.update(zip(jaxpr.constvars, constants, strict=True))
        known.update(zip(jaxpr.invars, arguments, strict=True))
        for equation in jaxpr.eqns:
            results = self._apply(equation, [read(each) for each in equation.invars], scope.inside(equation))
            known.update(zip(equation.outvars, results, strict=True))
        return [read(each) for each in jaxpr.outvars]

    def _apply(self, equation: Any, values: list[Any], scope: Scope) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        if name in _INLINED:
            inner = next(each for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if (each := params.get(key)) is not None)
            closed = inner if hasattr(inner, "consts") else None
            constants = [self.constant(each) for each in closed.consts] if closed else []
            return self.evaluate(closed.jaxpr if closed else inner, constants, values, scope)
        if name == "scan":
            return self.scan(equation, values, scope)
        if name == "while":
            return self.loop(equation, values, scope)
        if name == "cond":
            return self.branch(equation, values, scope)
        return self.bind(equation, values, scope)

    def constant(self, value: Any) -> Any:
        """Return a constant of the jaxpr in float64 if it is floating-point."""
        name = str(np.result_type(value) if np.isscalar(value) else value.dtype)
        if self._exact and name == "complex64":
            return self._replaced(np.asarray(value, np.complex128))
        if not self._exact or "float" not in name:
            return value
        array = intended_numbers(np.asarray(value))
        if array.ndim == 0:
            return array if self._replace is None else self._replace(array)
        return self._replaced(array)

    def bind(self, equation: Any, values: list[Any], scope: Scope) -> list[Any]:
        """Evaluate one operation."""
        import jax

        if any(isinstance(each, jax.core.Tracer) for each in values):
            return self.operation(equation, values)
        with jax.ensure_compile_time_eval():  # a constant is computed now, so that it can be replaced
            return [self._replaced(each) for each in self.operation(equation, values)]

    def operation(self, equation: Any, values: Sequence[Any]) -> list[Any]:
        """Return the results of an operation that contains no other."""
        return operation_in_float64(equation, values) if self._exact else _bind(equation, values, equation.params)

    def _replaced(self, value: Any) -> Any:
        if self._replace is None or not self._exact or value.ndim == 0 or value.dtype not in (np.float64, np.complex128):
            return value
        return self._replace(value)

    def scan(self, equation: Any, values: list[Any], scope: Scope) -> list[Any]:
        """Evaluate a scan."""
        import jax

        p = equation.params
        constants, start, sequences = split_scan(equation, values)

        def step(carry: Any, xs: Any) -> tuple[Any, Any]:
            out = self.run(p["jaxpr"], [*constants, *carry, *xs], scope)
            return _like(out[: len(start)], carry), out[len(start) :]

        start = [jax.numpy.asarray(each) for each in start]
        last, stacked = jax.lax.scan(step, start, sequences, length=p["length"], reverse=p["reverse"], unroll=p["unroll"])
        return [*last, *stacked]

    def loop(self, equation: Any, values: list[Any], scope: Scope) -> list[Any]:
        """Evaluate a while loop."""
        import jax

        p = equation.params
        of_test, of_body, start = split_loop(equation, values)
        return list(
            jax.lax.while_loop(
                lambda carry: self.run(p["cond_jaxpr"], [*of_test, *carry], scope)[0],
                lambda carry: _like(self.run(p["body_jaxpr"], [*of_body, *carry], scope), carry),
                [jax.numpy.asarray(each) for each in start],
            )
        )

    def branch(self, equation: Any, values: list[Any], scope: Scope) -> list[Any]:
        """Evaluate a conditional."""
        import jax

        index, *operands = values
        branches = [lambda *given, each=each: self.run(each, given, scope) for each in equation.params["branches"]]
        return list(jax.lax.switch(index, branches, *operands))


def has_rounded_numbers(closed: Any) -> bool:
    """Return whether a constant of a jaxpr is a number of float32, or filled with one, that stands for another."""
    arrays = [np.asarray(each) for each in _constants(closed) if "float" in str(getattr(each, "dtype", type(each)))]
    return any((array != intended_numbers(array)).any() for array in arrays if not np.isnan(array).any())


def _constants(value: Any) -> Iterator[Any]:
    """Yield the constants of the jaxprs in a parameter of an operation, and of those inside them."""
    from jax.extend.core import Literal

    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _constants(each)
    elif hasattr(value, "eqns"):
        yield from getattr(value, "consts", ())  # those of a closed jaxpr, before jax 0.12 a type of its own
        for equation in value.eqns:
            yield from (v.val for v in equation.invars if isinstance(v, Literal))
            yield from _constants(tuple(equation.params.values()))


class UnrolledEvaluator(JaxprEvaluator):
    """Evaluates a jaxpr operation by operation, also those of loops, for each step anew.

    Subclasses whose values are not arrays override `array`, `entry` and `stack`.
    """

    def array(self, value: Any) -> Any:
        """Return the array of a value."""
        return value

    def entry(self, equation: Any, scope: Scope, sequence: Any, n: int) -> Any:
        """Return what the n-th step of a scan reads of a sequence."""
        return _as_array(sequence)[n]

    def stack(self, equation: Any, scope: Scope, steps: Sequence[Any]) -> Any:
        """Return what a scan makes of the results of its steps."""
        import jax

        return jax.numpy.stack([_as_array(each) for each in steps])

    def scan(self, equation: Any, values: list[Any], scope: Scope) -> list[Any]:
        p = equation.params
        constants, carry, sequences = split_scan(equation, values)
        steps: list[list[Any]] = []
        for n in reversed(range(p["length"])) if p["reverse"] else range(p["length"]):
            rows = [self.entry(equation, scope, each, n) for each in sequences]
            out = self.run(p["jaxpr"], [*constants, *carry, *rows], scope)
            carry, row = out[: len(carry)], out[len(carry) :]
            steps.append(row)
        steps = steps[::-1] if p["reverse"] else steps
        return [*carry, *(self.stack(equation, scope, column) for column in zip(*steps, strict=True))]

    def loop(self, equation: Any, values: list[Any], scope: Scope) -> list[Any]:
        p = equation.params
        of_test, of_body, carry = split_loop(equation, values)
        while bool(self.array(self.run(p["cond_jaxpr"], [*of_test, *carry], scope)[0])):
            carry = self.run(p["body_jaxpr"], [*of_body, *carry], scope)
        return list(carry)

    def branch(self, equation: Any, values: list[Any], scope: Scope) -> list[Any]:
        index, *operands = values
        branches = equation.params["branches"]
        chosen = min(max(int(self.array(index)), 0), len(branches) - 1)
        return self.run(branches[chosen], operands, scope)


_Three = tuple[list[Any], list[Any], list[Any]]


def split_scan(equation: Any, values: list[Any]) -> _Three:
    """Return the constants, the carry and the sequences among the operands of a scan."""
    p = equation.params
    if "ft_in" in p:  # jax 0.12
        constants, carry, sequences = map(list, p["ft_in"].update(values).unpack())
        return constants, carry, sequences
    return _split(values, p["num_consts"], p["num_carry"])


def split_loop(equation: Any, values: list[Any]) -> _Three:
    """Return the constants of the condition, those of the body, and the carry among the operands of a while loop."""
    return _split(values, equation.params["cond_nconsts"], equation.params["body_nconsts"])


def _split(values: list[Any], first: int, second: int) -> _Three:
    return values[:first], values[first : first + second], values[first + second :]


def _like(values: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Return values with the dtypes of others."""
    return [each.astype(other.dtype) for each, other in zip(map(_as_array, values), map(_as_array, others), strict=True)]


def _as_array(value: Any) -> Any:
    import jax

    return jax.numpy.asarray(value)


def operation_in_float64(equation: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluate one operation with floating-point values in float64."""
    name, params = equation.primitive.name, equation.params
    if name == "reduce_precision":
        return list(values)
    if name == "convert_element_type" and (wide := _wide_dtype(equation.outvars[0].aval)):
        params = {**params, "new_dtype": wide}
    elif name.startswith("scatter") and params.get("update_jaxpr") is not None:
        params = {**params, "update_jaxpr": _jaxpr_in_float64(params["update_jaxpr"])}
    elif name in RANDOM_BITS or any(True for value in params.values() for _ in inner_jaxprs(value)):
        values = [
            _as_array(v).astype(e.aval.dtype) if _is_narrowed(v, e.aval) else v
            for v, e in zip(values, equation.invars, strict=True)
        ]
    else:
        params = {key: np.dtype(np.float64) if _is_narrow_dtype(value) else value for key, value in params.items()}
    if name == "mul" and params.get("out_dtype") is not None and equation.outvars[0].aval.dtype.kind == "f":
        params = {**params, "out_dtype": np.dtype(np.float64)}
    return [each.astype(wide) if (wide := _wide_dtype(each)) else each for each in _bind(equation, values, params)]


def _wide_dtype(array: Any) -> Any:
    """Return the dtype in which an array is exact that is floating-point or complex below 64 bits; else None."""
    if str(getattr(array, "dtype", "")) == "complex64":
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if narrow_float(array) else None


def _jaxpr_in_float64(jaxpr: Any) -> Any:
    """Return a jaxpr of scalars, such as how a scatter combines two of them, with all its parts in float64."""
    import jax

    scalars = [np.zeros((), np.float64 if narrow_float(v.aval) else v.aval.dtype) for v in jaxpr.invars]
    return jax.make_jaxpr(lambda *given: JaxprEvaluator().evaluate(jaxpr, [], given, Scope()))(*scalars).jaxpr


def _bind(equation: Any, values: Sequence[Any], params: Any) -> list[Any]:
    bound = equation.primitive.get_bind_params(params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # a tuple in older versions of JAX
    out = equation.primitive.bind(*functions, *values, **params)
    return list(out) if equation.primitive.multiple_results else [out]


def _is_narrowed(value: Any, aval: Any) -> bool:
    return getattr(value, "dtype", None) == np.float64 and narrow_float(aval) != ""


def _is_narrow_dtype(value: Any) -> bool:
    """Return whether a parameter of an operation is a floating-point dtype below float64."""
    is_dtype = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))
    return is_dtype and str(np.dtype(value)) in NARROW_TYPES
