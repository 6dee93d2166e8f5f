"""Metrics of the outputs of a model on a set of images, each with a confidence interval; numpy and scipy only.

An interval is a percentile bootstrap (Efron and Tibshirani, 1993, chapter 13): the images are drawn again with replacement,
1,000 times, and 95 % of the metrics lie within the interval.  It says how far the metric would move with other images of
the same kind, not with other training runs.

If all resamples have the same value, as with nothing but right answers, the bootstrap says nothing.  A share of right
answers (accuracy, precision, recall) then has the exact binomial interval (Clopper and Pearson, 1934), other metrics none.

A resample is a row of weights: how often each image was drawn.  So every metric here is a function of weights (R, N), which
computes all resamples at once; the metric of the set itself has weights of 1.  The tests compare with scikit-learn.

Shapes: N images, C outputs, R resamples.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.data.rng import BOOTSTRAP, generator
from train.recipes import Task

Array = NDArray[Any]


RESAMPLES = 1000
LEVEL = 0.95
MAX_WEIGHTS = 1 << 22  # in memory at once
# AUROC and average precision take a pass over all images for each class and resample.  For large sets their intervals are
# of fewer resamples: as many as give this number of entries, and at least these.
MAX_RANKED_ENTRIES, MIN_RANKED_RESAMPLES = 1 << 29, 100
CALIBRATION_BINS = 15


class Score(NamedTuple):
    """A metric and the ends of its interval; NaN where it is undefined."""

    value: float
    low: float = math.nan
    high: float = math.nan


class Scores(NamedTuple):
    """The metrics of a set of images.

    overall: by name, the primary one first.
    each: by the name of the class, label or value, then by the name of the metric.
    """

    overall: dict[str, Score]
    each: dict[str, dict[str, Score]]


def score(
    task: Task, outputs: Array, targets: Array, names: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> Scores:
    """Return the metrics of a task.

    classes: accuracy, top5_accuracy (of more than five classes), balanced_accuracy (the mean recall), f1, auroc and
        average_precision (means over classes, one against the rest), log_loss (natural logarithm) and ece, the expected
        calibration error (arXiv 1706.04599) with 15 bins of equal width; of each class precision, recall, f1, auroc,
        average_precision.
    labels: auroc, average_precision and f1 (means over labels), label_accuracy, log_loss and ece (over all labels of all
        images); of each label the first three, precision and recall.
    values: mae, rmse, r2 and spearman, the rank correlation (means over values), and those of each value.

    Means leave out undefined metrics: average_precision, f1 and recall of a class or label that no image has, auroc also if
    all images have it, r2 if the targets are equal, and spearman if the targets or the outputs are equal.  A label is
    predicted if its probability is above 0.5.

    outputs: (N, C) logits, which may be infinite, or values.    targets: see `train.data.targets.targets_for_task`.
    names: (C,) of the outputs; they all differ, see `train.loop.class_names.unique_names`.
    resamples: 0 for no intervals.    seed: seed of the resamples.
    """
    x, y = np.asarray(outputs, np.float64), np.asarray(targets)
    metrics: _OfClasses | _OfLabels | _OfValues
    if task == "classes":
        metrics = _OfClasses(x, y)
    elif task == "labels":
        metrics = _OfLabels(x, y.astype(bool))
    else:
        metrics = _OfValues(x, y.astype(np.float64))
    found, drawn = metrics(np.ones((1, len(x))), 1), []
    ranked = max(MIN_RANKED_RESAMPLES, MAX_RANKED_ENTRIES // x.size)  # resamples of AUROC and average precision
    for weights in _resamples(len(x), resamples, seed):
        drawn.append(metrics(weights, min(ranked, len(weights))))
        ranked -= min(ranked, len(weights))
    overall, each = [
        _with_intervals(part, [of[n] for of in drawn], trials)
        for n, (part, trials) in enumerate(zip(found, metrics.trials, strict=True))
    ]
    by_name = {name: {metric: scores[i] for metric, scores in each.items()} for i, name in enumerate(names)}
    return Scores({metric: scores[0] for metric, scores in overall.items()}, by_name)


def score_answers(is_right: Array, *, resamples: int = RESAMPLES, seed: int = 0) -> Score:
    """Return the accuracy of answers that are right or wrong, (N,), with its interval."""
    right, images = np.asarray(is_right, np.float64), np.array([len(is_right)])
    drawn = [{"accuracy": (weights @ right / len(right))[None]} for weights in _resamples(len(right), resamples, seed)]
    return _with_intervals({"accuracy": np.array([[right.mean()]])}, drawn, {"accuracy": images})["accuracy"][0]


def _resamples(count: int, resamples: int, seed: int) -> Iterator[Array]:
    """Yield the weights of resamples, (R, N) at a time."""
    rng, rows = generator(BOOTSTRAP, seed), max(1, MAX_WEIGHTS // count)
    for first in range(0, resamples, rows):
        drawn = rng.integers(0, count, (min(rows, resamples - first), count))
        yield np.stack([np.bincount(each, minlength=count) for each in drawn]).astype(np.float64)


def _with_intervals(
    found: dict[str, Array], drawn: list[dict[str, Array]], trials: dict[str, Array]
) -> dict[str, list[Score]]:
    """Return the scores of each metric, from its values (C, 1) and those of the resamples (C, R) in parts.

    Resamples in which a metric is undefined are left out.

    trials: the numbers of answers (C,) of the metrics that are shares of right answers.
    """
    scores, tail = {}, 50 * (1 - LEVEL)
    for metric, values in found.items():
        ends = [np.full(len(values), np.nan)] * 2
        if drawn and metric in drawn[0]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # undefined in all of them: NaN
                parts = np.concatenate([part[metric] for part in drawn if metric in part], axis=1)
                ends = list(np.nanpercentile(parts, (tail, 100 - tail), axis=1))
                is_point = np.nanmin(parts, axis=1) == np.nanmax(parts, axis=1)
            undefined = [np.full(len(values), np.nan)] * 2
            exact = _binomial_ends(values[:, 0], trials[metric]) if metric in trials else undefined
            ends = [np.where(is_point, known, end) for known, end in zip(exact, ends, strict=True)]
        columns = zip(values[:, 0].tolist(), *(end.tolist() for end in ends), strict=True)
        scores[metric] = [Score(*each) for each in columns]
    return scores


def _binomial_ends(shares: Array, trials: Array) -> list[Array]:
    """Return the ends of the exact binomial intervals, (C,) each, of shares that are 0 or 1; NaN for others."""
    with np.errstate(divide="ignore", invalid="ignore"):
        margin = ((1 - LEVEL) / 2) ** (1 / trials)
    is_all, is_none = shares == 1, shares == 0
    low = np.where(is_all, margin, np.where(is_none, 0.0, np.nan))
    return [low, np.where(is_none, 1 - margin, np.where(is_all, 1.0, np.nan))]


# By task --------------------------------------------------------------------------------------------------------------

# The metrics of the set, (1, R) each, and those of each class, label or value, (C, R)
Metrics = tuple[dict[str, Array], dict[str, Array]]


# The classes below compute them for weights (R, N), and AUROC and average precision for the first `ranked` of these.
# `trials` has the numbers of answers of those metrics that are shares of right answers, of both kinds.


class _OfClasses:
    def __init__(self, logits: Array, classes: Array) -> None:
        from scipy.sparse import csr_array

        count, num_classes = logits.shape
        rows, ones = np.arange(count), np.ones(count)
        self._log_losses = -log_softmax(logits)[rows, classes]
        self._probabilities = softmax(logits)
        predicted = logits.argmax(1)
        self._correct = (predicted == classes).astype(np.float64)
        own = logits[rows, classes][:, None]
        is_before = np.arange(num_classes) < classes[:, None]  # of equal logits, the first class is predicted
        above = ((logits > own) | ((logits == own) & is_before)).sum(1)
        self._in_top5 = (above < 5).astype(np.float64) if num_classes > 5 else None
        # (C, N): whether an image is of a class, predicted as it, and both
        self._of_class = csr_array((ones, (classes, rows)), (num_classes, count))
        self._as_class = csr_array((ones, (predicted, rows)), (num_classes, count))
        self._one_against_rest = classes == np.arange(num_classes)[:, None]
        self._found = csr_array((self._correct, (classes, rows)), (num_classes, count))
        self._gaps = _CalibrationGaps(self._probabilities.max(1), self._correct)
        images = np.array([count])
        answers = {"precision": self._as_class.sum(1), "recall": self._of_class.sum(1)}
        self.trials: tuple[dict[str, Array], ...] = ({"accuracy": images, "top5_accuracy": images}, answers)

    def __call__(self, weights: Array, ranked: int) -> Metrics:
        total = weights.sum(1)
        overall = {"accuracy": weights @ self._correct / total}
        if self._in_top5 is not None:
            overall["top5_accuracy"] = weights @ self._in_top5 / total
        each = _of_decisions(*(part @ weights.T for part in (self._of_class, self._as_class, self._found)))
        rankings = _of_rankings(self._probabilities.T, self._one_against_rest, weights[:ranked])
        overall |= {"balanced_accuracy": _mean(each["recall"]), "f1": _mean(each["f1"])}
        overall |= {metric: _mean(values) for metric, values in rankings.items()}
        overall |= {"log_loss": _mean_loss(self._log_losses, weights), "ece": self._gaps(weights)}
        return {metric: values[None] for metric, values in overall.items()}, each | rankings


class _OfLabels:
    def __init__(self, logits: Array, labels: Array) -> None:
        self._logits, self._labels = logits, labels
        self._losses = np.logaddexp(0, np.where(labels, -logits, logits)).mean(1)
        self._predicted = logits > 0
        self._right = (self._predicted == labels).mean(1)
        self._gaps = _CalibrationGaps(sigmoid(logits).ravel(), labels.ravel().astype(np.float64))
        self.trials: tuple[dict[str, Array], ...] = ({}, {"precision": self._predicted.sum(0), "recall": labels.sum(0)})

    def __call__(self, weights: Array, ranked: int) -> Metrics:
        total = weights.sum(1)
        labels, predicted = self._labels.T.astype(np.float64), self._predicted.T.astype(np.float64)
        each = _of_decisions(*(part @ weights.T for part in (labels, predicted, labels * predicted)))
        rankings = _of_rankings(self._logits.T, self._labels.T, weights[:ranked])
        overall = {metric: _mean(values) for metric, values in rankings.items()} | {"f1": _mean(each["f1"])}
        overall |= {"label_accuracy": weights @ self._right / total, "log_loss": _mean_loss(self._losses, weights)}
        overall |= {"ece": self._gaps(np.repeat(weights, len(labels), axis=1))}
        return {metric: values[None] for metric, values in overall.items()}, rankings | each


class _OfValues:
    def __init__(self, outputs: Array, targets: Array) -> None:
        self._outputs, self._targets = outputs, targets
        self._errors = outputs - targets
        self.trials: tuple[dict[str, Array], ...] = ({}, {})

    def __call__(self, weights: Array, ranked: int) -> Metrics:
        total = weights.sum(1)
        mae, square = (part.T @ weights.T / total for part in (np.abs(self._errors), np.square(self._errors)))
        variance = np.stack([_variance(y, weights) for y in self._targets.T])
        with np.errstate(invalid="ignore", divide="ignore"):
            r2 = np.where(variance > 0, 1 - square / variance, np.nan)
        columns = zip(self._outputs.T, self._targets.T, strict=True)
        spearman = np.stack([_correlation(_ranks(x, weights), _ranks(y, weights), weights) for x, y in columns])
        each = {"mae": mae, "rmse": np.sqrt(square), "r2": r2, "spearman": spearman}
        return {metric: _mean(values)[None] for metric, values in each.items()}, each


def softmax(logits: Array) -> Array:
    """Return the probabilities of classes, (..., C)."""
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities: Array = shifted / shifted.sum(-1, keepdims=True)
    return probabilities


def log_softmax(logits: Array) -> Array:
    """Return the logarithms of the probabilities of classes, (..., C)."""
    shifted = logits - logits.max(-1, keepdims=True)
    logs: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return logs


def sigmoid(logits: Array) -> Array:
    """Return the probabilities of labels, (..., C)."""
    probabilities: Array = np.exp(-np.logaddexp(0, -logits))
    return probabilities


# Parts ----------------------------------------------------------------------------------------------------------------


def _mean(values: Array) -> Array:
    """Return the means over the first axis of the values that are not NaN; NaN if all are."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        mean: Array = np.where(known, values, 0).sum(0) / known.sum(0)
    return mean


