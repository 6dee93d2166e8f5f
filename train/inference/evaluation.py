"""Evaluate a trained model on a data set: what `python -m train.evaluate` does."""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parity.checkpoints.surgery import drop_head
from parity.terminal import print_lines, print_note
from train.data.batches import DataLoader
from train.data.sources import Dataset, Examples
from train.data.targets import targets_for_task
from train.data.workers import default_workers
from train.inference import probes
from train.inference.evaluated_data import EvaluatedData, open_data
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
from train.inference.probe_results import FewShotResult, KnnResult, LinearResult, ProbeResult, results_table
from train.inference.progress import progress_bar
from train.inference.scores import score, score_answers
from train.loop.class_names import unique_names
from train.loop.metrics import constant_score
from train.recipes import Task
from vit_spec import InputError
from vit_spec.finite_json import replace_non_finite

NUM_DRAWS = 3  # random draws of few-shot images, as in big_vision


@dataclass(frozen=True)
class Options:
    """The options of a command line, with defaults that depend on the data filled in; see `train.evaluate`.

    weights: as typed.
    neighbours: `--k`; empty without the method "knn".
    report: the folder of `--out`; None without.
    is_json: whether to print JSON.
    """

    weights: str
    twin: str | None
    neighbours: tuple[int, ...]
    shots: tuple[int, ...]
    resamples: int
    seed: int
    report: Path | None
    is_json: bool


class Evaluation(NamedTuple):
    """An evaluation that is asked for: the targets, the model and the options.

    targets: targets of the training and of the held-out images, see `train.data.targets.targets_for_task`.
    head: targets of the head for the held-out images, for the method "head".
    notes: lines about what was assumed.
    """

    model: TrainedModel
    data: EvaluatedData
    task: Task
    targets: list[Any]
    head: HeadTargets | None
    methods: list[str]
    notes: tuple[str, ...]
    options: Options


def evaluate(args: argparse.Namespace) -> None:
    """Evaluate a model's own head on the held-out images, or simple models of its features of the training images.

    args: see `train.evaluate`.

    Raises:
        InputError: the model, the data or an argument cannot be used, or a file cannot be written.
    """
    evaluation = _prepare(args)
    if evaluation.model.newest_note:
        print_note(f"note: {evaluation.model.newest_note}")
    for warning in evaluation.data.warnings:
        print_note(f"warning: {warning}")
    if not evaluation.options.is_json:
        print_lines(*_overview(evaluation))
    if evaluation.head is not None:
        _evaluate_head(evaluation, evaluation.head)
    if set(evaluation.methods) != {"head"}:
        _evaluate_features(evaluation)


def _evaluate_head(evaluation: Evaluation, head: HeadTargets) -> None:
    """Score the outputs of the head for the held-out images, and print or write the results."""
    model, task, examples, options = evaluation.model, evaluation.task, evaluation.data.source.held_out, evaluation.options
    predictor, loader = load_predictor(model.checkpoint, options.twin), _data_loader(evaluation, examples, head.targets)
    of_head, readable = _predict_set(predictor, loader, "held-out", options.is_json)
    outputs, targets = head.outputs(of_head), head.targets[readable]
    scores = score(task, outputs, targets, head.names, resamples=options.resamples, seed=options.seed)
    constant = constant_score(task, targets)
    counts = {"held_out": int(readable.sum()), "not_read": int(np.sum(~readable))}
    result = {"weights": options.weights, "data": evaluation.data.spec, **counts, "method": "head"}
    images = images_of_each(task, targets, head.names)
    result = replace_non_finite(result | head_result(scores, constant, images))
    if options.is_json:
        print(json.dumps(result))
    else:
        print_lines("", *head_tables(task, scores, constant, images))
    if options.report is not None:
        from train.inference.report import Report

        report = Report(options.report)
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
        if not options.is_json:
            print_lines(f"report    {options.report}")


def _evaluate_features(evaluation: Evaluation) -> None:
    """Fit simple models to frozen features of the training images, and print their results on the held-out images."""
    source, checkpoint, options = evaluation.data.source, evaluation.model.checkpoint, evaluation.options
    if checkpoint.config.num_classes:
        checkpoint, _ = drop_head(checkpoint)
    predictor, sets = load_predictor(checkpoint, options.twin), []
    for set_name, examples, targets in zip(
        ("training", "held-out"), (source.train, source.held_out), evaluation.targets, strict=True
    ):
        sets.append(_predict_set(predictor, _data_loader(evaluation, examples, targets), set_name, options.is_json))
    features, readable = zip(*sets, strict=True)
    readable_only = evaluation._replace(
        targets=[targets[is_readable] for targets, is_readable in zip(evaluation.targets, readable, strict=True)]
    )
    results = list(_results(readable_only, features))
    if options.is_json:
        common = {
            "weights": options.weights,
            "data": evaluation.data.spec,
            **{name: int(is_readable.sum()) for name, is_readable in zip(("train", "held_out"), readable, strict=True)},
            "not_read": int(sum(np.sum(~is_readable) for is_readable in readable)),
        }
        print(*(json.dumps(common | replace_non_finite(result.to_json())) for result in results), sep="\n")
    else:
        print_lines("", results_table(results))


