"""One run from a recipe to its summary: data, model, engine, folder, loop, curves."""

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
from parity.terminal import Terminal, complain
from train.data.batches import Feed, Targets, held_out, num_outputs, targets, usual_workers
from train.data.sources import Examples, Source
from train.loop import curves, init_from
from train.loop.engine import MakeEngine
from train.loop.interruption import Interruption
from train.loop.lock import new_folder
from train.loop.loop import Diverged, Loop, Plan
from train.loop.metrics import LEADING, better, shown
from train.loop.progress import Display
from train.loop.request import Request
from train.loop.run_folder import STATES, Run, network_of, writing
from train.loop.start_warnings import cautions
from train.recipes import IMAGENET, RECIPES, Known, Recipe, Task, fields, model_config
from vit_spec import InputError, ViTConfig
from vit_spec.printable import printable

SKIP = "; or train with --corrupt skip, which leaves damaged images out; --compare-data none resumes with replaced ones"
DIVERGED, SIGNALLED = 1, 128  # exit statuses; the second plus the signal's number, as a shell has it


class Begun(NamedTuple):
    """The network of a run, the weights that it starts from if they are not drawn, and what is to be said of both."""

    config: ViTConfig
    weights: Checkpoint | None
    notes: list[str]


def train(request: Request, make_engine: MakeEngine) -> int:
    """Train as asked and return the exit status: 0; 1 when the loss diverged; 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        InputError: a recipe, a data set, an image or weights that cannot be used.
    """
    if request.recipe.wandb and "wandb" not in sys.modules and find_spec("wandb") is None:
        raise InputError("--wandb needs the package wandb, which is not installed: pip install wandb")
    if not request.dry:
        return _trained(request, make_engine)
    with tempfile.TemporaryDirectory() as folder:
        held_out = request.source.held_out.take(range(min(request.recipe.batch_size, len(request.source.held_out))))
        recipe = replace(request.recipe, run=str(Path(folder) / "run"), wandb=None, profile=None)
        return _trained(request._replace(recipe=recipe, source=replace(request.source, held_out=held_out)), make_engine)


def _trained(request: Request, make_engine: MakeEngine) -> int:
    name, recipe, source = request[:3]
    task = recipe.task or source.kind
    # A run that goes on needs no more of the file it began with.
    there = network_of(Path(recipe.run)) if recipe.init and recipe.run else None
    begun = Begun(*((there, None, []) if there else network(recipe, source, task)))
    plan = Plan.of(recipe, len(source.train))
    answers = [targets(examples, source.classes, source.kind, task) for examples in (source.train, source.held_out)]
    now = f"{datetime.now():%Y%m%d-%H%M%S}"
    with nullcontext(Path(recipe.run)) if recipe.run else new_folder(f"runs/{name}-{now}") as path:
        return _carried_out(request, make_engine, path, begun, plan, answers)


def _carried_out(
    request: Request, make_engine: MakeEngine, path: Path, begun: Begun, plan: Plan, answers: list[Targets]
) -> int:
    """Train in a folder."""
    name, recipe, source, command, dry = request
    task, (config, weights, notes) = recipe.task or source.kind, begun
    course = plan.first_step if dry else plan
    named = len(source.classes) == config.num_classes  # classes that are read as a number have one output together
    preprocessing = held_out(config, recipe.augment)
    engine = make_engine(
        config,
        recipe,
        task=task,
        rate=lambda step: course.rate(recipe, step),
        start=weights,
        folder=(path / STATES).absolute(),
        described={"labels": source.classes if named else None, "preprocessing": preprocessing, "task": task},
    )
    console = Terminal(quiet=not engine.is_main)
    if engine.distributed and dry:
        raise InputError("--dry-run is for one process alone: start it without the others")
    if engine.distributed and recipe.run is None:
        raise InputError("several processes share this run: name its folder with --run, the same for all of them")
    workers = usual_workers(source) if recipe.workers is None else recipe.workers

    def feed(examples: Examples, answers: Any) -> Feed:
        skip, how = recipe.corrupt == "skip", (config, recipe.batch_size, recipe.augment, engine.batch_rows)
        return Feed(examples, answers, *how, skip, workers, "" if skip else SKIP)

    train_feed, held_out_feed = map(feed, (source.train, source.held_out), answers)
    data = {"task": task, "train": len(source.train), "held_out": len(source.held_out), "classes": list(source.classes)}
    with (
        Interruption(watched=engine.distributed) as stop,
        Run(path, recipe, config, data, source=source, writes=engine.is_main) as run,
    ):
        said = [
            *source.notes,
            *notes,
            *_scaled(name, recipe, source),
            *_prepared(workers, recipe),
            *_without_effect(recipe, task, plan),
            *filter(None, [engine.replicated]),
        ]
        careful = [*cautions(request, config), *run.said]
        tell(console, overview(request, config, plan, engine.hardware, path, said, careful))
        share = 3 * vit_spec.flops(config) / engine.peak_rate if engine.peak_rate else None
        display = Display(console, plan.total, recipe.batch_size, share=share)
        loop = Loop(engine, recipe, task, course, train_feed, held_out_feed, source.classes, run, display, stop)

        def draw() -> None:
            if run.records and engine.is_main:
                with writing(path / "curves.png"):
                    curves.draw(path / "curves.png", run.records, task, title(name, recipe, config))

        try:
            loop.fit()
        except Diverged as error:
            draw()
            complain(error)
            return DIVERGED
        except InputError:
            with suppress(InputError):  # what went wrong first is what counts
                draw()
            raise
        draw()
        tell(console, dried(loop, run) if dry else summary(command, loop, run))
    return SIGNALLED + loop.interrupted if loop.interrupted else 0


