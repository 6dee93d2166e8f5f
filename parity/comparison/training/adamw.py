"""What one training step should do to its numbers, and which piece of an optimizer did something else.

AdamW of clipped gradients, as the docstrings of `vit_jax.optimizer` and `vit_torch.optimizer` have it, in numpy: a third
opinion, asked once the twins part.  Each piece is computed from what the twin itself had ahead of it (its gradient, its
moments, its weights), so that a wrong gradient is no fault of the optimizer, and a wrong moment none of what follows it.

A piece that is off is explained by what it is off by.  Both moments take the same gradient, the second squared, also
where clipping is wrong or decay is added to the gradient; a wrong beta shows in one moment alone.  A wrong learning rate
scales the whole change of all weights; a wrong bias correction scales what Adam does but not the decay, that of the second
moment only beside epsilon; a wrong decay adds a multiple of the weights themselves, another one for each parameter.  The
explanation that leaves the least is taken; one that leaves more than a hundredth is none.  What has none is put down to
the decay where the parameters that decay are wrong alone, and to Adam's epsilon elsewhere.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.comparison.tolerances import FUNCTION, UNIT, Array, Error

EXPLAINED = 0.01  # of what is off: an explanation that is true leaves a millionth, and one that is not a tenth
ROUNDINGS = 4  # of a weight in one step: of its decay, of the change, and of their sums


@dataclass(frozen=True)
class Setting:
    """What both optimizers are told.

    peak, warmup: the highest learning rate, and the number of steps that lead to it.
    """

    clip: float
    eps: float
    peak: float = 1e-3
    warmup: int = 10
    b1: float = 0.9
    b2: float = 0.999
    weight_decay: float = 0.1

    def learning_rate(self, step: Any) -> Any:
        """The rate of a step, counted from 0: up to the peak and down again, in arithmetic that every array has."""
        s = (step + 1) / self.warmup
        return 2 * self.peak * s / (1 + s * s)

    @property
    def options(self) -> dict[str, float]:
        """What both twins' optimizers take by name."""
        return {name: getattr(self, name) for name in ("clip", "b1", "b2", "eps", "weight_decay")}


@dataclass(frozen=True)
class Segments:
    """Where each parameter lies in a vector of them all, in the order of a state dict.

    decays: which decay, as `vit_spec.rows` says.
    """

    names: tuple[str, ...]
    slices: tuple[slice, ...]
    decays: tuple[bool, ...]

    def each(self, *vectors: Array) -> Iterator[tuple[str, bool, list[Array]]]:
        """Yield each parameter: its name, whether it decays, and its part of every vector."""
        for name, part, decays in zip(self.names, self.slices, self.decays, strict=True):
            yield name, decays, [vector[part] for vector in vectors]

    def decaying(self, vector: Array) -> Array:
        """The vector, with zeros for the parameters that do not decay."""
        found = np.zeros_like(vector)
        for _, decays, (out, part) in self.each(found, vector):
            out[...] = part if decays else 0.0
        return found


@dataclass(frozen=True)
class State:
    """A twin about one step, vectors of all parameters: the raw gradient, and what the step leaves behind."""

    gradient: Array
    mean: Array
    square: Array
    params: Array


@dataclass(frozen=True)
class Fault:
    """A piece of an optimizer that is not what it should be.

    piece: "clipping", "first moment", "second moment", "learning rate", "weight decay", "first moment's bias correction",
        "second moment's bias correction" or "epsilon".
    parameters: whose, where it is not that of all alike.
    told: what was found, and what should have been.
    """

    piece: str
    told: str
    parameters: tuple[str, ...] = ()

    @property
    def named(self) -> str:
        """The piece, and the first of the parameters."""
        more = f" and {len(self.parameters) - 1} more" if len(self.parameters) > 1 else ""
        return f"{self.piece} of {self.parameters[0]}{more}" if self.parameters else self.piece


def faults(before: State, after: State, step: int, setting: Setting, segments: Segments) -> list[Fault]:
    """Return what an optimizer did wrong in a step, counted from 0; nothing where float64 rounding explains it all."""
    return [*_moments(before, after, setting, segments), *_change(before, after, step, setting, segments)]


def _moments(before: State, after: State, setting: Setting, segments: Segments) -> Iterator[Fault]:
    """Clipping, and the two running means."""
    norm = _norm(after.gradient)
    clipped = after.gradient * min(1.0, setting.clip / norm)
    first, first_share = _mean(before.mean, after.mean, clipped, setting.b1)
    second, second_share = _mean(before.square, after.square, clipped * clipped, setting.b2)
    taken = (after.mean - setting.b1 * before.mean) / (1 - setting.b1)
    squares = (after.square - setting.b2 * before.square) / (1 - setting.b2)
    if first and second and Error.of(taken * taken, squares).relative_rms() <= EXPLAINED:  # both took the same, not this
        weight, rest = _fit(taken - clipped, segments.decaying(before.params))
        if rest <= EXPLAINED * _norm(taken - clipped):
            yield Fault("weight decay", f"{weight:.6g} of the weights is added to the gradient")
        else:
            told = f"gradients of norm {norm:.10g} become {_norm(taken):.10g}, not {min(norm, setting.clip):.10g}"
            yield Fault("clipping", told)
        return
    for name, wrong, share, beta in (("first", first, first_share, "b1"), ("second", second, second_share, "b2")):
        if wrong:
            right = 1 - getattr(setting, beta)
            told = f"it takes {share * right:.6g} of the new, where 1 - {beta} is {right:.6g}"
            yield Fault(f"{name} moment", told)


