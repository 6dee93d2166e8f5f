"""The search for causes: single causes, unknown numbers, score biases, pairs, and then changes in a single layer."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.diagnosis import numeric_hypotheses
from parity.comparison.diagnosis.catalogue import catalogue
from parity.comparison.diagnosis.evaluator import Evaluator, Result
from parity.comparison.diagnosis.expected_outputs import Expected
from parity.comparison.diagnosis.hypothesis import Runner, Trial
from parity.comparison.diagnosis.layer_search import LayerSearch
from parity.comparison.diagnosis.output_precision import RoundingError, half_precision_dtype
from parity.comparison.diagnosis.pair_order import likeliest_pairs
from parity.comparison.diagnosis.score_bias import score_biases
from parity.comparison.diagnosis.suspects import (
    MIN_LIKELIEST_SHARE,
    explained_share,
    find_likeliest_suspect,
    find_measured_suspect,
    has_exact_intermediates,
    matches_intermediates,
)
from parity.comparison.progress import CountProgress
from parity.comparison.tolerances import (
    FLOAT32_TOLERANCE,
    FLOAT64_TOLERANCE,
    MAX_ERROR_RATIO,
    five_sigma_factor,
)
from vit_spec import flops

# Share of the error that may remain if the cause is a rounding of the whole model, which then explains 8/9 of the squared
# error.  Machines do not round every operation alike, so such a cause is not reproduced bit for bit.
MAX_REMAINING_ROUNDING = 1 / 3
# Share of the error that may remain if rounding explains the remainder; the cause then explains 99% of the squared error.
# Without this limit, many wrong causes would bring an error just above a large tolerance below it.  The limit also applies
# to a single operation in lower precision: a value near the middle of two representable numbers may be rounded up on one
# machine and down on another.
MAX_REMAINING_COARSE = 1 / 10
SEARCH_OUTPUTS = 64  # about how many outputs the search compares; a match is confirmed on all of them
# The error that decimal rounding leaves, as a share of the largest: 1 / sqrt(3) if rounding errors are uniform, and a
# quarter more, because the mean of few squares varies.
DECIMAL_ROUNDING_RMS = 1.25 / math.sqrt(3)
MAX_OTHERS = 5  # causes that do not match and are reported
# Share of the error that may remain if a cause that does not match is reported: it explains half of the squared error, as a
# layer that is named as the likeliest does.  Many wrong causes lower the error by a few percent.
MAX_REMAINING_OTHER = math.sqrt(1 - MIN_LIKELIEST_SHARE)
PAIR_FLOPS = 4e11  # FLOPs that the search for pairs may cost, unless MIN_PAIRS cost more
MIN_PAIRS, MAX_PAIRS = 200, 2_000  # limits on the number of pairs to try; the likeliest come first


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    baseline: the unchanged model.
    tolerance: the relRMS within which outputs match.
    matches: the causes that explain the difference equally well, the likeliest first.
    others: the causes with the smallest errors that do not match, the smallest first, if they explain half of the squared
        error.  The errors are those on all images.
    tried: how many models were run.
    pairs: how many pairs of causes there are.
    rounding: the rounding that explains the remaining error of the first match or of the baseline.
    discarded: causes that could not be run, each with the exception.
    rounding_tolerance: the relRMS that the measured rounding errors of this model explain, at most the tolerance.
    """

    baseline: Result
    tolerance: float
    matches: tuple[Result, ...]
    others: tuple[Result, ...]
    tried: int
    pairs: int = 0
    rounding: RoundingError | None = None
    discarded: tuple[str, ...] = ()
    rounding_tolerance: float = math.inf


