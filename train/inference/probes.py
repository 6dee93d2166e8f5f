"""What frozen features are worth, by three simple learners that take them as they are; numpy and scikit-learn only.

What each reached here is of 10,000 training and 10,000 test images of CIFAR-10, in the features of a ViT of 0.8 million
parameters whose own head has 51.8 %.  Hardware: 2 cores of an AMD EPYC.  Time: 72 s for all three, 48 s of it for features.

N training images, M held-out ones, D features, C classes (or labels, or values).
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.data.rng import SHOTS, generator
from train.data.sources.splitting import divided
from train.loop.metrics import LEADING, score
from train.recipes import Task
from vit_spec import InputError

Array = NDArray[Any]  # of float32 or float64
Rows = NDArray[Any]  # of whole numbers

NEIGHBOURS = (10, 20, 100, 200)
TEMPERATURE = 0.07
SIMILARITIES = 1 << 24  # held at once

SHOT_COUNTS = (1, 5, 10, 25)
L2 = 2.0**10  # big_vision's one strength, for every network, data set and number of shots
GRID = tuple(2.0**i for i in range(-10, 20))  # the strengths that it was found among
BIAS = 100.0  # a column of such large numbers gets a weight that is hardly held back

VALIDATION = 0.2  # of the training images, to choose the strength of a linear probe by
LEAST = {"classes": "2 images of a class", "labels": "3 images of a label", "values": "3 images"}  # for one to be kept
ITERATIONS = 1000


# Nearest neighbours ---------------------------------------------------------------------------------------------------


def check_neighbours(counts: Sequence[int], images: int) -> None:
    """Refuse numbers of neighbours that there are not.

    Raises:
        InputError: as said.
    """
    if max(counts) > images:
        fit = " ".join(str(k) for k in counts if k <= images) or str(images)
        raise InputError(f"--k has {max(counts)}, and there are {images:,} training images: give --k {fit}")


def knn(train: Array, classes: Rows, held_out: Array, counts: Sequence[int]) -> dict[int, Rows]:
    """Return the class of each held-out image, (M,), by its k nearest training images, for each k of `counts`.

    Nearness is the cosine of the angle between features, s, and each neighbour votes for its class with exp(s / 0.07).
    Of equal votes the lowest class wins.

    Source: DINO (arXiv 2104.14294, appendix F.1; facebookresearch/dino, eval_knn.py), after arXiv 1805.01978.

    python -m train.evaluate hf://timm/vit_small_patch16_224.dino --data parquet:imagenet-1k/data --method knn

    Published: 74.5 % for these weights (facebookresearch/dino); here 50.4 to 52.0 % on CIFAR-10, as above.

    train: (N, D).    classes: (N,) class numbers.    held_out: (M, D).
    """
    check_neighbours(counts, len(train))
    train, held_out = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (train, held_out))
    found: dict[int, list[Rows]] = {k: [] for k in counts}
    for part in np.split(held_out, range(0, len(held_out), max(1, SIMILARITIES // len(train)))[1:]):
        similar = part @ train.T
        near = _nearest(similar, max(counts))
        votes = np.exp(np.take_along_axis(similar, near, axis=1).astype(np.float64) / TEMPERATURE)
        for k in counts:
            found[k].append(_elected(classes[near[:, :k]], votes[:, :k], int(classes.max()) + 1))
    return {k: np.concatenate(parts) for k, parts in found.items()}


def _nearest(similar: Array, k: int) -> Rows:
    """Return the columns of the k largest entries of each row, the largest first, (rows, k)."""
    near = np.argpartition(-similar, k - 1, axis=1)[:, :k]
    order = np.argsort(-np.take_along_axis(similar, near, axis=1), axis=1, kind="stable")
    return np.take_along_axis(near, order, axis=1)


def _elected(classes: Rows, votes: Array, count: int) -> Rows:
    """Return the class with the most votes in each row of (rows, k)."""
    rows = len(classes)
    places = classes + count * np.arange(rows)[:, None]
    return np.bincount(places.ravel(), votes.ravel(), rows * count).reshape(rows, count).argmax(1)


# Few shots ------------------------------------------------------------------------------------------------------------


def draw_shots(classes: Rows, shots: int, seed: int, names: Sequence[str]) -> Rows:
    """Return the rows of `shots` training images of each class, drawn by the seed; more shots contain fewer.

    A class without any training image has no part in it: no held-out image is of it either.

    classes: (N,) class numbers.    names: of the classes, for messages.

    Raises:
        InputError: classes with fewer images, named.
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


