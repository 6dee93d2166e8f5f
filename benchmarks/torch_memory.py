"""The peak memory of a step of `train.torch` beside the estimate of `--plan`.

Run `python -m benchmarks.torch_memory [--model vit_s16] [--depth 12] [--batch-size 16] [--optimizers]`.  It prints a table
of docs/measurements/training.md: of options of a step, or of every optimizer with `--remat full`, with and without an EMA.
A dispatch mode adds up the storages that the operations of a step have made and that are still in use, besides the training
state.  Scratch space within an operation does not count.
"""

import argparse
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import vit_spec
from tests.torch_costs import PeakMemory
from train.data.batches import Batch
from train.recipes import OPTIMIZERS, Optimizer, Recipe
from train.torch.engine import TorchEngine
from train.torch.memory_estimate import estimate_memory

MIB = 1 << 20
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "--dtype bfloat16": {"dtype": "bfloat16"},
    "--remat dots": {"remat": "dots"},
    "--remat full": {"remat": "full"},
    "--accumulate 2": {"accumulate": 2},
}
OPTIMIZER_CASES: dict[str, dict[str, Any]] = {
    name + " and EMA" * bool(ema): {"optimizer": Optimizer(name=name), "ema": ema, "remat": "full"}
    for name in OPTIMIZERS
    for ema in (0.0, 0.999)
}


def measured_peak(config: vit_spec.ViTConfig, recipe: Recipe) -> int:
    """Return the peak bytes of a step beside the training state."""
    engine = TorchEngine(
        config, recipe, task="classes", learning_rate=lambda step: 1e-3, initial_weights=None, folder=Path("unused")
    )
    rng, rows = np.random.default_rng(0), np.arange(recipe.batch_size)
    images = rng.integers(0, 256, (len(rows), *config.image_size, config.in_channels), np.uint8)
    batch = Batch(images, rng.integers(0, config.num_classes, len(rows)).astype(np.int32), rows, np.ones(len(rows), bool))
    engine.step(batch)
    for parameter in engine._params.values():
        parameter.grad = None
    with PeakMemory() as memory:
        engine.step(batch)
    return memory.peak


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="vit_s16", choices=vit_spec.names())
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--depth", type=int)
    parser.add_argument("--optimizers", action="store_true")
    args = parser.parse_args()
    config = vit_spec.get(args.model, num_classes=1000, **({"depth": args.depth} if args.depth else {}))
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}, "
        f"{args.model}, {config.depth} blocks, batch size {args.batch_size}\n"
    )
    print("| options | measured, MiB | estimated, MiB | estimated / measured |\n|---|---|---|---|")
    for name, changes in (OPTIMIZER_CASES if args.optimizers else CASES).items():
        recipe = Recipe(batch_size=args.batch_size, **changes)
        estimate = estimate_memory(config, recipe, {"data": 1, "fsdp": 1, "tensor": 1})
        state = sum(estimate.memory.get(part, 0) for part in ("parameters", "optimizer state", "EMA"))
        measured = state + measured_peak(config, recipe)
        cells = f"{measured / MIB:,.0f} | {estimate.total / MIB:,.0f} | {estimate.total / measured:.2f}"
        print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
