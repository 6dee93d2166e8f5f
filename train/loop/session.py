"""One run, from its request to the summary: model, engine, run folder, training loop, curves, and the printed tables."""

import sys
import tempfile
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from parity.checkpoints.weights import Checkpoint
from parity.terminal import Terminal, print_error
from train.data.batches import DataLoader, held_out_preprocessing
from train.data.sources import Dataset, Examples
from train.data.targets import ModelTargets, num_outputs, targets_for_task
from train.data.workers import default_workers
from train.loop import curves, init_from, run_tables
from train.loop.balance import Balance
from train.loop.engine import Engine, EngineFactory
from train.loop.interruption import Interruption
from train.loop.lineage import batch_size_step, image_offset
from train.loop.lock import create_run_folder
from train.loop.loop import Diverged, Loop
from train.loop.progress import ProgressDisplay
from train.loop.request import Request
from train.loop.run_folder import RunFolder
from train.loop.saved_run import checkpoints_folder, extended_lineage, saved_model_config
from train.loop.schedule import Schedule
from train.loop.start_warnings import start_warnings
from train.loop.teacher import Teacher
from train.loop.teacher_weights import load_teacher
from train.loop.write_files import convert_write_errors, folder_gone_error
from train.recipes import Recipe, Task, model_config
from train.step_cost import flops_per_image
from vit_spec import InputError, ViTConfig

# Appended to the error about a damaged image
CORRUPT_ADVICE = "; or skip damaged images with --corrupt skip; --compare-data none resumes with replaced images"
DIVERGED, SIGNALLED = 1, 128  # exit statuses; the number of the signal is added to the second, as shells do


class PreparedRun(NamedTuple):
    """The parts of a run before its engine and its folder exist.

    weights: None if the engine initializes the weights at random, or they are restored from a checkpoint.
    teacher: for knowledge distillation; None without.
    notes: lines about the model for the table at the start.
    schedule: schedule of the whole run, also of a dry run.
    targets: targets of the training and of the held-out images.
    """

    request: Request
    task: Task
    config: ViTConfig
    weights: Checkpoint | None
    teacher: Teacher | None
    notes: list[str]
    schedule: Schedule
    targets: list[ModelTargets]
    balance: Balance

    @property
    def schedule_to_run(self) -> Schedule:
        """The schedule that is followed: in a dry run, one step of the whole schedule."""
        return self.schedule.single_step if self.request.dry_run else self.schedule


def train(request: Request, make_engine: EngineFactory) -> int:
    """Run the training that a request asks for, and return the exit status.

    Returns:
        0; 1 if the loss diverged; 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        InputError: a recipe, a data set, an image or weights cannot be used, or a file cannot be written.
    """
    if request.recipe.wandb and "wandb" not in sys.modules and find_spec("wandb") is None:
        raise InputError("--wandb needs the package wandb, which is not installed: pip install wandb")
    if not request.dry_run:
        return _train_in_folder(_prepare(request, request.recipe.run), make_engine)
    with tempfile.TemporaryDirectory() as folder:
        held_out = request.source.held_out.take(range(min(request.recipe.batch_size, len(request.source.held_out))))
        recipe = replace(request.recipe, run=str(Path(folder) / "run"), wandb=None, profile=None)
        dry = request._replace(recipe=recipe, source=replace(request.source, held_out=held_out))
        return _train_in_folder(_prepare(dry, request.recipe.run), make_engine, dry_run_of=request)


def _prepare(request: Request, run: str | None) -> PreparedRun:
    """Prepare a run.

    run: its folder; in a dry run the recipe names another one.
    """
    recipe, source = request.recipe, request.source
    task = recipe.task or source.task
    config, weights, notes = choose_model(recipe, source, task, run)
    if recipe.rng == "shared" and recipe.init is None:
        weights = init_from.draw_initial_weights(config, recipe.seed)
    teacher = load_teacher(recipe, task, source.classes, config.in_channels)
    lineage = extended_lineage(Path(run), recipe) if run else []
    offset = image_offset(lineage, recipe.batch_size)
    schedule = Schedule.from_recipe(recipe, len(source.train), offset, batch_size_step(lineage))
    targets = [
        targets_for_task(examples, source.classes, source.task, task) for examples in (source.train, source.held_out)
    ]
    balance = Balance.from_recipe(recipe, source, task, targets[0])
    return PreparedRun(request, task, config, weights, teacher, notes, schedule, targets, balance)


