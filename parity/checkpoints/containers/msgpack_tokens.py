"""The tokens of msgpack, read one at a time, and their encoding.

A token is a number, a constant, or a header that declares the bytes or tokens that follow.  See
https://github.com/msgpack/msgpack/blob/master/spec.md.
"""

import struct
from dataclasses import dataclass
from typing import Any, Literal

from parity.checkpoints.containers.container import File
from vit_spec import InputError

Kind = Literal["value", "map", "array", "text", "bytes", "extension"]

_READ_SIZE = 512  # bytes per read: a few tokens, without the array that follows
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBER_FORMATS = dict(zip((0xCA, 0xCB, *range(0xCC, 0xD4)), (f">{code}" for code in "fdBHIQbhiq"), strict=True))
_LENGTH_PREFIXED: dict[int, tuple[Kind, int]] = {  # first byte -> kind, and width of its length in bytes
    **dict(zip((0xC4, 0xC5, 0xC6), (("bytes", 1), ("bytes", 2), ("bytes", 4)), strict=True)),
    **dict(zip((0xC7, 0xC8, 0xC9), (("extension", 1), ("extension", 2), ("extension", 4)), strict=True)),
    **dict(zip((0xD9, 0xDA, 0xDB), (("text", 1), ("text", 2), ("text", 4)), strict=True)),
    **dict(zip((0xDC, 0xDD), (("array", 2), ("array", 4)), strict=True)),
    **dict(zip((0xDE, 0xDF), (("map", 2), ("map", 4)), strict=True)),
}
_FIXED_EXTENSIONS = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}
_FIXED_EXTENSION_LENGTHS = {code: length for length, code in _FIXED_EXTENSIONS.items()}


@dataclass(frozen=True)
class Token:
    """A token of msgpack.

    kind: "value" for a number, a boolean or nil; otherwise the kind of object that the token declares.
    value: the number, boolean or None if the kind is "value"; otherwise the number of bytes, items or pairs that follow.
    extension_type: the type code of an extension; 0 for other kinds.
    """

    kind: Kind
    value: Any
    extension_type: int = 0


class Reader:
    """A reader of tokens from a position in a file.

    Every method raises InputError at the end of the file; the caller adds the path.
    """

    def __init__(self, file: File) -> None:
        self.file, self.position = file, 0
        self._buffer, self._buffer_start = b"", 0

    @property
    def bytes_left(self) -> int:
        """Bytes from the position to the end of the file."""
        return self.file.size - self.position

    def read_bytes(self, count: int) -> bytes:
        """Return the next `count` bytes.

        Raises:
            InputError: the file ends before.
        """
        start = self.position - self._buffer_start
        if start < 0 or start + count > len(self._buffer):
            self._buffer, self._buffer_start, start = (
                self.file.read(self.position, max(count, _READ_SIZE)),
                self.position,
                0,
            )
        data = self._buffer[start : start + count]
        if len(data) < count:
            raise InputError("it ends too early")
        self.position += count
        return data

    def read_token(self) -> Token:
        """Return the next token.

        Raises:
            InputError: the token is invalid, or declares more bytes, items or pairs than the rest of the file can have.
        """
        token = self._read_token()
        if token.kind != "value" and token.value * (2 if token.kind == "map" else 1) > self.bytes_left:
            raise InputError(f"it declares a {token.kind} of {token.value}, but ends earlier")
        return token

    def read_text(self, token: Token, max_bytes: int) -> str:
        """Return the text that a token declared.

        Raises:
            InputError: the token does not declare text, or more than `max_bytes` bytes.
        """
        if token.kind != "text" or token.value > max_bytes:
            raise InputError(f"it has a {token.kind}, expected text of at most {max_bytes} bytes")
        try:
            return self.read_bytes(token.value).decode()
        except UnicodeDecodeError:
            raise InputError("its text is not UTF-8") from None

    def _read_token(self) -> Token:
        byte = self.read_bytes(1)[0]
        if byte < 0x80 or byte >= 0xE0:
            return Token("value", byte if byte < 0x80 else byte - 256)
        if byte < 0x90:
            return Token("map", byte & 0x0F)
        if byte < 0xA0:
            return Token("array", byte & 0x0F)
        if byte < 0xC0:
            return Token("text", byte & 0x1F)
        if byte in _CONSTANTS:
            return Token("value", _CONSTANTS[byte])
        if byte in _NUMBER_FORMATS:
            format = _NUMBER_FORMATS[byte]
            return Token("value", struct.unpack(format, self.read_bytes(struct.calcsize(format)))[0])
        if byte in _FIXED_EXTENSION_LENGTHS:
            return Token("extension", _FIXED_EXTENSION_LENGTHS[byte], self._read_extension_type())
        if byte not in _LENGTH_PREFIXED:
            raise InputError(f"no token begins with byte {byte:#x}")
        kind, width = _LENGTH_PREFIXED[byte]
        count = int.from_bytes(self.read_bytes(width), "big")
        return Token(kind, count, self._read_extension_type() if kind == "extension" else 0)

    def _read_extension_type(self) -> int:
        return int.from_bytes(self.read_bytes(1), "big", signed=True)


def starts_with_string_key_map(head: bytes) -> bool:
    """Return whether a file begins with a map whose first key is text, or is an empty map."""
    if head[:1] == b"\x80":  # pickles begin with this byte too
        return len(head) == 1
    key = head[{b"\xde": 3, b"\xdf": 5}.get(head[:1], 1) :]
    is_map = head[:1] in (b"\xde", b"\xdf") or b"\x81" <= head[:1] <= b"\x8f"
    return is_map and (b"\xa0" <= key[:1] < b"\xc0" or key[:1] in (b"\xd9", b"\xda", b"\xdb"))


def encode_integer(value: int) -> bytes:
    """Return the encoding of a non-negative integer."""
    if value < 0x80:
        return bytes([value])
    return next(
        bytes([code]) + value.to_bytes(width, "big")
        for code, width in zip(range(0xCC, 0xD0), (1, 2, 4, 8), strict=True)
        if value < 256**width
    )


def encode_text(value: str) -> bytes:
    """Return the encoding of a text."""
    data = value.encode()
    return (bytes([0xA0 + len(data)]) if len(data) < 32 else _header("text", len(data))) + data


def map_header(count: int) -> bytes:
    """Return the header of a map of `count` pairs."""
    return bytes([0x80 + count]) if count < 16 else _header("map", count)


def array_header(count: int) -> bytes:
    """Return the header of an array of `count` items."""
    return bytes([0x90 + count]) if count < 16 else _header("array", count)


def bytes_header(count: int) -> bytes:
    """Return the header of `count` bytes."""
    return _header("bytes", count)


def extension_header(extension_type: int, count: int) -> bytes:
    """Return the header of an extension of `count` bytes."""
    fixed = _FIXED_EXTENSIONS.get(count)
    return (_header("extension", count) if fixed is None else bytes([fixed])) + bytes([extension_type])


def _header(kind: Kind, count: int) -> bytes:
    """Return the shortest header of a kind that can declare `count`."""
    return next(
        bytes([byte]) + count.to_bytes(width, "big")
        for byte, (other_kind, width) in _LENGTH_PREFIXED.items()
        if other_kind == kind and count < 256**width
    )
