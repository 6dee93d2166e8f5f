"""Class weights and balanced sampling of a run, and the lines that say what they do."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.data.class_weights import Weights, balanced_weights
from train.data.sources import Dataset
from train.data.targets import ModelTargets
from train.recipes import Recipe, Task
from vit_spec import InputError


class Balance(NamedTuple):
    """How a run treats classes that are rare.

    weights: weights of the terms of the training loss, see `train.data.class_weights`; None: 1.
    classes: (N,) the class of each training image, of which all are equally frequent in an epoch; None: images are.
    """

    weights: Weights | None
    classes: NDArray[np.int64] | None

    @classmethod
    def from_recipe(cls, recipe: Recipe, source: Dataset, task: Task, targets: ModelTargets) -> "Balance":
        """Return what a recipe asks for.

        targets: targets of the training images, see `train.data.targets.targets_for_task`.

        Raises:
            InputError: the task has no classes to weight, or the data have none to balance.
        """
        weights = classes = None
        if recipe.class_weights == "balanced":
            if task == "values":
                raise InputError("--class-weights balanced is for classes and labels, and the task is values: leave it out")
            binary = task == "labels" or recipe.loss == "sigmoid"
            weights = balanced_weights(targets, len(source.classes), binary=binary)
        if recipe.sampling == "balanced":
            if source.task != "classes":
                instead = "give --class-weights balanced" if source.task == "labels" else "leave it out"
                raise InputError(f"--sampling balanced is for data of classes, and the data has {source.task}: {instead}")
            classes = np.asarray(source.train.targets, np.int64)
        return cls(weights, classes)

    def table_rows(self, names: tuple[str, ...]) -> dict[str, str]:
        """Return the rows of the table at the start.

        names: names of the classes or labels.
        """
        rows = {}
        if self.weights is not None:
            of_each = self.weights[-1] if self.weights.ndim == 2 else self.weights
            rare, frequent = int(of_each.argmax()), int(np.where(of_each > 0, of_each, np.inf).argmin())
            where = "where they are present, " if self.weights.ndim == 2 else ""
            rows["class weights"] = (
                f"balanced, {where}{of_each[frequent]:.3g} ({names[frequent]}) to {of_each[rare]:.3g} ({names[rare]})"
            )
        if self.classes is not None:
            present, counts = np.unique(self.classes, return_counts=True)
            each = len(self.classes) / len(present)
            often = f"an image of {names[int(present[counts.argmin()])]!r} on average {each / counts.min():.1f} times"
            rows["sampling"] = f"balanced, about {each:.0f} images of each class in an epoch, {often}"
        if len(rows) == 2:
            rows["sampling"] += "; with --class-weights, rare classes count more than others"
        return rows
