"""`tar:PATTERN`: shards of WebDataset (https://github.com/webdataset/webdataset): tar files with KEY.jpg beside KEY.cls.

PATTERN is a tar file, a folder of them, a glob, or a range in braces: tar:/data/train-{000000..000146}.tar.  An image is
KEY.jpg or has another of `decoding.SUFFIXES`; its class number is the text of KEY.cls, or "label" or "cls" in KEY.json.  A
key ends at the first dot of a name without its folders.  The files of a key stand together, once in a shard, and one of
them is an image.
Splits are told by the words train, val, validation or test in the files' names.

The headers are read once, 45 microseconds an image, a minute for ImageNet; then each image is one read.  Compressed
archives have no such places and are refused.
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

from train.data.sources.decoding import SUFFIXES, decode, said
from train.data.sources.examples import Examples, Name, Texts, examples, stored
from train.data.sources.files import below, stretch, unless_damaged
from train.data.sources.shards import by_split, common
from train.data.sources.splitting import MOST, Found, numbered
from vit_spec import InputError, bounded_json

_LABELS = (".cls", ".json")
_END = 2 * tarfile.BLOCKSIZE  # bytes, all zero, that a tar file ends with at least
_FILES = 1 << 16  # shards that a pattern may name
_HEADER = 1 << 16  # bytes of a header about a header, such as a long name
_GLOBAL = 1 << 8  # fields that are said of all files; git writes one
_ABOUT = {tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK}
_HOLES = "a file with holes: pack it without --sparse"
_TARS = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")


def find(place: str) -> Found:
    """Index shards; those of other splits than the training images only when they are asked for.

    Raises:
        InputError: no such files, compressed or damaged ones, or images without a class.
    """
    root, files = _files(place)

    def asked(chosen: list[Path]) -> Callable[[], Examples]:
        return lambda: _part(chosen)

    shards = by_split(root, files)
    parts = {name: asked(chosen) for name, chosen in shards.items()}
    base = "train" if "train" in parts else next(iter(parts))
    first = parts[base]()
    return Found(place, parts | {base: lambda: first}, "classes", numbered(first.answers, place))


def _files(place: str) -> tuple[Path, list[Path]]:
    """Return the folder that the names of files count from, and the files."""
    path = Path(place).expanduser()
    if path.is_dir():
        files = sorted(path / name for name in below(str(path), _TARS))
    elif path.is_file():
        files = [path]
    elif "{" in place:
        files = [Path(name) for name in dict.fromkeys(itertools.islice(braces(str(path)), _FILES + 1))]
        if len(files) > _FILES:
            raise InputError(f"{place} is more than {_FILES:,} files: give a range of shards that are there")
    else:
        files = [Path(name) for name in sorted(glob.glob(str(path)))]
    if not files:
        raise InputError(f"{place} matches no tar file: give tar:PATTERN, such as tar:/data/train-{{000000..000146}}.tar")
    for file in files:
        if not file.is_file():
            raise InputError(f"{file} is not there: give a range of shards that are")
        if file.suffix in (".gz", ".tgz", ".bz2", ".xz", ".zst"):
            raise InputError(f"{file} is compressed, and has no places to read at: unpack it to a .tar first")
    return path if path.is_dir() else common(files), files


def braces(pattern: str) -> Iterator[str]:
    """Expand {a,b} and {000..146} as a shell does: a number keeps the width it is written in."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        yield pattern
        return
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    words = match[1].split(",")
    if ends:
        first, last = int(ends[1]), int(ends[2])
        if last - first >= _FILES:
            raise InputError(f"{pattern} is more than {_FILES:,} files: give a range of shards that are there")
        words = [str(number).zfill(len(ends[1])) for number in range(first, last + 1)]
    for word in words:
        yield from braces(pattern[: match.start()] + word + pattern[match.end() :])


class _Members:
    """Images that are stretches of tar files."""

    def __init__(self, files: list[str], places: NDArray[np.int64], keys: Texts) -> None:
        self._files, self._places, self._keys = files, places, keys  # places: file, offset, size
        self.files = stored(files)

    def __call__(self, i: int) -> Image.Image:
        number, offset, size = self._places[i].tolist()
        try:
            data = stretch(self._files[number], offset, size)
        except (OSError, EOFError) as error:
            unless_damaged(error, Name(self, i))
            raise InputError(f"{self.name(i)} cannot be read ({said(error)}): fetch the file again") from None
        return decode(data, Name(self, i))

    def name(self, i: int) -> str:
        return f"{Path(self._files[self._places[i, 0]]).name} {self._keys[i]}"


def _part(files: list[Path]) -> Examples:
    keys: list[str] = []
    places: list[tuple[int, int, int]] = []
    answers: list[int] = []
    without: list[str] = []
    for number, file in enumerate(files):
        for key, place, answer in _index(file, without):
            keys.append(key)
            places.append((number, *place))
            answers.append(answer)
    if without and not keys:
        raise InputError(f"{files[0]} has no images, but {without[0]}: expected KEY.jpg and KEY.cls, no dot in KEY")
    notes: tuple[str, ...] = ()
    if without:
        share = f"{len(without):,} of {len(without) + len(keys):,} samples from {files[0].name} on"
        notes = (f"{share} have no image, such as {without[0]}, and are left out",)
    reader = _Members(list(map(str, files)), np.array(places, np.int64).reshape(-1, 3), Texts(keys))
    return examples(reader, np.array(answers, np.int64), notes)


