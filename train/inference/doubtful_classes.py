"""Images whose class is doubtful, because a classifier that learnt from the other images gives them another one.

Source: confident learning (arXiv 1911.00068).  A logistic regression on frozen features, fitted to four fifths of the
images at a time, gives the probabilities of the rest.  An image counts as of class j if its probability for j is at least
the mean of that probability over the images of class j; of several such classes, the most probable one.  It is doubtful if
that is another class than it has, and more probable.  Classes of fewer than five images are left out.

`benchmarks.doubtful_classes` measures it on data of which 5 % have a wrong class.
"""

from typing import NamedTuple

import numpy as np

from train.data.order import rows_by_class
from train.data.rng import FOLDS, generator
from train.inference.probes import LinearModels, search_strength, validation_split
from train.inference.scores import Array, softmax
from vit_spec import InputError

NUM_FOLDS = 5


class Doubtful(NamedTuple):
    """An image whose class is doubtful.

    row: its index.
    other: the class that the other images give it.
    probability, of_other: probability of the class that it has, and of the other.
    """

    row: int
    other: int
    probability: float
    of_other: float


def find_doubtful(features: Array, classes: Array) -> tuple[list[Doubtful], float]:
    """Return the images whose class is doubtful, the most doubtful first, and the accuracy of the classifier.

    The better it is, the more of the findings are wrong classes.

    features: (N, D).    classes: (N,) class numbers.

    Raises:
        InputError: each class has one image only.
    """
    if np.bincount(classes).max() < 2:
        raise InputError("each class has one image, so none can be judged by others: leave --init out")
    probabilities = _cross_validated(features, classes)
    own = probabilities[np.arange(len(classes)), classes]
    counts = np.bincount(classes, minlength=probabilities.shape[1])
    thresholds = np.full(len(counts), np.inf)
    is_known = counts >= NUM_FOLDS
    thresholds[is_known] = np.bincount(classes, own, len(counts))[is_known] / counts[is_known]
    confident = np.where(probabilities >= thresholds, probabilities, -1.0)
    other = confident.argmax(1)
    rows = np.flatnonzero((confident.max(1) > own) & (other != classes) & is_known[classes])
    margins = own[rows] - probabilities[rows, other[rows]]
    found = [
        Doubtful(row, int(other[row]), float(own[row]), float(probabilities[row, other[row]]))
        for row in rows[np.argsort(margins, kind="stable")].tolist()
    ]
    return found, float(np.mean(probabilities.argmax(1) == classes))


def _cross_validated(features: Array, classes: Array) -> Array:
    """Return the probabilities (N, C) of each image by a model that was fitted without it."""
    count = int(classes.max()) + 1
    strength = _choose_strength(features, classes, count)
    probabilities = np.zeros((len(classes), count))
    folds = _stratified_folds(classes)
    for fold in range(NUM_FOLDS):
        inside = folds == fold
        if inside.any():
            fitted = LinearModels("classes", features[~inside], classes[~inside], features[inside], count)
            probabilities[inside] = softmax(fitted(strength)[0])
    return probabilities


def _choose_strength(features: Array, classes: Array, count: int) -> float:
    """Return the L2 penalty with the lowest log loss on a fifth of the images, so that probabilities are calibrated."""
    fit_rows, rows = validation_split("classes", classes)
    fit = LinearModels("classes", features[fit_rows], classes[fit_rows], features[rows], count)

    def objective(strength: float) -> float:
        probabilities = softmax(fit(strength)[0])[np.arange(len(rows)), classes[rows]]
        return float(np.log(np.maximum(probabilities, np.finfo(float).tiny)).mean())

    return search_strength(objective)[0]


def _stratified_folds(classes: Array) -> Array:
    """Return the fold of each image, (N,): of every class, each fold has as many images, up to one."""
    folds = np.empty(len(classes), np.int64)
    for rows in rows_by_class(classes):
        folds[generator(FOLDS, int(classes[rows[0]])).permutation(rows)] = np.arange(len(rows)) % NUM_FOLDS
    return folds
