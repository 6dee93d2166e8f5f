"""Evaluation of frozen features by simple learners: nearest neighbours, least squares on few images, a linear probe.

The accuracies given below as measured are those on 10,000 test images of CIFAR-10, learnt from 10,000 training images, with
the features of a ViT of 0.8 million parameters; its own head has 51.8 %.  Hardware: 2 cores of an AMD EPYC.  Time: 72 s for
all three, 48 s of it to compute the features.

Shapes: N training images, M held-out images, D features, C classes (or labels, or values).  numpy and scikit-learn only.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.data.rng import SHOTS, generator
from train.data.sources.splitting import split_rows
from train.loop.metrics import PRIMARY_METRIC, compute_metrics
from train.recipes import Task
from vit_spec import InputError

Array = NDArray[Any]  # float32 or float64
Indices = NDArray[Any]  # integers: class numbers or rows

NEIGHBOUR_COUNTS = (10, 20, 100, 200)
TEMPERATURE = 0.07
MAX_SIMILARITIES = 1 << 24  # in memory at once

SHOT_COUNTS = (1, 5, 10, 25)
L2 = 2.0**10  # big_vision's penalty, the same for every model, data set and number of shots
L2_GRID = tuple(2.0**i for i in range(-10, 20))  # the penalties from which big_vision chose it
BIAS_FEATURE = 100.0  # a constant feature this large is hardly penalized: it serves as the bias

VALIDATION_FRACTION = 0.2  # of the training images, to choose the L2 penalty of a linear probe
# What gives at least one validation image:
MIN_IMAGES = {"classes": "2 images of a class", "labels": "3 images of a label", "values": "3 images"}
MAX_ITERATIONS = 1000


# Nearest neighbours ---------------------------------------------------------------------------------------------------


def check_neighbours(counts: Sequence[int], images: int) -> None:
    """Check that there are at least as many training images as neighbours.

    Raises:
        InputError: there are fewer.
    """
    if max(counts) > images:
        fit = " ".join(str(k) for k in counts if k <= images) or str(images)
        raise InputError(f"--k has {max(counts)}, and there are {images:,} training images: give --k {fit}")


def knn(train: Array, classes: Indices, held_out: Array, counts: Sequence[int]) -> dict[int, Indices]:
    """Classify held-out images by their k nearest training images, for each k of `counts`.

    The similarity s is the cosine of two feature vectors, and each neighbour votes for its class with weight exp(s / 0.07).
    Of classes with equal votes, the one with the lowest number wins.

    Source: DINO (arXiv 2104.14294, appendix F.1; facebookresearch/dino, eval_knn.py), after arXiv 1805.01978.

    python -m train.evaluate hf://timm/vit_small_patch16_224.dino --data parquet:imagenet-1k/data --method knn

    Published: 74.5 % for these weights (facebookresearch/dino).  Measured: 50.4 to 52.0 % on CIFAR-10, as above.

    train: (N, D).    classes: (N,) class numbers.    held_out: (M, D).

    Returns class numbers (M,) by k.
    """
    check_neighbours(counts, len(train))
    train, held_out = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (train, held_out))
    found: dict[int, list[Indices]] = {k: [] for k in counts}
    for part in np.split(held_out, range(0, len(held_out), max(1, MAX_SIMILARITIES // len(train)))[1:]):
        similar = part @ train.T
        near = _nearest(similar, max(counts))
        votes = np.exp(np.take_along_axis(similar, near, axis=1).astype(np.float64) / TEMPERATURE)
        for k in counts:
            found[k].append(_majority_class(classes[near[:, :k]], votes[:, :k], int(classes.max()) + 1))
    return {k: np.concatenate(parts) for k, parts in found.items()}


def _nearest(similar: Array, k: int) -> Indices:
    """Return the columns of the k largest entries of each row, the largest first: (rows, k)."""
    near = np.argpartition(-similar, k - 1, axis=1)[:, :k]
    order = np.argsort(-np.take_along_axis(similar, near, axis=1), axis=1, kind="stable")
    return np.take_along_axis(near, order, axis=1)


def _majority_class(classes: Indices, votes: Array, count: int) -> Indices:
    """Return the class with the largest sum of votes in each row.

    classes, votes: (rows, k).    count: number of classes.    Returns (rows,).
    """
    rows = len(classes)
    bins = classes + count * np.arange(rows)[:, None]
    return np.bincount(bins.ravel(), votes.ravel(), rows * count).reshape(rows, count).argmax(1)


# Few shots ------------------------------------------------------------------------------------------------------------


def draw_shots(classes: Indices, shots: int, seed: int, names: Sequence[str]) -> Indices:
    """Return the rows of `shots` random training images of each class; with the same seed, fewer shots are a subset.

    A class without training images is skipped.

    classes: (N,) class numbers.    names: names of the classes, for messages.

    Raises:
        InputError: a class has fewer images; the message names the classes.
    """
    counts = np.bincount(classes)
    few = [f"{names[c]!r} has {counts[c]}" for c in np.flatnonzero((counts > 0) & (counts < shots)).tolist()]
    if few:
        listed = f"{', '.join(few[:3])}{f' and {len(few) - 3} more classes have too few' * (len(few) > 3)}"
        raise InputError(f"{shots} shots need as many training images of every class, and {listed}: give --shots fewer")
    drawn = [
        generator(SHOTS, seed, c).permutation(np.flatnonzero(classes == c))[:shots] for c in np.flatnonzero(counts).tolist()
    ]
    return np.concatenate(drawn)


def few_shot(train: Array, classes: Indices, held_out: Array, strengths: Sequence[float]) -> dict[float, Indices]:
    """Classify held-out images by least squares on few training images, for each L2 penalty of `strengths`.

    Features are standardized by the mean and the standard deviation (plus 1e-5) of the few training images, a constant
    feature of 100 is added for the bias, and the targets are 1 for an image's class and -1 for all others; in float64.

    Source: big_vision, evaluators/fewshot_lsr.py; strength 2^10 as in its configs/common_fewshot.py.

    python -m train.evaluate RUN --method few-shot

    Measured: 31.3, 39.7, 44.8 and 48.3 % on CIFAR-10, as above, from 1, 5, 10 and 25 images of each class.

    train: (N, D), the few images.    classes: (N,) class numbers.    held_out: (M, D).

    Returns class numbers (M,) by penalty.
    """
    features = np.asarray(train, np.float64)
    mean, std = features.mean(0), features.std(0) + 1e-5

    def standardize(x: Array) -> Array:
        return np.pad((x - mean) / std, ((0, 0), (0, 1)), constant_values=BIAS_FEATURE)

    solution = solve_ridge(standardize(features), 2.0 * np.eye(int(classes.max()) + 1)[classes] - 1)
    x = standardize(held_out)
    return {strength: (x @ solution.weights(strength)).argmax(1) for strength in strengths}


class RidgeSolution(NamedTuple):
    """Least squares with any L2 penalty, (x^T x + strength)^-1 x^T y = left diag(1 / (values + strength)) right.

    left: (D, R).    values: (R,) eigenvalues.    right: (R, C).
    """

    left: Array
    values: Array
    right: Array

    def weights(self, strength: float) -> Array:
        """Return the w that minimizes |x w - y|^2 + strength |w|^2: (D, C)."""
        weights: Array = self.left @ (self.right / (self.values + strength)[:, None])
        return weights


def solve_ridge(x: Array, y: Array) -> RidgeSolution:
    """Return the least squares of x (N, D) and y (N, C), float64, by the eigenvalues of x^T x or x x^T.

    The smaller matrix is decomposed; both give the same: (x^T x + s)^-1 x^T = x^T (x x^T + s)^-1.
    """
    tall = len(x) >= x.shape[1]
    values, q = np.linalg.eigh(x.T @ x if tall else x @ x.T)
    values = np.maximum(values, 0)  # only rounding errors make them negative
    return RidgeSolution(q, values, q.T @ (x.T @ y)) if tall else RidgeSolution(x.T @ q, values, q.T @ y)


# Linear probe ---------------------------------------------------------------------------------------------------------


class LinearProbe(NamedTuple):
    """The result of a linear probe.

    outputs: (M, C) float64 for the held-out images.
    strength: the L2 penalty that was chosen.
    validated: the primary metric on the validation images; NaN if it is undefined for every penalty.
    converged: whether the last fit converged.
    """

    outputs: Array
    strength: float
    validated: float
    converged: bool


def validation_split(task: Task, targets: Array) -> tuple[Indices, Indices]:
    """Return the rows of the training images to fit, and of the fifth that is held out to choose the L2 penalty.

    targets: (N,) class numbers, or (N, labels or values); see `train.data.targets.targets_for_task`.

    Raises:
        InputError: there are so few images that no validation image is left.
    """
    fit_rows, validation_rows = split_rows(targets, task, VALIDATION_FRACTION)
    if not len(validation_rows):
        raise InputError(
            f"--method linear holds out a fifth of the training images to choose L2, and {len(targets)} images "
            f"are too few: give at least {MIN_IMAGES[task]}{', or --method knn' * (task == 'classes')}"
        )
    return fit_rows, validation_rows


def linear_probe(task: Task, train: Array, targets: Array, held_out: Array) -> LinearProbe:
    """Fit a linear model on standardized features, with the L2 penalty chosen on a fifth of the training images.

    classes: multinomial logistic regression.    labels: one logistic regression for each.    values: least squares.

    The penalty s, in sum(losses) + s/2 |w|^2 (for values in sum(squares) + s |w|^2), is searched as by CLIP: from 1e-6 to
    1e6 in steps of two decades, then around the best one in steps that halve, down to an eighth of a decade.  Of equally
    good penalties the largest is taken, also if the metric is undefined for all.  Then all training images are fitted.  The
    validation images do not depend on a seed.

    Source: CLIP, arXiv 2103.00020, appendix A.3; CLIP does not standardize features.

    python -m train.evaluate hf://timm/vit_small_patch16_224.dino --data parquet:imagenet-1k/data --method linear

    Published: 77.0 % for these weights, by SGD, from the tokens of four blocks (facebookresearch/dino).  Measured: 53.5 %
    on CIFAR-10, as above.

    train: (N, D).    targets: as of `validation_split`.    held_out: (M, D).

    Raises:
        InputError: as `validation_split`.
    """
    fit_rows, validation_rows = validation_split(task, targets)
    num_outputs: Array = targets.max(initial=0) + 1 if task == "classes" else targets.shape[1]
    count, metric = int(num_outputs), PRIMARY_METRIC[task]
    fit = LinearModels(task, train[fit_rows], targets[fit_rows], train[validation_rows], count)

    def objective(strength: float) -> float:
        outputs, _ = fit(strength)
        value = compute_metrics(task, outputs, targets[validation_rows], tuple(map(str, range(count))))[metric]
        return -np.inf if np.isnan(value) else -value if metric == "mae" else value

    strength, validated = search_strength(objective)
    outputs, converged = LinearModels(task, train, targets, held_out, count)(strength)
    return LinearProbe(outputs, strength, abs(validated) if np.isfinite(validated) else np.nan, converged)


def search_strength(objective: Callable[[float], float]) -> tuple[float, float]:
    """Return the L2 penalty from 1e-6 to 1e6 with the largest objective, and its objective; see `linear_probe`."""
    found: dict[float, float] = {}  # objective by the penalty's exponent
    step, exponents = 2.0, [float(exponent) for exponent in range(-6, 7, 2)]
    while True:
        found |= {x: objective(10.0**x) for x in exponents if x not in found and -6 <= x <= 6}
        best = max(found, key=lambda x: (found[x], x))
        if step == 1 / 8:
            return 10.0**best, found[best]
        step /= 2
        exponents = [best - step, best + step]


class LinearModels:
    """Fits a linear model to the training images for a given L2 penalty.

    A call returns its outputs for the held-out images, (M, C), and whether the fit converged.

    count: number of classes, labels or values.
    """

    def __init__(self, task: Task, train: Array, targets: Array, held_out: Array, count: int) -> None:
        from sklearn.preprocessing import StandardScaler

        scaler = StandardScaler().fit(train.astype(np.float64))  # it does not scale constant features
        self._task, self._targets, self._count = task, targets, count
        self._train, self._held_out = (scaler.transform(x.astype(np.float64)) for x in (train, held_out))
        if task == "values":
            self._mean = targets.astype(np.float64).mean(0)
            self._solution = solve_ridge(self._train, targets - self._mean)

    def __call__(self, strength: float) -> tuple[Array, bool]:
        if self._task == "values":
            return self._held_out @ self._solution.weights(strength) + self._mean, True
        if self._task == "classes":
            return self._logistic(self._targets, strength, self._count)
        each = [self._logistic(column.astype(np.int64), strength, 2) for column in self._targets.T]
        logits = [outputs[:, 1] - outputs[:, 0] for outputs, _ in each]
        return np.stack(logits, axis=1), all(converged for _, converged in each)

    def _logistic(self, classes: Indices, strength: float, count: int) -> tuple[Array, bool]:
        """Fit a logistic regression; a class without training images is never predicted."""
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
        from threadpoolctl import threadpool_limits

        outputs = np.full((len(self._held_out), count), -np.inf)
        present = np.unique(classes)
        if len(present) == 1:
            outputs[:, present] = 0
            return outputs, True
        model = LogisticRegression(C=1 / strength, max_iter=MAX_ITERATIONS)
        # One thread: results do not depend on the number of cores, and the products of L-BFGS are too small to share.
        with threadpool_limits(1, "blas"), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the caller reports it
            model.fit(self._train, classes)
        found = model.decision_function(self._held_out)
        outputs[:, present] = found if found.ndim == 2 else np.stack([-found / 2, found / 2], axis=1)
        return outputs, bool(np.max(model.n_iter_) < MAX_ITERATIONS)
