"""The comparison of two models, step by step: match the parameters, run both models, and find where they part."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any, Literal

import numpy as np

from parity.comparison.any_model import weights as model_weights
from parity.comparison.any_model.both_models import BothModels
from parity.comparison.any_model.correspondence import Correspondence, match
from parity.comparison.any_model.matching import PairEvidence
from parity.comparison.any_model.notes import hints, notes
from parity.comparison.any_model.outputs import as_lines
from parity.comparison.any_model.parameters import BY_TRIAL, Axes
from parity.comparison.any_model.provenance import digest, fingerprints
from parity.comparison.any_model.report import GRADIENT_OF, PairReport, UnequalWeightsError
from parity.comparison.any_model.tensor_comparison import error_of
from parity.comparison.any_model.trace.origin import (
    Origin,
    count_agreeing_operations,
    find_order,
    find_origin,
    find_wrong_gradient,
    find_wrong_integers,
)
from parity.comparison.any_model.trace.precision import find_imprecise_operation, large_error
from parity.comparison.any_model.trace.tables import Table, find_epsilons, find_rounded_tables
from parity.comparison.tolerances import FLOAT64_TOLERANCE
from vit_spec import InputError

MAX_TRIED_GROUPS = 3  # of square matrices, whose orders of axes are tried


class Comparison:
    """The findings about two models.

    Attributes:
        models: both models, with the weights of the mapping in use.
        tables: the constants that one model has rounded to float32.
    """

    def __init__(self, models: BothModels, torch_module: Any, layouts: str | Sequence[str]) -> None:
        """Prepare a comparison; `torch_module` and `layouts` are as for `compare_models`."""
        self.models = models
        weights = (models.flax_weights, models.torch_weights)
        shapes = [{key: np.shape(array) for key, array in side.items()} for side in weights]
        self._match: Callable[..., Correspondence] = partial(
            match,
            *shapes,
            layouts=as_lines("layouts", layouts),
            skipped=models.without_counterpart,
            optional=models.fixed,
            constants=models.constants,
        )
        self._axes_of_classes = model_weights.matrix_axes(torch_module)
        self._evidence = PairEvidence(axes=self._axes_of_classes, tied=model_weights.tied_keys(torch_module))
        self.tables: tuple[Table, ...] = ()
        self._contradicting: list[tuple[str, str]] = []
        self._misleading: list[tuple[str, str]] = []  # pairs that the order of use gives, whose names are less similar

    def match(self) -> None:
        """Match the parameters, and give both models the same weights.

        Raises:
            UnequalWeightsError: the weights must be equal, and differ.
            InputError: a parameter is ambiguous or has no counterpart.
        """
        try:
            self.models.use(self._match(evidence=self._evidence))
        except InputError:  # the order in which a forward pass uses the parameters may decide
            self._evidence = replace(self._evidence, uses=self.models.uses())
            self.models.use(self._match_by_use())
        known = self._evidence.axes
        orders = self.models.correspondence.orders_of_siblings(known)
        axes = {key: Axes(order, "square: as the other matrices") for key, order in orders.items()}
        if axes:
            self._evidence = replace(self._evidence, axes={**known, **axes})
            self.models.use(self._match(evidence=self._evidence))

    def _match_by_use(self) -> Correspondence:
        """Return the mapping that names, shapes and the order of use give; names are split only where it needs that."""
        try:
            return self._match(evidence=self._evidence)
        except InputError as error:
            split = replace(self._evidence, splits_names=True)
            try:
                found = self._match(evidence=split)
            except InputError:
                raise error from None
            self._evidence = split
            return found

    def try_orders_of_axes(self) -> None:
        """Try the other order of axes of square matrices.

        An order is kept that passes.  Otherwise one is kept with which the outputs agree, so that only gradients differ, or
        the models agree for longer, if nothing but a convention is against it.
        """
        groups = self.models.correspondence.squares()[:MAX_TRIED_GROUPS]
        other_axes = {key: self._other_axes(key) for _, keys in groups for key in keys}
        best, kept = self._agreement(bool(groups and groups[0][0])), self.models.state()
        for n in range(1, len(groups) + 1):
            for several in combinations(groups, n):
                axes = {key: other_axes[key] for _, keys in several for key in keys}
                evidence = replace(self._evidence, axes={**self._evidence.axes, **axes})
                if self._runs_with(self._match(evidence=evidence)):
                    if self.models.is_same_function:
                        return
                    agreement = self._agreement(all(name for name, _ in several))
                    if agreement > best:
                        best, kept = agreement, self.models.state()
        self.models.restore(kept)

    def _agreement(self, has_operations: bool) -> float:
        """Return how long the models agree: infinity if the outputs do, else the number of operations, if asked for."""
        if all(row.same_function for row in self.models.rows if row.name in self.models.names):
            return float("inf")
        return count_agreeing_operations(*self.models.graphs()) if has_operations else 0

    def try_order_of_use(self) -> None:
        """Try to match the parameters by the order in which both models use them.

        This mapping is kept if it passes, or if the models part later with it: then names have misled, and something else
        is wrong besides.  It is not kept if it contradicts the names, as a checkpoint that is converted by its names would
        give other outputs: a layer may be used in the place of another one.
        """
        evidence = replace(self._evidence, uses=self.models.uses(), uses_first=True)
        try:
            other = self._match(evidence=evidence)
        except InputError:
            return
        by_names = self.models.correspondence
        if dict(other.keys()) == dict(by_names.keys()):
            return
        agreeing, before = count_agreeing_operations(*self.models.graphs()), self.models.state()
        has_run, contradicting = self._runs_with(other), other.contradicts_names(by_names)
        if has_run and self.models.is_same_function and contradicting:
            self._contradicting = contradicting
        is_better = has_run and (
            self.models.is_same_function or count_agreeing_operations(*self.models.graphs()) > agreeing
        )
        if contradicting or not is_better:
            self.models.restore(before)
        else:
            self._misleading = other.less_similar_than(by_names)

    def _runs_with(self, correspondence: Correspondence) -> bool:
        """Run both models with another mapping; return False if the weights are then not equal, or an output is NaN."""
        try:
            self.models.use(correspondence)
            self.models.run("float64")
        except (InputError, UnequalWeightsError):
            return False
        return True

    def _other_axes(self, key: str) -> Axes:
        """Return the order of axes of a square matrix that was not tried yet."""
        known = self._evidence.axes.get(key)
        is_in_out = key in self.models.correspondence.squares_as_they_are() or (
            known is not None and known.names == "in out"
        )
        return Axes("out in" if is_in_out else "in out", BY_TRIAL)

    def use_one_table(self) -> None:
        """Use PyTorch's constants in Flax where both differ only because one model has rounded them to float32."""
        graphs = self.models.graphs()
        epsilons = find_epsilons(*graphs, lambda side: getattr(self.models, side).record("float32"))
        self.tables = (*find_rounded_tables(*graphs), *epsilons)
        if self.tables:
            self.models.use_tables(self.tables)
            self.models.run("float64")

    def find_origin(self) -> Origin | None:
        """Return where the models part; None if they pass, if their losses do, or if it was not found."""
        models = self.models
        if models.is_only_loss_different:
            return None
        if wrong := [row.name.removeprefix(GRADIENT_OF) for row in models.rows if not row.same_function]:
            found, outputs = find_origin(*models.graphs()), [name for name in wrong if name in models.names]
            if outputs and (found is None or found.kind == "order"):  # the sums of the outputs agree, to 1e-12
                is_order = all(map(self._are_reordered, outputs))
                return find_order(*models.graphs()) if is_order else find_wrong_integers(*models.graphs())
            return found or find_wrong_gradient(wrong, models.correspondence)
        imprecise = next((row for row in models.rows if not row.same_precision), None)
        if imprecise is None or imprecise.flax is None or imprecise.torch is None:
            return None
        side = "flax" if imprecise.flax > imprecise.torch else "torch"
        worse: Any = getattr(models, side)
        limit = large_error(getattr(imprecise, side))
        if place := find_imprecise_operation(worse.record("float64"), worse.record("float32"), limit):
            found = Origin(place, place, "precision")
        else:
            gradients = [row for row in models.rows if row.name.startswith(GRADIENT_OF) and getattr(row, side) > limit]
            keys = [row.name.removeprefix(GRADIENT_OF) for row in gradients]
            found = find_wrong_gradient(keys, models.correspondence, "precision")
        if found is None:
            return None
        return replace(found, torch=None) if side == "flax" else replace(found, flax=None)

    def _are_reordered(self, name: str) -> bool:
        """Return whether both models return the same numbers in this output, if their order does not count."""
        both = [np.sort(self.models.runs[f"{side} float64"][name], axis=None) for side in ("flax", "torch")]
        return error_of(name, *both).relative_rms() <= FLOAT64_TOLERANCE

    def report(self, level: Literal["function", "precision"]) -> PairReport:
        """Return the report of a level; see `compare_models`."""
        models = self.models
        weights, inputs = models.flax.weights, models.inputs
        return PairReport(
            level,
            models.rows,
            models.correspondence,
            models.runs,
            models.environment,
            digest(weights, {str(n): x for n, x in enumerate(inputs)}),
            self.find_origin(),
            tuple(dict.fromkeys([*models.flax.parts, *models.torch.parts])),
            self.tables,
            tuple(hints(models, self._contradicting)),
            tuple(notes(models, self._misleading, self._axes_of_classes)),
            models.skipped_outputs,
            {
                "weights": fingerprints(weights),
                "inputs": fingerprints({f"input {n}": x for n, x in enumerate(inputs)}),
            },
        )
