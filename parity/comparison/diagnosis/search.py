"""Trying the catalogue: one cause, a number that is solved for, two causes, then one change at one place."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from parity.comparison.diagnosis import solving
from parity.comparison.diagnosis.attempts import Attempts, Finding, Progress
from parity.comparison.diagnosis.catalogue import LOWER, ROUNDINGS, catalogue, is_rare
from parity.comparison.diagnosis.expectations import Expected
from parity.comparison.diagnosis.order import likeliest_pairs
from parity.comparison.diagnosis.places import Places
from parity.comparison.diagnosis.precision import Level, rounded_weights
from parity.comparison.diagnosis.score_bias import score_biases
from parity.comparison.diagnosis.suspects import consistent, is_exact
from parity.comparison.diagnosis.trial import Trial
from parity.comparison.tolerances import FUNCTION, PRECISION, RATIO_MAX, UNIT, luck
from vit_spec import flops

EXPLAINED = 1 / 3  # of the error may be left by a rounding, which no two machines repeat to the bit; 8/9 of its square go
COARSE = 1 / 10  # of the error may be left by a cause that is judged by what a coarser type explains; 99% of its square go
# Also by the rounding of one place to a lower type: of numbers near the middle of two of this type, two machines take two.
ENOUGH = 64  # outputs that a search looks at, if there are so many; all are looked at before a match is told
FREE = 4e11  # multiplications and additions that the search for pairs may take, if that makes more than FEWEST
FEWEST, MOST = 200, 2_000  # pairs; they come in an order in which the right one is early


@dataclass(frozen=True)
class Found:
    """What a search came to.

    before: the model as it is.
    bar: what a match is within.
    matches: the findings that nothing tells apart from the truth; the first is the likeliest.
    others: the nearest that do not match, nearest first.
    tried, pairs: how many models were run, and how many pairs there are.
    level: what explains that a match, or the model as it is, is no nearer.
    discarded: causes that could not be run, each with the reason.
    """

    before: Finding
    bar: float
    matches: tuple[Finding, ...]
    others: tuple[Finding, ...]
    tried: int
    pairs: int = 0
    level: Level | None = None
    discarded: tuple[str, ...] = ()


class Search:
    """One search; see `run`."""

    def __init__(
        self, trial: Trial, expected: Expected, progress: Progress | None = None, pairs: int | None = None
    ) -> None:
        self.whole, self.expected = trial, expected
        count = max(1, min(len(expected), -(-ENOUGH * len(expected) // expected.logits.size)))
        self.few = expected.first(count)
        self.attempts = Attempts(replace(trial, images=trial.images[:count]), self.few, progress)
        self.trial, self.before, self.bar = self.attempts.trial, self.attempts.before, self.attempts.bar
        cheap = int(FREE / (flops(trial.config) * count))
        self.budget = min(MOST, max(FEWEST, cheap)) if pairs is None else pairs
        self.places = Places(self.attempts, cheap)
        self.levels = self._levels()

    def _levels(self) -> list[Level]:
        """Return what may keep the outputs of the right function from matching within the tolerance.

        Expected outputs with all digits of float64 may have passed through float32: in a table, in the weights, in an
        operation.  Weights that are numbers of half precision may be the rounded ones of a model that was not.  Neither
        is so where an intermediate of the model agrees to the last digits.
        """
        if self.expected.intermediates and is_exact(self.trial, self.few):
            return []
        found = []
        if self.expected.dtype == "float64" and self.attempts.is_float64():
            error = max(self.attempts.in_float32(), self.attempts.differs(self._disturbed("float32")))
            found.append(Level("rounding to float32, of weights, tables or on the way,", error))
        if kind := rounded_weights(self.trial.weights.values()):
            error = self.attempts.differs(self._disturbed(kind))
            found.append(Level(f"the rounding of the weights to {kind}", error, error / RATIO_MAX))
        return [level for level in found if level.tolerance > self.bar]

    def _disturbed(self, kind: str) -> Trial:
        """The model with every weight moved by up to a rounding of a type."""
        rng = np.random.default_rng(0)
        moved = {
            name: array * (1 + rng.uniform(-UNIT[kind], UNIT[kind], array.shape)).astype(array.dtype)
            for name, array in self.trial.weights.items()
        }
        return replace(self.trial, weights=moved, body=("disturbed", kind))

    def run(self) -> Found:
        """Return what makes the outputs match."""
        whole = self.attempts.find((), self.whole, self.expected)
        if whole.error <= self.bar:
            return self._found(whole, self._rounded(whole), [])
        near = self._level(whole.error)
        tried = self._singles()
        singles = self._distinct(tried)
        matches, total = self._confirmed(tried), 0
        stages: list[Callable[[], list[Finding]]] = [lambda: self.attempts.solved(solving.fields(self.trial)), self._biases]
        if near is None:
            stages += [lambda: self._pairs(singles), self.places.factors, self.places.changes]
            total = len(singles) * (len(singles) - 1) // 2
        for stage in stages:
            if matches:
                return self._found(whole, matches, tried)
            found = stage()
            tried += found
            matches = self._confirmed(found)
        if not matches and near is None:
            matches, near = self._coarse(whole, tried, singles)
        return self._found(whole, matches, tried, total, near if not matches or matches[0].error > self.bar else None)

    def _found(
        self, whole: Finding, matches: list[Finding], tried: list[Finding], pairs: int = 0, level: Level | None = None
    ) -> Found:
        chosen = {match.name for match in matches}
        others = sorted((each for each in tried if each.causes and each.name not in chosen), key=lambda each: each.error)
        bar = level.tolerance if level else self.bar
        found = tuple(matches), tuple(others[:5])
        return Found(
            whole, bar, *found, self.attempts.runner.count, pairs, level, tuple(dict.fromkeys(self.attempts.discarded))
        )

    def matches(self, finding: Finding, before: float) -> bool:
        """Whether nothing is left to explain."""
        if finding.error <= self.bar:
            return True
        if not all(cause.family.startswith((*ROUNDINGS, LOWER)) for cause in finding.causes):
            return False
        whole = all(cause.family in ROUNDINGS for cause in finding.causes)
        return finding.error <= (EXPLAINED if whole else COARSE) * before

    def _level(self, error: float) -> Level | None:
        return next((level for level in self.levels if level.explains(error)), None)

    # One cause --------------------------------------------------------------------------------------------------------

    def _singles(self) -> list[Finding]:
        return self.attempts.each("causes", catalogue(self.trial))

    def _rounded(self, whole: Finding) -> list[Finding]:
        """Of outputs in half precision, the rounding that comes nearest; nothing where there is none to explain."""
        if whole.error <= PRECISION or self.bar <= PRECISION:
            return []
        hypotheses = [cause for cause in catalogue(self.whole) if cause.family in ROUNDINGS]
        tried = (self.attempts.attempt((cause,), self.whole, self.expected) for cause in hypotheses)
        near = min(filter(None, tried), key=lambda finding: finding.error, default=whole)
        return [near] if near.causes and near.error <= EXPLAINED * whole.error else []

    def _confirmed(self, findings: list[Finding]) -> list[Finding]:
        """Return the findings that match on all images, the nearest and those that are as near, in order of likelihood.

        An exact cause goes before a rounding.  Those that contradict an expected intermediate are left out.
        """
        likely = [finding for finding in findings if finding.causes and self.matches(finding, self.before.error)]
        if not likely:
            return []
        before, found = self.attempts.find((), self.whole, self.expected).error, []
        for finding in likely:
            whole = self.attempts.attempt(finding.causes, self.whole, self.expected)
            if whole is not None and self.matches(whole, before):
                found.append(whole)
        found = [each for each in found if each.error <= self.bar] or found
        best = min((each.error for each in found), default=0.0)
        near = max(FUNCTION, RATIO_MAX * luck(self.expected.logits.size) * best)
        found = [each for each in found if each.error <= near]
        if self.expected.intermediates:
            tolerances = (max(self.bar, RATIO_MAX * each.error) for each in found)
            seen = [each for each, bar in zip(found, tolerances, strict=True) if consistent(each.trial, self.expected, bar)]
            found = seen or found
        return list({each.name: each for each in reversed(found)}.values())[::-1]

    def _coarse(self, whole: Finding, tried: list[Finding], singles: list[Finding]) -> tuple[list[Finding], Level | None]:
        """Return the causes that leave no more than a coarser type explains, and that type.

        First the best of them is tried together with every other cause: it may be one of two that match to the digit.
        """
        likely = [each for each in tried if each.causes and self._is_coarse(each, self.before.error)]
        if not likely:
            return [], None
        best = min(likely, key=lambda each: each.error)
        others = [each.causes[0] for each in singles if each.causes[0].family not in {c.family for c in best.causes}]
        if len(best.causes) == 1:
            both = filter(None, (self.attempts.attempt((best.causes[0], other)) for other in others))
            if exact := self._confirmed(list(both)):
                return exact, None
        found = [
            self.attempts.attempt(each.causes, self.whole, self.expected)
            for each in likely
            if each.error <= RATIO_MAX * best.error
        ]
        kept = [each for each in found if each is not None and self._is_coarse(each, whole.error)]
        return kept, self._level(kept[0].error) if kept else None

    def _is_coarse(self, finding: Finding, before: float) -> bool:
        return finding.error <= COARSE * before and self._level(finding.error) is not None

    # One number -------------------------------------------------------------------------------------------------------

    def _biases(self) -> list[Finding]:
        return self.attempts.each("biases of the scores", list(score_biases(self.whole, self.expected)))

    # Two causes -------------------------------------------------------------------------------------------------------

    def _distinct(self, singles: list[Finding]) -> list[Finding]:
        """Return the likeliest of those that give the same outputs, and none that change nothing."""
        kept: list[Finding] = []
        size = float(np.linalg.norm(self.before.outputs))
        for each in singles:
            same = (other for other in [self.before, *kept] if other.outputs.shape == each.outputs.shape)
            if math.isfinite(each.error) and not any(
                np.linalg.norm(each.outputs - other.outputs) <= FUNCTION * size for other in same
            ):
                kept.append(each)
        return kept

    def _pairs(self, singles: list[Finding]) -> list[Finding]:
        """Try pairs, the likeliest first, until one matches, which then is the last."""
        found: list[Finding] = []
        causes = [each.causes[0] for each in singles]
        outputs, families = [each.outputs for each in singles], [cause.family for cause in causes]
        order = likeliest_pairs(outputs, self.before.outputs, self.few.logits, families, [is_rare(each) for each in causes])
        for done, (a, b) in enumerate(islice(order, self.budget)):
            self.attempts.progress("pairs", done, self.budget)
            first, second = sorted((singles[a].causes[0], singles[b].causes[0]), key=lambda cause: cause.tail)
            finding = self.attempts.attempt((first, second))
            if finding is None:
                continue
            found.append(finding)
            if self.matches(finding, self.before.error):
                break
        return found
