"""The directory of a zip archive, and where its members lie.

Members are read in place, so one parser that holds the directory, the members' own headers and their extents to one
another serves .pth and .npz alike.  See https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3 and 4.5.
"""

import struct
from dataclasses import dataclass

from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import Window
from vit_spec import InputError

MAGIC = b"PK\3\4"
STORED, DEFLATED = 0, 8  # methods of compression

_DIRECTORY = 1 << 25  # bytes of a directory
_COST = 8  # objects of the budget that a member counts as
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s4B4H3I5H2I")
_LOCAL = 30  # bytes of a member's own header, before its name
_COMMENT = 1 << 16  # bytes at most after the end of the directory
_BARRED = 0x2061  # flags: encryption, patches, strong encryption, a masked directory


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an archive.

    window: its bytes as they lie in the file.
    size, crc: its bytes once decompressed, and their checksum.
    method: how it is compressed.
    """

    name: str
    window: Window
    size: int
    crc: int
    method: int

    def read(self, longest: int) -> bytes:
        """Return the bytes of a small member that is not compressed, at most `longest`."""
        return self.window.read(0, min(longest, self.window.length))


def members(window: Window, budget: Budget) -> dict[str, Member]:
    """Return the members of an archive by name, in the order of its directory.

    Raises:
        InputError: a damaged archive, or members that repeat a name or lie over one another; the caller names the file.
    """
    start, size, count = _directory(window)
    if size > _DIRECTORY or count > size // _ENTRY.size or start + size > window.length:
        raise InputError(f"a zip directory of {size:,} bytes and {count:,} members")
    budget.make(_COST * count)
    data = window.read(start, size)
    found: dict[str, Member] = {}
    extents: list[tuple[int, int]] = []
    at = 0
    for _ in range(count):
        member, begin, at = _member(window, data, at)
        if member.name in found:
            raise InputError(f"holds {_quoted(member.name)} twice")
        found[member.name] = member
        extents.append((begin, member.window.start - window.start + member.window.length))
    if at != size:
        raise InputError("a zip directory that is longer than its members")
    end = 0
    for begin, following in sorted(extents):
        if begin < end:
            raise InputError("has members that lie over one another")
        end = following
    if end > start:
        raise InputError("has a member that lies over the zip directory")
    return found


def _directory(window: Window) -> tuple[int, int, int]:
    """Return where the directory begins, its bytes and its number of members."""
    tail = min(window.length, _COMMENT + _END.size)
    data = window.read(window.length - tail, tail)
    place = data.rfind(b"PK\5\6")
    if place < 0 or len(data) - place < _END.size:
        raise InputError("no zip directory: it is incomplete")
    *_, count, size, start, _ = _END.unpack_from(data, place)
    end = window.length - tail + place
    locator = window.read(end - _LOCATOR.size, _LOCATOR.size) if end >= _LOCATOR.size else b""
    if locator[:4] == b"PK\6\7":
        end = _LOCATOR.unpack(locator)[2]
        larger = window.read(end, _END64.size)
        if larger[:4] != b"PK\6\6" or len(larger) < _END64.size:
            raise InputError("a zip directory that is not where it is said to be")
        *_, count, size, start = _END64.unpack(larger)
    if start + size != end:
        raise InputError("a zip directory that is not where it is said to be")
    return start, size, count


def _member(window: Window, data: bytes, at: int) -> tuple[Member, int, int]:
    """Return a member of the directory, where its header begins, and where its successor stands in the directory."""
    if len(data) - at < _ENTRY.size:
        raise InputError("a zip directory that ends too early")
    fields = _ENTRY.unpack_from(data, at)
    if fields[0] != b"PK\1\2":
        raise InputError("a zip directory with something else in it")
    flags, method, crc, packed, size, names, extras, comments = *fields[5:7], *fields[9:15]
    begin, at = fields[-1], at + _ENTRY.size
    raw, extra = data[at : at + names], data[at + names : at + names + extras]
    at += names + extras + comments
    try:
        name = raw.decode("utf-8" if flags & 0x800 else "cp437")
    except UnicodeDecodeError:
        raise InputError("a member whose name is not Unicode") from None
    if "\0" in name:
        raise InputError(f"{_quoted(name)} is no name of a member")
    if flags & _BARRED:
        raise InputError(f"{_quoted(name)} is encrypted")
    size, packed, begin = _large(extra, size, packed, begin)
    header = window.read(begin, _LOCAL + names)
    if header[:4] != MAGIC or header[_LOCAL:] != raw or int.from_bytes(header[26:28], "little") != names:
        raise InputError(f"{_quoted(name)} is not where the zip directory says")
    start = begin + _LOCAL + names + int.from_bytes(header[28:30], "little")
    if start + packed > window.length:
        raise InputError(f"{_quoted(name)} is not whole")
    if method == STORED and packed != size:
        raise InputError(f"{_quoted(name)} has two sizes")
    return Member(name, Window(window.file, window.start + start, packed), size, crc, method), begin, at


def _large(extra: bytes, *numbers: int) -> list[int]:
    """Return numbers of a directory's entry, those of more than 32 bits from the extra field that has them."""
    wide: list[int] = []
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            values = extra[at + 4 : at + 4 + length]
            wide = list(struct.unpack(f"<{len(values) // 8}Q", values[: len(values) // 8 * 8]))
            break
        at += 4 + length
    found = []
    for number in numbers:
        if number == 0xFFFFFFFF and not wide:
            raise InputError("a zip directory without the sizes of its members")
        found.append(wide.pop(0) if number == 0xFFFFFFFF else number)
    return found


def _quoted(name: str) -> str:
    return repr(name) if len(name) <= 200 else f"{name[:200]!r}..."
