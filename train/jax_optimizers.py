"""The optimizers of the functional twin by name: how far and where to a gradient moves the parameters.

AdamW is the twin's own, of which the PyTorch twin has the like to the last digit; the others are optax's.  All clip by
the global norm first, and all decay weights the same way: the learning rate times `weight_decay` of a weight is taken away.
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
from train.recipes import Optimizer
from vit_jax.optimizer import adamw, clip_by_global_norm
from vit_spec import ViTConfig

Tree = Any
Rate = Callable[[Array], Array]


def optimizer(o: Optimizer, rate: Rate, config: ViTConfig) -> optax.GradientTransformation:
    """Return the recipe's optimizer for the parameters of a config.

    rate: the learning rate of the update that follows so many others.
    """
    decays = tree(config, lambda leaf: leaf.row.decays)
    if o.name == "adamw":
        inner = adamw(rate, clip=o.clip, b1=o.beta1, b2=o.beta2, eps=o.eps, weight_decay=o.weight_decay, decays=decays)
    else:
        inner = optax.chain(_clipped(o.clip), _NAMED[o.name](o, rate, config, decays))
    if o.layer_decay == 1.0 and not o.freeze:
        return inner
    return _paced(inner, pace(config, o.layer_decay, o.freeze))


def pace(config: ViTConfig, layer_decay: float, freeze: Sequence[str]) -> Tree:
    """Return what multiplies the learning rate of each parameter, in arrays that spread over it; 0 where it is frozen."""
    found = multipliers(config, layer_decay=layer_decay, freeze=freeze)

    def spread(leaf: Leaf) -> np.ndarray:
        return found[leaf.row.name].reshape(-1, *(1,) * (len(leaf.axes) - 1)) if leaf.stacked else found[leaf.row.name]

    return tree(config, spread)


def _paced(inner: optax.GradientTransformation, pace: Tree) -> optax.GradientTransformation:
    """Multiply updates by `pace`; what is frozen has no part in the gradient's norm either."""

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        moving = jax.tree.map(lambda g, m: jnp.where(m > 0, g, 0).astype(g.dtype), grads, pace)
        updates, state = inner.update(moving, state, params)
        return jax.tree.map(lambda u, m: (u * m).astype(u.dtype), updates, pace), state

    return optax.GradientTransformation(inner.init, update)


def _clipped(limit: float) -> optax.GradientTransformation:
    return optax.stateless(lambda grads, _: clip_by_global_norm(grads, limit))


def _decayed(
    direction: optax.GradientTransformation, o: Optimizer, rate: Rate, decays: Tree
) -> optax.GradientTransformation:
    """Go against a direction and the weights that decay, at the learning rate."""
    return optax.chain(direction, optax.add_decayed_weights(o.weight_decay, decays), optax.scale_by_learning_rate(rate))


def _sgd(o: Optimizer, rate: Rate, config: ViTConfig, decays: Tree) -> optax.GradientTransformation:
    """Stochastic gradient descent with momentum beta1."""
    return _decayed(optax.trace(o.beta1), o, rate, decays)


def _lamb(o: Optimizer, rate: Rate, config: ViTConfig, decays: Tree) -> optax.GradientTransformation:
    """LAMB (arXiv 1904.00962): Adam's update and the decay, each array's together scaled to the norm of its weights."""
    adam = optax.chain(optax.scale_by_adam(o.beta1, o.beta2, o.eps), optax.add_decayed_weights(o.weight_decay, decays))
    return optax.chain(adam, optax.scale_by_trust_ratio(), optax.scale_by_learning_rate(rate))


def _lion(o: Optimizer, rate: Rate, config: ViTConfig, decays: Tree) -> optax.GradientTransformation:
    """Lion, the sign of a running mean (arXiv 2302.06675); its learning rate is a tenth of AdamW's, its decay tenfold."""
    return _decayed(optax.scale_by_lion(o.beta1, o.beta2), o, rate, decays)


def _adafactor(o: Optimizer, rate: Rate, config: ViTConfig, decays: Tree) -> optax.GradientTransformation:
    """Adafactor as ViTs use it (arXiv 2106.04560, 3.4): momentum, factored second moments, no scale of the parameter."""
    against = optax.adafactor(multiply_by_parameter_scale=False, momentum=o.beta1)
    return _decayed(optax.chain(against, optax.scale(-1.0)), o, rate, decays)


def _muon(o: Optimizer, rate: Rate, config: ViTConfig, decays: Tree) -> optax.GradientTransformation:
    """Muon for the matrices of the blocks, Adam for all else; scaled so that AdamW's rates serve (arXiv 2502.16982)."""

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

    muon = optax.chain(contrib.scale_by_muon(weight_dimension_numbers=of), optax.stateless(like_adam))
    direction = optax.partition({"muon": muon, "adam": optax.scale_by_adam(o.beta1, o.beta2, o.eps)}, names)
    return _decayed(direction, o, rate, decays)


def _sides(array: Array, axes: contrib.MuonDimensionNumbers) -> tuple[int, int]:
    """Inputs and outputs of each of the matrices in an array."""
    inputs, outputs = (math.prod(array.shape[i] for i in side) for side in axes)
    return inputs, outputs


def _is_matrix(node: Any) -> bool:
    return node is None or isinstance(node, contrib.MuonDimensionNumbers)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


_NAMED = {"sgd": _sgd, "lamb": _lamb, "lion": _lion, "adafactor": _adafactor, "muon": _muon}
