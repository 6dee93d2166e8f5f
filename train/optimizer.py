"""AdamW and gradient clipping as optax transformations, to the last digit what their formulas say."""

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
    learning_rate: Callable[[Array], Array], *, b1: float, b2: float, eps: float, weight_decay: float, decays: Tree
) -> optax.GradientTransformation:
    """Adam with decoupled weight decay (arXiv 1711.05101), t = 1, 2, ...:

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
        rate = learning_rate(state.updates)
        t = (state.updates + 1).astype(float)  # float32, or float64 where jax's x64 mode is on
        unbias1, unbias2 = (-jnp.expm1(t * math.log(b)) for b in (b1, b2))
        mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mean, grads)
        square = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.square, grads)

        def change(m: Array, v: Array, p: Array, decay: bool) -> Array:
            step = (m / unbias1) / (jnp.sqrt(v / unbias2) + eps)
            return (-rate * (step + weight_decay * p if decay else step)).astype(p.dtype)

        return jax.tree.map(change, mean, square, params, decays), Moments(state.updates + 1, mean, square)

    return optax.GradientTransformation(init, update)


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Scale all gradients by min(1, limit / norm), norm being the root of the sum of all their squares.

    No epsilon is added to the norm: torch's `clip_grad_norm_` adds 1e-6, which shows in a float64 comparison, and at a
    norm of zero the minimum is 1 without it.
    """

    def update(grads: Tree, state: optax.EmptyState, params: Tree = None) -> tuple[Tree, optax.EmptyState]:
        factor = jnp.minimum(1.0, limit / optax.tree.norm(grads))
        return jax.tree.map(lambda g: (factor * g).astype(g.dtype), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def decay_mask(config: ViTConfig, params: Tree) -> Tree:
    """Return which parameters of the functional twin decay: a tree of bools, as `vit_spec.rows` says."""

    def decays(path: tuple[Any, ...], leaf: Array) -> bool:
        *modules, name = (entry.key for entry in path)
        row = ".".join([*modules, "weight" if name in ("kernel", "scale") else name])
        return rows(config)[row].decays

    return jax.tree_util.tree_map_with_path(decays, params)
