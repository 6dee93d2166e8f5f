"""The comparison of two models, step by step: match the parameters, run both models, and find where they part."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any, Literal

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.any_model import weights as model_weights
from parity.comparison.any_model.correspondence import Correspondence, match
from parity.comparison.any_model.flax_runner import FlaxRunner, remedy
from parity.comparison.any_model.hints import detached_inputs, other_momenta, swapped_outputs
from parity.comparison.any_model.inputs import as_arrays
from parity.comparison.any_model.matching import Evidence, Uses
from parity.comparison.any_model.outputs import (
    as_lines,
    not_compared,
    pair_outputs,
    parse_losses,
    parse_permutations,
    permuted_shape,
)
from parity.comparison.any_model.parameters import Axes
from parity.comparison.any_model.provenance import digest, framework_versions
from parity.comparison.any_model.random_masks import MaskStream
from parity.comparison.any_model.report import GRADIENT_OF, STATISTICS, Report, Row, Tensors, UnequalWeightsError
from parity.comparison.any_model.tensor_comparison import compare_tensors, error_of
from parity.comparison.any_model.torch_runner import TorchRunner
from parity.comparison.any_model.trace.graph import Graph
from parity.comparison.any_model.trace.origin import (
    Origin,
    count_agreeing_operations,
    find_order,
    find_origin,
    find_wrong_gradient,
    find_wrong_integers,
)
from parity.comparison.any_model.trace.precision import find_imprecise_operation
from parity.comparison.any_model.trace.tables import Table, find_epsilons, find_rounded_tables
from parity.comparison.tolerances import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, ErrorBudget, ErrorNorms
from vit_spec import InputError

MAX_TRIED_GROUPS = 3  # of square matrices, whose orders of axes are tried
BY_TRIAL = "by trial: the other order fails"
IMAGE_AXES = "b y x c <-> b c y x"


class Comparison:
    """Two models with their inputs, and what has been found of them."""

    def __init__(
        self,
        flax_apply: Callable[..., Any],
        params: Any,
        torch_module: Any,
        inputs: Any,
        *,
        layouts: str | Sequence[str],
        weights: str,
        axes: tuple[str | Sequence[str], str | Sequence[str]],
        outputs: str | Sequence[str],
        loss: Any,
        train: bool,
        seed: int,
    ) -> None:
        """Prepare a comparison; the arguments are those of `compare_models`."""
        self.environment = framework_versions()
        self._params = params if train else model_weights.in_evaluation(params)
        self._flax_weights, constants = model_weights.flax_weights(flax_apply, self._params)
        self._torch_weights, skipped, optional = model_weights.torch_weights(torch_module)
        if self._torch_weights.keys() - optional and not self._flax_weights:
            what = "and torch_module has parameters"
            raise InputError(f"params has no floating-point arrays, {what}: give the weights of the Flax model")
        sides = (self._flax_weights, self._torch_weights)
        shapes = [{key: np.shape(array) for key, array in side.items()} for side in sides]
        self._match = partial(
            match, *shapes, layouts=as_lines("layouts", layouts), skipped=skipped, optional=optional, constants=constants
        )
        self._fixed = optional
        self.inputs = as_arrays(inputs)
        names = ("input_axes", "output_axes")
        self._axes = [parse_permutations(as_lines(name, lines)) for name, lines in zip(names, axes, strict=True)]
        if len(self._axes[0]) > len(self.inputs):
            raise InputError(f"input_axes has {len(self._axes[0])} lines for {len(self.inputs)} inputs: give one for each")
        self._selected = as_lines("outputs", outputs)
        self._masks = MaskStream(seed) if train else None
        losses = parse_losses(loss)
        self.flax = FlaxRunner(
            flax_apply, self._params, self._flax_weights, self.inputs, masks=self._masks, loss=losses[0], seed=seed
        )
        self.torch = TorchRunner(
            torch_module,
            self._torch_weights,
            self.inputs,
            self._axes,
            masks=self._masks,
            loss=losses[1],
            seed=seed,
        )
        self._source = weights
        self._evidence = Evidence(axes=model_weights.matrix_axes(torch_module), tied=model_weights.tied_keys(torch_module))
        self.runs: dict[str, Tensors] = {}
        self.tables: tuple[Table, ...] = ()
        self._graphs: tuple[Graph, Graph] | None = None
        self._contradicting: list[tuple[str, str]] = []
        self._misleading: list[tuple[str, str]] = []  # pairs that the order of use gives, whose names are less similar
        self._unbiased: list[str] = []  # keys of running variances, see `_use_unbiased_variances`

    def match(self) -> None:
        """Match the parameters, and give both models the same weights.

        Raises:
            UnequalWeightsError: the weights must be equal, and differ.
            InputError: a parameter is ambiguous or has no counterpart.
        """
        try:
            self._use(self._match(evidence=self._evidence))
        except InputError:  # the order in which a forward pass uses the parameters may decide
            hint = self.axes_hint()
            graphs = (_called("flax", self._record_flax, hint), _called("torch", self._record_torch, hint))
            self._evidence = replace(self._evidence, uses=self._uses(*graphs))
            self._use(self._match(evidence=self._evidence))
        known = self._evidence.axes
        orders = self.correspondence.orders_of_siblings(known)
        axes = {key: Axes(order, "square: as the other matrices") for key, order in orders.items()}
        if axes:
            self._evidence = replace(self._evidence, axes={**known, **axes})
            self._use(self._match(evidence=self._evidence))

    def _use(self, correspondence: Correspondence) -> None:
        """Give both models the same weights, converted by a mapping."""
        self.correspondence = correspondence
        both = _copy_weights(self._source, correspondence, self._flax_weights, self._torch_weights)
        constants = {key: array for key, array in self._flax_weights.items() if f"{key} of flax" in correspondence.skipped}
        self.flax.weights, self.torch.weights = {**constants, **both[0]}, both[1]
        self.flax.constants = frozenset(constants)

    def name_outputs(self) -> None:
        """Find the outputs that are compared.

        Raises:
            InputError: a model does not take the inputs, or the outputs do not correspond.
        """
        of_flax = _called("flax", self.flax.output_shapes, self.axes_hint())
        of_torch = _called("torch", self.torch.output_shapes, self.axes_hint())
        self.names = pair_outputs(list(of_flax), list(of_torch), self._selected)
        for n, (name, other) in enumerate(self.names.items()):
            shape = permuted_shape(of_torch[other], self._axes[1], n, f"output {n}")
            if of_flax[name] != shape:
                raise InputError(
                    f"{name}: flax returns shape {of_flax[name]} and torch {shape}; if only the order of the axes differs, "
                    f"give output_axes, as in '{IMAGE_AXES}'{self.axes_hint()}"
                )
        self.skipped = not_compared("flax", self.flax.skipped, of_flax, self.names)
        self.skipped |= not_compared("torch", self.torch.skipped, of_torch, self.names.values())

    def axes_hint(self) -> str:
        """Return a clause that names input_axes, if an input looks like images and no order of its axes is given."""
        is_image = any(x.ndim == 4 and (x.shape[1] <= 4 or x.shape[3] <= 4) for x in self.inputs)
        return f"; the inputs may need input_axes, as in '{IMAGE_AXES}'" if is_image and not any(self._axes[0]) else ""

    def run(self, dtype: str) -> None:
        """Run both models in a dtype.

        Raises:
            InputError: an output is NaN, or Flax's model has no gradient that JAX can compute.
        """
        outputs, gradients, input_gradients = _called("flax", partial(self.flax.run, dtype, list(self.names)))
        torch_tensors = self._without_zeros(self.torch.run(dtype, self.names))
        for name in outputs:
            sides = {"flax": outputs[name], "torch": torch_tensors[name]}
            with_nan = [side for side, values in sides.items() if np.isnan(np.asarray(values, np.float64)).any()]
            if len(with_nan) == 1:
                (other,) = sides.keys() - set(with_nan)
                raise InputError(
                    f"{name}: the {with_nan[0]} model returns NaN and the {other} model does not, for the same inputs and "
                    "weights; look for a softmax whose row is all -inf, a division by 0 or an overflow there"
                )
            if with_nan:
                raise InputError(f"{name}: both models return NaN, which cannot be compared; check weights and inputs")
        tensors = {**outputs, **input_gradients, **self._statistics()}
        tensors |= {f"{GRADIENT_OF}{key}": array for key, array in self.correspondence.to_torch(gradients).items()}
        # Only running statistics may be missing, if Flax does not return them.
        names = [name for name in torch_tensors if name in tensors or not name.startswith(STATISTICS)]
        for name in names:
            if all(np.isnan(np.asarray(each[name], np.float64)).any() for each in (tensors, torch_tensors)):
                what = "is NaN in both models, which cannot be compared; give a loss that has a gradient at these inputs"
                raise InputError(f"{name} {what}")
        self._use_unbiased_variances(tensors, torch_tensors)
        self.runs[f"flax {dtype}"] = {name: tensors[name] for name in names}
        self.runs[f"torch {dtype}"] = {name: torch_tensors[name] for name in names}
        self._graphs = None

    def _without_zeros(self, tensors: Tensors) -> Tensors:
        """Return PyTorch's tensors with 0 for the gradients of parameters that are held at zero, as Flax has none."""
        keys = {key for zero in self.correspondence.zeros if zero.side == "torch" for key in zero.keys}
        own = {key: np.array(tensors[f"{GRADIENT_OF}{key}"]) for key in sorted(keys) if f"{GRADIENT_OF}{key}" in tensors}
        for _, entries in self.correspondence.held_at_zero("torch", own):
            entries[...] = 0
        return {**tensors, **{f"{GRADIENT_OF}{key}": array for key, array in own.items()}}

    def _statistics(self) -> Tensors:
        """Return the running statistics that Flax has updated, by the names that PyTorch's have."""
        keys = dict(self.correspondence.keys())
        return {f"{STATISTICS}{keys[key]}": array for key, array in self.flax.statistics.items() if key in keys}

    def _use_unbiased_variances(self, tensors: Tensors, torch_tensors: Tensors) -> None:
        """Divide the batch's part of Flax's running variances by n - 1, as PyTorch does, where they then agree better."""
        for key, (momentum, n) in self.torch.batch_norms.items():
            name, reference = f"{STATISTICS}{key}", torch_tensors.get(f"{STATISTICS}{key}")
            if name in tensors and reference is not None and n > 1:
                kept = (1 - momentum) * self.torch.weights[key]
                unbiased = kept + (np.asarray(tensors[name], np.float64) - kept) * (n / (n - 1))
                errors = [ErrorNorms.of(each, reference).relative_rms() for each in (unbiased, tensors[name])]
                if errors[0] < errors[1]:
                    tensors[name] = unbiased.astype(tensors[name].dtype)
                    self._unbiased.append(key)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The comparison of all tensors of the runs so far, and of the rates of dropout."""
        differences = self._masks.differences() if self._masks else {}
        rates = (Row(name, difference, False, True, ErrorBudget()) for name, difference in differences.items())
        return (*compare_tensors(self.runs), *rates)

    @property
    def is_same_function(self) -> bool:
        """Whether all tensors pass G0."""
        return all(row.same_function for row in self.rows)

    def try_orders_of_axes(self) -> None:
        """Try the other order of axes of square matrices.

        An order is kept that passes.  Otherwise one is kept with which the outputs agree, so that only gradients differ, or
        the models agree for longer, if nothing but a convention is against it.
        """
        groups = self.correspondence.squares()[:MAX_TRIED_GROUPS]
        other_axes = {key: self._other_axes(key) for _, keys in groups for key in keys}
        best, kept = self._agreement(bool(groups and groups[0][0])), self._state()
        for n in range(1, len(groups) + 1):
            for several in combinations(groups, n):
                axes = {key: other_axes[key] for _, keys in several for key in keys}
                evidence = replace(self._evidence, axes={**self._evidence.axes, **axes})
                if self._runs_with(self._match(evidence=evidence)):
                    if self.is_same_function:
                        return
                    agreement = self._agreement(all(name for name, _ in several))
                    if agreement > best:
                        best, kept = agreement, self._state()
        self._restore(kept)

    def _agreement(self, has_operations: bool) -> float:
        """Return how long the models agree: infinity if the outputs do, else the number of operations, if asked for."""
        if all(row.same_function for row in self.rows if row.name in self.names):
            return float("inf")
        return count_agreeing_operations(*self.graphs()) if has_operations else 0

    def try_order_of_use(self) -> None:
        """Try to match the parameters by the order in which both models use them.

        This mapping is kept if it passes, or if the models part later with it: then names have misled, and something else
        is wrong besides.  It is not kept if it contradicts the names, as a checkpoint that is converted by its names would
        give other outputs: a layer may be used in the place of another one.
        """
        evidence = replace(self._evidence, uses=self._uses(*self.graphs()), uses_first=True)
        try:
            other = self._match(evidence=evidence)
        except InputError:
            return
        by_names = self.correspondence
        if dict(other.keys()) == dict(by_names.keys()):
            return
        agreeing, before = count_agreeing_operations(*self.graphs()), self._state()
        has_run, contradicting = self._runs_with(other), other.contradicts_names(by_names)
        if has_run and self.is_same_function and contradicting:
            self._contradicting = contradicting
        is_better = has_run and (self.is_same_function or count_agreeing_operations(*self.graphs()) > agreeing)
        if contradicting or not is_better:
            self._restore(before)
        else:
            self._misleading = other.less_similar_than(by_names)

    def _runs_with(self, correspondence: Correspondence) -> bool:
        """Run both models with another mapping; return False if the weights are then not equal, or an output is NaN."""
        try:
            self._use(correspondence)
            self.runs = {}
            self.run("float64")
        except (InputError, UnequalWeightsError):
            return False
        return True

    def _state(self) -> tuple[Correspondence, dict[str, Tensors], tuple[Graph, Graph] | None]:
        return self.correspondence, self.runs, self._graphs

    def _restore(self, state: tuple[Correspondence, dict[str, Tensors], tuple[Graph, Graph] | None]) -> None:
        correspondence, self.runs, self._graphs = state
        self._use(correspondence)

    def _uses(self, flax: Graph, torch: Graph) -> Uses:
        return self.flax.keys_by_use(flax), self.torch.keys_by_use(torch)

    def _other_axes(self, key: str) -> Axes:
        """Return the order of axes of a square matrix that was not tried yet."""
        known = self._evidence.axes.get(key)
        is_in_out = key in self.correspondence.squares_as_they_are() or (known is not None and known.names == "in out")
        return Axes("out in" if is_in_out else "in out", BY_TRIAL)

    def use_one_table(self) -> None:
        """Use PyTorch's constants in Flax where both differ only because one model has rounded them to float32."""
        graphs = self.graphs()
        epsilons = find_epsilons(*graphs, lambda side: getattr(self, side).record("float32"))
        self.tables = (*find_rounded_tables(*graphs), *epsilons)
        if self.tables:
            self.flax.use_tables([(table.flax, table.torch) for table in self.tables])
            self.run("float64")

    def graphs(self) -> tuple[Graph, Graph]:
        """Return the operations of both models in float64."""
        self._graphs = self._graphs or (self._record_flax(), self._record_torch())
        return self._graphs

    def _record_flax(self) -> Graph:
        return self.flax.record("float64")

    def _record_torch(self) -> Graph:
        return self.torch.record("float64")

    def find_origin(self) -> Origin | None:
        """Return where the models part; None if they pass, or if it was not found."""
        if wrong := [row.name.removeprefix(GRADIENT_OF) for row in self.rows if not row.same_function]:
            found, outputs = find_origin(*self.graphs()), [name for name in wrong if name in self.names]
            if outputs and (found is None or found.kind == "order"):  # the sums of the outputs agree, to 1e-12
                is_order = all(map(self._are_reordered, outputs))
                return find_order(*self.graphs()) if is_order else find_wrong_integers(*self.graphs())
            return found or find_wrong_gradient(wrong, self.correspondence)
        imprecise = next((row for row in self.rows if not row.same_precision), None)
        if imprecise is None or imprecise.flax is None or imprecise.torch is None:
            return None
        is_flax = imprecise.flax > imprecise.torch
        worse: Any = self.flax if is_flax else self.torch
        place = find_imprecise_operation(worse.record("float64"), worse.record("float32"))
        return Origin(place if is_flax else None, None if is_flax else place, "precision") if place else None

    def _are_reordered(self, name: str) -> bool:
        """Return whether both models return the same numbers in this output, if their order does not count."""
        both = [np.sort(self.runs[f"{side} float64"][name], axis=None) for side in ("flax", "torch")]
        return error_of(name, *both).relative_rms() <= FLOAT64_TOLERANCE

    def report(self, level: Literal["function", "precision"]) -> Report:
        """Return the report of a level; see `compare_models`."""
        return Report(
            level,
            self.rows,
            self.correspondence,
            self.runs,
            self.environment,
            digest(self.flax.weights, {str(n): x for n, x in enumerate(self.inputs)}),
            self.find_origin(),
            tuple(dict.fromkeys([*self.flax.parts, *self.torch.parts])),
            self.tables,
            tuple(self._hints()),
            tuple(self._notes()),
            self.skipped,
        )

    def _unequal_fixed_keys(self) -> list[str]:
        """Return the keys of PyTorch's fixed tensors, such as tables of positions, that differ from the values in Flax."""
        known = {
            key: self._torch_weights[key]
            for key in sorted(self._fixed.intersection(dict(self.correspondence.keys()).values()))
        }
        own = self.correspondence.to_torch(self._flax_weights) if known else {}
        return [key for key, array in known.items() if ErrorNorms.of(own[key], array).relative_rms() > FLOAT32_TOLERANCE]

    def _hints(self) -> Iterator[str]:
        flax, torch = (self.runs[f"{side} float64"] for side in ("flax", "torch"))
        swapped = list(swapped_outputs(flax, torch, self.names))
        yield from swapped
        yield from other_momenta(flax, torch, self.torch.weights, self.torch.batch_norms)
        if self._contradicting and not swapped:
            pairs = _listed([f"{a} <-> {b}" for a, b in self._contradicting])
            yield f"the models agree if names do not count: {pairs}; if this is right, say so in layouts"
        if not self.torch.is_detached:
            yield from detached_inputs(flax, torch)
        else:
            yield "the outputs of torch have no gradient: the model detaches them, or runs under torch.no_grad()"
        if self._masks is not None:
            yield from self._masks.hints()
        elif self.flax.training:
            names = _listed([*dict.fromkeys(self.flax.training)])
            yield f"{names} of flax ran in training mode: call model.eval() first, or give the nnx.Module itself as params"

    def _notes(self) -> Iterator[str]:
        """Yield what the comparison cannot show, because of its inputs, its weights, or what the models return."""
        from flax import nnx

        for n, x in enumerate(self.inputs):
            if x.size > 1 and (x == x.flat[0]).all():
                yield f"all entries of input {n} are {x.flat[0]}: a model that ignores it would pass; use others"
        used = self.torch.weights
        constant = [key for key, array in used.items() if array.size and array.min() == array.max() in (0.0, 1.0)]
        if constant:
            yield f"all entries of {_listed(constant)} of torch are 0 or 1, which hides mistakes: perturb the weights first"
        if self._misleading:
            pairs = _listed([f"{a} <-> {b}" for a, b in self._misleading])
            yield f"the order of use overrides more similar names, {pairs}: if the names are right, layers are exchanged"
        if transposed := self.correspondence.transposed_namesakes(BY_TRIAL):
            use = f"{_listed(transposed)} {'are' if len(transposed) > 1 else 'is'} used transposed"
            yield f"{use}, which only a trial of both orders shows: if both models store the same matrix, one is wrong"
        yield from self._notes_on_tensors()
        if fixed := self._unequal_fixed_keys():
            which = f"{_listed(fixed)} of torch, which no optimizer trains"
            yield f"the values of {which}, differ between the two models: both ran with those of {self._source}"
        if self.torch.is_random:
            yield "torch draws random numbers in evaluation, as a dropout does that ignores eval(): the next run may differ"
        if self._unbiased:
            keys = _listed([*dict.fromkeys(self._unbiased)])
            yield f"PyTorch divides the running variance of {keys} by n - 1, and Flax by n; here both divide by n - 1"
        if self._masks is not None:
            yield from self._masks.notes()
            updated = {key for key in self._torch_weights if key.endswith(("running_mean", "running_var"))}
            if missing := sorted(updated - {name.removeprefix(STATISTICS) for name in self._statistics()}):
                what = f"{_listed(missing)} of torch, which are not compared"
                yield (
                    f"flax does not update {what}: call model.train(), or give use_running_average=False"
                    if isinstance(self._params, nnx.Module)
                    else f"flax does not return {what}: use mutable=['batch_stats']"
                )

    def _notes_on_tensors(self) -> Iterator[str]:
        """Yield what the comparison cannot show, because outputs or gradients of PyTorch have one value."""
        computed = self.runs["torch float64"]
        if equal := [name for name in self.names if _is_constant(computed[name])]:
            yield f"all entries of {_listed(equal)} are 0 or equal, which hides mistakes: use other weights or inputs"
        if self.torch.is_detached:  # which is a hint
            return
        held = {key for zero in self.correspondence.zeros for key in zero.keys}
        keys = [key for key in self.torch.weights if key not in held and f"{GRADIENT_OF}{key}" in computed]
        if unused := [key for key in keys if not computed[f"{GRADIENT_OF}{key}"].any()]:
            yield f"all gradients of {_listed(unused)} are 0: the outputs do not show how the models use them"


