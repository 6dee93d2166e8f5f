"""Check the fields of a dataclass against their type annotations, and convert equivalent values."""

import dataclasses
import functools
import numbers
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from vit_spec.errors import InputError, nearest

_MAX_INT = 2**63  # larger sizes are mistakes, and Python refuses to print their products
# The normal numbers of float32, in which a model computes: larger ones are infinite, and smaller ones become 0.
MAX_FLOAT, MIN_FLOAT = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
# The annotations of the fields of a class, which typing evaluates anew in each call.
_annotations: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)


def check_types(part: Any, prefix: str) -> None:
    """Check every field of a dataclass, and of the dataclasses in its fields, against its annotation.

    Equivalent values of other types are converted in place: a list to a tuple, a numpy integer to int, an integer to float.

    Args:
        prefix: put before field names in error messages, such as "norms.".

    Raises:
        InputError: a value has another type.
    """
    for name, annotation in _annotations(type(part)).items():
        value = getattr(part, name)
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            if type(value) is not annotation:
                raise InputError(f"{prefix}{name} is {value!r}: give a vit_spec.{annotation.__name__}(...)")
            check_types(value, f"{prefix}{name}.")
        else:
            object.__setattr__(part, name, coerce(f"{prefix}{name}", value, annotation))


def check_choices(part: Any, prefix: str) -> None:
    """Check the fields of a dataclass that are annotated with a Literal; see `check_types`."""
    for name, annotation in _annotations(type(part)).items():
        if typing.get_origin(annotation) is Literal:
            coerce(f"{prefix}{name}", getattr(part, name), annotation)


def coerce(name: str, value: Any, annotation: Any) -> Any:
    """Return `value` as a plain Python value of the annotated type.

    Args:
        name: the name of the field, for error messages.
        value: the value of the field.
        annotation: bool, int, float, str, a Literal, a tuple of these, or `X | None`.

    Raises:
        InputError: the value is not of this type and not equivalent to one.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        if value not in arguments:
            raise InputError(f"{name} is {value!r}: give one of {', '.join(arguments)}{nearest(value, arguments)}")
        return value
    if origin is types.UnionType:  # `X | None`
        return None if value is None else coerce(name, value, arguments[0])
    if origin is tuple:
        length = None if arguments[-1] is Ellipsis else len(arguments)
        if not isinstance(value, (tuple, list)) or not value or length not in (None, len(value)):
            example = f"{length} numbers, such as (224, 224)" if length else "one or more numbers, such as (0.5, 0.5, 0.5)"
            raise InputError(f"{name} is {value!r}: give {example}")
        return tuple(coerce(name, item, arguments[0]) for item in value)
    if annotation is bool and isinstance(value, bool):
        return value
    if annotation is str and isinstance(value, str):
        return value
    if annotation is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        if abs(int(value)) < _MAX_INT:
            return int(value)
        raise InputError(f"{name} is a number of {int(value).bit_length()} bits: give a smaller one")
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if annotation is float and is_number and _is_in_float32(value):
        return float(value)
    finite = f"a finite number, at most {MAX_FLOAT:.1e}"
    expected = {bool: "True or False", str: "a string", int: "an integer", float: finite}[annotation]
    raise InputError(f"{name} is {value!r}: give {expected}")


def _is_in_float32(value: numbers.Real) -> bool:
    """Return whether a number is finite in float32; very large integers overflow as a float."""
    try:
        return abs(float(value)) <= MAX_FLOAT
    except OverflowError:
        return False
