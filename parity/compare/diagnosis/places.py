"""The part of a search that looks for one change at one place, and so for the layer that is under suspicion."""

import math
from typing import TYPE_CHECKING

import numpy as np

from parity.checkpoints.layout import Array
from parity.compare.diagnosis import solving
from parity.compare.diagnosis.catalogue import catalogue
from parity.compare.diagnosis.local import in_blocks, operations
from parity.compare.diagnosis.suspects import first_that_differs, share

if TYPE_CHECKING:
    from parity.compare.diagnosis.search import Finding, Search
    from parity.compare.diagnosis.solving import Unknown
    from parity.compare.diagnosis.trial import Hypothesis

FEWEST, MOST = 400, 6_000  # models that either of the two steps runs
NEAREST = 6  # numbers are solved for, those that explain most ahead of it
SHARE = 1 / 2  # of the squared difference that a number must explain to be solved for


class Places:
    """Causes at one place, tried as a part of a search.

    cheap: how many passes are cheap.
    """

    def __init__(self, search: "Search", cheap: int) -> None:
        self.search, self.budget = search, min(MOST, max(FEWEST, cheap))
        self.tried: list[Finding] = []

    def outputs(self) -> list[tuple[str, Array]]:
        """Return the layers that were changed, and what the outputs are then."""
        return [(each.causes[0].where, each.outputs) for each in self.tried]

    def factors(self) -> "list[Finding]":
        """Return the factors of single intermediates and parameters: left out, doubled, turned, and solved for.

        How the outputs begin to change with a factor is tried for as many as half of the budget allows; the other factors
        for those that explain most of the difference then.
        """
        search = self.search
        if search.few.logits.size <= solving.FEW:
            return []
        unknowns = list(solving.factors(search.trial.config))[: self.budget // 2]
        scores = np.array([self._slope(unknown, done, len(unknowns)) for done, unknown in enumerate(unknowns)])
        order = np.argsort(-scores, kind="stable")
        others = [unknowns[place] for place in order[: self.budget // 8]]
        found: list[Finding] = []
        for unknown in others:
            each = [search.run_one(unknown.at(numbers, solving.EXACT)) for numbers in unknown.starts[1:]]
            known = [one for one in each if one is not None and math.isfinite(one.error) and one.causes]
            found += known
            best = min((one.error for one in known), default=math.inf)
            place = unknowns.index(unknown)
            scores[place] = max(scores[place], 1 - (best / search.before.error) ** 2)
        likely = [place for place in np.argsort(-scores, kind="stable")[:NEAREST] if scores[place] > SHARE]
        solved = [one for one in search.solved(unknowns[place] for place in likely) if one.causes]
        self.tried += [*found, *solved]
        return [*found, *solved]

    def _slope(self, unknown: "Unknown", done: int, total: int) -> float:
        """The share of the squared difference that a small change of a number explains: the squared cosine."""
        search = self.search
        search.progress("factors", done, total)
        ahead = search.run_one(unknown.at((unknown.starts[0][0] + solving.STEP,), solving.EXACT))
        if ahead is None or not math.isfinite(ahead.error) or not ahead.causes:
            return 0.0
        self.tried.append(ahead)
        effect = (ahead.outputs - search.before.outputs).ravel()
        missing = (search.few.logits - search.before.outputs).ravel()
        return share(effect, missing)

    def changes(self) -> "list[Finding]":
        """Try causes of the catalogue in one block alone, then plain operations on one parameter or intermediate.

        Those at the first layer that differs come first, where expected intermediates tell it.
        """
        search = self.search
        hypotheses = [*in_blocks(search.trial.config, catalogue(search.trial)), *operations(search.trial.config)]
        first = first_that_differs(search.trial, search.few, search.bar)
        block = ".".join(first.split(".")[:2]) if first.startswith("blocks.") else first
        hypotheses.sort(key=lambda each: not (first and _at(each, block)))
        found = search.each("changes at one place", hypotheses[: self.budget])
        self.tried += found
        return found


def _at(hypothesis: "Hypothesis", block: str) -> bool:
    return hypothesis.where == block or hypothesis.where.startswith(f"{block}.")
