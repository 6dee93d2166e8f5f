"""Weights of classes in the loss, for data in which some are rare."""

import numpy as np
from numpy.typing import NDArray

from train.data.targets import ModelTargets

Weights = NDArray[np.float64]


def balanced_weights(targets: ModelTargets, num_outputs: int, *, binary: bool) -> Weights:
    """Return the weights with which all classes have the same total weight in the training set.

    Without `binary`, the weight of a class is N / (K n), where n of the N images have it and K is the number of classes
    with images: scikit-learn's `class_weight="balanced"`.  With `binary`, each class or label is a problem of two classes,
    "not" and "yes", and these have such weights.  A class without images has the weight 0.

    Args:
        targets: targets of the training images, see `train.data.targets.targets_for_task`.
        num_outputs: the number of classes or labels, C.
        binary: whether the loss is a binary cross-entropy for each class or label.

    Returns:
        (C,); or with `binary` (2, C): the weights where the target is 0, and where it is 1.
    """
    total, is_index = len(targets), targets.ndim == 1
    counts = np.bincount(targets, minlength=num_outputs).astype(float) if is_index else targets.sum(0, dtype=np.float64)
    if binary:
        both = np.stack([total - counts, counts])
        return _inverse(both, total / np.count_nonzero(both, axis=0))
    return _inverse(counts, total / np.count_nonzero(counts))


def _inverse(counts: NDArray[np.float64], scale: NDArray[np.float64] | float) -> Weights:
    """Return scale / counts, and 0 where there is nothing to count."""
    return np.where(counts > 0, scale / np.maximum(counts, 1), 0.0)
