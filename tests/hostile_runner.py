"""Open each hostile file in a process of its own, with limits on memory and time; print a line of JSON for each.

    python -m tests.hostile_runner FOLDER [NAME ...]

The processes are forks of one that has imported what reading needs, so that what they take is the files' alone.
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

MEMORY = 1 << 30  # bytes of address space besides those of the interpreter
LIBRARY = 1 << 30  # and for tensorstore, with its threads
SECONDS = 30  # of processor time
HANGS = 120  # seconds of wall time, against a process that waits for ever
SHOWN = 1 << 22  # entries of an array that are read


def limit(name):
    """Limit this process to what opening a file may take at the very most."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    space = used + MEMORY + (LIBRARY if name.startswith("orbax") else 0)
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    seconds = int(time.process_time()) + SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    signal.alarm(HANGS)


def refusals(path):
    """Open a file as weights, and read the arrays of its container.

    Return the messages of what was refused, and the bytes of the arrays that were not.
    """
    found, nbytes = [], 0
    try:
        parity.load(path)
    except InputError as error:
        found.append(str(error))
    try:
        arrays = containers.open(path).arrays.values()
        nbytes = sum(array.nbytes for array in arrays)
        for array in arrays:
            for first in range(0, min(array.size, SHOWN), 1 << 20):
                np.asarray(array.read(first, min(array.size, first + (1 << 20))))
    except InputError as error:
        found.append(str(error))
    return found, nbytes


def attempt(name, folder):
    """Write a hostile file and open it, within limits; return what came of it."""
    path = FILES[name](folder)
    before, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limit(name)
    try:
        found = dict(zip(("refused", "bytes"), refusals(path), strict=True))
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {error}"[:500]}
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    return found | {"name": name, "seconds": time.process_time() - before, "mebibytes": grown >> 10}


def main():
    root, names = Path(sys.argv[1]), sys.argv[2:] or FILES
    for number, name in enumerate(names):
        folder = root / str(number)
        folder.mkdir()
        child = os.fork()
        if not child:
            print(json.dumps(attempt(name, folder)), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"name": name, "error": f"ended with status {status}"}), flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
