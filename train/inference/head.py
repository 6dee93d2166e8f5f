"""Evaluation of a model by its own head: its outputs are matched with the targets of a data set by name, and scored."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from parity.commands.printing import make_table
from train.data.sources import Dataset
from train.data.targets import ModelTargets
from train.inference.model import Array, TrainedModel
from train.inference.scores import Score, Scores, sigmoid, softmax
from train.loop.class_names import match_outputs, unique_names
from train.loop.metrics import format_metric
from train.recipes import Task
from vit_spec import InputError


class HeadTargets(NamedTuple):
    """The targets of a data set for the outputs of a head.

    targets: class numbers among `names`, or labels or values in the order of `names`; see
        `train.data.targets.targets_for_task`.
    names: names of the outputs that are scored, which all differ.
    columns: the outputs that are scored, in the order of `names`.
    note: a line that says what was assumed; "" if nothing was.
    """

    targets: ModelTargets
    names: tuple[str, ...]
    columns: np.ndarray
    note: str = ""

    def outputs(self, of_head: Array) -> Array:
        """Return the outputs that are scored, (N, names), of all outputs of the head (N, num_outputs)."""
        return of_head[:, self.columns]


def match_head(model: TrainedModel, source: Dataset, task: Task, targets: ModelTargets) -> HeadTargets:
    """Return targets for the outputs of a model's head.

    Names decide: the data may have them in another order, or lack some.  All classes of the model stay possible answers.
    A model without names has the data's classes in their order, if it has as many outputs.

    targets: targets of the held-out images; see `train.data.targets.targets_for_task`.

    Raises:
        InputError: the head predicts something else than the task or the classes of the data.
    """
    config, labels = model.checkpoint.config, model.checkpoint.labels
    if not config.num_classes:
        raise InputError("--method head needs a head, and these weights have none: give --method knn or linear")
    if model.task != task:
        raise InputError(f"--method head: the head predicts {model.task}, and the task is {task}: give --task {model.task}")
    names = source.classes if task != "values" or source.task == "values" else model.names
    try:
        columns = match_outputs("the head", labels, config.num_classes, task, names)
    except InputError as error:
        raise InputError(
            f"--method head: {error}: give data with the {task} of the model, or --method knn or linear"
        ) from None
    if labels is None:
        note = f"the weights have no names of {task}: their outputs are those of the data, in its order"
        return HeadTargets(targets, unique_names(names), columns, note)
    if task == "classes":
        return HeadTargets(columns[targets].astype(np.int32), unique_names(labels), np.arange(len(labels)))
    return HeadTargets(targets, unique_names(names), columns)


# Results --------------------------------------------------------------------------------------------------------------

NUM_MISTAKES = 24  # images in the picture of the worst mistakes
MAX_NAME_LENGTH = 24  # characters in tables and pictures
MAX_PRINTED = 20  # classes, labels or values that are printed; of more, those with the lowest recall or r2


def shorten_name(name: str) -> str:
    """Return a name that fits into a table or a picture."""
    return name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 1]}…"


def confusion_matrix(outputs: Array, classes: ModelTargets) -> np.ndarray:
    """Return the number of images by class and predicted class, (C, C) int64."""
    count = outputs.shape[1]
    return np.bincount(count * classes + outputs.argmax(1), minlength=count**2).reshape(count, count)


def images_of_each(task: Task, targets: ModelTargets, names: Sequence[str]) -> dict[str, int]:
    """Return the number of images that have each class or label; empty for values.

    names: of the classes or labels, which all differ.
    """
    if task == "values":
        return {}
    counts = np.bincount(targets, minlength=len(names)) if task == "classes" else targets.sum(0).astype(int)
    return dict(zip(names, counts.tolist(), strict=True))


def head_result(scores: Scores, constant: tuple[str, float], images: dict[str, int]) -> dict[str, Any]:
    """Return the scores for JSON: metrics, their intervals, those of each class, and what one answer would reach.

    constant: what `constant_score` returns.    images: what `images_of_each` returns.
    """
    each = {name: {metric: each.value for metric, each in of.items()} for name, of in scores.each.items()}
    return {
        **{metric: each.value for metric, each in scores.overall.items()},
        "intervals": {metric: [each.low, each.high] for metric, each in scores.overall.items()},
        "constant": dict([constant]),
        "each": {name: of | ({"images": images[name]} if images else {}) for name, of in each.items()},
    }


def head_tables(task: Task, scores: Scores, constant: tuple[str, float], images: dict[str, int]) -> Iterator[Table | str]:
    """Yield tables of the metrics, and of those of each class, label or value.

    constant: what `constant_score` returns.    images: what `images_of_each` returns.
    """
    table = make_table(None, "metric", "head", "95 % interval", "")
    for metric, each in scores.overall.items():
        note = f"one answer for all images: {format_metric(*constant)}" if metric == constant[0] else ""
        table.add_row(metric.replace("_", " "), format_metric(metric, each.value), _format_interval(metric, each), note)
    yield table
    if len(scores.each) < 2:
        return
    ranking = "r2" if task == "values" else "recall"
    of_each = sorted(scores.each.items(), key=lambda item: (np.isnan(item[1][ranking].value), item[1][ranking].value))
    chosen = list(scores.each.items()) if len(of_each) <= MAX_PRINTED else of_each[:MAX_PRINTED]
    yield ""
    if len(of_each) > MAX_PRINTED:
        yield f"the {MAX_PRINTED} {task} with the lowest {ranking}; --out FOLDER writes all"
    metrics = list(chosen[0][1])
    table = make_table(None, task, *(["images"] if images else []), *(metric.replace("_", " ") for metric in metrics))
    for name, of in chosen:
        counts = [f"{images[name]:,}"] if images else []
        table.add_row(shorten_name(name), *counts, *(format_metric(metric, of[metric].value) for metric in metrics))
    yield table


def _format_interval(metric: str, found: Score) -> str:
    return "" if np.isnan(found.low) else f"{format_metric(metric, found.low)} to {format_metric(metric, found.high)}"


def prediction_table(
    task: Task, images: Sequence[str], outputs: Array, targets: ModelTargets, names: Sequence[str]
) -> tuple[list[str], Iterator[list[Any]]]:
    """Return the header and the rows of a table with the target, the answer and its probability for each image.

    For labels and values, it has the probability or value, and the target, of each.

    outputs: (N, outputs) of the model.    targets: (N,) classes, or (N, outputs).
    """
    if task == "classes":
        p, answers = softmax(np.asarray(outputs, np.float64)), outputs.argmax(1)
        columns = zip(images, targets.tolist(), answers.tolist(), p.max(1).tolist(), strict=True)
        rows = ([image, names[target], names[answer], round(q, 6)] for image, target, answer, q in columns)
        return ["image", "class", "predicted", "probability"], rows
    x = np.asarray(outputs, np.float64)
    shown = x if task == "values" else sigmoid(x)
    pairs = zip(images, np.stack([targets, shown], axis=2).reshape(len(shown), -1).tolist(), strict=True)
    header = [text for name in names for text in (name, f"predicted {name}")]
    return ["image", *header], ([image, *(float(f"{value:.7g}") for value in row)] for image, row in pairs)


def worst_mistakes(task: Task, outputs: Array, targets: ModelTargets, names: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """Return the rows of the worst mistakes, the worst first, with a title of two lines for each.

    classes: wrong answers with the highest probability.    labels: wrong decisions with the highest probability.
    values: the largest errors, relative to the standard deviation of the value.

    outputs: (N, outputs) of the model.    targets: (N,) classes, or (N, outputs).
    """
    x = np.asarray(outputs, np.float64)
    if task == "classes":
        p = softmax(x)
        answers = x.argmax(1)
        rows = _largest(np.where(answers == targets, -1, p.max(1)))
        return rows, [
            f"{shorten_name(names[targets[i]])}\npredicted {shorten_name(names[answers[i]])}, {p[i].max():.0%}"
            for i in rows
        ]
    if task == "labels":
        p = sigmoid(x)
        wrong = np.where((x > 0) == (targets > 0.5), -1, np.abs(p - 0.5))
        worst, rows = wrong.argmax(1), _largest(wrong.max(1))
        which = [(i, worst[i]) for i in rows]
        return rows, [
            f"{shorten_name(names[j])}: {'yes' if targets[i, j] > 0.5 else 'no'}\npredicted {p[i, j]:.0%}" for i, j in which
        ]
    spread = np.std(targets, axis=0, dtype=np.float64)
    errors = np.abs(x - targets) / np.where(spread > 0, spread, 1)
    worst, rows = errors.argmax(1), _largest(errors.max(1))
    which = [(i, worst[i]) for i in rows]
    return rows, [f"{shorten_name(names[j])}: {targets[i, j]:.4g}\npredicted {x[i, j]:.4g}" for i, j in which]


def _largest(wrongness: np.ndarray) -> np.ndarray:
    """Return the rows of the largest numbers, those below 0 left out."""
    rows = np.argsort(-wrongness, kind="stable")[:NUM_MISTAKES]
    return rows[wrongness[rows] >= 0]
