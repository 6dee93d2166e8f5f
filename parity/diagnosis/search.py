"""Trying the catalogue: what is as it should be already, then one cause, one number that is solved for, then two causes."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from parity.diagnosis.catalogue import ROUNDINGS, catalogue
from parity.diagnosis.expectations import Expected
from parity.diagnosis.trial import Hypothesis, Runner, Trial
from parity.layout import Array
from parity.measures import COARSER, FUNCTION, PRECISION, RATIO_MAX, Error, luck
from vit_spec import flops

EXPLAINED = 1 / 3  # of the error may be left by a rounding, which no two machines repeat to the bit; 8/9 of its square go
ENOUGH = 64  # outputs that a search looks at, if there are so many; all are looked at before a match is told
FREE = 4e11  # multiplications and additions that the search for pairs may take, if that makes more than FEWEST
FEWEST, MOST = 200, 2_000  # pairs; they come in an order in which the right one is early
SHARED = 1e9  # operations of a pass that are worth sharing among threads
SOLVED = {"norms.eps": "LayerNorm eps", "attention.scale": "score scale", "positions.rotary_base": "rotary base"}

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


@dataclass(frozen=True)
class Found:
    """What a search came to.

    before: the model as it is.
    bar: what a match is within.
    matches: the findings that nothing tells apart from the truth; the first is the likeliest.
    others: the nearest that do not match, nearest first.
    tried, pairs: how many models were run, and how many pairs there are.
    """

    before: Finding
    bar: float
    matches: tuple[Finding, ...]
    others: tuple[Finding, ...]
    tried: int
    pairs: int = 0


class Search:
    """One search; see `run`."""

    def __init__(
        self, trial: Trial, expected: Expected, progress: Progress | None = None, pairs: int | None = None
    ) -> None:
        self.whole, self.expected = trial, expected
        count = max(1, min(len(expected), -(-ENOUGH * len(expected) // expected.logits.size)))
        self.few = expected.first(count)
        self.trial = replace(trial, images=trial.images[:count])
        work = flops(trial.config) * count
        self.runner = Runner(threads=1 if work < SHARED else None)
        self.progress = progress or (lambda what, done, total: None)
        cheap = int(FREE / work)
        self.budget = min(MOST, max(FEWEST, cheap)) if pairs is None else pairs
        self.before = self.find((), self.trial)
        self.bar = self._bar()

    def _bar(self) -> float:
        """What the expected outputs' type allows, or more where this function amplifies the rounding of float32."""
        if self.expected.dtype == "float64" and self.trial.weights["patch_embed.proj.weight"].dtype == np.float64:
            return self.expected.bar
        own = self.runner.run(replace(self.trial, rounding="float32", body=("float32",)))
        amplified = Error.of(own, self.before.outputs).relative_rms() if np.isfinite(own).all() else 0.0
        return max(self.expected.bar, PRECISION, RATIO_MAX * min(amplified, COARSER * FUNCTION))

    def run(self) -> Found:
        """Return what makes the outputs match."""
        whole = self.find((), self.whole, self.expected)
        if whole.error <= self.bar:
            return Found(whole, self.bar, self._rounded(whole), (), self.runner.count)
        singles = self._singles()
        matches = self._confirmed(singles)
        found, total = self._solved() if not matches else [], 0
        matches = matches or self._confirmed(found)
        tried = [*singles, *found]
        if not matches:
            total = len(singles) * (len(singles) - 1) // 2
            pairs = self._pairs(self._distinct(singles))
            matches, tried = self._confirmed(pairs[-1:]), [*tried, *pairs]
        chosen = {id(match.causes) for match in matches}
        others = sorted((each for each in tried if id(each.causes) not in chosen), key=lambda each: each.error)
        return Found(whole, self.bar, tuple(matches), tuple(others[:5]), self.runner.count, total)

    def find(self, causes: tuple[Hypothesis, ...], trial: Trial, expected: Expected | None = None) -> Finding:
        """Run a trial, and measure it."""
        expected = expected or self.few
        outputs = self.runner.run(trial)
        error = Error.of(outputs, expected.logits).relative_rms() if np.isfinite(outputs).all() else math.inf
        return Finding(causes, trial, outputs, error)

    def matches(self, finding: Finding, before: float) -> bool:
        """Whether nothing is left to explain."""
        if finding.error <= self.bar:
            return True
        rounded = all(cause.family in ROUNDINGS for cause in finding.causes)
        return rounded and finding.error <= EXPLAINED * before

    # One cause --------------------------------------------------------------------------------------------------------

    def _singles(self) -> list[Finding]:
        found, hypotheses = [], catalogue(self.trial)
        for done, cause in enumerate(hypotheses):
            self.progress("causes", done, len(hypotheses))
            trial = cause.apply(self.trial)
            if trial is not None:
                found.append(self.find((cause,), trial))
        return found

    def _rounded(self, whole: Finding) -> tuple[Finding, ...]:
        """Of outputs in half precision, the rounding that comes nearest; nothing where there is none to explain."""
        if whole.error <= PRECISION or self.bar <= PRECISION:
            return ()
        hypotheses = [cause for cause in catalogue(self.whole) if cause.family in ROUNDINGS]
        trials = [(cause, cause.apply(self.whole)) for cause in hypotheses]
        found = [self.find((cause,), trial, self.expected) for cause, trial in trials if trial is not None]
        near = min(found, key=lambda finding: finding.error)
        return (near,) if near.error <= EXPLAINED * whole.error else ()

    def _confirmed(self, findings: list[Finding]) -> list[Finding]:
        """Return the findings that match on all images, the nearest and those that are as near, in order of likelihood.

        An exact cause goes before a rounding.
        """
        likely = [finding for finding in findings if self.matches(finding, self.before.error)]
        if not likely:
            return []
        before, found = self.find((), self.whole, self.expected).error, []
        for finding in likely:
            trial: Trial | None = self.whole
            for cause in finding.causes:
                trial = cause.apply(trial) if trial is not None else None
            whole = self.find(finding.causes, trial, self.expected) if trial is not None else finding
            if self.matches(whole, before):
                found.append(whole)
        found = [each for each in found if each.error <= self.bar] or found
        best = min((each.error for each in found), default=0.0)
        near = max(FUNCTION, RATIO_MAX * luck(self.expected.logits.size) * best)
        return [each for each in found if each.error <= near]

    # One number -------------------------------------------------------------------------------------------------------

    def _solved(self) -> list[Finding]:
        """Return, for each field that is a number, the value that comes nearest."""
        p = self.trial.config.positions
        fields = [name for name in SOLVED if name != "positions.rotary_base" or p.rotary != "none"]
        found = [self._solve(name) for name in fields if self.few.logits.size > 8]  # fewer may be met by chance
        return [finding for finding in found if finding is not None]

    def _solve(self, name: str) -> Finding | None:
        """Gauss and Newton's method for the logarithm of a positive number, from the nearest of a coarse grid."""
        own = float(self.trial.config.at(name) or self.trial.config.scale)
        starts = [math.log(own) + step * math.log(10) for step in range(-6, 7)]
        tries = [self._at(name, start) for start in starts]
        at, best = min(
            ((start, each) for start, each in zip(starts, tries, strict=True) if each), key=lambda pair: pair[1].error
        )
        for _ in range(8):
            ahead = self._at(name, at + 1e-4)
            if ahead is None or not math.isfinite(ahead.error):
                return best
            slope, residual = (ahead.outputs - best.outputs).ravel() / 1e-4, (self.few.logits - best.outputs).ravel()
            if not (size := float(slope @ slope)):
                return best
            step = max(-1.0, min(1.0, float(slope @ residual) / size))
            after = self._at(name, at + step)
            if after is None or after.error >= best.error:
                break
            at, best = at + step, after
        rounded = self._at(name, math.log(float(f"{math.exp(at):.3g}")))
        return rounded if rounded is not None and rounded.error <= max(self.bar, best.error) else best

    def _at(self, name: str, logarithm: float) -> Finding | None:
        value = float(f"{math.exp(logarithm):.12g}")
        cause = Hypothesis(f"{SOLVED[name]} is {value:.12g}", SOLVED[name], fields={name: value})
        trial = cause.apply(self.trial)
        return self.find((cause,), trial) if trial is not None else self.before

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
        order = _order(singles, self.before.outputs, self.few.logits)
        for done, (a, b) in enumerate(islice(order, self.budget)):
            self.progress("pairs", done, self.budget)
            first, second = sorted((singles[a].causes[0], singles[b].causes[0]), key=lambda cause: cause.tail)
            once = singles[a].trial if first is singles[a].causes[0] else singles[b].trial
            trial = second.apply(once)
            if trial is None:
                continue
            found.append(self.find((first, second), trial))
            if self.matches(found[-1], self.before.error):
                break
        return found


