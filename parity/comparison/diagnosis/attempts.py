"""Run hypotheses, one model each, and measure how near each comes to the expected outputs."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.diagnosis import solving
from parity.comparison.diagnosis.expectations import Expected
from parity.comparison.diagnosis.patches import Inapplicable
from parity.comparison.diagnosis.solving import Unknown
from parity.comparison.diagnosis.trial import Hypothesis, Runner, Trial
from parity.comparison.tolerances import COARSER, FUNCTION, PRECISION, RATIO_MAX, Error
from vit_spec import InputError, flops

SHARED = 1e9  # operations of a pass that are worth sharing among threads

Progress = Callable[[str, int, int], None]  # what is tried, how many are done, of how many


@dataclass(frozen=True)
class Finding:
    """A cause, or two, and how near to the expected outputs it comes.

    error: relRMS of the outputs, with this cause taken into account.
    """

    causes: tuple[Hypothesis, ...]
    trial: Trial = field(repr=False)
    outputs: Array = field(repr=False)
    error: float

    @property
    def name(self) -> str:
        """The causes in words."""
        return ", and ".join(cause.name for cause in self.causes)


class Attempts:
    """Models that were tried, on images whose outputs are known.

    trial: the model and the images.
    expected: the outputs of these images.
    progress: called ahead of each model, with what is tried, how many are done, and of how many.

    before: the model as it is.
    bar: the relRMS within which outputs match.
    discarded: causes that could not be run, each with the reason.
    """

    def __init__(self, trial: Trial, expected: Expected, progress: Progress | None = None) -> None:
        self.trial, self.expected = trial, expected
        work = flops(trial.config) * len(expected)
        self.runner = Runner(threads=1 if work < SHARED else None)
        self.progress = progress or (lambda what, done, total: None)
        self.discarded: list[str] = []
        self.before = self.find((), self.trial)
        self.bar = self._bar()

    def _bar(self) -> float:
        """What the expected outputs' type allows, or more where this function amplifies the rounding of float32."""
        if self.expected.dtype == "float64" and self.is_float64():
            return self.expected.bar
        return max(self.expected.bar, PRECISION, RATIO_MAX * min(self.in_float32(), COARSER * FUNCTION))

    def is_float64(self) -> bool:
        """Whether the weights are float64."""
        return self.trial.weights["patch_embed.proj.weight"].dtype == np.float64

    def in_float32(self) -> float:
        """Return the relRMS between the outputs in float32 and those in float64."""
        return self.differs(replace(self.trial, rounding="float32", body=("float32",)))

    def differs(self, trial: Trial) -> float:
        """Return the relRMS between the outputs of another model and those of this one; 0 where they are not finite."""
        own = self.runner.run(trial)
        return Error.of(own, self.before.outputs).relative_rms() if np.isfinite(own).all() else 0.0

    def find(self, causes: tuple[Hypothesis, ...], trial: Trial, expected: Expected | None = None) -> Finding:
        """Run a trial, and measure it."""
        expected = expected or self.expected
        outputs = self.runner.run(trial)
        with np.errstate(over="ignore", invalid="ignore"):
            error = Error.of(outputs, expected.logits).relative_rms() if np.isfinite(outputs).all() else math.inf
        return Finding(causes, trial, outputs, error)

    def attempt(
        self, causes: tuple[Hypothesis, ...], on: Trial | None = None, expected: Expected | None = None
    ) -> Finding | None:
        """Run a model with these causes, one after another; None where one says nothing of it, or cannot be run.

        A model that nobody meant can fail in any way, and the diagnosis must not: whatever it raises is noted in
        `discarded`, which the tests hold to be empty.
        """
        trial: Trial | None = self.trial if on is None else on
        try:
            for cause in causes:
                trial = cause.apply(trial) if trial is not None else None
            return self.find(causes, trial, expected) if trial is not None else None
        except (Inapplicable, InputError):
            return None
        except Exception as error:
            self.discarded.append(f"{', and '.join(cause.name for cause in causes)}: {type(error).__name__}: {error}")
            return None

    def each(self, what: str, hypotheses: list[Hypothesis]) -> list[Finding]:
        """Run each cause by itself; those that say nothing of the model, or cannot be run, are left out."""
        found = []
        for done, cause in enumerate(hypotheses):
            self.progress(what, done, len(hypotheses))
            finding = self.attempt((cause,))
            if finding is not None:
                found.append(finding)
        return found

    def solved(self, unknowns: Iterable[Unknown]) -> list[Finding]:
        """Return, for each unknown, what comes nearest."""
        if self.expected.logits.size <= solving.FEW:
            return []
        found: list[Finding] = []
        for unknown in unknowns:
            tries = [(start, self.run_one(unknown.at(start, solving.EXACT))) for start in unknown.starts]
            known = [(start, each) for start, each in tries if each is not None and math.isfinite(each.error)]
            if not known:
                continue
            start, best = min(known, key=lambda pair: pair[1].error)
            found.append(solving.solve(unknown, start, best, self.run_one, self.expected.logits, self.bar))
        return found

    def run_one(self, hypothesis: Hypothesis) -> Finding | None:
        """Run one cause; where it changes nothing the model is as it was."""
        return self.attempt((hypothesis,)) or (self.before if hypothesis.apply(self.trial) is None else None)
