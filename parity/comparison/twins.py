"""Are the two twins the same function?  Every intermediate, the outputs, the loss and every gradient, through the gates.

The bars are those of `parity.comparison.tolerances`.  G1 judges what the forward pass names and the gradient as a whole:
one parameter's gradient is a sum that cancels, whose error is large or small by luck.  All of the gradient passes through
the rounding of the outputs, so its entries are no more independent than those.

Where a tensor is outside of its tolerance, `parity.comparison.amplification` measures what rounding makes of these weights,
and every part is judged on its own: what rounding explains in the whole model passes if no part is wrong.

The reference is the PyTorch twin in float64 with its attention written out.  Held to it are the JAX twin, and the PyTorch
twin with the fused kernel that it runs with.  Where a part is wrong,
`parity.comparison.localisation` names it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, get_args

import numpy as np

from parity.checkpoints.weights import FLOATS, Checkpoint, check, held, rounded, to_jax
from parity.comparison import framework_settings
from parity.comparison.amplification import amplified
from parity.comparison.disk_cache import give_back, size
from parity.comparison.forward_backward import JaxTwin, Run, Subject, TorchTwin, noise
from parity.comparison.framework_settings import Setting
from parity.comparison.localisation import (
    GRADIENT,
    UNSEEN,
    Bisection,
    Origin,
    alone,
    bisect,
    forward,
    imprecise,
    module_scales,
)
from parity.comparison.report import Measure, Outputs, Report, Unjudged
from parity.comparison.tolerances import LARGEST, POWERS, SWAMPED, Array, Budget, Error
from parity.comparison.training import trajectories
from vit_spec import InputError, ViTConfig, nearest

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
    progress: Callable[[str], None] = lambda what: None,
) -> Report:
    """Run both twins on the same weights and images, and measure where they part.

    Args:
        params: the functional twin's parameters, nested, in any floating-point type; or a checkpoint of this config.
        images: (B, H, W, C), normalised; by default two images of normal noise of the config's size.
        seed: of the default images and of the target that the loss measures the distance to.
        level: "function" is gate G0 alone, in float64; "precision" adds G1, or G2 where `dtype` is half precision; "train"
            adds the weights after `steps` optimizer steps, G0 and G3.
        dtype: the coarser type of "precision".
        backward: whether gradients are compared too.
        drop_path: a rate of stochastic depth, in training, under masks that are the same for both twins; 0 is inference.
        strict: whether to set both frameworks to strict values meanwhile; see `parity.comparison.framework_settings`.
        xla_options: options of XLA's compiler, e.g. {"xla_cpu_experimental_ynn_fusion_type": ""}.
        progress: called with what is being done.

    Raises:
        vit_spec.InputError: parameters that are not this config's, images that it cannot take, or a model that returns
            NaN or infinities.
    """
    for name, value, allowed in (("level", level, get_args(Level)), ("dtype", dtype, get_args(Dtype))):
        if value not in allowed:
            raise InputError(f"{name} is {value!r}: give one of {', '.join(allowed)}{nearest(value, allowed)}")
    audit = framework_settings.audit()
    # In float32, so that no run starts from a rounding of its own.
    images = noise(config, seed) if images is None else np.asarray(images, np.float32)
    checkpoint = params if isinstance(params, Checkpoint) else held(params, config, "jax")
    if checkpoint.config != config:
        raise InputError("the checkpoint is of another config than the one given: give checkpoint.config")
    wide = np.dtype(np.float64) in check(checkpoint).values()
    subject = Subject(checkpoint, images, seed, drop_path)
    comparison = _Comparison(subject, dtype, wide, backward, strict, xla_options or {}, progress)
    found = comparison.measured(coarse=level != "function")
    training = None
    if level == "train":
        progress(f"{steps} optimizer steps in both twins")
        training = trajectories(config, to_jax(checkpoint), images=images, steps=steps, seed=seed)
    with framework_settings.strict() if strict else nullcontext():
        environment = framework_settings.environment({**framework_settings.compiler_options(strict), **(xla_options or {})})
    return Report(
        config=config,
        level=level,
        dtype=dtype,
        **vars(found),
        training=training,
        audit=audit,
        warnings=_warnings(audit, dtype, strict),
        environment=environment,
    )


def _warnings(audit: tuple[Setting, ...], dtype: str, strict: bool) -> tuple[str, ...]:
    """Where the two sides are set differently, and what the check does about it."""
    apart = [setting for setting in audit if setting.differs and (setting.name != "excess precision" or dtype != "float32")]
    what = "set to {} meanwhile" if strict else "left so, as was asked"
    return tuple(f"{s.name} is {s.jax} in jax and {s.torch} in torch ({s.note}): {what.format(s.strict)}" for s in apart)


@dataclass(frozen=True)
class Found:
    """What a `Report` says of the gates; its fields are described there."""

    measures: tuple[Measure, ...]
    outputs: dict[str, Outputs]
    origins: tuple[Origin, ...] = ()
    bisection: Bisection | None = None
    unjudged: tuple[Unjudged, ...] = ()
    parts: float | None = None


@dataclass(frozen=True)
class _Comparison:
    """Both twins on one subject; see `compare`.

    wide: whether the weights are such that float32 rounds them.
    """

    subject: Subject
    dtype: str
    wide: bool
    backward: bool
    strict: bool
    options: dict[str, Any]
    progress: Callable[[str], None]

    @property
    def written_out(self) -> TorchTwin:
        """The reference."""
        return TorchTwin(self.subject, "explicit")

    @property
    def torch(self) -> TorchTwin:
        """The PyTorch twin as it runs."""
        return TorchTwin(self.subject, strict=self.strict)

    @property
    def jax(self) -> JaxTwin:
        """The JAX twin."""
        return JaxTwin(self.subject, self.options, self.strict)

    def measured(self, coarse: bool) -> Found:
        """Measure, and where a tensor is outside of its tolerance find out what rounding explains, and what is wrong."""
        reference = self._run(self.written_out, "PyTorch in float64, attention written out")
        _refuse_nan(reference)
        jax = self._run(self.jax, "JAX in float64")
        torch = self._run(self.torch, "PyTorch in float64, as it runs")
        outputs, rounded = {"jax float64": _outputs(jax, reference)}, reference
        unheld: tuple[Unjudged, ...] = ()
        measures = list(_measures(reference, jax, torch))
        if coarse:
            if self.dtype != "float32" or self.wide:
                rounded = self._run(self._rounded, f"PyTorch in float64 on what {self.dtype} can hold")
                _refuse_nan(rounded)
            runs = {}
            for name, twin in (("jax", self.jax), ("torch", self.torch)):
                runs[name] = self._run(twin, f"{name} in {self.dtype}", self.dtype)
                outputs[f"{name} {self.dtype}"] = _outputs(runs[name], rounded)
            unheld = tuple(_unheld(rounded, self.dtype))
            left_out = {name for each in unheld for name in each.names}
            measures = list(_coarser(measures, rounded, runs["jax"], runs["torch"], self.dtype, left_out))
        found = Found(tuple(measures), {name: each for name, each in outputs.items() if each is not None}, unjudged=unheld)
        if not all(m.same_function for m in found.measures):
            found = self._function(found, reference, jax, torch)
        if found.origins or all(m.passed for m in found.measures) or not all(m.same_function for m in found.measures):
            return found
        return self._precision(found, rounded)

    @property
    def _rounded(self) -> TorchTwin:
        """The reference on weights and images that the coarser type can hold."""
        return TorchTwin(self.subject, "explicit", self.dtype)

    def _run(self, twin: Any, what: str, dtype: str = "float64") -> Run:
        self.progress(what)
        run: Run = twin.run(dtype, backward=self.backward)
        kept, nbytes = run.spooled(), size(run.values)
        del run
        give_back(nbytes)
        return kept

    def _rounding(
        self, twin: TorchTwin, dtype: str, fed: Run | None = None, backward: bool | None = None
    ) -> dict[str, Error]:
        """Measure what rounding to a type makes of every tensor of a pass in float64, or of every part that is fed."""
        self.progress(f"what rounding to {dtype} makes of " + ("each part" if fed else "these weights"))
        return amplified(twin, dtype, fed, backward=self.backward if backward is None else backward)

    def _function(self, found: Found, reference: Run, jax: Run, torch: Run) -> Found:
        """Find the parts that are another function, and confirm the first by swapping; rounding may explain it all."""
        rounding = self._rounding(self.written_out, "float64")
        measures = [replace(m, rounding=rounding.get(m.name)) for m in found.measures]
        measures = list(_swamped(measures, "float64", rounding))
        lost = {m.name: rounding[m.name].relative_rms(m.scale) for m in measures if not m.within and m.same_function}
        if self.backward:
            reference = self.written_out.run(arriving=True)
        fed = _fused(reference)
        each = self._rounding(self.written_out, "float64", fed)
        self.progress("every part on its own, in float64")
        parts = alone(reference, self.jax.run(backward=self.backward, fed=fed), "jax", each)
        others = alone(_seen(reference, torch), self.torch.run(backward=self.backward, fed=fed), "torch", each)
        order = {name: i for i, (name, _) in enumerate(forward(reference, jax))}
        origins = sorted(
            (*parts.origins, *others.origins), key=lambda each: (each.part.way != "forward", order.get(each.name, 0))
        )
        unjudged = parts.unjudged | others.unjudged
        found = replace(
            found,
            measures=tuple(measures),
            origins=tuple(origins),
            unjudged=(
                *found.unjudged,
                *([Unjudged.rounding("float64", lost, whole=True)] if lost else []),
                *([Unjudged.rounding("float64", unjudged)] if unjudged else []),
            ),
            parts=max(parts.worst, others.worst),
        )
        suspect = max((jax, torch), key=lambda run: _distance(run, reference))
        stages = {"embed", *(f"blocks.{i}" for i in range(self.subject.config.depth))}
        wrong = [m for m in measures if m.name == "logits" and not m.same_function]
        if not wrong or not suspect.values.keys() >= stages:
            return found
        self.progress("swapping twins after a block")
        tolerance = wrong[0].tolerance
        return replace(found, bisection=bisect(reference, suspect, self.written_out, self.subject.config.depth, tolerance))

    def _precision(self, found: Found, rounded: Run) -> Found:
        """Find the parts that one twin computes more coarsely; where there are none, one side is nearer by luck."""
        rounding = self._rounding(self._rounded, self.dtype)
        measures = [replace(m, budget=replace(m.budget, rounding=rounding.get(m.name))) for m in found.measures]
        measures = list(_swamped(measures, self.dtype, rounding))
        if self.backward:
            rounded = self._rounded.run(arriving=True)
        values, arriving = (
            {name: _as(value, self.dtype) for name, value in each.items()} for each in (rounded.values, rounded.arriving)
        )
        unheld = {name for each in found.unjudged if each.dtype == self.dtype for name in each.names}
        backward = self.backward and "gradient" not in unheld and all(np.isfinite(each).all() for each in arriving.values())
        fed = _fused(Run({name: np.nan_to_num(value) for name, value in values.items()}, {}, arriving if backward else {}))
        exact = self._rounded.run(backward=backward, fed=fed)
        each = self._rounding(self._rounded, self.dtype, fed, backward)
        self.progress(f"every part on its own, in {self.dtype}")
        jax, torch = (twin.run(self.dtype, backward=backward, fed=fed) for twin in (self.jax, self.torch))
        coarse, parts = imprecise(exact, jax, torch, self.dtype, each)
        origins = tuple(origin for origin in coarse if origin.name not in unheld)
        measures = [replace(m, alone=not origins) for m in measures]
        lost = {m.name: m.budget.rounding.relative_rms(m.scale) for m in measures if m.lost}  # type: ignore[union-attr]
        unjudged = found.unjudged
        unjudged += (Unjudged.rounding(self.dtype, lost, whole=True),) if lost else ()
        unjudged += (Unjudged.rounding(self.dtype, parts),) if parts else ()
        return replace(found, measures=tuple(measures), origins=origins, unjudged=unjudged)


def _swamped(measures: Iterable[Measure], dtype: str, rounding: Mapping[str, Error]) -> Iterator[Measure]:
    """Mark what is computed from a tensor that rounding to a type swamps; the gradient as a whole, from any gradient."""
    forward = backward = False
    for m in measures:
        gradient = m.name.startswith(GRADIENT)
        yield replace(m, swamped=(*m.swamped, dtype)) if forward or (backward and not gradient) else m
        swamps = m.name in rounding and not rounding[m.name].relative_rms(m.scale) <= SWAMPED
        forward, backward = forward or (swamps and not gradient), backward or (swamps and gradient)


def _measures(reference: Run, jax: Run, torch: Run) -> Iterator[Measure]:
    """Each tensor in float64: whichever twin is farther from the reference; at last all parameters' gradients as one."""
    fused = dict(forward(_seen(reference, torch), torch))
    for name, error in forward(reference, jax):
        yield Measure(name, max(error, fused.get(name, error), key=attrgetter("norm")))
    yield from (Measure(name, error) for name, error in fused.items() if name not in reference.values)
    if not reference.gradients:
        return
    scales, whole = module_scales(reference.gradients), Error()
    for name, value in reference.gradients.items():
        worst = max((Error.of(run.gradients[name], value) for run in (jax, torch)), key=attrgetter("norm"))
        whole = whole.joined(worst) if name != "images" else whole
        yield Measure(f"{GRADIENT}{name}", worst, scale=scales[name])
    yield Measure("gradient", whole, entries=reference.values["logits"].size)


