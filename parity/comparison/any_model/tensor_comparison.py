"""The comparison of the tensors of two models, one by one, with the tolerances of G0 and G1."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from types import MappingProxyType

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.any_model.report import GRADIENT_OF, GRADIENT_OF_INPUT, TensorRow, Tensors
from parity.comparison.any_model.trace.graph import MASKED
from parity.comparison.tolerances import (
    AMPLIFIED_ERROR_FACTOR,
    PERTURBATION_ROUNDOFFS,
    UNIT_ROUNDOFF,
    ErrorBudget,
    ErrorNorms,
    amplified_float64_tolerance,
)

_SMALL = 1e-4  # entries of an output that are smaller than this share of the largest are also compared on their own


@dataclass(frozen=True)
class OperationRuns:
    """What a model returns that runs operation by operation, each time with the choices of its run in float32.

    rounded: with each operation computed in float64, and its results rounded to float32; empty without such a run.
    """

    float32: Tensors
    float64: Tensors
    rounded: Tensors = field(default_factory=dict)


def compare_tensors(
    runs: Mapping[str, Tensors],
    by_operation: Mapping[str, OperationRuns] = MappingProxyType({}),
    longest_sum: int = 1,
    perturbed: Sequence[Tensors] = (),
) -> tuple[TensorRow, ...]:
    """Return the comparison of every tensor, and of the gradients of all parameters as one vector.

    Args:
        runs: as in `PairReport`.
        by_operation: runs by framework, which may show why a tensor fails G1; their gradients are compared instead of those
            in `runs`.
        longest_sum: the largest number of terms that an operation of the models adds.
        perturbed: what PyTorch returns in float64 with perturbed weights and inputs, for each measured perturbation.
    """
    reference = runs["torch float64"]
    sides = [runs[side] for side in ("flax float64", "flax float32", "torch float32") if side in runs]
    errors = {name: [error_of(name, side[name], tensor) for side in sides] for name, tensor in reference.items()}
    both = [by_operation[framework] for framework in ("flax", "torch")] if by_operation else []
    for name in errors if both else ():
        is_gradient = name.startswith(GRADIENT_OF)
        if is_gradient:
            errors[name][1:] = [error_of(name, each.float32[name], each.float64[name]) for each in both]
        exact = [each.float64[name] if is_gradient else reference[name] for each in both]
        errors[name] += [
            error_of(name, each.rounded[name], of) for each, of in zip(both, exact, strict=True) if each.rounded
        ]
    of_outputs = {
        name: output_difference(name, runs["flax float64"][name], tensor)
        for name, tensor in reference.items()
        if not name.startswith(GRADIENT_OF)
    }
    changes = [{name: error_of(name, run[name], tensor) for name, tensor in reference.items()} for run in perturbed]
    scales, entries = _gradient_scales(reference), {name: tensor.size for name, tensor in reference.items()}
    parameters = [name for name in errors if name.startswith(GRADIENT_OF) and not name.startswith(GRADIENT_OF_INPUT)]
    if parameters:
        errors["gradient"] = [
            reduce(ErrorNorms.combined_with, several)
            for several in zip(*(errors[name] for name in parameters), strict=True)
        ]
        # The error of the whole gradient varies by chance as much as the error of the outputs does, so it counts as having
        # as many independent entries as they have.
        for each in changes:
            each["gradient"] = reduce(ErrorNorms.combined_with, (each[name] for name in parameters))
        entries["gradient"] = sum(n for name, n in entries.items() if not name.startswith(GRADIENT_OF) and name != "loss")
    rows = []
    for group in (
        [name for name in errors if not name.startswith("gradient")],
        [n for n in errors if n.startswith("gradient")],
    ):
        differences = {
            name: of_outputs[name] if name in of_outputs else errors[name][0].relative_rms(scales.get(name, 0.0))
            for name in group
        }
        budget = ErrorBudget(float64_error=max(differences.values(), default=0.0))
        for name in group:
            scale, (_, *of_float32), of_rounded = scales.get(name, 0.0), errors[name][:3], errors[name][3:]
            accepts = partial(budget.accepts, scale=scale, entries=entries[name])
            same_precision = not of_float32 or name.startswith(GRADIENT_OF) or accepts(*of_float32)
            rounded: tuple[float, ...] = ()
            if not same_precision and of_rounded and budget.are_of_sums(*of_float32, terms=longest_sum, scale=scale):
                same_precision = accepts(*of_rounded)
                rounded = tuple(error.relative_rms(scale) for error in of_rounded) if same_precision else ()
            flax, torch = (error.relative_rms(scale) for error in of_float32) if of_float32 else (None, None)
            tolerance = amplified_float64_tolerance(max((c[name].relative_rms(scale) for c in changes), default=0.0))
            rows.append(TensorRow(name, differences[name], same_precision, budget, flax, torch, rounded, tolerance))
    return tuple(rows)


def output_difference(name: str, tensor: Array, reference: Array) -> float:
    """Return the difference of an output in float64, which G0 tests: the relRMS of `error_of`, or of the small entries."""
    return max(error_of(name, tensor, reference).relative_rms(), _difference_of_small_entries(tensor, reference))


def error_of(name: str, tensor: Array, reference: Array) -> ErrorNorms:
    """Return the error of a tensor.

    Integers and truth values are equal or not: each entry counts as 1, and its error is 1 if it is not equal.  Relative to
    their size, identifiers of 1e12 that are all off by one would agree.  Entries of an output that a mask has made huge
    count as 1 too, with their relative errors: otherwise one entry of -1e18 would hide wrong values of all others.
    """
    if tensor.shape == reference.shape and {tensor.dtype.kind, reference.dtype.kind} <= set("biu"):
        return ErrorNorms.of(1.0 + (tensor != reference), np.ones(reference.shape))
    size = np.abs(np.asarray(reference, np.float64))
    is_huge = (size >= MASKED) & np.isfinite(size)
    if name.startswith(GRADIENT_OF) or tensor.shape != reference.shape or not is_huge.any():
        return ErrorNorms.of(tensor, reference)
    unit = np.where(is_huge, size, 1.0)
    return ErrorNorms.of(tensor / unit, reference / unit)


def _difference_of_small_entries(tensor: Array, reference: Array) -> float:
    """Return the relRMS of the entries of an output that are much smaller than the largest, or 0 if rounding explains it.

    A few large entries would hide wrong values of all others in the relRMS of the whole.  Entries that are computed with
    the large ones, such as the rest of a cancellation, have absolute errors of their size.
    """
    if tensor.shape != reference.shape or "f" not in (tensor.dtype.kind, reference.dtype.kind):
        return 0.0
    size = np.abs(np.asarray(reference, np.float64))
    is_known = size < MASKED  # not NaN either
    largest = float(size[is_known].max(initial=0.0))
    is_small = size < _SMALL * largest
    if not is_small.any():
        return 0.0
    small, others = (ErrorNorms.of(tensor[each], reference[each]) for each in (is_small, is_known & ~is_small))
    rounding = max(
        PERTURBATION_ROUNDOFFS * UNIT_ROUNDOFF["float64"] * largest,
        AMPLIFIED_ERROR_FACTOR * others.norm / others.entries**0.5,
    )
    return small.relative_rms() if small.norm / small.entries**0.5 > rounding else 0.0


# Rounding errors of zero gradients are about 1e-16 of the gradients that they are sums of, and 1e-14 of this share of them.
_OF_PARENT = 1e-2


def _gradient_scales(reference: Tensors) -> dict[str, float]:
    """Return for each gradient the root-mean-square over the gradients of its module and submodules.

    The error of a gradient is relative to this value if its own root-mean-square is smaller.  Some gradients are zero
    except for rounding errors, for example the gradient of a key's bias, which cannot change a softmax.  The relative error
    of rounding errors says nothing.  If all gradients of a module are that small, such as those of a layer whose output a
    norm removes, a share of the root-mean-square over the parent of the module is the value.
    """
    sums = {name: (float(np.vdot(t, t)), t.size) for name, t in reference.items() if name.startswith(GRADIENT_OF)}

    def rms(module: str) -> float:
        squares, sizes = zip(*(sums[other] for other in sums if other.startswith(module)), strict=True)
        return float((sum(squares) / max(1, sum(sizes))) ** 0.5)

    def parent(name: str) -> str:
        return name[: name.rstrip(".").rfind(".") + 1] or GRADIENT_OF

    return {name: max(rms(parent(name)), _OF_PARENT * rms(parent(parent(name)))) for name in sums}
