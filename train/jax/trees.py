"""What each parameter of the functional twin is: trees in the form of its parameters."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from parity.checkpoints.formats import get
from vit_spec import Row, ViTConfig, rows

Tree = Any


class Leaf(NamedTuple):
    """One parameter.  `axes` are its array's words, in the order of its dimensions; "1" where one has no word."""

    row: Row
    axes: tuple[str, ...]

    @property
    def stacked(self) -> bool:
        """Whether the blocks share the array, one after the other on its first dimension."""
        return self.axes[0] == "block"


def tree(config: ViTConfig, of: Callable[[Leaf], Any]) -> Tree:
    """Return the tree of the parameters with what `of` makes of each."""
    return {key: _mapped(node, of) for key, node in _leaves(config).items()}


@lru_cache(maxsize=16)
def _leaves(config: ViTConfig) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for name, layout in get("jax").layouts(config).items():
        *modules, last = layout.key.split("/")
        node = found
        for module in modules:
            node = node.setdefault(module, {})
        words = tuple(dim[0].holder if dim else "1" for dim in layout.dims)
        node[last] = Leaf(rows(config)[name], words)
    return found


def _mapped(node: Any, of: Callable[[Leaf], Any]) -> Any:
    return of(node) if isinstance(node, Leaf) else {key: _mapped(child, of) for key, child in node.items()}
