"""Where two passes part: what is wrong in itself, and what only carries on what it was handed.

Two tests that know nothing of each other.  *Isolation* feeds every part of a twin the reference's input, forward, and the
reference's gradient, backward: what differs even then is an origin, all else is propagation.  *Swap bisection* lets one
twin compute the first k blocks and the other the rest: the smallest k whose outputs are wrong names the block.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.comparison.forward_backward import Run, TorchTwin
from parity.comparison.tolerances import FUNCTION, JUDGED, Budget, Error, luck

GRADIENT = "gradient of "  # of a parameter
ARRIVING = "gradient at "  # of an intermediate


@dataclass(frozen=True)
class Part:
    """A place in a model.

    module: as in a state dict: "blocks.3.attn"; empty for the model itself.
    operation: what in the module; empty where the module is one operation, a linear map or a norm.
    way: "forward", "backward", or "training" for a part of an optimizer step.
    """

    module: str
    operation: str
    way: str = "forward"

    @classmethod
    def of(cls, name: str, names: Iterable[str]) -> "Part":
        """Read the name of an intermediate, or of a gradient, among all `names` of intermediates."""
        if name.startswith(ARRIVING):  # what hands it back is to blame: what is computed from it, next
            name = GRADIENT + _next(name.removeprefix(ARRIVING), names)
        if name.startswith(GRADIENT):
            part = cls.of(name.removeprefix(GRADIENT), names)
            return cls(part.module, part.operation, "backward")
        module, _, last = name.rpartition(".")
        plain = last.partition(" (")[0]
        if any(other.startswith(f"{name}.") for other in names):
            return cls(name, "output")
        if plain in OPERATIONS:
            return cls(module, last)
        return cls(name, "")

    def __str__(self) -> str:
        place = f"{self.module}: {self.operation}" if self.module and self.operation else self.module or self.operation
        return f"{place} on the way back" if self.way == "backward" else place


def _next(name: str, names: Iterable[str]) -> str:
    """The first intermediate that is computed from this one."""
    later = list(names)
    later = later[later.index(name) + 1 :]
    passed_by = ("k", "v", "weights") if name.rpartition(".")[2] in ("q", "k", "scores") else ()
    return next((each for each in later if each.rpartition(".")[2] not in passed_by), name)


# What the twins name inside a module that is no module itself.
OPERATIONS = frozenset(
    (
        *("tokens", "positions", "cosines", "sines", "embed"),
        *("q", "k", "v", "scores", "weights", "heads", "sum", "activation"),
        *("pool", "hidden", "first", "second", "logits", "loss"),
    )
)


UNSEEN = ("scores", "weights")  # in a fused kernel

Rounding = Mapping[str, Error]  # what rounding makes of the tensors of these names; see `parity.comparison.amplification`
NOTHING: Rounding = {}

CONSTANT = ("positions", "cosines", "sines")  # what a model may have no parameter for, so that no gradient is asked for


@dataclass(frozen=True)
class Origin:
    """A part that is wrong in itself.

    name: of the intermediate, or of the gradient.
    error: relRMS of what it makes of the reference's input; infinite where one twin alone has it.
    twin: "jax" or "torch", whichever was fed; of a difference in precision the coarser.
    """

    name: str
    part: Part
    error: float
    twin: str


@dataclass(frozen=True)
class Alone:
    """What a pass that was fed the reference says of every part on its own.

    origins: what differs: forward in the order of computation, then backward.
    unjudged: what float64 cannot tell a wrong formula in, because rounding is nearly all there is in it -> how much of it.
    worst: the largest relRMS of all others.
    """

    origins: tuple[Origin, ...]
    unjudged: dict[str, float]
    worst: float


def alone(reference: Run, local: Run, twin: str, rounding: Rounding = NOTHING) -> Alone:
    """Judge every part by what it makes of the reference's input.

    local: the pass of `twin` in float64 that was fed `reference`.
    rounding: what rounding makes of each part that is fed the reference; see `parity.comparison.amplification`.
    """
    names, found, unjudged, worst = list(reference.values), [], {}, 0.0
    seen = [name for name in names if name.rpartition(".")[2] not in UNSEEN]  # no gradient is handed to the others
    for name, error, scale in _all(reference, local):
        relative, factor = error.relative_rms(scale), luck(error.entries)
        if not (relative <= FUNCTION or error.explained(rounding.get(name), factor)):
            way = seen if name.startswith(ARRIVING) else names
            found.append(Origin(name, Part.of(name, way), relative, twin))
        elif relative > FUNCTION and not factor * rounding[name].relative_rms(scale) <= JUDGED["float64"]:
            unjudged[name] = rounding[name].relative_rms(scale)
        else:
            worst = max(worst, relative)
    return Alone(tuple(found), unjudged, worst)


def imprecise(
    reference: Run, jax: Run, torch: Run, dtype: str, rounding: Rounding = NOTHING
) -> tuple[list[Origin], dict[str, float]]:
    """Return the parts that one twin computes more coarsely than the other, or either than the type explains.

    The second of what is returned are parts to which rounding leaves too little to judge -> how much it makes of them.

    Gradients cancel, and their errors may be small by luck: of them one twin is not held to the other.

    reference: the pass in float64 that was fed the same rounded numbers.
    rounding: what rounding to the type makes of each part that is fed them.
    """
    names, found, lost = list(reference.values), [], {}
    seen = [name for name in names if name.rpartition(".")[2] not in UNSEEN]
    of_torch = {name: error for name, error, _ in _all(reference, torch)}
    for name, of_jax, scale in _all(reference, jax):
        other = of_torch.get(name)
        both = name.startswith((GRADIENT, ARRIVING)) or (name in jax.values and name in torch.values)
        if other is None or not both:  # a fused kernel does not show its scores
            continue
        budget = Budget(dtype, rounding=rounding.get(name))
        right = budget.near_enough if name.startswith((GRADIENT, ARRIVING)) else budget.holds
        if not right(of_jax, other, scale=scale):
            twin, worse = ("jax", of_jax) if of_jax.norm > other.norm else ("torch", other)
            way = seen if name.startswith(ARRIVING) else names
            found.append(Origin(name, Part.of(name, way), worse.relative_rms(scale), twin))
        elif budget.amplifies(scale) and not rounding[name].relative_rms(scale) <= JUDGED[dtype]:
            lost[name] = rounding[name].relative_rms(scale)
    return found, lost


def _all(reference: Run, other: Run) -> Iterator[tuple[str, Error, float]]:
    """Compare every intermediate, and then every gradient, with its scale."""
    yield from ((name, error, 0.0) for name, error in forward(reference, other))
    yield from backward(reference, other)


def forward(reference: Run, other: Run) -> Iterator[tuple[str, Error]]:
    """Compare every intermediate, in the order of computation; what one of the two lacks is infinitely far.

    What the reference lacks comes ahead of all that it has in the same module.
    """
    alone = [name for name in other.values if name not in reference.values]
    for name, value in reference.values.items():
        for extra in [each for each in alone if name.startswith(each.rpartition(".")[0])]:
            alone.remove(extra)
            yield extra, Error.infinite()
        yield name, Error.of(other.values[name], value) if name in other.values else Error.infinite()
    yield from ((name, Error.infinite()) for name in alone)


def backward(reference: Run, other: Run) -> Iterator[tuple[str, Error, float]]:
    """Compare every gradient on the way back, at intermediates and then of parameters and images, with its scale."""
    for name in reversed(list(reference.values)):
        if name in other.arriving and (name in reference.arriving or name not in CONSTANT):
            expected = reference.arriving.get(name, np.zeros(reference.values[name].shape))
            where = ARRIVING if name in reference.arriving else GRADIENT  # none arrives: it is itself cut off
            yield f"{where}{name}", Error.of(other.arriving[name], expected), 0.0
    scales = module_scales(reference.gradients)
    for name, value in reference.gradients.items():
        error = Error.of(other.gradients[name], value) if name in other.gradients else Error.infinite()
        yield f"{GRADIENT}{name}", error, scales[name]


def module_scales(tensors: Mapping[str, Any]) -> dict[str, float]:
    """What a parameter's gradient, or change, is measured against at least: the root-mean-square over its module.

    Some gradients are zero but for rounding (a key's bias cannot change a softmax), and noise over noise is no measure.
    """
    sums: dict[str, Error] = {}
    for name, value in tensors.items():
        sums[_module(name)] = sums.get(_module(name), Error()).joined(Error.of(value, value))
    return {name: (of := sums[_module(name)]).reference_norm / math.sqrt(max(1, of.entries)) for name in tensors}


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name


@dataclass(frozen=True)
class Bisection:
    """What a swap bisection found.

    stage: the first that is wrong: "embed", "blocks.3", or "outputs" for what follows the blocks.
    runs: name of the last stage that the twin under suspicion computed -> relRMS of the outputs that came of it.
    """

    stage: str
    runs: dict[str, float]

    def __str__(self) -> str:
        tried = ", ".join(f"{error:.1e} after {name}" for name, error in self.runs.items())
        return f"swap bisection: {self.stage} (outputs differ by {tried}, where the other twin takes over)"


def bisect(reference: Run, suspect: Run, rest: TorchTwin, depth: int, tolerance: float = FUNCTION) -> Bisection:
    """Find the first stage of `suspect` that is wrong, in log2(depth) runs: it computes the first, `rest` the others.

    reference: the pass of `rest` alone.
    tolerance: of the logits.
    """
    stages = ["embed", *(f"blocks.{i}" for i in range(depth)), "outputs"]
    runs: dict[str, float] = {}
    low, high = -1, len(stages) - 1  # all stages up to `low` are right; among those up to `high` one is wrong
    while high - low > 1:
        middle = (low + high) // 2
        handed = Run({stages[middle]: suspect.values[stages[middle]]})
        outputs = rest.run(backward=False, fed=handed).values["logits"]
        runs[stages[middle]] = Error.of(outputs, reference.values["logits"]).relative_rms()
        if runs[stages[middle]] <= tolerance:
            low = middle
        else:
            high = middle
    return Bisection(stages[high], runs)