def network(recipe: Recipe, source: Source, task: Task) -> tuple[ViTConfig, Checkpoint | None, list[str]]:
    """The network, the weights to start from if there are any, and what is to be said of both."""
    outputs = num_outputs(source.classes, source.kind, task)
    if recipe.init is not None:
        checkpoint, notes = init_from.opened(recipe, num_outputs=outputs, in_channels=source.channels)
        return checkpoint.config, checkpoint, notes
    config = model_config(recipe.model, num_outputs=outputs, in_channels=source.channels, size=source.size)
    if source.size is None or recipe.model.image_size is not None or config.image_size == source.size:
        return config, None, []
    (height, width), (rows, columns) = config.image_size, config.grid
    note = f"images of {source.size[0]}x{source.size[1]} are brought to {height}x{width}, {rows}x{columns} patches"
    return config, None, [f"{note}; --model.image-size changes it"]


def _scaled(name: str, recipe: Recipe, source: Source) -> list[str]:
    """What the recipe would be for ImageNet and is not for this data."""
    if name not in RECIPES:
        return []
    known = Known(len(source.train), source.channels, source.size)
    usual, scaled, now = (dict(fields(each)) for each in (RECIPES[name](IMAGENET), RECIPES[name](known), recipe))
    words = ("batch_size", "epochs", "warmup", "optimizer.lr", "optimizer.weight_decay", "augment.crop", "augment.mixup")
    other = [f"{word} {now[word]} ({usual[word]})" for word in words if now[word] == scaled[word] != usual[word]]
    few = (
        f"{len(source.train):,} images are few beside ImageNet's, for which the recipe is written (its values in brackets)"
    )
    return [f"{few}: {', '.join(other)}"] if other else []


def _prepared(workers: int, recipe: Recipe) -> list[str]:
    if recipe.workers is not None:
        return []
    return [f"images are prepared by {f'{workers} processes' if workers else 'threads'}; --workers changes it"]


def _without_effect(recipe: Recipe, task: Task, plan: Plan) -> list[str]:
    """What the recipe asks for and this run does not do, or in another way than one would think."""
    said = []
    if task == "values":
        vain = {"loss": recipe.loss != "softmax", "label_smoothing": bool(recipe.label_smoothing)}
        said += [f"values are learnt by mean squared error: {word} does not count" for word, there in vain.items() if there]
    if plan.per_epoch < 1:
        said.append(f"a batch is more than all images: each is in it {1 / plan.per_epoch:.1f} times")
    if plan.warmup >= plan.total:
        rate = plan.rate(recipe, plan.total - 1)
        said.append(f"the warm-up is no shorter than the run: the learning rate comes to {rate:.2g} and no further")
    elif plan.warmup + plan.cooldown > plan.total:
        said.append("the cooldown begins within the warm-up: the learning rate does not reach its highest")
    return said


def title(name: str, recipe: Recipe, config: ViTConfig) -> str:
    """What a run is, in a line."""
    return f"{name}: {vit_spec.count(config) / 1e6:.1f} M parameters, on {recipe.data}"


