"""The tables that are printed when a run starts and ends, and the lines in them about what was assumed."""

import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

import vit_spec
from train.data.sources import Dataset
from train.loop.loop import Loop
from train.loop.metrics import PRIMARY_METRIC, constant_score, format_metric, is_better
from train.loop.request import Request
from train.loop.run_folder import RunFolder
from train.loop.schedule import Schedule
from train.recipes import IMAGENET, RECIPES, DataInfo, Recipe, Task, flatten_fields
from train.recipes.fields import flag_name, format_value
from vit_spec import ViTConfig
from vit_spec.missing_packages import TWIN_PACKAGES, missing_packages
from vit_spec.printable import printable

Row = tuple[str, str]  # a name and a text

_MAX_NAMES = 5  # of classes in a row


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
) -> list[Row]:
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
    warmup = f"{schedule.warmup:.0f} step{'s' * (round(schedule.warmup) != 1)}"
    ending = f", linear to 0 in the last {schedule.cooldown:.0f}" if schedule.cooldown else ""
    model = recipe.model.name if recipe.init is None else f"of {recipe.init}"
    first_rows = {
        "recipe": f"{name}, seed {recipe.seed}",
        "model": f"{model}, {config.depth} blocks of width {config.width}, {config.num_heads} heads",
        "parameters": f"{vit_spec.count(config):,}",
        "data": f"{recipe.data}: {counts}: {first_names(source.classes)}",
        "images": f"{height}x{width}, {channels}, in {rows}x{columns} patches of {ph}x{pw}",
        "mesh": hardware,
        "steps": f"{schedule.total:,} of {recipe.batch_size} images, {schedule.epochs:g} epochs",
        "learning rate": f"{o.name}, up to {o.lr:g} in {warmup}, then {shapes[recipe.decay]}{ending}",
        **options,
    }
    notes = [*rows_of("assumed", assumptions), *rows_of("warning", warnings)]
    return [*first_rows.items(), *notes, ("folder", str(path))]


def rows_of(name: str, lines: Sequence[str]) -> list[Row]:
    """Return a row for each line; only the first one has the name."""
    return [("" if i else name, line) for i, line in enumerate(lines)]


def dry_run_table(loop: Loop, run: RunFolder) -> dict[str, str]:
    """Return the row that is printed after a dry run."""
    metrics = loop.state.scores.last
    last = ", ".join(f"{name} {format_metric(name, value)}" for name, value in metrics.items() if "/" not in name)
    count = len(loop.held_out.examples)
    return {"dry run": f"one step and an evaluation of {count} images ({last}) in {run.seconds:.0f} s; nothing is saved"}


def summary_table(command: str, loop: Loop, run: RunFolder) -> dict[str, str]:
    """Return the rows that are printed after a run: results, files, and commands to continue with."""
    state, scores, raw = loop.state, loop.state.scores, loop.state.scores_raw
    metric, ended = PRIMARY_METRIC[loop.task], "interrupted" if loop.interrupted else "finished"
    ema = ", the moving average of the weights (--ema)" if loop.engine.has_ema else ""
    rows = {ended: f"{loop.done:,} of {loop.schedule.total:,} steps in {run.seconds:.0f} s"}
    if loop.is_stopped_early:
        rows["stopped early"] = f"{state.evaluations_since_best} evaluations without a better {metric} (--patience)"
    if (steps := loop.recipe.profile) and loop.done < steps[0] and not loop.interrupted:
        rows["not profiled"] = f"the run ended at step {loop.done:,}, before those of --profile {steps[0]} {steps[1]}"
    if state.unreadable:
        n = len(state.unreadable)
        rows["unreadable"] = f"{n} image{'s' * (n > 1)}: {', '.join(state.unreadable[:3])}{', ...' * (n > 3)}"
    if state.skipped:
        newest = f", the last {state.skipped_in_a_row} among them" if state.skipped_in_a_row else ""
        rows["skipped"] = f"{state.skipped} of the steps{newest}: their loss or gradient norm was not finite"
    if scores.last:
        metrics = {name: value for name, value in scores.last.items() if "/" not in name}
        rows["held out"] = ", ".join(f"{name} {format_metric(name, value)}" for name, value in metrics.items())
        constant = constant_score(loop.task, loop.held_out.targets[loop.is_readable_held_out])
        if constant[0] in metrics:
            rows["held out"] += f"; one answer for all images: {format_metric(*constant)}"
    if scores.best:
        rows["best"] = f"{metric} {format_metric(metric, scores.best[metric])}, in {run.best}{ema}"
    if raw.best:
        is_raw_better = bool(scores.best) and is_better(metric, raw.best[metric], than=scores.best[metric])
        rows["best raw"] = (
            f"{metric} {format_metric(metric, raw.best[metric])}, in {run.best_raw}, the weights themselves"
            f"{', better than their average' * is_raw_better}"
        )
    rows["weights"] = f"{run.weights}, after step {loop.done:,}{ema}"
    if loop.engine.has_ema:
        rows["weights raw"] = f"{run.weights_raw}, after step {loop.done:,}, the weights themselves"
    if run.records:
        rows["curves"] = str(run.path / "curves.png")
    if loop.interrupted or loop.is_stopped_early:
        rows["to resume"] = f"{command} --run {shlex.quote(str(run.path))}{' --patience 0' * loop.is_stopped_early}"
    return rows | twin_rows(run.path)


