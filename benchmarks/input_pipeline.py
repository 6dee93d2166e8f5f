"""Throughput of training from image files, compared with training on one batch in memory.

Run `python -m benchmarks.input_pipeline FOLDER [--trainer train.torch] [--config NAME] [--batch-size N] [--steps N] [--runs
N] [ARGUMENT ...]`.  It prints the table "Input pipeline" of docs/measurements/training.md.  FOLDER has class folders of
JPEG files.  If the steps need more files, links under other names repeat them.  Other arguments are those of the trainer.
A run starts with no batch loaded, and its time includes the wait for the first batch.  Runs on loaded batches and on one
batch alternate, and ratios are between neighbouring runs.  "Loading alone" is the throughput of the data loader without
training.
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
from typing import Any, NamedTuple

from benchmarks.machine import keep_freed_memory
from train.cli import parse_request
from train.data.batches import Batch, DataLoader
from train.data.targets import targets_for_task
from train.data.workers import default_workers
from train.loop.session import choose_model


def link_repeatedly(folder: Path, into: Path, min_files: int) -> None:
    """Create class folders in `into` with links to the files of `folder`, repeated until there are `min_files` or more."""
    files = sorted(path for path in folder.glob("*/*") if path.is_file())
    for repeat in range(-(-min_files // len(files))):
        for path in files:
            (into / path.parent.name).mkdir(exist_ok=True)
            (into / path.parent.name / f"{repeat}-{path.name}").symlink_to(path.absolute())


TRAINERS = ("train.jax", "train.torch")


def engine_class(trainer: str) -> Any:
    """Return the engine of a trainer, whose settings of the process are made."""
    keep_freed_memory(trainer.removeprefix("train."))
    if trainer == "train.jax":
        from train.jax.engine import JaxEngine

        return JaxEngine
    from train.torch.engine import TorchEngine

    return TorchEngine


def time_training(engine: Any, batches: Iterable[Batch]) -> float:
    """Train on the batches and return the seconds; wait for each step's loss two steps later, as the trainer does."""
    start, pending = time.perf_counter(), []
    for batch in batches:
        pending.append(engine.step(batch)["loss"])
        if len(pending) > 2:
            float(pending.pop(0))
    for loss in pending:
        float(loss)
    return time.perf_counter() - start


def time_loading(batches: Iterator[Batch]) -> float:
    """Return the seconds that it takes to load the batches."""
    start = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - start


def format_spread(values: list[float], digits: int) -> str:
    """Return the median and range as text."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


class Rates(NamedTuple):
    """Images/s of each run: loading alone, training on one batch in memory, and training on loaded batches."""

    loading: list[float]
    fixed: list[float]
    loaded: list[float]


def measure(
    folder: Path, trainer: str, config_name: str, batch_size: int, steps: int, runs: int, arguments: list[str]
) -> tuple[Rates, str, int]:
    """Return the rates, the trainer's text about its hardware, and the number of worker processes.

    Args:
        folder: class folders of JPEG files.
        trainer: one of `TRAINERS`.
        config_name, batch_size: the model and the images of a batch.
        steps: training steps of a run.
        runs: how often each is measured.
        arguments: further arguments of the trainer.
    """
    make_engine = engine_class(trainer)
    with tempfile.TemporaryDirectory() as images_folder:
        link_repeatedly(folder, Path(images_folder), 2 * batch_size * steps)
        batch = ["--batch-size", str(batch_size), "--model.image-size", "224", "224"]
        request = parse_request(trainer, ["--config", config_name, "--data", f"folder:{images_folder}", *batch, *arguments])
        recipe, source = request.recipe, request.source
        config, _, _ = choose_model(recipe, source, "classes", None)
        engine = make_engine(
            config,
            recipe,
            task="classes",
            learning_rate=lambda step: 1e-4,
            initial_weights=None,
            folder=Path(images_folder),
        )
        targets = targets_for_task(source.train, source.classes, source.task, "classes")
        workers = default_workers(source) if recipe.workers is None else recipe.workers
        loader = DataLoader(source.train, targets, config, recipe.batch_size, recipe.augment, workers=workers)
        fixed_batch = next(loader.training_batches(seed=0, first_step=0, end_step=1))
        time_training(engine, [fixed_batch])
        loaded_times, fixed_times, loading_times = [], [], []
        for run in range(runs):
            first_step = run * steps
            loading_times.append(
                time_loading(loader.training_batches(seed=0, first_step=first_step, end_step=first_step + steps))
            )
            fixed_times.append(time_training(engine, itertools.repeat(fixed_batch, steps)))
            loaded_times.append(
                time_training(engine, loader.training_batches(seed=0, first_step=first_step, end_step=first_step + steps))
            )
    times = (loading_times, fixed_times, loaded_times)
    rates = Rates(*([batch_size * steps / seconds for seconds in each] for each in times))
    return rates, engine.hardware, workers


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trainer", default="train.jax", choices=TRAINERS)
    parser.add_argument("--config", default="vit_s16")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs", type=int, default=5)
    args, trainer_args = parser.parse_known_args()
    rates, hardware, workers = measure(
        args.folder, args.trainer, args.config, args.batch_size, args.steps, args.runs, trainer_args
    )
    versions = ", ".join(f"{package} {version(package)}" for package in (args.trainer[6:], "grain", "pillow"))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{hardware}, {machine}, {versions}")
    command, run_length = (
        " ".join([args.trainer, args.config, *trainer_args]),
        f"{args.steps} steps of {args.batch_size} images per run",
    )
    print(f"{command}; {run_length}; workers: {workers or 'threads'}\n")
    print("| loading alone, images/s | training on one batch | training on loaded batches | loaded / one batch |")
    print("|---|---|---|---|")
    ratios = [loaded / fixed for fixed, loaded in zip(rates.fixed, rates.loaded, strict=True)]
    cells = [format_spread(rates.loading, 0), format_spread(rates.fixed, 2), format_spread(rates.loaded, 2)]
    cells.append(format_spread(ratios, 3))
    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
