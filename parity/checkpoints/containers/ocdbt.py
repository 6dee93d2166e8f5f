"""OCDBT stores: B+trees of keys and values, in which Orbax stores many zarr arrays in few files.

tensorstore allocates as much memory as the nodes of a tree announce.  A node of some kilobytes can announce gigabytes: it
is compressed, it begins with a table of files, and its keys are stored as differences to each other.  Therefore another
process, whose memory and time are limited, reads all nodes first.

See https://google.github.io/tensorstore/kvstore/ocdbt/index.html.
"""

import signal
import subprocess
import sys
from pathlib import Path

from vit_spec import InputError

MANIFEST_NAME = "manifest.ocdbt"
_CHILD = Path(__file__).with_name("ocdbt_child.py")
_MAX_BYTES = 1 << 30  # of memory; Orbax limits a decompressed node to 100 MB
_MAX_SECONDS = 60  # of processor time; a tree of 100,000 keys takes less than one
_LIMIT_SIGNALS = {-signal.SIGABRT, -signal.SIGXCPU, -signal.SIGKILL, -signal.SIGSEGV}


def check_tree(folder: Path) -> None:
    """Read all nodes of the OCDBT store in a folder, if there is one, in a process of limited memory and time.

    Raises:
        InputError: a node is damaged, or the limits are too low for the tree.
    """
    manifest = folder / MANIFEST_NAME
    if not manifest.is_file():
        return
    # The child gets `sys.path`, to import the same tensorstore.
    command = [sys.executable, "-I", str(_CHILD), str(folder.resolve()), str(_MAX_BYTES), str(_MAX_SECONDS), *sys.path]
    child = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if child.returncode in _LIMIT_SIGNALS:
        limits = f"{_MAX_BYTES >> 30} GiB of memory or {_MAX_SECONDS} s of processor time"
        raise InputError(f"{manifest} describes a tree that takes more than {limits}: write it again")
    if child.returncode:
        lines = child.stderr.decode(errors="replace").strip().splitlines() or [f"code {child.returncode}"]
        raise InputError(f"{manifest} cannot be read ({lines[-1][:200]}): it is incomplete, so write it again")
