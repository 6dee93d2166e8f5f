"""The part of a search that looks for one change at one place, and so for the layer that is under suspicion."""

import math

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.diagnosis import solving
from parity.comparison.diagnosis.attempts import Attempts, Finding
from parity.comparison.diagnosis.catalogue import catalogue
from parity.comparison.diagnosis.local import in_blocks, operations
from parity.comparison.diagnosis.solving import Unknown
from parity.comparison.diagnosis.suspects import first_that_differs, share
from parity.comparison.diagnosis.trial import Hypothesis

FEWEST, MOST = 400, 6_000  # models that either of the two steps runs
NEAREST = 6  # numbers are solved for, those that explain most ahead of it
SHARE = 1 / 2  # of the squared difference that a number must explain to be solved for


class Places:
    """Causes at one place, tried as a part of a search.

    cheap: how many passes are cheap.
    """

    def __init__(self, attempts: Attempts, cheap: int) -> None:
        self.attempts, self.budget = attempts, min(MOST, max(FEWEST, cheap))
        self.tried: list[Finding] = []

    def outputs(self) -> list[tuple[str, Array]]:
        """Return the layers that were changed, and what the outputs are then."""
        return [(each.causes[0].where, each.outputs) for each in self.tried]

    def factors(self) -> list[Finding]:
        """Return the factors of single intermediates and parameters: left out, doubled, turned, and solved for.

        How the outputs begin to change with a factor is tried for as many as half of the budget allows; the other factors
        for those that explain most of the difference then.
        """
        attempts = self.attempts
        if attempts.expected.logits.size <= solving.FEW:
            return []
        unknowns = list(solving.factors(attempts.trial.config))[: self.budget // 2]
        scores = np.array([self._slope(unknown, done, len(unknowns)) for done, unknown in enumerate(unknowns)])
        order = np.argsort(-scores, kind="stable")
        others = [unknowns[place] for place in order[: self.budget // 8]]
        found: list[Finding] = []
        for unknown in others:
            each = [attempts.run_one(unknown.at(numbers, solving.EXACT)) for numbers in unknown.starts[1:]]
            known = [one for one in each if one is not None and math.isfinite(one.error) and one.causes]
            found += known
            best = min((one.error for one in known), default=math.inf)
            place = unknowns.index(unknown)
            scores[place] = max(scores[place], 1 - (best / attempts.before.error) ** 2)
        likely = [place for place in np.argsort(-scores, kind="stable")[:NEAREST] if scores[place] > SHARE]
        solved = [one for one in attempts.solved(unknowns[place] for place in likely) if one.causes]
        self.tried += [*found, *solved]
        return [*found, *solved]

    def _slope(self, unknown: Unknown, done: int, total: int) -> float:
        """The share of the squared difference that a small change of a number explains: the squared cosine."""
        attempts = self.attempts
        attempts.progress("factors", done, total)
        ahead = attempts.run_one(unknown.at((unknown.starts[0][0] + solving.STEP,), solving.EXACT))
        if ahead is None or not math.isfinite(ahead.error) or not ahead.causes:
            return 0.0
        self.tried.append(ahead)
        effect = (ahead.outputs - attempts.before.outputs).ravel()
        missing = (attempts.expected.logits - attempts.before.outputs).ravel()
        return share(effect, missing)

    def changes(self) -> list[Finding]:
        """Try causes of the catalogue in one block alone, then plain operations on one parameter or intermediate.

        Those at the first layer that differs come first, where expected intermediates tell it.
        """
        attempts = self.attempts
        hypotheses = [*in_blocks(attempts.trial.config, catalogue(attempts.trial)), *operations(attempts.trial.config)]
        first = first_that_differs(attempts.trial, attempts.expected, attempts.bar)
        block = ".".join(first.split(".")[:2]) if first.startswith("blocks.") else first
        hypotheses.sort(key=lambda each: not (first and _at(each, block)))
        found = attempts.each("changes at one place", hypotheses[: self.budget])
        self.tried += found
        return found


def _at(hypothesis: Hypothesis, block: str) -> bool:
    return hypothesis.where == block or hypothesis.where.startswith(f"{block}.")
