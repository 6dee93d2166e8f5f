"""`tar:PATTERN`: WebDataset shards (https://github.com/webdataset/webdataset), tar files with KEY.jpg beside KEY.cls.

PATTERN is a tar file, a folder of tar files, a glob, or a range in braces: tar:/data/train-{000000..000146}.tar.  An image
is KEY.jpg, or KEY with another of `decoding.SUFFIXES`.  Its class number is the text of KEY.cls, or "label" or "cls" in
KEY.json; if both files have one, it is the same.  A key ends at the first dot of a file name.  The files of a key are
adjacent and occur once in a shard, and exactly one of them is an image.  The words train, val, validation or test in the
names of the shards give the splits.

The headers are read once, which takes 45 microseconds per image, a minute for ImageNet; then each image is one read.
Compressed archives are refused, because they cannot be read at an offset.
"""

import glob
import itertools
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from train.data.sources.decoding import SUFFIXES, decode, error_text
from train.data.sources.examples import DatasetSplits, Examples, LazyName, PackedStrings, make_examples, name_files
from train.data.sources.files import raise_if_inaccessible, read_range, refuse_holes, walk_files
from train.data.sources.shards import common_folder, group_by_split
from train.data.sources.splitting import MAX_CLASSES, numbered_classes
from train.data.sources.table_columns import is_number
from vit_spec import InputError, bounded_json

_LABEL_SUFFIXES = (".cls", ".json")
_END_MARKER_BYTES = 2 * tarfile.BLOCKSIZE  # a tar file ends with at least so many zero bytes
_MAX_SHARDS = 1 << 16  # that a pattern may stand for
_MAX_EXTENSION_BYTES = 1 << 16  # of a header that extends the next one, such as a long name
_MAX_GLOBAL_FIELDS = 1 << 8  # header fields that apply to all files; git writes one
_EXTENSION_HEADERS = {
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
}
_SPARSE = "a sparse file: pack it without --sparse"
_COMPRESSED_STARTS = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")  # of gzip, bzip2, xz and zstd
_TAR_SUFFIXES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")


def open_splits(place: str) -> DatasetSplits:
    """Open shards; only those of the training images are indexed at once.

    Raises:
        InputError: missing, compressed or damaged files, or images without a class.
    """
    root, files = _list_shards(place)

    def load_later(shards: list[Path]) -> Callable[[], Examples]:
        return lambda: _load_split(shards)

    shards_of = group_by_split(root, files)
    splits = {name: load_later(shards) for name, shards in shards_of.items()}
    base = "train" if "train" in splits else next(iter(splits))
    first = splits[base]()
    return DatasetSplits(place, splits | {base: lambda: first}, "classes", numbered_classes(first.targets, place))


def _list_shards(place: str) -> tuple[Path, list[Path]]:
    """Return the folder that contains all shards, and the shards."""
    path = Path(place)
    if path.is_dir():
        files = sorted(path / name for name in walk_files(str(path), _TAR_SUFFIXES))
    elif path.is_file():
        files = [path]
    elif "{" in place:
        files = [Path(name) for name in dict.fromkeys(itertools.islice(expand_braces(str(path)), _MAX_SHARDS + 1))]
        if len(files) > _MAX_SHARDS:
            raise InputError(f"{place} is more than {_MAX_SHARDS:,} files: give a range of shards that exist")
    else:
        files = [Path(name) for name in sorted(glob.glob(str(path)))]
    if not files:
        raise InputError(f"{place} matches no tar file: give tar:PATTERN, such as tar:/data/train-{{000000..000146}}.tar")
    for file in files:
        if not file.is_file():
            raise InputError(f"{file} is not there: give a range of shards that exist")
        if file.suffix in (".gz", ".tgz", ".bz2", ".xz", ".zst"):
            raise _compressed_error(file)
    return path if path.is_dir() else common_folder(files), files


def _compressed_error(file: Path) -> InputError:
    return InputError(f"{file} is compressed and cannot be read at an offset: decompress it to a .tar first")


def expand_braces(pattern: str) -> Iterator[str]:
    """Expand {a,b} and {000..146} as a shell does: numbers keep the width of the first.

    Raises:
        InputError: a range has too many numbers.
    """
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        yield pattern
        return
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    words = match[1].split(",")
    if ends:
        first, last = int(ends[1]), int(ends[2])
        if last - first >= _MAX_SHARDS:
            raise InputError(f"{pattern} is more than {_MAX_SHARDS:,} files: give a range of shards that exist")
        words = [str(number).zfill(len(ends[1])) for number in range(first, last + 1)]
    for word in words:
        yield from expand_braces(pattern[: match.start()] + word + pattern[match.end() :])


