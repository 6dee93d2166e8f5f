"""Command that opens each hostile file in its own process, within limits of memory and time, and prints a line of JSON.

    python -m tests.hostile_runner FOLDER [NAME ...]

Each process is forked from one that has imported everything that reading needs, so that only the file is measured.
FOLDER is an empty folder for the files, NAME a key of `tests.hostile_files.FILES`.
"""

import json
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np

import parity
from parity.checkpoints import containers
from tests.hostile_files import FILES
from vit_spec import InputError

MEMORY = 1 << 30  # bytes of address space, in addition to that of the interpreter
TENSORSTORE_MEMORY = 1 << 30  # in addition for tensorstore and its threads
MAX_CPU_SECONDS = 30
MAX_WALL_SECONDS = 120  # ends a process that waits forever
MAX_ELEMENTS_READ = 1 << 22  # of each array


def limit_resources(name):
    """Limit the memory and time of this process."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    space = used + MEMORY + (TENSORSTORE_MEMORY if name.startswith("orbax") else 0)
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    seconds = int(time.process_time()) + MAX_CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    signal.alarm(MAX_WALL_SECONDS)


def open_and_collect_errors(path):
    """Open a file as a checkpoint, and read the arrays of its container.

    Return the error messages, and the bytes of the arrays that were accepted.  The container that `parity.load` opened is
    not opened a second time, because opening takes almost all of the time.
    """
    errors, nbytes, opened, open_container = [], 0, [], containers.open

    def open_and_remember(path):
        opened.append(None)
        opened[-1] = open_container(path)
        return opened[-1]

    containers.open = open_and_remember
    try:
        parity.load(path)
    except InputError as error:
        errors.append(str(error))
    finally:
        containers.open = open_container
    try:
        for contents in opened or [containers.open(path)]:  # none was opened if a file beside the weights was refused
            arrays = contents.arrays.values() if contents else ()
            nbytes += sum(array.nbytes for array in arrays)
            for array in arrays:
                for first in range(0, min(array.size, MAX_ELEMENTS_READ), 1 << 20):
                    np.asarray(array.read(first, min(array.size, first + (1 << 20))))
    except InputError as error:
        errors.append(str(error))
    return errors, nbytes


def run_attack(name, folder):
    """Write a hostile file and open it within limits; return its errors, sizes and times."""
    path = FILES[name](folder)
    before, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limit_resources(name)
    try:
        result = dict(zip(("refused", "bytes"), open_and_collect_errors(path), strict=True))
    except BaseException as error:
        result = {"error": f"{type(error).__name__}: {error}"[:500]}
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    return result | {"name": name, "seconds": time.process_time() - before, "mebibytes": growth >> 10}


def main():
    """Open the files named on the command line, or all."""
    root, names = Path(sys.argv[1]), sys.argv[2:] or FILES
    open_and_collect_errors(root / "missing.npz")  # reading imports most of its modules when it is first used
    for number, name in enumerate(names):
        folder = root / str(number)
        folder.mkdir()
        child = os.fork()
        if not child:
            print(json.dumps(run_attack(name, folder)), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"name": name, "error": f"ended with status {status}"}), flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