def _mean_loss(losses: Array, weights: Array) -> Array:
    """Return the mean of losses (N,) in each resample, (R,): infinite where an infinite loss is drawn."""
    is_infinite = np.isinf(losses)
    finite = weights @ np.where(is_infinite, 0, losses) / weights.sum(1)  # 0 times infinity would be NaN
    mean: Array = np.where(weights @ is_infinite > 0, np.inf, finite)
    return mean


class _CalibrationGaps:
    """The expected calibration error: the mean over bins of |mean probability - share of right answers|."""

    def __init__(self, probabilities: Array, right: Array) -> None:
        from scipy.sparse import csr_array

        bins = np.clip(np.ceil(probabilities * CALIBRATION_BINS).astype(int) - 1, 0, CALIBRATION_BINS - 1)
        self._gaps = csr_array((probabilities - right, (bins, np.arange(len(bins)))), (CALIBRATION_BINS, len(bins)))

    def __call__(self, weights: Array) -> Array:
        gaps: Array = np.abs(self._gaps @ weights.T).sum(0) / weights.sum(1)
        return gaps


def _of_decisions(support: Array, answers: Array, found: Array) -> dict[str, Array]:
    """Return the metrics of the decisions for each class or label.

    support: (C, R), number of images that have the class or label.
    answers: (C, R), number of images for which it is predicted.
    found: (C, R), number of images that have it and for which it is predicted.
    """
    with np.errstate(invalid="ignore"):
        f1 = np.where(support > 0, 2 * found / (support + answers), np.nan)
        return {"precision": found / answers, "recall": found / support, "f1": f1}


