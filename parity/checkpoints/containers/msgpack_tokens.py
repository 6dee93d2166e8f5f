"""The words of msgpack, read one at a time without what they announce, and written.

See https://github.com/msgpack/msgpack/blob/master/spec.md.
"""

import struct
from dataclasses import dataclass
from typing import Any, Literal

from parity.checkpoints.containers.container import File
from vit_spec import InputError

Kind = Literal["value", "map", "array", "text", "bytes", "extension"]

_WINDOW = 512  # bytes read at once: a few words, and not the array after them
_VALUES = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = dict(zip((0xCA, 0xCB, *range(0xCC, 0xD4)), (f">{code}" for code in "fdBHIQbhiq"), strict=True))
_SIZED: dict[int, tuple[Kind, int]] = {  # first byte -> what follows, and bytes of its length
    **dict(zip((0xC4, 0xC5, 0xC6), (("bytes", 1), ("bytes", 2), ("bytes", 4)), strict=True)),
    **dict(zip((0xC7, 0xC8, 0xC9), (("extension", 1), ("extension", 2), ("extension", 4)), strict=True)),
    **dict(zip((0xD9, 0xDA, 0xDB), (("text", 1), ("text", 2), ("text", 4)), strict=True)),
    **dict(zip((0xDC, 0xDD), (("array", 2), ("array", 4)), strict=True)),
    **dict(zip((0xDE, 0xDF), (("map", 2), ("map", 4)), strict=True)),
}
_FIXED_EXTENSIONS = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}
_FIXED_LENGTHS = {code: length for length, code in _FIXED_EXTENSIONS.items()}


@dataclass(frozen=True)
class Token:
    """A word.

    kind: "value" of what stands for itself: a number, a flag or nothing.
    value: of a "value"; otherwise the number of bytes, items or pairs that follow.
    code: the type of an extension.
    """

    kind: Kind
    value: Any
    code: int = 0


class Reader:
    """A place in a file.  Every method raises InputError where the file ends too early; the caller names the file."""

    def __init__(self, file: File) -> None:
        self.file, self.at = file, 0
        self._window, self._begin = b"", 0

    @property
    def left(self) -> int:
        """Bytes from here to the end of the file."""
        return self.file.size - self.at

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        start = self.at - self._begin
        if start < 0 or start + count > len(self._window):
            self._window, self._begin, start = self.file.read(self.at, max(count, _WINDOW)), self.at, 0
        data = self._window[start : start + count]
        if len(data) < count:
            raise InputError("it ends too early")
        self.at += count
        return data

    def token(self) -> Token:
        """Return the next word; what it announces fits in the file."""
        token = self._token()
        if token.kind != "value" and token.value * (2 if token.kind == "map" else 1) > self.left:
            raise InputError(f"it announces a {token.kind} of {token.value}, and ends before")
        return token

    def text(self, token: Token, limit: int) -> str:
        """Return the text that a word announced.

        Raises:
            InputError: it is no text, or longer than `limit` bytes.
        """
        if token.kind != "text" or token.value > limit:
            raise InputError(f"text of at most {limit} bytes expected, and not a {token.kind}")
        try:
            return self.take(token.value).decode()
        except UnicodeDecodeError:
            raise InputError("its text is not UTF-8") from None

    def _token(self) -> Token:
        byte = self.take(1)[0]
        if byte < 0x80 or byte >= 0xE0:
            return Token("value", byte if byte < 0x80 else byte - 256)
        if byte < 0x90:
            return Token("map", byte & 0x0F)
        if byte < 0xA0:
            return Token("array", byte & 0x0F)
        if byte < 0xC0:
            return Token("text", byte & 0x1F)
        if byte in _VALUES:
            return Token("value", _VALUES[byte])
        if byte in _NUMBERS:
            return Token("value", struct.unpack(_NUMBERS[byte], self.take(struct.calcsize(_NUMBERS[byte])))[0])
        if byte in _FIXED_LENGTHS:
            return Token("extension", _FIXED_LENGTHS[byte], self._code())
        if byte not in _SIZED:
            raise InputError(f"no word begins with byte {byte:#x}")
        kind, width = _SIZED[byte]
        count = int.from_bytes(self.take(width), "big")
        return Token(kind, count, self._code() if kind == "extension" else 0)

    def _code(self) -> int:
        return int.from_bytes(self.take(1), "big", signed=True)


def begins_named_map(head: bytes) -> bool:
    """Whether these are the first bytes of a map whose first key is text, or of an empty map and nothing else."""
    if head[:1] == b"\x80":  # so begin pickles too
        return len(head) == 1
    names = head[{b"\xde": 3, b"\xdf": 5}.get(head[:1], 1) :]
    is_map = head[:1] in (b"\xde", b"\xdf") or b"\x81" <= head[:1] <= b"\x8f"
    return is_map and (b"\xa0" <= names[:1] < b"\xc0" or names[:1] in (b"\xd9", b"\xda", b"\xdb"))


def integer(value: int) -> bytes:
    """Return the word of a natural number."""
    if value < 0x80:
        return bytes([value])
    return next(
        bytes([code]) + value.to_bytes(width, "big")
        for code, width in zip(range(0xCC, 0xD0), (1, 2, 4, 8), strict=True)
        if value < 256**width
    )


def text(value: str) -> bytes:
    """Return text, with its word."""
    data = value.encode()
    return (bytes([0xA0 + len(data)]) if len(data) < 32 else _sized("text", len(data))) + data


def map_of(count: int) -> bytes:
    """Return the word of a map of so many pairs."""
    return bytes([0x80 + count]) if count < 16 else _sized("map", count)


def array_of(count: int) -> bytes:
    """Return the word of an array of so many items."""
    return bytes([0x90 + count]) if count < 16 else _sized("array", count)


def bytes_of(count: int) -> bytes:
    """Return the word of so many bytes."""
    return _sized("bytes", count)


def extension_of(code: int, count: int) -> bytes:
    """Return the word of an extension of so many bytes."""
    fixed = _FIXED_EXTENSIONS.get(count)
    return (_sized("extension", count) if fixed is None else bytes([fixed])) + bytes([code])


def _sized(kind: Kind, count: int) -> bytes:
    """Return the shortest word that says what follows with a length."""
    return next(
        bytes([byte]) + count.to_bytes(width, "big")
        for byte, (of, width) in _SIZED.items()
        if of == kind and count < 256**width
    )
