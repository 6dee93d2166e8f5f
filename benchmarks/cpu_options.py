"""Options of XLA and of the system that a process gets at its start: their effect on a step of both trainers, on CPUs.

Run `python -m benchmarks.cpu_options`.  It prints the table of docs/performance.md.  Each option has a process of its own.
The processes take turns, and times are divided by those of the process without options in the same turn.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import vit_spec
from benchmarks.conversion import format_spread
from benchmarks.input_pipeline import engine_class
from train.data.batches import Batch
from train.recipes import Recipe

MODEL, BATCH_SIZE, TURNS = "vit_s16", 8, 5
YNN = "--xla_cpu_experimental_ynn_fusion_type"
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
OPTIONS: dict[str, dict[str, dict[str, str]]] = {
    "train.jax": {
        "none": {},
        "no YNN": {"XLA_FLAGS": f"{YNN}="},
        "YNN without reductions": {"XLA_FLAGS": f"{YNN}=-reduce"},
        "YNN without single products": {"XLA_FLAGS": f"{YNN}=-individual_dot"},
        "vectors of 512 bits": {"XLA_FLAGS": "--xla_cpu_prefer_vector_width=512"},
        "huge pages": HUGE_PAGES,
    },
    "train.torch": {"none": {}, "huge pages": HUGE_PAGES},
}


def work(trainer: str) -> None:
    """Answer each line of the standard input with the seconds of a training step and of an evaluation."""
    config = vit_spec.get(MODEL, num_classes=1000)
    engine: Any = engine_class(trainer)(
        config,
        Recipe(batch_size=BATCH_SIZE),
        task="classes",
        learning_rate=lambda step: 1e-4,
        initial_weights=None,
        folder=Path("unused"),
    )
    rng, shape = np.random.default_rng(0), (BATCH_SIZE, *config.image_size, config.in_channels)
    targets = rng.integers(0, 1000, BATCH_SIZE).astype(np.int32)
    batch = Batch(rng.integers(0, 256, shape, np.uint8), targets, np.arange(BATCH_SIZE), np.ones(BATCH_SIZE, bool))
    for _ in sys.stdin:
        start = time.perf_counter()
        float(engine.step(batch)["loss"])
        middle = time.perf_counter()
        np.asarray(engine.evaluate(batch).losses)
        print(middle - start, time.perf_counter() - middle, flush=True)


def measure(trainer: str) -> dict[str, list[tuple[float, ...]]]:
    """Return the seconds of a step and of an evaluation in each turn, for each option."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-m", "benchmarks.cpu_options", trainer]
    processes = {
        name: subprocess.Popen(command, env={**os.environ, **variables}, text=True, **pipes)
        for name, variables in OPTIONS[trainer].items()
    }
    turns: dict[str, list[tuple[float, ...]]] = {name: [] for name in processes}
    for _ in range(TURNS + 2):  # the first compiles, and the second warms up
        for name, process in processes.items():
            print(file=process.stdin, flush=True)
            turns[name].append(tuple(map(float, process.stdout.readline().split())))
    for process in processes.values():
        process.communicate()
    return {name: seconds[2:] for name, seconds in turns.items()}


def main() -> None:
    """Print the table."""
    print("| trainer | option | step / step without | evaluation / evaluation without |\n|---|---|---|---|")
    for trainer in OPTIONS:
        turns = measure(trainer)
        for name, seconds in turns.items():
            pairs = list(zip(seconds, turns["none"], strict=True))
            cells = (format_spread([own[i] / other[i] for own, other in pairs]) for i in range(2))
            print(f"| {trainer} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    work(sys.argv[1]) if len(sys.argv) > 1 else main()
