"""Evaluate frozen features: `python -m train.evaluate RUN_OR_FILE --data SPEC`; `--help` explains the options.

The imports here are fast; a framework is imported after the arguments are checked.
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
from parity.commands.printing import make_table
from parity.terminal import console, print_lines, print_note
from train.cli import run_command
from train.data.batches import DataLoader, default_workers, targets_for_task
from train.data.sources import Dataset, open_dataset
from train.inference import probes
from train.inference.model import (
    Predictor,
    TrainedModel,
    add_arguments,
    load_from_arguments,
    load_predictor,
    predict_all,
    require_pooling,
)
from train.loop.metrics import PRIMARY_METRIC, compute_metrics, format_metric
from train.recipes import Task
from vit_spec import InputError

METHODS = ("knn", "linear", "few-shot")
NUM_DRAWS = 3  # random draws of few-shot images, as in big_vision

Result = dict[str, Any]  # a row of the table: method, settings, metrics


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 for bad input."""
    return run_command(lambda: evaluate(_parser().parse_args(arguments)))


class Evaluation(NamedTuple):
    """What to evaluate, on which data, by which methods.

    spec: `--data`.
    targets: of the training and of the held-out images, see `train.data.batches.targets_for_task`.
    skip_corrupt: whether to leave out images that cannot be read, rather than to stop.
    """

    model: TrainedModel
    spec: str
    source: Dataset
    task: Task
    targets: list[Any]
    methods: list[str]
    skip_corrupt: bool


def evaluate(args: argparse.Namespace) -> int:
    """Fit simple models to frozen features of the training images, and evaluate them on the held-out images."""
    evaluation = _prepare(args)
    model, source = evaluation.model, evaluation.source
    checkpoint = model.checkpoint
    if checkpoint.config.num_classes:
        checkpoint, _ = drop_head(checkpoint)
    if model.newest_note:
        print_note(f"note: {model.newest_note}")
    if not args.json:
        print_lines(*_overview(args.weights, checkpoint, evaluation))
    predictor, workers, sets = load_predictor(checkpoint, args.twin), default_workers(source), []
    for set_name, examples, targets in zip(
        ("training", "held-out"), (source.train, source.held_out), evaluation.targets, strict=True
    ):
        loader = DataLoader(
            examples,
            targets,
            model.input_config,
            model.batch_size,
            skip_damaged=evaluation.skip_corrupt,
            workers=workers,
            preprocessing=model.preprocessing,
        )
        sets.append(_extract_features(predictor, loader, set_name, args.json))
    features, readable = zip(*sets, strict=True)
    readable_only = evaluation._replace(
        targets=[targets[is_readable] for targets, is_readable in zip(evaluation.targets, readable, strict=True)]
    )
    results = list(_results(readable_only, features, args))
    if args.json:
        common = {
            "weights": args.weights,
            "data": evaluation.spec,
            **{name: int(is_readable.sum()) for name, is_readable in zip(("train", "held_out"), readable, strict=True)},
            "not_read": int(sum(np.sum(~is_readable) for is_readable in readable)),
        }
        print(*(json.dumps(common | _nan_to_null(result)) for result in results), sep="\n")
    else:
        print_lines("", _table(results))
    return 0


def _prepare(args: argparse.Namespace) -> Evaluation:
    """Open weights and data, and check the arguments, such as the number of images, before any image is decoded."""
    model = load_from_arguments(args)
    require_pooling(model.checkpoint)
    spec = args.data or model.data
    if spec is None:
        raise InputError(f"{args.weights} does not name its training data: give --data, such as --data digits")
    is_own_data = spec == model.data
    source = open_dataset(spec, model.held_out if is_own_data and args.held_out is None else args.held_out)
    task = args.task or (model.task if is_own_data else source.task)
    targets = [
        targets_for_task(examples, source.classes, source.task, task) for examples in (source.train, source.held_out)
    ]
    methods = list(dict.fromkeys(args.method or ["knn" if task == "classes" else "linear"]))
    if task != "classes" and (other := [method for method in methods if method != "linear"]):
        hint = ", or --task classes" if source.task == "classes" else ""
        raise InputError(f"--method {other[0]} needs classes, and the task is {task}: give --method linear{hint}")
    if "knn" in methods:
        probes.check_neighbours(args.k, len(source.train))
    if "few-shot" in methods:
        probes.draw_shots(targets[0], max(args.shots), args.seed, source.classes)
    if "linear" in methods:
        probes.validation_split(task, targets[0])
    return Evaluation(model, spec, source, task, targets, methods, is_own_data and model.corrupt == "skip")


