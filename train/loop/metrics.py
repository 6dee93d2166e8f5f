"""Metrics of a whole set of images, in float64; numpy only."""

import numpy as np
from numpy.typing import NDArray

from train.loop.class_names import unique_names
from train.recipes import Task

Array = NDArray[np.float64]

# For each task, the metric of a training batch, and the metric of the held-out set that selects the best weights.
BATCH_METRIC = {"classes": "accuracy", "labels": "label_accuracy", "values": "mae"}
PRIMARY_METRIC = {"classes": "accuracy", "labels": "auroc", "values": "mae"}


def compute_metrics(task: Task, outputs: np.ndarray, targets: np.ndarray, names: tuple[str, ...]) -> dict[str, float]:
    """Return the metrics of a task by name, the primary one first.

    classes: outputs (N, classes), targets (N,) class numbers -> accuracy.
    labels: outputs (N, labels), targets (N, labels) of 0 and 1 -> auroc, the mean over labels, and auroc/NAME of each.
    values: outputs (N, values), targets (N, values) -> mae, and r2, the mean over values.

    The auroc of a label, or the r2 of a value, that is the same for all images is NaN.  Means leave NaN out; a
    mean without any number is NaN.  An image with NaN outputs is wrong; for a label with NaN see `auroc`.

    names: names of the labels, see `unique_names` for NAME; unused for other tasks.
    """
    outputs, targets = np.asarray(outputs, np.float64), np.asarray(targets, np.float64)
    if task == "classes":
        is_number = ~np.isnan(outputs).any(1)  # the argmax of NaN is class 0
        return {"accuracy": float(np.mean(is_number & (outputs.argmax(1) == targets)))}
    if task == "labels":
        areas = [auroc(outputs[:, i], targets[:, i]) for i in range(targets.shape[1])]
        each = {f"auroc/{name}": area for name, area in zip(unique_names(names), areas, strict=True)}
        return {"auroc": _mean(areas), **each}
    r2s = [r2(outputs[:, i], targets[:, i]) for i in range(targets.shape[1])]
    return {"mae": float(np.abs(outputs - targets).mean()), "r2": _mean(r2s)}


def _mean(each: list[float]) -> float:
    """Return the mean of the values that are not NaN; NaN if all are."""
    known = [value for value in each if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


def constant_score(task: Task, targets: np.ndarray) -> tuple[str, float]:
    """Return the metric, and its best value if the answer were the same for all images.

    accuracy for classes, mae for values, and label_accuracy for labels.

    targets: see `train.data.targets.targets_for_task`.
    """
    if task == "classes":
        return "accuracy", float(np.bincount(targets).max() / len(targets))
    if task == "labels":
        share = targets.mean(0, dtype=np.float64)
        return "label_accuracy", float(np.maximum(share, 1 - share).mean())
    return "mae", float(np.abs(targets - np.median(targets, axis=0)).mean())


def is_better(metric: str, value: float, than: float) -> bool:
    """Whether a value of a primary metric is better than another; any number is better than NaN."""
    if np.isnan(value) or np.isnan(than):
        return not np.isnan(value)
    return value < than if metric == "mae" else value > than


def format_metric(metric: str, value: float) -> str:
    """Return the value of a metric as text: accuracies in percent, others with four decimals."""
    return f"{value:.1%}" if metric.endswith("accuracy") else f"{value:.4f}"


def auroc(scores: Array, labels: Array) -> float:
    """Return the area under the ROC curve; NaN if all labels are equal.

    It is the probability that a positive scores above a negative, ties counting half (Mann and Whitney, 1947).
    A score that is NaN is neither above nor below any other: it makes the area smaller, like a wrong order.

    scores: (N,).    labels: (N,) of 0 and 1.
    """
    positives, negatives = np.sum(labels == 1), np.sum(labels == 0)
    if not positives or not negatives:
        return float("nan")
    is_number = ~np.isnan(scores)
    _, place, counts = np.unique(scores[is_number], return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[place]  # from 1; equal scores share their mean rank
    is_positive = labels[is_number] == 1
    ranked = np.sum(is_positive)
    return float((ranks[is_positive].sum() - ranked * (ranked + 1) / 2) / (positives * negatives))


def r2(outputs: Array, targets: Array) -> float:
    """Return the coefficient of determination, 1 - SSE / SST, of (N,) outputs and (N,) targets; NaN for equal targets."""
    if np.ptp(targets) == 0:  # the mean of equal numbers may be rounded to another number, and SST be above 0
        return float("nan")
    return float(1 - np.square(outputs - targets).sum() / np.square(targets - targets.mean()).sum())
