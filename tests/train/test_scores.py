"""Metrics and their intervals: against scikit-learn and scipy, also on resamples, and against what intervals promise."""

from typing import Any

import numpy as np
import pytest

sklearn = pytest.importorskip("sklearn.metrics")
scipy_stats = pytest.importorskip("scipy.stats")

from train.inference import scores
from train.inference.scores import score
from train.loop.metrics import constant_score

NAMES = tuple("abcdefg")


def classes(seed: int, images: int = 200, count: int = 7, digits: int = 1) -> tuple[Any, Any]:
    """Return logits with equal ones among them, and classes, of which the last has no image."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, count - 1, images).astype(np.int32)
    logits = np.round(rng.normal(size=(images, count)) + np.eye(count)[targets], digits)
    return logits, targets


def expected_of_classes(logits: Any, targets: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Return scikit-learn's metrics."""
    p, predicted, count = scores.softmax(logits), logits.argmax(1), logits.shape[1]
    present = np.unique(targets)
    precision, recall, f1, _ = sklearn.precision_recall_fscore_support(
        targets, predicted, labels=range(count), zero_division=np.nan
    )
    areas = {c: sklearn.roc_auc_score(targets == c, p[:, c]) for c in present}
    averages = {c: sklearn.average_precision_score(targets == c, p[:, c]) for c in present}
    overall = {
        "accuracy": sklearn.accuracy_score(targets, predicted),
        "balanced_accuracy": np.mean(recall[present]),
        "f1": np.mean(f1[present]),
        "auroc": np.mean(list(areas.values())),
        "average_precision": np.mean(list(averages.values())),
        "log_loss": sklearn.log_loss(targets, p, labels=range(count)),
        "ece": expected_calibration_error(p.max(1), predicted == targets),
    }
    if count > 5:
        overall["top5_accuracy"] = np.mean(
            [t in np.argsort(-x, kind="stable")[:5] for x, t in zip(logits, targets, strict=True)]
        )
    nan = np.full(count, np.nan)
    each: dict[str, Any] = {"precision": precision, "recall": nan.copy(), "f1": nan.copy()}
    each |= {"auroc": nan.copy(), "average_precision": nan.copy()}
    for c in present:
        each["recall"][c], each["f1"][c] = recall[c], f1[c]
        each["auroc"][c], each["average_precision"][c] = areas[c], averages[c]
    return overall, each


def expected_calibration_error(confidence: Any, right: Any) -> float:
    """Return the error by its definition, with bins (0, 1/15], (1/15, 2/15], ..."""
    found = 0.0
    for i in range(15):
        inside = (confidence > i / 15) & (confidence <= (i + 1) / 15)
        if inside.any():
            found += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return found