def _results(evaluation: Evaluation, features: tuple[Any, ...], args: argparse.Namespace) -> Iterator[Result]:
    """Yield a result for each method and setting.

    features: of the training and of the held-out images, (N, D) and (M, D).
    """
    (train, held_out), (train_targets, held_out_targets), names = features, evaluation.targets, evaluation.source.classes

    def accuracy(found: Any) -> float:
        return float(np.mean(found == held_out_targets))

    if "knn" in evaluation.methods:
        for k, found in probes.knn(train, train_targets, held_out, args.k).items():
            yield {"method": "knn", "k": k, "accuracy": accuracy(found)}
    if "linear" in evaluation.methods:
        probe = probes.linear_probe(evaluation.task, train, train_targets, held_out)
        metrics = compute_metrics(evaluation.task, probe.outputs, held_out_targets, names)
        setting = {"l2": probe.strength, "validation": probe.validated, "converged": probe.converged}
        yield {"method": "linear", **setting, **metrics}
    if "few-shot" in evaluation.methods:
        for shots in args.shots:
            name, grids = f"z/{evaluation.spec}_{shots}shot", []  # big_vision's name of the metric
            for draw in range(NUM_DRAWS):
                rows = probes.draw_shots(train_targets, shots, args.seed + draw, names)
                chosen = probes.few_shot(train[rows], train_targets[rows], held_out, probes.L2_GRID)
                grids.append([accuracy(chosen[strength]) for strength in probes.L2_GRID])
            default, mean = probes.L2_GRID.index(probes.L2), np.mean(grids, axis=0)
            best = {"best_l2": probes.L2_GRID[int(mean.argmax())], "best_accuracy": float(mean.max())}
            draws = {f"{name}-seed-{args.seed + draw}": grid[default] for draw, grid in enumerate(grids)}
            means = {"accuracy": float(mean[default]), "draws": draws, **best}
            yield {"method": "few-shot", "shots": shots, "l2": probes.L2, **means}


# Output ---------------------------------------------------------------------------------------------------------------


def _extract_features(predictor: Predictor, loader: DataLoader, set_name: str, quiet: bool) -> tuple[Any, Any]:
    """Return the features of the readable images of a set, (N readable, D) float32, and which are readable, (N,) bool.

    Print the throughput and the names of images that cannot be read.
    """
    count, began, readable = len(loader.examples), time.monotonic(), []
    with _progress_bar(count, set_name, quiet) as advance:

        def predict_batch(batch: Any) -> Any:
            outputs = predictor.predict(batch.images)
            readable.append(batch.readable)
            advance(len(outputs))
            return outputs

        found = predict_all(loader, predict_batch)
    seconds, is_readable = time.monotonic() - began, np.concatenate(readable)[:count]
    if not quiet:
        print_lines(f"{set_name} images: {count:,} in {seconds:.1f} s, {count / seconds:,.0f} images/s")
        if unreadable := [loader.examples.names[row] for row in np.flatnonzero(~is_readable).tolist()]:
            names = f"{', '.join(unreadable[:3])}{', ...' * (len(unreadable) > 3)}"
            print_lines(f"unreadable: {len(unreadable):,} {set_name} image{'s' * (len(unreadable) > 1)}, left out: {names}")
    return found[is_readable], is_readable


