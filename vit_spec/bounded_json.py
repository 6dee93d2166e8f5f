"""JSON of unknown origin, parsed in bounded memory and time.

A text of n bytes makes at most about 30 n bytes of objects, so limits on the text and on its depth bound everything
that follows: callers may walk the value recursively, copy it and print it.
"""

import json
from typing import Any

from vit_spec.errors import InputError

BYTES = 1 << 20  # of a text, unless the caller allows more
VALUES = 1 << 22  # objects, lists, and their items
DEPTH = 64  # objects and lists in one another


def parse(text: str | bytes, *, longest: int = BYTES) -> Any:
    """Return what a JSON text holds.

    longest: characters or bytes that the text may have.

    Raises:
        InputError: text that is not JSON or not UTF-8, that is too long, too deep or of too many values, or that holds
            NaN, an infinity, a number that overflows, a name twice in one object, or half a surrogate pair.
    """
    if len(text) > longest:
        raise InputError(f"{len(text):,} bytes of JSON, at most {longest:,} are read")
    marks: Any = (",", "[", "{") if isinstance(text, str) else (b",", b"[", b"{")
    if sum(map(text.count, marks)) > VALUES:
        raise InputError(f"JSON of more than {VALUES:,} values")
    try:
        value = json.loads(
            text if isinstance(text, str) else text.decode(),
            object_pairs_hook=_distinct,
            parse_constant=_refused,
            parse_float=_finite,
        )
        _check_depth(value)
    except InputError:
        raise
    except RecursionError:
        raise InputError(f"JSON that is nested more than {DEPTH} times") from None
    except UnicodeError:
        raise InputError("not JSON: text that is not Unicode") from None
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error}") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise InputError("not JSON: a number of too many digits") from None
    return value


def parse_object(text: str | bytes, *, longest: int = BYTES) -> dict[str, Any]:
    """Return the object that a JSON text holds.

    Raises:
        InputError: as `parse`; or another value than an object.
    """
    value = parse(text, longest=longest)
    if not isinstance(value, dict):
        raise InputError(f"a JSON {type(value).__name__}, an object was expected")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise InputError(f"{name[:200]!r} is there twice")
        found[name] = value
    return found


def _refused(word: str) -> None:
    raise InputError(f"not JSON, which has no {word}")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise InputError(f"{text[:40]} is larger than any number")
    return value


def _check_depth(value: Any) -> None:
    """Refuse a value that is nested too deeply, or that holds text that cannot be encoded."""
    level = [value]
    for _ in range(DEPTH):
        following: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                following += each
                following += each.values()
            elif isinstance(each, list):
                following += each
            elif isinstance(each, str) and not each.isascii():
                each.encode()  # half a surrogate pair: a UnicodeError
        if not following:
            return
        level = following
    raise InputError(f"JSON that is nested more than {DEPTH} times")