class _TarImages:
    """An `ImageReader` of byte ranges of tar files.

    ranges: (N, 3) int64, the index of an image's file in `files`, its offset and its size in bytes.
    names: names of the images in their files.
    """

    def __init__(self, files: list[str], ranges: NDArray[np.int64], names: PackedStrings) -> None:
        self._files, self._ranges, self._names = files, ranges, names
        self.files = name_files(files)

    def __call__(self, i: int) -> Image.Image:
        number, offset, size = self._ranges[i].tolist()
        try:
            data = read_range(self._files[number], offset, size)
        except (OSError, EOFError, InputError) as error:
            raise_if_inaccessible(error, LazyName(self, i))
            raise InputError(f"{self.name(i)} cannot be read ({error_text(error)}): fetch the file again") from None
        return decode(data, LazyName(self, i))

    def name(self, i: int) -> str:
        return f"{Path(self._files[self._ranges[i, 0]]).name} {self._names[i]}"


def _load_split(files: list[Path]) -> Examples:
    names: list[str] = []
    ranges: list[tuple[int, int, int]] = []
    targets: list[int] = []
    imageless: list[str] = []
    for number, file in enumerate(files):
        for name, byte_range, target in _index_samples(file, imageless):
            names.append(name)
            ranges.append((number, *byte_range))
            targets.append(target)
    if imageless and not names:
        raise InputError(f"{files[0]} has no images, but {imageless[0]}: expected KEY.jpg and KEY.cls, no dot in KEY")
    notes: tuple[str, ...] = ()
    if imageless:
        share = f"{len(imageless):,} of {len(imageless) + len(names):,} samples from {files[0].name} on"
        notes = (f"{share} have no image, such as {imageless[0]}, and are left out",)
    reader = _TarImages(list(map(str, files)), np.array(ranges, np.int64).reshape(-1, 3), PackedStrings(names))
    return make_examples(reader, np.array(targets, np.int64), notes)


def _index_samples(path: Path, imageless: list[str]) -> Iterator[tuple[str, tuple[int, int], int]]:
    """Yield each image's name, its (offset, size) in the file, and its class number.

    imageless: receives the name of a file of each sample that has no image.
    """
    seen: set[str] = set()
    with path.open("rb") as file:
        for key, group in itertools.groupby(_list_members(path), lambda member: _sample_key(member.name)):
            members = list(group)
            by_suffix = {member.name[len(key) :].lower(): member for member in members}
            images = [member for member in members if member.name[len(key) :].lower() in SUFFIXES]
            labels = [by_suffix[suffix] for suffix in _LABEL_SUFFIXES if suffix in by_suffix]
            if not images:
                imageless.append(members[0].name)
                continue
            if len(images) > 1 or len(by_suffix) < len(members):
                names = ", ".join(member.name for member in members[:4])
                raise InputError(f"{path} has {names} together under one key: give each image a key of its own")
            if not labels:
                beside = f"{key}.cls or {key}.json beside it"
                raise InputError(f"{path} has {images[0].name} without {beside}: each image needs a class")
            if key in seen:
                raise InputError(f"{path} has {images[0].name} after another image of its key: give each a key of its own")
            seen.add(key)
            yield images[0].name, (images[0].offset_data, images[0].size), _sample_class(file.fileno(), labels, path)


class _LimitedTarInfo(tarfile.TarInfo):
    """A member's header.  Extension headers, which tarfile reads whole, are limited in length.

    Negative sizes are refused, because they would make tarfile read earlier members again.  Sparse members are refused,
    because their bytes are not in one range.
    """

    @classmethod
    def frombuf(cls, *arguments: Any) -> "_LimitedTarInfo":
        header = super().frombuf(*arguments)
        if header.type in _EXTENSION_HEADERS and header.size > _MAX_EXTENSION_BYTES:
            raise InputError(f"an extension header of {header.size:,} bytes")
        if header.size < 0:
            raise InputError(f"a file of {header.size:,} bytes")
        if header.type == tarfile.GNUTYPE_SPARSE:  # tarfile would read its map, which may be as long as the archive
            raise InputError(_SPARSE)
        return header


