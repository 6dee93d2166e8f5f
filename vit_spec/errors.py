"""The one error that speaks to a person."""

import difflib
from collections.abc import Iterable

from vit_spec.printable import LONGEST, printable


class InputError(ValueError):
    """What was given is wrong.  The message is one line: what, what was expected, what to do.

    A message quotes names from files, so it is escaped when it is read, and loses its middle where it is longer
    than any line: see `vit_spec.printable`.
    """

    def __str__(self) -> str:
        return printable(super().__str__(), longest=LONGEST)


def require(holds: bool, message: str) -> None:
    """Raise InputError with this message unless a condition holds."""
    if not holds:
        raise InputError(message)


def nearest(name: object, names: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the spelling nearest to `name`, or nothing.

    Names of more than 100 characters are near to none: the comparison takes time quadratic in their length.
    """
    text = str(name)
    known = [each for each in names if len(each) <= 100] if len(text) <= 100 else []
    matches = difflib.get_close_matches(text, known[:10_000], n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""
