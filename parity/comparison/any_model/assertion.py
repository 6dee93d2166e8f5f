"""`assert_parity`: assert that a Flax model and a PyTorch module compute the same function with the same precision.

The checks and tolerances are the same as for the twins (`parity.comparison.tolerances`).  G0: in float64 on CPU, outputs
and gradients agree to 1e-12.  G1: in float32, the errors of both models from the float64 result are small and similar.
Weights and gradients are converted with the same mapping of parameters, which
`parity.comparison.any_model.correspondence` finds and the report shows.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from parity.comparison.any_model import runners
from parity.comparison.any_model.correspondence import Correspondence, match
from parity.comparison.any_model.trace.fixed_parts import FixedPart
from parity.comparison.any_model.trace.origin import Origin, find_origin, find_wrong_gradient
from parity.comparison.any_model.trace.precision import find_imprecise_operation
from parity.comparison.any_model.trace.tables import Table, find_rounded_tables
from parity.comparison.tolerances import FLOAT64_TOLERANCE, ErrorBudget, ErrorNorms
from vit_spec import InputError

Array = NDArray[Any]
Tensors = dict[str, Array]  # outputs, "loss" and gradients by name

LEVELS = ("function", "precision")
WEIGHT_SOURCES = ("flax", "torch", "equal")
GRADIENT_OF = "gradient of "
GRADIENT_OF_INPUT = f"{GRADIENT_OF}input "
MAX_SHOWN_GRADIENTS = 5


class UnequalWeightsError(AssertionError):
    """The weights of two models differ, which weights="equal" excludes."""


@dataclass(frozen=True)
class Row:
    """Comparison of one tensor.

    Attributes:
        name: "output", "output.logits", "loss", "gradient of KEY", "gradient of input 0", or "gradient" for the gradients
            of all parameters as one vector.
        difference: relRMS between Flax and PyTorch in float64.
        same_function: whether the tensor passes G0.
        same_precision: whether it passes G1; always true for the gradient of a single parameter or input, which G1 does
            not test.
        budget: the tolerance of G1.
        flax, torch: float32 error of each model: relRMS from PyTorch's float64 result; 0 if only float64 was run.
    """

    name: str
    difference: float
    same_function: bool
    same_precision: bool
    budget: ErrorBudget
    flax: float = 0.0
    torch: float = 0.0


@dataclass(frozen=True)
class Report:
    """Result of `compare_models`; `str` gives the verdict, the tensors and the mapping of parameters.

    Attributes:
        rows: the comparison of each tensor.
        correspondence: the mapping of the parameters; `str` gives its lines.
        runs: outputs, loss and gradients by run: "torch float64", "flax float32", ...  Outputs and gradients of inputs
            have the order of axes in Flax, gradients of parameters the order in PyTorch.
        environment: versions of the libraries, and the machine type.
        digest: SHA-256 of the weights and inputs.
        origin: where the models part, if they do not compute the same function; None if it was not found.
        fixed_parts: the parts that a model computes in a fixed lower precision; the comparison in float64 computes them in
            float64.
        training: paths of the NNX modules that ran in training mode.
        tables: the constants that a model has rounded to float32; the comparison in float64 uses PyTorch's in both models.
    """

    rows: tuple[Row, ...]
    correspondence: Correspondence
    runs: Mapping[str, Tensors]
    environment: Mapping[str, str]
    digest: str
    origin: Origin | None = None
    fixed_parts: tuple[FixedPart, ...] = ()
    tables: tuple[Table, ...] = ()
    training: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every tensor passes the checks of the level."""
        return self.first is None

    @property
    def first(self) -> Row | None:
        """The first tensor that fails G0, or else G1; None if all pass.

        Outputs come first, and then gradients, from the last parameter to the first.
        """
        wrong = [row for row in self.rows if not row.same_function] or [row for row in self.rows if not row.same_precision]
        return wrong[0] if wrong else None

    @property
    def verdict(self) -> str:
        """One line with PASS, or with FAIL, the check that failed, the first tensor that fails it, and its errors."""
        row = self.first
        if row is None:
            worst = max(self.rows, key=lambda row: row.difference)
            return f"PASS: {len(self.rows)} tensors agree to {worst.difference:.1e} in float64 ({worst.name})"
        if row.same_function:
            errors = f"relRMS {row.flax:.1e} in flax and {row.torch:.1e} in torch"
            return f"FAIL G1, the same precision: the errors of {row.name} in float32 are {errors}"
        return (
            f"FAIL G0, the same function: {row.name} differs by {row.difference:.1e} in float64 "
            f"(tolerance {FLOAT64_TOLERANCE:.0e})"
        )

    def __str__(self) -> str:
        return "\n".join(
            [
                self.verdict,
                *self._failure_lines(),
                *self._fixed_part_lines(),
                *self._table_lines(),
                "parameters (flax <-> torch):",
                str(self.correspondence),
                f"versions: {', '.join(f'{name} {version}' for name, version in self.environment.items())}",
            ]
        )

    def _failure_lines(self) -> Iterator[str]:
        """Yield lines that explain a failure."""
        row = self.first
        if row is not None and row.same_function:
            yield f"tolerance: {row.budget}"
        if self.training:
            names = f"{', '.join(self.training[:3])}{', ...' if len(self.training) > 3 else ''}"
            what = "call model.eval() first, or give the nnx.Module itself as params"
            yield f"hint: {names} of flax ran in training mode: {what}"
        if self.origin is not None:
            yield f"origin: {self.origin}"

    def _fixed_part_lines(self) -> Iterator[str]:
        """Yield a line for each group of parts with a fixed dtype, and for each rounded table."""
        groups: dict[str, int] = {}
        for part in self.fixed_parts:
            text = re.sub(r"\d+", "{n}", part.module or "the model itself")
            text = f"{text} of {part.framework} in {part.dtype}"
            groups[text] = groups.get(text, 0) + 1
        for text, n in groups.items():
            yield f"in float64 for the first check: {text} ({n} operation{'s'[: n > 1]})"
        for table in self.tables:
            yield f"the same for the first check: {table}"

    def _table_lines(self) -> Iterator[str]:
        """Yield a line for each output, and for the gradients with the largest differences."""
        single = [row for row in self.rows if row.name.startswith(GRADIENT_OF)]
        worst = sorted(single, key=lambda row: -row.difference)[:MAX_SHOWN_GRADIENTS]
        shown = [row for row in self.rows if row not in single or row in worst]
        width = max(len(row.name) for row in shown)
        yield "relRMS between flax and torch in float64, and of each in float32 from float64:"
        yield f"  {'tensor':{width}}   float64  flax f32 torch f32"
        for row in shown:
            yield f"  {row.name:{width}}  {row.difference:8.1e}  {row.flax:8.1e}  {row.torch:8.1e}"
        if hidden := len(single) - len(worst):
            yield f"  not shown: {hidden} gradients with smaller differences in float64"


