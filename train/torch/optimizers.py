"""The optimizers of the PyTorch trainer, by name.

They compute the updates of `train/jax/optimizers.py`, to rounding.  All clip the gradient to a global norm first.  All use
the same weight decay: learning rate x `weight_decay` x weight is subtracted; LAMB scales this term together with its
update.

torch has some of these rules, with other details: its AdamW rounds the decay (see `vit_torch.optimizer.AdamW`, which has
one learning rate for all parameters), its Muon orthogonalizes in bfloat16, and its Adafactor scales by the parameters.
Here AdamW calls torch's fused kernels, and each other rule is written out, for many parameters at once (`torch._foreach_*`,
the functions that torch's own optimizers use), and for the entries of this process if the parameters are sharded.  The
updates replace the gradients, and temporary tensors are those of one group of parameters (`tensor_groups`), so that an
update needs little memory beside the training state and the gradients.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from train.optimizer_state import is_orthogonalized
from train.recipes import Optimizer as Settings
from train.recipes.optimizer_constants import ADAFACTOR_MAX_DECAY, MIN_FACTORED_SIZE, MUON_MOMENTUM
from train.recipes.param_groups import lr_multipliers
from train.torch.matrix_distribution import MatrixDistribution
from train.torch.parameter_tree import NamedParameter, tree
from train.torch.sharding import Placement, ProcessMesh, local
from train.torch.tensor_groups import group_length, tensor_groups
from vit_spec import Row, ViTConfig

# What `train.jax` takes from optax: the defaults of `scale_by_factored_rms` and of `contrib.scale_by_muon`.
ADAFACTOR_EPSILON = 1e-30  # added to squared gradients
MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration
MUON_STEPS = 5
MUON_EPSILON = 1e-8  # added to the norm of a matrix

Moments = dict[str, list[Tensor]]  # by name; a list has one tensor for each parameter that is trained


def multiplier_of_each(settings: Settings, config: ViTConfig) -> dict[str, float]:
    """Return the multiplier of the learning rate of each parameter of the twin; 0 if it is frozen."""
    multipliers = lr_multipliers(config, layer_decay=settings.layer_decay, freeze=settings.freeze)
    return tree(config, lambda each: float(multipliers[each.parameter.row.name][() if each.block is None else each.block]))


class _Trained(NamedTuple):
    """A parameter that is trained.

    placement: where its entries are.
    entries: those on this process.
    multiplier: multiplier of the learning rate.
    """

    named: NamedParameter
    placement: Placement
    entries: Tensor
    multiplier: float


class Optimizer(ABC):
    """Clips gradients, and updates parameters in place.

    Frozen parameters are left out: they get no gradient and have no moments.

    Attributes:
        names: names of the parameters that are trained.
        placements: where the entries of each parameter are, also of frozen ones.
        moments: running means of the gradients and of their squares, float32 or wider; those with the shape of a parameter
            have its entries on this process.
        updates: number of updates so far, a scalar int64; steps that are skipped do not count.
    """

    def __init__(
        self, settings: Settings, config: ViTConfig, params: Mapping[str, Tensor], mesh: ProcessMesh | None = None
    ) -> None:
        """Prepare the optimizer.

        settings: those of the recipe.
        params: all parameters of the twin by name.
        mesh: the processes of the run; None if the parameters are not sharded.
        """
        self.settings, self.config = settings, config
        named, multipliers = tree(config, lambda each: each), multiplier_of_each(settings, config)
        self.names = [name for name in params if multipliers[name] > 0]
        self.placements = {name: mesh.placement(name, p) if mesh else Placement(p) for name, p in params.items()}
        self._trained = [
            _Trained(named[name], self.placements[name], self.placements[name].entries, multipliers[name])
            for name in self.names
        ]
        self.params, self._mesh = [each.entries for each in self._trained], mesh
        self.moments: Moments = self._initial_moments()
        self.updates = torch.zeros((), dtype=torch.int64, device=self.params[0].device)

    @torch.no_grad()
    def step(self, rate: float, sound: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Clip the gradients in place, and update the parameters.  Most optimizers overwrite the gradients.

        Args:
            rate: the learning rate.  All updates are linear in it, including weight decay.
            sound: a scalar bool; False changes no parameter, nor does a norm that is not finite.

        Returns:
            The global norm of the gradients before clipping, and whether the parameters were updated, scalars.
        """
        grads, clip = self._gradients(), self.settings.clip
        norm = self._norms(grads).norm().to(grads[0].dtype)
        sound = norm.isfinite() if sound is None else sound & norm.isfinite()
        if not self._runs_ahead and not bool(sound):
            return norm, sound
        if self._runs_ahead or bool(norm > clip):
            torch._foreach_mul_(grads, torch.where(norm > clip, clip / norm, 1.0))  # without an epsilon beside the norm
        self.updates += sound
        self._update(grads, rate, sound)
        return norm, sound

    @property
    def _runs_ahead(self) -> bool:
        """Whether the host does not wait for the device: `_update` itself then changes nothing if the step is not sound."""
        return False

    def _gradients(self) -> list[Tensor]:
        found = []
        for each in self._trained:
            parameter = each.placement.parameter
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found.append(local(parameter.grad))
        return found

    def _norms(self, tensors: list[Tensor]) -> Tensor:
        """Return the norms of tensors with the entries of the parameters on this process, over all processes, (N,).

        They are summed in float64: on CPU, torch's sums in float32 lose a digit.
        """
        norms = torch._foreach_norm(tensors, dtype=torch.float64)
        if self._mesh is not None:
            torch._foreach_mul_(norms, norms)
            self._mesh.sum_shards(norms, [each.placement for each in self._trained])
            torch._foreach_sqrt_(norms)
        return torch.stack(list(norms))

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros_like(each) for each in self.params]

    @abstractmethod
    def _initial_moments(self) -> Moments:
        """Return the moments before the first update."""

    @abstractmethod
    def _update(self, grads: list[Tensor], rate: float, sound: Tensor) -> None:
        """Update moments and parameters.  The gradients may be overwritten."""


