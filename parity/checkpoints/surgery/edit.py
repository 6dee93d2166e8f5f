"""What every operation needs: numbers to compute with, and the checkpoint with what it changed."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints.containers.container import Stored
from parity.checkpoints.formats import get
from parity.checkpoints.layout import Array
from parity.checkpoints.weights import Checkpoint, Task, edited, plan
from vit_spec import InputError, ViTConfig
from vit_spec.config import FIELDS

Changed = tuple[Checkpoint, str]  # the new checkpoint, and what was done to the old one
Float64 = NDArray[np.float64]


def float64(array: Array) -> Float64:
    """Return the numbers as they are computed with: every type of weights is exact in float64."""
    return array.astype(np.float64)


def changed(checkpoint: Checkpoint, config: ViTConfig, changes: Mapping[str, Array], told: Iterable[str]) -> Checkpoint:
    """Return the edited checkpoint; fields that were told, or whose part was, are no longer assumed.

    Images are prepared at the new size where that was told.  The names of outputs stay as long as their number does.
    """
    told, how = tuple(told), checkpoint.preprocessing
    if how and "image_size" in told:
        checkpoint = replace(checkpoint, preprocessing=how.at(config.image_size))
    if config.num_classes != checkpoint.config.num_classes:
        checkpoint = replace(checkpoint, labels=None)
    left = [one for one in checkpoint.assumed if not one.field.startswith(told)]
    assumed = tuple(replace(one, value=config.at(one.field)) if one.field in FIELDS else one for one in left)
    return replace(edited(_able_to_hold(checkpoint, config), config, changes), assumed=assumed)


def _able_to_hold(checkpoint: Checkpoint, config: ViTConfig) -> Checkpoint:
    """Return the checkpoint as it is, or as the object twin has it where its own format cannot hold the new config."""
    try:
        get(checkpoint.format).layouts(config)
    except InputError:
        arrays = {task.key: Made(task) for task in plan(checkpoint, "torch")}
        return replace(checkpoint, format="torch", arrays=arrays)
    return checkpoint


class Made(Stored):
    """An array of another format, made from its own when it is read."""

    def __init__(self, task: Task) -> None:
        self.task, self.shape, self.dtype = task, task.shape, task.dtype

    def read(self, first: int, last: int) -> Array:
        return self.task.whole().reshape(-1)[first:last]
