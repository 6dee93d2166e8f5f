"""Hypotheses with unknown numbers, which are solved for: an eps, a scale, a factor, a mean and a standard deviation."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.diagnosis import attention_variants, patches, variants
from parity.comparison.diagnosis.config_hypotheses import KNOWN_PIXELS
from parity.comparison.diagnosis.hypothesis import FIX_REFERENCE_CODE, Edit, Hypothesis, Trial
from parity.comparison.diagnosis.layer_hypotheses import (
    RELOAD_PARAMETER,
    display_name,
    intermediate_names,
    is_after_blocks,
    layer_of,
)
from vit_spec import Pixels, ViTConfig, rows

Numbers = tuple[float, ...]
STEP = 1e-4  # of the finite differences
MAX_ITERATIONS = 12  # of the Gauss-Newton method
EXACT_DIGITS = 12  # significant digits while a number is solved for
MAX_DEVIATIONS = 5  # a number that differs from the solved one by at most this many standard deviations fits as well
MIN_INTERVAL = 1e-3  # a relative width; narrower intervals of numbers that fit as well are not printed


class Measurement(Protocol):
    """The attributes of `parity.comparison.diagnosis.evaluator.Result` that `solve` uses."""

    @property
    def outputs(self) -> Array: ...
    @property
    def error(self) -> float: ...


Result = TypeVar("Result", bound=Measurement)


@dataclass(frozen=True)
class NumericHypothesis:
    """A family of causes with unknown numbers.

    starting_points: the numbers to start from, those of the unchanged model first.
    hypothesis_at: returns the cause for given numbers, rounded to a number of significant digits.
    is_logarithmic: whether the numbers are logarithms of those that `hypothesis_at` prints.
    """

    starting_points: tuple[Numbers, ...]
    hypothesis_at: Callable[[Numbers, int], Hypothesis]
    is_logarithmic: bool = False


def config_numbers(trial: Trial) -> Iterator[NumericHypothesis]:
    """Yield the unknown numbers of the config, and of formulas that the config does not describe."""
    c = trial.config
    yield _field("norms.eps", "LayerNorm eps", c.norms.eps)
    yield _field("attention.scale", "score scale", c.scale)
    if c.positions.rotary not in ("none", "mixed"):
        yield _field("positions.rotary_base", "rotary base", c.positions.rotary_base)
        yield NumericHypothesis(((1.0,), (0.5,), (2.0,)), _angle_factor)
        if c.num_prefix:
            yield NumericHypothesis(((0.0, 0.0), (c.grid[0] / 2, c.grid[1] / 2)), _prefix_phase)
    if not c.mlp.is_gated:
        yield NumericHypothesis(((1.702,), (1.0,)), _sigmoid_slope)
    known = (pixels for pixels in (c.pixels, *KNOWN_PIXELS.values()) if len(pixels.mean) in (1, c.in_channels))
    yield NumericHypothesis(tuple(dict.fromkeys(_normalization_numbers(c, pixels) for pixels in known)), _normalization)


def scale_factors(c: ViTConfig) -> Iterator[NumericHypothesis]:
    """Yield unknown factors of one intermediate or one parameter, in all blocks and in each single block."""
    starting_points = ((1.0,), (0.0,), (2.0,), (-1.0,))
    if c.norms.order != "post":
        yield NumericHypothesis(starting_points, _branches_factor)
    for name in intermediate_names(c):
        # A factor of q or k is also a factor of the scores, and a factor of v is also a factor of the heads.
        if name.rpartition(".")[2] not in ("q", "k", "v"):
            yield NumericHypothesis(starting_points, _intermediate_factor(name))
    for name in rows(c):
        yield NumericHypothesis(starting_points, _parameter_factor(name, None))
        for number in range(c.depth) if name.startswith("blocks.") and c.depth > 1 else ():
            yield NumericHypothesis(starting_points, _parameter_factor(name, number))


def solve(
    family: NumericHypothesis,
    start: Numbers,
    best: Result,
    evaluate: Callable[[Hypothesis], Result | None],
    expected: Array,
    independent_outputs: int,
    rounding: float,
) -> tuple[Result, int, str]:
    """Find the numbers of a family whose outputs are nearest to `expected`, with the Gauss-Newton method.

    The Jacobian comes from finite differences, and a step is halved while it increases the error.  The numbers are rounded
    to the fewest digits that fit as well.

    start, best: the starting point, and the result there.
    evaluate: runs a hypothesis and returns its result; None if it cannot be run.
    expected: the expected outputs.
    independent_outputs: how many of the expected outputs are independent; the precision of the numbers follows from it.
    rounding: the relRMS that rounding errors cause; numbers within it fit as well.

    Returns the result; the number of significant digits; and in words the interval of numbers that fit as well, or "" if it
    is narrow.
    """
    point, jacobian = start, np.zeros((expected.size, len(start)))
    for _ in range(MAX_ITERATIONS):
        columns = []
        for axis in range(len(point)):
            shifted = evaluate(
                family.hypothesis_at(tuple(n + STEP * (p == axis) for p, n in enumerate(point)), EXACT_DIGITS)
            )
            if shifted is None or not math.isfinite(shifted.error):
                return best, EXACT_DIGITS, ""
            columns.append((shifted.outputs - best.outputs).ravel() / STEP)
        jacobian = np.stack(columns, 1)
        steps, *_ = np.linalg.lstsq(jacobian, (expected - best.outputs).ravel(), rcond=None)
        steps = np.clip(steps, -2.0, 2.0)
        result, candidate = None, point
        for halving in range(4):
            candidate = tuple(float(n + step / 2**halving) for n, step in zip(point, steps, strict=True))
            result = evaluate(family.hypothesis_at(candidate, EXACT_DIGITS))
            if result is not None and result.error < best.error:
                break
        if result is None or not result.error < best.error:
            break
        point, best = candidate, result
    # A number that is k standard deviations away increases the squared error by a factor of 1 + k^2 / freedom.
    freedom = max(1, independent_outputs - len(point))
    distance = MAX_DEVIATIONS * float(np.linalg.norm(expected - best.outputs)) / math.sqrt(freedom)
    limit = max(best.error * math.sqrt(1 + MAX_DEVIATIONS**2 / freedom), rounding)
    if not family.is_logarithmic:  # no number of significant digits rounds a number near zero to zero
        zero = evaluate(family.hypothesis_at((0.0,) * len(point), 1))
        if zero is not None and zero.error <= limit:
            return zero, 1, _interval(family, point, distance, jacobian)
    for digits in range(1, EXACT_DIGITS):
        short = evaluate(family.hypothesis_at(point, digits))
        if short is not None and short.error <= limit:
            return short, digits, _interval(family, point, distance, jacobian)
    return best, EXACT_DIGITS, _interval(family, point, distance, jacobian)


def _interval(family: NumericHypothesis, point: Numbers, distance: float, jacobian: Array) -> str:
    """Return in words the interval of numbers that move the outputs by at most `distance`, in the 2-norm.

    Return "" if the interval is narrow, the family has several numbers, or the outputs do not depend on the number.
    """
    if len(point) != 1 or not (slope := float(np.linalg.norm(jacobian))):
        return ""
    ends = [point[0] - distance / slope, point[0] + distance / slope]
    low, high = (math.exp(min(end, 80.0)) for end in ends) if family.is_logarithmic else ends
    if high - low <= MIN_INTERVAL * abs(high):
        return ""
    digits = next(digits for digits in range(2, EXACT_DIGITS) if f"{low:.{digits}g}" != f"{high:.{digits}g}")
    return f"{low:.{digits}g} to {high:.{digits}g} fit as well"


def _field(name: str, family: str, value_now: float) -> NumericHypothesis:
    """Return the family of a positive number of the config, on a logarithmic scale; `value_now` is the model's value."""
    log_now = math.log(value_now) if value_now > 0 else 0.0

    def make(numbers: Numbers, digits: int) -> Hypothesis:
        value = float(f"{math.exp(min(numbers[0], 80.0)):.{digits}g}")
        return Hypothesis(f"{family} is {value:.{digits}g}", family, fields={name: value})

    starting_points = tuple((log_now + step * math.log(10),) for step in range(-6, 7))
    return NumericHypothesis(starting_points, make, is_logarithmic=True)