class _Member(NamedTuple):
    """A file in a tar file.  A `TarInfo` can take a hundred times as much memory, if a hostile header asks for it."""

    name: str
    offset_data: int
    size: int


def _list_members(path: Path) -> list[_Member]:
    """Return the files in a tar file.

    Raises:
        InputError: images or labels that are links and so have no data, or a file that is damaged, cut short or sparse.
    """
    members: list[_Member] = []
    links: list[str] = []
    try:
        with tarfile.open(path, "r:", tarinfo=_LimitedTarInfo) as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile would keep them all
                if len(archive.pax_headers) > _MAX_GLOBAL_FIELDS:  # each later header gets a copy of them
                    raise InputError(f"{len(archive.pax_headers):,} global header fields")
                if member.size < 0:  # from an extension header
                    raise InputError(f"a file of {member.size:,} bytes")
                if member.issparse():
                    raise InputError(_SPARSE)
                if member.islnk() or member.issym():
                    links += [member.name] if member.name.lower().endswith((*SUFFIXES, *_LABEL_SUFFIXES)) else []
                elif member.isreg():
                    members.append(_Member(member.name, member.offset_data, member.size))
            end = archive.offset
    except (OSError, tarfile.TarError, ValueError, RecursionError, MemoryError) as error:
        # RecursionError, MemoryError: nested extension headers
        raise_if_inaccessible(error, path)
        if read_range(str(path), 0, min(path.stat().st_size, 6)).startswith(_COMPRESSED_STARTS):
            raise _compressed_error(path) from None
        raise InputError(f"{path} cannot be read as a tar file ({error_text(error)}): replace it") from None
    refuse_holes(path)
    with path.open("rb") as file:  # tarfile takes a damaged header for the end of the archive
        file.seek(end)
        if any(block.strip(b"\0") for block in iter(lambda: file.read(1 << 20), b"")):
            raise InputError(
                f"{path} has data after its end at byte {end:,}: it is damaged or two files were joined; write it again"
            )
        if file.tell() < end + _END_MARKER_BYTES:
            raise InputError(
                f"{path} ends without its end marker: it is cut short or still being written; write or fetch it again"
            )
    if links:
        raise InputError(f"{path} has {links[0]} as a link: pack the file, tar --dereference --hard-dereference")
    return members


def _sample_key(name: str) -> str:
    """Return a file's name up to the first dot behind its folders, which all files of a sample share."""
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}{base.partition('.')[0]}"


def _sample_class(file: int, labels: list[_Member], path: Path) -> int:
    """Return the class number of a sample, from the first of its files that state one; refuse different numbers."""
    numbers: dict[str, int] = {}
    for label in labels:
        try:
            numbers[label.name] = _read_class(file, label, path)
        except InputError:
            if label is labels[0]:  # KEY.json beside KEY.cls may have a caption and the like instead
                raise
    if len({*numbers.values()}) > 1:
        stated = " and ".join(f"the class {number} in {name}" for name, number in numbers.items())
        raise InputError(f"{path} has {stated}: each image needs one class; leave one of these files out")
    return numbers[labels[0].name]


def _read_class(file: int, label: _Member, path: Path) -> int:
    """Return the class number in KEY.cls or KEY.json, a member of the open file."""
    if label.size > bounded_json.MAX_BYTES:
        raise InputError(f"{path} has {label.name} of {label.size:,} bytes: a class number is expected")
    return _parse_class(os.pread(file, label.size, label.offset_data), label.name, path)


def _parse_class(data: bytes, name: str, path: Path) -> int:
    """Return the class number in the contents of KEY.cls or KEY.json."""
    try:
        content: Any = bounded_json.parse_object(data) if name.lower().endswith(".json") else {"cls": data.decode("ascii")}
        value = content["label"] if "label" in content else content["cls"]
        number = int(value)
        if (isinstance(value, float) and value != number) or (isinstance(value, str) and not is_number(value)):
            raise ValueError
    except (ValueError, TypeError, KeyError, OverflowError):  # an InputError is a ValueError too
        raise InputError(
            f"{path} has {name} with no class number in it: expected an integer; number the classes from 0, or extract the "
            "images into folders named by class and give folder:PATH"
        ) from None
    if not 0 <= number < MAX_CLASSES:
        raise InputError(
            f"{path} has the class number {number:,} in {name}: expected class numbers from 0, below {MAX_CLASSES:,}"
        )
    return number
