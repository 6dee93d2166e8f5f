"""What reading images costs a run: its steps fed from files against the same steps on a batch that is there already.

Run `python -m benchmarks.training FOLDER [--config NAME] [--batch-size N] [--steps N] [--runs N] [ARGUMENT ...]`; it prints
the table of docs/training.md.  FOLDER has class folders of JPEG files, each of which is shown as often as it takes, under
as many names; other arguments are the trainer's.  A run begins with nothing prepared and counts the wait for its first
batch; fed and unfed runs alternate, and ratios are taken between neighbours.  `pipeline` is what preparing images reaches
alone.
"""

import argparse
import itertools
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median

import jax

from train.cli import parse
from train.data.batches import Batch, Feed, targets, usual_workers
from train.jax.engine import JaxEngine
from train.jax.runtime import keep_freed_memory
from train.loop.session import network


def repeated(folder: Path, into: Path, count: int) -> None:
    """Fill `into` with class folders of `count` files or somewhat more, links to those of `folder`."""
    files = sorted(path for path in folder.glob("*/*") if path.is_file())
    for turn in range(-(-count // len(files))):
        for path in files:
            (into / path.parent.name).mkdir(exist_ok=True)
            (into / path.parent.name / f"{turn}-{path.name}").symlink_to(path.absolute())


def stepped(engine: JaxEngine, batches: Iterable[Batch]) -> float:
    """Train on these batches, waiting for each step as the trainer does, two steps late; return the seconds it took."""
    began, pending = time.perf_counter(), []
    for batch in batches:
        pending.append(engine.step(batch)["loss"])
        if len(pending) > 2:
            float(pending.pop(0))
    jax.block_until_ready(pending)
    return time.perf_counter() - began


def prepared(batches: Iterator[Batch]) -> float:
    """Return the seconds that it takes to make these batches."""
    began = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - began


def shown(values: list[float], digits: int) -> str:
    """Median and range."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", default="vit_s16")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs", type=int, default=5)
    given, more = parser.parse_known_args()
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as place:
        repeated(given.folder, Path(place), 2 * given.batch_size * given.steps)
        batch = ["--batch-size", str(given.batch_size), "--model.image-size", "224", "224"]
        asked = parse("train.jax", ["--config", given.config, "--data", f"folder:{place}", *batch, *more])
        recipe, source = asked.recipe, asked.source
        config, _, _ = network(recipe, source, "classes")
        engine = JaxEngine(config, recipe, task="classes", rate=lambda step: 1e-4, start=None, folder=Path(place))
        answers = targets(source.train, source.classes, source.kind, "classes")
        workers = usual_workers(source) if recipe.workers is None else recipe.workers
        feed = Feed(source.train, answers, config, recipe.batch_size, recipe.augment, workers=workers)
        one = next(feed.training(seed=0, first=0, last=1))
        stepped(engine, [one])
        fed, unfed, alone = [], [], []
        for turn in range(given.runs):
            first = turn * given.steps
            alone.append(prepared(feed.training(seed=0, first=first, last=first + given.steps)))
            unfed.append(stepped(engine, itertools.repeat(one, given.steps)))
            fed.append(stepped(engine, feed.training(seed=0, first=first, last=first + given.steps)))
    images = given.batch_size * given.steps
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "grain", "pillow"))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{engine.hardware}, {machine}, {versions}")
    command, length = " ".join([given.config, *more]), f"{given.steps} steps of {given.batch_size} a run"
    print(f"{command}; {length}; workers: {workers or 'threads'}\n")
    print("| pipeline, images/s | steps on one batch | steps fed from files | fed, of unfed |\n|---|---|---|---|")
    rates = [[images / seconds for seconds in each] for each in (alone, unfed, fed)]
    ratios = [one / other for one, other in zip(unfed, fed, strict=True)]
    print(f"| {shown(rates[0], 0)} | {shown(rates[1], 2)} | {shown(rates[2], 2)} | {shown(ratios, 3)} |")


if __name__ == "__main__":
    main()
