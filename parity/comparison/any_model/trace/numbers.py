"""Numbers of a model's source that a part in float32 has rounded."""

from decimal import Decimal
from math import log, pi, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

_OF_PI = (pi, 2 * pi, 1 / pi, sqrt(2 / pi), sqrt(pi / 2), 2 / sqrt(pi), 1 / sqrt(2 * pi))
_IRRATIONAL = (*_OF_PI, log(2), 1 / log(2), log(10000))
_MAX_ROOT = 1000.0  # roots of larger integers are as dense as the numbers of float32


def intended_number(value: NDArray[Any]) -> float:
    """Return the number that a scalar stands for: 0.1 for the float32 number nearest to it, which may be in float64.

    It is the decimal with at most six digits, the irrational constant, or the root of an integer or its inverse, that
    rounds to this number; else the number itself.
    """
    number = float(value)
    with np.errstate(over="ignore"):
        narrow = float(np.float32(number))
    if not np.isfinite(number) or number.is_integer() or narrow != number:
        return number
    if (decimal := _short_decimal(number)) is not None:
        return decimal
    size = abs(number)
    roots = [sqrt(round(size**2))] if 1 < size < _MAX_ROOT else []
    roots += [1 / sqrt(round(size**-2))] if 1 / _MAX_ROOT < size < 1 else []
    for each in (*_IRRATIONAL, *roots):
        if np.float32(each) == np.float32(size):
            return float(np.copysign(each, number))
    return number


def intended_numbers(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in float64; one with equal entries, as a filled one, has the number that these stand for."""
    if array.size and (array == array.flat[0]).all():
        return np.full(array.shape, intended_number(array.flat[0]))
    return array.astype(np.float64)


def is_rounded(value: NDArray[Any]) -> bool:
    """Return whether a scalar is a number of float32 that stands for another one, which its digits do not tell."""
    if value.dtype.kind == "c":
        return False
    number = float(value)
    if not np.isfinite(number) or number.is_integer() or float(np.float32(number)) != number:
        return False
    return _short_decimal(number) is None


def _short_decimal(number: float) -> float | None:
    """Return the decimal with at most six digits that float32 rounds to a number; None if there is none."""
    decimal = Decimal(np.format_float_positional(np.float32(number), unique=True)).normalize()
    return float(decimal) if len(decimal.as_tuple().digits) <= 6 else None
