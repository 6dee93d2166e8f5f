"""Pytrees in the form of the functional twin's parameters."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from parity.checkpoints.formats import get
from train.mesh import Parameter, Sizes, parameters, split
from vit_spec import ViTConfig

Tree = Any


def tree(config: ViTConfig, of: Callable[[Parameter], Any]) -> Tree:
    """Return the pytree of the parameters with what `of` returns for each."""
    return {key: _mapped(node, of) for key, node in _parameters(config).items()}


def mesh_axes(parameter: Parameter, config: ViTConfig, sizes: Sizes) -> tuple[str | None, ...]:
    """Return the mesh axis that shards each dimension of a parameter's array; None where no axis does."""
    return tuple(shard.axis for shard in split(parameter, config, sizes))  # this format merges no words: groups are 1


@lru_cache(maxsize=16)
def _parameters(config: ViTConfig) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    layouts = get("jax").layouts(config)
    for name, parameter in parameters(config, "jax").items():
        *modules, last = layouts[name].key.split("/")
        node = found
        for module in modules:
            node = node.setdefault(module, {})
        node[last] = parameter
    return found


def _mapped(node: Any, of: Callable[[Parameter], Any]) -> Any:
    return of(node) if isinstance(node, Parameter) else {key: _mapped(child, of) for key, child in node.items()}
