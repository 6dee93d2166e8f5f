"""What a run is judged by, over a whole set of images, in float64; numpy only."""

import numpy as np
from numpy.typing import NDArray

from train.recipes import Task

Array = NDArray[np.float64]

# What each task is judged by: the score of a training batch, and the metric of the held-out set that ranks checkpoints.
BATCH_SCORE = {"classes": "accuracy", "labels": "label_accuracy", "values": "mae"}
LEADING = {"classes": "accuracy", "labels": "auroc", "values": "mae"}


def score(task: Task, outputs: np.ndarray, targets: np.ndarray, names: tuple[str, ...]) -> dict[str, float]:
    """Return the metrics of a task by name, the leading one first.

    classes: outputs (N, classes), targets (N,) class numbers -> accuracy.
    labels: outputs (N, labels), targets (N, labels) of 0 and 1 -> auroc, the mean over labels, and auroc/NAME of each.
    values: outputs (N, values), targets (N, values) -> mae, and r2, the mean over values.

    A label or value that never varies has no area or r2, NaN, and is left out of the mean; NaN where all are.
    """
    outputs, targets = np.asarray(outputs, np.float64), np.asarray(targets, np.float64)
    if task == "classes":
        return {"accuracy": float(np.mean(outputs.argmax(1) == targets))}
    if task == "labels":
        areas = [auroc(outputs[:, i], targets[:, i]) for i in range(targets.shape[1])]
        each = {f"auroc/{name}": area for name, area in zip(names, areas, strict=True)}
        return {"auroc": _mean(areas), **each}
    r2s = [r2(outputs[:, i], targets[:, i]) for i in range(targets.shape[1])]
    return {"mae": float(np.abs(outputs - targets).mean()), "r2": _mean(r2s)}


def _mean(each: list[float]) -> float:
    """The mean of those that are defined."""
    known = [value for value in each if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


def better(metric: str, value: float, than: float) -> bool:
    """Whether a value of a leading metric beats another; NaN beats nothing and is beaten by everything."""
    if np.isnan(value) or np.isnan(than):
        return not np.isnan(value)
    return value < than if metric == "mae" else value > than


def shown(metric: str, value: float) -> str:
    """A metric as a person reads it: shares in percent."""
    return f"{value:.1%}" if metric.endswith("accuracy") else f"{value:.4f}"


def auroc(scores: Array, labels: Array) -> float:
    """Return the chance that a positive scores above a negative, ties counting half: (N,), (N,) of 0 and 1.

    It is the area under the receiver operating characteristic (Mann and Whitney, 1947); NaN when all labels are equal.
    """
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[place]  # from 1; equal scores share their mean rank
    positives, negatives = np.sum(labels == 1), np.sum(labels == 0)
    if not positives or not negatives:
        return float("nan")
    return float((ranks[labels == 1].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def r2(outputs: Array, targets: Array) -> float:
    """Return the share of the targets' variance that is explained, 1 - SSE / SST: (N,), (N,).

    NaN when all targets are equal.
    """
    if np.ptp(targets) == 0:  # whose mean may be rounded to another number, so that their variance would not be 0
        return float("nan")
    return float(1 - np.square(outputs - targets).sum() / np.square(targets - targets.mean()).sum())
