"""AdamW of clipped gradients as an optax transformation, to the last digit what the formula says.

Read it beside `vit_torch/optimizer.py`: what one keeps in a state and returns, the other does to its parameters.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from vit_spec import ViTConfig, rows

Tree = Any


class Moments(NamedTuple):
    """AdamW's state: updates done so far (int32), and running means of the gradient and of its square."""

    updates: Array
    mean: Tree
    square: Tree


def adamw(
    learning_rate: Callable[[Array], Array],
    *,
    clip: float,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    decays: Tree,
) -> optax.GradientTransformation:
    """Adam with decoupled weight decay (arXiv 1711.05101) of the gradients g, clipped, t = 1, 2, ...:

        m <- b1 m + (1 - b1) g
        v <- b2 v + (1 - b2) g^2
        p <- p - lr(t - 1) [ (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p ]

    `decays` has the parameters' structure; weight decay acts where it is True.

    optax computes 1 - b2^t in float32, from a b2 already rounded, and is wrong by 2e-5 there; so its updates err ten
    times more than torch's.  Here the logarithm is taken in float64 and expm1 keeps the digits of a small difference.
    """

    def init(params: Tree) -> Moments:
        return Moments(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))

    def update(grads: Tree, state: Moments, params: Tree) -> tuple[Tree, Moments]:
        grads = clip_by_global_norm(grads, clip)
        step = state.updates.astype(float)  # float32, or float64 where jax's x64 mode is on
        rate = learning_rate(step)
        unbias1, unbias2 = (-jnp.expm1((step + 1) * math.log(b)) for b in (b1, b2))
        mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mean, grads)
        square = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.square, grads)

        def change(m: Array, v: Array, p: Array, decay: bool) -> Array:
            adam = (m / unbias1) / (jnp.sqrt(v / unbias2) + eps)
            return (-rate * (adam + weight_decay * p if decay else adam)).astype(p.dtype)

        return jax.tree.map(change, mean, square, params, decays), Moments(state.updates + 1, mean, square)

    return optax.GradientTransformation(init, update)


def clip_by_global_norm(grads: Tree, limit: float) -> Tree:
    """Return all gradients scaled by min(1, limit / norm), norm being the root of the sum of all their squares.

    No epsilon is added to the norm: torch's `clip_grad_norm_` adds 1e-6, which shows in a float64 comparison, and at a
    norm of zero the minimum is 1 without it.
    """
    factor = jnp.minimum(1.0, limit / optax.tree.norm(grads))
    return jax.tree.map(lambda g: (factor * g).astype(g.dtype), grads)


def decay_mask(config: ViTConfig, params: Tree) -> Tree:
    """Return which parameters of the functional twin decay: a tree of bools, as `vit_spec.rows` says."""

    def decays(path: tuple[Any, ...], leaf: Array) -> bool:
        *modules, name = (entry.key for entry in path)
        row = ".".join([*modules, "weight" if name in ("kernel", "scale") else name])
        return rows(config)[row].decays

    return jax.tree_util.tree_map_with_path(decays, params)
