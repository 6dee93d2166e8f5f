"""`invariance`: test whether an image's outputs depend on the rest of its batch, on its place, on threads or on devices."""

import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.any_model.inputs import as_arrays
from parity.comparison.any_model.weights import check_has_values
from parity.comparison.invariance.conditions import ALONE, IN_ORDER, batches, compare
from parity.comparison.invariance.jax_runner import JaxRunner
from parity.comparison.invariance.report import TWICE, Change, InvarianceReport
from parity.comparison.invariance.torch_runner import NotTestedError, TorchRunner
from parity.comparison.progress import StepProgress
from parity.comparison.tolerances import (
    AMPLIFIED_ERROR_FACTOR,
    FLOAT64_TOLERANCE,
    MAX_TOLERANCE,
    PERTURBATION_ROUNDOFFS,
    ErrorBudget,
    five_sigma_factor,
)
from vit_spec import InputError, nearest
from vit_spec.missing_packages import require_packages

Outputs = Mapping[str, Array]
Runner = JaxRunner | TorchRunner
RoundingErrors = dict[tuple[str, str], float]  # relRMS by type and name of the output
Dtype = Literal["float32", "bfloat16", "float16", "float64"]


def invariance(
    model: Any,
    inputs: Any,
    params: Any = None,
    *,
    dtype: Dtype = "float32",
    progress: StepProgress = lambda what: None,
) -> InvarianceReport:
    """Test whether the outputs of an image are the same alone, in any batch, at any place, on any threads and devices.

    Each image is run alone, in batches of 2 and of all images, in other orders, in a batch that is padded with zeros and
    with other images, and twice; on one thread and on several; and on every other device.  All but the last two are
    also run in float64, on CPU, which tells rounding from a dependence on the rest of the batch: see
    `parity.comparison.invariance.report`.  Matrix products run in full precision, without TF32.  The model is not changed.

    Args:
        model: a torch.nn.Module, which keeps its mode, train or eval; an nnx.Module; a linen module; or a function that is
            called as `model(params, *inputs)`, such as a linen `model.apply`, and is jitted.
        inputs: one array, or a tuple of arrays.  Axis 0 is the batch, with at least 2 entries; so it is in every output.
        params: the parameters of a linen module or a function, a pytree.
        dtype: the type to which floating-point weights and inputs are cast.
        progress: called with a description of each step when it begins.

    Raises:
        InputError: a framework is not installed, the inputs or outputs have no batch axis, or the model raises an error,
            computes NaN, or amplifies rounding errors so much that a dependence on the batch cannot be told from them.
    """
    if dtype not in get_args(Dtype):
        raise InputError(f"dtype is {dtype!r}: give one of {', '.join(get_args(Dtype))}{nearest(dtype, get_args(Dtype))}")
    runner = _make_runner(model, params)
    arrays = _check_inputs(inputs)
    not_tested: dict[str, str] = {}
    progress(f"{runner.framework} in {dtype}")
    run = runner.prepare(dtype)
    changes, in_order = _compare_batches(run, dtype, arrays)
    if dtype != "float64":
        progress(f"{runner.framework} in float64")
        changes += _compare_in_float64(runner, arrays, not_tested)
    progress(f"{runner.framework} on other threads and devices")
    try:
        condition, one, several = runner.run_on_threads(dtype, arrays)
        changes += compare(condition, dtype, several, one)
    except NotTestedError as error:
        not_tested["threads"] = str(error)
    others = runner.other_devices()
    for device in others:
        found = _run(runner.prepare(dtype, device), arrays, len(arrays[0]))
        changes += compare(f"on {runner.device} and on {device}", dtype, in_order, found)
    if not others:
        not_tested["other devices"] = f"{runner.device} is the only one"
    changes = with_tolerances(changes, in_order)
    if _may_be_amplified(changes):
        progress(f"rounding errors of {runner.framework}")
        changes = with_tolerances(changes, in_order, _measure_rounding_errors(runner, {"float64", dtype}, arrays))
        _check_judged(changes)
    return InvarianceReport(runner.framework, dtype, tuple(changes), not_tested, runner.device, runner.versions)


