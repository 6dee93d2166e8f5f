"""Results that take long, computed by one worker of pytest-xdist and read by the others."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def compute_once(factory: pytest.TempPathFactory, name: str, compute: Callable[[Path], None]) -> Path:
    """Return a path to which `compute` has written a file or a folder, in this worker or in another one.

    name: of the path; the same for all workers.
    """
    folder = factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    path = folder / name
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            unfinished = folder / f"{name}.unfinished"
            compute(unfinished)
            unfinished.rename(path)
    return path
