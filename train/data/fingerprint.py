"""Fingerprints, which identify a data set at any path by the names, sizes and contents of its files, and its targets.

The sizes and modification times of all files come from the file system.  A small data set is read whole.  Of a large one
a sample is read: chunks of `SAMPLE_BYTES` bytes, evenly spaced in `MAX_SAMPLED_FILES` files, which are evenly spaced among
all files.  Every byte is read only on request.  Modification times do not identify a data set, because a copy has others;
they show whether contents outside of the sample may have changed.
"""

import json
import os
import stat
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Literal, Self

import numpy as np

from train.data.sources import Dataset, Examples
from train.data.sources.examples import NamedFiles
from train.data.sources.files import raise_if_inaccessible
from vit_spec import InputError, bounded_json
from vit_spec.printable import escape_surrogates

CompareMode = Literal["sample", "all", "none"]

VERSION = 2  # of the way a fingerprint is computed
COUNTS_TWICE = 1  # the version that counts files with both training and held-out images twice, as of npz
MAX_SAMPLED_FILES = 1024
SAMPLE_BYTES = 1 << 16  # of a chunk
MAX_SAMPLED_BYTES = MAX_SAMPLED_FILES * SAMPLE_BYTES
READ_BYTES = 1 << 20  # read at once
READ_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError)  # of `Fingerprint.read`
_MAX_JSON_BYTES = 1 << 24  # enough for names of 4096 bytes, each byte escaped as six


