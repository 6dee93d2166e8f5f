"""The directory of a zip archive: names, offsets and sizes of its members.

Readers of .pth and .npz files read members in place, so they need the offsets.  The parser also verifies that the
directory agrees with the headers of the members, and that no members overlap.  See
https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3 and 4.5.
"""

import struct
from dataclasses import dataclass

from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import FileSlice
from parity.checkpoints.containers.header_checks import quote
from vit_spec import InputError

MAGIC = b"PK\3\4"
STORED, DEFLATED = 0, 8  # compression methods

_MAX_DIRECTORY_BYTES = 1 << 25
_MEMBER_COST = 8  # objects charged to the budget
_END_RECORD = struct.Struct("<4s4H2IH")
_ZIP64_LOCATOR = struct.Struct("<4sIQI")
_ZIP64_END_RECORD = struct.Struct("<4sQ2H2I4Q")
_DIRECTORY_ENTRY = struct.Struct("<4s4B4H3I5H2I")
_LOCAL_HEADER_BYTES = 30  # without the name
_MAX_COMMENT_BYTES = 1 << 16  # after the end record
_UNSUPPORTED_FLAGS = 0x2061  # encryption, patched data, strong encryption, masked directory


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an archive.

    name: its path in the archive.
    file_slice: its bytes in the file, compressed or not.
    size, crc: number and CRC-32 of its bytes after decompression.
    method: compression method, such as `STORED` or `DEFLATED`.
    """

    name: str
    file_slice: FileSlice
    size: int
    crc: int
    method: int

    def read(self, max_bytes: int) -> bytes:
        """Return the first bytes of an uncompressed member, at most `max_bytes`."""
        return self.file_slice.read(0, min(max_bytes, self.file_slice.length))


def read_members(file_slice: FileSlice, budget: Budget) -> dict[str, Member]:
    """Return the members of an archive by name, in the order of the directory.

    Raises:
        InputError: the archive is damaged, a name occurs twice, or members overlap; the caller adds the path.
    """
    start, size, count = _find_directory(file_slice)
    if size > _MAX_DIRECTORY_BYTES or count > size // _DIRECTORY_ENTRY.size or start + size > file_slice.length:
        raise InputError(f"its zip directory claims {size:,} bytes and {count:,} members")
    budget.spend(_MEMBER_COST * count)
    data = file_slice.read(start, size)
    members_by_name: dict[str, Member] = {}
    extents: list[tuple[int, int]] = []
    position = 0
    for _ in range(count):
        member, header_start, position = _parse_member(file_slice, data, position)
        if member.name in members_by_name:
            raise InputError(f"it has {quote(member.name)} twice")
        members_by_name[member.name] = member
        extents.append((header_start, member.file_slice.start - file_slice.start + member.file_slice.length))
    if position != size:
        raise InputError("its zip directory has more bytes than its members need")
    end = 0
    for header_start, next_end in sorted(extents):
        if header_start < end:
            raise InputError("its members overlap")
        end = next_end
    if end > start:
        raise InputError("a member overlaps the zip directory")
    return members_by_name


def _find_directory(file_slice: FileSlice) -> tuple[int, int, int]:
    """Return the offset of the directory, its size in bytes, and its number of members."""
    tail = min(file_slice.length, _MAX_COMMENT_BYTES + _END_RECORD.size)
    data = file_slice.read(file_slice.length - tail, tail)
    end_record_start = data.rfind(b"PK\5\6")
    if end_record_start < 0 or len(data) - end_record_start < _END_RECORD.size:
        raise InputError("it has no zip directory, so it is incomplete")
    *_, count, size, start, _ = _END_RECORD.unpack_from(data, end_record_start)
    end = file_slice.length - tail + end_record_start
    locator = file_slice.read(end - _ZIP64_LOCATOR.size, _ZIP64_LOCATOR.size) if end >= _ZIP64_LOCATOR.size else b""
    if locator[:4] == b"PK\6\7":
        end = _ZIP64_LOCATOR.unpack(locator)[2]
        zip64_record = file_slice.read(end, _ZIP64_END_RECORD.size)
        if zip64_record[:4] != b"PK\6\6" or len(zip64_record) < _ZIP64_END_RECORD.size:
            raise InputError("its zip directory is not at the offset given")
        *_, count, size, start = _ZIP64_END_RECORD.unpack(zip64_record)
    if start + size != end:
        raise InputError("its zip directory is not at the offset given")
    return start, size, count


def _parse_member(file_slice: FileSlice, data: bytes, position: int) -> tuple[Member, int, int]:
    """Parse the directory entry at `position`.

    Return the member, the offset of its local header, and the position of the next entry.
    """
    if len(data) - position < _DIRECTORY_ENTRY.size:
        raise InputError("its zip directory ends too early")
    fields = _DIRECTORY_ENTRY.unpack_from(data, position)
    if fields[0] != b"PK\1\2":
        raise InputError("its zip directory has an invalid entry")
    flags, method, crc, compressed_size, size, name_length, extra_length, comment_length = *fields[5:7], *fields[9:15]
    header_start, position = fields[-1], position + _DIRECTORY_ENTRY.size
    raw_name, extra = (
        data[position : position + name_length],
        data[position + name_length : position + name_length + extra_length],
    )
    position += name_length + extra_length + comment_length
    try:
        name = raw_name.decode("utf-8" if flags & 0x800 else "cp437")
    except UnicodeDecodeError:
        raise InputError("the name of a member is not Unicode") from None
    if "\0" in name:
        raise InputError(f"{quote(name)} is not a valid name of a member")
    if flags & _UNSUPPORTED_FLAGS:
        raise InputError(f"{quote(name)} is encrypted")
    size, compressed_size, header_start = _resolve_zip64(extra, size, compressed_size, header_start)
    header = file_slice.read(header_start, _LOCAL_HEADER_BYTES + name_length)
    if (
        header[:4] != MAGIC
        or header[_LOCAL_HEADER_BYTES:] != raw_name
        or int.from_bytes(header[26:28], "little") != name_length
    ):
        raise InputError(f"{quote(name)} is not at the offset in the zip directory")
    start = header_start + _LOCAL_HEADER_BYTES + name_length + int.from_bytes(header[28:30], "little")
    if start + compressed_size > file_slice.length:
        raise InputError(f"{quote(name)} is incomplete")
    if method == STORED and compressed_size != size:
        raise InputError(f"{quote(name)} has two different sizes")
    return (
        Member(name, FileSlice(file_slice.file, file_slice.start + start, compressed_size), size, crc, method),
        header_start,
        position,
    )


def _resolve_zip64(extra: bytes, *fields: int) -> list[int]:
    """Return 32-bit fields of a directory entry; those that overflow are replaced by values of the zip64 extra field."""
    large_values: list[int] = []
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            values = extra[position + 4 : position + 4 + length]
            large_values = list(struct.unpack(f"<{len(values) // 8}Q", values[: len(values) // 8 * 8]))
            break
        position += 4 + length
    resolved = []
    for field in fields:
        if field == 0xFFFFFFFF and not large_values:
            raise InputError("its zip directory lacks the sizes of its members")
        resolved.append(large_values.pop(0) if field == 0xFFFFFFFF else field)
    return resolved
