"""The exception for invalid user input, and helpers for its messages."""

import difflib
from collections.abc import Iterable

from vit_spec.printable import MAX_MESSAGE_LENGTH, printable


class InputError(ValueError):
    """Invalid input.  The message is one line: what is wrong, what was expected, what to do.

    Messages quote names from files.  `str(error)` therefore escapes control characters, and omits the middle of a very long
    message: see `vit_spec.printable`.
    """

    def __str__(self) -> str:
        return printable(super().__str__(), max_length=MAX_MESSAGE_LENGTH)


def require(condition: bool, message: str) -> None:
    """Raise InputError with this message unless the condition is true."""
    if not condition:
        raise InputError(message)


def first_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def nearest(name: object, names: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the most similar of `names`, or "" if none is similar.

    A dotted name whose last part is `name` is the most similar one: for --lr, --optimizer.lr.  Names of more
    than 100 characters are ignored: the comparison takes time quadratic in their length.
    """
    text = str(name)
    known = [each for each in names if len(each) <= 100] if len(text) <= 100 else []
    leaf = text.lstrip("-")
    same_leaf = [each for each in known if leaf and each.lstrip("-").rpartition(".")[2] == leaf]
    # Half of the letters are no similarity: linear and cosine have a ratio of 0.5.
    matches = same_leaf or difflib.get_close_matches(text, known[:10_000], n=1, cutoff=0.51)
    return f"; did you mean {matches[0]!r}?" if matches else ""
