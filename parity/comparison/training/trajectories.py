"""Do both twins train alike?  The same weights, images and AdamW for N steps, and the weights that come of it.

G0: in float64 on CPU what training changed parts by at most 1e-10 between the twins, parameter by parameter, and so do
the optimizers' moments and every loss.  Where weights amplify rounding, it may part by as much as 12 times what it parts in
the PyTorch twin from itself, over three disturbed runs; each piece of each optimizer is checked then at every step, from
what the twin itself had ahead of it, which no amplification reaches.
If it parts by more, both are walked again, step by step, to where they first do; what is at fault there is told by
`parity.comparison.training.adamw`.

G3: in float32, on CPU too, what training changed may part by 3 times what it parts in the PyTorch twin from itself, over
three disturbed runs, and up to 24 where three do not explain it: in few of them an entry of a gradient that is nearly zero
changes its sign, and Adam's step with it.  All parameters are taken as one, at the end.  One parameter, or one step, is a
matter of few entries.

In a disturbed run each weight is moved by one unit in the last place, up or down, at the start and after each step, for
both frameworks round it at each step; where a weight is large, one such unit is much of what training changes.

Nothing is drawn while training: drop path, dropout and everything else that is random are off.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import inf, isfinite
from typing import Any

import numpy as np

from parity.checkpoints.weights import to_torch
from parity.comparison.localisation import module_scales
from parity.comparison.tolerances import FEW, NOISE, TRAJECTORY, Array, Error
from parity.comparison.training.adamw import Segments, Setting, State, faults
from parity.comparison.training.steps import Course, Step, Walk, jax_walk, moved, torch_walk
from vit_spec import InputError, ViTConfig

STEPS = 50
BATCHES, BATCH_SIZE = 4, 2  # what is trained on, over and over, where no images are given
DISTURBED, AT_MOST = 3, 24  # disturbed runs: always, and where those do not explain the difference
CLIP = 0.8  # of the first gradient's norm, so that clipping acts at first, and later does not
EPS = 1e-4  # of that gradient's root-mean-square: where it is zero but for rounding (a key's bias), Adam would enlarge that
Trained = tuple[tuple[float, ...], dict[str, Array]]  # the loss of each step, and what the last one left behind
PARTS = {"params": "weights", "mean": "first moment", "square": "second moment"}  # of a `State`, as they are called


@dataclass(frozen=True)
class Parting:
    """One parameter, or its moment, after the last step in float64.

    difference: relRMS between the twins, of what training changed; of moments, of themselves.
    tolerance: what of it rounding explains.
    """

    name: str
    part: str
    difference: float
    tolerance: float = TRAJECTORY


@dataclass(frozen=True)
class Cause:
    """What is wrong at the first step at which the twins part.

    step: counted from 1.
    piece: "optimizer: weight decay of blocks.0.norm1.weight", "gradient of head.weight".
    told: what was found, and what should have been.
    """

    step: int
    piece: str
    told: str

    def __str__(self) -> str:
        return f"{self.piece}, from step {self.step} on: {self.told}"


@dataclass(frozen=True)
class Trajectories:
    """What `trajectories` found.

    partings: every parameter and its moments, in float64, in the order of the weights.
    difference: relRMS between the twins of what training changed, all parameters as one, in float64.
    losses: "jax float64", "torch float64", "jax float32", "torch float32" -> the loss of each step.
    setting: what both optimizers were told.
    causes: what is wrong at the first step at which the twins part in float64; float32 has nothing to add to that then.
    loss_tolerance: what rounding explains of the difference of a loss.
    apart: as `difference`, in float32.
    disturbed: as `difference`, of PyTorch from itself in float32, for each disturbed run.
    """

    config: ViTConfig
    steps: int
    partings: tuple[Parting, ...]
    difference: float
    losses: dict[str, tuple[float, ...]]
    setting: Setting
    causes: tuple[Cause, ...] = ()
    loss_tolerance: float = TRAJECTORY
    apart: float = 0.0
    disturbed: tuple[float, ...] = ()

    @property
    def same_function(self) -> bool:
        """Gate G0."""
        within = self.loss_difference <= self.loss_tolerance and all(p.difference <= p.tolerance for p in self.partings)
        return within and not self.causes

    @property
    def same_noise(self) -> bool:
        """Gate G3."""
        return self.apart <= NOISE * self.noise

    @property
    def noise(self) -> float:
        """What PyTorch parts from itself in float32, at most."""
        return max(self.disturbed, default=0.0)

    @property
    def passed(self) -> bool:
        """Both gates."""
        return self.same_function and self.same_noise

    @property
    def loss_difference(self) -> float:
        """The largest relative difference between the twins' losses of a step, in float64."""
        return max(map(_relative, self.losses["jax float64"], self.losses["torch float64"]))

    @property
    def worst(self) -> Parting:
        """The parameter, or moment, that parts the most."""
        return max(self.partings, key=lambda parting: parting.difference / parting.tolerance)

    @property
    def verdict(self) -> str:
        """One line: PASS, or what differs first."""
        if not self.same_function:
            more = f" (and {len(self.causes) - 1} more)" if len(self.causes) > 1 else ""
            return f"FAIL: {self.causes[0]}{more}"
        noise = f"{self.apart:.1e} in float32, where PyTorch parts from itself by {self.noise:.1e}"
        if not self.same_noise:
            return (
                f"FAIL: after {self.steps} steps the updates differ by {noise} if each step is disturbed by one rounding; "
                f"the bar is {NOISE:.0f} times that"
            )
        widest = max(self.partings, key=lambda p: p.tolerance)
        explained = f" (rounding explains up to {widest.tolerance:.0e})" if widest.tolerance > TRAJECTORY else ""
        agree = f"the updates agree to {self.difference:.1e} in float64{explained}, and to {noise}"
        return f"PASS: after {self.steps} steps {agree}"

    def facts(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return {
            "passed": self.passed,
            "verdict": self.verdict,
            "steps": self.steps,
            "difference": self.difference,
            "bar": max(p.tolerance for p in self.partings),
            "parameters": {
                part: {p.name: p.difference for p in self.partings if p.part == part} for part in PARTS.values()
            },
            "losses": {name: list(values) for name, values in self.losses.items()},
            "float32": {"apart": self.apart, "disturbed": list(self.disturbed), "bar": NOISE * self.noise},
            "causes": [{"step": c.step, "piece": c.piece, "told": c.told} for c in self.causes],
            "optimizer": asdict(self.setting),
        }

    def __str__(self) -> str:
        """A few lines, and the verdict below them."""
        first, last = (self.losses["torch float64"][i] for i in (0, -1))
        return "\n".join(
            [
                f"{self.steps} steps of AdamW, clipped at {self.setting.clip:.2g}: the loss goes {first:.3g} to {last:.3g}",
                f"  float64  updates part by {self.difference:.1e}, {self.worst.part} of {self.worst.name} by "
                f"{self.worst.difference:.1e}, losses by {self.loss_difference:.1e} (bar {self.worst.tolerance:.0e})",
                *([self._in_float32] if self.disturbed else []),
                *(f"  {cause}" for cause in self.causes),
                self.verdict,
            ]
        )

    @property
    def _in_float32(self) -> str:
        others = ", ".join(f"{distance:.1e}" for distance in self.disturbed)
        if len(self.disturbed) > DISTURBED:
            others = f"up to {self.noise:.1e} in {len(self.disturbed)} runs"
        return (
            f"  float32  updates part by {self.apart:.1e}; PyTorch from itself, one rounding away, by {others} "
            f"(bar {NOISE:.0f} times the largest)"
        )


def trajectories(
    config: ViTConfig, params: Any, *, images: Array | None = None, steps: int = STEPS, seed: int = 0
) -> Trajectories:
    """Train both twins from the same weights on the same images, in float64 and in float32, and compare what comes of it.

    Args:
        params: the functional twin's parameters, nested, in any floating-point type.
        images: (B, H, W, C), normalised, for every step; by default four batches of two of the config's size, in turn.
        steps: how many.
        seed: of the default images, of what the outputs are to become, and of the disturbances.

    Raises:
        vit_spec.InputError: parameters that are not this config's, no steps, or weights that give no finite loss.
    """
    if steps < 1:
        raise InputError(f"steps is {steps}: give at least 1")
    weights = {name: tensor.double().numpy() for name, tensor in to_torch(params, config).items()}
    course = Course(config, {name: array.shape for name, array in weights.items()}, _batches(config, images, seed), seed)
    wide = np.concatenate([array.ravel() for array in weights.values()])
    narrow = wide.astype(np.float32)
    setting = _setting(course, wide)

    walks = jax_walk(course, setting), torch_walk(course, setting)

    (jax, jax_end), (torch, torch_end) = (_run(walk(wide), steps) for walk in walks)
    found = Trajectories(
        config=config,
        steps=steps,
        partings=tuple(_partings(course.segments, jax_end, torch_end, wide)),
        difference=_apart(jax_end, torch_end, wide),
        losses=_finite({"jax float64": jax, "torch float64": torch}),
        setting=setting,
    )
    if not found.same_function:
        found = _explained(found, _disturbed(course, setting, wide, steps), course.segments, wide, (torch, torch_end))
        walk_again = _pieces if found.same_function else _causes
        found = replace(found, causes=tuple(walk_again(course, setting, walks, wide, steps)))
    if not found.same_function:
        return found
    (jax, jax_end), (torch, torch_end) = (_run(walk(narrow), steps) for walk in walks)
    found = replace(
        found,
        losses=found.losses | _finite({"jax float32": jax, "torch float32": torch}),
        apart=_apart(jax_end, torch_end, narrow),
    )
    for count, (_, end) in enumerate(islice(_disturbed(course, setting, narrow, steps), AT_MOST)):
        if count >= DISTURBED and found.same_noise:
            break
        found = replace(found, disturbed=(*found.disturbed, _apart(end, torch_end, narrow)))
    return found


def _explained(
    found: Trajectories, disturbed: Iterator[Trained], segments: Segments, start: Array, undisturbed: Trained
) -> Trajectories:
    """Widen what may part to what PyTorch parts from itself in float64, where every weight is moved by one rounding."""
    partings: dict[tuple[str, str], float] = {}
    loss = 0.0
    for losses, end in islice(disturbed, DISTURBED):
        for parting in _partings(segments, end, undisturbed[1], start):
            key = parting.name, parting.part
            partings[key] = max(partings.get(key, 0.0), parting.difference)
        loss = max(loss, *map(_relative, losses, undisturbed[0]))
    wide = (replace(p, tolerance=_tolerance(partings[p.name, p.part])) for p in found.partings)
    return replace(found, partings=tuple(wide), loss_tolerance=_tolerance(loss))


def _tolerance(own: float) -> float:
    return max(TRAJECTORY, FEW * own) if isfinite(own) else TRAJECTORY


def _batches(config: ViTConfig, images: Array | None, seed: int) -> tuple[Array, ...]:
    if images is not None:
        return (np.asarray(images, np.float32),)  # so that no run starts from a rounding of its own
    drawn = np.random.default_rng(seed).standard_normal((BATCHES, BATCH_SIZE, *config.image_size, config.in_channels))
    return tuple(drawn.astype(np.float32))


def _setting(course: Course, start: Array) -> Setting:
    """What the first gradient says that clipping and epsilon must be, in order to act and not to do harm."""
    norm = float(np.linalg.norm(next(torch_walk(course, Setting(clip=inf, eps=1.0))(start)).vector("gradient")))
    if not 0 < norm < inf:
        raise InputError(f"the gradient of these weights has norm {norm}: give weights that can be trained")
    return Setting(clip=CLIP * norm, eps=EPS * CLIP * norm / start.size**0.5)


def _run(walk: Iterator[Step], steps: int) -> Trained:
    """The loss of each step, and what the last one left behind."""
    losses = []
    for step in islice(walk, steps):
        losses.append(step.loss)
    return tuple(losses), {part: step.vector(part) for part in PARTS}


def _finite(losses: dict[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
    """Return the losses, unless both twins agree that one is no number: a difference would not be seen."""
    for step, values in enumerate(zip(*losses.values(), strict=True), start=1):
        if not any(map(isfinite, values)):
            raise InputError(f"the loss is {values[0]} at step {step} in {' and '.join(losses)}: give smaller weights")
    return losses


def _apart(a: dict[str, Array], b: dict[str, Array], start: Array) -> float:
    """relRMS between what training changed, all parameters as one."""
    return Error.of(*(each["params"] - start.astype(np.float64) for each in (a, b))).relative_rms()


def _disturbed(course: Course, setting: Setting, start: Array, steps: int) -> Iterator[Trained]:
    """Train PyTorch again and again, from a start whose every weight is moved by one rounding, as each is after each step.

    What it ends at is moved back by as much as its start was moved.
    """
    rng = np.random.default_rng([course.seed, 2])
    while True:
        begun = moved(start, rng)
        losses, end = _run(torch_walk(course, setting, rng)(begun), steps)
        yield losses, {**end, "params": end["params"].astype(np.float64) - begun + start}


def _relative(a: float, b: float) -> float:
    return Error.of(np.array(a), np.array(b)).relative_rms()


def _differences(segments: Segments, a: Array, b: Array) -> dict[str, float]:
    """relRMS of each parameter's part of two vectors.

    What is zero but for rounding counts as large as its module: noise over noise is no measure.
    """
    scales = module_scales({name: part for name, _, (part,) in segments.each(b)})
    return {name: Error.of(*parts).relative_rms(scales[name]) for name, _, parts in segments.each(a, b)}


def _partings(segments: Segments, jax: dict[str, Array], torch: dict[str, Array], start: Array) -> Iterator[Parting]:
    for part, called in PARTS.items():
        origin = start if part == "params" else 0.0
        for name, difference in _differences(segments, jax[part] - origin, torch[part] - origin).items():
            yield Parting(name, called, difference)


def _causes(course: Course, setting: Setting, walks: tuple[Walk, Walk], start: Array, steps: int) -> Iterator[Cause]:
    """Walk both twins to the first step at which they part, and say what is wrong there."""
    segments, zero = course.segments, np.zeros_like(start)
    before = dict.fromkeys(("jax", "torch"), State(zero, zero, zero, start))
    both = zip(*(walk(start) for walk in walks), strict=True)
    for t, (jax, torch) in enumerate(islice(both, steps)):
        after = {"jax": jax.state, "torch": torch.state}
        gradient = _differences(segments, after["jax"].gradient, after["torch"].gradient)
        left = list(_partings(segments, vars(after["jax"]), vars(after["torch"]), start))
        worst = max(left, key=lambda parting: parting.difference)
        if max(_relative(jax.loss, torch.loss), worst.difference, *gradient.values()) > TRAJECTORY:
            yield from _at(t, setting, segments, before, after, gradient, worst)
            return
        before = after


def _pieces(course: Course, setting: Setting, walks: tuple[Walk, Walk], start: Array, steps: int) -> Iterator[Cause]:
    """Walk both twins, each by itself, to the first step at which a piece of its optimizer is wrong."""
    zero = np.zeros_like(start)
    for twin, walk in zip(("jax", "torch"), walks, strict=True):
        before = State(zero, zero, zero, start)
        for t, step in enumerate(islice(walk(start), steps)):
            after = step.state
            if wrong := faults(before, after, t, setting, course.segments):
                yield from (Cause(t + 1, f"optimizer: {each.named}", f"in {twin} {each.told}") for each in wrong)
                break
            before = after


def _at(
    t: int,
    setting: Setting,
    segments: Segments,
    before: dict[str, State],
    after: dict[str, State],
    gradient: dict[str, float],
    worst: Parting,
) -> Iterator[Cause]:
    """What is wrong at one step: gradients of the same weights; the optimizers, each by itself; or neither."""
    wrong = {name: difference for name, difference in gradient.items() if difference > TRAJECTORY}
    optimizers = [
        Cause(t + 1, f"optimizer: {fault.named}", f"in {twin} {fault.told}")
        for twin in after
        for fault in faults(before[twin], after[twin], t, setting, segments)
    ]
    if wrong and not (t and optimizers):  # later on, weights differ already
        name = max(wrong, key=lambda name: wrong[name])
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        yield Cause(t + 1, f"gradient of {name}{more}", f"the twins differ by {wrong[name]:.1e} (bar {TRAJECTORY:.0e})")
    yield from optimizers
    if not wrong and not optimizers:
        yield Cause(
            t + 1, f"{worst.part} of {worst.name}", f"rounding, which these weights amplify to {worst.difference:.1e}"
        )
