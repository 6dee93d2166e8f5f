"""Judge pairs of one source: `python -m benchmarks.ports.worker NAMES FAULTS SEED SECONDS [PATH ...]`.

The process imports the frameworks, and forks for each of the comma-separated NAMES; the PATHS are then put first on
sys.path.  Every result is printed as one line of JSON, and one with the event "end" after each pair.  A pair that takes
more than SECONDS is stopped.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from typing import Any

from benchmarks.ports.pairs import find

PRELOADED = ("jax.numpy", "flax.linen", "flax.nnx", "torch", "tests.goldens.peers")  # the last makes torchvision importable


def print_result(result: dict[str, Any]) -> None:
    """Print a result as a line."""
    print("RESULT " + json.dumps(result), flush=True)


def judge_pair(name: str, faults: int, seed: int) -> None:
    """Judge a pair in this process, and print the results."""
    import torch

    from benchmarks.ports.verdicts import judge

    torch.set_num_threads(1)
    has_right = False
    try:
        for result in judge(find(name), faults, seed):
            has_right = True
            print_result(result)
    except Exception as error:  # a builder of any library can raise anything
        traceback.print_exc()
        event = "stopped" if has_right else "error"
        print_result({"event": event, "pair": name, "reason": f"{type(error).__name__}: {error}"[:1500]})


def judge_in_fork(name: str, faults: int, seed: int, seconds: float) -> None:
    """Judge a pair in a forked process, and print an error if it crashes or takes too long."""
    child = os.fork()
    if child == 0:
        judge_pair(name, faults, seed)
        sys.stdout.flush()
        os._exit(0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if status:
                print_result({"event": "stopped", "pair": name, "reason": f"the process ended with status {status}"})
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print_result({"event": "stopped", "pair": name, "reason": f"more than {seconds:.0f} s"})
    print_result({"event": "end", "pair": name})


def main() -> None:
    """Judge the pairs."""
    names, faults, seed, seconds, *paths = sys.argv[1:]
    warnings.simplefilter("ignore")
    for module in (*PRELOADED, "benchmarks.ports.verdicts"):
        importlib.import_module(module)
    sys.path[:0] = paths
    for package in sorted({package.partition(".")[0] for name in names.split(",") for package in find(name).torch_code}):
        with contextlib.suppress(ImportError):  # which a builder meets again
            importlib.import_module(package)  # before the forks, because it takes seconds
    for name in names.split(","):
        judge_in_fork(name, int(faults), int(seed), float(seconds))


if __name__ == "__main__":
    main()