def _mean(old: Array, new: Array, value: Array, beta: float) -> tuple[bool, float]:
    """Whether a running mean is wrong, and how much of the new value it took over how much it should have."""
    wrong = Error.of(new, beta * old + (1 - beta) * value).relative_rms() > FUNCTION
    return wrong, float(np.vdot(new - beta * old, value) / ((1 - beta) * np.vdot(value, value)))


def _change(before: State, after: State, step: int, setting: Setting, segments: Segments) -> Iterator[Fault]:
    """What became of the weights, given the moments: learning rate, weight decay, bias corrections and epsilon."""
    rate, t = setting.learning_rate(step), step + 1
    mean, root = after.mean / (1 - setting.b1**t), np.sqrt(after.square / (1 - setting.b2**t))
    adam = -rate * mean / (root + setting.eps)
    decay = -rate * setting.weight_decay * segments.decaying(before.params)
    change = after.params - before.params
    left = change - (adam + decay)
    size = _norm(left)
    noise = ROUNDINGS * UNIT["float64"] * _norm(before.params)
    if size <= FUNCTION * _norm(adam + decay) + noise:
        return
    by_rate, rate_left = _fit(left, adam + decay)
    by_first, first_left = _fit(left, adam)
    by_second = _scale_of_root(-(change - decay) / rate, mean, root, setting.eps)
    second_left = _norm(change - decay + rate * mean / (by_second * root + setting.eps))
    by_decay = {
        name: (_fit(part, params), decays)
        for name, decays, (part, params) in segments.each(left, before.params)
        if _norm(part) > FUNCTION * rate * _norm(params) + noise
    }
    decay_left = math.hypot(*(rest for (_, rest), _ in by_decay.values()))
    least = min(rate_left, first_left, second_left, decay_left)
    if not least <= EXPLAINED * size and all(decays for _, decays in by_decay.values()) and not all(segments.decays):
        told = f"it is not {setting.weight_decay:g} of the weights ahead of the step"
        yield Fault("weight decay", told, tuple(by_decay))
    elif not least <= EXPLAINED * size:
        told = f"the step is not m / (sqrt(v) + {setting.eps:.3g}), by {size / _norm(adam):.1e} of it"
        yield Fault("epsilon", told)
    elif least == rate_left:
        yield Fault("learning rate", _rate_told(rate * (1 + by_rate), step, setting))
    elif least == decay_left:
        yield from _decay_faults(by_decay, rate, setting)
    elif least == first_left:
        yield Fault("first moment's bias correction", f"m is {1 + by_first:.10g} times what it should be")
    else:
        yield Fault("second moment's bias correction", f"sqrt(v) is {by_second:.10g} times what it should be")


def _norm(vector: Array) -> float:
    return float(np.linalg.norm(vector))


def _fit(left: Array, cause: Array) -> tuple[float, float]:
    """By how much of a cause something is explained best, and the norm of what is left then."""
    weight = float(np.vdot(cause, left) / np.vdot(cause, cause)) if cause.any() else 0.0
    return weight, _norm(left - weight * cause)


def _scale_of_root(adam: Array, mean: Array, root: Array, eps: float) -> float:
    """The s of adam = mean / (s root + eps), of the larger half of the entries the median."""
    large = (root >= np.median(root)) & (root > 0) & (adam != 0)
    return float(np.median((mean[large] / adam[large] - eps) / root[large])) if large.any() else 1.0


def _rate_told(found: float, step: int, setting: Setting) -> str:
    told = f"it is {found:.10g}, not {setting.learning_rate(step):.10g}"
    for other in (step - 1, step + 1):
        if math.isclose(found, setting.learning_rate(other), rel_tol=1e-9):
            told += f"; that is the rate of step {other + 1}"
    return told


def _decay_faults(found: dict[str, tuple[tuple[float, float], bool]], rate: float, setting: Setting) -> Iterator[Fault]:
    """One fault for all parameters that decay alike."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, ((weight, _), decays) in found.items():
        right = setting.weight_decay if decays else 0.0
        alike.setdefault((f"{round(right - weight / rate, 7) + 0.0:.6g}", f"{right:.6g}"), []).append(name)
    for (value, expected), names in alike.items():
        yield Fault("weight decay", f"it is {value}, not {expected}", tuple(names))
