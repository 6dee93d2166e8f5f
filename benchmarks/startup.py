"""Start-up time of a run: the time to its first step, with an empty compilation cache and with the cache of an earlier run.

Run `python -m benchmarks.startup [--runs N] [ARGUMENT ...]`.  It prints the table "Start-up time" of
docs/measurements/training.md.  Arguments are those of `train.jax`, by default `--config vit_s16`.  Each run is a dry run in
its own process.  `first step` is the time from the start of the initialization of the weights to the end of the first step,
including compilation; `total` is the time from the start of the process to the same end.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from statistics import median

CHILD = """
import json, sys, time
from train.cli import parse_request
request = parse_request("train.jax", sys.argv[1:])._replace(dry_run=True)
from train.jax import runtime
from train.jax.engine import JaxEngine
from train.loop.session import train

class TimedEngine(JaxEngine):
    def __init__(self, *arguments, **options):
        self.start = time.time()
        super().__init__(*arguments, **options)

    def step(self, batch):
        metrics = super().step(batch)
        float(metrics["loss"])
        print(json.dumps([self.start, time.time()]), flush=True)
        return metrics

runtime.keep_freed_memory()
runtime.keep_compiled_programs()
train(request, TimedEngine)
"""


def first_step_seconds(arguments: list[str], cache: str) -> tuple[float, float]:
    """Return the seconds from the start of the initialization, and from the start of the process, to the end of step 1."""
    start = time.time()
    env = {**os.environ, "XDG_CACHE_HOME": cache}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    process = subprocess.run([sys.executable, "-c", CHILD, *arguments], env=env, capture_output=True, text=True, check=True)
    engine_start, end = json.loads(next(line for line in process.stdout.splitlines() if line.startswith("[")))
    return end - engine_start, end - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    args, arguments = parser.parse_known_args()
    arguments = arguments or ["--config", "vit_s16"]
    times: dict[str, list[tuple[float, float]]] = {"nothing": [], "by an earlier run": []}
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as cache:
            for seconds in times.values():
                seconds.append(first_step_seconds(arguments, cache))
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "flax", "optax"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}; ", end="")
    print(" ".join(arguments))
    print("\n| compiled before | first step, s | total, s |\n|---|---|---|")
    for name, seconds in times.items():
        texts = [f"{median(each):.1f} ({min(each):.1f} to {max(each):.1f})" for each in zip(*seconds, strict=True)]
        print(f"| {name} | {' | '.join(texts)} |")


if __name__ == "__main__":
    main()