@contextmanager
def _progress_bar(count: int, set_name: str, quiet: bool) -> Iterator[Any]:
    """Show a bar on a terminal; yield a function that advances it by a number of images."""
    screen = console(stderr=True)
    parts = (TextColumn(f"{set_name} images"), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*parts, console=screen, transient=True, disable=quiet or not screen.is_terminal) as bar:
        task = bar.add_task("", total=count)
        yield lambda done: bar.advance(task, done)


def _overview(weights: str, checkpoint: Checkpoint, evaluation: Evaluation) -> Iterator[str]:
    config, source = checkpoint.config, evaluation.source
    yield f"weights   {weights}: {config.depth} blocks of width {config.width}, {config.sizes['feature']} features"
    yield f"data      {evaluation.spec}: {len(source.train):,} training images, {len(source.held_out):,} held out"
    for note in (*(f"{each.field} is {each.value}, {each.why}" for each in checkpoint.assumed), *source.notes):
        yield f"assumed   {note}"


def _nan_to_null(result: Result) -> Result:
    """Return a result for JSON, which has no NaN: undefined metrics are null."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in result.items()}


def _table(results: list[Result]) -> Table:
    table = make_table(None, "method", "setting", "held out", "")
    for result in results:
        table.add_row(result["method"], *_row(result))
    return table


def _row(result: Result) -> tuple[str, str, str]:
    """Return the setting of a result, its metrics, and further details, as texts."""
    metrics = [
        f"{name} {format_metric(name, result[name])}" for name in ("accuracy", "auroc", "mae", "r2") if name in result
    ]
    if result["method"] == "knn":
        return f"k {result['k']}", ", ".join(metrics), ""
    if result["method"] == "linear":
        metric = next(name for name in PRIMARY_METRIC.values() if name in result)
        not_converged = "" if result["converged"] else f"; not converged in {probes.MAX_ITERATIONS:,} iterations"
        return (
            f"L2 {result['l2']:.2g}",
            ", ".join(metrics),
            f"validation {format_metric(metric, result['validation'])}{not_converged}",
        )
    draws = ", ".join(format_metric("accuracy", value) for value in result["draws"].values())
    best = f"{format_metric('accuracy', result['best_accuracy'])} at L2 2^{np.log2(result['best_l2']):.0f}"
    return f"shots {result['shots']}, L2 2^10", ", ".join(metrics), f"draws {draws}; best of the grid {best}"


# Arguments ------------------------------------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(prog="python -m train.evaluate", description=evaluate.__doc__, allow_abbrev=False)
    add_arguments(parser)
    text = "the data set, as the trainer's --data; by default that of the run"
    parser.add_argument("--data", metavar="SPEC", help=text)
    text = "the split, or the share of the training images, to evaluate on, as the trainer's --held-out"
    parser.add_argument("--held-out", type=_parse_split_or_fraction, metavar="SPLIT|SHARE", help=text)
    text = "what to predict; by default the task of the data, or on a run's own data the task of the run"
    parser.add_argument("--task", choices=("classes", "labels", "values"), help=text)
    text = (
        "knn: nearest neighbours (DINO); linear: logistic regression, or ridge for values (CLIP's protocol); few-shot: "
        "least squares on few images (big_vision); by default knn, or linear if the task is not classes"
    )
    parser.add_argument("--method", choices=METHODS, nargs="+", help=text)
    text = "numbers of neighbours for knn; by default 10 20 100 200"
    parser.add_argument(
        "--k", type=_parse_positive_int, nargs="+", default=list(probes.NEIGHBOUR_COUNTS), metavar="N", help=text
    )
    text = "training images per class for few-shot; by default 1 5 10 25"
    parser.add_argument(
        "--shots", type=_parse_positive_int, nargs="+", default=list(probes.SHOT_COUNTS), metavar="N", help=text
    )
    parser.add_argument(
        "--seed", type=_parse_seed, default=0, metavar="N", help="seed of the three few-shot draws: N, N + 1, N + 2"
    )
    return parser


def _parse_split_or_fraction(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _parse_positive_int(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of images: give 1 or more")
    return int(text)


def _parse_seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed: give 0 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
