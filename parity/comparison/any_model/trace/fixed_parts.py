"""The parts of a model that it computes in a fixed lower precision, whatever the dtype of its weights and inputs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from parity.comparison.any_model.trace.places import Stack
from parity.comparison.any_model.trace.scope import Scope, inner_jaxprs

NARROW_TYPES = ("float32", "float16", "bfloat16")
_NAMES_OF_BITS = {(8, 23): "float32", (8, 10): "TF32", (5, 10): "float16", (8, 7): "bfloat16"}  # of exponent and mantissa
_FLOAT64_BITS = (11, 52)
RANDOM_BITS = ("bitcast_convert_type", "random_bits", "random_wrap", "random_unwrap", "threefry2x32", "nextafter")


@dataclass(frozen=True)
class FixedPart:
    """A part of a model with a fixed dtype, which it does not take from its weights and inputs.

    framework: "flax" or "torch".
    module: path of the module.
    dtype: the fixed dtype, such as "float32".
    operation: the operation that converts to it, or creates an array of it.
    """

    framework: str
    module: str
    dtype: str
    operation: str
    stack: Stack = ()

    def __str__(self) -> str:
        where = f" ({self.stack[0]}, in {self.stack[0].function})" if self.stack else ""
        return f"{self.module or 'the model itself'} of {self.framework} in {self.dtype}{where}"


def fixed_parts(closed: Any) -> list[FixedPart]:
    """Return the operations of a jaxpr, traced in float64, whose results are floating-point in a lower precision.

    Results that only become integers or truth values, such as those of a mask, are left out.
    """
    return list(_fixed_parts(closed.jaxpr, Scope(), set(closed.jaxpr.constvars)))


def _fixed_parts(jaxpr: Any, scope: Scope, stored: set[Any]) -> Iterator[FixedPart]:
    """Yield the parts of a jaxpr; `stored` are its variables that are arrays in the model's source."""
    from jax.extend.core import Literal

    used = _used_numbers(jaxpr)
    for equation in jaxpr.eqns:
        inner = [each for value in equation.params.values() for each in inner_jaxprs(value)]
        is_stored = [isinstance(v, Literal) or v in stored for v in equation.invars]
        for each in inner:
            same = len(each.invars) == len(is_stored)
            given = {v for v, is_so in zip(each.invars, is_stored, strict=True) if is_so} if same else set()
            yield from _fixed_parts(each, scope.inside(equation), given | set(each.constvars))
        created = {name for v in equation.outvars if v in used and (name := _rounded_to(equation) or narrow_float(v.aval))}
        known = {
            name
            for v, is_so in zip(equation.invars, is_stored, strict=True)
            if not is_so and (name := narrow_float(v.aval))
        }
        if not inner and created - known and equation.primitive.name not in RANDOM_BITS:
            here = scope.inside(equation)
            yield FixedPart("flax", here.module, min(created - known), equation.primitive.name, here.stack)


def _rounded_to(equation: Any) -> str:
    """Return the precision to which an operation rounds float64 without changing the dtype; "" if it does not."""
    if equation.primitive.name != "reduce_precision" or str(equation.outvars[0].aval.dtype) != "float64":
        return ""
    bits = (equation.params["exponent_bits"], equation.params["mantissa_bits"])
    return "" if bits == _FLOAT64_BITS else _NAMES_OF_BITS.get(bits, f"e{bits[0]}m{bits[1]}")


def _used_numbers(jaxpr: Any) -> set[Any]:
    """Return the variables of a jaxpr that a floating-point result is computed from."""
    from jax.extend.core import Literal

    used = {v for v in jaxpr.outvars if not isinstance(v, Literal) and _is_float(v.aval)}
    for equation in reversed(jaxpr.eqns):
        if any(_is_float(v.aval) and (v in used or str(v.aval.dtype) == "float64") for v in equation.outvars):
            used |= {v for v in equation.invars if not isinstance(v, Literal)}
    return used


def _is_float(array: Any) -> bool:
    return str(getattr(array, "dtype", "")) == "float64" or narrow_float(array) != ""


def narrow_float(array: Any) -> str:
    """Return the dtype of an array if it is floating-point and below float64; else ""."""
    name = str(getattr(array, "dtype", ""))
    return name if name in NARROW_TYPES else ""
