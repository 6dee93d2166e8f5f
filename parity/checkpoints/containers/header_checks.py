"""Checks of the headers of arrays, and quotation of names in error messages."""

from collections.abc import Iterable
from math import prod

from vit_spec import InputError

_MAX_DIMENSIONS = 64  # as in numpy
_MAX_NAMES = 4  # names that an error message lists


def parse_shape(value: object, itemsize: int) -> tuple[int, ...]:
    """Return a list of lengths as a shape, after checking that numpy supports an array of this shape.

    Args:
        value: the shape in the header, which can be of any type.
        itemsize: bytes of an element.

    Raises:
        InputError: the value is not a valid shape; the caller adds the path and the name of the array.
    """
    if not isinstance(value, (list, tuple)) or len(value) > _MAX_DIMENSIONS:
        raise InputError(f"its shape is not a list of at most {_MAX_DIMENSIONS} lengths")
    if not all(type(length) is int and 0 <= length < 2**63 for length in value):
        raise InputError("its shape is not made of whole numbers from 0 to 2**63 - 1")
    if prod(length for length in value if length) * itemsize >= 2**63:  # numpy has this limit for empty arrays too
        raise InputError("its shape is too large")
    return tuple(value)


def quote(name: str) -> str:
    """Return a name in quotes, escaped and shortened for an error message."""
    return repr(name) if len(name) <= 200 else f"{name[:200]!r}..."


def quote_names(names: Iterable[str]) -> str:
    """Return the first four names in sorted order, in quotes, and how many more there are."""
    ordered = sorted(names)
    rest = len(ordered) - _MAX_NAMES
    return ", ".join(map(quote, ordered[:_MAX_NAMES])) + (f" and {rest} more" if rest > 0 else "")
