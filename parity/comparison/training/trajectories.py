"""Comparison of the twins over N optimizer steps from the same weights, on the same images, with the same AdamW.

**G0, float64 on CPU.** The total update of each parameter, its moments, and every loss differ by at most 1e-10.  If the
weights amplify rounding errors, they may differ by 12 times the largest difference between the PyTorch twin and three
perturbed runs of it.  In that case each piece of each optimizer is also checked at every step.  This check starts from the
twin's own values before the piece, so rounding errors are not amplified.  If the difference is larger, both twins are
trained again up to the first step at which they differ, and `parity.comparison.training.adamw` finds the cause there.

**G3, float32 on CPU.** The total update of all parameters, as one vector, may differ by 3 times the largest difference
between the PyTorch twin and three perturbed runs of it.  If that is not enough, there are up to 24 perturbed runs, because
a few runs differ more than most: an entry of a gradient that is nearly zero changes its sign, and Adam's step changes with
it.  Single parameters and single steps are not tested, because few entries decide their errors.

In a perturbed run each weight is changed by one unit in the last place, up or down, at the start and after each step.  The
perturbation is repeated because both frameworks round every weight at every step.  For a large weight, one unit in the last
place is a considerable part of the change by training.

Training has no randomness: drop path, dropout and the like are off.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import inf, isfinite
from typing import Any

import numpy as np

from parity.checkpoints.conversion import to_torch
from parity.checkpoints.layout import Array
from parity.comparison.localisation import module_scales
from parity.comparison.tolerances import (
    AMPLIFIED_ERROR_FACTOR,
    FLOAT64_TRAINING_TOLERANCE,
    TRAINING_NOISE_FACTOR,
    ErrorNorms,
)
from parity.comparison.training.adamw import AdamWSettings, ParameterSlices, StepState, find_faults
from parity.comparison.training.steps import (
    Step,
    Trainer,
    TrainingTask,
    make_jax_trainer,
    make_torch_trainer,
    perturb_by_one_ulp,
)
from vit_spec import InputError, ViTConfig

STEPS = 50
BATCHES, BATCH_SIZE = 4, 2  # of the default images
MIN_PERTURBED_RUNS, MAX_PERTURBED_RUNS = 3, 24  # more than the minimum only if it does not explain the difference
CLIP = 0.8  # clipping norm over the norm of the first gradient: some later gradients are clipped, and others are not
# Adam's epsilon over the root-mean-square of the first gradient after clipping.  With a smaller epsilon, Adam would enlarge
# gradients that are zero except for rounding errors, for example the gradient of a key's bias.
EPS = 1e-4
TrainingResult = tuple[tuple[float, ...], dict[str, Array]]  # the loss of each step, and the state after the last one
PARTS = {"params": "weights", "mean": "first moment", "square": "second moment"}  # part of a `StepState` -> its name


@dataclass(frozen=True)
class ParameterDifference:
    """Difference of one parameter or one of its moments after the last step in float64.

    part: "weights", "first moment" or "second moment".
    difference: relRMS between the twins: of the total update for weights, of the values for moments.
    tolerance: the largest difference that rounding errors explain.
    """

    name: str
    part: str
    difference: float
    tolerance: float = FLOAT64_TRAINING_TOLERANCE


@dataclass(frozen=True)
class TrainingCause:
    """A cause of a difference, at the first step at which it shows.

    step: number of the step, counted from 1.
    piece: what is wrong, e.g. "optimizer: weight decay of blocks.0.norm1.weight" or "gradient of head.weight".
    finding: the wrong value and the expected one.
    """

    step: int
    piece: str
    finding: str

    def __str__(self) -> str:
        return f"{self.piece}, from step {self.step} on: {self.finding}"


@dataclass(frozen=True)
class TrainingComparison:
    """Result of `compare_training`.

    differences: every parameter and its moments, in float64, in the order of the weights.
    difference: relRMS between the total updates of the twins, with all parameters as one vector, in float64.
    losses: "jax float64", "torch float64", "jax float32", "torch float32" -> the loss of each step.
    settings: hyperparameters of both optimizers.
    causes: what is wrong at the first step at which the twins differ in float64; if there are any, float32 is not run.
    loss_tolerance: the largest relative difference of a loss that rounding errors explain.
    float32_difference: as `difference`, in float32.
    perturbed_differences: relRMS between the total updates of each perturbed run of PyTorch and of the unperturbed run, in
        float32.
    """

    config: ViTConfig
    steps: int
    differences: tuple[ParameterDifference, ...]
    difference: float
    losses: dict[str, tuple[float, ...]]
    settings: AdamWSettings
    causes: tuple[TrainingCause, ...] = ()
    loss_tolerance: float = FLOAT64_TRAINING_TOLERANCE
    float32_difference: float = 0.0
    perturbed_differences: tuple[float, ...] = ()

    @property
    def same_function(self) -> bool:
        """Whether the twins pass G0."""
        within = self.loss_difference <= self.loss_tolerance and all(d.difference <= d.tolerance for d in self.differences)
        return within and not self.causes

    @property
    def is_within_noise(self) -> bool:
        """Whether the twins pass G3."""
        return self.float32_difference <= TRAINING_NOISE_FACTOR * self.noise

    @property
    def noise(self) -> float:
        """Largest difference between a perturbed run of PyTorch and the unperturbed run, in float32."""
        return max(self.perturbed_differences, default=0.0)

    @property
    def passed(self) -> bool:
        """Whether the twins pass G0 and G3."""
        return self.same_function and self.is_within_noise

    @property
    def loss_difference(self) -> float:
        """Largest relative difference between the twins' losses of a step, in float64."""
        return max(map(_relative_difference, self.losses["jax float64"], self.losses["torch float64"]))

    @property
    def worst(self) -> ParameterDifference:
        """The parameter or moment whose difference is largest relative to its tolerance."""
        return max(self.differences, key=lambda each: each.difference / each.tolerance)

    @property
    def verdict(self) -> str:
        """One line with PASS, or with FAIL and the first cause."""
        if not self.same_function:
            more = f" (and {len(self.causes) - 1} more)" if len(self.causes) > 1 else ""
            return f"FAIL: {self.causes[0]}{more}"
        if not self.is_within_noise:
            return (
                f"FAIL: after {self.steps} steps the updates differ by {self.float32_difference:.1e} in float32, and "
                f"perturbing each step by one rounding error changes PyTorch's updates by {self.noise:.1e} (tolerance "
                f"{TRAINING_NOISE_FACTOR:.0f} times that)"
            )
        widest = max(d.tolerance for d in self.differences)
        explained = f" (rounding errors explain up to {widest:.0e})" if widest > FLOAT64_TRAINING_TOLERANCE else ""
        float32 = f"{self.float32_difference:.1e} in float32 (PyTorch differs from itself by {self.noise:.1e})"
        return (
            f"PASS: after {self.steps} steps the updates agree to {self.difference:.1e} in float64{explained} and {float32}"
        )

    def facts(self) -> dict[str, Any]:
        """Return all results for JSON."""
        return {
            "passed": self.passed,
            "verdict": self.verdict,
            "steps": self.steps,
            "difference": self.difference,
            "tolerance": max(d.tolerance for d in self.differences),
            "parameters": {
                part: {d.name: d.difference for d in self.differences if d.part == part} for part in PARTS.values()
            },
            "losses": {name: list(values) for name, values in self.losses.items()},
            "float32": {
                "difference": self.float32_difference,
                "perturbed_differences": list(self.perturbed_differences),
                "tolerance": TRAINING_NOISE_FACTOR * self.noise,
            },
            "causes": [{"step": c.step, "name": c.piece, "finding": c.finding} for c in self.causes],
            "optimizer": asdict(self.settings),
        }

    def __str__(self) -> str:
        """Return a summary of a few lines; the last one is the verdict."""
        first, last = (self.losses["torch float64"][i] for i in (0, -1))
        worst = self.worst
        return "\n".join(
            [
                f"{self.steps} steps of AdamW, gradients clipped at {self.settings.clip:.2g}: the loss changes from "
                f"{first:.3g} to {last:.3g}",
                f"  float64  updates differ by {self.difference:.1e}, {worst.part} of {worst.name} by "
                f"{worst.difference:.1e}, losses by {self.loss_difference:.1e} (tolerance {worst.tolerance:.0e})",
                *([self._float32_line] if self.perturbed_differences else []),
                *(f"  {cause}" for cause in self.causes),
                self.verdict,
            ]
        )

    @property
    def _float32_line(self) -> str:
        """The line of the summary about float32."""
        noise = ", ".join(f"{difference:.1e}" for difference in self.perturbed_differences)
        if len(self.perturbed_differences) > MIN_PERTURBED_RUNS:
            noise = f"up to {self.noise:.1e} in {len(self.perturbed_differences)} runs"
        return (
            f"  float32  updates differ by {self.float32_difference:.1e}; PyTorch from itself, perturbed by one rounding "
            f"error, by {noise} (tolerance {TRAINING_NOISE_FACTOR:.0f} times the largest)"
        )