def _data_loader(evaluation: Evaluation, examples: Examples, targets: Any) -> DataLoader:
    model = evaluation.model
    return DataLoader(
        examples,
        targets,
        model.input_config,
        min(model.batch_size, len(examples)),
        skip_damaged=evaluation.data.is_own and model.corrupt == "skip",
        workers=default_workers(evaluation.data.source),
        preprocessing=model.preprocessing,
    )


def _prepare(args: argparse.Namespace) -> Evaluation:
    """Open weights and data, and check the arguments, such as the number of images, before any image is decoded."""
    model = load_from_arguments(args)
    require_pooling(model.checkpoint)
    data = open_data(model, args.weights, args.data, args.held_out)
    source = data.source
    task = args.task or (model.task if data.is_own else source.task)
    targets = [
        targets_for_task(examples, source.classes, source.task, task) for examples in (source.train, source.held_out)
    ]
    implied = ["knn"] * bool(args.k) + ["few-shot"] * bool(args.shots)
    head, methods, notes = _choose_methods(model, source, task, targets[1], args.method or implied)
    options = Options(
        weights=args.weights,
        twin=args.twin,
        neighbours=_neighbour_counts(args.k, len(source.train)) if "knn" in methods else (),
        shots=tuple(args.shots or probes.SHOT_COUNTS),
        resamples=args.resamples,
        seed=args.seed,
        report=Path(args.out) if args.out else None,
        is_json=args.json,
    )
    if options.report is not None and head is None:
        raise InputError("--out reports on the head of a model: give --method head, or leave --out out")
    if options.report is not None:
        from train.inference.report import prepare_folder  # imports matplotlib

        prepare_folder(options.report, force=args.force)
    if task != "classes" and (other := [method for method in methods if method not in ("head", "linear")]):
        hint = ", or --task classes" if source.task == "classes" else ""
        raise InputError(f"--method {other[0]} needs classes, and the task is {task}: give --method linear{hint}")
    if "knn" in methods:
        probes.check_neighbours(options.neighbours, len(source.train))
    if "few-shot" in methods:
        probes.draw_shots(targets[0], max(options.shots), options.seed, source.classes)
    if "linear" in methods:
        probes.validation_split(task, targets[0])
    return Evaluation(model, data, task, targets, head, methods, notes, options)


def _neighbour_counts(given: list[int] | None, num_images: int) -> tuple[int, ...]:
    """Return the numbers of neighbours: by default those of DINO for which there are training images, or all images."""
    return tuple(given or [k for k in probes.NEIGHBOUR_COUNTS if k <= num_images] or [num_images])


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


def _results(evaluation: Evaluation, features: tuple[Any, ...]) -> Iterator[ProbeResult]:
    """Yield a result for each method and setting.

    features: features of the training and of the held-out images, (N, D) and (M, D).
    """
    options, names = evaluation.options, unique_names(evaluation.data.source.classes)
    (train, held_out), (train_targets, held_out_targets) = features, evaluation.targets

    def accuracy(found: Any) -> float:
        return float(np.mean(found == held_out_targets))

    if "knn" in evaluation.methods:
        for k, found in probes.knn(train, train_targets, held_out, options.neighbours).items():
            yield KnnResult(k, score_answers(found == held_out_targets, resamples=options.resamples, seed=options.seed))
    if "linear" in evaluation.methods:
        probe = probes.linear_probe(evaluation.task, train, train_targets, held_out)
        scores = score(
            evaluation.task,
            probe.outputs,
            held_out_targets,
            names[: probe.outputs.shape[1]],
            resamples=options.resamples,
            seed=options.seed,
        )
        images = images_of_each(evaluation.task, held_out_targets, names[: probe.outputs.shape[1]])
        yield LinearResult(evaluation.task, probe, scores, constant_score(evaluation.task, held_out_targets), images)
    if "few-shot" in evaluation.methods:
        for shots in options.shots:
            name, grids = f"z/{evaluation.data.spec}_{shots}shot", []  # big_vision's name of the metric
            for draw in range(NUM_DRAWS):
                rows = probes.draw_shots(train_targets, shots, options.seed + draw, names)
                chosen = probes.few_shot(train[rows], train_targets[rows], held_out, probes.L2_GRID)
                grids.append([accuracy(chosen[strength]) for strength in probes.L2_GRID])
            default, mean = probes.L2_GRID.index(probes.L2), np.mean(grids, axis=0)
            draws = {f"{name}-seed-{options.seed + draw}": grid[default] for draw, grid in enumerate(grids)}
            best = probes.L2_GRID[int(mean.argmax())], float(mean.max())
            yield FewShotResult(shots, float(mean[default]), draws, *best)


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


def _overview(evaluation: Evaluation) -> Iterator[str]:
    checkpoint, (spec, source, *_) = evaluation.model.checkpoint, evaluation.data
    config, split = checkpoint.config, f"split {source.split!r}" if source.split else "a share of the training images"
    what = f"{config.depth} blocks of width {config.width}, {config.sizes['feature']} features"
    yield f"weights   {evaluation.options.weights}: {what}"
    yield f"data      {spec}: {len(source.train):,} training images, {len(source.held_out):,} held out ({split})"
    assumed = (f"{each.field} is {each.value}, {each.why}" for each in checkpoint.assumed)
    for note in (*assumed, *source.notes, *evaluation.notes):
        yield f"assumed   {note}"
    for override in checkpoint.overridden:
        yield f"override  {override.describe('--set')}"
