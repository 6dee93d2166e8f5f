"""File system access: find files, read them, and report files that the system does not give."""

import errno
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints.containers import sparse_files
from parity.checkpoints.containers.budget import max_array_bytes
from parity.checkpoints.containers.container import File
from vit_spec import InputError, bounded_json

MAX_IMAGE_BYTES = 1 << 29  # an image's file is read whole; the largest image takes three quarters of this as raw pixels

_REMEDIES = {
    errno.EACCES: "let this user read it",
    errno.EPERM: "let this user read it",
    errno.ENOENT: "put it back, or take it out of the data",
    errno.EISDIR: "a file was expected there",
    errno.ELOOP: "repair the link",
    errno.EMFILE: "raise the limit of open files, ulimit -n",
    errno.ENFILE: "raise the limit of open files, ulimit -n",
}
# Errors of a file's contents rather than of the system; EINVAL: an offset in the file points beyond any file's end.
_CONTENT_ERRNOS = (None, errno.EINVAL)

_MAX_DEPTH = 100  # nested folders


class FileAccessError(InputError):
    """The system does not give a file.  The file may be intact, so it must not be skipped as damaged."""


def raise_if_inaccessible(error: BaseException, name: object) -> None:
    """Raise `FileAccessError` if an error is the system's; return if it is about the contents of the file.

    name: the name of the file or image in the message.
    """
    if not isinstance(error, OSError) or error.errno in _CONTENT_ERRNOS:
        return
    reason = "is not there" if error.errno == errno.ENOENT else f"cannot be read ({os.strerror(error.errno)})"
    remedy = _REMEDIES.get(error.errno, "look at the disk it is on")
    raise FileAccessError(f"{name} {reason}: {remedy}") from None


def walk_files(
    folder: str, suffixes: tuple[str, ...], others: list[str] | None = None, entered: set[str] | None = None
) -> Iterator[str]:
    """Yield the paths of the files below a folder, relative to it and sorted, without a stat call for each file.

    Names that begin with a dot are ignored.  Links to folders are followed, but each folder is entered through one link
    only: folders full of links to each other could be walked in exponentially many ways.

    suffixes: lower-case endings of the file names to yield; case is ignored.
    others: receives the paths of files with other endings.
    entered: the real paths of folders that are read besides; see `follow_link`.

    Raises:
        InputError: a link to a folder that contains it, or that is entered otherwise; or too many nested folders.
    """
    yield from _walk(folder, suffixes, others, (), set() if entered is None else entered, 0)


def _walk(
    folder: str,
    suffixes: tuple[str, ...],
    others: list[str] | None,
    link_folders: tuple[str, ...],
    entered: set[str],
    depth: int,
) -> Iterator[str]:
    """Yield the same as `walk_files`.

    link_folders: the folders of the links that were followed to get here.
    entered: see `follow_link`.
    depth: folders between this one and the first.
    """
    if depth > _MAX_DEPTH:
        raise InputError(f"{folder} lies more than {_MAX_DEPTH} folders deep: move it up")
    with os.scandir(folder) as entries:
        found = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in found:
        if entry.name.lower().endswith(suffixes):
            yield entry.name
        elif entry.is_dir():
            followed = (
                (*link_folders, follow_link(entry.path, entered, link_folders)) if entry.is_symlink() else link_folders
            )
            for name in _walk(entry.path, suffixes, others, followed, entered, depth + 1):
                yield f"{entry.name}/{name}"
        elif others is not None:
            others.append(entry.path)


def follow_link(link: str, entered: set[str], link_folders: tuple[str, ...] = ()) -> str:
    """Return the folder that contains a link to a folder.

    entered: the real paths of folders that are read, each with all that it contains except hidden folders; receives the
        link's target.
    link_folders: the folders of the links that were followed to get here.

    Raises:
        InputError: the link leads back to its folder or to an earlier link's, or to a folder that is read already.
    """
    folder, target = os.path.realpath(os.path.dirname(link)), os.path.realpath(link)
    if any(os.path.commonpath([before, target]) == target for before in (*link_folders, folder)):
        raise InputError(f"{link} leads back to {target}, which contains it: remove the link")
    within = target
    while os.path.basename(within) and not os.path.basename(within).startswith("."):
        if within in entered:
            raise InputError(f"{link} leads to {target}, which is read already: remove the link")
        within = os.path.dirname(within)
    entered.add(target)
    return folder


def read_file(path: Path, max_bytes: int = 1 << 20) -> bytes:
    """Read a file of at most `max_bytes`.

    Raises:
        InputError: a longer file, or something else than a file, such as a pipe, which would wait for its writer.
    """
    try:
        return bounded_json.read_bytes(path, max_bytes=max_bytes)
    except InputError as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    except OSError as error:
        raise_if_inaccessible(error, path)
        raise


def refuse_holes(path: Path) -> None:
    """Refuse a file that consists mostly of holes, which take no disk space, but memory when they are read.

    Raises:
        InputError: such a file.
        OSError: it is missing or not accessible.
    """
    size = path.stat().st_size
    stored_bytes = sparse_files.stored_bytes(path, size)
    if size > max_array_bytes(stored_bytes):
        raise InputError(
            f"{path} is {size:,} bytes, of which only {stored_bytes:,} are on disk: fetch or write the file again"
        )


def read_range(path: str, offset: int, size: int, max_bytes: int = MAX_IMAGE_BYTES) -> bytes:
    """Read `size` bytes of a file from `offset` on.

    Raises:
        InputError: more than `max_bytes`; the caller adds the name.
        EOFError: the file ends before.
    """
    if size > max_bytes:
        raise InputError(f"it has {size:,} bytes, and at most {max_bytes:,} are read")
    file = os.open(path, os.O_RDONLY)
    try:
        if offset + size > os.fstat(file).st_size:  # checked before memory is allocated
            raise EOFError("it is cut short")
        data = os.pread(file, size, offset)
        while 0 < len(data) < size and (more := os.pread(file, size - len(data), offset + len(data))):
            data += more  # one call reads at most 2 GiB
    finally:
        os.close(file)
    if len(data) != size:
        raise EOFError("it is cut short")
    return data


class FileRows:
    """The rows of a uint8 array in a file, in C order: `rows[i]` reads row i.

    They are read and not memory-mapped: if another process truncates a mapped file, its reader is killed by SIGBUS.

    shape: shape of the array; the first dimension counts the rows.
    """

    def __init__(self, path: Path, offset: int, shape: tuple[int, ...]) -> None:
        self._file, self._offset, self.shape = File(path), offset, shape

    def __getitem__(self, i: int) -> NDArray[np.uint8]:
        """Return a row; raise EOFError if the file ends before."""
        size = prod(self.shape[1:])
        data = self._file.read(self._offset + i * size, size)
        if len(data) != size:
            raise EOFError("the file is cut short")
        return np.frombuffer(data, np.uint8).reshape(self.shape[1:])

    def read_all(self) -> NDArray[np.uint8]:
        """Return the array; raise InputError if the file was changed since it was opened."""
        array = np.empty(self.shape, np.uint8)
        self._file.read_into(array, self._offset)
        return array
