"""Check the fields of a dataclass against their annotations, and convert values that stand for them."""

import dataclasses
import math
import numbers
import types
import typing
from typing import Any, Literal

from vit_spec.errors import InputError, nearest

_COUNTED = 2**63  # beyond which nothing is counted, and products of sizes are numbers that Python does not print


def check_types(part: Any, prefix: str) -> None:
    """Check every field of a dataclass against its annotation, including those of parts; convert what stands for it.

    Raises:
        InputError: a value of another type.
    """
    for name, annotation in typing.get_type_hints(type(part)).items():
        value = getattr(part, name)
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            if type(value) is not annotation:
                raise InputError(f"{prefix}{name} is {value!r}: give a vit_spec.{annotation.__name__}(...)")
            check_types(value, f"{prefix}{name}.")
        else:
            object.__setattr__(part, name, coerced(f"{prefix}{name}", value, annotation))


def coerced(name: str, value: Any, annotation: Any) -> Any:
    """Return `value` as the plain Python value that `annotation` asks for, or refuse it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        if value not in arguments:
            raise InputError(f"{name} is {value!r}: give one of {', '.join(arguments)}{nearest(value, arguments)}")
        return value
    if origin is types.UnionType:  # `X | None`
        return None if value is None else coerced(name, value, arguments[0])
    if origin is tuple:
        length = None if arguments[-1] is Ellipsis else len(arguments)
        if not isinstance(value, (tuple, list)) or not value or length not in (None, len(value)):
            example = f"{length} numbers, as in (224, 224)" if length else "some numbers, as in (0.5, 0.5, 0.5)"
            raise InputError(f"{name} is {value!r}: give {example}")
        return tuple(coerced(name, item, arguments[0]) for item in value)
    if annotation is bool and isinstance(value, bool):
        return value
    if annotation is str and isinstance(value, str):
        return value
    if annotation is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        if abs(int(value)) < _COUNTED:
            return int(value)
        raise InputError(f"{name} is a number of {int(value).bit_length()} bits: give a smaller one")
    if annotation is float and isinstance(value, numbers.Real) and not isinstance(value, bool) and _is_finite(value):
        return float(value)
    wanted = {bool: "True or False", str: "a string", int: "a whole number", float: "a finite number"}[annotation]
    raise InputError(f"{name} is {value!r}: give {wanted}")


def _is_finite(value: numbers.Real) -> bool:
    """Whether a number is one of those that a float can be, which very large whole numbers are not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
