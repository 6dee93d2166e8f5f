"""Recording of results on which both twins agree, and verification with the frameworks that are installed.

Each framework is compared in float64 with the recorded reference, and in float32 with its own float64 result.  The first
comparison shows a changed function, the second one changed rounding errors.  Each framework can be verified without the
other.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from parity.checkpoints.layout import Array
from parity.checkpoints.reading import StrPath
from parity.checkpoints.weights import Checkpoint
from parity.comparison import framework_settings, reproducible_init
from parity.comparison.amplification import measure_rounding_errors
from parity.comparison.forward_backward import JaxTwin, PassInputs, PassResult, TorchTwin
from parity.comparison.golden.drift import Verification, changed_tensors, tested_float32_errors
from parity.comparison.golden.file import FRAMEWORKS, Golden, Record, Tensor, check_writable
from parity.comparison.golden.inputs import check_memory, checksums, make_inputs, recorded_inputs
from parity.comparison.golden.sketch import root_mean_square, sketch
from parity.comparison.localisation import GRADIENT_OF, module_scales
from parity.comparison.progress import StepProgress
from parity.comparison.tolerances import (
    AMPLIFIED_ERROR_FACTOR,
    FLOAT32_TOLERANCE,
    FLOAT64_TOLERANCE,
    MAX_TOLERANCE,
    PERTURBATION_ROUNDOFFS,
    RMS_ERROR_RATIO,
)
from vit_spec import InputError, ViTConfig, nearest
from vit_spec.missing_packages import TWIN_PACKAGES, missing_packages, not_installed


def record(
    model: ViTConfig | Checkpoint,
    path: StrPath,
    *,
    seed: int = 0,
    force: bool = False,
    progress: StepProgress = lambda what: None,
) -> Golden:
    """Run both twins on a model, and write the results on which they agree to a golden file.

    Args:
        model: a config, whose weights are drawn from the seed, or a checkpoint; `read_model` returns either.
        path: the file to write; it must end in .npz.
        seed: seed of the images, of the targets of the loss, and of the weights of a config.
        force: replace an existing golden file.
        progress: called with a description of each step.

    Raises:
        InputError: the path cannot be written, a framework is not installed, the memory is too little, the model computes
            NaN, the twins differ, or rounding errors leave no digits that could change.
    """
    check_writable(path, force)
    _, absent = installed_frameworks()
    if absent:
        raise InputError(f"a golden file is recorded with both frameworks, and {not_installed([*absent.values()])}")
    check_memory(model.config if isinstance(model, Checkpoint) else model, path)
    checkpoint = model if isinstance(model, Checkpoint) else reproducible_init.weights(model, seed)
    inputs = make_inputs(checkpoint, seed)
    progress("PyTorch in float64, explicit attention")
    tensors = tuple(_reference_tensors(TorchTwin(inputs, "explicit").run()))
    golden = Golden(checkpoint.config, seed, checkpoint is not model, checksums(inputs), tensors)
    measured = _measure(golden, inputs, FRAMEWORKS, progress)
    golden = replace(golden, records=(measured,))
    if _may_amplify_rounding(golden):
        golden = replace(golden, tensors=tuple(_with_rounding_errors(golden, inputs, progress)))
    _check_agreement(golden)
    golden.write(path, overwrite=force)
    return golden


def verify(
    path: StrPath,
    *,
    weights: Checkpoint | None = None,
    only: str | None = None,
    append: bool = False,
    progress: StepProgress = lambda what: None,
) -> Verification:
    """Compute the results of a golden file again with the installed frameworks, and compare them with the recorded ones.

    Args:
        weights: the weights that the file was recorded with, in any format; None if they are drawn from the seed.
        only: "jax" or "torch": verify only this one.
        append: append the results to the file as another record, after those that others appended meanwhile.
        progress: called with a description of each step.

    Raises:
        InputError: the file is no golden file, the weights are missing or have other values, no framework is installed,
            the memory is too little, or the file to append to was replaced during the verification.
    """
    golden = Golden.read(path)
    frameworks, absent = installed_frameworks()
    if only is not None:
        if only not in FRAMEWORKS:
            raise InputError(f"only is {only!r}: give jax or torch{nearest(only, FRAMEWORKS)}")
        if only in absent:
            raise InputError(f"only {only} is to be verified, and {not_installed([absent[only]])}")
        frameworks, absent = (only,), {}
    if not frameworks:
        raise InputError(f"neither framework can run: {not_installed([*absent.values()])}, or one of the two")
    inputs = recorded_inputs(golden, weights, str(path))
    now = _measure(golden, inputs, frameworks, progress)
    if append:
        golden.append(path, now)
    return Verification(str(path), golden, now, changed_tensors(golden, now), absent)


def installed_frameworks() -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the frameworks whose twin can run, and a dict from the other frameworks to the first missing package."""
    missing = {framework: missing_packages(*TWIN_PACKAGES[framework]) for framework in FRAMEWORKS}
    absent = {framework: packages[0] for framework, packages in missing.items() if packages}
    return tuple(name for name in FRAMEWORKS if name not in absent), absent


# Measurement ---------------------------------------------------------------------------------------------------------


