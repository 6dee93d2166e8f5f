"""The optimizers of the functional twin by name: how far and where to a gradient moves the parameters.

AdamW is the twin's own, of which the PyTorch twin has the like to the last digit; the others are optax's.  All clip by
the global norm first, and all decay weights the same way: the learning rate times `weight_decay` of a weight is taken away;
LAMB scales what it takes away as it scales its update.

LAMB measures a layer as a whole.  Blocks share arrays, so a layer here is one row of `vit_spec.rows` in one block: q, k and
v together are one, as is the fused matrix of the published PyTorch models.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from optax import contrib

from train.groups import multipliers
from train.jax_trees import Leaf, tree
from train.needs import FACTORED_FROM
from train.recipes import Optimizer
from vit_jax.optimizer import adamw, clip_by_global_norm
from vit_spec import ViTConfig

# What the rules have of their own, beside the fields of a recipe's optimizer
ADAFACTOR_MEMORY = 0.999  # of the mean squared gradient, at most
MUON_MEMORY = 0.95  # of the mean gradient

Tree = Any


def optimizer(o: Optimizer, config: ViTConfig) -> optax.GradientTransformationExtraArgs:
    """Return the recipe's optimizer for the parameters of a config.

    Its update takes the learning rate too, `rate`: that is a function of the step of a run, and the optimizer counts
    updates, which are fewer where steps are left out.
    """
    decays = tree(config, lambda leaf: leaf.row.decays)
    if o.name == "adamw":
        inner = adamw(
            lambda _: jnp.ones(()),
            clip=o.clip,
            b1=o.beta1,
            b2=o.beta2,
            eps=o.eps,
            weight_decay=o.weight_decay,
            decays=decays,
        )
    else:
        inner = optax.chain(_clipped(o.clip), _NAMED[o.name](o, config, decays), optax.scale(-1.0))
    if o.layer_decay != 1.0 or o.freeze:
        inner = _paced(inner, pace(config, o.layer_decay, o.freeze))
    return _at_a_rate(inner)


def pace(config: ViTConfig, layer_decay: float, freeze: Sequence[str]) -> Tree:
    """Return what multiplies the learning rate of each parameter, in arrays that spread over it; 0 where it is frozen."""
    found = multipliers(config, layer_decay=layer_decay, freeze=freeze)

    def spread(leaf: Leaf) -> np.ndarray:
        return found[leaf.row.name].reshape(-1, *(1,) * (len(leaf.axes) - 1)) if leaf.stacked else found[leaf.row.name]

    return tree(config, spread)


def _at_a_rate(unit: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Multiply the updates of a rate of one by the rate: every rule is linear in it, decay included."""

    def update(grads: Tree, state: Any, params: Tree, *, rate: Array) -> tuple[Tree, Any]:
        updates, state = unit.update(grads, state, params)
        return jax.tree.map(lambda u: (rate * u).astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(unit.init, update)


def _paced(inner: optax.GradientTransformation, pace: Tree) -> optax.GradientTransformation:
    """Multiply updates by `pace`; what is frozen has no part in the gradient's norm either."""

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        moving = jax.tree.map(lambda g, m: jnp.where(m > 0, g, 0).astype(g.dtype), grads, pace)
        updates, state = inner.update(moving, state, params)
        return jax.tree.map(lambda u, m: (u * m).astype(u.dtype), updates, pace), state

    return optax.GradientTransformation(inner.init, update)


def _clipped(limit: float) -> optax.GradientTransformation:
    return optax.stateless(lambda grads, _: clip_by_global_norm(grads, limit))


def _decayed(direction: optax.GradientTransformation, o: Optimizer, decays: Tree) -> optax.GradientTransformation:
    """A direction, and the weights that decay."""
    return optax.chain(direction, optax.add_decayed_weights(o.weight_decay, decays))


def _trusted(config: ViTConfig) -> optax.GradientTransformation:
    """Scale the update of each layer that decays to the norm of its weights; where one of both is zero, it stays."""

    def scaled(update: Array, param: Array) -> Array:
        return optax.scale_by_trust_ratio().update(update, optax.EmptyState(), param)[0]

    def of(leaf: Leaf) -> Callable[[Array, Array], Array]:
        if not leaf.row.decays:
            return lambda update, _: update
        return jax.vmap(scaled) if leaf.stacked else scaled

    by_layer = tree(config, of)
    return optax.stateless(lambda updates, params: jax.tree.map(lambda of, u, p: of(u, p), by_layer, updates, params))


def _sgd(o: Optimizer, config: ViTConfig, decays: Tree) -> optax.GradientTransformation:
    """Stochastic gradient descent with momentum beta1."""
    return _decayed(optax.trace(o.beta1), o, decays)


def _lamb(o: Optimizer, config: ViTConfig, decays: Tree) -> optax.GradientTransformation:
    """LAMB (arXiv 1904.00962, algorithm 2): Adam's update and the decay, together scaled to the norm of a layer's weights.

    Layers that do not decay are left unscaled, as in apex's FusedLAMB, with which DeiT-III was trained, and timm's Lamb.
    """
    adam = optax.chain(optax.scale_by_adam(o.beta1, o.beta2, o.eps), optax.add_decayed_weights(o.weight_decay, decays))
    return optax.chain(adam, _trusted(config))


def _lion(o: Optimizer, config: ViTConfig, decays: Tree) -> optax.GradientTransformation:
    """Lion, the sign of a running mean (arXiv 2302.06675); its learning rate is a tenth of AdamW's, its decay tenfold.

    beta2 is its memory of the mean gradient: the paper has 0.99, so give that.
    """
    return _decayed(optax.scale_by_lion(o.beta1, o.beta2), o, decays)


def _adafactor(o: Optimizer, config: ViTConfig, decays: Tree) -> optax.GradientTransformation:
    """Adafactor as ViTs use it (arXiv 2106.04560, 3.4): momentum beta1, factored second moments, no scale of the parameter.

    The memory of the mean squared gradient is min(0.999, 1 - t^-0.8) in update t = 1, 2, ..., factored where an array's two
    longest axes have 32 entries each; no update is clipped (big_vision/optax.py, scale_by_adafactor).  Momentum is kept in
    float32, where the source has bfloat16.
    """

    def memory(updates: Array, exponent: float) -> Array:
        return jnp.minimum(ADAFACTOR_MEMORY, 1.0 - (updates + 1.0) ** -exponent)

    scaled = optax.scale_by_factored_rms(decay_rate=0.8, decay_rate_fn=memory, min_dim_size_to_factor=FACTORED_FROM)
    return _decayed(optax.chain(scaled, optax.ema(o.beta1, debias=False)), o, decays)


def _muon(o: Optimizer, config: ViTConfig, decays: Tree) -> optax.GradientTransformation:
    """Muon for the matrices of the blocks, Adam for all else; scaled so that AdamW's rates serve (arXiv 2502.16982).

    beta1, beta2 and eps are Adam's; the momentum of the matrices is Nesterov's with 0.95, as in the source.
    """

    def matrix(leaf: Leaf) -> contrib.MuonDimensionNumbers | None:
        """Inputs and outputs of a block's weights; each block, and each of q, k and v, is a matrix of its own."""
        if not leaf.stacked or not leaf.row.decays:
            return None
        inner = tuple(i for i, word in enumerate(leaf.axes) if word in ("head", "dim", "ff"))
        stream = (leaf.axes.index("width"),)
        return contrib.MuonDimensionNumbers(*((stream, inner) if leaf.row.axes[-1] == "width" else (inner, stream)))

    matrices = tree(config, matrix)
    names = jax.tree.map(lambda one: "muon" if one else "adam", matrices, is_leaf=_is_matrix)

    def of(updates: Tree) -> Tree:
        """The matrices' axes in the form of the updates, from which optax takes out what is not Muon's."""
        return jax.tree.map(lambda u, one: u if _is_masked(u) else one, updates, matrices, is_leaf=_is_masked)

    def like_adam(updates: Tree, _: Tree) -> Tree:
        """Bring the root-mean-square to 0.2, as Adam's is: orthogonal, it is one over the root of the longer side."""
        return jax.tree.map(lambda u, one: 0.2 * max(_sides(u, one)) ** 0.5 * u, updates, of(updates))

    muon = optax.chain(contrib.scale_by_muon(beta=MUON_MEMORY, weight_dimension_numbers=of), optax.stateless(like_adam))
    direction = optax.partition({"muon": muon, "adam": optax.scale_by_adam(o.beta1, o.beta2, o.eps)}, names)
    return _decayed(direction, o, decays)


def _sides(array: Array, axes: contrib.MuonDimensionNumbers) -> tuple[int, int]:
    """Inputs and outputs of each of the matrices in an array."""
    inputs, outputs = (math.prod(array.shape[i] for i in side) for side in axes)
    return inputs, outputs


def _is_matrix(node: Any) -> bool:
    return node is None or isinstance(node, contrib.MuonDimensionNumbers)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


_NAMED = {"sgd": _sgd, "lamb": _lamb, "lion": _lion, "adafactor": _adafactor, "muon": _muon}
