"""Targets that a model is trained and evaluated with, made from those of a data set."""

import numpy as np
from numpy.typing import NDArray

from train.data.sources import Examples
from train.data.sources.table_columns import parse_finite
from train.recipes import Task
from vit_spec import InputError

ModelTargets = NDArray[np.int32] | NDArray[np.float32]


def targets_for_task(examples: Examples, classes: tuple[str, ...], data_task: Task, task: Task) -> ModelTargets:
    """Return the targets that the model is trained and evaluated with.

    data_task: the kind of targets that the data has.
    task: what the model predicts.

    classes: (N,) int32 class numbers.
    labels: (N, labels) float32 of 0 and 1; made from classes, 1 for the image's class and 0 for the others.
    values: (N, values) float32; made from classes, the class's name as a number, (N, 1).

    Raises:
        InputError: data of labels or values with another task, or "values" with a class whose name is not a finite number.
    """
    if data_task != "classes":
        if task != data_task:
            raise InputError(f"--task {task} needs classes, and the data has {data_task}: leave --task out")
        return examples.targets.astype(np.float32)
    numbers = examples.targets.astype(np.int32)
    if task == "classes":
        return numbers
    if task == "labels":
        return np.eye(len(classes), dtype=np.float32)[numbers]
    with np.errstate(over="ignore"):  # too large a number becomes infinite, and text becomes nan
        values = np.array([parse_finite(name) for name in classes], np.float64).astype(np.float32)
    if not np.isfinite(values).all():
        name = classes[int(np.isfinite(values).argmin())]
        raise InputError(
            f"--task values reads class names as numbers, and {name!r} is not one: rename it, or give --task classes"
        )
    return values[numbers][:, None]


def num_outputs(classes: tuple[str, ...], data_task: Task, task: Task) -> int:
    """Return the number of the model's outputs for an image."""
    return 1 if (data_task, task) == ("classes", "values") else len(classes)