def compare_training(
    config: ViTConfig, params: Any, *, images: Array | None = None, steps: int = STEPS, seed: int = 0
) -> TrainingComparison:
    """Train both twins from the same weights on the same images, in float64 and in float32, and compare the results.

    Args:
        config: the config of the model.
        params: the JAX twin's parameters, as a nested dict, in any floating-point dtype.
        images: (B, H, W, C), normalized, used at every step; the default is four batches of two images, used in turn.
        steps: number of optimizer steps.
        seed: seed of the default images, of the targets, and of the perturbations.

    Raises:
        InputError: the parameters do not fit the config, `steps` is less than 1, the first gradient is zero or not finite,
            or no loss is finite at some step.
    """
    if steps < 1:
        raise InputError(f"steps is {steps}: give at least 1")
    weights = {name: tensor.double().numpy() for name, tensor in to_torch(params, config).items()}
    shapes = {name: array.shape for name, array in weights.items()}
    task = TrainingTask(config, shapes, _make_batches(config, images, seed), seed)
    start64 = np.concatenate([array.ravel() for array in weights.values()])
    start32 = start64.astype(np.float32)
    settings = _choose_settings(task, start64)

    trainers = make_jax_trainer(task, settings), make_torch_trainer(task, settings)

    (jax, jax_end), (torch, torch_end) = (_train(trainer(start64), steps) for trainer in trainers)
    comparison = TrainingComparison(
        config=config,
        steps=steps,
        differences=tuple(_parameter_differences(task.slices, jax_end, torch_end, start64)),
        difference=_update_difference(jax_end, torch_end, start64),
        losses=_check_finite({"jax float64": jax, "torch float64": torch}),
        settings=settings,
    )
    if not comparison.same_function:
        runs = _perturbed_runs(task, settings, start64, steps)
        comparison = _with_measured_tolerances(comparison, runs, task.slices, start64, (torch, torch_end))
        find_causes = _find_optimizer_causes if comparison.same_function else _find_causes
        comparison = replace(comparison, causes=tuple(find_causes(task, settings, trainers, start64, steps)))
    if not comparison.same_function:
        return comparison
    (jax, jax_end), (torch, torch_end) = (_train(trainer(start32), steps) for trainer in trainers)
    comparison = replace(
        comparison,
        losses=comparison.losses | _check_finite({"jax float32": jax, "torch float32": torch}),
        float32_difference=_update_difference(jax_end, torch_end, start32),
    )
    for count, (_, end) in enumerate(islice(_perturbed_runs(task, settings, start32, steps), MAX_PERTURBED_RUNS)):
        if count >= MIN_PERTURBED_RUNS and comparison.is_within_noise:
            break
        difference = _update_difference(end, torch_end, start32)
        comparison = replace(comparison, perturbed_differences=(*comparison.perturbed_differences, difference))
    return comparison


