"""`assert_parity`: are a Flax model and a PyTorch module one function, equally well computed?  For any two models.

The gates are those of the twins (`parity.comparison.tolerances`): in float64 on CPU outputs and gradients agree to
1e-12, and in float32 each side is as near to that as the other.  Weights and gradients pass through one mapping, that of
`parity.comparison.any_model.correspondence`, which the report shows.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from parity.comparison.any_model import running
from parity.comparison.any_model.correspondence import Correspondence, match
from parity.comparison.any_model.first_module import first_module
from parity.comparison.tolerances import FUNCTION, PRECISION, UNIT, Budget, Error
from vit_spec import InputError

Array = NDArray[Any]
Tensors = dict[str, Array]  # outputs, "loss" and gradients by name

LEVELS = ("function", "precision")
WEIGHTS = ("flax", "torch", "equal")
GRADIENT = "gradient of "
INPUT = f"{GRADIENT}input "
SHOWN = 5  # gradients in a report


@dataclass(frozen=True)
class Row:
    """How far the two are apart at one tensor: relRMS in float64, and of each in float32 from float64.

    same_function, same_precision: gates G0 and G1; one parameter's gradient is not judged by the latter, only all together.
    budget: of G1.
    """

    name: str
    difference: float
    same_function: bool
    same_precision: bool
    budget: Budget
    flax: float = 0.0
    torch: float = 0.0


@dataclass(frozen=True)
class Report:
    """What `compare_models` found; print it for the verdict, the tensors and the mapping.

    runs: outputs, loss and gradients of each side in each type, as "torch float64"; outputs in Flax's axes, gradients in
        PyTorch's.
    digest: of the weights and inputs.
    suspect: the first module that differs, where it can be told.
    """

    rows: tuple[Row, ...]
    correspondence: Correspondence
    runs: Mapping[str, Tensors]
    environment: Mapping[str, str]
    digest: str
    suspect: str = ""

    @property
    def passed(self) -> bool:
        """Whether every tensor is through the gates that were asked for."""
        return self.first is None

    @property
    def first(self) -> Row | None:
        """The first tensor that differs, in function before precision: outputs, then gradients from the last one back."""
        wrong = [row for row in self.rows if not row.same_function] or [row for row in self.rows if not row.same_precision]
        return wrong[0] if wrong else None

    @property
    def verdict(self) -> str:
        """One line: PASS, or the gate, the first tensor that differs, by how much, and the budget."""
        row = self.first
        if row is None:
            worst = max(self.rows, key=lambda row: row.difference)
            return f"PASS: {len(self.rows)} tensors agree to {worst.difference:.1e} in float64 ({worst.name})"
        if row.same_function:
            distances = f"flax is {row.flax:.1e} and torch {row.torch:.1e} away"
            return f"FAIL G1, the same quality: {row.name}: {distances}; allowed is {row.budget}"
        hint = ""
        if UNIT["float32"] / 10 < row.difference < PRECISION:
            hint = "; that is the size of float32's rounding: does a part of either model cast to float32?"
        return (
            f"FAIL G0, the same function: {row.name} differs by {row.difference:.1e} in float64 (bar {FUNCTION:.0e}){hint}"
        )

    def __str__(self) -> str:
        single = [row for row in self.rows if row.name.startswith(GRADIENT)]
        worst = sorted(single, key=lambda row: -row.difference)[:SHOWN]
        shown = [row for row in self.rows if row not in single or row in worst]
        wide = max(len(row.name) for row in shown)
        return "\n".join(
            [
                self.verdict,
                *([f"the first module that differs: {self.suspect}"] if self.suspect else []),
                "relRMS between the two in float64, and of flax and torch in float32 from it "
                f"({len(single)} gradients, the worst {len(worst)} shown):",
                *(f"  {row.name:{wide}}  {row.difference:8.1e} {row.flax:8.1e} {row.torch:8.1e}" for row in shown),
                "the mapping:",
                str(self.correspondence),
                ", ".join(f"{name} {version}" for name, version in self.environment.items()),
            ]
        )


def assert_parity(flax_apply: Callable[..., Any], params: Any, torch_module: Any, inputs: Any, **options: Any) -> Report:
    """Fail unless a Flax model and a PyTorch module are one function, equally well computed; options of `compare_models`.

    Raises:
        AssertionError: with the gate, the first tensor that differs, by how much, the budget and the mapping.
        InputError: what cannot be compared.
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
    """Run both models on the same weights and inputs, and measure how far outputs, loss and gradients are apart.

    Neither model is changed: copies run, on CPU, the PyTorch one in eval mode.

    Args:
        flax_apply: called as flax_apply(params, *inputs): a linen `model.apply`, or any function; jitted.
        params: what it takes first: variables with their collections, an nnx.State or an nnx.Module.
        torch_module: called as torch_module(*inputs).
        inputs: one array, or a tuple of them; integers stay integers.
        layouts: lines "flax key | axes <-> torch key | axes" that settle what the mapping cannot tell.
        weights: whose weights both run with; "equal" if they must be the same already, bit by bit.
        input_axes, output_axes: for each input and output whose axes differ, e.g. "b y x c <-> b c y x"; "" for one that
            is the same on both sides, and a single line is for the first.
        loss: of what the model returned, written in what both frameworks' arrays can; by default the mean squared distance
            to normal noise, summed over the outputs.
        level: "function" for gate G0 alone, "precision" for G1 too.
        seed: of the noise.

    Raises:
        InputError: a framework that is not there; a mapping that is ambiguous; inputs or outputs that do not match; NaN; a
            model that does not compute in float64.
    """
    for name, value, known in (("level", level, LEVELS), ("weights", weights, WEIGHTS)):
        if value not in known:
            raise InputError(f"{name} is {value!r}: give one of {', '.join(known)}")
    environment = running.frameworks()
    left, (right, skipped, optional) = running.flax_weights(flax_apply, params), running.torch_weights(torch_module)
    shapes = [{key: np.shape(array) for key, array in side.items()} for side in (left, right)]
    correspondence = match(*shapes, layouts=layouts, skipped=skipped, optional=optional)
    both = _weights(weights, correspondence, left, right)
    given = [np.asarray(x) for x in (inputs if isinstance(inputs, (tuple, list)) else (inputs,))]
    arrays = [x if x.dtype.kind in "iub" else x.astype(np.float32) for x in given]  # so that no run rounds them itself
    axes = [_permutations(lines) for lines in (input_axes, output_axes)]
    run_flax = running.flax_runner(flax_apply, params, both[0], arrays, loss, seed)
    run_torch = running.torch_runner(torch_module, both[1], arrays, axes, loss, seed)

    runs: dict[str, Tensors] = {}
    for dtype in ("float64", "float32")[: 1 + LEVELS.index(level)]:
        outputs, gradients, of_inputs = run_flax(dtype)
        runs[f"torch {dtype}"] = found = run_torch(dtype, list(outputs))
        _alike(outputs, found)
        moved = {f"{GRADIENT}{key}": array for key, array in correspondence.to_torch(gradients).items()}
        runs[f"flax {dtype}"] = {name: {**outputs, **moved, **of_inputs}[name] for name in found}
    name = _digest(both[0], {str(n): x for n, x in enumerate(arrays)})
    rows, suspect = _rows(runs), ""
    if not all(row.same_function for row in rows):
        modules = running.torch_modules(torch_module, both[1], arrays, axes[0])
        suspect = first_module(running.flax_modules(flax_apply, params, both[0], arrays), modules, correspondence)
    return Report(rows, correspondence, runs, environment, name, suspect)


