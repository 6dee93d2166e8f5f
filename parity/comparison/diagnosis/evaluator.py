"""Run the model of each hypothesis and measure its error from the expected outputs."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.diagnosis import numeric_hypotheses
from parity.comparison.diagnosis.chance import FEW_OUTPUTS, MAX_CHANCE, EffectDistribution
from parity.comparison.diagnosis.expected_outputs import Expected
from parity.comparison.diagnosis.hypothesis import Hypothesis, Rounding, Runner, Trial
from parity.comparison.diagnosis.numeric_hypotheses import NumericHypothesis
from parity.comparison.diagnosis.patches import Inapplicable
from parity.comparison.diagnosis.precision_hypotheses import HALF_DTYPES
from parity.comparison.progress import CountProgress
from parity.comparison.tolerances import (
    FLOAT32_OVER_FLOAT64_ROUNDOFF,
    FLOAT32_TOLERANCE,
    FLOAT64_TOLERANCE,
    MAX_ERROR_RATIO,
    MAX_TOLERANCE,
    TOLERANCE_IN_ROUNDOFFS,
    UNIT_ROUNDOFF,
    ErrorNorms,
)
from vit_spec import InputError, flops

MULTITHREADING_FLOPS = 1e9  # FLOPs of a forward pass from which several threads are faster than one

HALF_PRECISION_RUNS = 4  # runs that measure the rounding errors of a model in half precision


@dataclass(frozen=True)
class Result:
    """The outputs of a model with one or two causes applied, and their error.

    error: relRMS of the outputs from the expected ones.
    """

    causes: tuple[Hypothesis, ...]
    trial: Trial = field(repr=False)
    outputs: Array = field(repr=False)
    error: float

    @classmethod
    def of(cls, causes: tuple[Hypothesis, ...], trial: Trial, outputs: Array, expected: Expected) -> "Result":
        """Return the result with the error of the outputs; it is infinite if they are not finite."""
        with np.errstate(over="ignore", invalid="ignore"):
            error = ErrorNorms.of(outputs, expected.logits).relative_rms() if np.isfinite(outputs).all() else math.inf
        return cls(causes, trial, outputs, error)

    @property
    def name(self) -> str:
        """The names of the causes."""
        return ", and ".join(cause.name for cause in self.causes)

    @property
    def is_single_rounding(self) -> bool:
        """Whether the only cause is a lower precision."""
        return len(self.causes) == 1 and self.causes[0].is_rounding


class Evaluator:
    """An evaluator that applies hypotheses to one model and compares the outputs with the expected ones.

    trial: the unchanged model and the images.
    expected: the expected outputs for these images.
    progress: called before each model with a description, the number done and the total.

    baseline: the result of the unchanged model.
    tolerance: the relRMS within which outputs match.
    rounding_tolerance: the relRMS that the measured rounding errors of this model explain, at most `tolerance`.
    effects: the distribution of the effects of wrong causes; see `set_effects`.
    roundings: how many of the single causes that `try_each` ran are roundings.
    discarded: causes that raised an exception, each with the exception.
    """

    def __init__(self, trial: Trial, expected: Expected, progress: CountProgress | None = None) -> None:
        self.trial, self.expected = trial, expected
        forward_flops = flops(trial.config) * len(expected)
        self.runner = Runner(threads=1 if forward_flops < MULTITHREADING_FLOPS else None)
        self.progress = progress or (lambda what, done, total: None)
        self.discarded: list[str] = []
        self.baseline = self.measure((), self.trial)
        self.tolerance, self.rounding_tolerance = self._tolerances()
        self.effects, self.roundings = EffectDistribution.of([]), 0

    def _tolerances(self) -> tuple[float, float]:
        """Return `tolerance` and `rounding_tolerance`.

        The tolerance is that of the expected dtype, or a larger one if this model amplifies rounding errors.
        """
        expected = self.expected
        if expected.dtype == "float64" and self.is_float64():
            return expected.tolerance, expected.tolerance
        base = max(expected.tolerance, FLOAT32_TOLERANCE)
        if expected.dtype in HALF_DTYPES:
            amplified = MAX_ERROR_RATIO * self._half_precision_error(expected.dtype)
            return max(base, min(amplified, MAX_TOLERANCE[expected.dtype])), base
        error = self.float32_error()
        amplified = MAX_ERROR_RATIO * min(error, FLOAT32_OVER_FLOAT64_ROUNDOFF * FLOAT64_TOLERANCE)
        tolerance = max(base, amplified)
        return tolerance, min(tolerance, max(MAX_ERROR_RATIO * error, expected.rounding.error))

    def is_float64(self) -> bool:
        """Return whether the weights are float64."""
        return self.trial.weights["patch_embed.proj.weight"].dtype == np.float64

    def float32_error(self) -> float:
        """Return the relRMS between the outputs in float32 and in float64."""
        return self._rounding_error(self.trial, Rounding("float32"))

    def _rounding_error(self, trial: Trial, rounding: Rounding) -> float:
        """Return the relRMS between the outputs of a trial with a rounding, as in `Trial`, and those of the baseline."""
        return self.difference(replace(trial, rounding=rounding, blocks_key=(f"{rounding} {trial.blocks_key}",)))

    def _half_precision_error(self, dtype: str) -> float:
        """Return the largest relRMS between the outputs in half precision and those of the baseline.

        Amplified rounding errors point in few directions, so one run may have a small error by chance.  Others run with
        other rounding errors of the weights.
        """
        perturbed = (self.perturb_weights(dtype, seed) for seed in range(HALF_PRECISION_RUNS - 1))
        return max(self._rounding_error(trial, Rounding(dtype)) for trial in (self.trial, *perturbed))

    def perturb_weights(self, dtype: str, seed: int = 0) -> Trial:
        """Return the trial with every weight changed by up to one rounding error of a dtype."""
        rng = np.random.default_rng(seed)
        roundoff = UNIT_ROUNDOFF[dtype]
        weights = {
            name: array * (1 + rng.uniform(-roundoff, roundoff, array.shape)).astype(array.dtype)
            for name, array in self.trial.weights.items()
        }
        return replace(self.trial, weights=weights, blocks_key=(f"weights perturbed by {dtype}, seed {seed}",))

    def difference(self, trial: Trial) -> float:
        """Return the relRMS between the outputs of a trial and those of the baseline; 0 if they are not finite."""
        outputs = self.runner.run(trial)
        return ErrorNorms.of(outputs, self.baseline.outputs).relative_rms() if np.isfinite(outputs).all() else 0.0

    def measure(self, causes: tuple[Hypothesis, ...], trial: Trial, expected: Expected | None = None) -> Result:
        """Run a trial and return its outputs and their error; `causes` are the causes that are applied in this trial."""
        return Result.of(causes, trial, self.runner.run(trial), expected or self.expected)

    def try_causes(
        self, causes: tuple[Hypothesis, ...], base: Trial | None = None, expected: Expected | None = None
    ) -> Result | None:
        """Apply causes one after another and run the model; return None if a cause does not apply to it or raises.

        A wrong model may raise any exception, and the diagnosis must continue.  Causes that raise are added to `discarded`;
        the tests check that it stays empty.
        """
        trial: Trial | None = self.trial if base is None else base
        try:
            for cause in causes:
                trial = cause.apply(trial) if trial is not None else None
            return self.measure(causes, trial, expected) if trial is not None else None
        except (Inapplicable, InputError):
            return None
        except Exception as error:
            self.discarded.append(f"{', and '.join(cause.name for cause in causes)}: {type(error).__name__}: {error}")
            return None

    def try_each(self, what: str, hypotheses: list[Hypothesis]) -> list[Result]:
        """Try each cause separately; return the results of those that could be run.

        what: description for the progress callback.
        """
        results = []
        for done, cause in enumerate(hypotheses):
            self.progress(what, done, len(hypotheses))
            result = self.try_causes((cause,))
            if result is not None:
                results.append(result)
        self.roundings += sum(result.is_single_rounding for result in results)
        return results

    def set_effects(self, results: Iterable[Result]) -> None:
        """Set `effects` from the results of single causes.

        Effects of roundings are left out, because a rounding changes each output separately.
        """
        self.effects = EffectDistribution.of(
            result.outputs - self.baseline.outputs
            for result in results
            if result.outputs.shape == self.baseline.outputs.shape
            and math.isfinite(result.error)
            and not any(cause.is_rounding for cause in result.causes)
        )

    @property
    def independent_outputs(self) -> int:
        """Number of independent outputs: directions in which the effects of wrong causes exceed rounding errors."""
        resolution = self.tolerance / TOLERANCE_IN_ROUNDOFFS
        return self.effects.independent_outputs(resolution / self.baseline.error) if self.baseline.error else 0

    def is_by_chance(self, result: Result, before: float | None = None) -> bool:
        """Return whether one of the models that were run may be wrong and have an error as small as this one by chance.

        before: the error without the cause; by default that of the unchanged model.
        """
        before = self.baseline.error if before is None else before
        numbers = sum(cause.solved_numbers for cause in result.causes)
        models = self.roundings if result.is_single_rounding else self.runner.run_count
        remaining = result.error / before if before else 1.0
        return self.effects.chance(remaining, numbers, models) > MAX_CHANCE

    def solve_each(self, families: Iterable[NumericHypothesis]) -> list[Result]:
        """Return the best result of each family; an empty list if too few outputs are independent to solve for numbers."""
        if self.independent_outputs <= FEW_OUTPUTS:
            return []
        results: list[Result] = []
        for family in families:
            attempts = [
                (start, self.try_one(family.hypothesis_at(start, numeric_hypotheses.EXACT_DIGITS)))
                for start in family.starting_points
            ]
            runnable = [(start, result) for start, result in attempts if result is not None and math.isfinite(result.error)]
            if not runnable:
                continue
            start, best = min(runnable, key=lambda pair: pair[1].error)
            solved, digits, interval = numeric_hypotheses.solve(
                family,
                start,
                best,
                self.try_one,
                self.expected.logits,
                self.independent_outputs,
                self.rounding_tolerance / MAX_ERROR_RATIO,
            )
            causes = tuple(
                replace(cause, solved_numbers=len(start), solved_digits=digits, interval=interval)
                for cause in solved.causes
            )
            results.append(replace(solved, causes=causes))
        return results

    def try_one(self, hypothesis: Hypothesis) -> Result | None:
        """Try one cause; return the baseline if it changes nothing, None if it cannot be run."""
        return self.try_causes((hypothesis,)) or (self.baseline if hypothesis.apply(self.trial) is None else None)
