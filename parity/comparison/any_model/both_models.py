"""Two models that run on the same inputs with the same weights, and the comparison of what they return."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from parity.comparison.any_model import weights as model_weights
from parity.comparison.any_model.correspondence import Correspondence
from parity.comparison.any_model.flax_runner import FlaxRunner, remedy
from parity.comparison.any_model.inputs import as_arrays
from parity.comparison.any_model.matching import Uses
from parity.comparison.any_model.outputs import (
    NOT_COMPARED,
    as_lines,
    not_compared,
    pair_outputs,
    parse_losses,
    parse_permutations,
    permuted_shape,
)
from parity.comparison.any_model.provenance import framework_versions
from parity.comparison.any_model.random_masks import MaskStream
from parity.comparison.any_model.report import GRADIENT_OF, STATISTICS, TensorRow, Tensors, UnequalWeightsError
from parity.comparison.any_model.tensor_comparison import OperationRuns, compare_tensors
from parity.comparison.any_model.torch_runner import TorchRunner
from parity.comparison.any_model.trace.choices import Arithmetic, Choices, OtherOperationsError
from parity.comparison.any_model.trace.graph import Graph
from parity.comparison.any_model.trace.tables import Table
from parity.comparison.tolerances import (
    FLOAT64_TOLERANCE,
    MAX_UNDIVIDED_TOLERANCE,
    PERTURBATION_ROUNDOFFS,
    ErrorBudget,
    ErrorNorms,
)
from vit_spec import InputError

State = tuple[Correspondence, dict[str, Tensors], tuple[TensorRow, ...], tuple[Tensors, ...], tuple[Graph, Graph] | None]

_MAX_PERTURBATIONS = 8  # all change a loss by less than a twelfth of what is usual with a probability of about 1e-9
IMAGE_AXES = "b y x c <-> b c y x"


class BothModels:
    """A Flax and a PyTorch model, with their inputs.

    Attributes:
        environment: versions of the libraries, and the machine type.
        params: the parameters of the Flax model, in evaluation or in training.
        inputs: the inputs, with the order of axes in Flax.
        masks: the masks of dropout in training; None in evaluation.
        flax, torch: the runners of both models.
        flax_weights, torch_weights: the weights that the models were given, by key.
        constants: keys of `flax_weights` that may have no counterpart.
        without_counterpart: keys of PyTorch's tensors that have no counterpart, and why.
        fixed: keys of `torch_weights` that no optimizer trains, and that may have no counterpart.
        trained_by_flax: keys of PyTorch's frozen parameters for which Flax has a gradient, after `run`.
        has_own_loss: whether the caller has given a loss for a model.
        source: whose weights both use: "flax", "torch" or "equal".
        correspondence: the mapping of the parameters, after `use`.
        names: the names of Flax's outputs that are compared, with those of PyTorch's, after `name_outputs`.
        skipped_outputs: names of the outputs that are not compared, and why.
        runs: outputs, loss and gradients by run, as in `Report`.
        rows: the comparison of all tensors of the runs, and of the rates of dropout.
        choices: after `run_by_operation`, the choices of both models by framework, if rounding changes any.
        perturbed: what PyTorch returns in float64 for perturbed weights and inputs, once for each perturbation that was
            measured because differences may be of rounding.
        unbiased: keys of the running variances that both models divide by n - 1 here.
    """

    def __init__(
        self,
        flax_apply: Callable[..., Any],
        params: Any,
        torch_module: Any,
        inputs: Any,
        *,
        weights: str,
        axes: tuple[str | Sequence[str], str | Sequence[str]],
        outputs: str | Sequence[str],
        loss: Any,
        train: bool,
        seed: int,
    ) -> None:
        """Prepare the models; the arguments are those of `compare_models`.

        Raises:
            InputError: a framework is not installed, or an argument is not what `compare_models` takes.
        """
        self.environment = framework_versions()
        self.params = params if train else model_weights.in_evaluation(params)
        self.flax_weights, self.constants = model_weights.flax_weights(flax_apply, self.params)
        self.torch_weights, self.without_counterpart, self.fixed = model_weights.torch_weights(torch_module)
        if self.torch_weights.keys() - self.fixed and not self.flax_weights:
            what = "and torch_module has parameters"
            raise InputError(f"params has no floating-point arrays, {what}: give the weights of the Flax model")
        self._frozen = model_weights.frozen_keys(torch_module)
        self.trained_by_flax: list[str] = []
        self.inputs = as_arrays(inputs)
        names = ("input_axes", "output_axes")
        self._axes = [parse_permutations(as_lines(name, lines)) for name, lines in zip(names, axes, strict=True)]
        if len(self._axes[0]) > len(self.inputs):
            raise InputError(f"input_axes has {len(self._axes[0])} lines for {len(self.inputs)} inputs: give one for each")
        self._selected = as_lines("outputs", outputs)
        self.masks = MaskStream(seed) if train else None
        losses = parse_losses(loss)
        self.flax = FlaxRunner(
            flax_apply, self.params, self.flax_weights, self.inputs, masks=self.masks, loss=losses[0], seed=seed
        )
        self.torch = TorchRunner(
            torch_module,
            self.torch_weights,
            self.inputs,
            self._axes,
            masks=self.masks,
            loss=losses[1],
            seed=seed,
        )
        self.has_own_loss = any(losses)
        self.source = weights
        self.runs: dict[str, Tensors] = {}
        self.choices: dict[str, Choices] = {}
        self._by_operation: dict[str, OperationRuns] = {}
        self.perturbed: tuple[Tensors, ...] = ()
        self.rows: tuple[TensorRow, ...] = ()
        self.unbiased: list[str] = []
        self._graphs: tuple[Graph, Graph] | None = None

    def use(self, correspondence: Correspondence) -> None:
        """Give both models the same weights, converted by a mapping; forget what they returned with others.

        Raises:
            UnequalWeightsError: the weights must be equal, and differ.
            InputError: a parameter is not zero that is held at zero.
        """
        self.correspondence = correspondence
        both = _copy_weights(self.source, correspondence, self.flax_weights, self.torch_weights)
        constants = {key: array for key, array in self.flax_weights.items() if f"{key} of flax" in correspondence.skipped}
        self.flax.weights = {**constants, **both[0]}
        self.torch.weights = {key: array for key, array in both[1].items() if key not in correspondence.skipped}
        self.flax.constants = frozenset(constants)
        self.runs, self.rows, self.choices, self._by_operation = {}, (), {}, {}
        self.perturbed, self._graphs = (), None

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
        self.skipped_outputs = not_compared("flax", self.flax.skipped, of_flax, self.names)
        self.skipped_outputs |= not_compared("torch", self.torch.skipped, of_torch, self.names.values())

    def axes_hint(self) -> str:
        """Return a clause that names input_axes, if an input looks like images and no order of its axes is given."""
        is_image = any(x.ndim == 4 and (x.shape[1] <= 4 or x.shape[3] <= 4) for x in self.inputs)
        return f"; the inputs may need input_axes, as in '{IMAGE_AXES}'" if is_image and not any(self._axes[0]) else ""

    def run(self, dtype: str) -> None:
        """Run both models in a dtype.

        Raises:
            InputError: an output is NaN, or Flax's model has no gradient that JAX can compute.
        """
        tensors = self._named(_called("flax", partial(self.flax.run, dtype, list(self.names))))
        torch_tensors = self._without_zeros(self.torch.run(dtype, self.names))
        for name in (*self.names, "loss"):
            sides = {"flax": tensors[name], "torch": torch_tensors[name]}
            with_nan = [side for side, values in sides.items() if np.isnan(np.asarray(values, np.float64)).any()]
            if len(with_nan) == 1:
                (other,) = sides.keys() - set(with_nan)
                raise InputError(
                    f"{name}: the {with_nan[0]} model returns NaN and the {other} model does not, for the same inputs and "
                    "weights; look for a softmax whose row is all -inf, a division by 0 or an overflow there"
                )
            if with_nan:
                raise InputError(f"{name}: both models return NaN, which cannot be compared; check weights and inputs")
        # Only buffers may be missing, if Flax does not update them.
        names = [name for name in torch_tensors if name in tensors or not name.startswith(STATISTICS)]
        for name in names:
            if all(np.isnan(np.asarray(each[name], np.float64)).any() for each in (tensors, torch_tensors)):
                what = "is NaN in both models, which cannot be compared; give a loss that has a gradient at these inputs"
                raise InputError(f"{name} {what}")
        trained = model_weights.trained_keys(self.params, self.flax_weights.keys())
        both = {b for a, b in self.correspondence.keys() if a in trained and b in self._frozen}
        self.trained_by_flax = sorted(key for key in both if tensors[f"{GRADIENT_OF}{key}"].any())
        self._use_unbiased_variances(tensors, torch_tensors)
        self.runs[f"flax {dtype}"] = {name: tensors[name] for name in names}
        self.runs[f"torch {dtype}"] = {name: torch_tensors[name] for name in names}
        self._compare()
        if dtype == "float64" and FLOAT64_TOLERANCE < max(row.difference for row in self.rows) <= MAX_UNDIVIDED_TOLERANCE:
            self._measure_rounding()

    def _measure_rounding(self) -> None:
        """Measure how far perturbed weights and inputs change PyTorch's tensors, until this explains all differences.

        One perturbation may happen to change a tensor of few entries little, such as the loss.
        """
        self.perturbed = ()
        for seed in range(_MAX_PERTURBATIONS):
            run = self.torch.run("float64", self.names, roundoffs=PERTURBATION_ROUNDOFFS, seed=seed)
            self.perturbed = (*self.perturbed, self._without_zeros(run))
            self._compare()
            if self.is_same_function:
                break

    def run_by_operation(self) -> None:
        """Let the rows say what of the float32 errors is left to the same choices, and to operations that only round.

        Nothing changes if rounding does not explain the choices that float32 changes.
        """
        choices = {"flax": Choices(), "torch": Choices()}
        arithmetics: tuple[Arithmetic, ...] = ("float32", "float64", "rounded")
        of_flax = map(self._named, self.flax.run_by_operation(choices["flax"], arithmetics, list(self.names)))
        of_torch = map(self._without_zeros, self.torch.run_by_operation(choices["torch"], arithmetics, self.names))
        both = {"flax": of_flax, "torch": of_torch}
        with suppress(OtherOperationsError):
            runs = {side: OperationRuns(next(each), next(each)) for side, each in both.items()}
            if not all(each.are_changed_by_rounding for each in choices.values()):
                return
            self._by_operation = runs
            self._compare()
            if self.is_only_inexact:  # the last run is as long as the others
                rounded = {side: next(each) for side, each in both.items()}
                self._use_unbiased_variances(rounded["flax"], rounded["torch"])
                self._by_operation = {side: replace(runs[side], rounded=rounded[side]) for side in both}
                self._compare()
        if self._by_operation:
            # XLA may have made other choices than its operations one by one.
            has_passed = any(row.name == "gradient" and row.same_precision and not row.rounded for row in self.rows)
            self.choices = choices if has_passed or any(each.changed for each in choices.values()) else {}

    def _named(self, returned: tuple[Tensors, Tensors, Tensors]) -> Tensors:
        """Return what a run of Flax has returned with the names and layouts of PyTorch's tensors."""
        outputs, gradients, input_gradients = returned
        named = {f"{GRADIENT_OF}{key}": array for key, array in self.correspondence.to_torch(gradients).items()}
        return {**outputs, **input_gradients, **self.statistics(), **named}

    def _without_zeros(self, tensors: Tensors) -> Tensors:
        """Return PyTorch's tensors with 0 for the gradients of parameters that are held at zero, as Flax has none."""
        keys = {key for zero in self.correspondence.zeros if zero.side == "torch" for key in zero.keys}
        own = {key: np.array(tensors[f"{GRADIENT_OF}{key}"]) for key in sorted(keys) if f"{GRADIENT_OF}{key}" in tensors}
        for _, entries in self.correspondence.held_at_zero("torch", own):
            entries[...] = 0
        return {**tensors, **{f"{GRADIENT_OF}{key}": array for key, array in own.items()}}

    def statistics(self) -> Tensors:
        """Return the running statistics and other variables that Flax has updated, by the names that PyTorch's have."""
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
                    self.unbiased.append(key)

    def _compare(self) -> None:
        """Compare all tensors of the runs so far, and the rates of dropout."""
        differences = self.masks.differences() if self.masks else {}
        rates = (
            TensorRow(name, difference, True, ErrorBudget(), float64_tolerance=0.0)
            for name, difference in differences.items()
        )
        compared = compare_tensors(self.runs, self._by_operation, self.flax.longest_sum, self.perturbed)
        self.rows = (*compared, *rates)

    @property
    def is_same_function(self) -> bool:
        """Whether all tensors pass G0."""
        return all(row.same_function for row in self.rows)

    @property
    def is_only_inexact(self) -> bool:
        """Whether all tensors pass G0, and not all pass G1."""
        return self.is_same_function and not all(row.same_precision for row in self.rows)

    @property
    def unpaired_outputs(self) -> list[str]:
        """Names of the outputs that one model returns alone; empty if the caller has selected outputs."""
        return [] if self._selected else [name for name, why in self.skipped_outputs.items() if why == NOT_COMPARED]

    @property
    def is_only_loss_different(self) -> bool:
        """Whether the losses differ although the outputs agree, so that gradients say nothing about the models."""
        wrong = {row.name for row in self.rows if not row.same_function}
        return "loss" in wrong and wrong.isdisjoint(self.names)

    def use_tables(self, tables: Sequence[Table]) -> None:
        """Use PyTorch's constants in Flax in the place of those that one of the models has rounded to float32."""
        self.flax.use_tables([(table.flax, table.torch) for table in tables])
        self._graphs = None

    def state(self) -> State:
        """Return what `restore` takes to undo a later `use`."""
        return self.correspondence, self.runs, self.rows, self.perturbed, self._graphs

    def restore(self, state: State) -> None:
        """Return to a mapping with what the models have returned with it."""
        self.use(state[0])
        _, self.runs, self.rows, self.perturbed, self._graphs = state

    def graphs(self) -> tuple[Graph, Graph]:
        """Return the operations of both models in float64, with the weights in use.

        Raises:
            InputError: a model does not take the inputs.
        """
        if self._graphs is None:
            hint = self.axes_hint()
            record = partial(self.flax.record, "float64"), partial(self.torch.record, "float64")
            self._graphs = (_called("flax", record[0], hint), _called("torch", record[1], hint))
        return self._graphs

    def uses(self) -> Uses:
        """Return the keys of both models' weights in the order in which the operations of `graphs` use them."""
        flax, torch = self.graphs()
        return self.flax.keys_by_use(flax), self.torch.keys_by_use(torch)


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
