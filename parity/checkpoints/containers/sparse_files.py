"""Sizes of sparse files, whose holes take no disk space, but memory when they are read."""

import errno
import os
from pathlib import Path

_MIN_BYTES = 1 << 20  # smaller files are not searched for holes
_MAX_EXTENTS = 1 << 16  # extents between holes that are searched in a file


def stored_bytes(path: str | Path, size: int) -> int:
    """Return the bytes of a file that are not in holes; all of them if the file system does not report holes.

    size: of the file, with its holes.
    """
    if size <= _MIN_BYTES:
        return size
    stored = position = 0
    try:
        with open(path, "rb", buffering=0) as file:
            for _ in range(_MAX_EXTENTS):
                start = file.seek(position, os.SEEK_DATA)
                position = file.seek(start, os.SEEK_HOLE)
                stored += position - start
    except OSError as error:
        # ENXIO: no more data.  Other errors: the file system does not report holes.
        return stored if error.errno == errno.ENXIO else size
    return stored
