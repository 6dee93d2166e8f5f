"""The size of the optimizer state of a parameter, which is the same in both trainers."""

import math

from train.mesh import Parameter
from train.recipes.optimizer_constants import MIN_FACTORED_SIZE
from vit_spec import ViTConfig


def state_size(name: str, parameter: Parameter, local_size: int, config: ViTConfig) -> int:
    """Return the number of entries of the optimizer state on one device.

    name: of the optimizer.
    local_size: entries of the parameter on the device.
    """
    if name == "adafactor":
        return local_size + _factored_size(parameter, config, local_size)
    if name == "muon":
        return local_size if is_orthogonalized(parameter) else 2 * local_size
    return {"adamw": 2, "lamb": 2, "sgd": 1, "lion": 1}[name] * local_size


def is_orthogonalized(parameter: Parameter) -> bool:
    """Whether Muon orthogonalizes the update of a parameter: the weight matrices of the blocks."""
    return parameter.is_stacked and parameter.row.decays


def _factored_size(parameter: Parameter, config: ViTConfig, local_size: int) -> int:
    """Return the number of entries of Adafactor's second moments on one device.

    Factored parameters have a row and a column along their two longest axes, replicated on every device: optax,
    transforms/_factorized.py (arXiv 1804.04235).
    """
    shape, axes = axis_lengths(parameter, config), factored_axes(parameter, config)
    return sum(math.prod(shape) // shape[i] for i in axes) if axes else local_size


def factored_axes(parameter: Parameter, config: ViTConfig) -> tuple[int, ...]:
    """Return the second longest and the longest axis, except that of the blocks, if Adafactor factors them, else ()."""
    shape = axis_lengths(parameter, config)
    axes = tuple(sorted(range(parameter.is_stacked, len(shape)), key=shape.__getitem__)[-2:])
    return axes if len(axes) == 2 and shape[axes[0]] >= MIN_FACTORED_SIZE else ()


def axis_lengths(parameter: Parameter, config: ViTConfig) -> tuple[int, ...]:
    """Return the length of each dimension of a parameter's array."""
    return tuple(config.sizes.get(word, 1) for word in parameter.axes)