def _make_runner(model: Any, params: Any) -> Runner:
    """Return the runner of a model of either framework."""
    if isinstance(model, type):
        raise InputError(f"the model is the class {model.__name__}: give an instance of it")
    torch = sys.modules.get("torch")  # a module of PyTorch exists only if it was imported
    if torch is not None and isinstance(model, torch.nn.Module):
        if params is not None:
            raise InputError("params are given with a torch.nn.Module, which has its own: leave params out")
        check_has_values(model)
        return TorchRunner(model)
    require_packages("a model that is no torch.nn.Module runs in JAX", "jax", "flax")
    from flax import linen, nnx

    if isinstance(model, nnx.Module):
        if params is not None:
            raise InputError("params are given with an nnx.Module, which has its own: leave params out")
        return JaxRunner(type(model).__call__, model)
    apply = model.apply if isinstance(model, linen.Module) else model
    if not callable(apply):
        raise InputError(f"the model is a {type(model).__name__}: give a torch.nn.Module, a Flax module or a function")
    if params is None:
        raise InputError("params are missing: give the parameters of the Flax function")
    return JaxRunner(apply, params)


def _check_inputs(inputs: Any) -> list[Array]:
    """Return the inputs as arrays; numbers are rounded to float32 or complex64, so that all runs have the same inputs."""
    given = as_arrays(inputs)
    sizes = {x.shape[:1] for x in given}
    if len(sizes) != 1 or not (size := next(iter(sizes))) or size[0] < 2:
        shapes = ", ".join(str(x.shape) for x in given) or "none"
        raise InputError(f"the inputs have shapes {shapes}: axis 0 must be the same batch of at least 2 images in all")
    return given


def _compare_batches(
    run: Callable[[Sequence[Array]], Outputs], dtype: str, inputs: list[Array]
) -> tuple[list[Change], Outputs]:
    """Return the changes between all batches, and the outputs of the batch in order."""
    count = len(inputs[0])
    in_order = _run(run, inputs, count)
    _refuse_nan(in_order, dtype)
    single = [_run(run, [x[n : n + 1] for x in inputs], 1) for n in range(count)]
    references = {IN_ORDER: in_order, ALONE: {name: np.concatenate([each[name] for each in single]) for name in in_order}}
    changes = []
    for batch in batches(inputs):
        found = _run(run, batch.inputs, len(batch.inputs[0]))
        changes += compare(batch.condition, dtype, references[batch.reference], found, batch.images, batch.places)
    return changes, in_order


def _run(run: Callable[[Sequence[Array]], Outputs], inputs: Sequence[Array], count: int) -> Outputs:
    """Run a batch of `count` images, and check that every output has that batch axis."""
    try:
        outputs = run([np.ascontiguousarray(x) for x in inputs])
    except InputError:
        raise
    except Exception as error:
        what = (str(error).strip() or "no message").splitlines()[0]
        raise InputError(f"the model does not run on a batch of {count}: {type(error).__name__}: {what}") from error
    for name, array in outputs.items():
        if array.shape[:1] != (count,):
            raise InputError(
                f"{name} has shape {array.shape} for a batch of {count}: axis 0 must be the batch; leave out what is not "
                "per image, such as a loss"
            )
    if not outputs:
        raise InputError("the model returns no array: return its outputs")
    return outputs


def _refuse_nan(outputs: Outputs, dtype: str) -> None:
    """Raise an InputError if an output has NaN, which would be equal in all batches; infinities may be those of a mask."""
    for name, array in outputs.items():
        if count := sum(np.isnan(image).any() for image in array):
            raise InputError(
                f"{name} has NaN in {dtype} for {count} of {len(array)} images: NaN cannot be compared, so give weights "
                "and inputs for which the model computes none"
            )