def few_shot(train: Array, classes: Rows, held_out: Array, strengths: Sequence[float]) -> dict[float, Rows]:
    """Return the class of each held-out image, (M,), by least squares on few training images, for each strength.

    Features are whitened by the mean and the standard deviation (plus 1e-5) of these few, a column of 100 is added for the
    bias, and the targets are 1 for an image's class and -1 for all others; computed in float64.

    Source: big_vision, evaluators/fewshot_lsr.py; strength 2^10 as in its configs/common_fewshot.py.

    python -m train.evaluate RUN --method few-shot

    Here 31.3, 39.7, 44.8 and 48.3 % on CIFAR-10, as above, from 1, 5, 10 and 25 images of each class.

    train: (N, D), those few.    classes: (N,) class numbers.    held_out: (M, D).
    """
    wide = np.asarray(train, np.float64)
    mean, std = wide.mean(0), wide.std(0) + 1e-5

    def whitened(x: Array) -> Array:
        return np.pad((x - mean) / std, ((0, 0), (0, 1)), constant_values=BIAS)

    solution = solve(whitened(wide), 2.0 * np.eye(int(classes.max()) + 1)[classes] - 1)
    seen = whitened(held_out)
    return {strength: (seen @ solution.weights(strength)).argmax(1) for strength in strengths}


class Solution(NamedTuple):
    """Least squares with an L2 penalty, ready for any strength of it: (x^T x + strength)^-1 x^T y.

    left: (D, R).    values: (R,), the eigenvalues.    right: (R, C).
    """

    left: Array
    values: Array
    right: Array

    def weights(self, strength: float) -> Array:
        """Return what minimises |x w - y|^2 + strength |w|^2, (D, C)."""
        weights: Array = self.left @ (self.right / (self.values + strength)[:, None])
        return weights


def solve(x: Array, y: Array) -> Solution:
    """Return the least squares of (N, D) and (N, C) float64, by the smaller of x^T x and x x^T = q diag(values) q^T.

    They give the same: (x^T x + s)^-1 x^T = x^T (x x^T + s)^-1.
    """
    tall = len(x) >= x.shape[1]
    values, q = np.linalg.eigh(x.T @ x if tall else x @ x.T)
    values = np.maximum(values, 0)  # which is what roundings below zero stand for
    return Solution(q, values, q.T @ (x.T @ y)) if tall else Solution(x.T @ q, values, q.T @ y)


# Linear probe ---------------------------------------------------------------------------------------------------------


class Probe(NamedTuple):
    """What a linear probe came to.

    outputs: (M, C) float64 of the held-out images.
    strength: of the L2 penalty, as chosen.
    validated: the leading metric on the images that it was chosen by; NaN where it is undefined at every strength.
    converged: whether the last fit came to its end.
    """

    outputs: Array
    strength: float
    validated: float
    converged: bool


def kept(task: Task, targets: Array) -> tuple[Rows, Rows]:
    """Return the rows of the training images to learn from, and of the fifth that is kept to choose a strength by.

    targets: as `train.data.batches.targets` makes them.

    Raises:
        InputError: so few images that none is kept.
    """
    learnt, judged = divided(targets, task, VALIDATION)
    if not len(judged):
        raise InputError(
            f"--method linear keeps a fifth of the training images to choose L2 by, and of these {len(targets)} it could "
            f"keep none: give at least {LEAST[task]}{', or --method knn' * (task == 'classes')}"
        )
    return learnt, judged


