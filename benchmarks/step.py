"""What a training step reaches on the devices at hand: images a second and the share of their peak, by model.

Run `python -m benchmarks.step [CONFIG ...] [--dtype bfloat16] [--batch-size N] [--mesh MESH] [--steps N] [--write]`; the
default are ViT-S/16, B/16, L/16 and H/14 at 224 pixels.  Images are random and lie on the devices, attention is the kernel
that the twin takes by itself.  The batch is the largest power of two, up to 1,024 a device, that the plan says fits.
`--write` keeps the table in benchmarks/results, under the devices' name.
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
from train.jax.memory_estimate import needs
from train.jax.runtime import keep_freed_memory
from train.plan import USABLE
from train.recipes import Recipe
from vit_spec import InputError, ViTConfig

MODELS = ["vit_s16", "vit_b16", "vit_l16", "vit_h14"]
MOST = 1024  # images a device
TURNS = 7
RESULTS = Path(__file__).parent / "results"


def largest(config: ViTConfig, recipe: Recipe, room: int, sizes: dict[str, int]) -> int:
    """Return the largest batch, a power of two a device, that fits into so many bytes of each."""
    devices, images = sizes["data"] * sizes["fsdp"], MOST
    while images > 1 and needs(config, replace(recipe, batch_size=images * devices), sizes).total > USABLE * room:
        images //= 2
    return images * devices


def row(config_name: str, given: argparse.Namespace, room: int | None) -> str:
    """A line of the table."""
    config = vit_spec.get(config_name, num_classes=1000)
    recipe = Recipe(batch_size=given.batch_size or 8, dtype=given.dtype, mesh=given.mesh)
    if not given.batch_size and room:
        sizes = dict(sharding.make(given.mesh, config).shape)
        recipe = replace(recipe, batch_size=largest(config, recipe, room, sizes))
    began = time.perf_counter()
    engine = JaxEngine(config, recipe, task="classes", rate=lambda step: 1e-4, start=None, folder=RESULTS)
    rng, count = np.random.default_rng(0), recipe.batch_size
    images = rng.integers(0, 256, (count, *config.image_size, 3), np.uint8)
    batch = Batch(images, rng.integers(0, 1000, count).astype(np.int32), np.arange(count), np.ones(count, bool))
    placed = engine._place(batch)
    first = engine._update(engine._state, *placed)  # donated: the engine's own is gone
    jax.block_until_ready(first)
    compiled, (state, _) = time.perf_counter() - began, first
    seconds = []
    for _ in range(TURNS):
        began = time.perf_counter()
        for _ in range(given.steps):
            state, metrics = engine._update(state, *placed)
        jax.block_until_ready((state, metrics))
        seconds.append((time.perf_counter() - began) / given.steps)
    if not np.isfinite(float(metrics["loss"])):
        raise InputError(f"the loss of {config_name} is {float(metrics['loss'])}")
    rates = [count / each for each in seconds]
    rate = f"{median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
    share = f"{3 * vit_spec.flops(config) * median(rates) / engine.peak_rate:.1%}" if engine.peak_rate else "not known"
    return f"| {config_name} | {count} | {rate} | {median(seconds) * 1e3:,.1f} ms | {share} | {compiled:.0f} s |"


def main() -> None:
    """Print the table, a row as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS, metavar="CONFIG")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--mesh", default="data=-1")
    parser.add_argument("--steps", type=int, default=10, help="in each of seven turns")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    keep_freed_memory()
    device, found = jax.devices()[0], [jax.device_count(), platform.machine(), os.cpu_count()]
    room = (device.memory_stats() or {}).get("bytes_limit")
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "jaxlib", "flax", "optax"))
    lines = [
        f"{found[0]} x {device.device_kind}, {found[1]}, {found[2]} cores, Python {platform.python_version()}, {versions}",
        f"{given.dtype}, mesh {given.mesh}; median of {TURNS} turns of {given.steps} steps (least to most)",
        "",
        "| model | images a step | images/s | a step | of the peak | first step, compiled |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for name in given.models:
        lines.append(row(name, given, room))
        print(lines[-1], flush=True)
    if given.write:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"step-{re.sub('[^a-z0-9]+', '-', device.device_kind.lower()).strip('-')}.md"
        path.write_text("\n".join(lines) + "\n")
        print(f"\nwrote {path}")


if __name__ == "__main__":
    main()
