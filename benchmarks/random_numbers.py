"""The cost of random numbers: dropout of attention weights, and a training step with `--rng own` and `--rng shared`.

Run `python -m benchmarks.random_numbers [--model vit_s16] [--batch-size 8]`.  It prints the tables of
docs/reference/numerics.md.  The ways alternate, so that other work on the machine slows all of them.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
import torch
import torch.nn.functional as F

import vit_jax.layers
import vit_jax.noise
import vit_spec
import vit_torch
from train.data.batches import Batch
from train.jax.engine import JaxEngine
from train.loop.init_from import draw_initial_weights
from train.loop.process import keep_freed_memory
from train.recipes import Recipe
from train.torch.engine import TorchEngine
from vit_spec.noise import Site
from vit_torch.noise import make_noise, signed_threshold

RATE = 0.1
RATES = {"pos_drop": RATE, "attn_drop": RATE, "mlp_drop": RATE, "drop_path": RATE}
Step = Callable[[], Any]


def dropouts(config: vit_spec.ViTConfig, batch_size: int) -> dict[str, Step]:
    """Return functions that apply dropout to the attention weights of a block."""
    shape = (batch_size, config.num_heads, config.num_tokens, config.num_tokens)
    x = torch.rand(shape)
    noise = make_noise(config, vit_torch.Key(vit_torch.random_key(0)))[0]
    of_jax = vit_jax.noise.make_noise(config, jax.random.key(0))[0]

    def shared(x: torch.Tensor) -> torch.Tensor:
        return torch.where(noise.keeps(Site.ATTENTION, shape, signed_threshold(RATE)), x / (1 - RATE), 0)

    compiled = torch.compile(shared, dynamic=False)
    in_jax, y = jax.jit(partial(vit_jax.layers.dropout, rate=RATE, noise=of_jax, site=Site.ATTENTION)), jax.numpy.asarray(x)
    return {
        "PyTorch's own": lambda: F.dropout(x, RATE),
        "shared in PyTorch": lambda: shared(x),
        "shared in PyTorch, compiled": lambda: compiled(x),
        "in JAX": lambda: jax.block_until_ready(in_jax(y)),
    }


def steps(config: vit_spec.ViTConfig, batch_size: int) -> dict[str, Step]:
    """Return training steps of all regularisation, with each kind of random numbers."""
    rng, rows = np.random.default_rng(0), np.arange(batch_size)
    images = rng.integers(0, 256, (batch_size, *config.image_size, 3), np.uint8)
    batch = Batch(images, rng.integers(0, 1000, batch_size).astype(np.int32), rows, np.ones(batch_size, bool))
    plain, start = config.replace(regularisation=dict.fromkeys(RATES, 0.0)), draw_initial_weights(config, 0)

    def make(engine: Any, config: vit_spec.ViTConfig, rng: Any) -> Step:
        given = {"learning_rate": lambda step: 1e-3, "initial_weights": replace(start, config=config)}
        made = engine(config, Recipe(batch_size=batch_size, rng=rng), task="classes", folder=Path("unused"), **given)
        return lambda: float(made.step(batch)["loss"])

    return {
        "train.torch without dropout": make(TorchEngine, plain, "own"),
        "train.torch --rng own": make(TorchEngine, config, "own"),
        "train.torch --rng shared": make(TorchEngine, config, "shared"),
        "train.jax without dropout": make(JaxEngine, plain, "own"),
        "train.jax": make(JaxEngine, config, "shared"),
    }


def seconds(step: Step) -> float:
    """Return the time of a call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(ways: dict[str, Step], turns: int) -> dict[str, list[float]]:
    """Return the seconds of each way in each turn; the first turn, which compiles, does not count."""
    for way in ways.values():
        way()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            times[name].append(seconds(way))
    return times


def cell(values: list[float], digits: int) -> str:
    """Return the median of values and their range as text."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="vit_s16", choices=vit_spec.names())
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    keep_freed_memory()
    config = vit_spec.get(args.model, num_classes=1000, regularisation=RATES)
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "torch"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}\n")
    entries = args.batch_size * config.num_heads * config.num_tokens**2
    print(f"| dropout of {entries:,} entries | ns an entry |\n|---|---|")
    for name, times in measure(dropouts(config, args.batch_size), args.turns).items():
        print(f"| {name} | {cell([1e9 * each / entries for each in times], 1)} |")
    print(f"\n| {args.model}, batch {args.batch_size} | s a step | / without dropout |\n|---|---|---|")
    found = measure(steps(config, args.batch_size), args.turns)
    for name, times in found.items():
        base = found[f"{name.split()[0]} without dropout"]
        print(f"| {name} | {cell(times, 2)} | {cell([a / b for a, b in zip(times, base, strict=True)], 2)} |")


if __name__ == "__main__":
    main()
