"""The metrics of train.evaluate and their bootstrap intervals are those of torchmetrics."""

import importlib.util
from typing import Any

import numpy as np
import pytest

for package in ("torch", "torchmetrics", "jax"):
    if importlib.util.find_spec(package) is None:  # tests.goldens.peers must import torchvision first
        pytest.skip(f"needs {package}", allow_module_level=True)

import tests.goldens.peers  # noqa: I001, F401  # first: it makes torchvision importable
import torch
from torchmetrics import classification, wrappers

from train.inference.scores import CALIBRATION_BINS, score, softmax

COUNT, IMAGES = 8, 600
FLOAT32 = 16 * 2.0**-23  # torchmetrics adds up to 600 terms in float32


@pytest.fixture(scope="module")
def answers() -> tuple[Any, Any]:
    """Return logits (IMAGES, COUNT) and classes; a model that is right for about 70 % of them."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, COUNT, IMAGES).astype(np.int32)
    return rng.normal(size=(IMAGES, COUNT)) + 2.5 * np.eye(COUNT)[targets], targets


def evaluated(metric: Any, probabilities: Any, targets: Any) -> Any:
    metric.update(torch.tensor(probabilities), torch.tensor(targets).long())
    return metric.compute()


def test_metrics_of_classes(answers: tuple[Any, Any]) -> None:
    logits, targets = answers
    found = score("classes", logits, targets, tuple("abcdefgh"), resamples=0)
    theirs = {
        "accuracy": classification.MulticlassAccuracy(COUNT, average="micro"),
        "top5_accuracy": classification.MulticlassAccuracy(COUNT, average="micro", top_k=5),
        "balanced_accuracy": classification.MulticlassAccuracy(COUNT, average="macro"),
        "f1": classification.MulticlassF1Score(COUNT, average="macro"),
        "auroc": classification.MulticlassAUROC(COUNT, average="macro"),
        "average_precision": classification.MulticlassAveragePrecision(COUNT, average="macro"),
        "ece": classification.MulticlassCalibrationError(COUNT, n_bins=CALIBRATION_BINS, norm="l1"),
    }
    for name, metric in theirs.items():
        assert found.overall[name].value == pytest.approx(
            float(evaluated(metric, softmax(logits), targets)), abs=FLOAT32
        ), name
    recalls = evaluated(classification.MulticlassRecall(COUNT, average=None), softmax(logits), targets)
    assert [each["recall"].value for each in found.each.values()] == pytest.approx(recalls.tolist(), abs=FLOAT32)


def test_metrics_of_labels() -> None:
    rng = np.random.default_rng(1)
    labels = (rng.random((IMAGES, 4)) < [0.1, 0.3, 0.5, 0.8]).astype(np.float32)
    logits = rng.normal(size=labels.shape) + 2 * labels - 1
    probabilities = 1 / (1 + np.exp(-logits))
    found = score("labels", logits, labels, tuple("abcd"), resamples=0).overall
    for name, metric in (
        ("auroc", classification.MultilabelAUROC(4)),
        ("average_precision", classification.MultilabelAveragePrecision(4)),
        ("f1", classification.MultilabelF1Score(4)),
        ("label_accuracy", classification.MultilabelAccuracy(4)),
    ):
        assert found[name].value == pytest.approx(float(evaluated(metric, probabilities, labels)), abs=FLOAT32), name
    of_each_label = classification.BinaryCalibrationError(n_bins=CALIBRATION_BINS, norm="l1")
    assert found["ece"].value == pytest.approx(
        float(evaluated(of_each_label, probabilities.ravel(), labels.ravel())), abs=FLOAT32
    )


def test_intervals_are_those_of_another_bootstrap(answers: tuple[Any, Any]) -> None:
    logits, targets = answers
    torch.manual_seed(0)
    found = score("classes", logits, targets, tuple("abcdefgh")).overall
    for name, metric in (
        ("accuracy", classification.MulticlassAccuracy(COUNT, average="micro")),
        ("f1", classification.MulticlassF1Score(COUNT, average="macro")),
    ):
        theirs = wrappers.BootStrapper(
            metric, num_bootstraps=1000, quantile=torch.tensor([0.025, 0.975]), sampling_strategy="multinomial"
        )
        low, high = evaluated(theirs, softmax(logits), targets)["quantile"].tolist()
        # The standard deviation of an end is sqrt(p (1 - p) / R) / density = sqrt(0.025 * 0.975 / 1000) / 0.0584 of that of
        # the metric, which is 2.2 % of the interval: 3.1 % for the difference of two, and this is three times as much.
        tolerance = 0.1 * (high - low)
        assert found[name].low == pytest.approx(low, abs=tolerance)
        assert found[name].high == pytest.approx(high, abs=tolerance)