def _order(singles: list[Finding], before: Array, expected: Array) -> Iterator[tuple[int, int]]:
    """Yield pairs of different families: in turn by the sum of their effects, by the nearer of both, and by likelihood.

    Small effects add up, so that a pair's outputs are foretold by those of its two causes without a run.
    """
    n = len(singles)
    effects = np.stack([each.outputs - before for each in singles]).reshape(n, -1) if n else np.zeros((0, 1))
    missing = (expected - before).ravel()
    gram, along = effects @ effects.T, effects @ missing
    squares = np.diag(gram)
    foretold = squares[:, None] + squares + 2 * gram - 2 * (along[:, None] + along)
    errors = np.array([each.error for each in singles])
    nearer = np.minimum(errors[:, None], errors) * (1 + 1e-3 * np.maximum.outer(np.arange(n), np.arange(n)))
    likelihood = np.add.outer(np.arange(n), np.arange(n))
    families = [each.causes[0].family for each in singles]
    a, b = np.triu_indices(n, 1)
    different = np.array([families[i] != families[j] for i, j in zip(a, b, strict=True)], bool)
    a, b = a[different], b[different]
    orders = [np.argsort(score[a, b], kind="stable") for score in (foretold, nearer, likelihood)]
    seen: set[int] = set()
    for turn in zip(*orders, strict=True):
        for place in map(int, turn):
            if place not in seen:
                seen.add(place)
                yield int(a[place]), int(b[place])