def assert_parity(flax_apply: Callable[..., Any], params: Any, torch_module: Any, inputs: Any, **options: Any) -> Report:
    """Assert that a Flax model and a PyTorch module compute the same function with the same precision.

    It takes the arguments and options of `compare_models`, and returns the report of a pair of models that passes.

    Raises:
        AssertionError: a tensor exceeds its tolerance, and the message is the report; or weights="equal", and the weights
            differ.
        InputError: the models cannot be compared.
    """
    __tracebackhide__ = True
    report = compare_models(flax_apply, params, torch_module, inputs, **options)
    if not report.passed:
        raise AssertionError(str(report))
    return report


def compare_models(
    flax_apply: Callable[..., Any],
    params: Any,
    torch_module: Any,
    inputs: Any,
    *,
    layouts: Sequence[str] = (),
    weights: Literal["flax", "torch", "equal"] = "flax",
    input_axes: str | Sequence[str] = (),
    output_axes: str | Sequence[str] = (),
    loss: Callable[[Any], Any] | None = None,
    level: Literal["function", "precision"] = "precision",
    seed: int = 0,
) -> Report:
    """Run both models on the same weights and inputs, and compare outputs, loss and gradients.

    Neither model is changed: copies run on CPU, the PyTorch module in eval mode.

    Args:
        flax_apply: called as `flax_apply(params, *inputs)`: a linen `model.apply`, or any function; it is jitted.
        params: the first argument of `flax_apply`, a pytree: linen variables with their collections, an nnx.State or an
            nnx.Module.
        torch_module: a torch.nn.Module, called as `torch_module(*inputs)`.
        inputs: one array, or a tuple of arrays; floating-point arrays are rounded to float32, integers stay integers.
        layouts: lines "flax key | axes <-> torch key | axes" for parameters that names and shapes do not match.
        weights: the model whose weights both models run with; "equal" requires that they are already equal bit for bit.
        input_axes, output_axes: for each input or output in turn, its axes in Flax and in PyTorch, e.g.
            "b y x c <-> b c y x", or "" if their order is the same.  A single string is for the first one, and the order
            is the same for all that are not given.
        loss: function of a model's return value, written with operations that arrays of both frameworks have; the default
            is the mean squared error from standard normal targets, summed over the outputs.
        level: "function" for G0 only, "precision" for G0 and G1.
        seed: seed of the targets.

    Raises:
        UnequalWeightsError: weights="equal", and the weights differ; it is an AssertionError.
        InputError: a framework is not installed, the mapping of parameters is ambiguous, inputs or outputs do not match,
            an output is NaN, or a model does not compute in float64.
    """
    for name, value, known in (("level", level, LEVELS), ("weights", weights, WEIGHT_SOURCES)):
        if value not in known:
            raise InputError(f"{name} is {value!r}: give one of {', '.join(known)}")
    environment = runners.framework_versions()
    params = runners.in_evaluation(params)
    flax_weights = runners.flax_weights(flax_apply, params)
    torch_weights, skipped, optional = runners.torch_weights(torch_module)
    given = [np.asarray(x) for x in (inputs if isinstance(inputs, (tuple, list)) else (inputs,))]
    # Inputs are rounded to float32 for both dtypes, so that the float32 runs do not add this rounding error.
    arrays = [x if x.dtype.kind in "iub" else x.astype(np.float32) for x in given]
    axes = [_parse_permutations(lines) for lines in (input_axes, output_axes)]

    def runners_with(flax: Tensors, torch: Tensors) -> tuple[runners.FlaxRunner, runners.TorchRunner]:
        return (
            runners.FlaxRunner(flax_apply, params, flax, arrays, loss, seed),
            runners.TorchRunner(torch_module, torch, arrays, axes, loss, seed),
        )

    shapes = [{key: np.shape(array) for key, array in side.items()} for side in (flax_weights, torch_weights)]
    find = partial(match, *shapes, layouts=layouts, skipped=skipped, optional=optional)
    try:
        correspondence = find()
    except InputError:
        fresh = runners_with(flax_weights, torch_weights)
        correspondence = find(uses=(fresh[0].keys_by_use(), fresh[1].keys_by_use()))
    both = _copy_weights(weights, correspondence, flax_weights, torch_weights)
    flax, torch = runners_with(*both)

    runs: dict[str, Tensors] = {}
    _run(flax, torch, correspondence, "float64", runs)
    tables: tuple[Table, ...] = ()
    graphs = None
    if not all(row.same_function for row in _compare_tensors(runs)):
        graphs = flax.record("float64"), torch.record("float64")
        tables = find_rounded_tables(*graphs)
    if tables:
        flax.tables = [(table.flax, table.torch) for table in tables]
        _run(flax, torch, correspondence, "float64", runs)
        graphs = None
    if level == "precision":
        _run(flax, torch, correspondence, "float32", runs)
    rows = _compare_tensors(runs)
    digest = _digest(both[0], {str(n): x for n, x in enumerate(arrays)})
    origin = None
    if wrong := [row.name.removeprefix(GRADIENT_OF) for row in rows if not row.same_function]:
        graphs = graphs or (flax.record("float64"), torch.record("float64"))
        origin = find_origin(*graphs) or find_wrong_gradient(wrong, correspondence)
    elif imprecise := [row for row in rows if not row.same_precision]:
        worse: Any = flax if imprecise[0].flax > imprecise[0].torch else torch
        place = find_imprecise_operation(worse.record("float64"), worse.record("float32"))
        of_flax, of_torch = (place, None) if worse is flax else (None, place)
        origin = Origin(of_flax, of_torch, "precision") if place else None
    parts = tuple(dict.fromkeys([*flax.parts, *torch.parts]))
    return Report(
        rows, correspondence, runs, environment, digest, origin, parts, tables, tuple(dict.fromkeys(flax.training))
    )


