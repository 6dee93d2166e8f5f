"""All of it or nothing: a file or folder takes its name when it is complete, and what was there stays until then."""

import contextlib
import ctypes
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from vit_spec import InputError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a free path beside `path`; what is there in the end takes the name `path`, or is removed after a failure.

    What was at `path` is exchanged for the new in one step.  Before that the new is brought to the disk: a loss of
    power must not take both.  Where nothing can be lost, that is left to the system, as cp does.
    """
    partial = path.with_name(f".{uuid.uuid4().hex}.partial")
    try:
        try:
            yield partial
        except InputError as error:
            raise InputError(str(error).replace(str(partial), str(path))) from None
        if os.path.lexists(path):
            _sync(partial)
        if path.is_dir() and not path.is_symlink():
            _exchange(partial, path)
        else:
            os.replace(partial, path)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Bring a file, or a folder and all in it, to the disk."""
    for each in (*(path.rglob("*") if path.is_dir() else ()), path):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    """Swap the names of two folders, in one step where the system can."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2 and renameat2(here, os.fsencode(one), here, os.fsencode(other), swap) == 0:
        return
    old = one.with_suffix(".old")
    os.rename(other, old)
    os.rename(one, other)
    shutil.rmtree(old)
