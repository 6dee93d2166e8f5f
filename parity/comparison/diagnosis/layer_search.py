"""The search for a change in a single layer that explains the difference; it also gives the suspect layer."""

import math

import numpy as np

from parity.comparison.diagnosis import numeric_hypotheses
from parity.comparison.diagnosis.catalogue import catalogue
from parity.comparison.diagnosis.chance import FEW_OUTPUTS
from parity.comparison.diagnosis.evaluator import Evaluator, Result
from parity.comparison.diagnosis.hypothesis import Hypothesis
from parity.comparison.diagnosis.layer_hypotheses import operations, single_block_hypotheses
from parity.comparison.diagnosis.numeric_hypotheses import NumericHypothesis
from parity.comparison.diagnosis.suspects import explained_share, first_differing_layer

MIN_MODELS, MAX_MODELS = 400, 6_000  # number of models that each of the two steps runs
SOLVED_FACTORS = 6  # number of factors that are solved for, the ones that explain most
MIN_SHARE = 1 / 2  # of the squared difference that a factor must explain to be solved for


class LayerSearch:
    """The stage of a search that tries causes in a single layer.

    affordable_passes: how many forward passes the search can afford.
    """

    def __init__(self, evaluator: Evaluator, affordable_passes: int) -> None:
        self.evaluator, self.budget = evaluator, min(MAX_MODELS, max(MIN_MODELS, affordable_passes))
        self.results: list[Result] = []

    def try_factors(self) -> list[Result]:
        """Try factors of single intermediates and parameters: 0, 2, -1, and the best fit.

        First the slope of the outputs with respect to each factor is measured, with up to half of the budget.  Then the
        factors 0, 2 and -1 are tried for the intermediates and parameters whose slope explains most of the difference.
        Last, the best of these factors are solved for.
        """
        evaluator = self.evaluator
        if evaluator.independent_outputs <= FEW_OUTPUTS:
            return []
        families = list(numeric_hypotheses.scale_factors(evaluator.trial.config))[: self.budget // 2]
        scores = np.array([self._initial_share(family, done, len(families)) for done, family in enumerate(families)])
        order = np.argsort(-scores, kind="stable")
        promising = [families[index] for index in order[: self.budget // 8]]
        results: list[Result] = []
        for family in promising:
            tried = [
                evaluator.try_one(family.hypothesis_at(numbers, numeric_hypotheses.EXACT_DIGITS))
                for numbers in family.starting_points[1:]
            ]
            runnable = [result for result in tried if result is not None and math.isfinite(result.error) and result.causes]
            results += runnable
            best = min((result.error for result in runnable), default=math.inf)
            index = families.index(family)
            scores[index] = max(scores[index], 1 - (best / evaluator.baseline.error) ** 2)
        chosen = [index for index in np.argsort(-scores, kind="stable")[:SOLVED_FACTORS] if scores[index] > MIN_SHARE]
        solved = [result for result in evaluator.solve_each(families[index] for index in chosen) if result.causes]
        self.results += [*results, *solved]
        return [*results, *solved]

    def _initial_share(self, family: NumericHypothesis, done: int, total: int) -> float:
        """Return the share of the squared difference that a small change of a factor explains: the squared cosine."""
        evaluator = self.evaluator
        evaluator.progress("factors", done, total)
        result = evaluator.try_one(
            family.hypothesis_at((family.starting_points[0][0] + numeric_hypotheses.STEP,), numeric_hypotheses.EXACT_DIGITS)
        )
        if result is None or not math.isfinite(result.error) or not result.causes:
            return 0.0
        self.results.append(result)
        effect = (result.outputs - evaluator.baseline.outputs).ravel()
        missing = (evaluator.expected.logits - evaluator.baseline.outputs).ravel()
        return explained_share(effect, missing)

    def try_changes(self) -> list[Result]:
        """Try causes of the catalogue in one block only, then simple operations on one parameter or intermediate.

        If expected intermediates show the first layer that differs, causes in this layer come first.
        """
        evaluator = self.evaluator
        hypotheses = [
            *single_block_hypotheses(evaluator.trial.config, catalogue(evaluator.trial)),
            *operations(evaluator.trial.config),
        ]
        layer = first_differing_layer(evaluator.trial, evaluator.expected, evaluator.tolerance)
        block = ".".join(layer.split(".")[:2]) if layer.startswith("blocks.") else layer
        hypotheses.sort(key=lambda hypothesis: not (layer and _is_at(hypothesis, block)))
        results = evaluator.try_each("changes in one layer", hypotheses[: self.budget])
        self.results += results
        return results


def _is_at(hypothesis: Hypothesis, block: str) -> bool:
    return hypothesis.layer == block or hypothesis.layer.startswith(f"{block}.")