def _with_measured_tolerances(
    comparison: TrainingComparison,
    perturbed: Iterator[TrainingResult],
    slices: ParameterSlices,
    start: Array,
    unperturbed: TrainingResult,
) -> TrainingComparison:
    """Return the comparison with tolerances measured from perturbed runs of PyTorch in float64.

    start: the initial weights.
    unperturbed: the result of PyTorch's unperturbed run.
    """
    measured: dict[tuple[str, str], float] = {}
    loss = 0.0
    for losses, end in islice(perturbed, MIN_PERTURBED_RUNS):
        for each in _parameter_differences(slices, end, unperturbed[1], start):
            key = each.name, each.part
            measured[key] = max(measured.get(key, 0.0), each.difference)
        loss = max(loss, *map(_relative_difference, losses, unperturbed[0]))
    differences = (replace(d, tolerance=_tolerance(measured[d.name, d.part])) for d in comparison.differences)
    return replace(comparison, differences=tuple(differences), loss_tolerance=_tolerance(loss))


def _tolerance(measured: float) -> float:
    """Return the tolerance in float64 for a measured difference of perturbed runs; the default if it is not finite."""
    if not isfinite(measured):
        return FLOAT64_TRAINING_TOLERANCE
    return max(FLOAT64_TRAINING_TOLERANCE, AMPLIFIED_ERROR_FACTOR * measured)


