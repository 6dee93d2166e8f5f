"""The one error that speaks to a person."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """What was given is wrong.  The message is one line: what, what was expected, what to do."""


def nearest(name: object, names: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the spelling nearest to `name`, or nothing."""
    matches = difflib.get_close_matches(str(name), list(names), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""
