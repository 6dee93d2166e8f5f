"""npz: a zip of .npy files, one an array, as `numpy.savez` writes it and as Google's Vision Transformers come.

See https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.  numpy has no bfloat16; big_vision keeps it as
two bytes of anything, `|V2`, and so does this.  Nothing is unpickled and nothing evaluated.
"""

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from parity.checkpoints.containers import npy, strict, zips
from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.checksum import Checksum
from parity.checkpoints.containers.container import Container, Contents, File, Sink, Slot, Stored, Window, Words
from parity.checkpoints.containers.inflate import Inflated
from parity.checkpoints.layout import Array
from vit_spec import InputError

NAME = "npz"
SUFFIX = ".npz"

_NOTES = "__metadata__/"  # what the names of notes begin with in the zip
_TEXT = 2**24  # bytes of all text
_ENTRY = 16  # objects of the budget that an array counts as
_RATIO = 1032  # deflate makes no more of a byte: https://zlib.net/zlib_tech.html
_LARGE, _DENSE = 2**28, 64  # bytes from which on an array may take at most so many times its compressed size
_DATE = (1980, 1, 1, 0, 0, 0)  # the same arrays give the same file
_NOTHING = Slot((0,), np.dtype(bool))


def _recognises(path: Path, head: bytes) -> bool:
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]  # of the zip's first member
    return head.startswith(npy.MAGIC) or (head.startswith(zips.MAGIC) and name.endswith(b".npy"))


def _open(path: Path, budget: Budget | None = None) -> Contents:
    file, budget = File(path), budget or Budget()
    if file.read(0, len(npy.MAGIC)) == npy.MAGIC:
        raise InputError(f"{path} is one array without a name, or a pickle: load it where you trust it, and numpy.savez it")
    arrays: dict[Words, Stored] = {}
    notes: dict[str, Any] = {}
    try:
        room = _TEXT
        for member in zips.members(Window.of(file), budget).values():
            budget.make(_ENTRY)
            key = member.name.removesuffix(".npy")
            try:
                value = _value(member, room)
            except InputError as error:
                raise InputError(f"{strict.quoted(key)}: {error}") from None
            if isinstance(value, Stored):
                arrays[(key,)] = value
                continue
            name = key.removeprefix(_NOTES)
            if name in notes:
                raise InputError(f"{strict.quoted(name)} is there twice")
            notes[name], room = value, room - len(value) - len(name)
    except InputError as error:
        raise InputError(f"{path} is not an npz file that can be read, or is damaged ({error}): write it again") from None
    return Contents(NAME, arrays, notes)


def _value(member: zips.Member, room: int) -> Stored | str:
    """Return the array, or the text, which may take `room` bytes."""
    if not member.name.endswith(".npy"):
        raise InputError("is no .npy file")
    if member.method not in (zips.STORED, zips.DEFLATED):
        raise InputError("is compressed in a way that numpy does not write")
    window, packed = member.window, member.window.length
    if member.size > _RATIO * packed + _RATIO:
        raise InputError(f"{packed} bytes cannot be {member.size}")
    if member.size > max(_LARGE, _DENSE * packed):
        raise InputError(f"{packed:,} bytes that become {member.size:,}, which no weights do: save it uncompressed")
    source: npy.Source
    if member.method == zips.DEFLATED:
        source = Inflated(window.file, window.start, packed, member.size, member.crc)
    else:
        source = npy.Plain(window, Checksum(window, member.crc))
    header = npy.parse(source.head(npy.LIMIT))
    if header.length + header.nbytes != member.size:
        raise InputError(f"its {member.size} bytes are not those of {header.descr} {header.shape}")
    if not header.is_text:
        return npy.stored(source, header)
    if header.shape or header.nbytes > room:
        raise InputError("is text that is not a note: leave it out")
    return npy.text(source, header)


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
