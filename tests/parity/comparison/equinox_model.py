"""A model of Equinox, which is no dependency: imported by tests that skip without it."""

from typing import Any

import equinox
import jax


class Model(equinox.Module):
    """A norm and a layer."""

    norm: equinox.nn.LayerNorm
    head: equinox.nn.Linear

    def __call__(self, x: Any) -> Any:
        return self.head(self.norm(x))


def make_model(eps: float) -> Model:
    """Return the model with weights from a seed."""
    model = Model(equinox.nn.LayerNorm(8, eps=eps), equinox.nn.Linear(8, 3, key=jax.random.key(0)))
    leaves, tree = jax.tree.flatten(model)
    return jax.tree.unflatten(tree, [leaf + 0.1 if equinox.is_array(leaf) else leaf for leaf in leaves])