def _is_constant(array: Array) -> bool:
    """Return whether all entries of an array are equal; a single one says nothing unless it is 0."""
    return bool(array.size and (array == array.flat[0]).all() and (array.size > 1 or not array.any()))


def _listed(keys: Sequence[str]) -> str:
    return f"{', '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"


def _called(side: str, function: Callable[[], Any], hint: str = "") -> Any:
    """Return the result of a function that runs a model; an error becomes an InputError if it is known what to do.

    hint: a clause that says what to do about an error without a remedy of its own.
    """
    try:
        return function()
    except InputError:
        raise
    except Exception as error:
        hint = remedy(error) or hint
        if not hint:
            raise
        first = str(error).strip().partition("\n")[0][:200].rstrip(".")
        raise InputError(f"the {side} model raised {type(error).__name__}: {first}{hint}") from error


def _copy_weights(source: str, correspondence: Correspondence, flax: Tensors, torch: Tensors) -> tuple[Tensors, Tensors]:
    """Return equal weights for both models, in the keys and layouts of Flax and of PyTorch.

    Raises:
        UnequalWeightsError: `source` is "equal", and the weights differ.
        InputError: a parameter is not zero that is held at zero.
    """
    for side, arrays in (("flax", flax), ("torch", torch)):
        if source not in (side, "equal"):
            continue
        for key, entries in correspondence.held_at_zero(side, arrays):
            if entries.any():
                raise InputError(f"{key} of {side} is held at zero by a line of layouts, and is not zero")
    if source == "flax":
        return flax, correspondence.to_torch(flax)
    converted = correspondence.to_flax(torch)
    if source == "equal":
        for key, array in converted.items():
            if not np.array_equal(array, flax[key]):
                difference = ErrorNorms.of(array, flax[key]).relative_rms()
                raise UnequalWeightsError(
                    f"the weights are not equal: {key} differs by {difference:.1e}\n"
                    f"parameters (flax <-> torch):\n{correspondence}"
                )
    return converted, torch
