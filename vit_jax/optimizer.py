"""AdamW with gradient clipping as an optax transformation, exact to rounding.

It corresponds to `vit_torch/optimizer.py`: this one returns a state and updates, the other changes its parameters in place.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from vit_spec import ViTConfig, rows

PyTree = Any


class Moments(NamedTuple):
    """AdamW's state: the number of updates and the moments.

    Attributes:
        updates: number of updates, a scalar int32.
        mean: running mean of the gradients, a pytree with the structure of the parameters.
        square: running mean of the squared gradients, a pytree with the structure of the parameters.
    """

    updates: Array
    mean: PyTree
    square: PyTree


def adamw(
    learning_rate: Callable[[Array], Array],
    *,
    clip: float,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    decays: PyTree,
) -> optax.GradientTransformationExtraArgs:
    """Return AdamW: Adam with decoupled weight decay (arXiv 1711.05101).

    Its `update` takes an optional `sound`, a scalar bool: if it is False, the moments do not change.

    For clipped gradients g and t = 1, 2, ...:

        m <- b1 m + (1 - b1) g
        v <- b2 v + (1 - b2) g^2
        p <- p - lr(t - 1) [ (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p ]

    optax computes 1 - b2^t in float32 from a rounded b2, with an error of 2e-5; the error of its updates is therefore ten
    times the error of torch's.  Here the logarithm is computed in float64, and expm1 keeps the digits of a small
    difference.

    Args:
        learning_rate: function lr of the step, which counts from 0.
        clip: maximum global norm of the gradients.
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: epsilon in the denominator.
        weight_decay: factor of the weight decay.
        decays: pytree of bools with the structure of the parameters; weight decay applies where it is True.
    """

    def init(params: PyTree) -> Moments:
        return Moments(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))

    def update(
        grads: PyTree, state: Moments, params: PyTree, *, sound: Array | bool | None = None
    ) -> tuple[PyTree, Moments]:
        grads = clip_by_global_norm(grads, clip)
        step = state.updates.astype(float)  # float32, or float64 in jax's x64 mode
        rate = learning_rate(step)
        bias_correction1, bias_correction2 = (-jnp.expm1((step + 1) * math.log(b)) if b else 1.0 for b in (b1, b2))
        mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mean, grads)
        square = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.square, grads)
        moments = Moments(state.updates + 1, mean, square)
        if sound is not None:
            moments = jax.tree.map(lambda new, old: jnp.where(sound, new, old), moments, state)
        if jax.default_backend() == "cpu":
            # The compiler would compute the moments a second time for the parameters, and copy the old ones for that.
            moments = lax.optimization_barrier(moments)

        def parameter_update(m: Array, v: Array, p: Array, decay: bool) -> Array:
            adam = (m / bias_correction1) / (jnp.sqrt(v / bias_correction2) + eps)
            return (-rate * (adam + weight_decay * p if decay else adam)).astype(p.dtype)

        return jax.tree.map(parameter_update, moments.mean, moments.square, params, decays), moments

    return optax.GradientTransformationExtraArgs(init, update)


def clip_by_global_norm(grads: PyTree, limit: float) -> PyTree:
    """Return the gradients scaled by min(1, limit / norm), where norm is the global norm of all gradients.

    No epsilon is added to the norm.  torch's `clip_grad_norm_` adds 1e-6, which is visible in float64; it is not needed,
    because the minimum is 1 for a norm of zero.
    """
    factor = jnp.minimum(1.0, limit / optax.tree.norm(grads))
    return jax.tree.map(lambda g: (factor * g).astype(g.dtype), grads)


def decay_mask(config: ViTConfig, params: PyTree) -> PyTree:
    """Return a pytree of bools: whether weight decay applies to each parameter of the JAX twin, from `vit_spec.rows`."""

    def decays(path: tuple[Any, ...], leaf: Array) -> bool:
        *modules, name = (entry.key for entry in path)
        row = ".".join([*modules, "weight" if name in ("kernel", "scale") else name])
        return rows(config)[row].decays

    return jax.tree_util.tree_map_with_path(decays, params)
