"""Check of a training step of either twin against AdamW in NumPy, which names the piece of an optimizer that is wrong.

The reference is AdamW with clipped gradients, as in the docstrings of `vit_jax.optimizer` and `vit_torch.optimizer`.  Each
piece is computed from the twin's own values before it (its gradient, its moments, its weights).  So a wrong gradient does
not count as a fault of the optimizer, and a wrong moment does not count as a fault of the pieces after it.

A wrong piece is identified by its effect:

- Wrong clipping, or decay added to the gradient, shows in both moments: both take the same wrong gradient, the second one
  its square.  A wrong beta shows in one moment only.
- A wrong learning rate scales the whole change of all weights.
- A wrong bias correction of the first moment scales Adam's part of the change, but not the decay.  A wrong bias correction
  of the second moment scales sqrt(v), but not epsilon.
- A wrong decay adds a multiple of the weights themselves.  The multiple may differ between parameters.

The explanation that leaves the smallest residual is reported, if the residual is at most a hundredth of the error.
Otherwise the cause is weight decay if only parameters that decay are wrong, and Adam's epsilon in all other cases.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.tolerances import FLOAT64_TOLERANCE, UNIT_ROUNDOFF, ErrorNorms

# Largest residual of an explanation, relative to the error: a right explanation leaves a millionth, a wrong one a tenth.
MAX_RESIDUAL = 0.01
ROUNDINGS = 4  # rounding errors of a weight in one step: of its decay, of the change, and of their sums


@dataclass(frozen=True)
class AdamWSettings:
    """Hyperparameters of both optimizers.

    clip: largest norm of the gradient.
    eps: Adam's epsilon.
    peak, warmup: the highest learning rate, and the number of steps until it is reached.
    b1, b2: decay rates of the first and of the second moment.
    """

    clip: float
    eps: float
    peak: float = 1e-3
    warmup: int = 10
    b1: float = 0.9
    b2: float = 0.999
    weight_decay: float = 0.1

    def learning_rate(self, step: Any) -> Any:
        """Return the learning rate of a step, counted from 0; it rises to the peak and falls again.

        step: a number, or an array of NumPy, JAX or PyTorch.
        """
        s = (step + 1) / self.warmup
        return 2 * self.peak * s / (1 + s * s)

    @property
    def options(self) -> dict[str, float]:
        """Keyword arguments of both twins' optimizers."""
        return {name: getattr(self, name) for name in ("clip", "b1", "b2", "eps", "weight_decay")}


@dataclass(frozen=True)
class ParameterSlices:
    """Slices of the parameters in a flat vector, which concatenates all parameters in the order of a state dict.

    decays: whether weight decay applies to each parameter, as `vit_spec.rows` declares.
    """

    names: tuple[str, ...]
    slices: tuple[slice, ...]
    decays: tuple[bool, ...]

    def split(self, *vectors: Array) -> Iterator[tuple[str, bool, list[Array]]]:
        """Yield for each parameter its name, whether it decays, and its part of every vector."""
        for name, part, decays in zip(self.names, self.slices, self.decays, strict=True):
            yield name, decays, [vector[part] for vector in vectors]

    def mask_decayed(self, vector: Array) -> Array:
        """Return the vector with zeros for the parameters that do not decay."""
        masked = np.zeros_like(vector)
        for _, decays, (out, part) in self.split(masked, vector):
            out[...] = part if decays else 0.0
        return masked


@dataclass(frozen=True)
class StepState:
    """State of a twin after a step, as flat vectors (see `ParameterSlices`).

    gradient: the gradient before clipping.
    mean, square: the first and the second moment.
    params: the weights after the update.
    """

    gradient: Array
    mean: Array
    square: Array
    params: Array


@dataclass(frozen=True)
class OptimizerFault:
    """A piece of an optimizer that is wrong.

    piece: "clipping", "first moment", "second moment", "learning rate", "weight decay", "first moment's bias correction",
        "second moment's bias correction" or "epsilon".
    finding: the wrong value and the expected one.
    parameters: names of the parameters that it affects; empty if it affects all.
    """

    piece: str
    finding: str
    parameters: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The piece, its first parameter, and the number of its other parameters."""
        more = f" and {len(self.parameters) - 1} more" if len(self.parameters) > 1 else ""
        return f"{self.piece} of {self.parameters[0]}{more}" if self.parameters else self.piece


def find_faults(
    before: StepState, after: StepState, step: int, settings: AdamWSettings, slices: ParameterSlices
) -> list[OptimizerFault]:
    """Return the wrong pieces of an optimizer in one step; none if float64 rounding explains every error.

    before, after: the states after the previous step and after this step.
    step: number of this step, counted from 0.
    """
    return [*_moment_faults(before, after, settings, slices), *_update_faults(before, after, step, settings, slices)]


def _moment_faults(
    before: StepState, after: StepState, settings: AdamWSettings, slices: ParameterSlices
) -> Iterator[OptimizerFault]:
    """Yield faults of clipping and of the two moments."""
    norm = _norm(after.gradient)
    clipped = after.gradient * min(1.0, settings.clip / norm)
    is_first_wrong, first_ratio = _check_moment(before.mean, after.mean, clipped, settings.b1)
    is_second_wrong, second_ratio = _check_moment(before.square, after.square, clipped * clipped, settings.b2)
    taken = (after.mean - settings.b1 * before.mean) / (1 - settings.b1)
    squares = (after.square - settings.b2 * before.square) / (1 - settings.b2)
    # Both moments took the same gradient, which is not the clipped one.
    if is_first_wrong and is_second_wrong and ErrorNorms.of(taken * taken, squares).relative_rms() <= MAX_RESIDUAL:
        weight, residual = _fit(taken - clipped, slices.mask_decayed(before.params))
        if residual <= MAX_RESIDUAL * _norm(taken - clipped):
            yield OptimizerFault("weight decay", f"{weight:.6g} of the weights is added to the gradient")
        else:
            finding = f"gradients of norm {norm:.10g} become {_norm(taken):.10g}, expected {min(norm, settings.clip):.10g}"
            yield OptimizerFault("clipping", finding)
        return
    for name, is_wrong, ratio, beta in (
        ("first", is_first_wrong, first_ratio, "b1"),
        ("second", is_second_wrong, second_ratio, "b2"),
    ):
        if is_wrong:
            right = 1 - getattr(settings, beta)
            finding = f"the weight of the new value is {ratio * right:.6g}, expected 1 - {beta} = {right:.6g}"
            yield OptimizerFault(f"{name} moment", finding)


def _check_moment(old: Array, new: Array, value: Array, beta: float) -> tuple[bool, float]:
    """Return whether a moment is wrong, and the ratio of the new value's weight in it to the expected weight."""
    is_wrong = ErrorNorms.of(new, beta * old + (1 - beta) * value).relative_rms() > FLOAT64_TOLERANCE
    return is_wrong, float(np.vdot(new - beta * old, value) / ((1 - beta) * np.vdot(value, value)))