def _compare_in_float64(runner: Runner, inputs: list[Array], not_tested: dict[str, str]) -> list[Change]:
    """Return the changes in float64; none, and an entry in `not_tested`, if the model does not compute in float64."""
    try:
        changes, in_order = _compare_batches(runner.prepare("float64"), "float64", inputs)
    except InputError as error:
        not_tested["float64"] = str(error)
        return []
    for name, array in in_order.items():
        if array.dtype.kind not in "iub" and array.dtype != np.float64:
            not_tested["float64"] = f"{name} is {array.dtype} with weights and inputs in float64"
            return []
    return changes


def _may_be_amplified(changes: list[Change]) -> bool:
    """Return whether a change exceeds its tolerance in a model whose rounding errors can be measured.

    That needs float64, and two runs that agree: the effect of random numbers would be taken for rounding.
    """
    twice = [change for change in changes if (change.condition, change.dtype) == (TWICE, "float64")]
    return bool(twice) and all(change.passed for change in twice) and not all(change.passed for change in changes)


def _measure_rounding_errors(runner: Runner, dtypes: Set[str], inputs: list[Array]) -> RoundingErrors:
    """Return the largest change of each output in two runs in float64 whose operands are perturbed, by type and name.

    Nothing is measured for a model that does not run with perturbed operands.
    """
    count = len(inputs[0])
    reference, found = _run(runner.prepare("float64"), inputs, count), RoundingErrors()
    for dtype in dtypes:
        for seed in (0, 1):
            try:
                perturbed = _run(runner.prepare("float64", perturbation=(dtype, seed)), inputs, count)
            except InputError:
                continue
            for change in compare("perturbed", dtype, reference, perturbed):
                key = dtype, change.output
                found[key] = max(found.get(key, 0.0), change.difference)
    return found


def _check_judged(changes: list[Change]) -> None:
    """Raise an InputError if a change in float64 is within a tolerance that is too wide to mean anything."""
    for change in changes:
        tolerance = change.tolerance or 0.0
        is_amplified = change.dtype == "float64" and FLOAT64_TOLERANCE < change.difference <= tolerance
        if is_amplified and tolerance > MAX_TOLERANCE["float64"]:
            raise InputError(
                f"float64 cannot tell whether {change.output} depends on the batch: {PERTURBATION_ROUNDOFFS} unit "
                f"roundoffs at each operation change it by {tolerance / AMPLIFIED_ERROR_FACTOR:.0e} times its size; give "
                "weights and inputs that amplify rounding errors less"
            )


def with_tolerances(changes: list[Change], outputs: Outputs, rounding: RoundingErrors | None = None) -> list[Change]:
    """Return the changes with their tolerances; see `parity.comparison.invariance.report`.

    Args:
        changes: the changes.
        outputs: the outputs by name, in the lower precision.
        rounding: measured rounding errors by type and name, as relRMS.
    """
    exact = [c.difference for c in changes if c.dtype == "float64" and outputs[c.output].dtype.kind not in "iub"]
    largest = max((each for each in exact if np.isfinite(each)), default=0.0)
    in_float64 = {c.output for c in changes if c.dtype == "float64"}

    def tolerance(change: Change) -> float | None:
        output, measured = outputs[change.output], (rounding or {}).get((change.dtype, change.output), 0.0)
        amplified = AMPLIFIED_ERROR_FACTOR * measured if np.isfinite(measured) else 0.0
        if change.dtype == "float64":
            return max(FLOAT64_TOLERANCE, amplified)
        if output.dtype.kind in "iub":
            return None if change.output in in_float64 else 0.0
        fixed = 2 * ErrorBudget(change.dtype, float64_error=largest).tolerance * five_sigma_factor(output.size)
        return max(fixed, amplified) if amplified <= MAX_TOLERANCE[change.dtype] else None

    return [replace(change, tolerance=tolerance(change)) for change in changes]
