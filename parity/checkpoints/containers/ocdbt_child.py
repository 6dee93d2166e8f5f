"""Program that reads all nodes of an OCDBT store within limits; `ocdbt.check_tree` runs it.

It exits with 0; with 1, after a line on stderr with the error; or it is ended by a signal when it exceeds a limit.
tensorstore ends the process when it cannot allocate memory.

    python -I ocdbt_child.py FOLDER MAX_BYTES MAX_SECONDS [ENTRY_OF_SYS_PATH ...]
"""

import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any


def main(folder: str, max_bytes: int, max_seconds: int) -> None:
    """List the keys of the store in a folder.

    max_bytes: of address space, in addition to that of tensorstore itself.
    max_seconds: of processor time.
    """
    import tensorstore as ts

    one_thread = {"limit": 1}  # each thread takes address space
    context = ts.Context({"file_io_concurrency": one_thread, "data_copy_concurrency": one_thread})
    base = {"driver": "file", "path": f"{folder}/"}
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, max_seconds)
    with suppress(OSError):  # only Linux has this file
        with open("/proc/self/statm") as file:
            _limit(resource.RLIMIT_AS, int(file.read().split()[0]) * resource.getpagesize() + max_bytes)
    try:
        ts.KvStore.open({"driver": "ocdbt", "base": base}, context=context).result().list().result()
    except MemoryError:
        os.kill(os.getpid(), signal.SIGABRT)
    except Exception as error:  # tensorstore raises one type of error for damage and several for missing files
        sys.exit(str(error).split("\n")[0].split(" [")[0])


def _limit(kind: Any, value: int) -> None:
    """Lower the soft limit of a resource."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    sys.path[:] = sys.argv[4:]
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