def _index(path: Path, without: list[str]) -> Iterator[tuple[str, tuple[int, int], int]]:
    """Yield each image's name, its offset and size in the file, and its class.

    without: takes a file's name of each sample that has no image.
    """
    seen: set[str] = set()
    with path.open("rb") as file:
        # Files of one sample stand together, and share all up to the first dot of their names.
        for key, together in itertools.groupby(_listed(path), lambda member: _key(member.name)):
            members = list(together)
            parts = {member.name[len(key) :].lower(): member for member in members}
            pictures = [member for member in members if member.name[len(key) :].lower() in SUFFIXES]
            label = next((parts[suffix] for suffix in _LABELS if suffix in parts), None)
            if not pictures:
                without.append(members[0].name)
                continue
            if len(pictures) > 1 or len(parts) < len(members):
                names = ", ".join(member.name for member in members[:4])
                raise InputError(f"{path} has {names} together under one key: give each image a key of its own")
            if label is None:
                beside = f"{key}.cls or {key}.json beside it"
                raise InputError(f"{path} has {pictures[0].name} without {beside}: each image needs a class")
            if key in seen:
                raise InputError(
                    f"{path} has {pictures[0].name} after another image of its key: give each a key of its own"
                )
            seen.add(key)
            if label.size > bounded_json.BYTES:
                raise InputError(f"{path} has {label.name} of {label.size:,} bytes: a class number is expected")
            data = os.pread(file.fileno(), label.size, label.offset_data)
            yield pictures[0].name, (pictures[0].offset_data, pictures[0].size), _class(data, label.name, path)


class _Header(tarfile.TarInfo):
    """A member's header; one about another header, which is read at once, is held to a length.

    A negative size would lead back to what was read before.  A member with holes does not lie in one place.
    """

    @classmethod
    def frombuf(cls, *arguments: Any) -> "_Header":
        found = super().frombuf(*arguments)
        if found.type in _ABOUT and found.size > _HEADER:
            raise InputError(f"a header of {found.size:,} bytes about another")
        if found.size < 0:
            raise InputError(f"a file of {found.size:,} bytes")
        if found.type == tarfile.GNUTYPE_SPARSE:  # whose map may be as long as the archive
            raise InputError(_HOLES)
        return found


class _File(NamedTuple):
    """A file in a tar file.  What tarfile keeps of one besides is a hundred times as much where a header asks for it."""

    name: str
    offset_data: int
    size: int


def _listed(path: Path) -> list[_File]:
    """Return the files in a tar file; refuse links, which hold no image, and what is damaged or cut short."""
    found: list[_File] = []
    links: list[str] = []
    try:
        with tarfile.open(path, "r:", tarinfo=_Header) as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # which would keep them all
                if len(archive.pax_headers) > _GLOBAL:  # of which each header that follows gets a copy
                    raise InputError(f"{len(archive.pax_headers):,} fields of all its files")
                if member.size < 0:  # as a header about this one says
                    raise InputError(f"a file of {member.size:,} bytes")
                if member.issparse():
                    raise InputError(_HOLES)
                if member.islnk() or member.issym():
                    links += [member.name] if member.name.lower().endswith((*SUFFIXES, *_LABELS)) else []
                elif member.isreg():
                    found.append(_File(member.name, member.offset_data, member.size))
            end = archive.offset
    except (OSError, tarfile.TarError, ValueError, RecursionError, MemoryError) as error:  # of headers about headers
        unless_damaged(error, path)
        raise InputError(f"{path} cannot be read as a tar file ({said(error)}): replace it") from None
    with path.open("rb") as file:  # where tarfile cannot read on, it ends as if nothing followed
        file.seek(end)
        if any(block.strip(b"\0") for block in iter(lambda: file.read(1 << 20), b"")):
            raise InputError(f"{path} goes on after its end at byte {end:,}, damaged or joined to another: write it anew")
        if file.tell() < end + _END:
            raise InputError(
                f"{path} ends without its end marker: it is cut short or still being written; write or fetch it anew"
            )
    if links:
        raise InputError(f"{path} has {links[0]} as a link: pack the file, tar --dereference --hard-dereference")
    return found


def _key(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}{base.partition('.')[0]}"


def _class(data: bytes, name: str, path: Path) -> int:
    """Read a class number out of KEY.cls or KEY.json."""
    try:
        content: Any = bounded_json.parse_object(data) if name.lower().endswith(".json") else {"cls": data}
        given = content["label"] if "label" in content else content["cls"]
        number = int(given)
        if isinstance(given, float) and given != number:
            raise ValueError
    except (ValueError, TypeError, KeyError, OverflowError):  # an InputError is a ValueError too
        raise InputError(f"{path} has {name} with no class number in it: a whole number is expected") from None
    if not 0 <= number < MOST:
        raise InputError(f"{path} has the class number {number:,} in {name}: expected class numbers from 0, below {MOST:,}")
    return number
