"""The peak memory of a step of `train.torch` beside the estimate of `--plan`.

Run `python -m benchmarks.torch_memory [--model vit_s16] [--batch-size 16]`.  It prints the table of
docs/measurements/training.md.  A dispatch mode adds up the storages that the operations of a step have made and that are
still in use, besides parameters and moments.  Scratch space within an operation does not count.
"""

import argparse
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import vit_spec
from tests.torch_costs import LiveTensors
from train.data.batches import Batch
from train.recipes import Recipe
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


class PeakMemory(LiveTensors):
    """Keeps the largest sum of the storages in use, looked at after every third operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._operations = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(function, types, args, kwargs)
        self._operations += 1
        if self._operations % 3 == 0:
            self.peak = max(self.peak, self.bytes)
        return out


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
    args = parser.parse_args()
    config = vit_spec.get(args.model, num_classes=1000)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}, "
        f"{args.model}, batch size {args.batch_size}\n"
    )
    print("| options | measured, MiB | estimated, MiB | estimated / measured |\n|---|---|---|---|")
    for name, changes in CASES.items():
        recipe = Recipe(batch_size=args.batch_size, **changes)
        estimate = estimate_memory(config, recipe, {"data": 1, "fsdp": 1, "tensor": 1})
        state = estimate.memory["parameters"] + estimate.memory["optimizer state"]
        measured = state + measured_peak(config, recipe)
        cells = f"{measured / MIB:,.0f} | {estimate.total / MIB:,.0f} | {estimate.total / measured:.2f}"
        print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
