"""Evaluate a trained model on a data set: what `python -m train.evaluate` does."""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from parity.checkpoints.surgery import drop_head
from parity.commands.printing import make_table
from parity.terminal import print_lines, print_note
from train.data.batches import DataLoader, default_workers, targets_for_task
from train.data.sources import Dataset, Examples, open_dataset
from train.inference import probes
from train.inference.head import (
    HeadTargets,
    confusion_matrix,
    head_result,
    head_tables,
    images_of_each,
    match_head,
    prediction_table,
    worst_mistakes,
)
from train.inference.model import (
    Predictor,
    TrainedModel,
    load_from_arguments,
    load_predictor,
    predict_all,
    require_pooling,
)
from train.inference.progress import progress_bar
from train.inference.scores import score, score_answers
from train.loop.metrics import PRIMARY_METRIC, constant_score, format_metric
from train.recipes import Task
from vit_spec import InputError

NUM_DRAWS = 3  # random draws of few-shot images, as in big_vision

Result = dict[str, Any]  # a row of the table: method, settings, metrics


class Evaluation(NamedTuple):
    """What to evaluate, on which data, by which methods.

    spec: `--data`.
    targets: of the training and of the held-out images, see `train.data.batches.targets_for_task`.
    head: of the held-out images, for the method "head".
    skip_corrupt: whether to leave out images that cannot be read, rather than to stop.
    """

    model: TrainedModel
    spec: str
    source: Dataset
    task: Task
    targets: list[Any]
    head: HeadTargets | None
    methods: list[str]
    skip_corrupt: bool
    notes: tuple[str, ...]


def evaluate(args: argparse.Namespace) -> None:
    """Evaluate a model's own head on the held-out images, or simple models of its features of the training images.

    args: see `train.evaluate`.

    Raises:
        InputError: the model, the data or an argument cannot be used, or a file cannot be written.
    """
    evaluation = _prepare(args)
    if evaluation.model.newest_note:
        print_note(f"note: {evaluation.model.newest_note}")
    if not args.json:
        print_lines(*_overview(args.weights, evaluation))
    if evaluation.head is not None:
        _evaluate_head(evaluation, evaluation.head, args)
    if set(evaluation.methods) != {"head"}:
        _evaluate_features(evaluation, args)


def _evaluate_head(evaluation: Evaluation, head: HeadTargets, args: argparse.Namespace) -> None:
    """Score the outputs of the head for the held-out images, and print or write the results."""
    model, task, examples = evaluation.model, evaluation.task, evaluation.source.held_out
    predictor, loader = load_predictor(model.checkpoint, args.twin), _data_loader(evaluation, examples, head.targets)
    of_head, readable = _predict_set(predictor, loader, "held-out", args.json)
    outputs, targets = head.outputs(of_head), head.targets[readable]
    scores = score(task, outputs, targets, head.names, resamples=args.resamples, seed=args.seed)
    constant = constant_score(task, targets)
    counts = {"held_out": int(readable.sum()), "not_read": int(np.sum(~readable))}
    result = {"weights": args.weights, "data": evaluation.spec, **counts, "method": "head"}
    images = images_of_each(task, targets, head.names)
    result = _nan_to_null(result | head_result(scores, constant, images))
    if args.json:
        print(json.dumps(result))
    else:
        print_lines("", *head_tables(task, scores, constant, images))
    if args.out:
        from train.inference.report import Report

        report = Report(Path(args.out))
        rows = np.flatnonzero(readable)
        report.write_result(result)
        report.write_each(task, scores, images)
        names = [examples.names[row] for row in rows.tolist()]
        report.write_predictions(*prediction_table(task, names, outputs, targets, head.names))
        if task == "classes":
            report.write_confusion(confusion_matrix(outputs, targets), head.names)
        chosen, titles = worst_mistakes(task, outputs, targets, head.names)
        if len(chosen):
            few = examples.take(rows[chosen])
            batches = _data_loader(evaluation, few, head.targets[rows[chosen]]).evaluation_batches()
            report.write_mistakes(np.concatenate([batch.images for batch in batches])[: len(chosen)], titles)
        if not args.json:
            print_lines(f"report    {args.out}")


