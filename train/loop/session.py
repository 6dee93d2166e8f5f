"""One run, from its request to the summary: model, engine, run folder, training loop, curves, and the printed tables."""

import shlex
import sys
import tempfile
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

import vit_spec
from parity.checkpoints.weights import Checkpoint
from parity.terminal import Terminal, print_error
from train.data.batches import (
    DataLoader,
    ModelTargets,
    default_workers,
    held_out_preprocessing,
    num_outputs,
    targets_for_task,
)
from train.data.sources import Dataset, Examples
from train.loop import curves, init_from
from train.loop.balance import Balance
from train.loop.engine import EngineFactory
from train.loop.interruption import Interruption
from train.loop.lineage import batch_size_step, image_offset
from train.loop.lock import create_run_folder
from train.loop.loop import Diverged, Loop
from train.loop.metrics import PRIMARY_METRIC, constant_score, format_metric, is_better
from train.loop.progress import ProgressDisplay
from train.loop.request import Request
from train.loop.run_folder import RunFolder
from train.loop.saved_run import CHECKPOINTS, extended_lineage, saved_model_config
from train.loop.schedule import Schedule
from train.loop.start_warnings import start_warnings
from train.loop.teacher import Teacher
from train.loop.teacher_weights import load_teacher
from train.loop.write_files import convert_write_errors
from train.recipes import IMAGENET, RECIPES, DataInfo, Recipe, Task, flatten_fields, model_config
from vit_spec import InputError, ViTConfig
from vit_spec.printable import printable

# Appended to the error about a damaged image
CORRUPT_ADVICE = "; or skip damaged images with --corrupt skip; --compare-data none resumes with replaced images"
DIVERGED, SIGNALLED = 1, 128  # exit statuses; the number of the signal is added to the second, as shells do


class ModelSetup(NamedTuple):
    """The model of a run, the weights it starts from, and lines for the table at the start.

    weights: None if the engine initializes the weights at random, or they are restored from a checkpoint.
    teacher: for knowledge distillation; None without.
    """

    config: ViTConfig
    weights: Checkpoint | None
    notes: list[str]
    teacher: Teacher | None = None


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
        return _prepare_run(request, make_engine)
    with tempfile.TemporaryDirectory() as folder:
        held_out = request.source.held_out.take(range(min(request.recipe.batch_size, len(request.source.held_out))))
        recipe = replace(request.recipe, run=str(Path(folder) / "run"), wandb=None, profile=None)
        return _prepare_run(request._replace(recipe=recipe, source=replace(request.source, held_out=held_out)), make_engine)


def _prepare_run(request: Request, make_engine: EngineFactory) -> int:
    name, recipe, source = request[:3]
    task = recipe.task or source.task
    # A run that resumes does not need the file of --init any more: it may be gone.
    saved = saved_model_config(Path(recipe.run)) if recipe.init and recipe.run else None
    setup = ModelSetup(*((saved, None, []) if saved else choose_model(recipe, source, task)))
    if recipe.rng == "shared" and setup.weights is None and not saved:
        setup = setup._replace(weights=init_from.draw_initial_weights(setup.config, recipe.seed))
    setup = setup._replace(teacher=load_teacher(recipe, task, source.classes, setup.config.in_channels))
    lineage = extended_lineage(Path(recipe.run), recipe) if recipe.run else []
    offset = image_offset(lineage, recipe.batch_size)
    schedule = Schedule.from_recipe(recipe, len(source.train), offset, batch_size_step(lineage))
    targets = [
        targets_for_task(examples, source.classes, source.task, task) for examples in (source.train, source.held_out)
    ]
    balance = Balance.from_recipe(recipe, source, task, targets[0])
    now = f"{datetime.now():%Y%m%d-%H%M%S}"
    with nullcontext(Path(recipe.run)) if recipe.run else create_run_folder(f"runs/{name}-{now}") as path:
        return _train_in_folder(request, make_engine, path, setup, schedule, targets, balance)


