"""Atomic writes: a file or folder gets its name when it is complete; until then, the old file or folder stays.

New content is written to a staging folder beside its target, which only its owner can read.  A killed process leaves its
staging folder behind.  A lock file in the folder is locked while the process lives.  The next process that writes beside
the folder finds the lock file unlocked, and removes the folder.
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
_LOCK = ".unfinished"  # in a staging folder; locked while the process that writes there lives
# Attempts to remove a staging folder, and seconds between them: other threads of a failed library may still write to it.
_TRIES, _PAUSE = 20, 0.1


@contextlib.contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yield an unused path to write a file or folder to, and move the result to `path`; after an exception, remove it.

    An old file or folder at `path` is replaced in one step.  The new one gets the permissions and, if that is allowed, the
    owner of the old one.  It is flushed to the disk first, so that a power loss cannot destroy both.  If nothing is
    replaced, the system decides when to flush, as for cp.  If `path` is a link, the link is replaced and not its target,
    because the caches of hubs consist of links.

    Raises:
        InputError: `path` is a device, a pipe or a socket.
    """
    check_replaceable(path)
    remove_abandoned(path.parent)
    with _staging_folder(path.parent) as folder:
        new = folder / path.name
        try:
            yield new
        except InputError as error:
            raise InputError(str(error).replace(str(new), str(path))) from None
        if os.path.lexists(path):
            if path.exists():
                _copy_permissions(new, path)
            _fsync_all(new)
        if os.path.lexists(path) and (path.is_dir() or new.is_dir()):
            _exchange(new, path)
        else:
            os.replace(new, path)


def check_replaceable(path: Path) -> None:
    """Raise InputError if a path exists and is neither a file, a folder nor a link."""
    if os.path.lexists(path) and not (path.is_symlink() or path.is_file() or path.is_dir()):
        raise InputError(f"{path} is a device, a pipe or a socket, and is not replaced: give another name")


def remove_abandoned(parent: Path) -> None:
    """Remove the staging folders in `parent` that killed processes of this user left behind."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if _STAGING.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a staging folder, unless it belongs to another user or its process is alive."""
    if folder.stat().st_uid != os.getuid():
        return
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        folder.rmdir()  # fails if it is not empty
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)


@contextlib.contextmanager
def _staging_folder(parent: Path) -> Iterator[Path]:
    """Yield a new, locked folder; remove it with all its content afterwards."""
    folder, lock = _create_locked_folder(parent)
    try:
        yield folder
    finally:
        for _ in range(_TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(_PAUSE)
        os.close(lock)


def _create_locked_folder(parent: Path) -> tuple[Path, int]:
    """Create a staging folder; return it and the descriptor of its locked file."""
    while True:  # again if another process removes the folder before it is locked
        folder = parent / f".parity-{uuid.uuid4().hex}.partial"
        folder.mkdir(0o700)
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:
            continue
        except OSError:
            folder.rmdir()
            raise
        with contextlib.suppress(OSError):  # without file locks, other processes cannot remove this folder either
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)


def _copy_permissions(new: Path, old: Path) -> None:
    """Give a file or folder the permissions of the one that it replaces.

    Files in a folder get the permissions of the old file of that name, or those that all old files have in common.
    """
    _copy_owner_and_mode(new, old.stat())
    if not (old.is_dir() and new.is_dir()):
        return
    old_files = {entry.name: entry.stat() for entry in os.scandir(old) if entry.is_file()}
    common_mode = 0o777
    for status in old_files.values():
        common_mode &= stat.S_IMODE(status.st_mode)
    for entry in os.scandir(new):
        if entry.name in old_files:
            _copy_owner_and_mode(Path(entry.path), old_files[entry.name])
        elif old_files and entry.is_file(follow_symlinks=False):
            os.chmod(entry.path, common_mode)


def _copy_owner_and_mode(new: Path, old: os.stat_result) -> None:
    with contextlib.suppress(PermissionError):
        os.chown(new, old.st_uid, old.st_gid)
    os.chmod(new, stat.S_IMODE(old.st_mode))


def _fsync_all(path: Path) -> None:
    """Flush a file, or a folder with all its content, to the disk."""
    for each in (*(path.rglob("*") if path.is_dir() else ()), path):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    """Swap the names of two files, folders or links, of which one is a folder; in one step if the system supports it."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_fdcwd, rename_exchange = -100, 2  # the constants of linux/fcntl.h and linux/fs.h
    if renameat2 and renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange) == 0:
        return
    old = one.parent.with_suffix(".old")  # outside of the staging folder, so that nothing removes it
    os.rename(other, old)
    os.rename(one, other)
    old.unlink() if old.is_symlink() else shutil.rmtree(old)
