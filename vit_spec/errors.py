"""The exception for invalid user input, and helpers for its messages."""

import difflib
import errno
from collections.abc import Iterable
from numbers import Integral

from vit_spec.printable import MAX_MESSAGE_LENGTH, printable

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the remedy is to make room; EFBIG: a limit of file sizes


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


def require_type(subject: str, value: object, *types: type, example: str = "") -> None:
    """Raise InputError unless an argument is an instance of one of the types.

    Args:
        subject: the argument and its verb, as the message begins: "config is".
        value: the argument.
        types: the types that it may have.
        example: an expression of such a value, for the message.
    """
    if not isinstance(value, types):
        found = repr(value) if value is None or isinstance(value, (str, int, float)) else f"a {_public_name(type(value))}"
        expected = " or ".join(map(_public_name, types))
        raise InputError(f"{subject} {found}: give a {expected}{example and f', such as {example}'}")


def block_index(block: int, depth: int) -> int:
    """Return the index of a block, from 0 on, that an index of either sign means; raise InputError if there is none."""
    if isinstance(block, bool) or not isinstance(block, Integral) or not -depth <= block < depth:
        raise InputError(f"block is {block!r}: give an integer from {-depth} to {depth - 1}")
    return int(block) % depth


def _public_name(cls: type) -> str:
    """Return the name of a class with its package, as users import it: "vit_jax.Execution"."""
    name = cls.__name__.rpartition(".")[2]  # that of jax.Array is "jaxlib._jax.Array"
    return name if cls.__module__ == "builtins" else f"{cls.__module__.partition('.')[0]}.{name}"


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
    leaf = text.lstrip("-").partition("=")[0] if text.startswith("--") else text  # of --flag=value the flag
    by_word = {each.lstrip("-"): each for each in known}  # all flags have the hyphens
    same_leaf = [word for word in by_word if leaf and word.rpartition(".")[2] == leaf]
    # Half of the letters are no similarity: linear and cosine have a ratio of 0.5, version and json of 0.55.
    matches = same_leaf or difflib.get_close_matches(leaf, list(by_word)[:10_000], n=1, cutoff=0.6)
    return f"; did you mean {by_word[matches[0]]!r}?" if matches else ""