@dataclass(frozen=True)
class Fingerprint:
    """The identity of a data set's files and targets.  Digests are hexadecimal.

    answers: digests of the training and of the held-out targets, each with the rows of the images in their files.
    files, size: the number of files, and of their bytes together.
    names, sizes, times: digests of the files' names below the data set's folder, sizes, and modification times.
    contents: a digest of all bytes; None if only a sample was read.
    sample: (name, size, digest of the sampled contents) of each sampled file.
    version: the way the fingerprint is computed.
    paths: the paths of the sampled files, for messages; not recorded.
    """

    answers: tuple[str, str]
    files: int
    size: int
    names: str
    sizes: str
    times: str
    contents: str | None
    sample: tuple[tuple[str, int, str], ...]
    version: int = VERSION
    paths: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def compute(cls, source: Dataset, *, every_byte: bool = False, version: int = VERSION) -> Self:
        """Compute the fingerprint of a data set.

        every_byte: read all contents, not only a sample.
        version: that of the fingerprint to compare with.

        Raises:
            InputError: a file that cannot be read.
        """
        train, held_out = source.train.files, source.held_out.files
        is_once = held_out is train or (version != COUNTS_TWICE and _have_same_paths(train, held_out))
        file_lists = [train] if is_once else [train, held_out]
        sizes, times, names = array("q"), array("q"), blake2b(digest_size=16)
        for name, path in chain(*file_lists):
            try:
                status = os.stat(path)
            except OSError as error:
                raise _access_error(error, path) from None
            names.update(os.fsencode(name) + b"\0")
            sizes.append(status.st_size)
            times.append(status.st_mtime_ns)
        total, count = sum(sizes), len(sizes)
        chosen = _sampled_files(count)
        bytes_per_file = _max_bytes_per_file(total, len(chosen))
        rows = [file_lists[0][i] if i < len(file_lists[0]) else file_lists[1][i - len(file_lists[0])] for i in chosen]
        sample = (
            (escape_surrogates(name), size, _hash_contents(path, size, bytes_per_file).hex())
            for (name, path), size in zip(rows, (sizes[i] for i in chosen), strict=True)
        )
        contents = _LengthPrefixedHash()
        for _, path in chain(*file_lists) if every_byte else ():
            contents.add(_hash_contents(path, 0, READ_BYTES))
        return cls(
            (_hash_targets(source.train), _hash_targets(source.held_out)),
            count,
            total,
            names.hexdigest(),
            blake2b(sizes, digest_size=16).hexdigest(),
            blake2b(times, digest_size=16).hexdigest(),
            contents.hex if every_byte else None,
            tuple(sample),
            version,
            tuple(escape_surrogates(path) for _, path in rows),
        )

    @property
    def is_complete(self) -> bool:
        """Whether every byte of every file was read."""
        return self.contents is not None or (self.files <= MAX_SAMPLED_FILES and self.size <= MAX_SAMPLED_BYTES)

    def difference(self, now: "Fingerprint") -> str:
        """Return how the data differ now, as text; "" if they do not.

        now: a fingerprint of the same version, as `compute` returns it.
        """
        if self.files != now.files or self.names != now.names:
            return f"{_count_files(self)} before and {_count_files(now)} now{_renamed_files(self, now)}"
        return ", and ".join(filter(None, (self._difference_of_files(now), self._difference_of_answers(now))))

    def _difference_of_files(self, now: "Fingerprint") -> str:
        """Return the first difference between files of the same names, as text; "" if there is none."""
        # The same names in the same order give the same sample.
        sampled = zip(now.paths, now.sample, strict=True)
        pairs = {path: (before, after) for (path, after), before in zip(sampled, self.sample, strict=False)}
        if self.sizes != now.sizes:
            sizes = [(path, had, has) for path, ((_, had, _), (_, has, _)) in pairs.items() if had != has]
            if not sizes:
                return f"the sizes of its files, {self.size:,} bytes together before and {now.size:,} now"
            path, had, has = sizes[0]
            return f"{path} had {had:,} bytes and has {has:,}{_and_more(len(sizes), len(pairs))}"
        changed = [path for path, ((*_, had), (*_, has)) in pairs.items() if had != has]
        if changed:
            return f"the contents of {changed[0]}{_and_more(len(changed), len(pairs))}"
        if self.contents is not None and now.contents is not None and self.contents != now.contents:
            return "the contents of its files, outside of the sample"
        return ""

    def _difference_of_answers(self, now: "Fingerprint") -> str:
        pairs = zip(self.answers, now.answers, ("training", "held-out"), strict=True)
        which = " and ".join(name for before, after, name in pairs if before != after)
        return f"which {which} images there are, or their targets" if which else ""

    def num_shared(self, scored: Examples) -> int:
        """Return how many of the sampled files are among those of images to score, by name, size and contents.

        If these may be the held-out images of the fingerprint, by their targets, only training files are counted: the
        held-out ones come last, and may be scored.

        Raises:
            InputError: a file that cannot be read.
        """
        counted = self.files - len(scored.files) if _hash_targets(scored) == self.answers[1] else self.files
        sampled = {each for index, each in zip(_sampled_files(self.files), self.sample, strict=False) if index < counted}
        shared = 0
        sizes, max_bytes = {each[:2] for each in sampled}, _max_bytes_per_file(self.size, len(self.sample))
        names = {name for name, _ in sizes}
        for name, path in ((escape_surrogates(name), path) for name, path in scored.files):
            if name in names:
                try:
                    size = os.stat(path).st_size
                except OSError as error:
                    raise _access_error(error, path) from None
                shared += (name, size) in sizes and (name, size, _hash_contents(path, size, max_bytes).hex()) in sampled
        return shared

    def to_json(self) -> str:
        """Return the fingerprint as JSON."""
        fields = asdict(self)
        del fields["paths"]
        return json.dumps(fields, indent=1) + "\n"

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a fingerprint from a file that `to_json` was written to.

        Raises:
            OSError: a file that is missing or cannot be read.
            ValueError, TypeError, KeyError, AttributeError: something else, or a fingerprint of another version.
        """
        fields = bounded_json.read_object(file, max_bytes=_MAX_JSON_BYTES)
        if (version := fields["version"]) not in (COUNTS_TWICE, VERSION):
            raise ValueError(f"it has version {version}, expected {COUNTS_TWICE} or {VERSION}")
        sample = tuple((str(name), int(size), str(digest)) for name, size, digest in fields.pop("sample"))
        train, held_out = fields.pop("answers")
        return cls(answers=(train, held_out), sample=sample, **fields)


class DataChangedError(InputError):
    """The data differ from those of a recorded fingerprint.  The message says how."""


class _LengthPrefixedHash:
    """A hash of byte strings, each preceded by its length."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def add(self, data: bytes) -> None:
        self._hash.update(len(data).to_bytes(8, "little"))
        self._hash.update(data)

    @property
    def hex(self) -> str:
        return self._hash.hexdigest()


def _have_same_paths(files: NamedFiles, others: NamedFiles) -> bool:
    """Return whether two lists of files have the same paths, as those of splits that are parts of one file."""
    return len(files) == len(others) and all(path == other for (_, path), (_, other) in zip(files, others, strict=True))


def _hash_targets(examples: Examples) -> str:
    """Return a digest of the targets, in order, and of the rows of the images in their files."""
    rows = np.arange(len(examples)) if examples.rows is None else examples.rows
    digest = _LengthPrefixedHash()
    for values in (examples.targets, rows):
        digest.add(f"{values.dtype} {values.shape}".encode())
        digest.add(np.ascontiguousarray(values).tobytes())
    return digest.hex