def _of_rankings(scores: Array, positive: Array, weights: Array) -> dict[str, Array]:
    """Return the metrics of C rankings, (C, R) each; none without weights.

    scores, positive: (C, N).    weights: (R, N).
    """
    if not len(weights):
        return {}
    found = [_areas(*each, weights) for each in zip(scores, positive, strict=True)]
    areas, precisions = (np.stack(part) for part in zip(*found, strict=True))
    return {"auroc": areas, "average_precision": precisions}


def _areas(scores: Array, positive: Array, weights: Array) -> tuple[Array, Array]:
    """Return the area under the ROC curve and the average precision (not interpolated), (R,) each.

    Equal scores are one threshold.
    """
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    ends = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))  # infinite scores may be equal too
    w = weights[:, order]
    true = np.cumsum(np.where(positive[order], w, 0), axis=1)[:, ends]
    answers = np.cumsum(w, axis=1)[:, ends]
    new_true, new_false = np.diff(true, prepend=0), np.diff(answers - true, prepend=0)
    positives, negatives = true[:, -1], answers[:, -1] - true[:, -1]
    with np.errstate(invalid="ignore", divide="ignore"):
        area = np.where(negatives > 0, (new_false * (true - new_true / 2)).sum(1) / (positives * negatives), np.nan)
        precision = np.where(answers > 0, true / np.maximum(answers, 1), 0)
        average = np.where(positives > 0, (new_true * precision).sum(1) / positives, np.nan)
    return np.where(positives > 0, area, np.nan), average


