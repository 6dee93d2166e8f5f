"""Locks of run folders, which the system releases when the trainer's process ends; and new run folders."""

import errno
import fcntl
import os
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from vit_spec import InputError

LOCK_FILE = ".lock"
LOCKED_ERRORS = (errno.EWOULDBLOCK, errno.EACCES)
# The errors of a file system without locks
UNSUPPORTED_ERRORS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


class Lock:
    """The lock of a folder, held from its construction until `release` or the end of the process.

    It is an flock on a file in the folder; the file names the process that holds it.  A killed trainer leaves the file
    without a lock, which does not block the next trainer.  Processes that load images do not inherit the lock.

    is_supported: False if the file system has no locks, so that a second trainer is not kept out.

    Raises:
        InputError: another trainer holds the lock, or the file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self.is_supported = folder / LOCK_FILE, True
        while True:
            try:
                # O_NOFOLLOW: the file is overwritten, and a link could lead to a file of the user's.
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            except OSError as error:
                raise InputError(f"cannot write {self._path} ({error.strerror}): give --run another folder") from None
            self._close = weakref.finalize(self, os.close, self._file)
            if self._try_acquire():
                break
            self._close()
        with suppress(OSError):  # on a full disk the file does not say who holds the lock
            os.truncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _try_acquire(self) -> bool:
        """Take the lock; return False if the trainer that held it has removed the file meanwhile."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in LOCKED_ERRORS:
                self._raise_in_use()
            if error.errno not in UNSUPPORTED_ERRORS:
                self._close()
                raise
            self.is_supported = False
            return True
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _raise_in_use(self) -> None:
        holder = os.pread(self._file, 200, 0).decode(errors="replace") or "another process"
        self._close()
        raise InputError(
            f"{self._path.parent} is in use by another trainer, {holder}: wait until that ends, or stop it, "
            "then give the same --run to resume; or give --run another folder"
        )

    def release(self) -> None:
        """Release the lock and remove its file; do nothing if it is released already."""
        if self._close.alive:
            if self.is_supported:  # remove it while it is locked, so that no process locks a removed file
                with suppress(OSError):  # the folder may be gone, and the run reports that
                    self._path.unlink()
            self._close()


def folder_error(path: Path, error: OSError) -> InputError:
    """Return the error of a run whose folder cannot be made; its path may lead over a link to nothing."""
    for each in (path, *path.parents):
        if each.is_symlink() and not each.exists():
            return InputError(f"{each} is a link to {os.readlink(each)}, which does not exist: give another with --run")
    return InputError(f"cannot make the folder {path} ({error.strerror}): give another with --run")


@contextmanager
def create_run_folder(name: str) -> Iterator[Path]:
    """Make a new folder, NAME or NAME-2, NAME-3, ..., and yield its path; remove it at the end if it is empty.

    Raises:
        InputError: it cannot be made.
    """
    for number in count(1):
        path = Path(name if number == 1 else f"{name}-{number}")
        is_parent_new = not path.parent.exists()
        try:
            path.mkdir(parents=True)
        except OSError as error:
            if os.path.lexists(path):
                continue
            raise folder_error(path, error) from None
        break
    try:
        yield path
    finally:
        with suppress(OSError):  # it is not empty
            path.rmdir()
            if is_parent_new:
                path.parent.rmdir()