def _evaluate_features(evaluation: Evaluation, args: argparse.Namespace) -> None:
    """Fit simple models to frozen features of the training images, and print their results on the held-out images."""
    source, checkpoint = evaluation.source, evaluation.model.checkpoint
    if checkpoint.config.num_classes:
        checkpoint, _ = drop_head(checkpoint)
    predictor, sets = load_predictor(checkpoint, args.twin), []
    for set_name, examples, targets in zip(
        ("training", "held-out"), (source.train, source.held_out), evaluation.targets, strict=True
    ):
        sets.append(_predict_set(predictor, _data_loader(evaluation, examples, targets), set_name, args.json))
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


def _data_loader(evaluation: Evaluation, examples: Examples, targets: Any) -> DataLoader:
    model = evaluation.model
    return DataLoader(
        examples,
        targets,
        model.input_config,
        min(model.batch_size, len(examples)),
        skip_damaged=evaluation.skip_corrupt,
        workers=default_workers(evaluation.source),
        preprocessing=model.preprocessing,
    )


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
    implied = ["knn"] * bool(args.k) + ["few-shot"] * bool(args.shots)
    head, methods, notes = _choose_methods(model, source, task, targets[1], args.method or implied)
    args.shots = args.shots or list(probes.SHOT_COUNTS)
    if args.out and head is None:
        raise InputError("--out reports on the head of a model: give --method head, or leave --out out")
    if args.out:
        from train.inference.report import prepare_folder  # imports matplotlib

        prepare_folder(Path(args.out), force=args.force)
    if task != "classes" and (other := [method for method in methods if method not in ("head", "linear")]):
        hint = ", or --task classes" if source.task == "classes" else ""
        raise InputError(f"--method {other[0]} needs classes, and the task is {task}: give --method linear{hint}")
    if "knn" in methods and args.k is None:
        args.k = [k for k in probes.NEIGHBOUR_COUNTS if k <= len(source.train)] or [len(source.train)]
    if "knn" in methods:
        probes.check_neighbours(args.k, len(source.train))
    if "few-shot" in methods:
        probes.draw_shots(targets[0], max(args.shots), args.seed, source.classes)
    if "linear" in methods:
        probes.validation_split(task, targets[0])
    if model.data is not None and not is_own_data and spec.partition("?")[0] == model.data.partition("?")[0]:
        notes = (*notes, f"the run was trained on {model.data}: its training images may be among those that are scored")
    return Evaluation(model, spec, source, task, targets, head, methods, is_own_data and model.corrupt == "skip", notes)


def _choose_methods(
    model: TrainedModel, source: Dataset, task: Task, targets: Any, given: list[str]
) -> tuple[HeadTargets | None, list[str], tuple[str, ...]]:
    """Return the targets of the head if it is evaluated, the methods, and notes about what was assumed.

    By default the head is evaluated if it predicts what the data has.

    Raises:
        InputError: `given` has "head", and it predicts something else.
    """
    methods = list(dict.fromkeys(given))
    if methods and "head" not in methods:
        return None, methods, ()
    try:
        head = match_head(model, source, task, targets)
    except InputError as error:
        if methods:
            raise
        default = "knn" if task == "classes" else "linear"
        reason = (f"--method {default}, because {str(error).removeprefix('--method head: ').partition(': give')[0]}",)
        return None, [default], reason if model.checkpoint.config.num_classes else ()
    return head, methods or ["head"], (head.note,) * bool(head.note)


