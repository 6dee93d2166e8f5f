"""Epochs: each image once, or all classes equally often; and the weights of classes in the loss."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.utils import compute_class_weight

from train.data.class_weights import balanced_weights
from train.data.order import EpochOrder

IMBALANCED = np.repeat([0, 1, 3], [90, 7, 3])  # no image of class 2


def test_a_uniform_epoch_has_each_image_once_in_a_new_order() -> None:
    order = EpochOrder(0, 100)
    for epoch in range(3):
        assert sorted(order.of(epoch).rows) == list(range(100)) and not order.of(epoch).copies.any()
    assert not np.array_equal(order.of(0).rows, order.of(1).rows)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=80), st.integers(0, 2**31))
def test_a_balanced_epoch_has_classes_equally_often_and_their_images_too(classes: list[int], seed: int) -> None:
    given_classes = np.array(classes)
    rows, copies = EpochOrder(seed, len(classes), given_classes).of(0)
    assert len(rows) == len(copies) == len(classes)
    per_class = [np.count_nonzero(given_classes[rows] == each) for each in set(classes)]
    assert max(per_class) - min(per_class) <= 1
    for each in set(classes):
        times = [np.count_nonzero(rows == row) for row in np.flatnonzero(given_classes == each)]
        assert max(times) - min(times) <= 1
    # Copies of an image are numbered, so that each is augmented in its own way.
    assert len(set(zip(rows.tolist(), copies.tolist(), strict=True))) == len(rows)


def test_every_image_of_a_frequent_class_is_used_in_some_epoch() -> None:
    order = EpochOrder(0, len(IMBALANCED), IMBALANCED)
    used = {row for epoch in range(20) for row in order.of(epoch).rows.tolist()}
    assert used == set(range(len(IMBALANCED)))


def test_an_order_depends_on_seed_and_epoch_only() -> None:
    order = EpochOrder(5, len(IMBALANCED), IMBALANCED)
    first = order.of(3)
    for epoch in (7, 0, 4):
        order.of(epoch)
    again = pickle.loads(pickle.dumps(EpochOrder(5, len(IMBALANCED), IMBALANCED))).of(3)
    assert np.array_equal(order.of(3), first) and np.array_equal(again, first)
    assert not np.array_equal(EpochOrder(6, len(IMBALANCED), IMBALANCED).of(3).rows, first.rows)


def test_weights_are_those_of_scikit_learn() -> None:
    weights = balanced_weights(IMBALANCED.astype(np.int32), 4, binary=False)
    assert weights[[0, 1, 3]] == pytest.approx(compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=IMBALANCED))
    assert weights[2] == 0  # it has no images
    labels = (np.random.default_rng(0).random((50, 3)) < [0.1, 0.5, 0.9]).astype(np.float32)
    expected = [compute_class_weight("balanced", classes=np.array([0, 1]), y=column) for column in labels.T]
    assert balanced_weights(labels, 3, binary=True) == pytest.approx(np.array(expected).T)


def test_a_class_per_image_has_the_binary_weights_of_its_labels() -> None:
    labels = np.eye(4, dtype=np.float32)[IMBALANCED]
    expected = balanced_weights(labels, 4, binary=True)
    assert np.array_equal(balanced_weights(IMBALANCED.astype(np.int32), 4, binary=True), expected)
    assert expected[:, 2].tolist() == [1, 0]  # nothing is of class 2
