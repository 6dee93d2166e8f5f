"""All of it or nothing: a file or folder takes its name when it is complete, and what was there stays until then.

What is being written lies in a staging folder beside its target, which only its owner can read.  A process that is
killed leaves that folder behind; the lock on a file in it tells, and the next process that writes beside it clears it.
"""

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from vit_spec import InputError

_STAGING = re.compile(r"\.parity-[0-9a-f]{32}\.partial")
_LOCK = ".unfinished"  # in a staging folder: locked as long as the process lives that writes there
_TRIES, _PAUSE = 20, 0.1  # seconds; a library that failed may still be writing from other threads


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a free path of the same name; what is there in the end takes the place `path`, or is removed after a failure.

    What was at `path` is exchanged for the new in one step, and the new has its permissions and, where that is allowed,
    its owner.  Before that the new is brought to the disk: a loss of power must not take both.  Where nothing can be
    lost, that is left to the system, as cp does.  A link is replaced, and not what it points to: the caches of hubs are
    made of links.

    Raises:
        InputError: `path` is a device, a pipe or a socket.
    """
    check_replaceable(path)
    clear(path.parent)
    with _staging(path.parent) as folder:
        new = folder / path.name
        try:
            yield new
        except InputError as error:
            raise InputError(str(error).replace(str(new), str(path))) from None
        if os.path.lexists(path):
            if path.exists():
                _take_permissions(new, path)
            _sync(new)
        if os.path.lexists(path) and (path.is_dir() or new.is_dir()):
            _exchange(new, path)
        else:
            os.replace(new, path)


def check_replaceable(path: Path) -> None:
    """Raise InputError if there is anything at a path but a file, a folder or a link."""
    if os.path.lexists(path) and not (path.is_symlink() or path.is_file() or path.is_dir()):
        raise InputError(f"{path} is a device, a pipe or a socket, and is not replaced: give another name")


def clear(parent: Path) -> None:
    """Remove from a folder what processes of this user that were killed left of their writing."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if _STAGING.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _clear_staging(Path(entry.path))


def _clear_staging(folder: Path) -> None:
    """Remove a staging folder, unless it is another user's or its process lives."""
    if folder.stat().st_uid != os.getuid():
        return
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        folder.rmdir()  # which only removes an empty one
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)


@contextlib.contextmanager
def _staging(parent: Path) -> Iterator[Path]:
    """Yield a new, locked folder; remove it and all that is in it afterwards."""
    folder, lock = _locked(parent)
    try:
        yield folder
    finally:
        for _ in range(_TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(_PAUSE)
        os.close(lock)


def _locked(parent: Path) -> tuple[Path, int]:
    while True:  # until no other process clears it before it is locked
        folder = parent / f".parity-{uuid.uuid4().hex}.partial"
        folder.mkdir(0o700)
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:
            continue
        except OSError:
            folder.rmdir()
            raise
        with contextlib.suppress(OSError):  # a file system without locks, on which nothing is cleared either
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)


def _take_permissions(new: Path, old: Path) -> None:
    """Give a file or folder the permissions of the one that it replaces; new files in a folder those all old ones have."""
    _take(new, old.stat())
    if not (old.is_dir() and new.is_dir()):
        return
    before = {entry.name: entry.stat() for entry in os.scandir(old) if entry.is_file()}
    common = 0o777
    for each in before.values():
        common &= stat.S_IMODE(each.st_mode)
    for entry in os.scandir(new):
        if entry.name in before:
            _take(Path(entry.path), before[entry.name])
        elif before and entry.is_file(follow_symlinks=False):
            os.chmod(entry.path, common)


def _take(new: Path, old: os.stat_result) -> None:
    with contextlib.suppress(PermissionError):
        os.chown(new, old.st_uid, old.st_gid)
    os.chmod(new, stat.S_IMODE(old.st_mode))


def _sync(path: Path) -> None:
    """Bring a file, or a folder and all in it, to the disk."""
    for each in (*(path.rglob("*") if path.is_dir() else ()), path):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    """Swap the names of a folder and of a folder or link, in one step where the system can."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2 and renameat2(here, os.fsencode(one), here, os.fsencode(other), swap) == 0:
        return
    old = one.parent.with_suffix(".old")  # outside of the staging folder: nobody clears it
    os.rename(other, old)
    os.rename(one, other)
    old.unlink() if old.is_symlink() else shutil.rmtree(old)