class AdamW(Optimizer):
    """AdamW: Adam with decoupled weight decay (arXiv 1711.05101), by torch's fused kernels."""

    def _initial_moments(self) -> Moments:
        self._members: dict[tuple[float, bool], list[int]] = {}  # by multiplier, and whether weight decay applies
        for n, each in enumerate(self._trained):
            self._members.setdefault((each.multiplier, each.named.parameter.row.decays), []).append(n)
        self._never = torch.tensor(math.inf, dtype=torch.float32, device=self.params[0].device)
        return {"mean": self._zeros(), "square": self._zeros()}

    @property
    def _runs_ahead(self) -> bool:
        return self.params[0].is_cuda

    def _update(self, grads: list[Tensor], rate: float, sound: Tensor) -> None:
        for (multiplier, decays), members in self._members.items():
            arrays = (self.params, grads, self.moments["mean"], self.moments["square"])
            decay = self.settings.weight_decay if decays else 0.0
            self._update_alike([[array[n] for n in members] for array in arrays], rate * multiplier, decay, sound)

    def _update_alike(self, arrays: list[list[Tensor]], rate: float, decay: float, sound: Tensor) -> None:
        """Update parameters that have the same rate and decay.  arrays: the parameters, gradients, means and squares."""
        (params, grads, means, squares), o = arrays, self.settings
        if self._runs_ahead:
            # The kernel's bias corrections lose 3 of the 16 digits of float64, which are none of float32, and need no
            # numbers on the host.
            kernel, step, eps, skip = torch._fused_adamw_, self.updates.float(), o.eps, (~sound).float()
        else:
            # In step infinity the kernel's corrections are 1, and rate and eps contain ours.  torch's AdamW for CPUs rounds
            # the decay.
            correction1, correction2 = _bias_corrections(o, self.updates)
            if decay:
                torch._foreach_add_(params, params, alpha=-rate * decay)
            root = math.sqrt(correction2)
            kernel, step, eps, skip = torch._fused_adam_, self._never, o.eps * root, None
            rate, decay = rate * root / correction1, 0.0
        kernel(
            params,
            grads,
            means,
            squares,
            [],
            [step] * len(params),
            lr=rate,
            beta1=o.beta1,
            beta2=o.beta2,
            weight_decay=decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
            found_inf=skip,
        )