def _train_in_folder(
    request: Request,
    make_engine: EngineFactory,
    path: Path,
    setup: ModelSetup,
    schedule: Schedule,
    targets: list[ModelTargets],
    balance: Balance,
) -> int:
    """Train in a run folder, print the tables and draw the curves; return the exit status."""
    name, recipe, source, command, dry_run, _ = request
    task, (config, weights, notes, teacher) = recipe.task or source.task, setup
    run_schedule = schedule.single_step if dry_run else schedule
    has_labels = len(source.classes) == config.num_classes  # False for --task values of classes, which has one output
    preprocessing = held_out_preprocessing(config, recipe.augment)
    engine = make_engine(
        config,
        recipe,
        task=task,
        learning_rate=lambda step: run_schedule.learning_rate(recipe, step),
        initial_weights=weights,
        folder=(path / CHECKPOINTS).absolute(),
        metadata={"labels": source.classes if has_labels else None, "preprocessing": preprocessing, "task": task},
        class_weights=balance.weights,
        teacher=teacher,
    )
    console = Terminal(quiet=not engine.is_main)
    if engine.is_distributed and dry_run:
        raise InputError("--dry-run runs in one process: start it in one process only")
    if engine.is_distributed and recipe.run is None:
        raise InputError("the run has several processes: give --run FOLDER, the same for each of them")
    workers = default_workers(source) if recipe.workers is None else recipe.workers

    def data_loader(examples: Examples, targets: Any, **options: Any) -> DataLoader:
        skip, how = recipe.corrupt == "skip", (config, recipe.batch_size, recipe.augment, engine.batch_rows)
        return DataLoader(examples, targets, *how, skip, workers, "" if skip else CORRUPT_ADVICE, **options)

    train_loader = data_loader(source.train, targets[0], balanced=balance.classes)
    held_out_loader = data_loader(source.held_out, targets[1])
    data = {"task": task, "train": len(source.train), "held_out": len(source.held_out), "classes": list(source.classes)}
    with (
        Interruption(engine_handles_sigterm=engine.is_distributed) as stop,
        RunFolder(
            path,
            recipe,
            config,
            data,
            name=name,
            may_change=request.may_change,
            source=source,
            teacher_checksum=teacher.checksum if teacher else None,
            is_main=engine.is_main,
        ) as run,
    ):
        assumptions = [
            *source.notes,
            *notes,
            *(teacher.notes if teacher else ()),
            *_scaling_notes(name, recipe, source),
            *_worker_notes(workers, recipe),
            *_ineffective_settings(recipe, task, schedule),
            *filter(None, [engine.replication_note]),
        ]
        warnings = [*start_warnings(request, config), *run.warnings]
        rows = balance.table_rows(source.classes)
        if teacher is not None:
            rows = {"teacher": teacher.table_row(recipe, config)} | rows
        table = start_table(request, config, schedule, engine.hardware, path, rows, assumptions, warnings)
        print_table(console, table | ({"changed": "; ".join(run.changes)} if run.changes else {}))
        mfu_per_image = 3 * vit_spec.flops(config) / engine.peak_flops if engine.peak_flops else None
        display = ProgressDisplay(console, schedule.total, recipe.batch_size, mfu_per_image=mfu_per_image)
        loop = Loop(engine, recipe, task, run_schedule, train_loader, held_out_loader, source.classes, run, display, stop)

        def draw() -> None:
            if run.records and engine.is_main:
                with convert_write_errors(path / "curves.png"):
                    curves.draw_curves(path / "curves.png", run.records, task, run_title(name, recipe, config))

        try:
            loop.fit()
        except Diverged as error:
            draw()
            print_error(error)
            return DIVERGED
        except InputError:
            with suppress(InputError):  # report the first error
                draw()
            raise
        draw()
        print_table(console, dry_run_table(loop, run) if dry_run else summary_table(command, loop, run))
    return SIGNALLED + loop.interrupted if loop.interrupted else 0


def choose_model(recipe: Recipe, source: Dataset, task: Task) -> tuple[ViTConfig, Checkpoint | None, list[str]]:
    """Return the config of the model, the weights of `recipe.init` or None, and lines for the table at the start."""
    outputs = num_outputs(source.classes, source.task, task)
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


