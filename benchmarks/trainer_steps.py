"""A process that does training steps and evaluations of one of the trainers, when it is asked to.

`benchmarks.revisions` and `benchmarks.cpu_options` start several, which take turns.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

REPOSITORY = Path(__file__).parents[1]
WARM_UP = 2  # turns: in the first the step is compiled, in the second memory is taken that later ones reuse


class Turn(NamedTuple):
    """What a process measured in a turn: seconds of a step, seconds of an evaluation, and its peak memory in MiB so far."""

    step: float
    evaluation: float
    memory: float


@dataclass(frozen=True)
class Case:
    """What a process trains.

    Attributes:
        trainer: "train.jax" or "train.torch".
        model: a named model.
        batch_size: images.
        dtype: of the recipe.
        variables: environment variables of the process, besides those of this one.
        folder: the checkout whose code runs.
    """

    trainer: str
    model: str
    batch_size: int
    dtype: str = "float32"
    variables: Mapping[str, str] | None = None
    folder: Path = REPOSITORY


def start(case: Case) -> subprocess.Popen[str]:
    """Start the process of a case."""
    env = {**os.environ, **(case.variables or {}), "PYTHONPATH": str(case.folder)}
    request = {name: getattr(case, name) for name in ("trainer", "model", "batch_size", "dtype")}
    return subprocess.Popen(
        [sys.executable, "-P", __file__, json.dumps(request)],  # -P: modules are those of `folder`, this file is ours
        env=env,
        cwd=case.folder,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def take_turns(cases: Mapping[str, Case], turns: int) -> dict[str, list[Turn]]:
    """Return what each case measured in each turn.  The order of the cases changes with the turn.

    Raises:
        RuntimeError: a process failed.
    """
    processes = {name: start(case) for name, case in cases.items()}
    found: dict[str, list[Turn]] = {name: [] for name in cases}
    try:
        for turn in range(WARM_UP + turns):
            names = list(cases)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                process = processes[name]
                assert process.stdin and process.stdout
                print(file=process.stdin, flush=True)
                if not (line := process.stdout.readline()):
                    raise RuntimeError(f"{name}: {cases[name].trainer} failed with exit code {process.wait()}")
                found[name].append(Turn(*map(float, line.split())))
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    return {name: measured[WARM_UP:] for name, measured in found.items()}


def answer(trainer: str, model: str, batch_size: int, dtype: str) -> None:
    """Answer each line of the standard input with a line that has the entries of a `Turn`."""
    import vit_spec
    from benchmarks.input_pipeline import engine_class
    from train.data.batches import Batch
    from train.recipes import Recipe

    config = vit_spec.get(model, num_classes=1000)
    engine: Any = engine_class(trainer)(
        config,
        Recipe(batch_size=batch_size, dtype=dtype),  # type: ignore[arg-type]
        task="classes",
        learning_rate=lambda step: 1e-4,
        initial_weights=None,
        folder=Path("unused"),
    )
    rng, shape = np.random.default_rng(0), (batch_size, *config.image_size, config.in_channels)
    targets = rng.integers(0, 1000, batch_size).astype(np.int32)
    batch = Batch(rng.integers(0, 256, shape, np.uint8), targets, np.arange(batch_size), np.ones(batch_size, bool))
    for _ in sys.stdin:
        start = time.perf_counter()
        float(engine.step(batch)["loss"])
        middle = time.perf_counter()
        np.asarray(engine.evaluate(batch).losses)
        end = time.perf_counter()
        print(middle - start, end - middle, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, flush=True)


if __name__ == "__main__":
    answer(**json.loads(sys.argv[1]))