def _make_batches(config: ViTConfig, images: Array | None, seed: int) -> tuple[Array, ...]:
    """Return the given images as one batch, or the default batches; (B, H, W, C) float32 each."""
    if images is not None:
        return (np.asarray(images, np.float32),)  # in float32 for all runs, so that no run rounds the images again
    normal = np.random.default_rng(seed).standard_normal((BATCHES, BATCH_SIZE, *config.image_size, config.in_channels))
    return tuple(normal.astype(np.float32))


def _choose_settings(task: TrainingTask, start: Array) -> AdamWSettings:
    """Return settings whose clipping norm and epsilon follow from the first gradient; see CLIP and EPS."""
    first = next(make_torch_trainer(task, AdamWSettings(clip=inf, eps=1.0))(start))
    norm = float(np.linalg.norm(first.vector("gradient")))
    if not 0 < norm < inf:
        raise InputError(f"the gradient of these weights has norm {norm}: give weights that can be trained")
    return AdamWSettings(clip=CLIP * norm, eps=EPS * CLIP * norm / start.size**0.5)


def _train(run: Iterator[Step], steps: int) -> TrainingResult:
    """Return the loss of each step, and the weights and moments after the last one."""
    losses = []
    for step in islice(run, steps):
        losses.append(step.loss)
    return tuple(losses), {part: step.vector(part) for part in PARTS}


