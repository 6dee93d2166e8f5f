"""The optimizers of the JAX trainer, by name.

AdamW is this project's own (`vit_jax.optimizer`), and the PyTorch twin has the same; the others are optax's.  All clip the
gradient to a global norm first.  All use the same weight decay: learning rate x `weight_decay` x weight is subtracted; LAMB
scales this term together with its update.

LAMB scales the update of a whole layer.  The blocks share arrays, so a layer is one row of `vit_spec.rows` in one block: q,
k and v together, like the fused matrix of the published PyTorch models.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh
from optax import contrib

from train.jax.matrix_distribution import Distribution, distribute
from train.jax.parameter_tree import Tree, tree
from train.mesh import Parameter
from train.optimizer_state import is_orthogonalized
from train.recipes import Optimizer
from train.recipes.optimizer_constants import ADAFACTOR_MAX_DECAY, MIN_FACTORED_SIZE, MUON_MOMENTUM
from train.recipes.param_groups import lr_multipliers
from vit_jax.optimizer import adamw, clip_by_global_norm
from vit_spec import ViTConfig

MATRICES = contrib.MuonDimensionNumbers((1,), (2,))  # of an array (matrices, inputs, outputs)


def make_optimizer(o: Optimizer, config: ViTConfig, mesh: Mesh | None = None) -> optax.GradientTransformationExtraArgs:
    """Return the recipe's optimizer for the parameters of a config.

    Its `update` takes the learning rate as `rate`, and `sound`, a scalar bool: if it is False, the state does not change.
    The rate is a function of the step, while the optimizer counts updates, which are fewer if steps are skipped.

    mesh: the mesh that shards the parameters as `train.mesh` says, if any.
    """
    decays = tree(config, lambda parameter: parameter.row.decays)
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
        inner = _if_sound(optax.chain(_clip(o.clip), _BY_NAME[o.name](o, config, decays, mesh), optax.scale(-1.0)))
    if o.layer_decay != 1.0 or o.freeze:
        inner = _scale_updates(inner, update_scales(config, o.layer_decay, o.freeze))
    return _scale_by_rate(inner)


def update_scales(config: ViTConfig, layer_decay: float, freeze: Sequence[str]) -> Tree:
    """Return the multiplier of the learning rate of each parameter, as an array that broadcasts to it; 0 if frozen."""
    multipliers = lr_multipliers(config, layer_decay=layer_decay, freeze=freeze)

    def broadcastable(parameter: Parameter) -> np.ndarray:
        factors = multipliers[parameter.row.name]
        return factors.reshape(-1, *(1,) * (len(parameter.axes) - 1)) if parameter.is_stacked else factors

    return tree(config, broadcastable)


def frozen_mask(scales: Tree) -> Tree:
    """Return for each parameter whether it is frozen; a stacked parameter of the blocks only if it is in all blocks.

    Args:
        scales: what `update_scales` returns.
    """
    return jax.tree.map(lambda scale: not scale.any(), scales)


def zero_frozen(grads: Tree, scales: Tree) -> Tree:
    """Return the gradient with zeros for frozen parameters.

    Args:
        grads: the gradient.
        scales: what `update_scales` returns.
    """
    return jax.tree.map(lambda g, scale: jnp.where(scale > 0, g, 0).astype(g.dtype), grads, scales)


def _if_sound(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keep the state if `sound` is False."""

    def update(grads: Tree, state: Any, params: Tree, *, sound: Array | bool) -> tuple[Tree, Any]:
        updates, updated = inner.update(grads, state, params)
        return updates, jax.tree.map(lambda new, old: jnp.where(sound, new, old), updated, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _scale_by_rate(unit: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Multiply the updates for a learning rate of 1 by the rate.  All updates are linear in it, including weight decay."""

    def update(grads: Tree, state: Any, params: Tree, *, rate: Array, sound: Array | bool = True) -> tuple[Tree, Any]:
        updates, state = unit.update(grads, state, params, sound=sound)
        return jax.tree.map(lambda u: (rate * u).astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(unit.init, update)


def _scale_updates(inner: optax.GradientTransformationExtraArgs, scales: Tree) -> optax.GradientTransformationExtraArgs:
    """Multiply updates by `scales`, and leave frozen parameters out of the gradient norm that clipping uses."""

    def update(grads: Tree, state: Any, params: Tree, *, sound: Array | bool) -> tuple[Tree, Any]:
        updates, state = inner.update(zero_frozen(grads, scales), state, params, sound=sound)
        return jax.tree.map(lambda u, scale: (u * scale).astype(u.dtype), updates, scales), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _clip(limit: float) -> optax.GradientTransformation:
    return optax.stateless(lambda grads, _: clip_by_global_norm(grads, limit))


def _with_decay(direction: optax.GradientTransformation, o: Optimizer, decays: Tree) -> optax.GradientTransformation:
    """Add weight decay to an update."""
    return optax.chain(direction, optax.add_decayed_weights(o.weight_decay, decays))


def _scale_by_trust_ratio(config: ViTConfig) -> optax.GradientTransformation:
    """Scale the update of each layer with weight decay to the norm of its weights, unless one of the norms is zero."""

    def scale(update: Array, param: Array) -> Array:
        return optax.scale_by_trust_ratio().update(update, optax.EmptyState(), param)[0]

    def function(parameter: Parameter) -> Callable[[Array, Array], Array]:
        if not parameter.row.decays:
            return lambda update, _: update
        return jax.vmap(scale) if parameter.is_stacked else scale

    functions = tree(config, function)
    return optax.stateless(lambda updates, params: jax.tree.map(lambda f, u, p: f(u, p), functions, updates, params))


def _bias_correction(decay: float, updates: Array) -> Array | float:
    """Return 1 - decay^updates; expm1 keeps the digits of a small difference, as in `vit_jax.optimizer.adamw`."""
    return -jnp.expm1(updates.astype(float) * math.log(decay)) if decay else 1.0


def _scale_by_adam(o: Optimizer) -> optax.GradientTransformation:
    """Return Adam's update: optax's `scale_by_adam` with bias corrections that do not lose digits in float32."""

    def update(grads: Tree, state: optax.ScaleByAdamState, _: Tree = None) -> tuple[Tree, optax.ScaleByAdamState]:
        mu = optax.tree.update_moment(grads, state.mu, o.beta1, 1)
        nu = optax.tree.update_moment(grads, state.nu, o.beta2, 2)
        count = optax.safe_increment(state.count)
        corrections = [_bias_correction(b, count) for b in (o.beta1, o.beta2)]

        def direction(m: Array, v: Array) -> Array:
            return ((m / corrections[0]) / (jnp.sqrt(v / corrections[1]) + o.eps)).astype(m.dtype)

        return jax.tree.map(direction, mu, nu), state._replace(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(optax.scale_by_adam(o.beta1, o.beta2, o.eps).init, update)


def _per_block(inner: optax.GradientTransformation, config: ViTConfig) -> optax.GradientTransformation:
    """Transform the parameters of each block by themselves, although the blocks share arrays."""
    of_blocks = optax.GradientTransformation(jax.vmap(inner.init), jax.vmap(inner.update))
    labels = tree(config, lambda parameter: "blocks" if parameter.is_stacked else "others")
    return optax.partition({"blocks": of_blocks, "others": inner}, labels)


def _sgd(o: Optimizer, config: ViTConfig, decays: Tree, mesh: Mesh | None) -> optax.GradientTransformation:
    """Stochastic gradient descent with momentum beta1."""
    return _with_decay(optax.trace(o.beta1), o, decays)


def _lamb(o: Optimizer, config: ViTConfig, decays: Tree, mesh: Mesh | None) -> optax.GradientTransformation:
    """LAMB (arXiv 1904.00962, algorithm 2): Adam's update plus weight decay, scaled to the norm of the layer's weights.

    Layers without weight decay are not scaled, as in apex's FusedLAMB, which trained DeiT-III, and timm's Lamb.
    """
    adam = optax.chain(_scale_by_adam(o), optax.add_decayed_weights(o.weight_decay, decays))
    return optax.chain(adam, _scale_by_trust_ratio(config))


def _lion(o: Optimizer, config: ViTConfig, decays: Tree, mesh: Mesh | None) -> optax.GradientTransformation:
    """Lion, the sign of a moving average (arXiv 2302.06675).

    The paper uses a tenth of AdamW's learning rate, ten times its weight decay, and beta2 0.99.
    """
    return _with_decay(optax.scale_by_lion(o.beta1, o.beta2), o, decays)


def _adafactor(o: Optimizer, config: ViTConfig, decays: Tree, mesh: Mesh | None) -> optax.GradientTransformation:
    """Adafactor as ViTs use it (arXiv 2106.04560, 3.4): momentum beta1, factored second moments, no parameter scaling.

    The decay of the mean squared gradient is min(0.999, 1 - t^-0.8) in update t = 1, 2, ....  The mean is factored if each
    of the two longest axes of a parameter has 32 entries or more; each block has parameters of its own.  Updates are not
    clipped (big_vision/optax.py, scale_by_adafactor).  Momentum is float32; the source has bfloat16.
    """

    def decay(updates: Array, exponent: float) -> Array:
        return jnp.minimum(ADAFACTOR_MAX_DECAY, 1.0 - (updates + 1.0) ** -exponent)

    rms = optax.scale_by_factored_rms(decay_rate=0.8, decay_rate_fn=decay, min_dim_size_to_factor=MIN_FACTORED_SIZE)
    return _with_decay(optax.chain(_per_block(rms, config), optax.ema(o.beta1, debias=False)), o, decays)


def _muon(o: Optimizer, config: ViTConfig, decays: Tree, mesh: Mesh | None) -> optax.GradientTransformation:
    """Muon for the matrices of the blocks, Adam for all other parameters (arXiv 2502.16982).

    Updates of matrices are scaled so that learning rates for AdamW suit them.  beta1, beta2 and eps are Adam's; the
    matrices have a Nesterov momentum of 0.95, as in the source.  q, k, v, and the two of a gated MLP have a matrix each.
    """
    layouts = tree(
        config,
        lambda parameter: distribute(parameter, config, mesh) if is_orthogonalized(parameter.row) else optax.MaskedNode(),
    )
    labels = tree(config, lambda parameter: "muon" if is_orthogonalized(parameter.row) else "adam")
    # optax computes momentum and orthogonalization in one function.  Here an all-to-all comes between the two, so optax
    # gets a momentum of 0, and `update` computes it.
    orthogonalize = contrib.scale_by_muon(beta=0.0, weight_dimension_numbers=jax.tree.map(lambda _: MATRICES, layouts))

    def update(grads: Tree, state: contrib.MuonState, _: Tree = None) -> tuple[Tree, contrib.MuonState]:
        count, b = optax.safe_increment(state.count), MUON_MOMENTUM
        mu = optax.tree.update_moment(grads, state.mu, b, 1)
        next_correction, correction = _bias_correction(b, count + 1), _bias_correction(b, count)

        def momentum(m: Array, g: Array, layout: Distribution) -> Array:
            return layout.scatter((b * (m / next_correction) + (1 - b) * (g / correction)).astype(m.dtype))

        nesterov = jax.tree.map(momentum, mu, grads, layouts)
        updates, _ = orthogonalize.update(nesterov, orthogonalize.init(nesterov))
        return jax.tree.map(lambda u, layout: layout.gather(u), updates, layouts), state._replace(count=count, mu=mu)

    def like_adam(updates: Tree, _: Tree) -> Tree:
        """Scale the root mean square of updates to 0.2, as of Adam's; an orthogonal matrix has 1 / sqrt(longer side)."""
        return jax.tree.map(lambda u, layout: 0.2 * max(layout.matrix_shape) ** 0.5 * u, updates, layouts)

    muon = optax.chain(optax.GradientTransformation(orthogonalize.init, update), optax.stateless(like_adam))
    direction = optax.partition({"muon": muon, "adam": _scale_by_adam(o)}, labels)
    return _with_decay(direction, o, decays)


_BY_NAME = {"sgd": _sgd, "lamb": _lamb, "lion": _lion, "adafactor": _adafactor, "muon": _muon}
