"""JSON of unknown origin, parsed in bounded memory and time.

A text of n bytes makes at most about 30 n bytes of objects, so limits on the text and on its depth bound everything
that follows: callers may walk the value recursively, copy it and print it.
"""

import json
import os
from pathlib import Path
from stat import S_ISREG
from typing import Any

from vit_spec.errors import InputError

BYTES = 1 << 20  # of a text, unless the caller allows more
VALUES = 1 << 22  # objects, lists, and their items
DEPTH = 64  # objects and lists in one another
DIGITS = 300  # of a whole number: as many as a float holds, and products of a few that Python still prints


def parse(text: str | bytes, *, longest: int = BYTES, undefined: bool = False) -> Any:
    """Return what a JSON text holds.

    longest: characters or bytes that the text may have.
    undefined: whether NaN and infinities are read, which JSON has not and Python writes all the same.

    Raises:
        InputError: text that is not JSON or not UTF-8, that is too long, too deep or of too many values, or that holds
            NaN, an infinity, a number that overflows, a whole number of more than DIGITS, a name twice in one object, or
            half a surrogate pair.
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
            parse_constant=None if undefined else _refused,
            parse_float=None if undefined else _finite,
            parse_int=_whole,
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
    return value


def parse_object(text: str | bytes, *, longest: int = BYTES, undefined: bool = False) -> dict[str, Any]:
    """Return the object that a JSON text holds; the arguments as of `parse`.

    Raises:
        InputError: as `parse`; or another value than an object.
    """
    value = parse(text, longest=longest, undefined=undefined)
    if not isinstance(value, dict):
        raise InputError(f"a JSON {type(value).__name__}, an object was expected")
    return value


def read_object(path: Path, *, longest: int = BYTES, undefined: bool = False) -> dict[str, Any]:
    """Return the object that a JSON file holds; the arguments as of `parse`.

    Raises:
        InputError: as `parse_object`; or something that is no file, such as a pipe.  The caller names the path.
        OSError: no such file, or none that may be read.
    """
    return parse_object(read_bytes(path, longest=longest), longest=longest, undefined=undefined)


def read_bytes(path: Path, *, longest: int = BYTES) -> bytes:
    """Return the bytes of a file.

    Raises:
        InputError: more than `longest` bytes; or no file but, say, a pipe, whose writer one would wait for.
        OSError: no such file, or none that may be read.
    """
    with open(path, "rb", opener=_unwaiting) as file:
        status = os.fstat(file.fileno())
        if not S_ISREG(status.st_mode):
            raise InputError("it is a pipe, a device or a socket: give a file")
        if status.st_size > longest:
            raise InputError(f"it has more than {longest:,} bytes")
        return file.read(status.st_size)  # which takes as much memory as is asked for, be there less


def _unwaiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


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


def _whole(text: str) -> int:
    if len(text) > DIGITS:
        raise InputError(f"{text[:40]}... is a number of more than {DIGITS} digits")
    return int(text)


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
