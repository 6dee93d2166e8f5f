"""Causes with a number in them, which is solved for: an eps, a scale, a base, a factor, a place."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.diagnosis import attention_variants, patches, variants
from parity.comparison.diagnosis.local import AGAIN, layer, sites, told
from parity.comparison.diagnosis.trial import CURE, Edit, Hypothesis, Trial
from vit_spec import ViTConfig, rows

Numbers = tuple[float, ...]
STEP = 1e-4
FEW = 8  # outputs; a number that is solved for may meet so many by chance
ROUNDS = 12  # of Gauss and Newton's method
EXACT, SHORT = 12, 3  # digits of a number; the short one is taken where it explains as much


class Measured(Protocol):
    """What a run of a hypothesis came to; see `parity.comparison.diagnosis.attempts.Finding`."""

    @property
    def outputs(self) -> Array: ...
    @property
    def error(self) -> float: ...


Finding = TypeVar("Finding", bound=Measured)


@dataclass(frozen=True)
class Unknown:
    """A family of causes that differ in a few numbers.

    starts: what to start from, nearest to the model as it is first.
    at: the cause at some numbers, rounded to so many digits.
    """

    starts: tuple[Numbers, ...]
    at: Callable[[Numbers, int], Hypothesis]


def fields(trial: Trial) -> Iterator[Unknown]:
    """Yield the numbers of a config, and those of formulas beside it."""
    c = trial.config
    yield _field("norms.eps", "LayerNorm eps", c.norms.eps)
    yield _field("attention.scale", "score scale", c.scale)
    if c.positions.rotary != "none":
        yield _field("positions.rotary_base", "rotary base", c.positions.rotary_base)
        yield Unknown(((1.0,), (0.5,), (2.0,)), _angles)
        if c.num_prefix:
            yield Unknown(((0.0, 0.0), (c.grid[0] / 2, c.grid[1] / 2)), _phase)
    if c.mlp.activation != "swiglu":
        yield Unknown(((1.702,), (1.0,)), _sigmoid)


def factors(c: ViTConfig) -> Iterator[Unknown]:
    """Yield the factor by which one intermediate or one parameter is multiplied, in all blocks and in one."""
    starts = ((1.0,), (0.0,), (2.0,), (-1.0,))
    for name in sites(c):
        if name.rpartition(".")[2] not in ("q", "k", "v"):  # whose factors are those of scores and heads
            yield Unknown(starts, _of_site(name))
    for name in rows(c):
        yield Unknown(starts, _of_parameter(name, None))
        for number in range(c.depth) if name.startswith("blocks.") and c.depth > 1 else ():
            yield Unknown(starts, _of_parameter(name, number))


def solve(
    unknown: Unknown,
    start: Numbers,
    best: Finding,
    run: Callable[[Hypothesis], Finding | None],
    missing: Array,
    enough: float,
) -> Finding:
    """Return what comes nearest to `missing`, the expected outputs, from a start whose finding is `best`.

    Gauss and Newton's method, with slopes from differences, and steps that are halved while they lead away.  The number
    is given in few digits where that leaves no more than `enough`.
    """
    at = start
    for _ in range(ROUNDS):
        columns = []
        for place in range(len(at)):
            ahead = run(unknown.at(tuple(n + STEP * (p == place) for p, n in enumerate(at)), EXACT))
            if ahead is None or not math.isfinite(ahead.error):
                return best
            columns.append((ahead.outputs - best.outputs).ravel() / STEP)
        steps, *_ = np.linalg.lstsq(np.stack(columns, 1), (missing - best.outputs).ravel(), rcond=None)
        steps = np.clip(steps, -2.0, 2.0)
        after, moved = None, at
        for halving in range(4):
            moved = tuple(float(n + step / 2**halving) for n, step in zip(at, steps, strict=True))
            after = run(unknown.at(moved, EXACT))
            if after is not None and after.error < best.error:
                break
        if after is None or not after.error < best.error:
            break
        at, best = moved, after
    short = run(unknown.at(at, SHORT))
    return short if short is not None and short.error <= max(best.error, enough) else best


def _field(name: str, family: str, own: float) -> Unknown:
    """A positive number of the config, by its logarithm; where it is the model's own, `apply` says that nothing changes."""
    log = math.log(own) if own > 0 else 0.0

    def at(numbers: Numbers, digits: int) -> Hypothesis:
        value = float(f"{math.exp(min(numbers[0], 80.0)):.{digits}g}")
        return Hypothesis(f"{family} is {value:.{digits}g}", family, fields={name: value})

    return Unknown(tuple((log + step * math.log(10),) for step in range(-6, 7)), at)


def _angles(numbers: Numbers, digits: int) -> Hypothesis:
    factor = float(f"{numbers[0]:.{digits}g}")
    patch = attention_variants.changed(lambda c, angles: factor * angles)
    return Hypothesis(f"rotary angles are multiplied by {factor:.{digits}g}", "rotary angles", patch=patch, cure=CURE)


def _phase(numbers: Numbers, digits: int) -> Hypothesis:
    y, x = (float(f"{number:.{digits}g}") for number in numbers)
    name = f"prefix tokens have a rotary phase of their own, that of row {y:.{digits}g} and column {x:.{digits}g}"
    return Hypothesis(name, "rotary phase of prefix tokens", patch=attention_variants.prefix_at(y, x), cure=CURE)


def _sigmoid(numbers: Numbers, digits: int) -> Hypothesis:
    slope = float(f"{numbers[0]:.{digits}g}")
    patch = variants.activation(lambda x: x * (slope * x).sigmoid())
    return Hypothesis(f"activation is x * sigmoid({slope:.{digits}g} x)", "activation", patch=patch, cure=CURE)


def _of_site(name: str) -> Callable[[Numbers, int], Hypothesis]:
    def at(numbers: Numbers, digits: int) -> Hypothesis:
        factor = float(f"{numbers[0]:.{digits}g}")
        patch = patches.at(name, lambda x: factor * x)
        what, family = f"{told(name)}: {_times(factor, digits)}", f"factor of {name}"
        return Hypothesis(what, family, patch=patch, cure=CURE, where=layer(name))

    return at


def _of_parameter(name: str, number: int | None) -> Callable[[Numbers, int], Hypothesis]:
    def at(numbers: Numbers, digits: int) -> Hypothesis:
        factor = float(f"{numbers[0]:.{digits}g}")
        edit = Edit(name, f"{factor!r} * {{w}}")
        where = name if number is None else f"{name} of block {number}"
        edit = edit if number is None else edit.confined(number)
        what, family = f"{where}: {_times(factor, digits)}", f"factor of {name}"
        return Hypothesis(what, family, edits=(edit,), where=layer(name, number), cure=AGAIN)

    return at


def _times(factor: float, digits: int) -> str:
    return "left out" if factor == 0 else f"multiplied by {factor:.{digits}g}"
