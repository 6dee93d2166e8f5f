"""How long a run waits for its first step: with nothing compiled yet, and with what an earlier run compiled.

Run `python -m benchmarks.start [--runs N] [ARGUMENT ...]`; it prints the table of docs/training.md.  Arguments are the
trainer's, `--config vit_s16` unless given.  Each run is a process of its own, a dry one: `first step` is from the beginning
of drawing the weights to the end of the first step, compilation included; `all` is from the start of the process.
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
from train.cli import parse
asked = parse("train.jax", sys.argv[1:])._replace(dry=True)
from train.jax import runtime
from train.jax.engine import JaxEngine
from train.loop.session import train

class Timed(JaxEngine):
    def __init__(self, *arguments, **options):
        self.began = time.time()
        super().__init__(*arguments, **options)

    def step(self, batch):
        metrics = super().step(batch)
        float(metrics["loss"])
        print(json.dumps([self.began, time.time()]), flush=True)
        return metrics

runtime.keep_freed_memory()
runtime.keep_compiled_programs()
train(asked, Timed)
"""


def waited(arguments: list[str], cache: str) -> tuple[float, float]:
    """Return the seconds to the first step's end, from the first weight and from the start of the process."""
    started = time.time()
    env = {**os.environ, "XDG_CACHE_HOME": cache}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", CHILD, *arguments], env=env, capture_output=True, text=True, check=True)
    began, ended = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    return ended - began, ended - started


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    given, arguments = parser.parse_known_args()
    arguments = arguments or ["--config", "vit_s16"]
    took: dict[str, list[tuple[float, float]]] = {"nothing": [], "an earlier run's programs": []}
    for _ in range(given.runs):
        with tempfile.TemporaryDirectory() as cache:
            for seconds in took.values():
                seconds.append(waited(arguments, cache))
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "flax", "optax"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}; ", end="")
    print(" ".join(arguments))
    print("\n| in the cache | first step, s (least to most) | all |\n|---|---|---|")
    for name, seconds in took.items():
        texts = [f"{median(each):.1f} ({min(each):.1f} to {max(each):.1f})" for each in zip(*seconds, strict=True)]
        print(f"| {name} | {' | '.join(texts)} |")


if __name__ == "__main__":
    main()