def _seen(reference: Run, torch: Run) -> Run:
    """The reference without what does not show in a fused kernel."""
    values = {n: v for n, v in reference.values.items() if n in torch.values or n.rpartition(".")[2] not in UNSEEN}
    return replace(reference, values=values)


def _fused(run: Run) -> Run:
    """What can be fed to a fused kernel: attention is one part then, from queries, keys and values to what heads give."""
    values, arriving = ({n: v for n, v in each.items() if _leaf(n) not in UNSEEN} for each in (run.values, run.arriving))
    return Run(values, {}, arriving)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _coarser(
    measures: list[Measure], reference: Run, jax: Run, torch: Run, dtype: str, unheld: Set[str]
) -> Iterator[Measure]:
    """Add how far each twin is from the reference in a coarser type, where it holds the tensor."""
    whole = [Error(), Error()]
    for m in measures:
        if m.name == "gradient" and m.name not in unheld:
            yield replace(m, jax=whole[0], torch=whole[1], budget=Budget(dtype))
            continue
        kind, name = ("gradients", m.name.removeprefix(GRADIENT)) if m.name.startswith(GRADIENT) else ("values", m.name)
        sides = [getattr(run, kind) for run in (jax, torch, reference)]
        if m.name in unheld or not all(name in side for side in sides):
            yield replace(m, budget=Budget(dtype))
            continue
        errors = [Error.of(side[name], sides[2][name]) for side in sides[:2]]
        if kind == "gradients" and name != "images":
            whole = [total.joined(error) for total, error in zip(whole, errors, strict=True)]
        yield replace(m, jax=errors[0], torch=errors[1], budget=Budget(dtype))


