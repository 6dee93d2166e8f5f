"""What a frozen network's features are worth: `python -m train.evaluate RUN_OR_FILE --data SPEC`; `--help` explains.

What is imported here loads quickly; the framework follows when the arguments are understood.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from parity.__main__ import Parser
from parity.checkpoints.surgery import drop_head
from parity.checkpoints.weights import Checkpoint
from parity.commands.printing import columns
from parity.terminal import console, say
from train.cli import told
from train.data.batches import Feed, targets, usual_workers
from train.data.sources import Source, open_source
from train.inference import probes
from train.inference.model import Frozen, Network, add_arguments, gathered, named, network, pooled
from train.loop.metrics import LEADING, score, shown
from train.recipes import Task
from vit_spec import InputError

METHODS = ("knn", "linear", "few-shot")
DRAWS = 3  # of the images of few shots, as in big_vision

Result = dict[str, Any]  # one line of the table: method, its setting, metrics


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 for bad input."""
    return told(lambda: evaluate(_parser().parse_args(arguments)))


class Evaluation(NamedTuple):
    """What is to be judged by what.

    answers: what the training and the held-out images are, as `train.data.batches.targets` makes it.
    skip: whether images that cannot be read are left out.
    """

    frozen: Frozen
    spec: str
    source: Source
    task: Task
    answers: list[Any]
    methods: list[str]
    skip: bool


def evaluate(given: argparse.Namespace) -> int:
    """Learn simple models of what a frozen network makes of the training images, and judge them by the held-out ones."""
    evaluation = _asked(given)
    frozen, source = evaluation.frozen, evaluation.source
    checkpoint = frozen.checkpoint
    if checkpoint.config.num_classes:
        checkpoint, _ = drop_head(checkpoint)
    if not given.json:
        say(*_overview(given.weights, checkpoint, evaluation))
    looked, workers, sets = network(checkpoint, given.twin), usual_workers(source), []
    for what, examples, answers in zip(
        ("training", "held-out"), (source.train, source.held_out), evaluation.answers, strict=True
    ):
        how, size = frozen.preprocessing, frozen.batch_size
        feed = Feed(examples, answers, frozen.shown, size, skip=evaluation.skip, workers=workers, preprocessing=how)
        sets.append(_features(looked, feed, what, given.json))
    features, read = zip(*sets, strict=True)
    seen = evaluation._replace(answers=[answers[there] for answers, there in zip(evaluation.answers, read, strict=True)])
    results = list(_results(seen, features, given))
    if given.json:
        common = {
            "weights": given.weights,
            "data": evaluation.spec,
            **{name: int(there.sum()) for name, there in zip(("train", "held_out"), read, strict=True)},
            "not_read": int(sum(np.sum(~there) for there in read)),
        }
        print(*(json.dumps(common | _nulled(result)) for result in results), sep="\n")
    else:
        say("", _table(results))
    return 0


def _asked(given: argparse.Namespace) -> Evaluation:
    """Open weights and data, and look whether the images are enough for the methods: before any is decoded."""
    frozen = named(given)
    pooled(frozen.checkpoint)
    spec = given.data or frozen.data
    if spec is None:
        raise InputError(f"{given.weights} does not say what it was trained on: give --data, such as --data digits")
    own = spec == frozen.data
    source = open_source(spec, frozen.held_out if own and given.held_out is None else given.held_out)
    task = given.task or (frozen.task if own else source.kind)
    answers = [targets(examples, source.classes, source.kind, task) for examples in (source.train, source.held_out)]
    methods = list(dict.fromkeys(given.method or ["knn" if task == "classes" else "linear"]))
    if task != "classes" and (other := [method for method in methods if method != "linear"]):
        hint = ", or --task classes" if source.kind == "classes" else ""
        raise InputError(f"--method {other[0]} tells classes apart, and the task is {task}: give --method linear{hint}")
    if "knn" in methods:
        probes.check_neighbours(given.k, len(source.train))
    if "few-shot" in methods:
        probes.draw_shots(answers[0], max(given.shots), given.seed, source.classes)
    if "linear" in methods:
        probes.kept(task, answers[0])
    return Evaluation(frozen, spec, source, task, answers, methods, own and frozen.corrupt == "skip")


def _results(evaluation: Evaluation, features: tuple[Any, ...], given: argparse.Namespace) -> Iterator[Result]:
    """Yield a result for each method and setting."""
    (train, held_out), (learnt, judged), names = features, evaluation.answers, evaluation.source.classes

    def accuracy(found: Any) -> float:
        return float(np.mean(found == judged))

    if "knn" in evaluation.methods:
        for k, found in probes.knn(train, learnt, held_out, given.k).items():
            yield {"method": "knn", "k": k, "accuracy": accuracy(found)}
    if "linear" in evaluation.methods:
        probe = probes.linear(evaluation.task, train, learnt, held_out)
        metrics = score(evaluation.task, probe.outputs, judged, names)
        setting = {"l2": probe.strength, "validation": probe.validated, "converged": probe.converged}
        yield {"method": "linear", **setting, **metrics}
    if "few-shot" in evaluation.methods:
        for shots in given.shots:
            name, grids = f"z/{evaluation.spec}_{shots}shot", []  # as big_vision calls it
            for draw in range(DRAWS):
                rows = probes.draw_shots(learnt, shots, given.seed + draw, names)
                chosen = probes.few_shot(train[rows], learnt[rows], held_out, probes.GRID)
                grids.append([accuracy(chosen[strength]) for strength in probes.GRID])
            usual, mean = probes.GRID.index(probes.L2), np.mean(grids, axis=0)
            best = {"best_l2": probes.GRID[int(mean.argmax())], "best_accuracy": float(mean.max())}
            draws = {f"{name}-seed-{given.seed + draw}": grid[usual] for draw, grid in enumerate(grids)}
            told = {"accuracy": float(mean[usual]), "draws": draws, **best}
            yield {"method": "few-shot", "shots": shots, "l2": probes.L2, **told}


