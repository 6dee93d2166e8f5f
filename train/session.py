"""One run from a recipe to its summary: data, model, engine, folder, loop, curves."""

import shlex
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

import vit_spec
from train import curves
from train.cli import INTERRUPTED
from train.data import Feed, num_outputs, targets
from train.loop import Diverged, Loop, Plan
from train.metrics import LEADING, shown
from train.progress import Display
from train.recipes import Recipe, model_config
from train.run import Run
from train.sources import Examples, Source, open_source
from vit_spec import ViTConfig

DIVERGED = 1


def train(name: str, recipe: Recipe, make_engine: Callable[..., Any]) -> int:
    """Train by a recipe and return the exit status: 0, 1 when the loss diverged, 130 after Ctrl-C.

    make_engine: called with (config, recipe, warmup=..., total=...), numbers of steps; it returns a `train.loop.Engine`.

    Raises:
        InputError: a recipe, a data set or an image that cannot be used.
    """
    console = Console()
    source = open_source(recipe.data, recipe.held_out)
    config = model_config(
        recipe.model,
        num_outputs=num_outputs(source.classes, recipe.task),
        in_channels=source.channels,
        grid=source.grid,
    )
    plan = Plan.of(recipe, len(source.train))

    def feed(examples: Examples) -> Feed:
        return Feed(examples, targets(examples, source.classes, recipe.task), config, recipe.batch_size)

    train_feed, held_out = feed(source.train), feed(source.held_out)
    engine = make_engine(config, recipe, warmup=plan.warmup, total=plan.total)
    path = Path(recipe.run or f"runs/{name}-{datetime.now():%Y%m%d-%H%M%S}")
    with Run(path, recipe, config) as run:
        _print(console, overview(name, recipe, config, source, plan, engine.hardware, path))
        display = Display(console, plan.total, recipe.batch_size)
        loop = Loop(engine, recipe, plan, train_feed, held_out, source.classes, run, display)
        try:
            loop.fit()
        except Diverged as error:
            print(f"error: {error}", file=sys.stderr)
            return DIVERGED
        finally:
            if run.records:
                curves.draw(path / "curves.png", run.records, recipe.task, title(name, recipe, config))
        _print(console, summary(recipe, loop, run))
    return INTERRUPTED if loop.interrupted else 0


def title(name: str, recipe: Recipe, config: ViTConfig) -> str:
    """What a run is, in a line."""
    return f"{name}: {vit_spec.count(config) / 1e6:.1f} M parameters, on {recipe.data}"


def overview(
    name: str, recipe: Recipe, config: ViTConfig, source: Source, plan: Plan, hardware: str, path: Path
) -> dict[str, str]:
    """What is about to happen, and what was decided without being asked."""
    (height, width), (ph, pw), (rows, columns) = config.image_size, config.patch_size, config.grid
    channels = {1: "grey", 3: "colour"}[config.in_channels]
    counts = f"{len(source.train):,} images, {len(source.held_out):,} held out, {len(source.classes)} classes"
    o, notes = recipe.optimizer, list(source.notes)
    if source.grid == config.grid and recipe.model.image_size is None:
        notes.append(f"images are small: {height}x{width} gives {rows}x{columns} patches; --model.image-size changes it")
    return {
        "recipe": f"{name}, seed {recipe.seed}",
        "model": f"{recipe.model.name}, {config.depth} blocks of width {config.width}, {config.num_heads} heads",
        "parameters": f"{vit_spec.count(config):,}",
        "data": f"{recipe.data}: {counts}",
        "images": f"{height}x{width}, {channels}, in {rows}x{columns} patches of {ph}x{pw}",
        "mesh": hardware,
        "steps": f"{plan.total:,} of {recipe.batch_size} images, {recipe.epochs:g} epochs",
        "learning rate": f"up to {o.lr:g} in {plan.warmup:.0f} steps, then a cosine to 0",
        "assumed": "; ".join(notes),
        "folder": str(path),
    }


def summary(recipe: Recipe, loop: Loop, run: Run) -> dict[str, str]:
    """What came of it, and the command that goes on from here."""
    leading, ended = LEADING[recipe.task], "interrupted" if loop.interrupted else "finished"
    rows = {ended: f"{loop.done:,} of {loop.plan.total:,} steps in {run.seconds:.0f} s"}
    if loop.last:
        metrics = {name: value for name, value in loop.last.items() if "/" not in name}
        rows["held out"] = ", ".join(f"{name} {shown(name, value)}" for name, value in metrics.items())
        rows["best"] = f"{leading} {shown(leading, loop.best[leading])}, in {run.best}"
    rows["weights"] = f"{run.weights}, after step {loop.done:,}"
    if run.records:
        rows["curves"] = str(run.path / "curves.png")
    rows["the same in PyTorch?"] = f"python -m parity check {shlex.quote(str(run.path))}"
    return rows


def _print(console: Console, rows: dict[str, str]) -> None:
    """A name and a text a line, aligned; lines are never broken, so that commands and paths can be copied."""
    width = max(map(len, rows))
    for name, text in rows.items():
        console.print(Text(f"{name:{width}}  ", style="bold"), Text(text), sep="", soft_wrap=True, highlight=False)