def _unheld(reference: Run, dtype: str) -> Iterator[Unjudged]:
    """Return what a type cannot hold: the first tensor outside of its range, and what is computed from it.

    Norms and the loss square what they are given, and the gradient of a norm divides by the cube of its deviation.
    """
    values, gradients = list(reference.values), [f"{GRADIENT}{name}" for name in reversed(list(reference.gradients))]
    whole = [*gradients, "gradient"] if gradients else []
    squared, cubed = POWERS[dtype]
    largest = {name: float(np.abs(value).max(initial=0.0)) for name, value in reference.values.items()}
    for i, name in enumerate(values):
        if not largest[name] <= LARGEST[dtype] ** (1 if name == "loss" else 1 / squared):
            yield Unjudged.range(dtype, (*values[i:], *whole), name, largest[name], squared)
            return
    for name in values[:-1] if gradients else ():
        if not largest[name] <= LARGEST[dtype] ** (1 / cubed):
            yield Unjudged.range(dtype, tuple(whole), name, largest[name], cubed)
            return
    for name in gradients:
        size = float(np.abs(reference.gradients[name.removeprefix(GRADIENT)]).max(initial=0.0))
        if not size <= LARGEST[dtype] ** (1 / squared):
            yield Unjudged.range(dtype, (name, *(each for each in whole if each != name)), name, size, squared)
            return


