"""What identifies a data set wherever it lies: names, sizes and contents of its files, and the answers to its images.

The sizes and modification times of all files are asked of the file system.  Of the contents a sample is read: all of a
small data set, and of a large one stretches of `STRETCH` bytes, evenly spread over `FILES` files that are evenly spread
over all of them.  Every byte is read where that is asked for.  Modification times identify nothing, since a copy has
others; they tell whether what was not sampled may have changed.
"""

import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from train.data.sources import Source
from train.data.sources.files import unless_damaged
from vit_spec import InputError, bounded_json

Compare = Literal["sample", "all", "none"]

VERSION = 1  # of how a fingerprint is taken
FILES = 1024  # files whose contents are sampled, at most
STRETCH = 1 << 16  # bytes
BUDGET = FILES * STRETCH  # bytes that are read for a sample
BLOCK = 1 << 20  # bytes read at once
_LONGEST = 1 << 24  # bytes of a fingerprint as JSON: names of 4096 bytes, each byte an escape of six, take so many


@dataclass(frozen=True)
class Fingerprint:
    """What is known of a data set's files and answers.

    answers: a digest of the answers to the training images and of which images these are; and of the held-out images.
    files, size: how many files there are, and their bytes together.
    names, sizes, times: digests of the files' names below the data set's folder, sizes, and modification times.
    contents: a digest of all bytes; None where only a sample was read.
    sample: name, size and digest of the sampled contents of some files, or of all.
    """

    answers: tuple[str, str]
    files: int
    size: int
    names: str
    sizes: str
    times: str
    contents: str | None
    sample: tuple[tuple[str, int, str], ...]

    @classmethod
    def of(cls, source: Source, *, every_byte: bool = False) -> Self:
        """Take the fingerprint of a data set.

        Raises:
            InputError: a file that the system does not give.
        """
        parts = [source.train.files]
        if source.held_out.files is not source.train.files:
            parts.append(source.held_out.files)
        sizes, times, names = array("q"), array("q"), blake2b(digest_size=16)
        for name, path in chain(*parts):
            try:
                stat = os.stat(path)
            except OSError as error:
                raise _unreadable(error, path) from None
            names.update(os.fsencode(name) + b"\0")
            sizes.append(stat.st_size)
            times.append(stat.st_mtime_ns)
        total, count = sum(sizes), len(sizes)
        chosen = np.unique(np.linspace(0, count - 1, FILES).round().astype(int)).tolist() if count > FILES else range(count)
        each = total if total <= BUDGET else BUDGET // max(len(chosen), 1)
        rows = [parts[0][i] if i < len(parts[0]) else parts[1][i - len(parts[0])] for i in chosen]
        sample = (
            (name, size, _contents(path, size, each).hex())
            for (name, path), size in zip(rows, (sizes[i] for i in chosen), strict=True)
        )
        contents = _Digest()
        for _, path in chain(*parts) if every_byte else ():
            contents.add(_contents(path, 0, BLOCK))
        return cls(
            (_answers(source.train), _answers(source.held_out)),
            count,
            total,
            names.hexdigest(),
            blake2b(sizes, digest_size=16).hexdigest(),
            blake2b(times, digest_size=16).hexdigest(),
            contents.hex if every_byte else None,
            tuple(sample),
        )

    @property
    def is_whole(self) -> bool:
        """Whether every byte of every file was read."""
        return self.contents is not None or (self.files <= FILES and self.size <= BUDGET)

    def differs(self, now: "Fingerprint") -> str:
        """Say in what another fingerprint differs from this one, which was taken before; "" where in nothing."""
        if self.files != now.files or self.names != now.names:
            return f"{_count(self)} before and {_count(now)} now{_other_names(self, now)}"
        # Of the same names in the same order the same are sampled.  Two splits may have files of one name.
        pairs = list(zip(self.sample, now.sample, strict=False))
        sizes = [(name, size, then[1]) for (name, size, _), then in pairs if then[1] != size]
        if self.sizes != now.sizes:
            if not sizes:
                return f"the sizes of its files, {self.size:,} bytes together before and {now.size:,} now"
            name, had, has = sizes[0]
            return f"{_called(name)} had {had:,} bytes and has {has:,}{_more(len(sizes), len(pairs))}"
        changed = [name for (name, _, digest), then in pairs if then[2] != digest]
        if changed:
            return f"the contents of {_called(changed[0])}{_more(len(changed), len(pairs))}"
        if self.contents is not None and now.contents is not None and self.contents != now.contents:
            return "the contents of its files, though not of those that are sampled"
        for before, after, which in zip(self.answers, now.answers, ("training", "held-out"), strict=True):
            if before != after:
                return f"which {which} images there are, or the answers to them"
        return ""

    def to_json(self) -> str:
        """Return the fingerprint as JSON."""
        return json.dumps({"version": VERSION} | asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, file: Path) -> Self:
        """Return the fingerprint in a file to which `to_json` was written.

        Raises:
            OSError: no such file, or none that may be read.
            ValueError, TypeError, KeyError, AttributeError: it is none, or one of another version.
        """
        fields = bounded_json.read_object(file, longest=_LONGEST)
        if (version := fields.pop("version")) != VERSION:
            raise ValueError(f"it is of version {version}, and {VERSION} is known here")
        sample = tuple((str(name), int(size), str(digest)) for name, size, digest in fields.pop("sample"))
        train, held_out = fields.pop("answers")
        return cls(answers=(train, held_out), sample=sample, **fields)