def _train_in_folder(prepared: PreparedRun, make_engine: EngineFactory, dry_run_of: Request | None = None) -> int:
    """Train in the folder that the recipe names or in a new one; return the exit status.

    dry_run_of: the request whose dry run this is; its folder is checked.
    """
    recipe, source = prepared.request.recipe, prepared.request.source
    new = f"runs/{prepared.request.name}-{datetime.now():%Y%m%d-%H%M%S}"
    with nullcontext(Path(recipe.run)) if recipe.run else create_run_folder(new) as path:
        engine = _make_engine(prepared, make_engine, path)
        if dry_run_of is not None and dry_run_of.recipe.run:
            real = prepared._replace(request=dry_run_of)
            # Not as the main process, which would make the folder.
            _run_folder(real, Path(dry_run_of.recipe.run), engine.trainer, is_main=False).check(dry_run_of.recipe)
        workers = default_workers(source) if recipe.workers is None else recipe.workers
        train_loader, held_out_loader = _make_loaders(prepared, engine, workers)
        with (
            Interruption(engine_handles_sigterm=engine.is_distributed) as stop,
            _run_folder(prepared, path, engine.trainer, is_main=engine.is_main) as run,
        ):
            console = Terminal(quiet=not engine.is_main)
            display = ProgressDisplay(
                console, prepared.schedule.total, recipe.batch_size, mfu_per_image=_mfu_per_image(prepared, engine)
            )
            schedule = prepared.schedule_to_run
            loop = Loop(
                engine, recipe, prepared.task, schedule, train_loader, held_out_loader, source.classes, run, display, stop
            )
            loop.restore()  # before the table, which would show changes that are then refused
            run_tables.print_table(console, _start_table(prepared, engine, run, workers))
            return _fit(prepared, loop, console)


def _run_folder(prepared: PreparedRun, path: Path, trainer: str, *, is_main: bool) -> RunFolder:
    """Return the folder of a run at a path."""
    request, source = prepared.request, prepared.request.source
    counts = {"train": len(source.train), "held_out": len(source.held_out)}
    return RunFolder(
        path,
        request.recipe,
        prepared.config,
        {"task": prepared.task, **counts, "classes": list(source.classes)},
        name=request.name,
        trainer=trainer,
        may_change=request.may_change,
        source=source,
        teacher_checksum=prepared.teacher.checksum if prepared.teacher else None,
        is_main=is_main,
    )


def _make_engine(prepared: PreparedRun, make_engine: EngineFactory, path: Path) -> Engine:
    """Return the engine of a run in a folder.

    Raises:
        InputError: the run has several processes, and is a dry run or has no folder that they share.
    """
    recipe, source, config = prepared.request.recipe, prepared.request.source, prepared.config
    has_labels = len(source.classes) == config.num_classes  # False for --task values of classes, which has one output
    schedule = prepared.schedule_to_run
    engine = make_engine(
        config,
        recipe,
        task=prepared.task,
        learning_rate=lambda step: schedule.learning_rate(recipe, step),
        initial_weights=prepared.weights,
        folder=checkpoints_folder(path),
        metadata={
            "labels": source.classes if has_labels else None,
            "preprocessing": held_out_preprocessing(config, recipe.augment),
            "task": prepared.task,
        },
        class_weights=prepared.balance.weights,
        teacher=prepared.teacher,
    )
    if engine.is_distributed and prepared.request.dry_run:
        raise InputError("--dry-run runs in one process: start it in one process only")
    if engine.is_distributed and recipe.run is None:
        raise InputError("the run has several processes: give --run FOLDER, the same for each of them")
    return engine


def _mfu_per_image(prepared: PreparedRun, engine: Engine) -> float | None:
    """Return the share of the devices' peak FLOP/s at a throughput of one image/s; None if it is not known.

    With frozen parameters, the FLOPs of the backward pass depend on which gradients the compiler leaves out.
    """
    if engine.peak_flops is None or prepared.request.recipe.optimizer.freeze:
        return None
    teacher = prepared.teacher.checkpoint.config if prepared.teacher else None
    return flops_per_image(prepared.config, teacher) / engine.peak_flops