def overview(
    request: Request, config: ViTConfig, plan: Plan, hardware: str, path: Path, said: list[str], careful: list[str]
) -> dict[str, str]:
    """What is about to happen, what was decided by default, and what to be careful about."""
    name, recipe, source = request[:3]
    (height, width), (ph, pw), (rows, columns) = config.image_size, config.patch_size, config.grid
    channels = {1: "grey", 3: "colour"}[config.in_channels]
    counts = f"{len(source.train):,} images, {len(source.held_out):,} held out, {len(source.classes)} {source.kind}"
    o = recipe.optimizer
    shapes = {"cosine": "a cosine to 0", "constant": "constant", "rsqrt": "one over the root of the step"}
    ending = f", falling to 0 in the last {plan.cooldown:.0f}" if plan.cooldown else ""
    model = recipe.model.name if recipe.init is None else f"of {recipe.init}"
    return {
        "recipe": f"{name}, seed {recipe.seed}",
        "model": f"{model}, {config.depth} blocks of width {config.width}, {config.num_heads} heads",
        "parameters": f"{vit_spec.count(config):,}",
        "data": f"{recipe.data}: {counts}",
        "images": f"{height}x{width}, {channels}, in {rows}x{columns} patches of {ph}x{pw}",
        "mesh": hardware,
        "steps": f"{plan.total:,} of {recipe.batch_size} images, {plan.total / plan.per_epoch:g} epochs",
        "learning rate": f"{o.name}, up to {o.lr:g} in {plan.warmup:.0f} steps, then {shapes[recipe.decay]}{ending}",
        **{"assumed" if not i else " " * i: note for i, note in enumerate(said)},
        **{"warning" if not i else " " * (len(said) + i): note for i, note in enumerate(careful)},
        "folder": str(path),
    }


def dried(loop: Loop, run: Run) -> dict[str, str]:
    """What came of one step."""
    last = ", ".join(f"{name} {shown(name, value)}" for name, value in loop.last.items() if "/" not in name)
    count = len(loop.held_out.examples)
    return {"dry run": f"one step and a look at {count} images ({last}) in {run.seconds:.0f} s; nothing is kept"}


def summary(command: str, loop: Loop, run: Run) -> dict[str, str]:
    """What came of it, and the commands that go on from here."""
    leading, ended = LEADING[loop.task], "interrupted" if loop.interrupted else "finished"
    mean = ", the running mean of weights (--ema)" if loop.engine.averages else ""
    rows = {ended: f"{loop.done:,} of {loop.plan.total:,} steps in {run.seconds:.0f} s"}
    if loop.unread:
        rows["not read"] = (
            f"{len(loop.unread)} images: {', '.join(sorted(loop.unread)[:3])}{', ...' * (len(loop.unread) > 3)}"
        )
    if loop.skipped:
        rows["left out"] = f"{loop.skipped} of the steps, whose loss or gradient was not finite"
    if loop.last:
        metrics = {name: value for name, value in loop.last.items() if "/" not in name}
        rows["held out"] = ", ".join(f"{name} {shown(name, value)}" for name, value in metrics.items())
        rows["best"] = f"{leading} {shown(leading, loop.best[leading])}, in {run.best}{mean}"
    if loop.best_raw:
        ahead = better(leading, loop.best_raw[leading], than=loop.best[leading])
        rows["best raw"] = (
            f"{leading} {shown(leading, loop.best_raw[leading])}, in {run.best_raw}, the weights themselves"
            f"{', better than their mean' * ahead}"
        )
    rows["weights"] = f"{run.weights}, after step {loop.done:,}{mean}"
    if loop.engine.averages:
        rows["weights raw"] = f"{run.weights_raw}, after step {loop.done:,}, the weights themselves"
    if run.records:
        rows["curves"] = str(run.path / "curves.png")
    folder = shlex.quote(str(run.path))
    if loop.interrupted:
        rows["to go on"] = f"{command} --run {folder}"
    rows["the same in PyTorch?"] = f"python -m parity check {folder}"
    rows["in PyTorch"] = f'vit_torch.load("{run.path}")'
    return rows


def tell(console: Console, rows: dict[str, str]) -> None:
    """A name and a text a line, aligned; lines are never broken, so that commands and paths can be copied."""
    width = max(map(len, rows))
    for name, text in rows.items():
        console.print(
            Text(printable(f"{name:{width}}  "), style="bold"),
            Text(printable(text)),
            sep="",
            soft_wrap=True,
            highlight=False,
        )