def _hash_contents(path: str, size: int, max_bytes: int) -> bytes:
    """Return a digest of a whole file of at most `max_bytes`, or of chunks of a larger file.

    size: size of the file; 0: read all of it whatever its size.
    """
    digest = blake2b(digest_size=16)
    try:
        with open(path, "rb", buffering=0, opener=_open_regular) as file:
            if size <= max_bytes:
                while block := file.read(READ_BYTES):
                    digest.update(block)
            for offset in _sample_offsets(size, max_bytes) if size > max_bytes else ():
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))
    except OSError as error:
        raise _access_error(error, path) from None
    return digest.digest()


def _sampled_files(count: int) -> Sequence[int]:
    """Return the indices of the files to sample, of `count`."""
    if count <= MAX_SAMPLED_FILES:
        return range(count)
    indices: list[int] = np.unique(np.linspace(0, count - 1, MAX_SAMPLED_FILES).round().astype(int)).tolist()
    return indices


def _max_bytes_per_file(total: int, num_sampled: int) -> int:
    """Return how many bytes are read of each sampled file at most.  total: the size of all files."""
    return total if total <= MAX_SAMPLED_BYTES else MAX_SAMPLED_BYTES // max(num_sampled, 1)


def _open_regular(path: str, flags: int) -> int:
    """Open a regular file and return its descriptor: a pipe would wait for its writer, and a device may never end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path} is not a regular file: move it out of the data")
    return descriptor


def _sample_offsets(size: int, max_bytes: int) -> Iterator[int]:
    """Yield the offsets of the chunks to read: the first and the last of a file, and evenly spaced ones between."""
    yield from np.linspace(0, max(size - SAMPLE_BYTES, 0), max(max_bytes // SAMPLE_BYTES, 1)).astype(np.int64).tolist()


def _access_error(error: OSError, path: str) -> InputError:
    try:
        raise_if_inaccessible(error, path)
    except InputError as access_error:
        return access_error
    return InputError(f"{path} cannot be read ({error.strerror}): look at the disk it is on")


def _count_files(fingerprint: Fingerprint) -> str:
    return f"{fingerprint.files:,} file{'s' * (fingerprint.files != 1)}"


def _and_more(different: int, count: int) -> str:
    return f", and {different - 1:,} more of the {count:,} compared" if different > 1 else ""


def _renamed_files(was: Fingerprint, now: Fingerprint) -> str:
    """Return the name of a file that only one of two data sets has, as text, if all names are in the samples."""
    before, after = ({name for name, _, _ in each.sample} for each in (was, now))
    if max(was.files, now.files) <= MAX_SAMPLED_FILES:
        for names, which in ((after - before, "is new"), (before - after, "is gone")):
            if names:
                return f": {min(names) or 'its file'} {which}{f', and {len(names) - 1:,} more' * (len(names) > 1)}"
    return "" if was.files != now.files else ", under other names or in another order"


# Recorded fingerprints ------------------------------------------------------------------------------------------------


def compare_with_recorded(file: Path, source: Dataset, mode: CompareMode) -> tuple[Fingerprint | None, list[str]]:
    """Compare a data set with the fingerprint in a file, if the file exists.

    mode: the value of `--compare-data`.

    Returns the fingerprint to write to the file, or None if the file is to stay as it is; and notes for the user.

    Raises:
        DataChangedError: the data differ.
        InputError: the file cannot be read.
    """
    compute = partial(Fingerprint.compute, source, every_byte=mode == "all")
    try:
        recorded = Fingerprint.read(file)
    except FileNotFoundError:
        return compute(), []
    except READ_ERRORS as error:
        if mode == "none":
            return compute(), []
        raise InputError(
            f"{file} cannot be read ({error}): give --compare-data none to accept the data as they are now"
        ) from None
    now = compute(version=recorded.version)
    difference = recorded.difference(now)
    if mode == "none":
        return now, [f"the data differ from those that the run began with: {difference}"] if difference else []
    if difference:
        raise DataChangedError(difference)
    if mode == "all" and recorded.contents is None and not recorded.is_complete:
        return now, ["only a sample of the data's contents was recorded so far; from now on every byte is"]
    if recorded.times != now.times and not (recorded.is_complete and now.is_complete):
        sampled = f"a sample of {min(MAX_SAMPLED_BYTES, now.size) >> 20:,} of {now.size >> 20:,} MiB"
        return None, [f"files of the data were written or copied since the run began: {sampled} is unchanged"]
    return None, []


def resolve_spec(spec: str) -> tuple[str, str, str]:
    """Split a `--data` value, such as "folder:photos", into its prefix, its absolute path, and its options."""
    kind, colon, where = spec.partition(":")
    path, mark, options = where.partition("?")
    local = colon and not path.startswith("//")  # hf://OWNER/NAME is not a path
    return kind, os.path.realpath(os.path.expanduser(path)) if local else path, mark + options
