"""npz: a zip of .npy files, one an array, as `numpy.savez` writes it and as Google's Vision Transformers come.

See https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.  numpy has no bfloat16; big_vision keeps it as
two bytes of anything, `|V2`, and so does this.  Nothing is unpickled and nothing evaluated.
"""

import io
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parity.containers import npy, strict
from parity.containers.container import Container, Contents, File, Sink, Slot, Stored, Words
from parity.containers.inflate import Inflated
from parity.layout import Array
from vit_spec import InputError

NAME = "npz"
SUFFIX = ".npz"

_NOTES = "__metadata__/"  # what the names of notes begin with in the zip
_DIRECTORY = 2**24  # bytes of a zip's directory, some 200 000 arrays; bounds what opening one takes
_TEXT = 2**24  # bytes of all text
_MAGIC = b"PK\3\4"
_RATIO = 1032  # deflate makes no more of a byte: https://zlib.net/zlib_tech.html
_DATE = (1980, 1, 1, 0, 0, 0)  # the same arrays give the same file
_NOTHING = Slot((0,), np.dtype(bool))


def _recognises(path: Path, head: bytes) -> bool:
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]  # of the zip's first member
    return head.startswith(npy.MAGIC) or (head.startswith(_MAGIC) and name.endswith(b".npy"))


def _open(path: Path) -> Contents:
    file = File(path)
    if file.read(0, len(npy.MAGIC)) == npy.MAGIC:
        raise InputError(f"{path} is one array without a name, or a pickle: load it where you trust it, and numpy.savez it")
    arrays: dict[Words, Stored] = {}
    notes: dict[str, Any] = {}
    try:
        room = _TEXT
        for member in _members(file):
            try:
                value = member.value(file, room)
            except InputError as error:
                raise InputError(f"{strict.quoted(member.name)}: {error}") from None
            if isinstance(value, Stored):
                arrays[(member.name,)] = value
                continue
            name = member.name.removeprefix(_NOTES)
            if name in notes:
                raise InputError(f"{strict.quoted(name)} is there twice")
            notes[name], room = value, room - len(value) - len(name)
    except InputError as error:
        raise InputError(f"{path} is not an npz file that can be read, or is damaged ({error}): write it again") from None
    return Contents(NAME, arrays, notes)


@dataclass(frozen=True)
class _Member:
    """A file in the zip: where its bytes lie, how many they are as they lie and as they were, and what they sum to."""

    name: str
    start: int
    packed: int
    size: int
    crc: int
    deflated: bool

    def value(self, file: File, room: int) -> Stored | str:
        """Return the array, or the text, which may take `room` bytes."""
        if self.size > _RATIO * self.packed + _RATIO:
            raise InputError(f"{self.packed} bytes cannot be {self.size}")
        source: npy.Source
        if self.deflated:
            source = Inflated(file, self.start, self.packed, self.size, self.crc)
        else:
            source = npy.Plain(file, self.start, self.size, self.crc)
        header = npy.parse(source.head(npy.LIMIT))
        if header.length + header.nbytes != self.size:
            raise InputError(f"its {self.size} bytes are not those of {header.descr} {header.shape}")
        if not header.is_text:
            return npy.stored(source, header)
        if header.shape or header.nbytes > room:
            raise InputError("is text that is not a note: leave it out")
        return npy.text(source, header)


