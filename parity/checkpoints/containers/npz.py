"""npz: a zip of .npy files, one for each array, as `numpy.savez` writes it; Google's Vision Transformers use it.

See https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.  numpy has no bfloat16: big_vision and this
module store it as two untyped bytes, `|V2`.  Reading never unpickles or evaluates anything.
"""

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from parity.checkpoints.containers import header_checks, npy, zip_directory
from parity.checkpoints.containers.budget import Budget, max_array_bytes
from parity.checkpoints.containers.checksum import Checksum
from parity.checkpoints.containers.container import (
    ArraySpec,
    Container,
    Contents,
    File,
    FileSlice,
    KeyPath,
    StoredArray,
    Writer,
)
from parity.checkpoints.containers.inflate import DeflatedFile
from parity.checkpoints.layout import Array
from vit_spec import InputError

NAME = "npz"
SUFFIX = ".npz"

_METADATA_PREFIX = "__metadata__/"  # prefix of the members with metadata
_MAX_TEXT_BYTES = 2**24  # of all text in a file
_ARRAY_COST = 16  # objects charged to the budget
_MAX_DEFLATE_RATIO = 1032  # deflate cannot compress more: https://zlib.net/zlib_tech.html
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)  # fixed, so that the same arrays give the same file
_EMPTY_SPEC = ArraySpec((0,), np.dtype(bool))


def _recognises(path: Path, head: bytes) -> bool:
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]  # name of the first member of the zip
    return head.startswith(npy.MAGIC) or (head.startswith(zip_directory.MAGIC) and name.endswith(b".npy"))


def _open(path: Path, budget: Budget | None = None) -> Contents:
    file, budget = File(path), budget or Budget()
    if file.read(0, len(npy.MAGIC)) == npy.MAGIC:
        raise InputError(
            f"{path} is one array without a name, or a pickle: if you trust it, load it and write it with numpy.savez"
        )
    arrays: dict[KeyPath, StoredArray] = {}
    metadata: dict[str, Any] = {}
    try:
        max_text_bytes = _MAX_TEXT_BYTES
        for member in zip_directory.read_members(FileSlice.whole(file), budget).values():
            budget.spend(_ARRAY_COST)
            key = member.name.removesuffix(".npy")
            try:
                value = _open_member(member, max_text_bytes)
            except InputError as error:
                raise InputError(f"{header_checks.quote(key)}: {error}") from None
            if isinstance(value, StoredArray):
                arrays[(key,)] = value
                continue
            name = key.removeprefix(_METADATA_PREFIX)
            if name in metadata:
                raise InputError(f"it has {header_checks.quote(name)} twice")
            metadata[name], max_text_bytes = value, max_text_bytes - len(value) - len(name)
    except InputError as error:
        raise InputError(f"{path} is not an npz file that can be read, or is damaged ({error}): write it again") from None
    return Contents(NAME, arrays, metadata)


def _open_member(member: zip_directory.Member, max_text_bytes: int) -> StoredArray | str:
    """Return the array in a member, or its text, which may have at most `max_text_bytes` bytes."""
    if not member.name.endswith(".npy"):
        raise InputError("not a .npy file")
    if member.method not in (zip_directory.STORED, zip_directory.DEFLATED):
        raise InputError("it is compressed in a way that numpy does not use")
    file_slice, compressed_size = member.file_slice, member.file_slice.length
    if member.size > _MAX_DEFLATE_RATIO * compressed_size + _MAX_DEFLATE_RATIO:
        raise InputError(f"{compressed_size} compressed bytes cannot decompress to {member.size}")
    if member.size > max_array_bytes(compressed_size):
        raise InputError(
            f"{compressed_size:,} bytes decompress to {member.size:,}, too many for weights: save it uncompressed"
        )
    source: npy.ByteSource
    if member.method == zip_directory.DEFLATED:
        source = DeflatedFile(file_slice.file, file_slice.start, compressed_size, member.size, member.crc)
    else:
        source = npy.UncompressedFile(file_slice, Checksum(file_slice, member.crc))
    header = npy.parse_header(source.head(npy.MAX_HEADER_BYTES))
    if header.length + header.nbytes != member.size:
        raise InputError(f"it has {member.size} bytes, not those of {header.descr} {header.shape}")
    if not header.is_text:
        return npy.open_array(source, header)
    if header.shape or header.nbytes > max_text_bytes:
        raise InputError("it is text, but not a short string: leave it out")
    return npy.read_text(source, header)


@contextmanager
def _create(path: Path, specs: Mapping[str, ArraySpec], metadata: Mapping[str, str]) -> Iterator[Writer]:
    for key, spec in specs.items():
        if spec.dtype not in npy.DESCRS:
            raise InputError(
                f"{path}: {header_checks.quote(key)} is {spec.dtype}, which npz cannot store: write safetensors"
            )
        if key.startswith(_METADATA_PREFIX) or "\0" in key:
            raise InputError(f"{path}: {header_checks.quote(key)} is not a valid key in an npz file: rename it")
    with open(path, "xb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            for name, text in metadata.items():
                with archive.open(_zip_info(_METADATA_PREFIX + name), "w") as member:
                    np.lib.format.write_array(member, np.array(text), (1, 0), allow_pickle=False)
            writer = _NpzWriter(archive, specs)
            try:
                yield writer
                writer.finish()
            finally:
                writer.close()


class _NpzWriter:
    """The `Writer` of an npz file: it writes one member after the other."""

    def __init__(self, archive: zipfile.ZipFile, specs: Mapping[str, ArraySpec]) -> None:
        self._archive, self._specs = archive, iter(specs.items())
        self._member: Any = None
        self._key: str | None = None
        self._spec = _EMPTY_SPEC
        self._written_bytes = 0  # of the current array

    def write(self, key: str, start: int, values: Array) -> None:
        while self._key != key:
            if not self._start_next_array():
                raise ValueError(f"{key} is unknown or already written")
        if values.dtype != self._spec.dtype or start * values.itemsize != self._written_bytes:
            raise ValueError(
                f"{key}: {values.dtype} from {start}, expected {self._spec.dtype} after {self._written_bytes} bytes"
            )
        self._member.write(values.view(np.uint8).data)
        self._written_bytes += values.nbytes

    def finish(self) -> None:
        """Write the remaining arrays, which must have no elements."""
        while self._start_next_array():
            pass

    def close(self) -> None:
        """Close the open member; a zip cannot be closed while a member is open."""
        if self._member is not None:
            self._member.close()

    def _start_next_array(self) -> bool:
        if self._written_bytes != self._spec.nbytes:
            raise ValueError(f"{self._written_bytes} of the {self._spec.nbytes} bytes of {self._key} were written")
        self.close()
        self._key, self._spec = next(self._specs, (None, _EMPTY_SPEC))
        self._written_bytes = 0
        if self._key is None:
            return False
        self._member = self._archive.open(_zip_info(self._key), "w", force_zip64=True)
        header = {"descr": npy.DESCRS[self._spec.dtype], "fortran_order": False, "shape": self._spec.shape}
        np.lib.format.write_array_header_1_0(self._member, header)
        return True


def _zip_info(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(name + ".npy", _TIMESTAMP)


CONTAINER = Container(
    name=NAME,
    description="npz: numpy's zip of arrays, the container of Google's checkpoints",
    recognises=_recognises,
    open=_open,
    suffixes=(SUFFIX,),
    create=_create,
    stores_metadata=True,
)
