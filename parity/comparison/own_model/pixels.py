"""Classes that normalize their images by buffers, which `ViTConfig` does outside of the model."""

from itertools import permutations
from typing import NamedTuple

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.own_model.model import OwnModel, Weights, as_float64
from parity.comparison.tolerances import FLOAT64_TOLERANCE, ErrorNorms
from vit_spec import InputError

_MAX_BUFFERS = 4  # each pair of them takes a forward pass, and each block of a model may have some


class Normalization(NamedTuple):
    """A normalization of images: (pixels - mean) / std, with one number for all channels or one for each."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __str__(self) -> str:
        return f"mean {_joined(self.mean)} and standard deviation {_joined(self.std)}"

    @property
    def options(self) -> str:
        """The options that state it; division by 255 is a part of reading images, whose pixels are from 0 to 1."""
        std = self.std if self.std != (255.0,) else (1.0,)
        return f"--set pixels.mean={_joined(self.mean)} --set pixels.std={_joined(std)}"


def _joined(numbers: tuple[float, ...]) -> str:
    return ",".join(f"{each:.6g}" for each in numbers)


# Those that classes often compute without buffers.
NORMALIZATIONS = (
    Normalization((0.0,), (255.0,)),
    Normalization((0.5,), (0.5,)),
    Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    Normalization((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
)


def check_pixels(model: OwnModel, weights: Weights, images: Array, output: Array) -> None:
    """Raise InputError if a model subtracts a buffer from its images, one number per channel, and divides by another one.

    Such a model has the same output if the images are normalized before it and its buffers are 0 and 1.

    Args:
        model: the model.
        weights: its weights.
        images: images (B, H, W, C).
        output: its output for them.
    """
    channels, buffers = images.shape[-1], {**model.constants, **model.unsaved}
    values = {
        key: as_float64(value).reshape(-1)
        for key, value in buffers.items()
        if value.dtype.kind == "f" and value.size == max(value.shape, default=1) == channels
    }
    for mean, std in permutations(list(values)[:_MAX_BUFFERS], 2):
        is_identity = (values[mean] == 0).all() and (values[std] == 1).all()
        if is_identity or (values[std] == 0).any():
            continue
        neutral = {mean: np.zeros(buffers[mean].shape), std: np.ones(buffers[std].shape)}
        other = model.run({**weights, **neutral}, (images - values[mean]) / values[std])
        if ErrorNorms.of(other, output).relative_rms() <= FLOAT64_TOLERANCE:
            found = Normalization(tuple(values[mean]), tuple(values[std]))
            raise InputError(
                f"the class normalizes its images by its buffers {mean} and {std}, and ViTConfig has no such step: leave "
                f"it out in a copy of the class that has the buffers, and give {found.options}"
            )