def _reference_tensors(run: PassResult) -> Iterable[Tensor]:
    """Yield the tensors of the reference, intermediates before gradients.

    Raises:
        InputError: a tensor has NaN or infinities.
    """
    scales = module_scales(run.gradients)
    forward = [(name, value, 0.0) for name, value in run.values.items()]
    backward = [(f"{GRADIENT_OF}{name}", value, scales[name]) for name, value in run.gradients.items()]
    for name, value, scale in (*forward, *backward):
        if not np.isfinite(value).all():
            raise InputError(
                f"the model computes NaN or infinities, first at {name}: check its weights with "
                "`python -m parity inspect SRC --values`"
            )
        yield Tensor(name, value.shape, max(root_mean_square(value), scale), sketch(value))


def _measure(golden: Golden, inputs: PassInputs, frameworks: Iterable[str], progress: StepProgress) -> Record:
    """Run each framework in float64 and in float32, and return the environment and the errors of all tensors."""
    float64_errors, float32_errors = {}, {}
    for name in frameworks:
        twin: Any = JaxTwin(inputs) if name == "jax" else TorchTwin(inputs)
        progress(f"{name} in float64")
        float64_run = twin.run()
        progress(f"{name} in float32")
        float32_run = twin.run("float32")
        values = [(tensor, _value_of(float64_run, tensor), _value_of(float32_run, tensor)) for tensor in golden.tensors]
        float64_errors[name] = np.array([_float64_error(tensor, value) for tensor, value, _ in values])
        float32_errors[name] = np.array([_float32_error(*each) for each in values])
    with framework_settings.strict_settings():
        environment = framework_settings.environment(framework_settings.compiler_options())
    return Record(environment, float64_errors, float32_errors)


def _may_amplify_rounding(golden: Golden) -> bool:
    """Return whether another machine may make errors that are outside of the tolerances of ordinary weights.

    Differences beyond all tolerances are no rounding errors.
    """
    [measured] = golden.records
    float64 = max(float(np.nanmax(errors)) for errors in measured.float64_errors.values())
    tested = [each for errors in measured.float32_errors.values() for each in tested_float32_errors(golden, errors)]
    float32 = max((error for _, _, error in tested if math.isfinite(error)), default=0.0)
    return float64 <= MAX_TOLERANCE["float64"] and (
        float64 > FLOAT64_TOLERANCE / AMPLIFIED_ERROR_FACTOR or float32 > FLOAT32_TOLERANCE / RMS_ERROR_RATIO
    )


def _with_rounding_errors(golden: Golden, inputs: PassInputs, progress: StepProgress) -> Iterable[Tensor]:
    """Yield the tensors with measured rounding errors."""
    found = []
    for dtype in ("float64", "float32"):
        progress(f"rounding errors of {dtype}")
        found.append(measure_rounding_errors(TorchTwin(inputs, "explicit"), dtype))
    for tensor in golden.tensors:
        float64, float32 = (errors[tensor.name].relative_rms(tensor.scale) for errors in found)
        yield replace(tensor, float64_rounding=float64, float32_rounding=float32)


def _check_agreement(golden: Golden) -> None:
    """Raise InputError if the twins differ in float64, or if rounding leaves so few digits that a change would not show."""
    [measured] = golden.records
    for name, errors in measured.float64_errors.items():
        tolerances = np.array([tensor.float64_tolerance for tensor in golden.tensors])
        at = int(np.nanargmax(errors / tolerances))
        if not errors[at] <= tolerances[at]:
            raise InputError(
                f"the twins must agree to record a golden file, and in float64 {name} differs by {errors[at]:.1e} from "
                f"PyTorch with explicit attention at {golden.tensors[at].name} (tolerance {tolerances[at]:.0e}): find the "
                "part with `python -m parity check`"
            )
    worst = max(golden.tensors, key=lambda tensor: tensor.float64_rounding)
    if AMPLIFIED_ERROR_FACTOR * worst.float64_rounding > MAX_TOLERANCE["float64"]:
        raise InputError(
            f"a golden file would hide changes, since {PERTURBATION_ROUNDOFFS} unit roundoffs of float64 at each operation "
            f"change {worst.name} by {worst.float64_rounding:.1e} times its size: test the parts of the model with "
            "`python -m parity check`"
        )


def _value_of(run: PassResult, tensor: Tensor) -> Array | None:
    """Return a run's value of a tensor of the golden file; None if the framework does not return it."""
    name = tensor.name.removeprefix(GRADIENT_OF)
    return run.gradients.get(name) if tensor.is_gradient else run.values.get(tensor.name)


def _float64_error(tensor: Tensor, value: Array | None) -> float:
    """Return relRMS of a float64 result from the reference.

    It is NaN if the framework does not return the tensor, and infinite if the shape differs or the result is not finite.
    """
    if value is None:
        return math.nan
    if value.shape != tensor.shape or not np.isfinite(value).all():
        return math.inf
    distance = float(np.linalg.norm(sketch(value) - tensor.sketch))
    return _relative(distance, tensor.scale * math.sqrt(tensor.entries))


def _float32_error(tensor: Tensor, float64: Array | None, float32: Array | None) -> float:
    """Return relRMS of a float32 result from the float64 result of the same framework; NaN or inf as `_float64_error`."""
    if float64 is None or float32 is None:
        return math.nan
    if float64.shape != float32.shape or not np.isfinite(float64).all() or not np.isfinite(float32).all():
        return math.inf
    return _relative(root_mean_square(float32 - float64), tensor.scale)


def _relative(distance: float, scale: float) -> float:
    """Return distance / scale: 0 for no distance, and infinity for a distance with a scale of 0."""
    if not distance:
        return 0.0
    return distance / scale if scale else math.inf
