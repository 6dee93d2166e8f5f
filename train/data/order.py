"""The order in which an epoch goes through the training images: each once, or classes equally often."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.data.rng import ORDER, generator


class Order(NamedTuple):
    """The order of an epoch.

    rows: (N,) int64, the index of each image.
    copies: (N,) int64, how often the image was in this epoch before.
    """

    rows: NDArray[np.int64]
    copies: NDArray[np.int64]


@dataclass(frozen=True)
class EpochOrder:
    """The orders of all epochs, each a pure function of (seed, epoch).

    seed: seed of the run.
    count: the number of images, and of positions in an epoch.
    classes: (N,) the class of each image, of which all are equally frequent in an epoch; None: each image is there once.
    """

    seed: int
    count: int
    classes: NDArray[np.int64] | None = None
    _recent: dict[int, Order] = field(default_factory=dict, repr=False, compare=False)

    def of(self, epoch: int) -> Order:
        """Return the order of an epoch.  The last two are kept, because a batch may straddle two epochs."""
        if (known := self._recent.get(epoch)) is not None:
            return known
        rng = generator(ORDER, self.seed, epoch)
        if self.classes is None:
            order = Order(rng.permutation(self.count), np.zeros(self.count, np.int64))
        else:
            order = draw_balanced(self.classes, rng)
        for other in [*self._recent][:-1]:
            self._recent.pop(other, None)
        self._recent[epoch] = order
        return order


def rows_by_class(classes: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the rows of each class that there is, sorted by class: one array for each.

    classes: (N,) the class of each image.
    """
    # Sorted once: `classes == one` for each class would take time quadratic in the classes.
    order = np.argsort(classes, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(classes[order])) + 1)


def draw_balanced(classes: NDArray[np.int64], rng: np.random.Generator) -> Order:
    """Return an order as long as the data in which all classes are equally frequent, up to one image.

    Within a class all images are equally frequent, up to one: those of a rare class are there several times, and of a
    frequent one a part is left out, another one in each epoch.

    classes: (N,) the class of each image.
    """
    total, groups = len(classes), rows_by_class(classes)
    share, rest = divmod(total, len(groups))
    places = np.full(len(groups), share)
    places[rng.permutation(len(groups))[:rest]] += 1
    rows, copies = [], []
    for of_class, wanted in zip(groups, places.tolist(), strict=True):
        passes = [rng.permutation(of_class) for _ in range(-(-wanted // len(of_class)))]
        rows.append(np.concatenate([*passes, of_class[:0]])[:wanted])
        copies.append(np.arange(wanted) // len(of_class))
    order = rng.permutation(total)
    return Order(np.concatenate(rows)[order], np.concatenate(copies)[order])