class OtherData(InputError):
    """The data are not those that a fingerprint was taken of.  The message says in what they differ."""


class _Digest:
    """A digest of byte strings, each with its length."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def add(self, data: bytes) -> None:
        self._hash.update(len(data).to_bytes(8, "little"))
        self._hash.update(data)

    @property
    def hex(self) -> str:
        return self._hash.hexdigest()


def _answers(examples: Any) -> str:
    """Return a digest of the answers, in order, and of the rows that the images are in their files."""
    rows = np.arange(len(examples)) if examples.rows is None else examples.rows
    found = _Digest()
    for values in (examples.answers, rows):
        found.add(f"{values.dtype} {values.shape}".encode())
        found.add(np.ascontiguousarray(values).tobytes())
    return found.hex


def _contents(path: str, size: int, most: int) -> bytes:
    """Return a digest of a file: of all of it where that is no more than `most` bytes, else of stretches of it.

    size: of the file; 0: all of it is read whatever its size.
    """
    found = blake2b(digest_size=16)
    try:
        with open(path, "rb", buffering=0) as file:
            if size <= most:
                while block := file.read(BLOCK):
                    found.update(block)
            for start in _starts(size, most) if size > most else ():
                found.update(os.pread(file.fileno(), STRETCH, start))
    except OSError as error:
        raise _unreadable(error, path) from None
    return found.digest()


def _starts(size: int, most: int) -> Iterator[int]:
    """Yield where the stretches of a file begin: at its beginning, before its end, and evenly in between."""
    yield from np.linspace(0, max(size - STRETCH, 0), max(most // STRETCH, 1)).astype(np.int64).tolist()


def _unreadable(error: OSError, path: str) -> InputError:
    try:
        unless_damaged(error, path)
    except InputError as told:
        return told
    return InputError(f"{path} cannot be read ({error.strerror}): look at the disk it is on")


def _count(found: Fingerprint) -> str:
    return f"{found.files:,} file{'s' * (found.files != 1)}"


def _called(name: str) -> str:
    return name or "its file"


def _more(different: int, count: int) -> str:
    return f", and {different - 1:,} more of the {count:,} compared" if different > 1 else ""


def _other_names(was: Fingerprint, now: Fingerprint) -> str:
    """Name a file that only one of two data sets has, where all names are known."""
    before, after = ({name for name, _, _ in each.sample} for each in (was, now))
    if max(was.files, now.files) <= FILES:
        for names, which in ((after - before, "is new"), (before - after, "is gone")):
            if names:
                return f": {_called(min(names))} {which}{f', and {len(names) - 1:,} more' * (len(names) > 1)}"
    return "" if was.files != now.files else ", under other names or in another order"


# Beside a run ---------------------------------------------------------------------------------------------------------


def compare(file: Path, source: Source, how: Compare) -> tuple[Fingerprint | None, list[str]]:
    """Compare a data set with the fingerprint in a file, which may not be there.

    Returns the fingerprint to write to the file, None where it is to stay as it is; and what is to be said.

    Raises:
        OtherData: the data are others, saying in what.
        InputError: the file cannot be read.
    """
    now = Fingerprint.of(source, every_byte=how == "all")
    try:
        was = Fingerprint.read(file)
    except FileNotFoundError:
        return now, []
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if how == "none":
            return now, []
        raise InputError(
            f"{file} cannot be read ({error}): give --compare-data none to go on with the data as they are now"
        ) from None
    what = was.differs(now)
    if how == "none":
        return now, [f"the data are not those that the run began with, and are not compared: {what}"] if what else []
    if what:
        raise OtherData(what)
    if how == "all" and was.contents is None and not was.is_whole:
        return now, ["only a sample of the data's contents was recorded so far: every byte is from now on"]
    if was.times != now.times and not (was.is_whole and now.is_whole):
        read = f"a sample of {min(BUDGET, now.size) >> 20:,} of {now.size >> 20:,} MiB"
        return None, [f"files of the data were written or copied since the run began: {read} is the same as then"]
    return None, []


def place(spec: str) -> tuple[str, str, str]:
    """Return the kind of a data set, its absolute place, and its options, of "folder:photos" and the like."""
    kind, colon, where = spec.partition(":")
    path, mark, options = where.partition("?")
    local = colon and not path.startswith("//")  # hf://OWNER/NAME is no path
    return kind, os.path.realpath(os.path.expanduser(path)) if local else path, mark + options
