"""A run that changes its trainer again and again, beside runs that do not: how far their weights part.

Run `python -m benchmarks.hand_over [--config vit_s16] [--steps 200] [--every 25] [--dtype float64]`.  It prints the table
of docs/guides/resume.md.  The runs are those of `benchmarks.twin_runs`: one of `train.jax`, one of `train.torch`, and one
of `train.torch` whose weights are changed by one unit in the last place after each step.  The fourth begins with
`train.jax` and changes its trainer every 25 steps, by way of a checkpoint.
"""

import argparse
import os
import platform
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
import torch

from benchmarks.twin_runs import NOISE_FACTOR, PerturbedEngine, batches, distance, make, regularised, weights_of
from train.data.sources import open_dataset
from train.jax.engine import JaxEngine
from train.loop import hand_over
from train.loop.init_from import draw_initial_weights
from train.loop.loop_state import LoopState
from train.loop.schedule import Schedule
from train.loop.session import choose_model
from train.recipes import RECIPES
from train.torch.engine import TorchEngine


class ChangingRun:
    """A run whose trainer changes every few steps.

    engine: the engine of the present trainer.
    seconds: the times of the changes: one trainer's checkpoint is written, converted, and read by the other.
    """

    def __init__(self, make_engine: Any, every: int, folder: Path) -> None:
        self.engine, self.seconds = make_engine(JaxEngine), list[float]()
        self._make, self._every, self._folder, self._steps = make_engine, every, folder, 0

    def step(self, batch: Any) -> Any:
        """Do a step, in the other trainer than before if it is time for a change."""
        if self._steps and self._steps % self._every == 0:
            start = time.perf_counter()
            self.engine._folder = self._folder
            self.engine.save_checkpoint(self._steps, LoopState())
            self.engine.close()
            self.engine = self._make(TorchEngine if isinstance(self.engine, JaxEngine) else JaxEngine)
            assert hand_over.hand_over(self.engine, self._folder, "classes", lambda step, state: None) is not None
            self.seconds.append(time.perf_counter() - start)
        self._steps += 1
        return self.engine.step(batch)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="vit_s16", choices=RECIPES)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--dtype", default="float64", choices=("float64", "float32"))
    args = parser.parse_args()
    dtype = np.dtype(args.dtype)
    jax.config.update("jax_enable_x64", dtype == np.float64)
    torch.set_default_dtype(getattr(torch, args.dtype))
    source = open_dataset("digits")
    recipe = regularised(args.config, source, args.steps, 2)
    config = choose_model(recipe, source, "classes", None)[0]
    schedule = Schedule.from_recipe(recipe, len(source.train))
    drawn = draw_initial_weights(config, recipe.seed)
    start = replace(drawn, arrays={name: array.astype(dtype) for name, array in drawn.arrays.items()})

    def make_engine(engine: Any) -> Any:
        return make(engine, config, recipe, start, schedule)

    with tempfile.TemporaryDirectory() as folder:
        one, other = make_engine(JaxEngine), make_engine(TorchEngine)
        perturbed = PerturbedEngine(make_engine(TorchEngine), 0)
        changing = ChangingRun(make_engine, args.every, Path(folder) / "checkpoints")
        versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "torch", "numpy"))
        print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}")
        print(f"{args.config} on the digits, {args.dtype}, a change every {args.every} steps\n")
        print("| steps | loss | changing - PyTorch | changing - JAX | JAX - PyTorch | perturbed - PyTorch |")
        print("|---|---|---|---|---|---|")
        first = weights_of(other, config)
        for n, batch in enumerate(batches(source, config, recipe, args.steps), 1):
            runs = (one, other, perturbed, changing)
            _, loss, *_ = (float(each.step(batch)["loss"]) for each in runs)
            if n % (2 * args.every) == 0 or n == args.steps:
                engines = (one, other, perturbed, changing.engine)
                of_jax, of_torch, noisy, found = (weights_of(each, config) for each in engines)
                pairs = ((found, of_torch), (found, of_jax), (of_jax, of_torch), (noisy, of_torch))
                apart = [distance(*pair, first) for pair in pairs]
                print(f"| {n} | {loss:.4f} | {' | '.join(f'{each:.1e}' for each in apart)} |", flush=True)
        passed = apart[0] <= NOISE_FACTOR * apart[3]
        print(f"\n{'PASS' if passed else 'FAIL'}: the weights after {args.steps} steps")
        times = f", {median(changing.seconds):.1f} s each" if changing.seconds else ""
        print(f"{len(changing.seconds)} changes of the trainer{times}")
    raise SystemExit(not passed)


if __name__ == "__main__":
    main()
