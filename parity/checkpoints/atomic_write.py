"""Atomic writes: a file or folder gets its name when it is complete; until then, the old file or folder stays.

New content is written to a staging folder beside its target, which only its owner can read.  A killed process leaves its
staging folder behind.  A lock file in the folder is locked while the process lives.  The next process that writes beside
the folder finds the lock file unlocked, and removes the folder.

A system that cannot swap the names of two folders in one step needs two renames.  Between them, the old folder is in
`.parity-....old`, beside the staging folder.  If the process is killed there, the next one gives it its name back.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from vit_spec import InputError

_STAGING = re.compile(r"\.parity-[0-9a-f]{32}\.partial")
_LOCK = ".unfinished"  # in a staging folder; locked while the process that writes there lives
# Attempts to remove a staging folder, and seconds between them: other threads of a failed library may still write to it.
_TRIES, _PAUSE = 20, 0.1
_LOCK_TRIES = 600  # attempts to lock a folder, with the same pause between them
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2  # flags of renameat2, from linux/fs.h
_AT_FDCWD = -100  # from linux/fcntl.h
_OLD_SUFFIX = ".old"  # of the folder in which `_exchange` has the old folder between two renames


def check_replaceable(path: Path) -> None:
    """Raise InputError if a path exists and is neither a file, a folder nor a link."""
    if os.path.lexists(path) and not (path.is_symlink() or path.is_file() or path.is_dir()):
        raise InputError(f"{path} is a device, a pipe or a socket, and is not replaced: give another name")


@contextlib.contextmanager
def atomic_replace(
    path: Path, *, replace: bool = True, check: Callable[[Path], None] = check_replaceable
) -> Iterator[Path]:
    """Yield an unused path to write a file or folder to, and move the result to `path`; after an exception, remove it.

    An old file or folder at `path` is replaced in one step.  The new one gets the permissions and, if that is allowed, the
    owner of the old one.  It is flushed to the disk first, so that a power loss cannot destroy both.  If nothing is
    replaced, the system decides when to flush, as for cp.  If `path` is a link, the link is replaced and not its target,
    because the caches of hubs consist of links.  A folder is never replaced by a file.

    Args:
        path: the name of the new file or folder.
        replace: whether to replace what is at `path` when the new file or folder is complete.
        check: function that raises InputError if a file, folder or link must not be replaced.  It is called immediately
            before the replacement, and again with a folder that was replaced, which then gets its name back.

    Raises:
        InputError: `path` is a device, a pipe or a socket; or it exists, and `replace` or `check` forbids to replace it.
    """
    check_replaceable(path)
    remove_abandoned(path.parent)
    with _staging_folder(path.parent) as folder:
        new = folder / path.name
        try:
            yield new
            _move_to_target(new, path, replace, check)
        except InputError as error:
            raise InputError(str(error).replace(str(new), str(path))) from None


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes that call this function.

    After 60 s, and on file systems without locks, continue without the lock: a parent process may hold it.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the folder cannot be read, or the file system has no locks
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            for _ in range(_LOCK_TRIES):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_PAUSE)
        yield


def _move_to_target(new: Path, path: Path, replace: bool, check: Callable[[Path], None]) -> None:
    """Give a new file or folder its name; see `atomic_replace`."""
    if not replace:
        try:
            _rename_without_replacing(new, path)
        except FileExistsError:
            raise InputError(f"{path} exists: give another name, or --force (force=True) to replace it") from None
        return
    while not os.path.lexists(path):
        with contextlib.suppress(FileExistsError):  # what appears now must be checked before it is replaced
            _rename_without_replacing(new, path)
            return
    if path.is_dir() and not path.is_symlink() and not new.is_dir():
        raise InputError(f"{path} is a folder, and is not replaced by a file: give another name")
    if path.exists():
        _copy_permissions(new, path)
    _fsync_all(new)
    check(path)
    if new.is_dir():
        _exchange(new, path, check)
    else:
        os.replace(new, path)  # fails if `path` is a folder


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
        _restore_old(folder)
        shutil.rmtree(folder)
    finally:
        os.close(lock)


def _restore_old(folder: Path) -> None:
    """Complete or undo the exchange in which the process of an abandoned staging folder was killed; see `_exchange`."""
    kept = folder.with_suffix(_OLD_SUFFIX)
    if kept.is_symlink() or not kept.is_dir():
        return
    for old in kept.iterdir():
        if os.path.lexists(folder / old.name):  # the new folder did not get its name
            with contextlib.suppress(FileExistsError):
                _rename_without_replacing(old, folder.parent / old.name)
        else:
            os.rename(old, folder / old.name)  # the caller removes it with the staging folder
    with contextlib.suppress(OSError):
        kept.rmdir()


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


def _exchange(new: Path, path: Path, check: Callable[[Path], None]) -> None:
    """Swap the names of a new folder and of the folder, file or link at `path`; in one step if the system supports it.

    `check` is called with the old folder when no other program can find it under its name anymore: a file that was added
    after the last check is in it.  If `check` raises an exception, the old folder gets its name back.
    """
    if _renameat2(new, path, _RENAME_EXCHANGE):
        try:
            check(new)
        except BaseException:
            if not _renameat2(new, path, _RENAME_EXCHANGE):
                _put_back(new, path)
            raise
        return
    kept = new.parent.with_suffix(_OLD_SUFFIX)  # outside of the staging folder, so that nothing removes it
    old = kept / path.name
    kept.mkdir(0o700)
    try:
        os.rename(path, old)
        check(old)
        os.rename(new, path)
        os.rename(old, new)
    except BaseException as error:
        if os.path.lexists(old) and os.path.lexists(new):
            _put_back(old, path)
        if isinstance(error, InputError):
            raise InputError(str(error).replace(str(old), str(path))) from None
        raise
    finally:
        with contextlib.suppress(OSError):
            kept.rmdir()


def _put_back(old: Path, path: Path) -> None:
    """Give an old folder its name back; if the name is taken, keep the folder outside of the staging folder."""
    try:
        _rename_without_replacing(old, path)
    except OSError:
        kept = old.parent.with_suffix(_OLD_SUFFIX)
        kept.mkdir(0o700, exist_ok=True)
        os.rename(old, kept / old.name)
        raise InputError(f"{path} changed during the replacement: its former content is {kept / old.name}") from None


def _rename_without_replacing(new: Path, path: Path) -> None:
    """Rename a file, folder or link in one step.

    Raises:
        FileExistsError: there is something at `path`, which stays.
    """
    if _renameat2(new, path, _RENAME_NOREPLACE):
        return
    # Without renameat2, first create an empty file or folder, which fails if the name is taken, and replace that.  A folder
    # that is no longer empty is not replaced.
    is_folder = new.is_dir() and not new.is_symlink()
    if is_folder:
        path.mkdir()
    else:
        try:
            os.link(new, path, follow_symlinks=False)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        else:
            os.unlink(new)
            return
    try:
        os.rename(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            if is_folder:
                path.rmdir()
            elif not path.lstat().st_size:
                path.unlink()
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        raise


def _renameat2(one: Path, other: Path, flag: int) -> bool:
    """Rename a file or folder with a flag of Linux; return whether the system did so.

    Raises:
        FileExistsError: the flag is `_RENAME_NOREPLACE`, and there is something at `other`.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if not function:
        return False
    if function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), flag) == 0:
        return True
    if ctypes.get_errno() == errno.EEXIST:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(other))
    return False