class CauseSearch:
    """A search for the causes of a difference; call `run` once.

    pairs: how many pairs of causes to try; by default what `PAIR_FLOPS` allows.
    """

    def __init__(
        self, trial: Trial, expected: Expected, progress: CountProgress | None = None, pairs: int | None = None
    ) -> None:
        self.full_trial, self.expected = trial, expected
        count = max(1, min(len(expected), -(-SEARCH_OUTPUTS * len(expected) // expected.logits.size)))
        self.full = Result.of((), trial, Runner().run(trial), expected)
        indices = self._most_different_images()[:count]
        self.subset = expected.select(indices)
        self.evaluator = Evaluator(replace(trial, images=trial.images[indices]), self.subset, progress)
        self.trial, self.baseline, self.tolerance = self.evaluator.trial, self.evaluator.baseline, self.evaluator.tolerance
        affordable_passes = int(PAIR_FLOPS / (flops(trial.config) * count))
        self.budget = min(MAX_PAIRS, max(MIN_PAIRS, affordable_passes)) if pairs is None else pairs
        self.layers = LayerSearch(self.evaluator, affordable_passes)
        self.rounding_errors = self._measure_rounding_errors()

    def _most_different_images(self) -> list[int]:
        """Return the indices of all images: those whose outputs differ most first, and repetitions of an image last."""
        differences = np.linalg.norm((self.full.outputs - self.expected.logits).reshape(len(self.expected), -1), axis=1)
        order = [int(index) for index in np.argsort(-differences, kind="stable")]
        first = {self.full_trial.images[index].tobytes(): index for index in reversed(order)}
        distinct = set(first.values())
        return sorted(order, key=lambda index: index not in distinct)

    def _measure_rounding_errors(self) -> list[RoundingError]:
        """Return the roundings because of which even a correct model may not match within the tolerance.

        Expected outputs with all digits of float64 may have passed through float32: in a table, in the weights or in an
        operation.  Weights that float16 or bfloat16 represents exactly may be rounded copies of those that made the
        expected outputs.  If an expected intermediate agrees to the last digits, neither is the case.
        """
        if self.expected.intermediates and has_exact_intermediates(self.trial, self.subset):
            return []
        errors = []
        if self.expected.dtype == "float64" and self.evaluator.is_float64():
            error = max(
                self.evaluator.float32_error(), self.evaluator.difference(self.evaluator.perturb_weights("float32"))
            )
            errors.append(RoundingError("rounding to float32 (of weights, of tables or during the computation)", error))
        if dtype := half_precision_dtype(self.trial.weights.values()):
            error = self.evaluator.difference(self.evaluator.perturb_weights(dtype))
            errors.append(RoundingError(f"the rounding of the weights to {dtype}", error, error / MAX_ERROR_RATIO))
        return [rounding for rounding in errors if rounding.tolerance > self.tolerance]

    def run(self) -> SearchResult:
        """Run the stages in order until causes match, and return the result."""
        full = self.full
        if full.error <= self.evaluator.rounding_tolerance:
            return self._result(full, self._nearest_rounding(full), [])
        tried = self._try_single_causes()
        self.evaluator.set_effects(tried)
        if full.error <= self.tolerance:
            if matches := self._confirm_improvements(tried, self.baseline.error, full.error):
                return self._result(full, matches, tried, tolerance=self.evaluator.rounding_tolerance)
            return self._result(full, [], [])
        rounding = self._explaining_rounding(full.error)
        singles = self._distinct_results(tried)
        matches, total = self._confirm(tried), 0
        stages: list[Callable[[], list[Result]]] = [
            lambda: self.evaluator.solve_each(numeric_hypotheses.config_numbers(self.trial)),
            self._try_score_biases,
        ]
        if rounding is None:
            stages += [lambda: self._try_pairs(singles), self.layers.try_factors, self.layers.try_changes]
            total = len(singles) * (len(singles) - 1) // 2
        for stage in stages:
            if matches:
                break
            results = stage()
            tried += results
            matches = self._confirm(results)
        if matches:
            return self._result(full, self._add_second_cause(matches, singles), tried)
        if rounding is None:
            matches, rounding = self._match_within_rounding(full, tried, singles)
        return self._result(
            full, matches, tried, total, rounding if not matches or matches[0].error > self.tolerance else None
        )

    def _result(
        self,
        full: Result,
        matches: list[Result],
        tried: list[Result],
        pairs: int = 0,
        rounding: RoundingError | None = None,
        tolerance: float | None = None,
    ) -> SearchResult:
        chosen = {match.name for match in matches}
        others = {result.name: result for result in tried if result.causes and result.name not in chosen}
        nearest = sorted(others.values(), key=lambda result: result.error)[:MAX_OTHERS]
        if len(self.subset) < len(self.expected):
            full_results = (self.evaluator.try_causes(each.causes, self.full_trial, self.expected) for each in nearest)
            nearest = sorted(filter(None, full_results), key=lambda result: result.error)
        nearest = [
            result
            for result in nearest
            if result.error <= MAX_REMAINING_OTHER * full.error and not self.evaluator.is_by_chance(result, full.error)
        ]
        if tolerance is None:
            tolerance = rounding.tolerance if rounding else self.tolerance
        lists = tuple(matches), tuple(nearest)
        return SearchResult(
            full,
            tolerance,
            *lists,
            self.evaluator.runner.run_count,
            pairs,
            rounding,
            tuple(dict.fromkeys(self.evaluator.discarded)),
            self.evaluator.rounding_tolerance,
        )

    def matches(self, result: Result, baseline_error: float) -> bool:
        """Return whether the causes of a result explain the error of the unchanged model, `baseline_error`."""
        decimals = DECIMAL_ROUNDING_RMS * self.expected.rounding.error
        if result.error <= min(self.tolerance, max(MAX_REMAINING_COARSE * baseline_error, decimals)):
            return True
        if not result.is_single_rounding:
            return False
        is_whole_model = result.causes[0].lowers_precision_of == "model"
        return result.error <= (MAX_REMAINING_ROUNDING if is_whole_model else MAX_REMAINING_COARSE) * baseline_error

    def _explaining_rounding(self, error: float) -> RoundingError | None:
        return next((rounding for rounding in self.rounding_errors if rounding.explains(error)), None)

    def suspect(self, tolerance: float, *, is_complete: bool) -> str:
        """Return the first layer that differs by more than the tolerance and by more than the roundings explain.

        tolerance: that of the result.
        is_complete: whether all intermediates of a model are expected, so that one of another name or shape differs.
        """
        tolerance = max([tolerance, *(rounding.tolerance for rounding in self.rounding_errors)])
        return str(
            find_measured_suspect(self.trial, self.subset, tolerance, is_complete=is_complete)
            or find_likeliest_suspect(
                self.full.outputs,
                self.expected.logits,
                self._changed_outputs(),
                self.evaluator.effects,
                self.evaluator.runner.run_count,
                self.evaluator.independent_outputs,
            )
        )

    def _changed_outputs(self) -> list[tuple[str, Array]]:
        """Return (layer, outputs for all images) of models with one layer changed, those that explain most first.

        If the search compares only some images, the best `MAX_OTHERS` of these models are run on all images.
        """
        missing = (self.subset.logits - self.baseline.outputs).ravel()
        changed = [each for each in self.layers.results if each.causes[0].layer and each.outputs.size == missing.size]
        changed.sort(key=lambda each: -explained_share((each.outputs - self.baseline.outputs).ravel(), missing))
        if len(self.subset) < len(self.expected):
            full_results = (
                self.evaluator.try_causes(each.causes, self.full_trial, self.expected) for each in changed[:MAX_OTHERS]
            )
            changed = list(filter(None, full_results))
        return [(each.causes[0].layer, each.outputs) for each in changed]

    # One cause --------------------------------------------------------------------------------------------------------

    def _try_single_causes(self) -> list[Result]:
        return self.evaluator.try_each("causes", catalogue(self.trial))

    def _nearest_rounding(self, full: Result) -> list[Result]:
        """Return the rounding that best explains the error of half-precision outputs that match, if any does."""
        if full.error <= FLOAT32_TOLERANCE or self.tolerance <= FLOAT32_TOLERANCE:
            return []
        hypotheses = [cause for cause in catalogue(self.full_trial) if cause.lowers_precision_of == "model"]
        results = (self.evaluator.try_causes((cause,), self.full_trial, self.expected) for cause in hypotheses)
        nearest = min(filter(None, results), key=lambda result: result.error, default=full)
        return [nearest] if nearest.causes and nearest.error <= MAX_REMAINING_ROUNDING * full.error else []

    def _confirm(self, results: list[Result]) -> list[Result]:
        """Return the results that match on all images: the best, and others that are as good, the likeliest first.

        If some results match within the tolerance, the others, which are roundings, are dropped.  Causes that contradict
        an expected intermediate are dropped as well, unless all causes do.
        """
        candidates = [
            result
            for result in results
            if result.causes and self.matches(result, self.baseline.error) and not self.evaluator.is_by_chance(result)
        ]
        if not candidates:
            return []
        confirmed = []
        for result in candidates:
            full = self.evaluator.try_causes(result.causes, self.full_trial, self.expected)
            if full is not None and self.matches(full, self.full.error):
                confirmed.append(full)
        return self._best([result for result in confirmed if result.error <= self.tolerance] or confirmed)

    def _confirm_improvements(self, results: list[Result], subset_error: float, full_error: float) -> list[Result]:
        """Return the results that bring an error that is already within the tolerance down to rounding errors.

        The tolerance has a margin in which a small fault may hide.  A cause that explains the error shows this fault.

        subset_error, full_error: the error to explain, on the images that the search compares and on all images.
        """

        def improves(result: Result, error: float) -> bool:
            return result.error <= min(self.evaluator.rounding_tolerance, MAX_REMAINING_COARSE * error)

        candidates = [
            result
            for result in results
            if result.causes and improves(result, subset_error) and not self.evaluator.is_by_chance(result, subset_error)
        ]
        full = (self.evaluator.try_causes(result.causes, self.full_trial, self.expected) for result in candidates)
        return self._best([result for result in full if result is not None and improves(result, full_error)])

    def _add_second_cause(self, matches: list[Result], singles: list[Result]) -> list[Result]:
        """Return pairs of the best match and a second cause that explains what it leaves; the matches if there are none."""
        first = min(matches, key=lambda result: result.error)
        if len(first.causes) > 1 or first.is_single_rounding or first.error <= self.evaluator.rounding_tolerance:
            return matches
        on_subset = self.evaluator.try_causes(first.causes)
        if on_subset is None:
            return matches
        return self._confirm_improvements(self._pairs_with(on_subset, singles), on_subset.error, first.error) or matches

    def _pairs_with(self, first: Result, singles: list[Result]) -> list[Result]:
        """Return the results of pairs of a single cause and each cause of another family."""
        others = [result for result in singles if result.causes[0].family != first.causes[0].family]
        return list(filter(None, (self._try_pair(first, other) for other in others)))

    def _try_pair(self, first: Result, second: Result) -> Result | None:
        """Return the result of two single causes together, or None if one explains little of what the other leaves."""
        result = self.evaluator.try_causes((*first.causes, *second.causes))
        limit = MAX_REMAINING_OTHER * min(first.error, second.error)
        return result if result is not None and result.error <= limit else None

    def _best(self, confirmed: list[Result]) -> list[Result]:
        """Return the best of the results that match on all images, and others that are as good, each name once."""
        best = min((result.error for result in confirmed), default=0.0)
        limit = max(FLOAT64_TOLERANCE, MAX_ERROR_RATIO * five_sigma_factor(self.expected.logits.size) * best)
        confirmed = [result for result in confirmed if result.error <= limit]
        if self.expected.intermediates:
            tolerances = (max(self.tolerance, MAX_ERROR_RATIO * result.error) for result in confirmed)
            consistent = [
                result
                for result, tolerance in zip(confirmed, tolerances, strict=True)
                if matches_intermediates(result.trial, self.expected, tolerance)
            ]
            confirmed = consistent or confirmed
        return _roundest_first(list({result.name: result for result in reversed(confirmed)}.values())[::-1])

    def _match_within_rounding(
        self, full: Result, tried: list[Result], singles: list[Result]
    ) -> tuple[list[Result], RoundingError | None]:
        """Return the causes whose remaining error a rounding explains, and this rounding.

        First the best of them is tried together with every other cause, because it may be one of two causes that match
        exactly.
        """
        candidates = [result for result in tried if result.causes and self._is_within_rounding(result, self.baseline.error)]
        if not candidates:
            return [], None
        best = min(candidates, key=lambda result: result.error)
        if len(best.causes) == 1 and (exact := self._confirm(self._pairs_with(best, singles))):
            return exact, None
        full_results = [
            self.evaluator.try_causes(result.causes, self.full_trial, self.expected)
            for result in candidates
            if result.error <= MAX_ERROR_RATIO * best.error
        ]
        within = [result for result in full_results if result is not None and self._is_within_rounding(result, full.error)]
        matches = _roundest_first(within)
        return matches, self._explaining_rounding(matches[0].error) if matches else None

    def _is_within_rounding(self, result: Result, baseline_error: float) -> bool:
        return result.error <= MAX_REMAINING_COARSE * baseline_error and self._explaining_rounding(result.error) is not None

    # Score biases -----------------------------------------------------------------------------------------------------

    def _try_score_biases(self) -> list[Result]:
        return self.evaluator.try_each("biases of the scores", list(score_biases(self.full_trial, self.expected)))

    # Two causes -------------------------------------------------------------------------------------------------------

    def _distinct_results(self, singles: list[Result]) -> list[Result]:
        """Return the results whose outputs differ from the baseline and from those of every likelier result."""
        distinct: list[Result] = []
        norm = float(np.linalg.norm(self.baseline.outputs))
        for result in singles:
            same_shape = (other for other in [self.baseline, *distinct] if other.outputs.shape == result.outputs.shape)
            if math.isfinite(result.error) and not any(
                np.linalg.norm(result.outputs - other.outputs) <= FLOAT64_TOLERANCE * norm for other in same_shape
            ):
                distinct.append(result)
        return distinct

    def _try_pairs(self, singles: list[Result]) -> list[Result]:
        """Try pairs, the likeliest first, until one matches; return all results, the variants of the match last."""
        results: list[Result] = []
        causes = [result.causes[0] for result in singles]
        outputs, families = [result.outputs for result in singles], [cause.family for cause in causes]
        order = likeliest_pairs(
            outputs, self.baseline.outputs, self.subset.logits, families, [cause.rare for cause in causes]
        )
        for done, (a, b) in enumerate(islice(order, self.budget)):
            self.evaluator.progress("pairs", done, self.budget)
            first, second = sorted((singles[a], singles[b]), key=lambda single: single.causes[0].blocks_unchanged)
            result = self._try_pair(first, second)
            if result is None:
                continue
            if self.matches(result, self.baseline.error):
                return [*results, *self._variants(first, second, singles)]
            results.append(result)
        return results

    def _variants(self, first: Result, second: Result, singles: list[Result]) -> list[Result]:
        """Return the results of a pair, and of those with another cause of the same family in place of one of its two."""

        def same_family(single: Result) -> list[Result]:
            return [other for other in singles if other.causes[0].family == single.causes[0].family]

        pairs = [(first, other) for other in same_family(second)]
        pairs += [(other, second) for other in same_family(first) if other is not first]
        return list(filter(None, (self._try_pair(*pair) for pair in pairs)))


def _roundest_first(matches: list[Result]) -> list[Result]:
    """Return matches that are equally good, sorted by the digits of their solved numbers, then by their printed errors.

    A mistake has a round number.  If the last MLP is multiplied by 0.9, the other addend times 1.111111 fits as well.
    """

    def order(match: Result) -> tuple[int, float]:
        digits = sum(cause.solved_digits for cause in match.causes)
        return digits, float(f"{match.error:.1e}") if digits else 0.0  # others stay in the order of their likelihood

    return sorted(matches, key=order)