def _scaling_notes(name: str, recipe: Recipe, source: Dataset) -> list[str]:
    """Return a line that names the settings that the recipe scales down for a data set smaller than ImageNet-1k."""
    if name not in RECIPES:
        return []
    known = DataInfo(len(source.train), source.channels, source.size)
    usual, scaled, now = (dict(flatten_fields(each)) for each in (RECIPES[name](IMAGENET), RECIPES[name](known), recipe))
    names = ("batch_size", "epochs", "warmup", "optimizer.lr", "optimizer.weight_decay", "augment.crop", "augment.mixup")
    other = [f"{name} {now[name]} ({usual[name]})" for name in names if now[name] == scaled[name] != usual[name]]
    why = f"for {len(source.train):,} images instead of ImageNet-1k, whose values are in brackets"
    return [f"the recipe is scaled down {why}: {', '.join(other)}"] if other else []


def _worker_notes(workers: int, recipe: Recipe) -> list[str]:
    if recipe.workers is not None:
        return []
    return [f"images are loaded by {f'{workers} processes' if workers else 'threads'}; --workers changes this"]


def _ineffective_settings(recipe: Recipe, task: Task, schedule: Schedule) -> list[str]:
    """Return a line for each setting of the recipe that this run ignores or cannot follow."""
    notes = []
    if task == "values":
        ignored = {"loss": recipe.loss != "softmax", "label_smoothing": bool(recipe.label_smoothing)}
        notes += [
            f"--task values uses the mean squared error and ignores {name}" for name, is_set in ignored.items() if is_set
        ]
    if recipe.teacher is not None and recipe.distillation_weight == 1:
        of_targets = {
            "loss": recipe.loss != "softmax",
            "label_smoothing": bool(recipe.label_smoothing),
            "class_weights": recipe.class_weights != "none",
        }
        notes += [
            f"--distillation-weight 1 learns from the teacher alone and ignores {name}"
            for name, is_set in of_targets.items()
            if is_set
        ]
    if schedule.steps_per_epoch < 1:
        notes.append(
            f"a batch is larger than the training set: each image is in it {1 / schedule.steps_per_epoch:.1f} times"
        )
    if schedule.warmup >= schedule.total:
        rate = schedule.learning_rate(recipe, schedule.total - 1)
        notes.append(f"the warm-up is at least as long as the run: the learning rate ends at {rate:.2g}")
    elif schedule.warmup + schedule.cooldown > schedule.total:
        notes.append("the cooldown begins before the warm-up ends: the learning rate does not reach its peak")
    return notes


def run_title(name: str, recipe: Recipe, config: ViTConfig) -> str:
    """Return the recipe, the size of the model and the data in one line."""
    return f"{name}: {vit_spec.count(config) / 1e6:.1f} M parameters, on {recipe.data}"


def start_table(
    request: Request,
    config: ViTConfig,
    schedule: Schedule,
    hardware: str,
    path: Path,
    options: dict[str, str],
    assumptions: list[str],
    warnings: list[str],
) -> dict[str, str]:
    """Return the rows of the table that is printed before the first step.

    options: rows about what the recipe adds to the usual.
    assumptions: lines about defaults and assumptions.
    """
    name, recipe, source = request[:3]
    (height, width), (ph, pw), (rows, columns) = config.image_size, config.patch_size, config.grid
    channels = {1: "grey", 3: "colour"}[config.in_channels]
    counts = f"{len(source.train):,} images, {len(source.held_out):,} held out, {len(source.classes)} {source.task}"
    o = recipe.optimizer
    shapes = {"cosine": "cosine to 0", "constant": "constant", "rsqrt": "1 / sqrt(step)"}
    ending = f", linear to 0 in the last {schedule.cooldown:.0f}" if schedule.cooldown else ""
    model = recipe.model.name if recipe.init is None else f"of {recipe.init}"
    return {
        "recipe": f"{name}, seed {recipe.seed}",
        "model": f"{model}, {config.depth} blocks of width {config.width}, {config.num_heads} heads",
        "parameters": f"{vit_spec.count(config):,}",
        "data": f"{recipe.data}: {counts}",
        "images": f"{height}x{width}, {channels}, in {rows}x{columns} patches of {ph}x{pw}",
        "mesh": hardware,
        "steps": f"{schedule.total:,} of {recipe.batch_size} images, {schedule.epochs:g} epochs",
        "learning rate": f"{o.name}, up to {o.lr:g} in {schedule.warmup:.0f} steps, then {shapes[recipe.decay]}{ending}",
        **options,
        # Blank names of different lengths: each row needs a key of its own.
        **{"assumed" if not i else " " * i: note for i, note in enumerate(assumptions)},
        **{"warning" if not i else " " * (len(assumptions) + i): note for i, note in enumerate(warnings)},
        "folder": str(path),
    }