class _ByDirections(Optimizer):
    """An optimizer whose update is a direction, plus weight decay, times the learning rate."""

    _has_own_decay = False

    def _update(self, grads: list[Tensor], rate: float, sound: Tensor) -> None:
        decay = self.settings.weight_decay
        self._replace_by_directions(grads)
        for each, direction in zip(self._trained, grads, strict=True):
            if each.named.parameter.row.decays and decay and not self._has_own_decay:
                direction.add_(each.entries, alpha=decay)
            each.entries.sub_(direction.mul_(rate * each.multiplier))

    @abstractmethod
    def _replace_by_directions(self, grads: list[Tensor]) -> None:
        """Update the moments, and replace gradients by the updates for a learning rate of -1, without weight decay."""


def _bias_corrections(settings: Settings, updates: Tensor) -> tuple[float, float]:
    """Return 1 - b1^t and 1 - b2^t, accurate also where they are small, by expm1 as in `vit_jax.optimizer.adamw`."""
    t, b1, b2 = float(updates), settings.beta1, settings.beta2
    return -math.expm1(t * math.log(b1)) if b1 else 1.0, -math.expm1(t * math.log(b2))


def _adam(means: list[Tensor], squares: list[Tensor], grads: list[Tensor], settings: Settings, updates: Tensor) -> None:
    """Update the moments of Adam, and replace gradients by (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)."""
    b1, b2 = settings.beta1, settings.beta2
    correction1, correction2 = _bias_corrections(settings, updates)
    for m, v, g in tensor_groups(means, squares, grads):
        torch._foreach_lerp_(m, g, 1 - b1)
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, g, g, 1 - b2)
        roots = torch._foreach_div(v, correction2)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, settings.eps)
        torch._foreach_copy_(g, m)
        torch._foreach_div_(g, correction1)
        torch._foreach_div_(g, roots)
        del roots  # before the next group has its own


class SGD(_ByDirections):
    """Stochastic gradient descent with momentum beta1."""

    def _initial_moments(self) -> Moments:
        return {"mean": self._zeros()}

    def _replace_by_directions(self, grads: list[Tensor]) -> None:
        means = self.moments["mean"]
        torch._foreach_mul_(means, self.settings.beta1)
        torch._foreach_add_(means, grads)
        torch._foreach_copy_(grads, means)


class LAMB(_ByDirections):
    """LAMB (arXiv 1904.00962, algorithm 2): Adam's update plus weight decay, scaled to the norm of the layer's weights.

    Layers without weight decay are not scaled, nor those whose norm, or whose update's, is zero.
    """

    _has_own_decay = True

    def _initial_moments(self) -> Moments:
        return {"mean": self._zeros(), "square": self._zeros()}

    def _replace_by_directions(self, grads: list[Tensor]) -> None:
        _adam(self.moments["mean"], self.moments["square"], grads, self.settings, self.updates)
        decaying = [n for n, each in enumerate(self._trained) if each.named.parameter.row.decays]
        if not decaying:  # torch's functions refuse empty lists
            return
        updates = [grads[n] for n in decaying]
        torch._foreach_add_(updates, [self.params[n] for n in decaying], alpha=self.settings.weight_decay)
        a, b = self._norms(self.params), self._norms(grads)
        ratios = torch.where((a == 0) | (b == 0), 1.0, a / b).to(self.params[0].dtype)
        torch._foreach_mul_(updates, [ratios[n] for n in decaying])


class Lion(_ByDirections):
    """Lion, the sign of a moving average (arXiv 2302.06675)."""

    def _initial_moments(self) -> Moments:
        return {"mean": self._zeros()}

    def _replace_by_directions(self, grads: list[Tensor]) -> None:
        b1, b2 = self.settings.beta1, self.settings.beta2
        for m, g in tensor_groups(self.moments["mean"], grads):
            directions = torch._foreach_mul(m, b1)
            torch._foreach_add_(directions, g, alpha=1 - b1)
            torch._foreach_mul_(m, b2)
            torch._foreach_add_(m, g, alpha=1 - b2)
            torch._foreach_sign_(directions)
            torch._foreach_copy_(g, directions)
            del directions  # before the next group has its own


