"""Throughput of a training step on the devices of this machine: images/s and model FLOPs utilization (MFU), by model.

Run `python -m benchmarks.step [CONFIG ...] [--dtype bfloat16] [--batch-size N] [--mesh MESH] [--steps N] [--write]`.
docs/measurements/training.md names this command, and has no figures of it yet.  The default models are ViT-S/16, B/16, L/16
and H/14 at 224 pixels.  The images are random and stay on the devices; attention uses the kernel that the twin chooses by
default.  The default batch size is the largest power of two per device, up to 1,024, that fits by the memory estimate.
`--write` writes the table to benchmarks/results, under the name of the device.
"""

import argparse
import os
import platform
import re
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median

import jax
import numpy as np

import vit_spec
from train.data.batches import Batch
from train.jax import sharding
from train.jax.engine import JaxEngine
from train.jax.memory_estimate import estimate_memory
from train.jax.runtime import keep_freed_memory
from train.plan import USABLE_FRACTION
from train.recipes import Recipe
from vit_spec import InputError, ViTConfig

MODELS = ["vit_s16", "vit_b16", "vit_l16", "vit_h14"]
MAX_IMAGES_PER_DEVICE = 1024
REPEATS = 7
RESULTS = Path(__file__).parent / "results"


def largest_batch_size(config: ViTConfig, recipe: Recipe, memory_limit: int, sizes: dict[str, int]) -> int:
    """Return the largest batch size, a power of two per device, that fits into `memory_limit` bytes of each device."""
    devices, images = sizes["data"] * sizes["fsdp"], MAX_IMAGES_PER_DEVICE
    while (
        images > 1
        and estimate_memory(config, replace(recipe, batch_size=images * devices), sizes).total
        > USABLE_FRACTION * memory_limit
    ):
        images //= 2
    return images * devices


def measure(config_name: str, args: argparse.Namespace, memory_limit: int | None) -> str:
    """Return a row of the table: the measurements of a named model.

    memory_limit: bytes of memory of a device; None if it is not known.
    """
    config = vit_spec.get(config_name, num_classes=1000)
    recipe = Recipe(batch_size=args.batch_size or 8, dtype=args.dtype, mesh=args.mesh)
    if not args.batch_size and memory_limit:
        sizes = dict(sharding.make_mesh(args.mesh, config).shape)
        recipe = replace(recipe, batch_size=largest_batch_size(config, recipe, memory_limit, sizes))
    start = time.perf_counter()
    engine = JaxEngine(
        config, recipe, task="classes", learning_rate=lambda step: 1e-4, initial_weights=None, folder=RESULTS
    )
    rng, count = np.random.default_rng(0), recipe.batch_size
    images = rng.integers(0, 256, (count, *config.image_size, 3), np.uint8)
    batch = Batch(images, rng.integers(0, 1000, count).astype(np.int32), np.arange(count), np.ones(count, bool))
    device_batch = engine._shard_batch(batch)
    first = engine._compiled_step(engine._state, *device_batch)  # donates the engine's state
    jax.block_until_ready(first)
    first_step_seconds, (state, _) = time.perf_counter() - start, first
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(args.steps):
            state, metrics = engine._compiled_step(state, *device_batch)
        jax.block_until_ready((state, metrics))
        seconds.append((time.perf_counter() - start) / args.steps)
    if not np.isfinite(float(metrics["loss"])):
        raise InputError(f"the loss of {config_name} is {float(metrics['loss'])}")
    rates = [count / each for each in seconds]
    rate = f"{median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
    mfu = f"{3 * vit_spec.flops(config) * median(rates) / engine.peak_flops:.1%}" if engine.peak_flops else "not known"
    return f"| {config_name} | {count} | {rate} | {median(seconds) * 1e3:,.1f} ms | {mfu} | {first_step_seconds:.0f} s |"


def main() -> None:
    """Print the table, each row as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS, metavar="CONFIG")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--mesh", default="data=-1")
    parser.add_argument("--steps", type=int, default=10, help="steps in each of seven repeats")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    keep_freed_memory()
    device, host = jax.devices()[0], [jax.device_count(), platform.machine(), os.cpu_count()]
    memory_limit = (device.memory_stats() or {}).get("bytes_limit")
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "jaxlib", "flax", "optax"))
    lines = [
        f"{host[0]} x {device.device_kind}, {host[1]}, {host[2]} cores, Python {platform.python_version()}, {versions}",
        f"{args.dtype}, mesh {args.mesh}; median of {REPEATS} repeats of {args.steps} steps (least to most)",
        "",
        "| model | batch size | images/s | step time | MFU | first step, with compilation |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for name in args.models:
        lines.append(measure(name, args, memory_limit))
        print(lines[-1], flush=True)
    if args.write:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"step-{re.sub('[^a-z0-9]+', '-', device.device_kind.lower()).strip('-')}.md"
        path.write_text("\n".join(lines) + "\n")
        print(f"\nwrote {path}")


if __name__ == "__main__":
    main()