def dry_run_table(loop: Loop, run: RunFolder) -> dict[str, str]:
    """Return the row that is printed after a dry run."""
    last = ", ".join(f"{name} {format_metric(name, value)}" for name, value in loop.last.items() if "/" not in name)
    count = len(loop.held_out.examples)
    return {"dry run": f"one step and an evaluation of {count} images ({last}) in {run.seconds:.0f} s; nothing is saved"}


def summary_table(command: str, loop: Loop, run: RunFolder) -> dict[str, str]:
    """Return the rows that are printed after a run: results, files, and commands to continue with."""
    metric, ended = PRIMARY_METRIC[loop.task], "interrupted" if loop.interrupted else "finished"
    ema = ", the moving average of the weights (--ema)" if loop.engine.has_ema else ""
    rows = {ended: f"{loop.done:,} of {loop.schedule.total:,} steps in {run.seconds:.0f} s"}
    if loop.is_stopped_early:
        rows["stopped early"] = f"{loop.evaluations_since_best} evaluations without a better {metric} (--patience)"
    if loop.unreadable:
        n = len(loop.unreadable)
        rows["unreadable"] = f"{n} image{'s' * (n > 1)}: {', '.join(sorted(loop.unreadable)[:3])}{', ...' * (n > 3)}"
    if loop.skipped:
        rows["skipped"] = f"{loop.skipped} of the steps: their loss or gradient norm was not finite"
    if loop.last:
        metrics = {name: value for name, value in loop.last.items() if "/" not in name}
        rows["held out"] = ", ".join(f"{name} {format_metric(name, value)}" for name, value in metrics.items())
        constant = constant_score(loop.task, loop.held_out.targets[loop.is_readable_held_out])
        if constant[0] in metrics:
            rows["held out"] += f"; one answer for all images: {format_metric(*constant)}"
    if loop.best:
        rows["best"] = f"{metric} {format_metric(metric, loop.best[metric])}, in {run.best}{ema}"
    if loop.best_raw:
        is_raw_better = bool(loop.best) and is_better(metric, loop.best_raw[metric], than=loop.best[metric])
        rows["best raw"] = (
            f"{metric} {format_metric(metric, loop.best_raw[metric])}, in {run.best_raw}, the weights themselves"
            f"{', better than their average' * is_raw_better}"
        )
    rows["weights"] = f"{run.weights}, after step {loop.done:,}{ema}"
    if loop.engine.has_ema:
        rows["weights raw"] = f"{run.weights_raw}, after step {loop.done:,}, the weights themselves"
    if run.records:
        rows["curves"] = str(run.path / "curves.png")
    folder = shlex.quote(str(run.path))
    if loop.interrupted:
        rows["to resume"] = f"{command} --run {folder}"
    rows["compare the twins"] = f"python -m parity check {folder}"
    rows["load"] = f'vit_torch.load("{run.path}"), vit_jax.load("{run.path}")'
    return rows


def print_table(console: Console, rows: dict[str, str]) -> None:
    """Print a name and a text per line, aligned.  Long lines are not wrapped, so that commands and paths can be copied."""
    width = max(map(len, rows))
    for name, text in rows.items():
        console.print(
            Text(printable(f"{name:{width}}  "), style="bold"),
            Text(printable(text)),
            sep="",
            soft_wrap=True,
            highlight=False,
        )