def _run(flax: Any, torch: Any, correspondence: Correspondence, dtype: str, runs: dict[str, Tensors]) -> None:
    """Run both models in a dtype, and add their tensors to `runs`.

    Raises:
        InputError: the models return different outputs, or NaN.
    """
    outputs, gradients, input_gradients = flax.run(dtype)
    runs[f"torch {dtype}"] = torch_tensors = torch.run(dtype, list(outputs))
    _check_outputs(outputs, torch_tensors)
    converted = {f"{GRADIENT_OF}{key}": array for key, array in correspondence.to_torch(gradients).items()}
    runs[f"flax {dtype}"] = {name: {**outputs, **converted, **input_gradients}[name] for name in torch_tensors}


def _digest(*groups: Mapping[str, Array]) -> str:
    """Return the SHA-256 of arrays with their keys, dtypes and shapes."""
    out = hashlib.sha256()
    for key, array in (item for group in groups for item in sorted(group.items())):
        out.update(f"{key} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return out.hexdigest()


def _copy_weights(source: str, correspondence: Correspondence, flax: Tensors, torch: Tensors) -> tuple[Tensors, Tensors]:
    """Return equal weights for both models, in the keys and layouts of Flax and of PyTorch.

    Raises:
        UnequalWeightsError: `source` is "equal", and the weights differ.
    """
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


def _parse_permutations(lines: str | Sequence[str]) -> list[list[int] | None]:
    """Return the permutation of axes that each line describes, from its left side to its right; None for an empty line."""
    out: list[list[int] | None] = []
    for line in [lines] if isinstance(lines, str) else lines:
        left, right = (side.split() for side in (line.split("<->") if line.count("<->") == 1 else ("", "?")))
        if line and (sorted(left) != sorted(right) or len(set(left)) != len(left)):
            raise InputError(f"axes {line!r}: write the same axis names on both sides of <->, as in 'b y x c <-> b c y x'")
        out.append([left.index(word) for word in right] if line else None)
    return out


def _check_outputs(flax: Tensors, torch: Tensors) -> None:
    """Raise InputError for outputs with different shapes or NaN."""
    for name, array in flax.items():
        if array.shape != torch[name].shape:
            raise InputError(
                f"{name}: flax returns shape {array.shape} and torch {torch[name].shape}; if only the order of the axes "
                "differs, give output_axes, as in 'b y x c <-> b c y x'"
            )
        for side, values in (("flax", array), ("torch", torch[name])):
            if np.isnan(np.asarray(values, np.float64)).any():
                raise InputError(
                    f"{name}: the {side} model returns NaN, which cannot be compared; check its weights and inputs"
                )


def _compare_tensors(runs: Mapping[str, Tensors]) -> tuple[Row, ...]:
    """Return the comparison of every tensor, and of the gradients of all parameters as one vector."""
    reference = runs["torch float64"]
    sides = [runs[side] for side in ("flax float64", "flax float32", "torch float32") if side in runs]
    errors = {name: [ErrorNorms.of(side[name], tensor) for side in sides] for name, tensor in reference.items()}
    scales, entries = _gradient_scales(reference), {name: tensor.size for name, tensor in reference.items()}
    parameters = [name for name in errors if name.startswith(GRADIENT_OF) and not name.startswith(GRADIENT_OF_INPUT)]
    if parameters:
        errors["gradient"] = [
            reduce(ErrorNorms.combined_with, several)
            for several in zip(*(errors[name] for name in parameters), strict=True)
        ]
        # The error of the whole gradient varies by chance as much as the error of the outputs does, so it counts as having
        # as many independent entries as they have.
        entries["gradient"] = sum(n for name, n in entries.items() if not name.startswith(GRADIENT_OF) and name != "loss")
    rows = []
    for group in (
        [name for name in errors if not name.startswith("gradient")],
        [n for n in errors if n.startswith("gradient")],
    ):
        differences = {name: errors[name][0].relative_rms(scales.get(name, 0.0)) for name in group}
        budget = ErrorBudget(float64_error=max(differences.values(), default=0.0))
        for name in group:
            scale, (_, *float32_errors) = scales.get(name, 0.0), errors[name]
            is_tested = float32_errors and not name.startswith(GRADIENT_OF)
            same_precision = not is_tested or budget.accepts(*float32_errors, scale=scale, entries=entries[name])
            relative = [error.relative_rms(scale) for error in float32_errors]
            same_function = differences[name] <= FLOAT64_TOLERANCE
            rows.append(Row(name, differences[name], same_function, same_precision, budget, *relative))
    return tuple(rows)


def _gradient_scales(reference: Tensors) -> dict[str, float]:
    """Return for each gradient the root-mean-square over the gradients of its module and submodules.

    The error of a gradient is relative to this value if its own root-mean-square is smaller.  Some gradients are zero
    except for rounding errors, for example the gradient of a key's bias, which cannot change a softmax.  The relative error
    of rounding errors says nothing.
    """
    sums = {name: (float(np.vdot(t, t)), t.size) for name, t in reference.items() if name.startswith(GRADIENT_OF)}
    out = {}
    for name in sums:
        module = name[: name.rfind(".") + 1] or GRADIENT_OF
        squares, sizes = zip(*(sums[other] for other in sums if other.startswith(module)), strict=True)
        out[name] = (sum(squares) / max(1, sum(sizes))) ** 0.5
    return out