def twin_rows(path: Path) -> dict[str, str]:
    """Return the rows that say how to compare the twins with the weights of a run, and to load them, if installed."""
    twins = [name for name, packages in TWIN_PACKAGES.items() if not missing_packages(*packages)]
    both = {"compare the twins": f"python -m parity check {shlex.quote(str(path))}"}
    quoted = json.dumps(str(path), ensure_ascii=False)  # also a string of Python
    load = {"load": ", ".join(f"vit_{name}.load({quoted})" for name in twins)}
    return both | load if len(twins) == len(TWIN_PACKAGES) else load


def first_names(names: Sequence[str]) -> str:
    """Return the first of the names of the classes, for a row of a table."""
    return ", ".join(names[:_MAX_NAMES]) + ", ..." * (len(names) > _MAX_NAMES)


def print_table(console: Console, rows: Iterable[Row]) -> None:
    """Print a name and a text per line, aligned.  Long lines are not wrapped, so that commands and paths can be copied."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        console.print(
            Text(printable(f"{name:{width}}  "), style="bold"),
            Text(printable(text)),
            sep="",
            soft_wrap=True,
            highlight=False,
        )


def scaling_notes(name: str, recipe: Recipe, source: Dataset) -> list[str]:
    """Return a line that names the settings that the recipe adapts to a data set other than ImageNet-1k."""
    if name not in RECIPES:
        return []
    known = DataInfo(len(source.train), source.channels, source.size)
    usual, scaled, now = (dict(flatten_fields(each)) for each in (RECIPES[name](IMAGENET), RECIPES[name](known), recipe))
    names = ("batch_size", "epochs", "warmup", "optimizer.lr", "optimizer.weight_decay", "augment.crop", "augment.mixup")
    changed = [name for name in names if now[name] == scaled[name] != usual[name]]
    other = [f"{flag_name(name)} {format_value(now[name])} ({format_value(usual[name])})" for name in changed]
    images = f"{len(source.train):,} images instead of ImageNet-1k, whose values are in brackets"
    return [f"the recipe is adapted to {images}: {', '.join(other)}"] if other else []


def worker_notes(workers: int, recipe: Recipe) -> list[str]:
    """Return the line that says what loads the images, if the recipe leaves that open."""
    if recipe.workers is not None:
        return []
    return [f"images are loaded by {f'{workers} processes' if workers else 'threads'}; --workers changes this"]


def ineffective_settings(recipe: Recipe, task: Task, schedule: Schedule) -> list[str]:
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
    rate = schedule.learning_rate(recipe, schedule.total - 1)
    if rate == 0:  # of all steps, only the first of a warm-up has none: it is the last one too
        advice = "more --epochs or --warmup 0" if recipe.optimizer.lr else "a larger --optimizer.lr"
        notes.append(f"the learning rate is 0 at every step, and nothing is trained: give {advice}")
    elif schedule.warmup >= schedule.total:
        notes.append(f"the warm-up is at least as long as the run: the learning rate ends at {rate:.2g}")
    elif schedule.warmup + schedule.cooldown > schedule.total:
        notes.append("the cooldown begins before the warm-up ends: the learning rate does not reach its peak")
    return notes