class Adafactor(_ByDirections):
    """Adafactor as ViTs use it (arXiv 2106.04560, 3.4): momentum beta1, factored second moments, no parameter scaling.

    The decay of the mean squared gradient is min(0.999, 1 - t^-0.8) in update t = 1, 2, ....  The mean is factored if each
    of the two longest axes of a parameter has 32 entries or more; q, k and v, heads and their entries are axes of their
    own, as the JAX twin stores them.
    """

    def _initial_moments(self) -> Moments:
        moments: Moments = {"mean": self._zeros(), "row": [], "column": [], "square": []}
        self._factored: list[tuple[int, int] | None] = []
        self._parts: list[tuple[slice, ...]] = []  # the entries on this process, along each axis of the row
        for each in self._trained:
            axes, sizes = self._factored_axes(each.named), self._sizes(each.named)
            self._factored.append(axes)
            row = each.named.parameter.row
            self._parts.append(self._mesh.part_of(row) if self._mesh else tuple(slice(0, size) for size in sizes))
            empty = each.entries.new_zeros(())
            rest = [[size for n, size in enumerate(sizes) if n != axis] for axis in axes or ()]
            moments["row"].append(each.entries.new_zeros(rest[1]) if axes else empty)
            moments["column"].append(each.entries.new_zeros(rest[0]) if axes else empty)
            moments["square"].append(empty if axes else torch.zeros_like(each.entries))
        return moments

    def _sizes(self, named: NamedParameter) -> list[int]:
        """Return the lengths of the axes of a row, none of them merged."""
        return [self.config.sizes[axis] for axis in named.parameter.row.axes if axis != "block"]

    def _factored_axes(self, named: NamedParameter) -> tuple[int, int] | None:
        """Return the second longest and the longest axis among those of the row, if the parameter is factored."""
        row_axes = [axis for axis in named.parameter.row.axes if axis != "block"]
        stored = [axis for axis in named.axes if axis != "1"]
        ordered = sorted(
            stored, key=lambda axis: self.config.sizes[axis]
        )  # of equal lengths the first as stored is shorter
        if len(ordered) < 2 or self.config.sizes[ordered[-2]] < MIN_FACTORED_SIZE:
            return None
        return row_axes.index(ordered[-2]), row_axes.index(ordered[-1])

    def _replace_by_directions(self, grads: list[Tensor]) -> None:
        decay = min(ADAFACTOR_MAX_DECAY, 1 - float(self.updates) ** -0.8)
        rows, columns = self._sums_of_squares(grads)
        for n, (each, grad) in enumerate(zip(self._trained, grads, strict=True)):
            if (axes := self._factored[n]) is None:
                square = self.moments["square"][n].mul_(decay).add_(_squares(grad), alpha=1 - decay)
                grad.mul_(square.rsqrt())
            else:
                (second, longest), sizes, part = axes, self._sizes(each.named), self._parts[n]
                row = self.moments["row"][n].mul_(decay).add_(rows[n] / sizes[longest], alpha=1 - decay)
                column = self.moments["column"][n].mul_(decay).add_(columns[n] / sizes[second], alpha=1 - decay)
                mean = row.mean(second - (second > longest), keepdim=True)
                own_row = (row / mean).rsqrt()[_without(part, longest)].unsqueeze(longest)
                own_column = column.rsqrt()[_without(part, second)].unsqueeze(second)
                own = grad.reshape([each.stop - each.start for each in part])
                grad.copy_((own * own_row).mul_(own_column).reshape(grad.shape))
        means, b1 = self.moments["mean"], self.settings.beta1
        torch._foreach_mul_(means, b1)
        torch._foreach_add_(means, grads, alpha=1 - b1)
        torch._foreach_copy_(grads, means)

    def _sums_of_squares(self, grads: list[Tensor]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Return the sums of the squared gradient along the longest and the second longest axis, of factored parameters.

        Each process adds up its entries, with zeros elsewhere, and the sums of all processes are added.
        """
        rows: dict[int, Tensor] = {}
        columns: dict[int, Tensor] = {}
        for n, axes in enumerate(self._factored):
            if axes is not None:
                part, (second, longest) = self._parts[n], axes
                square = _squares(grads[n].reshape([each.stop - each.start for each in part]))
                for sums, name, axis in ((rows, "row", longest), (columns, "column", second)):
                    sums[n] = torch.zeros_like(self.moments[name][n])
                    sums[n][_without(part, axis)] = square.sum(axis)
                del square  # before the next parameter has its own
        if self._mesh is not None:
            placements = [self._trained[n].placement for n in rows]
            self._mesh.sum_shards([*rows.values(), *columns.values()], placements * 2)
        return rows, columns


def _squares(grad: Tensor) -> Tensor:
    return (grad * grad).add_(ADAFACTOR_EPSILON)


def _without(part: tuple[slice, ...], axis: int) -> tuple[slice, ...]:
    return part[:axis] + part[axis + 1 :]


class Muon(_ByDirections):
    """Muon for the matrices of the blocks, Adam for all other parameters (arXiv 2502.16982).

    Updates of matrices are scaled so that learning rates for AdamW suit them.  beta1, beta2 and eps are Adam's; the
    matrices have a Nesterov momentum of 0.95, as in the source.  q, k, v, and the two of a gated MLP have a matrix each.
    """

    def _initial_moments(self) -> Moments:
        self._members: dict[Row, list[int]] = {}  # the parameters of each row that are orthogonalized
        for n, each in enumerate(self._trained):
            if is_orthogonalized(row := each.named.parameter.row):
                self._members.setdefault(row, []).append(n)
        self._distributions = {row: MatrixDistribution(row, self.config, self._mesh) for row in self._members}
        orthogonalized = {n for members in self._members.values() for n in members}
        self._others = [n for n in range(len(self._trained)) if n not in orthogonalized]
        squares = [p.new_zeros(()) if n in orthogonalized else torch.zeros_like(p) for n, p in enumerate(self.params)]
        return {"mean": self._zeros(), "square": squares}

    def _replace_by_directions(self, grads: list[Tensor]) -> None:
        if self._others:
            sources = (self.moments["mean"], self.moments["square"], grads)
            means, squares, others = ([source[n] for n in self._others] for source in sources)
            _adam(means, squares, others, self.settings, self.updates)
        for row in self._members:
            self._replace_matrices(row, grads)

    def _replace_matrices(self, row: Row, grads: list[Tensor]) -> None:
        """Update the moments of a row, and replace the gradients of all its blocks."""
        b, t, members = MUON_MOMENTUM, float(self.updates), self._members[row]
        next_correction, correction = -math.expm1((t + 1) * math.log(b)), -math.expm1(t * math.log(b))
        means, own_grads = [self.moments["mean"][n] for n in members], [grads[n] for n in members]
        torch._foreach_lerp_(means, own_grads, 1 - b)
        for mean, grad in zip(means, own_grads, strict=True):
            grad.div_(correction).mul_(1 - b).add_((mean / next_correction).mul_(b))
        layout = self._distributions[row]
        matrices = layout.scatter(layout.matrices(own_grads))
        height, width = matrices.shape[-2:]
        for group in matrices.split(group_length(height * width)):
            group.copy_(orthogonalize(group).mul_(0.2 * max(height, width) ** 0.5))
        updates = layout.gather(matrices, len(members)).reshape(len(members), *own_grads[0].shape)
        torch._foreach_copy_(own_grads, updates.unbind())


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return matrices (..., m, n) with singular values near 1, by five Newton-Schulz iterations in their own dtype."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + MUON_EPSILON)
    for _ in range(MUON_STEPS):
        x = (_square_terms(x @ x.mT) @ x).add_(x.mul_(MUON_COEFFICIENTS[0]))
    return x.mT if is_tall else x


def _square_terms(gram: Tensor) -> Tensor:
    """Return b gram + c gram², and overwrite `gram`.

    As a function, so that no iteration holds matrices of the one before.
    """
    _, b, c = MUON_COEFFICIENTS
    return ((c * gram) @ gram).add_(gram.mul_(b))


_BY_NAME: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "sgd": SGD,
    "lamb": LAMB,
    "lion": Lion,
    "adafactor": Adafactor,
    "muon": Muon,
}


def make_optimizer(
    settings: Settings, config: ViTConfig, params: Mapping[str, Tensor], mesh: ProcessMesh | None = None
) -> Optimizer:
    """Return the recipe's optimizer for the parameters of the twin."""
    return _BY_NAME[settings.name](settings, config, params, mesh)
