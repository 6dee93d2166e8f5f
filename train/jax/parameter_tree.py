"""Pytrees with the structure of the JAX twin's parameters."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from parity.checkpoints.conversion import nest
from parity.checkpoints.formats import get
from train.mesh import AxisSizes, Parameter, parameters, shard_dims
from vit_spec import ViTConfig

Tree = Any  # a pytree; jax has no type for it


def tree(config: ViTConfig, function: Callable[[Parameter], Any]) -> Tree:
    """Return the pytree with `function(parameter)` in place of each parameter."""
    return {key: _map(node, function) for key, node in _parameters(config).items()}


def path_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the names of keys, fields and indices in a path of `jax.tree_util`, as Orbax stores them."""
    return tuple(str(next(getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name))) for key in path)


def mesh_axes(parameter: Parameter, config: ViTConfig, sizes: AxisSizes) -> tuple[str | None, ...]:
    """Return for each dimension of a parameter's array the mesh axis that shards it, or None."""
    # The groups of a shard are all 1, since this format merges no axes.
    return tuple(shard.axis for shard in shard_dims(parameter, config, sizes))


@lru_cache(maxsize=16)
def _parameters(config: ViTConfig) -> Mapping[str, Any]:
    layouts = get("jax").layouts(config)
    return nest((layouts[name].key, parameter) for name, parameter in parameters(config, "jax").items())


def _map(node: Any, function: Callable[[Parameter], Any]) -> Any:
    if isinstance(node, Parameter):
        return function(node)
    return {key: _map(child, function) for key, child in node.items()}