def _digest(*groups: Mapping[str, Array]) -> str:
    """A name for weights and inputs."""
    out = hashlib.sha256()
    for key, array in (item for group in groups for item in sorted(group.items())):
        out.update(f"{key} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return out.hexdigest()


def _weights(whose: str, correspondence: Correspondence, flax: Tensors, torch: Tensors) -> tuple[Tensors, Tensors]:
    """The weights of both sides, which are one side's."""
    if whose == "flax":
        return flax, correspondence.to_torch(flax)
    moved = correspondence.to_flax(torch)
    if whose == "equal":
        for key, array in moved.items():
            if not np.array_equal(array, flax[key]):
                apart = Error.of(array, flax[key]).relative_rms()
                raise AssertionError(
                    f"the weights are not equal: {key} differs by {apart:.1e}; the mapping:\n{correspondence}"
                )
    return moved, torch


def _permutations(lines: str | Sequence[str]) -> list[list[int] | None]:
    """For each line, where each of the right side's axes is among the left's."""
    out: list[list[int] | None] = []
    for line in [lines] if isinstance(lines, str) else lines:
        left, right = (side.split() for side in (line.split("<->") if line.count("<->") == 1 else ("", "?")))
        if line and (sorted(left) != sorted(right) or len(set(left)) != len(left)):
            raise InputError(f"axes {line!r}: write both sides of the arrow in the same words, as in 'b y x c <-> b c y x'")
        out.append([left.index(word) for word in right] if line else None)
    return out


def _alike(flax: Tensors, torch: Tensors) -> None:
    """Refuse outputs that cannot be compared."""
    for name, array in flax.items():
        if array.shape != torch[name].shape:
            raise InputError(
                f"{name}: flax gives shape {array.shape} and torch {torch[name].shape}; where only the order of the axes "
                "differs, give output_axes, as in 'b y x c <-> b c y x'"
            )
        for side, values in (("flax", array), ("torch", torch[name])):
            if np.isnan(np.asarray(values, np.float64)).any():
                raise InputError(
                    f"{name}: the {side} model gives NaN: nothing can be compared; look at its weights and inputs"
                )


def _rows(runs: Mapping[str, Tensors]) -> tuple[Row, ...]:
    """Every tensor through the gates, and then all parameters' gradients as one."""
    reference = runs["torch float64"]
    sides = [runs[side] for side in ("flax float64", "flax float32", "torch float32") if side in runs]
    errors = {name: [Error.of(side[name], tensor) for side in sides] for name, tensor in reference.items()}
    scales, entries = _scales(reference), {name: tensor.size for name, tensor in reference.items()}
    parameters = [name for name in errors if name.startswith(GRADIENT) and not name.startswith(INPUT)]
    if parameters:
        errors["gradient"] = [
            reduce(Error.joined, several) for several in zip(*(errors[name] for name in parameters), strict=True)
        ]
        entries["gradient"] = sum(n for name, n in entries.items() if not name.startswith(GRADIENT) and name != "loss")
    rows = []
    for group in (
        [name for name in errors if not name.startswith("gradient")],
        [n for n in errors if n.startswith("gradient")],
    ):
        differences = {name: errors[name][0].relative_rms(scales.get(name, 0.0)) for name in group}
        budget = Budget(worst=max(differences.values(), default=0.0))
        for name in group:
            scale, (_, *narrow) = scales.get(name, 0.0), errors[name]
            judged = narrow and not name.startswith(GRADIENT)
            precise = not judged or budget.holds(*narrow, scale=scale, entries=entries[name])
            distances = [error.relative_rms(scale) for error in narrow]
            rows.append(Row(name, differences[name], differences[name] <= FUNCTION, precise, budget, *distances))
    return tuple(rows)


def _scales(reference: Tensors) -> dict[str, float]:
    """What a parameter's gradient is measured against at least: the root-mean-square over its module and what is inside.

    Some gradients are zero but for rounding (a key's bias cannot change a softmax), and noise over noise is no measure.
    """
    sums = {name: (float(np.vdot(t, t)), t.size) for name, t in reference.items() if name.startswith(GRADIENT)}
    out = {}
    for name in sums:
        module = name[: name.rfind(".") + 1] or GRADIENT
        squares, sizes = zip(*(sums[other] for other in sums if other.startswith(module)), strict=True)
        out[name] = (sum(squares) / max(1, sum(sizes))) ** 0.5
    return out