class _Bounded(io.FileIO):
    """A file of which zipfile cannot read much at once."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > _DIRECTORY:
            raise InputError(f"a directory of {size} bytes")
        return super().read(size) or b""


def _members(file: File) -> list[_Member]:
    """Return the members of a zip, held to their own headers and to one another."""
    try:
        with _Bounded(file.path) as raw, zipfile.ZipFile(raw) as archive:
            infos, end = archive.infolist(), archive.start_dir
    except InputError:
        raise
    except (zipfile.BadZipFile, NotImplementedError, struct.error, OSError, EOFError, ValueError, OverflowError) as error:
        raise InputError(f"no zip: {error}") from None
    members: dict[str, _Member] = {}
    for info in sorted(infos, key=lambda info: info.header_offset, reverse=True):
        member = _member(file, info)
        if member.start + member.packed > end:
            raise InputError(f"{strict.quoted(member.name)} lies over what follows it")
        if member.name in members:
            raise InputError(f"{strict.quoted(member.name)} is there twice")
        members[member.name] = member
        end = info.header_offset
    return [members[info.filename.removesuffix(".npy")] for info in infos]


def _member(file: File, info: zipfile.ZipInfo) -> _Member:
    name = info.orig_filename
    if not name.endswith(".npy") or name != info.filename:
        raise InputError(f"{strict.quoted(name)} is no .npy file")
    if info.flag_bits & 0x2061:  # encryption, strong encryption, a masked directory, and patches
        raise InputError(f"{strict.quoted(name)} is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InputError(f"{strict.quoted(name)} is compressed in a way that numpy does not write")
    raw = name.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
    header = file.read(info.header_offset, 30 + len(raw)) if 0 <= info.header_offset < file.size else b""
    if header[:4] != _MAGIC or header[30:] != raw or int.from_bytes(header[26:28], "little") != len(raw):
        raise InputError(f"{strict.quoted(name)} is not where the zip's directory says")
    start = info.header_offset + 30 + len(raw) + int.from_bytes(header[28:30], "little")
    deflated = info.compress_type == zipfile.ZIP_DEFLATED
    if not deflated and info.compress_size != info.file_size:
        raise InputError(f"{strict.quoted(name)} has two sizes")
    return _Member(name.removesuffix(".npy"), start, info.compress_size, info.file_size, info.CRC, deflated)


@contextmanager
def _create(path: Path, slots: Mapping[str, Slot], notes: Mapping[str, str]) -> Iterator[Sink]:
    for key, slot in slots.items():
        if slot.dtype not in npy.DESCRIPTIONS:
            raise InputError(f"{path}: {strict.quoted(key)} is {slot.dtype}, which npz has no word for: write safetensors")
        if key.startswith(_NOTES) or "\0" in key:
            raise InputError(f"{path}: {strict.quoted(key)} is no key for an array in an npz file: rename it")
    with open(path, "xb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            for name, text in notes.items():
                with archive.open(_entry(_NOTES + name), "w") as member:
                    np.lib.format.write_array(member, np.array(text), (1, 0), allow_pickle=False)
            writer = _Writer(archive, slots)
            try:
                yield writer
                writer.finish()
            finally:
                writer.close()


class _Writer:
    """The sink: one member after the other."""

    def __init__(self, archive: zipfile.ZipFile, slots: Mapping[str, Slot]) -> None:
        self._archive, self._slots = archive, iter(slots.items())
        self._member: Any = None
        self._key: str | None = None
        self._slot = _NOTHING
        self._written = 0  # bytes of the array

    def put(self, key: str, first: int, entries: Array) -> None:
        while self._key != key:
            if not self._next():
                raise ValueError(f"{key} is not an array that is left to write")
        if entries.dtype != self._slot.dtype or first * entries.itemsize != self._written:
            raise ValueError(
                f"{key}: {entries.dtype} from {first}, expected {self._slot.dtype} after {self._written} bytes"
            )
        self._member.write(entries.view(np.uint8).data)
        self._written += entries.nbytes

    def finish(self) -> None:
        """Write the arrays without entries that are left."""
        while self._next():
            pass

    def close(self) -> None:
        """Let go of the member: a zip is not closed while one is being written."""
        if self._member is not None:
            self._member.close()

    def _next(self) -> bool:
        if self._written != self._slot.nbytes:
            raise ValueError(f"{self._written} of the {self._slot.nbytes} bytes of {self._key} were put")
        self.close()
        self._key, self._slot = next(self._slots, (None, _NOTHING))
        self._written = 0
        if self._key is None:
            return False
        self._member = self._archive.open(_entry(self._key), "w", force_zip64=True)
        header = {"descr": npy.DESCRIPTIONS[self._slot.dtype], "fortran_order": False, "shape": self._slot.shape}
        np.lib.format.write_array_header_1_0(self._member, header)
        return True


def _entry(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(name + ".npy", _DATE)


CONTAINER = Container(
    name=NAME,
    what="npz: numpy's zip of arrays, as Google's checkpoints are",
    recognises=_recognises,
    open=_open,
    suffixes=(SUFFIX,),
    create=_create,
    carries_notes=True,
)
