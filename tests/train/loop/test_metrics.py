"""Losses and metrics against values computed by hand."""

import math

import numpy as np
import pytest

from train.loop.class_names import unique_names
from train.loop.metrics import auroc, compute_metrics, is_better, r2

log = math.log


def test_accuracy_is_the_fraction_of_images_whose_largest_output_is_their_class() -> None:
    outputs = np.array([[1, 2, 0], [3, 0, 0], [0, 0, 1], [0, 5, 4]])
    assert compute_metrics("classes", outputs, np.array([1, 0, 2, 2]), ("a", "b", "c")) == {"accuracy": 0.75}


@pytest.mark.parametrize(
    ("scores", "labels", "area"),
    [
        ([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1], 0.75),
        ([1, 2, 3, 4], [0, 0, 1, 1], 1.0),
        ([4, 3, 2, 1], [0, 0, 1, 1], 0.0),
        ([5, 5, 5, 5], [0, 1, 0, 1], 0.5),
        ([1, 2, 2, 3], [0, 0, 1, 1], 0.875),
    ],
)
def test_auroc_is_the_probability_that_a_positive_scores_above_a_negative(scores: list, labels: list, area: float) -> None:
    assert auroc(np.array(scores), np.array(labels)) == area


def test_auroc_agrees_with_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 20, 500), rng.integers(0, 2, 500)
    assert auroc(scores, labels) == pytest.approx(sklearn.roc_auc_score(labels, scores), abs=1e-14)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("a", "b", "c"), ("a", "b", "c")),
        (("a", "b", "a", "a", "b"), ("a", "b", "a (2)", "a (3)", "b (2)")),
        (("a", "a", "a (2)", "a", "a (2)"), ("a", "a (3)", "a (2)", "a (4)", "a (2) (2)")),
    ],
)
def test_repeated_names_have_numbers_that_no_other_name_has(names: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert unique_names(names) == expected


def test_labels_of_the_same_name_have_an_auroc_each() -> None:
    outputs, labels = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[0, 0], [1, 1]])
    found = compute_metrics("labels", outputs, labels, ("cat", "cat"))
    assert found == {"auroc": 0.5, "auroc/cat": 1.0, "auroc/cat (2)": 0.0}


def test_a_constant_label_has_no_auroc_and_is_left_out_of_the_mean() -> None:
    found = compute_metrics("labels", np.array([[1.0, 1.0], [2.0, 2.0]]), np.array([[0, 1], [1, 1]]), ("cat", "dog"))
    assert found["auroc"] == found["auroc/cat"] == 1.0
    assert math.isnan(found["auroc/dog"])


def test_nan_outputs_never_count_as_right() -> None:
    nan = math.nan
    outputs = np.array([[nan, nan], [nan, 1.0], [2.0, 1.0], [nan, nan]])
    assert compute_metrics("classes", outputs, np.array([0, 1, 0, 0]), ("a", "b")) == {"accuracy": 0.25}
    labels = np.array([1, 0, 1, 0])
    assert auroc(np.full(4, nan), labels) == 0.0
    # Of the four pairs, two have no NaN, and one of these is in the right order.
    assert auroc(np.array([1.0, 0.0, nan, 2.0]), labels) == 0.25


def test_the_metrics_of_values_are_mae_and_r2() -> None:
    outputs, targets = np.array([[1.0], [2.0], [4.0]]), np.array([[1.0], [2.0], [3.0]])
    assert compute_metrics("values", outputs, targets, ()) == {"mae": pytest.approx(1 / 3), "r2": 0.5}


def test_r2_of_a_constant_target_is_nan_although_its_mean_is_rounded() -> None:
    tenths = np.full(3, 0.1)
    assert tenths.mean() != 0.1 and math.isnan(r2(np.ones(3), tenths))


def test_a_constant_value_has_no_r2_and_is_left_out_of_the_mean() -> None:
    outputs, targets = np.array([[1.0, 1.0], [2.0, 2.0], [4.0, 3.0]]), np.array([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]])
    assert compute_metrics("values", outputs, targets, ())["r2"] == 0.5
    assert math.isnan(compute_metrics("values", outputs, targets[:, 1:].repeat(2, 1), ())["r2"])


def test_larger_accuracies_and_smaller_errors_are_better_and_nan_is_worst() -> None:
    assert is_better("accuracy", 0.9, than=0.8)
    assert is_better("mae", 0.8, than=0.9)
    assert is_better("auroc", 0.1, than=math.nan)
    assert not is_better("auroc", math.nan, than=0.1)


LOSSES = {
    "classes": ([[0.0, 0.0], [log(3), 0.0]], [0, 1], [log(2), log(4)], [1.0, 0.0]),
    "labels": ([[0.0, log(3)], [-1000.0, 1000.0]], [[1.0, 0.0], [0.0, 1.0]], [(log(2) + log(4)) / 2, 0.0], [0.0, 1.0]),
    "values": ([[1.0, 3.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [5.0, 0.0], [2.0, 0.0]),
}


@pytest.mark.parametrize("task", LOSSES)
def test_losses_and_batch_metrics_are_those_of_their_formulas(task: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    from train.jax.losses import loss_and_metric

    outputs, targets, losses, scores = LOSSES[task]
    loss, score = loss_and_metric(task, jnp.asarray(outputs), jnp.asarray(targets))
    assert np.asarray(loss) == pytest.approx(losses, abs=1e-6)
    assert np.asarray(score) == pytest.approx(scores, abs=1e-6)


def test_the_loss_of_half_precision_outputs_is_float32() -> None:
    jnp = pytest.importorskip("jax.numpy")
    from train.jax.losses import loss_and_metric

    loss, _ = loss_and_metric("classes", jnp.asarray([[1.0, 2.0]], jnp.bfloat16), jnp.asarray([0]))
    assert loss.dtype == jnp.float32
