"""The optimizers of the functional twin by name: how far and where to a gradient moves the parameters.

AdamW is the twin's own, of which the PyTorch twin has the like to the last digit; the others are optax's.  All clip by
the global norm first, and all decay weights the same way: the learning rate times `weight_decay` of a weight is taken away;
LAMB scales what it takes away as it scales its update.

LAMB measures a layer as a whole.  Blocks share arrays, so a layer here is one row of `vit_spec.rows` in one block: q, k and
v together are one, as is the fused matrix of the published PyTorch models.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optax import contrib

from train.jax.optimizer_state import FACTORED_FROM, dealt, is_turned
from train.jax.parameter_tree import mesh_axes, tree
from train.mesh import AXES, Parameter
from train.recipes import Optimizer
from train.recipes.param_groups import multipliers
from vit_jax.optimizer import adamw, clip_by_global_norm
from vit_spec import ViTConfig

# What the rules have of their own, beside the fields of a recipe's optimizer
ADAFACTOR_MEMORY = 0.999  # of the mean squared gradient, at most
MUON_MEMORY = 0.95  # of the mean gradient
MATRICES = contrib.MuonDimensionNumbers((1,), (2,))  # of an array (matrices, inputs, outputs)

Tree = Any


def optimizer(o: Optimizer, config: ViTConfig, mesh: Mesh | None = None) -> optax.GradientTransformationExtraArgs:
    """Return the recipe's optimizer for the parameters of a config, as `train.mesh` lays them out on a mesh, if on one.

    Its update takes the learning rate too, `rate`: that is a function of the step of a run, and the optimizer counts
    updates, which are fewer where steps are left out.
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
        inner = optax.chain(_clipped(o.clip), _NAMED[o.name](o, config, decays, mesh), optax.scale(-1.0))
    if o.layer_decay != 1.0 or o.freeze:
        inner = _paced(inner, pace(config, o.layer_decay, o.freeze))
    return _at_a_rate(inner)


def pace(config: ViTConfig, layer_decay: float, freeze: Sequence[str]) -> Tree:
    """Return what multiplies the learning rate of each parameter, in arrays that spread over it; 0 where it is frozen."""
    found = multipliers(config, layer_decay=layer_decay, freeze=freeze)

    def spread(parameter: Parameter) -> np.ndarray:
        factors = found[parameter.row.name]
        return factors.reshape(-1, *(1,) * (len(parameter.axes) - 1)) if parameter.stacked else factors

    return tree(config, spread)


def frozen(o: Optimizer, config: ViTConfig) -> Tree:
    """Return which parameters stay as they are, in all blocks if they are a block's."""
    return jax.tree.map(lambda rates: not rates.any(), pace(config, o.layer_decay, o.freeze))


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

    def of(parameter: Parameter) -> Callable[[Array, Array], Array]:
        if not parameter.row.decays:
            return lambda update, _: update
        return jax.vmap(scaled) if parameter.stacked else scaled

    by_layer = tree(config, of)
    return optax.stateless(lambda updates, params: jax.tree.map(lambda of, u, p: of(u, p), by_layer, updates, params))


def _sgd(o: Optimizer, config: ViTConfig, decays: Tree, mesh: Mesh | None) -> optax.GradientTransformation:
    """Stochastic gradient descent with momentum beta1."""
    return _decayed(optax.trace(o.beta1), o, decays)


def _lamb(o: Optimizer, config: ViTConfig, decays: Tree, mesh: Mesh | None) -> optax.GradientTransformation:
    """LAMB (arXiv 1904.00962, algorithm 2): Adam's update and the decay, together scaled to the norm of a layer's weights.

    Layers that do not decay are left unscaled, as in apex's FusedLAMB, with which DeiT-III was trained, and timm's Lamb.
    """
    adam = optax.chain(optax.scale_by_adam(o.beta1, o.beta2, o.eps), optax.add_decayed_weights(o.weight_decay, decays))
    return optax.chain(adam, _trusted(config))


def _lion(o: Optimizer, config: ViTConfig, decays: Tree, mesh: Mesh | None) -> optax.GradientTransformation:
    """Lion, the sign of a running mean (arXiv 2302.06675); its learning rate is a tenth of AdamW's, its decay tenfold.

    beta2 is its memory of the mean gradient: the paper has 0.99, so give that.
    """
    return _decayed(optax.scale_by_lion(o.beta1, o.beta2), o, decays)


def _adafactor(o: Optimizer, config: ViTConfig, decays: Tree, mesh: Mesh | None) -> optax.GradientTransformation:
    """Adafactor as ViTs use it (arXiv 2106.04560, 3.4): momentum beta1, factored second moments, no scale of the parameter.

    The memory of the mean squared gradient is min(0.999, 1 - t^-0.8) in update t = 1, 2, ..., factored where an array's two
    longest axes have 32 entries each; no update is clipped (big_vision/optax.py, scale_by_adafactor).  Momentum is kept in
    float32, where the source has bfloat16.
    """

    def memory(updates: Array, exponent: float) -> Array:
        return jnp.minimum(ADAFACTOR_MEMORY, 1.0 - (updates + 1.0) ** -exponent)

    scaled = optax.scale_by_factored_rms(decay_rate=0.8, decay_rate_fn=memory, min_dim_size_to_factor=FACTORED_FROM)
    return _decayed(optax.chain(scaled, optax.ema(o.beta1, debias=False)), o, decays)


