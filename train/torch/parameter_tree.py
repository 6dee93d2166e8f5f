"""Dicts with the names of the PyTorch twin's parameters."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from parity.checkpoints.formats import get
from train.mesh import Parameter, parameters
from vit_spec import ViTConfig


class NamedParameter(NamedTuple):
    """A parameter of the PyTorch twin.

    parameter: its row and its dimensions.
    axes: the named axes of the row in the order in which the JAX twin stores them, without the axis of the blocks; "1" for
        length one.
    block: index of its block; None if it is in none.
    """

    parameter: Parameter
    axes: tuple[str, ...]
    block: int | None


def tree(config: ViTConfig, function: Callable[[NamedParameter], Any]) -> dict[str, Any]:
    """Return the dict with `function(parameter)` for the name of each parameter."""
    return {name: function(each) for name, each in _parameters(config).items()}


@lru_cache(maxsize=16)
def _parameters(config: ViTConfig) -> Mapping[str, NamedParameter]:
    found: dict[str, NamedParameter] = {}
    layouts, of_jax = get("torch").layouts(config), parameters(config, "jax")
    for name, parameter in parameters(config, "torch").items():
        axes = tuple(axis for axis in of_jax[name].axes if axis != "block")
        key = layouts[name].key
        for block in range(config.depth) if "{block}" in key else (None,):
            found[key.format(block=block)] = NamedParameter(parameter, axes, block)
    return found
