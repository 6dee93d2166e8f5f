"""Parse JSON from untrusted sources in bounded memory and time.

A text of n bytes becomes at most about 30 n bytes of Python objects.  Limits on the length of the text and on the nesting
depth therefore bound all later work: callers may walk the value recursively, copy it and print it.
"""

import json
import os
from pathlib import Path
from stat import S_ISREG
from typing import Any

from vit_spec.errors import InputError

MAX_BYTES = 1 << 20  # length of a text, unless the caller allows more
MAX_VALUES = 1 << 22  # objects, lists and their items, together
MAX_DEPTH = 64  # nesting levels of objects and lists
MAX_DIGITS = 300  # in an integer: the largest float has 309, and Python still prints products of a few such integers


def parse(text: str | bytes, *, max_bytes: int = MAX_BYTES, allow_nan: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        max_bytes: maximum length of the text, in characters or bytes.
        allow_nan: accept NaN and infinities, which are not valid JSON but which Python's json module writes.

    Raises:
        InputError: the text is not JSON or not UTF-8, is too long, is nested too deeply or has too many values; or it
            contains NaN, an infinity, a number that overflows a float, an integer of more than MAX_DIGITS digits, a
            duplicate key in an object, or an unpaired surrogate.
    """
    if len(text) > max_bytes:
        raise InputError(f"{len(text):,} bytes of JSON: at most {max_bytes:,} are allowed")
    separators: Any = (",", "[", "{") if isinstance(text, str) else (b",", b"[", b"{")
    if sum(map(text.count, separators)) > MAX_VALUES:
        raise InputError(f"JSON with more than {MAX_VALUES:,} values")
    try:
        value = json.loads(
            text if isinstance(text, str) else text.decode(),
            object_pairs_hook=_object_without_duplicates,
            parse_constant=None if allow_nan else _refuse_constant,
            parse_float=None if allow_nan else _parse_float,
            parse_int=_parse_int,
        )
        _check_depth(value)
    except InputError:
        raise
    except RecursionError:
        raise InputError(f"JSON nested more than {MAX_DEPTH} levels deep") from None
    except UnicodeError:
        raise InputError("not JSON: the text is not valid Unicode") from None
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error}") from None
    return value


def parse_object(text: str | bytes, *, max_bytes: int = MAX_BYTES, allow_nan: bool = False) -> dict[str, Any]:
    """Return the value of a JSON text, which must be an object; the arguments are those of `parse`.

    Raises:
        InputError: as in `parse`; or the value is not an object.
    """
    value = parse(text, max_bytes=max_bytes, allow_nan=allow_nan)
    if not isinstance(value, dict):
        raise InputError(f"expected a JSON object, found a {type(value).__name__}")
    return value


def read_object(path: Path, *, max_bytes: int = MAX_BYTES, allow_nan: bool = False) -> dict[str, Any]:
    """Return the value of a JSON file, which must be an object; the arguments are those of `parse`.

    Raises:
        InputError: as in `parse_object`; or the path is not a regular file.  The message does not name the path.
        OSError: the file does not exist or cannot be read.
    """
    return parse_object(read_bytes(path, max_bytes=max_bytes), max_bytes=max_bytes, allow_nan=allow_nan)


def read_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        InputError: the file has more than `max_bytes` bytes; or it is not a regular file, such as a pipe, on which a read
            would wait for a writer.
        OSError: the file does not exist or cannot be read.
    """
    with open(path, "rb", opener=_open_nonblocking) as file:
        status = os.fstat(file.fileno())
        if not S_ISREG(status.st_mode):
            raise InputError("it is a pipe, a device or a socket: give a regular file")
        if status.st_size > max_bytes:
            raise InputError(f"it has more than {max_bytes:,} bytes")
        return file.read(status.st_size)  # read(n) allocates n bytes even if the file is shorter


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for name, value in pairs:
        if name in unique:
            raise InputError(f"the key {name[:200]!r} occurs twice")
        unique[name] = value
    return unique


def _refuse_constant(word: str) -> None:
    raise InputError(f"{word} is not valid JSON")


def _parse_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise InputError(f"{text[:40]} is too large for a float")
    return value


def _parse_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise InputError(f"the number {text[:40]}... has more than {MAX_DIGITS} digits")
    return int(text)


def _check_depth(value: Any) -> None:
    """Raise InputError for a value nested too deeply, and UnicodeError for a string that cannot be encoded."""
    current = [value]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for each in current:
            if isinstance(each, dict):
                children += each
                children += each.values()
            elif isinstance(each, list):
                children += each
            elif isinstance(each, str) and not each.isascii():
                each.encode()  # raises UnicodeError for an unpaired surrogate
        if not children:
            return
        current = children
    raise InputError(f"JSON nested more than {MAX_DEPTH} levels deep")