def _update_faults(
    before: StepState, after: StepState, step: int, settings: AdamWSettings, slices: ParameterSlices
) -> Iterator[OptimizerFault]:
    """Yield faults of the update, computed from the twin's own moments.

    These are faults of the learning rate, of weight decay, of the bias corrections and of epsilon.
    """
    rate, t = settings.learning_rate(step), step + 1
    mean, root = after.mean / (1 - settings.b1**t), np.sqrt(after.square / (1 - settings.b2**t))
    adam = -rate * mean / (root + settings.eps)
    decay = -rate * settings.weight_decay * slices.mask_decayed(before.params)
    change = after.params - before.params
    error = change - (adam + decay)
    size = _norm(error)
    noise = ROUNDINGS * UNIT_ROUNDOFF["float64"] * _norm(before.params)
    if size <= FLOAT64_TOLERANCE * _norm(adam + decay) + noise:
        return
    by_rate, rate_residual = _fit(error, adam + decay)
    by_first, first_residual = _fit(error, adam)
    by_second = _fit_root_scale(-(change - decay) / rate, mean, root, settings.eps)
    second_residual = _norm(change - decay + rate * mean / (by_second * root + settings.eps))
    by_decay = {
        name: (_fit(part, params), decays)
        for name, decays, (part, params) in slices.split(error, before.params)
        if _norm(part) > FLOAT64_TOLERANCE * rate * _norm(params) + noise
    }
    decay_residual = math.hypot(*(residual for (_, residual), _ in by_decay.values()))
    least = min(rate_residual, first_residual, second_residual, decay_residual)
    if not least <= MAX_RESIDUAL * size and all(decays for _, decays in by_decay.values()) and not all(slices.decays):
        finding = f"it is not {settings.weight_decay:g} times the weights before the step"
        yield OptimizerFault("weight decay", finding, tuple(by_decay))
    elif not least <= MAX_RESIDUAL * size:
        finding = f"the step differs from m / (sqrt(v) + {settings.eps:.3g}) by {size / _norm(adam):.1e} of it"
        yield OptimizerFault("epsilon", finding)
    elif least == rate_residual:
        yield OptimizerFault("learning rate", _describe_rate(rate * (1 + by_rate), step, settings))
    elif least == decay_residual:
        yield from _decay_faults(by_decay, rate, settings)
    elif least == first_residual:
        yield OptimizerFault("first moment's bias correction", f"m is {1 + by_first:.10g} times the expected value")
    else:
        yield OptimizerFault("second moment's bias correction", f"sqrt(v) is {by_second:.10g} times the expected value")


def _norm(vector: Array) -> float:
    return float(np.linalg.norm(vector))


def _fit(error: Array, cause: Array) -> tuple[float, float]:
    """Return the factor w for which w * cause is nearest to the error, and the norm of the residual."""
    weight = float(np.vdot(cause, error) / np.vdot(cause, cause)) if cause.any() else 0.0
    return weight, _norm(error - weight * cause)


def _fit_root_scale(adam: Array, mean: Array, root: Array, eps: float) -> float:
    """Return the s in adam = mean / (s * root + eps): its median over the entries with the larger half of the roots."""
    large = (root >= np.median(root)) & (root > 0) & (adam != 0)
    return float(np.median((mean[large] / adam[large] - eps) / root[large])) if large.any() else 1.0


def _describe_rate(found: float, step: int, settings: AdamWSettings) -> str:
    """Return the found and the expected learning rate as text, and the step before or after if it has the found rate."""
    text = f"it is {found:.10g}, expected {settings.learning_rate(step):.10g}"
    for other in (step - 1, step + 1):
        if math.isclose(found, settings.learning_rate(other), rel_tol=1e-9):
            text += f"; that is the rate of step {other + 1}"
    return text


def _decay_faults(
    by_decay: dict[str, tuple[tuple[float, float], bool]], rate: float, settings: AdamWSettings
) -> Iterator[OptimizerFault]:
    """Yield one fault for each wrong value of the decay, with all parameters that have it.

    by_decay: parameter -> ((multiple of its weights in the error, residual), whether it should decay).
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, ((weight, _), decays) in by_decay.items():
        right = settings.weight_decay if decays else 0.0
        groups.setdefault((f"{round(right - weight / rate, 7) + 0.0:.6g}", f"{right:.6g}"), []).append(name)
    for (value, expected), names in groups.items():
        yield OptimizerFault("weight decay", f"it is {value}, expected {expected}", tuple(names))
