"""One trainer in a run's folder at a time: a lock that the system lifts when its process ends, and folders for new runs."""

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

NAME = ".lock"
HELD = (errno.EWOULDBLOCK, errno.EACCES)
WITHOUT = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)  # the file system has no locks


class Lock:
    """The lock of a folder, from here until `release` or the end of the process.

    It is the system's own lock on a file in the folder (flock), which says who holds it.  What a killed trainer leaves is
    that file without a lock on it, which hinders nobody.  Processes that prepare images do not inherit it.

    works: False where the file system has no locks, so that nothing keeps a second trainer out.

    Raises:
        InputError: another trainer holds it, or the file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self.works = folder / NAME, True
        while True:
            try:
                # Who holds the lock is written into the file: not into another one, to which a link leads.
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            except OSError as error:
                raise InputError(f"cannot write {self._path} ({error.strerror}): give --run another folder") from None
            self._close = weakref.finalize(self, os.close, self._file)
            if self._taken():
                break
            self._close()
        with suppress(OSError):  # on a full disk nobody is told who holds the lock
            os.truncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _taken(self) -> bool:
        """Take the lock; return False where the file was removed meanwhile by the trainer that held it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                self._refuse()
            if error.errno not in WITHOUT:
                self._close()
                raise
            self.works = False
            return True
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _refuse(self) -> None:
        holder = os.pread(self._file, 200, 0).decode(errors="replace") or "another process"
        self._close()
        raise InputError(
            f"{self._path.parent} is in use by another trainer, {holder}: wait until that ends, or stop it, "
            "then give the same --run to resume; or give --run another folder"
        )

    def release(self) -> None:
        """Let others in."""
        if self._close.alive:
            if self.works:  # removed while it is locked, so that nobody locks a file that is gone
                self._path.unlink(missing_ok=True)
            self._close()


@contextmanager
def new_folder(name: str) -> Iterator[Path]:
    """Make a folder that no other run has, NAME or NAME-2, NAME-3, ...; remove it at the end if nothing came to be in it.

    Raises:
        InputError: it cannot be made.
    """
    for number in count(1):
        path = Path(name if number == 1 else f"{name}-{number}")
        above = not path.parent.exists()
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(f"cannot make the folder {path} ({error.strerror}): give another with --run") from None
        break
    try:
        yield path
    finally:
        with suppress(OSError):  # there is something in it
            path.rmdir()
            if above:
                path.parent.rmdir()
