"""Compare the JAX and the PyTorch twin: every intermediate, the outputs, the loss and every gradient.

The tolerances are those of `parity.comparison.tolerances`.  G1 tests every tensor of the forward pass, and the gradient
with respect to all parameters as one vector.  The gradient with respect to one parameter is a sum that cancels, so its
error is large or small by chance.  The rounding errors of the outputs affect the whole gradient, so it has no more
independent entries than the outputs.

Where a tensor exceeds its tolerance, `parity.comparison.amplification` measures the rounding errors of these weights,
and every part is tested in isolation: a tensor of the whole model that is within the measured errors passes if no part
is wrong.

The reference is the PyTorch twin in float64 with explicit attention.  It is compared with the JAX twin, and with the
PyTorch twin that runs its default, fused attention.  If a part is wrong, `parity.comparison.localisation` finds it.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, get_args

import numpy as np

from parity.checkpoints.arrays import FLOAT_DTYPES, round_to
from parity.checkpoints.conversion import to_jax
from parity.checkpoints.layout import Array
from parity.checkpoints.weights import Checkpoint, as_checkpoint, validate
from parity.comparison import framework_settings
from parity.comparison.amplification import measure_rounding_errors
from parity.comparison.disk_cache import bytes_in_memory, release_memory
from parity.comparison.forward_backward import JaxTwin, PassInputs, PassResult, TorchTwin, check_finite, noise_images
from parity.comparison.framework_settings import Setting
from parity.comparison.localisation import (
    GRADIENT_OF,
    HIDDEN_BY_FUSED_ATTENTION,
    Bisection,
    Origin,
    check_in_isolation,
    compare_forward,
    find_imprecise_parts,
    module_scales,
    swap_bisection,
)
from parity.comparison.progress import StepProgress
from parity.comparison.report import OutputAgreement, Report, TensorComparison, Unjudged
from parity.comparison.tolerances import MAX_LINEAR_ERROR, NORM_POWERS, OVERFLOW_THRESHOLD, ErrorBudget, ErrorNorms
from parity.comparison.training import compare_training
from vit_spec import InputError, ViTConfig, nearest
from vit_spec.missing_packages import require_packages

Level = Literal["function", "precision", "train"]
Dtype = Literal["float32", "bfloat16", "float16"]


def compare(
    config: ViTConfig,
    params: Any,
    *,
    images: Array | None = None,
    seed: int = 0,
    level: Level = "precision",
    dtype: Dtype = "float32",
    backward: bool = True,
    drop_path: float = 0.0,
    steps: int = 50,
    strict: bool = True,
    xla_options: dict[str, Any] | None = None,
    progress: StepProgress = lambda what: None,
) -> Report:
    """Run both twins on the same weights and images, and report every tensor in which they differ.

    Args:
        config: the model's config.
        params: parameter pytree of the JAX twin, in any floating-point type, or a checkpoint of this config.
        images: (B, H, W, C), normalized; by default two images of normal noise of the config's image size.
        seed: seed of the default images and of the target of the loss.
        level: "function" is check G0 alone, in float64; "precision" adds G1, or G2 if `dtype` is half precision; "train"
            adds G0 and G3 for the weights after `steps` optimizer steps.
        dtype: the type of lower precision, for the levels "precision" and "train".
        backward: whether to compare gradients.
        drop_path: rate of stochastic depth in training mode, with the same masks in both twins; 0 means inference mode.
        steps: number of optimizer steps of level "train".
        strict: whether to run under strict settings of both frameworks; see `parity.comparison.framework_settings`.
        xla_options: options of XLA's compiler, for example {"xla_cpu_experimental_ynn_fusion_type": ""}.
        progress: called with a description of each step when it begins.

    Raises:
        vit_spec.InputError: a framework is not installed, the parameters do not match the config, the images do not match
            it, or the model returns NaN or infinities.
    """
    for name, value, allowed in (("level", level, get_args(Level)), ("dtype", dtype, get_args(Dtype))):
        if value not in allowed:
            raise InputError(f"{name} is {value!r}: give one of {', '.join(allowed)}{nearest(value, allowed)}")
    require_packages("the comparison runs both twins", "jax", "flax", "torch", *(["optax"] if level == "train" else []))
    audit = framework_settings.audit()
    checkpoint = params if isinstance(params, Checkpoint) else as_checkpoint(params, config, "jax")
    if checkpoint.config != config:
        raise InputError("the checkpoint has another config than the one given: give checkpoint.config")
    # float32, because float64 images would be rounded in some runs and not in others.
    images = noise_images(config, seed) if images is None else np.asarray(images, np.float32)
    is_float64 = np.dtype(np.float64) in validate(checkpoint).values()
    inputs = PassInputs(checkpoint, images, seed, drop_path)
    comparison = _Comparison(inputs, dtype, is_float64, backward, strict, xla_options or {}, progress)
    result = comparison.run_checks(test_precision=level != "function")
    training = None
    if level == "train":
        progress(f"{steps} optimizer steps in both twins")
        training = compare_training(config, to_jax(checkpoint), images=images, steps=steps, seed=seed)
    with framework_settings.strict_settings() if strict else nullcontext():
        environment = framework_settings.environment({**framework_settings.compiler_options(strict), **(xla_options or {})})
    return Report(
        config=config,
        level=level,
        dtype=dtype,
        **vars(result),
        training=training,
        audit=audit,
        warnings=_setting_warnings(audit, dtype, strict),
        environment=environment,
    )


def _setting_warnings(audit: tuple[Setting, ...], dtype: str, strict: bool) -> tuple[str, ...]:
    """Return one line for each setting in which the frameworks differ, and what the comparison does about it."""
    differing = [
        setting for setting in audit if setting.differs and (setting.name != "excess precision" or dtype != "float32")
    ]
    action = "set to {} during the comparison" if strict else "left unchanged, as requested"
    return tuple(
        f"{s.name} is {s.jax} in jax and {s.torch} in torch ({s.note}): {action.format(s.strict)}" for s in differing
    )


@dataclass(frozen=True)
class CheckResults:
    """The fields of a `Report` that the checks fill; see there."""

    measures: tuple[TensorComparison, ...]
    outputs: dict[str, OutputAgreement]
    origins: tuple[Origin, ...] = ()
    bisection: Bisection | None = None
    unjudged: tuple[Unjudged, ...] = ()
    largest_part_error: float | None = None


@dataclass(frozen=True)
class _Comparison:
    """A comparison of both twins on the same inputs.

    is_float64: whether some weights are float64, which float32 would round.
    options: options of XLA's compiler.

    The other fields are arguments of `compare`.
    """

    inputs: PassInputs
    dtype: str
    is_float64: bool
    backward: bool
    strict: bool
    options: dict[str, Any]
    progress: StepProgress

    @property
    def explicit_torch(self) -> TorchTwin:
        """The PyTorch twin with explicit attention, which is the reference."""
        return TorchTwin(self.inputs, "explicit")

    @property
    def torch(self) -> TorchTwin:
        """The PyTorch twin with its default attention."""
        return TorchTwin(self.inputs, strict=self.strict)

    @property
    def jax(self) -> JaxTwin:
        """The JAX twin."""
        return JaxTwin(self.inputs, self.options, self.strict)

    def run_checks(self, test_precision: bool) -> CheckResults:
        """Compare all tensors; if one exceeds its tolerance, measure rounding errors and find the parts that are wrong."""
        reference = self._run(self.explicit_torch, "PyTorch in float64, explicit attention")
        _check_range(reference)
        jax = self._run(self.jax, "JAX in float64")
        torch = self._run(self.torch, "PyTorch in float64, default attention")
        outputs, rounded = {"jax float64": _output_agreement(jax, reference)}, reference
        out_of_range: tuple[Unjudged, ...] = ()
        measures = list(_compare_in_float64(reference, jax, torch))
        if test_precision:
            if self.dtype != "float32" or self.is_float64:
                rounded = self._run(
                    self._torch_on_rounded_inputs, f"PyTorch in float64 on weights and images rounded to {self.dtype}"
                )
                _check_range(rounded)
            runs = {}
            for name, twin in (("jax", self.jax), ("torch", self.torch)):
                runs[name] = self._run(twin, f"{name} in {self.dtype}", self.dtype)
                outputs[f"{name} {self.dtype}"] = _output_agreement(runs[name], rounded)
            out_of_range = tuple(_out_of_range(rounded, self.dtype))
            excluded = {name for each in out_of_range for name in each.names}
            measures = list(_compare_in_low_precision(measures, rounded, runs["jax"], runs["torch"], self.dtype, excluded))
        found = CheckResults(
            tuple(measures), {name: each for name, each in outputs.items() if each is not None}, unjudged=out_of_range
        )
        if not all(m.same_function for m in found.measures):
            found = self._locate_function_differences(found, reference, jax, torch)
        if found.origins or all(m.passed for m in found.measures) or not all(m.same_function for m in found.measures):
            return found
        return self._locate_precision_differences(found, rounded)

    @property
    def _torch_on_rounded_inputs(self) -> TorchTwin:
        """The reference on weights and images rounded to the lower precision."""
        return TorchTwin(self.inputs, "explicit", self.dtype)

    def _run(self, twin: Any, description: str, dtype: str = "float64") -> PassResult:
        """Run a pass of a twin and cache its tensors on disk."""
        self.progress(description)
        run: PassResult = twin.run(dtype, backward=self.backward)
        cached, nbytes = run.cached_on_disk(), bytes_in_memory(run.values)
        del run
        release_memory(nbytes)
        return cached

    def _measure_rounding(
        self, twin: TorchTwin, dtype: str, inputs_from: PassResult | None = None, backward: bool | None = None
    ) -> dict[str, ErrorNorms]:
        """Measure the rounding errors of a type in every tensor; with `inputs_from`, of every part in isolation."""
        self.progress(f"rounding errors of {dtype} in " + ("each part" if inputs_from else "the whole model"))
        return measure_rounding_errors(twin, dtype, inputs_from, backward=self.backward if backward is None else backward)

    def _locate_function_differences(
        self, found: CheckResults, reference: PassResult, jax: PassResult, torch: PassResult
    ) -> CheckResults:
        """Find the parts that compute another function, and confirm the first by swap bisection.

        There may be no such part: all differences may be within the measured rounding errors.
        """
        rounding = self._measure_rounding(self.explicit_torch, "float64")
        measures = [replace(m, rounding=rounding.get(m.name)) for m in found.measures]
        measures = list(_mark_unreliable(measures, "float64", rounding))
        lost = {
            m.name: rounding[m.name].relative_rms(m.scale)
            for m in measures
            if not m.is_within_tolerance and m.same_function
        }
        if self.backward:
            reference = self.explicit_torch.run(intermediate_gradients=True)
        part_inputs = _without_hidden(reference)
        part_rounding = self._measure_rounding(self.explicit_torch, "float64", part_inputs)
        self.progress("every part in isolation, in float64")
        jax_parts = check_in_isolation(
            reference, self.jax.run(backward=self.backward, inputs_from=part_inputs), "jax", part_rounding
        )
        torch_parts = check_in_isolation(
            _visible_reference(reference, torch),
            self.torch.run(backward=self.backward, inputs_from=part_inputs),
            "torch",
            part_rounding,
        )
        order = {name: i for i, (name, _) in enumerate(compare_forward(reference, jax))}
        origins = sorted(
            (*jax_parts.origins, *torch_parts.origins),
            key=lambda each: (each.part.direction != "forward", order.get(each.name, 0)),
        )
        unjudged = jax_parts.unjudged | torch_parts.unjudged
        found = replace(
            found,
            measures=tuple(measures),
            origins=tuple(origins),
            unjudged=(
                *found.unjudged,
                *([Unjudged.lost_to_rounding("float64", lost, whole=True)] if lost else []),
                *([Unjudged.lost_to_rounding("float64", unjudged)] if unjudged else []),
            ),
            largest_part_error=max(jax_parts.largest_error, torch_parts.largest_error),
        )
        suspect = max((jax, torch), key=lambda run: _logits_error(run, reference))
        stages = {"embed", *(f"blocks.{i}" for i in range(self.inputs.config.depth))}
        wrong = [m for m in measures if m.name == "logits" and not m.same_function]
        if not wrong or not suspect.values.keys() >= stages:
            return found
        self.progress("swap bisection")
        tolerance = wrong[0].tolerance
        return replace(
            found, bisection=swap_bisection(reference, suspect, self.explicit_torch, self.inputs.config.depth, tolerance)
        )

    def _locate_precision_differences(self, found: CheckResults, rounded: PassResult) -> CheckResults:
        """Find the parts that one twin computes less precisely.

        If there is no such part, the error of one twin is smaller by chance, and the ratio of the errors is not tested.
        """
        rounding = self._measure_rounding(self._torch_on_rounded_inputs, self.dtype)
        measures = [replace(m, budget=replace(m.budget, rounding=rounding.get(m.name))) for m in found.measures]
        measures = list(_mark_unreliable(measures, self.dtype, rounding))
        if self.backward:
            rounded = self._torch_on_rounded_inputs.run(intermediate_gradients=True)
        values, gradients = (
            {name: _rounded_to(value, self.dtype) for name, value in each.items()}
            for each in (rounded.values, rounded.intermediate_gradients)
        )
        out_of_range = {name for each in found.unjudged if each.dtype == self.dtype for name in each.names}
        backward = (
            self.backward and "gradient" not in out_of_range and all(np.isfinite(each).all() for each in gradients.values())
        )
        part_inputs = _without_hidden(
            PassResult({name: np.nan_to_num(value) for name, value in values.items()}, {}, gradients if backward else {})
        )
        exact = self._torch_on_rounded_inputs.run(backward=backward, inputs_from=part_inputs)
        part_rounding = self._measure_rounding(self._torch_on_rounded_inputs, self.dtype, part_inputs, backward)
        self.progress(f"every part in isolation, in {self.dtype}")
        jax, torch = (twin.run(self.dtype, backward=backward, inputs_from=part_inputs) for twin in (self.jax, self.torch))
        imprecise, unjudged_parts = find_imprecise_parts(exact, jax, torch, self.dtype, part_rounding)
        origins = tuple(origin for origin in imprecise if origin.name not in out_of_range)
        measures = [replace(m, parts_passed=not origins) for m in measures]
        lost = {m.name: m.budget.rounding.relative_rms(m.scale) for m in measures if m.is_lost_to_rounding}  # type: ignore[union-attr]
        unjudged = found.unjudged
        unjudged += (Unjudged.lost_to_rounding(self.dtype, lost, whole=True),) if lost else ()
        unjudged += (Unjudged.lost_to_rounding(self.dtype, unjudged_parts),) if unjudged_parts else ()
        return replace(found, measures=tuple(measures), origins=origins, unjudged=unjudged)


def _mark_unreliable(
    measures: Iterable[TensorComparison], dtype: str, rounding: Mapping[str, ErrorNorms]
) -> Iterator[TensorComparison]:
    """Mark the tensors that are computed from one whose rounding errors are more than `MAX_LINEAR_ERROR`.

    The whole gradient counts as computed from the gradient by each parameter.
    """
    forward = backward = False
    for m in measures:
        is_gradient = m.name.startswith(GRADIENT_OF)
        yield replace(m, unreliable_in=(*m.unreliable_in, dtype)) if forward or (backward and not is_gradient) else m
        is_noisy = m.name in rounding and not rounding[m.name].relative_rms(m.scale) <= MAX_LINEAR_ERROR
        forward, backward = forward or (is_noisy and not is_gradient), backward or (is_noisy and is_gradient)


def _compare_in_float64(reference: PassResult, jax: PassResult, torch: PassResult) -> Iterator[TensorComparison]:
    """Yield the larger error of both twins in float64 for each tensor, and last for the gradient as one vector."""
    fused = dict(compare_forward(_visible_reference(reference, torch), torch))
    for name, error in compare_forward(reference, jax):
        yield TensorComparison(name, max(error, fused.get(name, error), key=attrgetter("norm")))
    yield from (TensorComparison(name, error) for name, error in fused.items() if name not in reference.values)
    if not reference.gradients:
        return
    scales, whole = module_scales(reference.gradients), ErrorNorms()
    for name, value in reference.gradients.items():
        worst = max((ErrorNorms.of(run.gradients[name], value) for run in (jax, torch)), key=attrgetter("norm"))
        whole = whole.combined_with(worst) if name != "images" else whole
        yield TensorComparison(f"{GRADIENT_OF}{name}", worst, scale=scales[name])
    yield TensorComparison("gradient", whole, entries=reference.values["logits"].size)


def _visible_reference(reference: PassResult, torch: PassResult) -> PassResult:
    """Return the reference without the tensors that a fused kernel does not return."""
    values = {
        n: v for n, v in reference.values.items() if n in torch.values or _last_word(n) not in HIDDEN_BY_FUSED_ATTENTION
    }
    return replace(reference, values=values)


def _without_hidden(run: PassResult) -> PassResult:
    """Return the tensors of a pass without those inside a fused kernel, which computes the heads from q, k and v."""
    values, gradients = (
        {n: v for n, v in each.items() if _last_word(n) not in HIDDEN_BY_FUSED_ATTENTION}
        for each in (run.values, run.intermediate_gradients)
    )
    return PassResult(values, {}, gradients)


def _last_word(name: str) -> str:
    return name.rpartition(".")[2]


def _compare_in_low_precision(
    measures: list[TensorComparison],
    reference: PassResult,
    jax: PassResult,
    torch: PassResult,
    dtype: str,
    excluded: Set[str],
) -> Iterator[TensorComparison]:
    """Yield each tensor with the errors of both twins in a lower precision, except for the excluded tensors."""
    whole = [ErrorNorms(), ErrorNorms()]
    for m in measures:
        if m.name == "gradient" and m.name not in excluded:
            yield replace(m, jax=whole[0], torch=whole[1], budget=ErrorBudget(dtype))
            continue
        kind, name = (
            ("gradients", m.name.removeprefix(GRADIENT_OF)) if m.name.startswith(GRADIENT_OF) else ("values", m.name)
        )
        sides = [getattr(run, kind) for run in (jax, torch, reference)]
        if m.name in excluded or not all(name in side for side in sides):
            yield replace(m, budget=ErrorBudget(dtype))
            continue
        errors = [ErrorNorms.of(side[name], sides[2][name]) for side in sides[:2]]
        if kind == "gradients" and name != "images":
            whole = [total.combined_with(error) for total, error in zip(whole, errors, strict=True)]
        yield replace(m, jax=errors[0], torch=errors[1], budget=ErrorBudget(dtype))


def _out_of_range(reference: PassResult, dtype: str) -> Iterator[Unjudged]:
    """Yield the tensors that are out of the range of a type: the first such tensor, and all that are computed from it.

    Norms and the loss square their inputs, and the gradient of a norm divides by the cube of its deviation.
    """
    values, gradients = list(reference.values), [f"{GRADIENT_OF}{name}" for name in reversed(list(reference.gradients))]
    whole = [*gradients, "gradient"] if gradients else []
    squared, cubed = NORM_POWERS[dtype]
    largest = {name: float(np.abs(value).max(initial=0.0)) for name, value in reference.values.items()}
    for i, name in enumerate(values):
        if not largest[name] <= OVERFLOW_THRESHOLD[dtype] ** (1 if name == "loss" else 1 / squared):
            yield Unjudged.out_of_range(dtype, (*values[i:], *whole), name, largest[name], squared)
            return
    for name in values[:-1] if gradients else ():
        if not largest[name] <= OVERFLOW_THRESHOLD[dtype] ** (1 / cubed):
            yield Unjudged.out_of_range(dtype, tuple(whole), name, largest[name], cubed)
            return
    for name in gradients:
        size = float(np.abs(reference.gradients[name.removeprefix(GRADIENT_OF)]).max(initial=0.0))
        if not size <= OVERFLOW_THRESHOLD[dtype] ** (1 / squared):
            yield Unjudged.out_of_range(dtype, (name, *(each for each in whole if each != name)), name, size, squared)
            return


def _logits_error(run: PassResult, reference: PassResult) -> float:
    return ErrorNorms.of(run.values["logits"], reference.values["logits"]).relative_rms()


def _output_agreement(run: PassResult, reference: PassResult) -> OutputAgreement | None:
    """Return the agreement of a classifier's outputs; None without at least two classes, or if it cannot be computed."""
    found, expected = run.values["logits"].astype(np.float64), reference.values["logits"]
    if expected.ndim != 2 or expected.shape[1] < 2 or found.shape != expected.shape or not np.isfinite(found).all():
        return None
    p, q = (_log_softmax(x) for x in (expected, found))
    divergence = float((np.exp(p) * (p - q)).sum(1).mean())
    return OutputAgreement(float((found.argmax(1) == expected.argmax(1)).mean()), max(0.0, divergence))


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result


def _check_range(reference: PassResult) -> None:
    """Raise an InputError if the model computes NaN, infinities, or numbers out of the range of float64."""
    check_finite(reference)
    for each in _out_of_range(reference, "float64"):
        advice = "" if each.names[0] in reference.values else ", or compare without gradients (--no-gradients)"
        raise InputError(
            f"float64 cannot tell whether the twins agree, first at {each.names[0]}, {each.why}: look at the "
            f"weights with `python -m parity inspect SRC --values`{advice}"
        )


def _rounded_to(value: Array, dtype: str) -> Array:
    """Return an array rounded to a type, in float64."""
    return round_to(round_to(value, FLOAT_DTYPES[dtype]), FLOAT_DTYPES["float64"])
