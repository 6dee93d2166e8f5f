"""The teacher of knowledge distillation: its weights, the outputs that a student learns, and the images that it gets."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints.conversion import checksum
from parity.checkpoints.weights import Checkpoint
from train.recipes import Recipe
from vit_spec import ViTConfig, count
from vit_spec.resample import matrix


class InputTransform(NamedTuple):
    """The map from the student's images, normalized and mixed, to the teacher's: resizing, then x * scale + shift.

    Both are linear, so a mixed image becomes the mixture of the teacher's images.

    scale, shift: (channels of the teacher,) float64.
    rows, columns: (height, height of the student's) and (width, width of the student's) float64, the matrices of an
        antialiased bicubic resize; None if the sizes are the same.
    """

    scale: NDArray[np.float64]
    shift: NDArray[np.float64]
    rows: NDArray[np.float64] | None
    columns: NDArray[np.float64] | None

    @classmethod
    def between(cls, student: ViTConfig, teacher: ViTConfig) -> "InputTransform":
        """Return the transform from images of a student to those of a teacher."""
        (mean, std), (wanted_mean, wanted_std) = (
            (np.array(each.pixels.mean), np.array(each.pixels.std)) for each in (student, teacher)
        )
        shape = (teacher.in_channels,)  # grey images become colour images by this
        scale, shift = (np.broadcast_to(each, shape) for each in (std / wanted_std, (mean - wanted_mean) / wanted_std))
        if student.image_size == teacher.image_size:
            return cls(scale, shift, None, None)
        pairs = zip(student.image_size, teacher.image_size, strict=True)
        both = (matrix(*pair, kernel="bicubic", antialias=True, align_corners=False, offset=0.0) for pair in pairs)
        return cls(scale, shift, *both)


class Teacher(NamedTuple):
    """A trained model whose answers a student learns.

    name: name of the weights.
    checkpoint: the weights.
    columns: (classes,) the outputs of the teacher for the classes of the data.
    notes: lines about what was assumed.
    """

    name: str
    checkpoint: Checkpoint
    columns: NDArray[np.int64]
    notes: list[str]

    @property
    def checksum(self) -> str:
        """The checksum of its weights, by which a resumed run recognises them."""
        return checksum(self.checkpoint)

    def table_row(self, recipe: Recipe, student: ViTConfig) -> str:
        """Return the row of the table at the start."""
        config = self.checkpoint.config
        how = "its most likely class"
        if recipe.distillation == "soft":
            how = f"its probabilities at temperature {recipe.distillation_temperature:g}"
        size = "x".join(map(str, config.image_size))
        resized = f"; images are resized to {size} for it" if student.image_size != config.image_size else ""
        head = ", by the second head" if student.tokens.distillation else ""
        return (
            f"{self.name}, {count(config):,} parameters: {how}, {recipe.distillation_weight:.0%} of the loss{head}{resized}"
        )