def _muon(o: Optimizer, config: ViTConfig, decays: Tree, mesh: Mesh | None) -> optax.GradientTransformation:
    """Muon for the matrices of the blocks, Adam for all else; scaled so that AdamW's rates serve (arXiv 2502.16982).

    beta1, beta2 and eps are Adam's; the momentum of the matrices is Nesterov's with 0.95, as in the source.
    """
    deals = tree(config, lambda parameter: _deal(parameter, config, mesh) if is_turned(parameter) else optax.MaskedNode())
    names = tree(config, lambda parameter: "muon" if is_turned(parameter) else "adam")
    # optax takes the mean and turns it in one; here matrices change hands in between, so its own has no memory.
    turned = contrib.scale_by_muon(beta=0.0, weight_dimension_numbers=jax.tree.map(lambda _: MATRICES, deals))

    def update(grads: Tree, state: contrib.MuonState, _: Tree = None) -> tuple[Tree, contrib.MuonState]:
        count, b = optax.safe_increment(state.count), MUON_MEMORY
        mean = optax.tree.update_moment(grads, state.mu, b, 1)
        then, now = optax.tree.bias_correction(mean, b, count + 1), optax.tree.bias_correction(grads, b, count)
        ahead = jax.tree.map(lambda m, g, deal: deal.out(b * m + (1 - b) * g), then, now, deals)
        updates, _ = turned.update(ahead, turned.init(ahead))
        return jax.tree.map(lambda u, deal: deal.back(u), updates, deals), state._replace(count=count, mu=mean)

    def like_adam(updates: Tree, _: Tree) -> Tree:
        """Bring the root-mean-square to 0.2, as Adam's is: orthogonal, it is one over the root of the longer side."""
        return jax.tree.map(lambda u, deal: 0.2 * max(deal.sides) ** 0.5 * u, updates, deals)

    muon = optax.chain(optax.GradientTransformation(turned.init, update), optax.stateless(like_adam))
    direction = optax.partition({"muon": muon, "adam": optax.scale_by_adam(o.beta1, o.beta2, o.eps)}, names)
    return _decayed(direction, o, decays)


@dataclass(frozen=True)
class _Deal:
    """How the matrices in an array are dealt out to the devices of a mesh, so that each turns whole ones of its own.

    order: the array's axes: those that count matrices, inputs, outputs; shape: how long they are.
    counting, inputs: how many of these axes count matrices, and how many are inputs.
    hands, each: devices along each of the mesh's axes over which the matrices are dealt out; matrices of a device.
    places: where (*hands, each, *inputs, *outputs) lies: one axis of the mesh after the other moves from matrices to hands.
    """

    order: tuple[int, ...]
    shape: tuple[int, ...]
    counting: int
    inputs: int
    hands: tuple[int, ...]
    each: int
    places: tuple[NamedSharding, ...]

    @property
    def _matrix(self) -> tuple[int, ...]:
        return self.shape[self.counting :]

    @property
    def sides(self) -> tuple[int, int]:
        """Inputs and outputs of a matrix."""
        return math.prod(self._matrix[: self.inputs]), math.prod(self._matrix[self.inputs :])

    def out(self, x: Array) -> Array:
        """Deal out an array of the parameter's shape: (hands * each, inputs, outputs), with zeros for what is missing."""
        x = x.transpose(self.order).reshape(-1, *self._matrix)
        missing = math.prod(self.hands) * self.each - len(x)
        x = jnp.pad(x, ((0, missing), *((0, 0),) * len(self._matrix))).reshape(*self.hands, self.each, *self._matrix)
        for place in self.places:
            x = jax.lax.with_sharding_constraint(x, place)
        return x.reshape(-1, *self.sides)

    def back(self, x: Array) -> Array:
        """Gather in what `out` has dealt out."""
        x = x.reshape(*self.hands, self.each, *self._matrix)
        for place in reversed(self.places):
            x = jax.lax.with_sharding_constraint(x, place)
        x = x.reshape(-1, *self._matrix)[: math.prod(self.shape[: self.counting])]
        return x.reshape(self.shape).transpose(np.argsort(self.order))


def _deal(parameter: Parameter, config: ViTConfig, mesh: Mesh | None) -> _Deal:
    """Each block has a matrix in an array, and each of q, k and v."""
    inner = tuple(i for i, word in enumerate(parameter.axes) if word in ("head", "dim", "ff"))
    stream = (parameter.axes.index("width"),)
    inputs, outputs = (stream, inner) if parameter.row.axes[-1] == "width" else (inner, stream)
    counting = tuple(i for i in range(len(parameter.axes)) if i not in inner + stream)
    order = counting + inputs + outputs
    shape = tuple(config.sizes[parameter.axes[i]] for i in order)
    sizes = mesh.shape if mesh is not None else dict.fromkeys(AXES, 1)
    along, each = dealt(parameter, config, sizes)
    places = []
    if mesh is not None and along:
        taken = mesh_axes(parameter, config, sizes)
        spec: list[str | None] = [*(None for _ in along), None, *(taken[i] for i in inputs + outputs)]
        places.append(NamedSharding(mesh, PartitionSpec(*spec)))
        for hand, name in enumerate(along):
            spec = [None if other == name else other for other in spec]
            spec[hand] = name
            places.append(NamedSharding(mesh, PartitionSpec(*spec)))
    hands = tuple(sizes[name] for name in along)
    return _Deal(order, shape, len(counting), len(inputs), hands, each, tuple(places))


_NAMED = {"sgd": _sgd, "lamb": _lamb, "lion": _lion, "adafactor": _adafactor, "muon": _muon}
