"""Initial values of the JAX twin's parameters: the distributions in `vit_spec.rows`, sampled with `jax.random`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_spec import Law, Row, ViTConfig, position_table, rows
from vit_spec.initialisation import TRUNCATED_STD
from vit_spec.positions import rotary_frequencies

Shape = tuple[int, ...]


def draw_parameter(config: ViTConfig, path: tuple[str, ...], key: Array, shape: Shape) -> Array:
    """Return initial values of the parameter at this path, float32, from the distribution in its row."""
    row = _row(config, path)
    if row.law is None:
        return jnp.asarray(position_table(config, config.grid)[0], jnp.float32).reshape(shape)
    return _sample(row.law, key, shape)


def _row(config: ViTConfig, path: tuple[str, ...]) -> Row:
    """Return the row of a parameter; if the ViT is a submodule, its path starts with the names of the outer modules."""
    leaf = {"kernel": "weight", "scale": "weight"}.get(path[-1], path[-1])
    names = (".".join((*path[start:-1], leaf)) for start in range(len(path)))
    return next(rows(config)[name] for name in names if name in rows(config))


def _sample(law: Law, key: Array, shape: Shape) -> Array:
    match law.kind:
        case "constant":
            return jnp.full(shape, law.arguments[0], jnp.float32)
        case "normal":
            return law.std * jax.random.normal(key, shape, jnp.float32)
        case "uniform":
            return jax.random.uniform(key, shape, jnp.float32, *law.arguments)
        case "rotary":
            magnitude, angle = (jnp.asarray(each, jnp.float32) for each in rotary_frequencies(shape[2], *law.arguments))
            angle = angle + jax.random.uniform(key, (shape[1], 1), jnp.float32, 0, 2 * np.pi)
            return magnitude * jnp.stack([jnp.cos(angle), jnp.sin(angle)])
        case "trunc_normal":
            return law.std / TRUNCATED_STD * jax.random.truncated_normal(key, -2, 2, shape, jnp.float32)
    raise ValueError(f"unknown distribution {law.kind!r}: give a kind of `vit_spec.Law`, or add it to both twins")