def expected_of_labels(logits: Any, labels: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Return scikit-learn's metrics."""
    p, predicted = 1 / (1 + np.exp(-logits)), logits > 0
    precision, recall, f1, _ = sklearn.precision_recall_fscore_support(
        labels, predicted, average=None, zero_division=np.nan
    )
    each = {
        "auroc": sklearn.roc_auc_score(labels, logits, average=None),
        "average_precision": sklearn.average_precision_score(labels, logits, average=None),
        "precision": precision,
        "recall": recall,
        "f1": f1,
    }
    overall = {name: np.mean(each[name]) for name in ("auroc", "average_precision", "f1")}
    overall["label_accuracy"] = np.mean(predicted == labels)
    overall["log_loss"] = np.mean([sklearn.log_loss(y, q, labels=(0, 1)) for y, q in zip(labels.T, p.T, strict=True)])
    overall["ece"] = expected_calibration_error(p.ravel(), labels.ravel().astype(float))
    return overall, each


def expected_of_values(outputs: Any, targets: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the metrics of scikit-learn and scipy."""
    columns = list(zip(targets.T, outputs.T, strict=True))
    each = {
        "mae": [sklearn.mean_absolute_error(*pair) for pair in columns],
        "rmse": [sklearn.root_mean_squared_error(*pair) for pair in columns],
        "r2": [sklearn.r2_score(*pair) for pair in columns],
        "spearman": [scipy_stats.spearmanr(*pair).statistic for pair in columns],
    }
    return {name: float(np.mean(values)) for name, values in each.items()}, each


def labels(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    targets = (rng.random((150, 3)) < (0.1, 0.5, 0.7)).astype(np.float32)
    return np.round(2 * rng.normal(size=(150, 3)) + targets, 1), targets


def values(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    targets = np.round(1e3 + rng.normal(size=(120, 2)), 1)
    return np.round(targets + rng.normal(size=(120, 2)), 1), targets


TASKS: dict[Any, tuple[Any, Any]] = {
    "classes": (classes, expected_of_classes),
    "labels": (labels, expected_of_labels),
    "values": (values, expected_of_values),
}


@pytest.mark.parametrize("task", TASKS)
def test_metrics_are_those_of_scikit_learn(task: Any) -> None:
    make, expected = TASKS[task]
    outputs, targets = make(0)
    names = NAMES[: outputs.shape[1]]
    found = score(task, outputs, targets, names, resamples=0)
    overall, each = expected(outputs, targets)
    assert found.overall.keys() ^ overall.keys() == set()  # metrics that only one side has
    assert found.each[names[0]].keys() ^ each.keys() == set()
    assert {name: value.value for name, value in found.overall.items()} == pytest.approx(overall, rel=1e-12)
    for i, name in enumerate(names):
        assert {metric: value.value for metric, value in found.each[name].items()} == pytest.approx(
            {metric: values[i] for metric, values in each.items()}, rel=1e-12, nan_ok=True
        )
    assert all(np.isnan(each.low) and np.isnan(each.high) for each in found.overall.values())


@pytest.mark.parametrize("task", TASKS)
def test_an_interval_is_made_of_the_metrics_of_resamples(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each resample, written out with its repeated images, has the metrics that scikit-learn finds."""
    make, expected = TASKS[task]
    outputs, targets = make(1)
    monkeypatch.setattr(scores, "MAX_WEIGHTS", 3 * len(outputs))  # so that the resamples are computed in parts
    drawn = np.concatenate(list(scores._resamples(len(outputs), 20, 5))).astype(int)
    assert len(drawn) == 20 and (drawn.sum(1) == len(outputs)).all()
    found = score(task, outputs, targets, NAMES[: outputs.shape[1]], resamples=20, seed=5)
    samples = [expected(np.repeat(outputs, counts, axis=0), np.repeat(targets, counts, axis=0))[0] for counts in drawn]
    for metric, value in found.overall.items():
        ends = np.percentile([sample[metric] for sample in samples], (2.5, 97.5))
        assert (value.low, value.high) == pytest.approx(tuple(ends), rel=1e-9), metric


def test_an_interval_contains_the_true_accuracy_as_often_as_it_says() -> None:
    """400 sets of 300 images, of a model that is right with probability 0.8."""
    rng, inside = np.random.default_rng(0), 0
    for seed in range(400):
        right = rng.random(300) < 0.8
        logits = np.stack([right, ~right], axis=1).astype(np.float64)
        interval = score("classes", logits, np.zeros(300, int), ("a", "b"), resamples=400, seed=seed).overall["accuracy"]
        inside += interval.low <= 0.8 <= interval.high
    # The share has a standard deviation of sqrt(0.95 * 0.05 / 400) = 0.011; and 300 images make a discrete distribution.
    assert 0.91 < inside / 400 < 0.98


def test_areas_of_large_sets_have_intervals_of_fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, targets = classes(2)
    few = score("classes", outputs, targets, NAMES, resamples=30).overall
    monkeypatch.setattr(scores, "MAX_RANKED_ENTRIES", 30 * outputs.size)
    monkeypatch.setattr(scores, "MIN_RANKED_RESAMPLES", 5)
    monkeypatch.setattr(scores, "MAX_WEIGHTS", 20 * len(outputs))  # 20 resamples at a time
    found = score("classes", outputs, targets, NAMES, resamples=100).overall
    assert (found["auroc"].low, found["auroc"].high) == pytest.approx((few["auroc"].low, few["auroc"].high))
    assert found["f1"] == score("classes", outputs, targets, NAMES, resamples=100).overall["f1"] != few["f1"]


def test_one_class_alone_has_no_area() -> None:
    found = score("classes", np.eye(3)[[0, 0, 1]], np.zeros(3, int), ("a", "b", "c"), resamples=5)
    assert np.isnan(found.overall["auroc"].value) and found.overall["balanced_accuracy"].value == pytest.approx(2 / 3)
    assert np.isnan(found.each["b"]["recall"].value) and found.each["b"]["precision"].value == 0


def test_extreme_outputs_have_finite_metrics() -> None:
    x = np.array([[1e4, -1e4], [-1e4, 1e4], [1e4, -1e4]])
    assert score("classes", x, np.array([0, 1, 1]), ("a", "b"), resamples=0).overall["log_loss"].value == pytest.approx(
        2e4 / 3
    )
    found = score("labels", x, np.array([[1, 0], [0, 1], [1, 0]]), ("a", "b"), resamples=0).overall
    assert found["log_loss"].value == 0 and found["ece"].value == 0


@pytest.mark.parametrize("logit", [-np.inf, np.inf])
def test_a_wrong_answer_without_any_doubt_has_an_infinite_log_loss(logit: float) -> None:
    outputs, targets = labels(0)
    outputs[:, 2], targets[:, 2] = logit, logit > 0
    right = score("labels", outputs, targets, NAMES[:3], resamples=20).overall["log_loss"]
    assert right.low < right.value < right.high
    targets[7, 2] = logit < 0
    found = score("labels", outputs, targets, NAMES[:3], resamples=20)  # some resamples lack image 7
    assert found.overall["log_loss"].value == np.inf and found.overall["log_loss"].low < 1
    assert found.each["c"]["auroc"].value == 0.5  # equal outputs


def test_a_class_of_probability_0_has_an_infinite_log_loss() -> None:
    outputs, targets = classes(0)
    outputs[:, 6] = -np.inf
    assert np.isfinite(score("classes", outputs, targets, NAMES, resamples=20).overall["log_loss"].high)
    targets[0] = 6
    assert score("classes", outputs, targets, NAMES, resamples=20).overall["log_loss"].value == np.inf


@pytest.mark.parametrize("outlier", [2.0, 1e9])
def test_resamples_with_equal_targets_are_left_out_of_the_interval_of_r2(outlier: float) -> None:
    """About a third of the resamples lack the only other target; their variance is rounding error, or 0."""
    targets = np.full((60, 1), 0.1)
    targets[0] = outlier
    outputs = targets + 0.01 * outlier * np.random.default_rng(0).normal(size=(60, 1))
    drawn = np.concatenate(list(scores._resamples(60, 200, 0))).astype(int)
    pairs = [[np.repeat(each, counts) for each in (targets[:, 0], outputs[:, 0])] for counts in drawn]
    r2s = [sklearn.r2_score(*pair) for pair in pairs if np.ptp(pair[0])]
    assert 100 < len(r2s) < 150
    found = score("values", outputs, targets, ("a",), resamples=200).overall["r2"]
    assert found[1:] == pytest.approx(tuple(np.percentile(r2s, (2.5, 97.5))), rel=1e-9)


def test_values_that_are_all_equal_have_no_r2() -> None:
    found = score("values", np.array([[1.0], [2.0]]), np.array([[0.1], [0.1]]), ("x",), resamples=5)
    assert np.isnan(found.overall["r2"].value) and np.isnan(found.overall["spearman"].value)
    assert found.overall["mae"].value == pytest.approx(1.4)


def test_what_one_answer_for_all_images_would_reach() -> None:
    assert constant_score("classes", np.array([0, 1, 1, 2])) == ("accuracy", 0.5)
    assert constant_score("labels", np.array([[1, 0], [1, 0], [1, 1]])) == ("label_accuracy", pytest.approx(5 / 6))
    assert constant_score("values", np.array([[0.0], [1.0], [5.0]])) == ("mae", pytest.approx(5 / 3))


def test_nothing_but_right_answers_has_the_exact_interval() -> None:
    targets = np.repeat([0, 1], [6, 3]).astype(np.int32)
    found = score("classes", 9.0 * np.eye(2)[targets], targets, ("a", "b"))
    for shown, trials in (
        (found.overall["accuracy"], 9),
        (found.each["a"]["recall"], 6),
        (found.each["b"]["precision"], 3),
    ):
        exact = scipy_stats.binomtest(trials, trials).proportion_ci(0.95, method="exact")
        assert shown == pytest.approx((1.0, exact.low, 1.0))
    wrong = score("classes", 9.0 * np.eye(2)[1 - targets], targets, ("a", "b"))
    exact = scipy_stats.binomtest(0, 9).proportion_ci(0.95, method="exact")
    assert wrong.overall["accuracy"] == pytest.approx((0.0, 0.0, exact.high))
    for metric in ("f1", "auroc"):  # what the bootstrap does not know is not said
        assert found.overall[metric].value == 1 and np.isnan(found.overall[metric].low)
    labels = np.eye(2, dtype=np.float32)[targets]
    of_labels = score("labels", 9 * labels - 4, labels, ("a", "b")).each["b"]["recall"]
    assert of_labels == pytest.approx((1.0, scipy_stats.binomtest(3, 3).proportion_ci(0.95, method="exact").low, 1.0))