def _results(evaluation: Evaluation, features: tuple[Any, ...], args: argparse.Namespace) -> Iterator[Result]:
    """Yield a result for each method and setting.

    features: of the training and of the held-out images, (N, D) and (M, D).
    """
    (train, held_out), (train_targets, held_out_targets), names = features, evaluation.targets, evaluation.source.classes

    def accuracy(found: Any) -> float:
        return float(np.mean(found == held_out_targets))

    if "knn" in evaluation.methods:
        for k, found in probes.knn(train, train_targets, held_out, args.k).items():
            answers = score_answers(found == held_out_targets, resamples=args.resamples, seed=args.seed)
            yield {
                "method": "knn",
                "k": k,
                "accuracy": answers.value,
                "intervals": {"accuracy": [answers.low, answers.high]},
            }
    if "linear" in evaluation.methods:
        probe = probes.linear_probe(evaluation.task, train, train_targets, held_out)
        scores = score(
            evaluation.task,
            probe.outputs,
            held_out_targets,
            names[: probe.outputs.shape[1]],
            resamples=args.resamples,
            seed=args.seed,
        )
        setting = {"l2": probe.strength, "validation": probe.validated, "converged": probe.converged}
        images = images_of_each(evaluation.task, held_out_targets, names[: probe.outputs.shape[1]])
        result = head_result(scores, constant_score(evaluation.task, held_out_targets), images)
        if evaluation.task == "labels":  # each by itself, under the names that the trainers' records have
            result |= {f"auroc/{name}": of["auroc"].value for name, of in scores.each.items()}
        yield {"method": "linear", **setting, **result}
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


def _predict_set(predictor: Predictor, loader: DataLoader, set_name: str, quiet: bool) -> tuple[Any, Any]:
    """Return the outputs for the readable images of a set, (N readable, D) float32, and which are readable, (N,) bool.

    Print the throughput and the names of images that cannot be read.
    """
    count, began, readable = len(loader.examples), time.monotonic(), []
    with progress_bar(count, f"{set_name} images", quiet) as advance:

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


def _overview(weights: str, evaluation: Evaluation) -> Iterator[str]:
    checkpoint, source = evaluation.model.checkpoint, evaluation.source
    config, split = checkpoint.config, f"split {source.split!r}" if source.split else "a share of the training images"
    yield f"weights   {weights}: {config.depth} blocks of width {config.width}, {config.sizes['feature']} features"
    yield f"data      {evaluation.spec}: {len(source.train):,} training images, {len(source.held_out):,} held out ({split})"
    assumed = (f"{each.field} is {each.value}, {each.why}" for each in checkpoint.assumed)
    for note in (*assumed, *source.notes, *evaluation.notes):
        yield f"assumed   {note}"
    for override in checkpoint.overridden:
        yield f"override  {override.describe('--set')}"


def _nan_to_null(result: Any) -> Any:
    """Return a result for JSON, which has no NaN and no infinity: such metrics are null."""
    if isinstance(result, dict):
        return {name: _nan_to_null(value) for name, value in result.items()}
    if isinstance(result, list | tuple):
        return [_nan_to_null(value) for value in result]
    return None if isinstance(result, float) and not math.isfinite(result) else result


def _table(results: list[Result]) -> Table:
    table = make_table(None, "method", "setting", "held out", "")
    for result in results:
        table.add_row(result["method"], *_row(result))
    return table


def _shown_metrics(result: Result) -> tuple[str, ...]:
    """Return the names of the metrics of a method that the table shows."""
    return next(names for names in (("accuracy",), ("mae", "r2"), ("auroc",)) if names[0] in result)


def _with_interval(name: str, result: Result) -> str:
    """Return a metric as text, with its interval if it has one."""
    low, high = result.get("intervals", {}).get(name, (math.nan, math.nan))
    ends = "" if math.isnan(low) else f" ({format_metric(name, low)} to {format_metric(name, high)})"
    return f"{format_metric(name, result[name])}{ends}"


def _row(result: Result) -> tuple[str, str, str]:
    """Return the setting of a result, its metrics, and further details, as texts."""
    metrics = [f"{name} {_with_interval(name, result)}" for name in _shown_metrics(result)]
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