def _variance(values: Array, weights: Array) -> Array:
    """Return the variance of values (N,) in each resample, (R,): 0, without rounding error, if those drawn are equal."""
    total = weights.sum(1, keepdims=True)
    one_drawn = values[weights.argmax(1)][:, None]
    x = values - one_drawn  # exactly 0 for equal ones, whose mean may be rounded
    variance: Array = (weights * np.square(x - (weights * x).sum(1, keepdims=True) / total)).sum(1) / total[:, 0]
    return variance


def _ranks(values: Array, weights: Array) -> Array:
    """Return the ranks of values (N,) in each resample, (R, N); equal ones share their mean rank."""
    _, group = np.unique(values, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], np.arange(group.max() + 1))
    sizes = np.add.reduceat(weights[:, order], starts, axis=1)
    ranks: Array = (np.cumsum(sizes, axis=1) - sizes / 2)[:, group]
    return ranks


def _correlation(x: Array, y: Array, weights: Array) -> Array:
    """Return the correlation of x and y, (R, N) each, with weights; NaN if one of them is constant."""
    total = weights.sum(1, keepdims=True)
    x, y = (each - (weights * each).sum(1, keepdims=True) / total for each in (x, y))
    with np.errstate(invalid="ignore"):
        found: Array = (weights * x * y).sum(1) / np.sqrt((weights * x * x).sum(1) * (weights * y * y).sum(1))
    return found