def _distance(run: Run, reference: Run) -> float:
    return Error.of(run.values["logits"], reference.values["logits"]).relative_rms()


def _outputs(run: Run, reference: Run) -> Outputs | None:
    """How a classifier's answers differ; None where there are no classes to choose from, or nothing can be said."""
    found, expected = run.values["logits"].astype(np.float64), reference.values["logits"]
    if expected.ndim != 2 or expected.shape[1] < 2 or found.shape != expected.shape or not np.isfinite(found).all():
        return None
    p, q = (_log_softmax(x) for x in (expected, found))
    divergence = float((np.exp(p) * (p - q)).sum(1).mean())
    return Outputs(float((found.argmax(1) == expected.argmax(1)).mean()), max(0.0, divergence))


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result


def _refuse_nan(reference: Run) -> None:
    """Refuse a model that returns no numbers, or whose numbers leave float64: nothing can be compared."""
    for name, value in reference.values.items():
        if not np.isfinite(value).all():
            raise InputError(
                f"the model computes NaN or infinities, first at {name}: look at its weights with "
                "`python -m parity inspect SRC --values`, and give images that are normalised"
            )
    for beyond in _unheld(reference, "float64"):
        how = "" if beyond.names[0] in reference.values else ", or compare without gradients (--no-gradients)"
        raise InputError(
            f"not even float64 can tell whether the twins agree, first at {beyond.names[0]}, {beyond.why}: look at the "
            f"weights with `python -m parity inspect SRC --values`{how}"
        )


def _as(value: Array, dtype: str) -> Array:
    """Numbers that a type can hold, in float64."""
    return rounded(rounded(value, FLOATS[dtype]), FLOATS["float64"])
