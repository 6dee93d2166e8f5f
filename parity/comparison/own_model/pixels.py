"""Classes that normalize their images by buffers, which `ViTConfig` does outside of the model."""

from itertools import permutations

import numpy as np

from parity.comparison.own_model.model import Array, OwnModel, Weights, as_float64
from parity.comparison.tolerances import FLOAT64_TOLERANCE, ErrorNorms
from vit_spec import InputError

_MAX_BUFFERS = 4  # each pair of them takes a forward pass, and each block of a model may have some


def check_pixels(model: OwnModel, weights: Weights, images: Array, output: Array) -> None:
    """Raise InputError if a model subtracts a buffer from its images, one number per channel, and divides by another one.

    Such a model has the same output if the images are normalized before it and its buffers are 0 and 1.

    Args:
        model: the model.
        weights: its weights.
        images: images (B, H, W, C).
        output: its output for them.
    """
    channels = images.shape[-1]
    values = {
        key: as_float64(value).reshape(-1)
        for key, value in model.constants.items()
        if value.dtype.kind == "f" and value.size == max(value.shape, default=1) == channels
    }
    for mean, std in permutations(list(values)[:_MAX_BUFFERS], 2):
        is_identity = (values[mean] == 0).all() and (values[std] == 1).all()
        if is_identity or (values[std] == 0).any():
            continue
        neutral = {mean: np.zeros(model.constants[mean].shape), std: np.ones(model.constants[std].shape)}
        other = model.run({**weights, **neutral}, (images - values[mean]) / values[std])
        if ErrorNorms.of(other, output).relative_rms() <= FLOAT64_TOLERANCE:
            fields = (
                f"--set pixels.{name}={','.join(f'{each:.6g}' for each in values[key])}"
                for name, key in (("mean", mean), ("std", std))
            )
            raise InputError(
                f"the class normalizes its images by its buffers {mean} and {std}, and ViTConfig has no such step: leave "
                f"it out in a copy of the class that has the buffers, and give {' '.join(fields)}"
            )
