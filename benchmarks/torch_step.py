"""The training step of `train.torch` beside that of timm: the same model, batch, precision and allocator settings.

Run `python -m benchmarks.torch_step [--model vit_s16] [--batch-size 8] [--compiled]`.  It prints the table of
docs/measurements/training.md.  Both take uint8 images, normalize them, and do a step of AdamW with clipping: timm's as its
train.py does, with torch's fused AdamW and `clip_grad_norm_`.  The steps alternate, so that other work on the machine slows
both, and the ratio is the median of those of the turns.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import tests.goldens.peers  # noqa: F401  # makes torchvision importable, which timm imports
import vit_spec
from train.data.batches import Batch
from train.loop.process import keep_freed_memory
from train.recipes import Recipe
from train.torch.engine import TorchEngine

TIMM_NAMES = {"vit_ti16": "vit_tiny_patch16_224", "vit_s16": "vit_small_patch16_224", "vit_b16": "vit_base_patch16_224"}


def own_step(config: vit_spec.ViTConfig, batch: Batch, compiled: bool) -> Callable[[], Any]:
    """Return a step of `train.torch`."""
    engine = TorchEngine(
        config,
        Recipe(batch_size=len(batch.images), compile="on" if compiled else "off"),
        task="classes",
        learning_rate=lambda step: 1e-3,
        initial_weights=None,
        folder=Path("unused"),
    )
    return lambda: float(engine.step(batch)["loss"])


def timm_step(name: str, config: vit_spec.ViTConfig, batch: Batch, compiled: bool) -> Callable[[], Any]:
    """Return a step of timm; compiled, the whole model, as its train.py does."""
    import timm

    model = timm.create_model(TIMM_NAMES[name]).train()
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    mean, std = (torch.tensor(each)[:, None, None] * 255 for each in (config.pixels.mean, config.pixels.std))
    loss_fn = torch.nn.CrossEntropyLoss()

    def step() -> float:
        images = torch.tensor(batch.images).permute(0, 3, 1, 2).float().sub_(mean).div_(std)
        loss = loss_fn(forward(images), torch.tensor(batch.targets).long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def seconds(step: Callable[[], Any]) -> float:
    """Return the time of a step."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="vit_s16", choices=TIMM_NAMES)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--compiled", action="store_true")
    args = parser.parse_args()
    keep_freed_memory()
    config = vit_spec.get(args.model, num_classes=1000)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (args.batch_size, *config.image_size, 3), np.uint8)
    rows = np.arange(args.batch_size)
    batch = Batch(images, rng.integers(0, 1000, args.batch_size).astype(np.int32), rows, np.ones(args.batch_size, bool))
    steps = [own_step(config, batch, args.compiled), timm_step(args.model, config, batch, args.compiled)]
    for step in steps:
        step()
    times = [[seconds(step) for step in steps] for _ in range(args.turns)]
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "timm"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}\n")
    print("| model | batch | train.torch, s | timm, s | train.torch / timm |\n|---|---|---|---|---|")
    own, theirs, ratios = [a for a, _ in times], [b for _, b in times], [a / b for a, b in times]
    cells = [f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in (own, theirs, ratios)]
    print(f"| {args.model}{', compiled' * args.compiled} | {args.batch_size} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