def _check_finite(losses: dict[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
    """Return the losses; raise InputError if no loss is finite at some step, because a difference could not show there."""
    for step, values in enumerate(zip(*losses.values(), strict=True), start=1):
        if not any(map(isfinite, values)):
            raise InputError(f"the loss is {values[0]} at step {step} in {' and '.join(losses)}: give smaller weights")
    return losses


def _update_difference(a: dict[str, Array], b: dict[str, Array], start: Array) -> float:
    """Return relRMS between two total updates, with all parameters as one vector."""
    return ErrorNorms.of(*(each["params"] - start.astype(np.float64) for each in (a, b))).relative_rms()


def _perturbed_runs(task: TrainingTask, settings: AdamWSettings, start: Array, steps: int) -> Iterator[TrainingResult]:
    """Train PyTorch repeatedly, with every weight perturbed by one ulp at the start and after each step.

    The perturbation of the start is subtracted from the weights at the end.
    """
    rng = np.random.default_rng([task.seed, 2])
    while True:
        perturbed = perturb_by_one_ulp(start, rng)
        losses, end = _train(make_torch_trainer(task, settings, rng)(perturbed), steps)
        yield losses, {**end, "params": end["params"].astype(np.float64) - perturbed + start}


def _relative_difference(a: float, b: float) -> float:
    return ErrorNorms.of(np.array(a), np.array(b)).relative_rms()


def _vector_differences(slices: ParameterSlices, a: Array, b: Array) -> dict[str, float]:
    """Return relRMS between the parts of two flat vectors that belong to each parameter.

    The error is relative to the larger of two root-mean-squares: of the part, and of all parts of its module.  The error
    relative to the part alone says nothing if the part is zero except for rounding errors.
    """
    scales = module_scales({name: part for name, _, (part,) in slices.split(b)})
    return {name: ErrorNorms.of(*parts).relative_rms(scales[name]) for name, _, parts in slices.split(a, b)}


def _parameter_differences(
    slices: ParameterSlices, jax: dict[str, Array], torch: dict[str, Array], start: Array
) -> Iterator[ParameterDifference]:
    """Yield the differences of the total updates and of both moments of every parameter; `start` is the initial weights."""
    for part, description in PARTS.items():
        origin = start if part == "params" else 0.0
        for name, difference in _vector_differences(slices, jax[part] - origin, torch[part] - origin).items():
            yield ParameterDifference(name, description, difference)


def _find_causes(
    task: TrainingTask, settings: AdamWSettings, trainers: tuple[Trainer, Trainer], start: Array, steps: int
) -> Iterator[TrainingCause]:
    """Train both twins up to the first step at which they differ, and yield the causes there."""
    slices, zero = task.slices, np.zeros_like(start)
    before = dict.fromkeys(("jax", "torch"), StepState(zero, zero, zero, start))
    both = zip(*(trainer(start) for trainer in trainers), strict=True)
    for t, (jax, torch) in enumerate(islice(both, steps)):
        after = {"jax": jax.state, "torch": torch.state}
        gradient = _vector_differences(slices, after["jax"].gradient, after["torch"].gradient)
        differences = list(_parameter_differences(slices, vars(after["jax"]), vars(after["torch"]), start))
        worst = max(differences, key=lambda each: each.difference)
        largest = max(_relative_difference(jax.loss, torch.loss), worst.difference, *gradient.values())
        if largest > FLOAT64_TRAINING_TOLERANCE:
            yield from _causes_at_step(t, settings, slices, before, after, gradient, worst)
            return
        before = after


def _find_optimizer_causes(
    task: TrainingTask, settings: AdamWSettings, trainers: tuple[Trainer, Trainer], start: Array, steps: int
) -> Iterator[TrainingCause]:
    """Train each twin up to the first step at which a piece of its optimizer is wrong, and yield these pieces."""
    zero = np.zeros_like(start)
    for twin, trainer in zip(("jax", "torch"), trainers, strict=True):
        before = StepState(zero, zero, zero, start)
        for t, step in enumerate(islice(trainer(start), steps)):
            after = step.state
            if faults := find_faults(before, after, t, settings, task.slices):
                yield from (
                    TrainingCause(t + 1, f"optimizer: {each.label}", f"in {twin} {each.finding}") for each in faults
                )
                break
            before = after


def _causes_at_step(
    t: int,
    settings: AdamWSettings,
    slices: ParameterSlices,
    before: dict[str, StepState],
    after: dict[str, StepState],
    gradient: dict[str, float],
    worst: ParameterDifference,
) -> Iterator[TrainingCause]:
    """Yield the causes at one step: different gradients of equal weights, faults of an optimizer, or rounding errors."""
    wrong = {name: difference for name, difference in gradient.items() if difference > FLOAT64_TRAINING_TOLERANCE}
    optimizers = [
        TrainingCause(t + 1, f"optimizer: {fault.label}", f"in {twin} {fault.finding}")
        for twin in after
        for fault in find_faults(before[twin], after[twin], t, settings, slices)
    ]
    if wrong and not (t and optimizers):  # after the first step a wrong optimizer has changed the weights
        name = max(wrong, key=lambda name: wrong[name])
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        difference = f"the twins differ by {wrong[name]:.1e} (tolerance {FLOAT64_TRAINING_TOLERANCE:.0e})"
        yield TrainingCause(t + 1, f"gradient of {name}{more}", difference)
    yield from optimizers
    if not wrong and not optimizers:
        finding = f"rounding errors, which these weights amplify to {worst.difference:.1e}"
        yield TrainingCause(t + 1, f"{worst.part} of {worst.name}", finding)