def linear(task: Task, train: Array, targets: Array, held_out: Array) -> Probe:
    """Fit a linear model on standardised features, the strength of its L2 penalty chosen on a fifth of the training images.

    classes: multinomial logistic regression.    labels: one logistic regression for each.    values: least squares.
    The strength s, of sum(losses) + s/2 |w|^2 (of sum(squares) + s |w|^2), is chosen as by CLIP: from 1e-6 to 1e6 in steps
    of two decades, then about the best in steps that halve, down to an eighth of a decade; of equally good ones the
    strongest, as where the metric is undefined at all.  Then all training images are learnt from.  The validation images
    are the same for every seed.

    Source: CLIP, arXiv 2103.00020, appendix A.3; there features are not standardised.

    python -m train.evaluate hf://timm/vit_small_patch16_224.dino --data parquet:imagenet-1k/data --method linear

    Published: 77.0 % for these weights, by SGD, from the tokens of four blocks (facebookresearch/dino); here 53.5 % on
    CIFAR-10, as above.

    train: (N, D).    targets: as `train.data.batches.targets` makes them.    held_out: (M, D).

    Raises:
        InputError: as `kept`.
    """
    learnt, judged = kept(task, targets)
    answers: Array = targets.max(initial=0) + 1 if task == "classes" else targets.shape[1]
    count, leading = int(answers), LEADING[task]
    fit = _Fits(task, train[learnt], targets[learnt], train[judged], count)

    def worth(strength: float) -> float:
        outputs, _ = fit(strength)
        found = score(task, outputs, targets[judged], tuple(map(str, range(count))))[leading]
        return -np.inf if np.isnan(found) else -found if leading == "mae" else found

    strength, validated = searched(worth)
    outputs, converged = _Fits(task, train, targets, held_out, count)(strength)
    return Probe(outputs, strength, abs(validated) if np.isfinite(validated) else np.nan, converged)


def searched(worth: Callable[[float], float]) -> tuple[float, float]:
    """Return the strength from 1e-6 to 1e6 with the greatest worth, and that worth; see `linear`."""
    known: dict[float, float] = {}
    step, places = 2.0, [float(place) for place in range(-6, 7, 2)]
    while True:
        known |= {place: worth(10.0**place) for place in places if place not in known and -6 <= place <= 6}
        best = max(known, key=lambda place: (known[place], place))
        if step == 1 / 8:
            return 10.0**best, known[best]
        step /= 2
        places = [best - step, best + step]


class _Fits:
    """Linear models of the same images, one for each strength asked for: outputs (M, C), and whether the fit ended."""

    def __init__(self, task: Task, train: Array, targets: Array, held_out: Array, count: int) -> None:
        from sklearn.preprocessing import StandardScaler

        scaler = StandardScaler().fit(train.astype(np.float64))  # of a feature that never changes it leaves the scale
        self._task, self._targets, self._count = task, targets, count
        self._train, self._held_out = (scaler.transform(x.astype(np.float64)) for x in (train, held_out))
        if task == "values":
            self._mean = targets.astype(np.float64).mean(0)
            self._solution = solve(self._train, targets - self._mean)

    def __call__(self, strength: float) -> tuple[Array, bool]:
        if self._task == "values":
            return self._held_out @ self._solution.weights(strength) + self._mean, True
        if self._task == "classes":
            return self._logistic(self._targets, strength, self._count)
        each = [self._logistic(column.astype(np.int64), strength, 2) for column in self._targets.T]
        return np.stack([outputs[:, 1] for outputs, _ in each], axis=1), all(ended for _, ended in each)

    def _logistic(self, classes: Rows, strength: float, count: int) -> tuple[Array, bool]:
        """Logistic regression; a class without an image is never chosen."""
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
        from threadpoolctl import threadpool_limits

        outputs = np.full((len(self._held_out), count), -np.inf)
        there = np.unique(classes)
        if len(there) == 1:
            outputs[:, there] = 0
            return outputs, True
        model = LogisticRegression(C=1 / strength, max_iter=ITERATIONS)
        # One thread, so that sums do not depend on their number; and L-BFGS makes many products too small to share.
        with threadpool_limits(1, "blas"), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # it is told in the result
            model.fit(self._train, classes)
        found = model.decision_function(self._held_out)
        outputs[:, there] = found if found.ndim == 2 else np.stack([-found / 2, found / 2], axis=1)
        return outputs, bool(np.max(model.n_iter_) < ITERATIONS)