def _normalization_numbers(c: ViTConfig, pixels: Pixels) -> Numbers:
    """Return the mean of each channel, then the logarithm of each standard deviation."""
    values = (*pixels.mean * (c.in_channels // len(pixels.mean)), *pixels.std * (c.in_channels // len(pixels.std)))
    return (*values[: c.in_channels], *(math.log(std) for std in values[c.in_channels :]))


def _normalization(numbers: Numbers, digits: int) -> Hypothesis:
    """Return the cause for the numbers of `_normalization_numbers`, rounded to a number of decimals."""
    values = np.array(numbers)
    values[len(values) // 2 :] = np.exp(np.minimum(values[len(values) // 2 :], 80.0))
    mean, std = (tuple(map(float, each.round(digits) + 0.0)) for each in np.split(values, 2))  # -0.0 + 0.0 is 0.0
    text = f"mean ({', '.join(map(str, mean))}) and standard deviation ({', '.join(map(str, std))})"
    fields = {"pixels.mean": mean, "pixels.std": std}
    return Hypothesis(f"images are normalized by {text}", "normalization", fields=fields)


def _angle_factor(numbers: Numbers, digits: int) -> Hypothesis:
    factor = float(f"{numbers[0]:.{digits}g}")
    patch = attention_variants.change_rotary_angles(lambda c, angles: factor * angles)
    return Hypothesis(
        f"rotary angles are multiplied by {factor:.{digits}g}", "rotary angles", patch=patch, manual_fix=FIX_REFERENCE_CODE
    )


def _prefix_phase(numbers: Numbers, digits: int) -> Hypothesis:
    y, x = (float(f"{number:.{digits}g}") for number in numbers)
    name = f"prefix tokens are rotated like a patch at row {y:.{digits}g} and column {x:.{digits}g}"
    return Hypothesis(
        name,
        "rotary phase of prefix tokens",
        patch=attention_variants.prefix_rotated_as(y, x),
        manual_fix=FIX_REFERENCE_CODE,
    )


def _sigmoid_slope(numbers: Numbers, digits: int) -> Hypothesis:
    slope = float(f"{numbers[0]:.{digits}g}")
    patch = variants.replace_activation(lambda x: x * (slope * x).sigmoid())
    return Hypothesis(
        f"activation is x * sigmoid({slope:.{digits}g} x)", "activation", patch=patch, manual_fix=FIX_REFERENCE_CODE
    )


def _branches_factor(numbers: Numbers, digits: int) -> Hypothesis:
    """Return the cause that attention and MLP of all blocks have a factor, as of drop path that is left on.

    With a final norm, the reciprocal factor of the embedding gives the same outputs but for eps.
    """
    factor = float(f"{numbers[0]:.{digits}g}")

    def patch(model: Any) -> None:
        for name in ("blocks.*.attn", "blocks.*.mlp"):
            patches.patch_intermediate(name, lambda x: factor * x)(model)

    text = f"what attention and MLP add: {_factor_text(factor, digits)}"
    return Hypothesis(text, "factor of attention and MLP", patch=patch, manual_fix=FIX_REFERENCE_CODE)


def _intermediate_factor(name: str) -> Callable[[Numbers, int], Hypothesis]:
    def make(numbers: Numbers, digits: int) -> Hypothesis:
        factor = float(f"{numbers[0]:.{digits}g}")
        patch = patches.patch_intermediate(name, lambda x: factor * x)
        what, family = f"{display_name(name)}: {_factor_text(factor, digits)}", f"factor of {name}"
        after = is_after_blocks(name)
        return Hypothesis(
            what, family, patch=patch, blocks_unchanged=after, manual_fix=FIX_REFERENCE_CODE, layer=layer_of(name)
        )

    return make


def _parameter_factor(name: str, number: int | None) -> Callable[[Numbers, int], Hypothesis]:
    def make(numbers: Numbers, digits: int) -> Hypothesis:
        factor = float(f"{numbers[0]:.{digits}g}")
        edit = Edit(name, f"{factor!r} * {{w}}")
        text = name if number is None else f"{name} of block {number}"
        edit = edit if number is None else edit.in_block(number)
        what, family = f"{text}: {_factor_text(factor, digits)}", f"factor of {name}"
        after, layer = is_after_blocks(name), layer_of(name, number)
        return Hypothesis(what, family, edits=(edit,), blocks_unchanged=after, layer=layer, manual_fix=RELOAD_PARAMETER)

    return make


def _factor_text(factor: float, digits: int) -> str:
    return "left out" if factor == 0 else f"multiplied by {factor:.{digits}g}"