def _make_loaders(prepared: PreparedRun, engine: Engine, workers: int) -> tuple[DataLoader, DataLoader]:
    """Return the loaders of the training and of the held-out images."""
    recipe, source = prepared.request.recipe, prepared.request.source
    skip, how = recipe.corrupt == "skip", (prepared.config, recipe.batch_size, recipe.augment, engine.batch_rows)

    def make_loader(examples: Examples, targets: ModelTargets, **options: Any) -> DataLoader:
        return DataLoader(examples, targets, *how, skip, workers, "" if skip else CORRUPT_ADVICE, **options)

    training = make_loader(source.train, prepared.targets[0], balanced=prepared.balance.classes)
    return training, make_loader(source.held_out, prepared.targets[1])


def _start_table(prepared: PreparedRun, engine: Engine, run: RunFolder, workers: int) -> list[run_tables.Row]:
    """Return the rows of the table that is printed before the first step."""
    request, config, teacher = prepared.request, prepared.config, prepared.teacher
    name, recipe, source = request[:3]
    assumptions = [
        *filter(None, [request.note]),
        *source.notes,
        *prepared.notes,
        *(teacher.notes if teacher else ()),
        *run_tables.scaling_notes(name, recipe, source),
        *run_tables.worker_notes(workers, recipe),
        *run_tables.ineffective_settings(recipe, prepared.task, prepared.schedule),
        *filter(None, [engine.replication_note]),
    ]
    warnings = [*start_warnings(request, config), *run.warnings]
    rows = {"teacher": teacher.table_row(recipe, config)} if teacher else {}
    rows |= prepared.balance.table_rows(source.classes)
    table = run_tables.start_table(
        request, config, prepared.schedule, engine.hardware, run.path, rows, assumptions, warnings
    )
    return [*table, ("changed", "; ".join(run.changes))] if run.changes else table


def _fit(prepared: PreparedRun, loop: Loop, console: Console) -> int:
    """Train, draw the curves and print the summary; return the exit status."""
    request, run = prepared.request, loop.run

    def draw() -> None:
        if run.records and loop.engine.is_main:
            title = run_tables.run_title(request.name, request.recipe, prepared.config)
            with convert_write_errors(run.path / "curves.png", run.path):
                curves.draw_curves(run.path / "curves.png", run.records, prepared.task, title)

    try:
        loop.fit()
    except Diverged as error:
        draw()
        print_error(error)
        return DIVERGED
    except InputError:
        if not folder_gone_error(run.path):  # else another folder may be at its path
            with suppress(InputError):  # report the first error
                draw()
        raise
    draw()
    table = run_tables.dry_run_table(loop, run) if request.dry_run else run_tables.summary_table(request.command, loop, run)
    run_tables.print_table(console, table.items())
    return SIGNALLED + loop.interrupted if loop.interrupted else 0


def choose_model(
    recipe: Recipe, source: Dataset, task: Task, run: str | None
) -> tuple[ViTConfig, Checkpoint | None, list[str]]:
    """Return the config of the model, the weights of `recipe.init` or None, and lines for the table at the start.

    run: folder of the run.  A run that resumes does not need the file of `recipe.init` any more: it may be gone.
    """
    outputs = num_outputs(source.classes, source.task, task)
    if recipe.init is not None and run is not None and (saved := saved_model_config(Path(run))):
        return saved, None, []
    if recipe.init is not None:
        names = source.classes if len(source.classes) == outputs else ()
        checkpoint, notes = init_from.load_initial_weights(
            recipe, num_outputs=outputs, in_channels=source.channels, names=names
        )
        return checkpoint.config, checkpoint, notes
    config = model_config(recipe.model, num_outputs=outputs, in_channels=source.channels, size=source.size)
    if source.size is None or recipe.model.image_size is not None or config.image_size == source.size:
        return config, None, []
    (height, width), (rows, columns) = config.image_size, config.grid
    note = f"images of {source.size[0]}x{source.size[1]} are resized to {height}x{width}, {rows}x{columns} patches"
    return config, None, [f"{note}; --model.image-size changes this"]
