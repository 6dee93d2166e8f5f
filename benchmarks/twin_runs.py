"""The same run in both trainers with `--rng shared`: how far losses and weights part.

Run `python -m benchmarks.twin_runs [--config vit_s16] [--steps 500] [--dtype float32]`.  It prints the tables of
docs/reference/numerics.md.  The engines of `train.jax` and `train.torch` start from the same weights and get the same
batches of the digits, with dropout of positions, attention and MLP, drop path, patch dropout, mixup, label smoothing, an
EMA and accumulation.

Training amplifies rounding errors.  Further runs, three in float32 and one in float64, tell how far rounding alone drives
runs apart: in PyTorch, with every weight changed by one unit in the last place, up or down, at the start and after each
step.  The trainers may part by three times as much (G3 of `parity.comparison.training.trajectories`).
"""

import argparse
import os
import platform
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

import parity
from parity.checkpoints.weights import Checkpoint, as_checkpoint
from parity.comparison.training.steps import perturb_by_one_ulp
from train.data.batches import Batch, DataLoader
from train.data.sources import Dataset, open_dataset
from train.data.targets import targets_for_task
from train.jax.engine import JaxEngine
from train.loop.init_from import draw_initial_weights
from train.loop.schedule import Schedule
from train.loop.session import choose_model
from train.recipes import RECIPES, Augment, DataInfo, Recipe
from train.torch.engine import TorchEngine
from vit_spec import ViTConfig

RATES = {"pos_drop": 0.1, "patch_drop": 0.25, "attn_drop": 0.1, "mlp_drop": 0.1, "drop_path": 0.1}
PERTURBED_RUNS, NOISE_FACTOR = {"float32": 3, "float64": 1}, 3.0
MARKS = (10, 50, 100, 200, 500)  # steps at which the weights are compared; the first has rate 0

Weights = dict[str, np.ndarray]


class PerturbedEngine:
    """An engine of PyTorch whose weights are changed by one unit in the last place at the start and after each step."""

    def __init__(self, engine: TorchEngine, seed: int) -> None:
        self._engine, self._rng = engine, np.random.default_rng(seed)
        self._perturb()

    @torch.no_grad()
    def _perturb(self) -> None:
        for place in self._engine._optimizer.placements.values():
            place.entries.copy_(torch.from_numpy(perturb_by_one_ulp(place.entries.numpy(), self._rng)))

    def step(self, batch: Batch) -> Any:
        """Do a step, and perturb the weights."""
        metrics = self._engine.step(batch)
        self._perturb()
        return metrics

    @property
    def weights(self) -> Weights:
        """The weights by the names of the PyTorch twin."""
        return weights_of(self._engine, self._engine.config)


def weights_of(engine: Any, config: ViTConfig) -> Weights:
    """Return the weights of an engine by the names of the PyTorch twin, float64."""
    if isinstance(engine, PerturbedEngine):
        return engine.weights
    if isinstance(engine, TorchEngine):
        found = {name: place.entries for name, place in engine._optimizer.placements.items()}
    else:
        tree = jax.tree.map(np.asarray, engine.state.params)
        found = dict(parity.to_torch(as_checkpoint(tree, config, "jax")))
    return {name: tensor.detach().numpy().astype(np.float64) for name, tensor in found.items()}


def distance(one: Weights, other: Weights, start: Weights) -> float:
    """Return the norm of the difference over all weights, relative to that of the change of `other` from the start."""
    difference = sum(float(np.square(one[name] - other[name]).sum()) for name in other)
    change = sum(float(np.square(other[name] - start[name]).sum()) for name in other)
    return float(np.sqrt(difference / change))


def regularised(name: str, source: Dataset, steps: int, accumulate: int) -> Recipe:
    """Return a named recipe with all regularisation on."""
    recipe = RECIPES[name](DataInfo(len(source.train), source.channels, source.size))
    changes = (*recipe.model.changes, *(f"regularisation.{rate}={value}" for rate, value in RATES.items()))
    return replace(
        recipe,
        rng="shared",
        epochs=f"{steps}steps",
        model=replace(recipe.model, changes=changes),
        augment=Augment(mixup=0.2),
        label_smoothing=0.1,
        ema=0.99,
        accumulate=accumulate,
        workers=0,
    )


def make(engine: Any, config: ViTConfig, recipe: Recipe, start: Checkpoint, schedule: Schedule) -> Any:
    """Return an engine that begins with the weights `start`."""
    rate = {"learning_rate": lambda step: schedule.learning_rate(recipe, step), "folder": Path("unused")}
    return engine(config, recipe, task="classes", initial_weights=start, **rate)


def batches(source: Dataset, config: ViTConfig, recipe: Recipe, steps: int) -> Iterator[Batch]:
    """Yield the training batches of a run."""
    targets = targets_for_task(source.train, source.classes, source.task, "classes")
    rows = np.arange(recipe.batch_size)
    loader = DataLoader(source.train, targets, config, recipe.batch_size, recipe.augment, rows, False, 0, "")
    yield from loader.training_batches(seed=recipe.seed, first_step=0, end_step=steps)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="vit_s16", choices=RECIPES)
    parser.add_argument("--steps", type=int, default=500, help="2 or more: the learning rate of the first is 0")
    parser.add_argument("--dtype", default="float64", choices=("float64", "float32"))
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()
    dtype = np.dtype(args.dtype)
    jax.config.update("jax_enable_x64", dtype == np.float64)
    torch.set_default_dtype(getattr(torch, args.dtype))
    source = open_dataset("digits")
    recipe = regularised(args.config, source, args.steps, args.accumulate)
    config = choose_model(recipe, source, "classes", None)[0]
    schedule = Schedule.from_recipe(recipe, len(source.train))
    drawn = draw_initial_weights(config, recipe.seed)
    start = replace(drawn, arrays={name: array.astype(dtype) for name, array in drawn.arrays.items()})
    engines = [make(each, config, recipe, start, schedule) for each in (JaxEngine, TorchEngine)]
    others = [make(TorchEngine, config, recipe, start, schedule) for _ in range(PERTURBED_RUNS[args.dtype])]
    engines += [PerturbedEngine(each, seed) for seed, each in enumerate(others)]
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "torch", "numpy"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}")
    print(
        f"{args.config} on the digits, {args.dtype}, seed {recipe.seed}; distances relative to the change of the weights\n"
    )
    print("| steps | loss | largest difference of a loss so far | distance of the weights | of perturbed runs |")
    print("|---|---|---|---|---|")
    first, largest = weights_of(engines[1], config), 0.0
    for n, batch in enumerate(batches(source, config, recipe, args.steps), 1):
        of_jax, of_torch, *_ = (float(engine.step(batch)["loss"]) for engine in engines)
        largest = max(largest, abs(of_jax - of_torch) / abs(of_torch))
        if n in (*MARKS, args.steps):
            found = [weights_of(engine, config) for engine in engines]
            apart = distance(found[0], found[1], first)
            noise = [distance(each, found[1], first) for each in found[2:]]
            cells = f"{of_torch:.4f} | {largest:.1e} | {apart:.1e} | {', '.join(f'{each:.1e}' for each in noise)}"
            print(f"| {n} | {cells} |", flush=True)
            passed = apart <= NOISE_FACTOR * max(noise)
    print(f"\n{'PASS' if passed else 'FAIL'}: the weights after {args.steps} steps")
    raise SystemExit(not passed)


if __name__ == "__main__":
    main()
