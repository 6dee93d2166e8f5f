"""What a header may say: shapes of arrays that can exist; and its names, as they may stand in a message."""

from collections.abc import Iterable
from math import prod

from vit_spec import InputError

_DIMENSIONS = 64  # the most that numpy has
_LISTED = 4  # names that an error spells out


def shape(value: object, itemsize: int) -> tuple[int, ...]:
    """Return a list of lengths as the shape of an array that numpy can hold, of entries of so many bytes.

    Raises:
        InputError: what is wrong; the caller names the file and the array.
    """
    if not isinstance(value, (list, tuple)) or len(value) > _DIMENSIONS:
        raise InputError(f"its shape is not a list of at most {_DIMENSIONS} lengths")
    if not all(type(length) is int and 0 <= length < 2**63 for length in value):
        raise InputError("its shape holds what is no length")
    if prod(length for length in value if length) * itemsize >= 2**63:  # numpy counts like this for empty ones too
        raise InputError("its shape is that of no array")
    return tuple(value)


def quoted(name: str) -> str:
    """Return a name as it may stand in a line."""
    return repr(name) if len(name) <= 200 else f"{name[:200]!r}..."


def listed(names: Iterable[str]) -> str:
    """Return the first few of some names, and how many there are."""
    ordered = sorted(names)
    rest = len(ordered) - _LISTED
    return ", ".join(map(quoted, ordered[:_LISTED])) + (f" and {rest} more" if rest > 0 else "")