# What is shown --------------------------------------------------------------------------------------------------------


def _features(looked: Network, feed: Feed, what: str, quiet: bool) -> tuple[Any, Any]:
    """The features of those images of a set that could be read, (N read, D) float32, and which those are, (N,) bool.

    Says how fast they came, and what could not be read.
    """
    count, began, read = len(feed.examples), time.monotonic(), []
    with _bar(count, what, quiet) as advance:

        def look(batch: Any) -> Any:
            made = looked.outputs(batch.images)
            read.append(batch.read)
            advance(len(made))
            return made

        found = gathered(feed, look)
    seconds, there = time.monotonic() - began, np.concatenate(read)[:count]
    if not quiet:
        say(f"{what} images: {count:,} in {seconds:.1f} s, {count / seconds:,.0f} images/s")
        if lost := [feed.examples.names[row] for row in np.flatnonzero(~there).tolist()]:
            names = f"{', '.join(lost[:3])}{', ...' * (len(lost) > 3)}"
            say(f"not read: {len(lost):,} {what} image{'s' * (len(lost) > 1)}, left out: {names}")
    return found[there], there


@contextmanager
def _bar(count: int, what: str, quiet: bool) -> Iterator[Any]:
    """Show a bar on a terminal; yield what to call with the number of images just done."""
    screen = console(stderr=True)
    parts = (TextColumn(f"{what} images"), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*parts, console=screen, transient=True, disable=quiet or not screen.is_terminal) as bar:
        task = bar.add_task("", total=count)
        yield lambda done: bar.advance(task, done)


def _overview(weights: str, checkpoint: Checkpoint, evaluation: Evaluation) -> Iterator[str]:
    config, source = checkpoint.config, evaluation.source
    yield f"weights   {weights}: {config.depth} blocks of width {config.width}, {config.sizes['feature']} features"
    yield f"data      {evaluation.spec}: {len(source.train):,} training images, {len(source.held_out):,} held out"
    for note in (*(f"{each.field} is {each.value}, {each.why}" for each in checkpoint.assumed), *source.notes):
        yield f"assumed   {note}"


def _nulled(result: Result) -> Result:
    """A result as JSON takes it, which knows no NaN: null stands for what is undefined."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in result.items()}


def _table(results: list[Result]) -> Table:
    table = columns(None, "method", "setting", "held out", "")
    for result in results:
        table.add_row(result["method"], *_row(result))
    return table


def _row(result: Result) -> tuple[str, str, str]:
    """The setting of a result, its metrics, and what else is to be said."""
    metrics = [f"{name} {shown(name, result[name])}" for name in ("accuracy", "auroc", "mae", "r2") if name in result]
    if result["method"] == "knn":
        return f"k {result['k']}", ", ".join(metrics), ""
    if result["method"] == "linear":
        leading = next(name for name in LEADING.values() if name in result)
        ended = "" if result["converged"] else f"; not converged in {probes.ITERATIONS:,} steps"
        return (
            f"L2 {result['l2']:.2g}",
            ", ".join(metrics),
            f"on the images that L2 was chosen by: {shown(leading, result['validation'])}{ended}",
        )
    draws = ", ".join(shown("accuracy", value) for value in result["draws"].values())
    best = f"{shown('accuracy', result['best_accuracy'])} at L2 2^{np.log2(result['best_l2']):.0f}"
    return f"shots {result['shots']}, L2 2^10", ", ".join(metrics), f"draws {draws}; best of the grid {best}"


# What is asked --------------------------------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(prog="python -m train.evaluate", description=evaluate.__doc__, allow_abbrev=False)
    add_arguments(parser)
    text = "the images, as the trainer's --data; by default those that the run was trained on"
    parser.add_argument("--data", metavar="SPEC", help=text)
    text = "a split or a share to judge by, as the trainer's --held-out"
    parser.add_argument("--held-out", type=_held_out, metavar="SPLIT|SHARE", help=text)
    text = "what is asked of the images; by default what the data says, or on a run's own data what the run learnt"
    parser.add_argument("--task", choices=("classes", "labels", "values"), help=text)
    text = (
        "knn: nearest neighbours (DINO); linear: logistic regression, or ridge for values (CLIP's protocol); few-shot: "
        "least squares on few images (big_vision); by default knn, or linear where there are no classes"
    )
    parser.add_argument("--method", choices=METHODS, nargs="+", help=text)
    text = "neighbours of knn; by default 10 20 100 200"
    parser.add_argument("--k", type=_positive, nargs="+", default=list(probes.NEIGHBOURS), metavar="N", help=text)
    text = "training images of a class for few-shot; by default 1 5 10 25"
    parser.add_argument("--shots", type=_positive, nargs="+", default=list(probes.SHOT_COUNTS), metavar="N", help=text)
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="of the three draws of few-shot: N, N + 1, N + 2"
    )
    return parser


def _held_out(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of images: give at least 1")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no seed: give 0 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
