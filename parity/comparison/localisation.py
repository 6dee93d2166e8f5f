"""Find the parts of a model that cause a difference between two passes, as opposed to the parts that only propagate it.

There are two independent tests.  *Isolation* gives every part of a twin the reference's input in the forward pass, and the
reference's gradient in the backward pass.  A part whose result still differs is an origin; all others only propagate a
difference.  In *swap bisection* one twin computes the first k blocks and the other twin the rest: the smallest k with wrong
outputs gives the wrong block.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.forward_backward import PassResult, TorchTwin
from parity.comparison.tolerances import (
    FLOAT64_TOLERANCE,
    MAX_TOLERANCE,
    ErrorBudget,
    ErrorNorms,
    five_sigma_factor,
)

GRADIENT_OF = "gradient of "  # prefix of the name of a gradient with respect to a parameter
GRADIENT_AT = "gradient at "  # prefix of the name of a gradient with respect to an intermediate


@dataclass(frozen=True)
class Part:
    """An operation of a model, in one direction.

    module: module name as in a state dict, such as "blocks.3.attn"; empty for the model itself.
    operation: operation within the module; empty if the module is a single operation, such as a linear map or a norm.
    direction: "forward", "backward", or "training" for a part of an optimizer step.
    """

    module: str
    operation: str
    direction: str = "forward"

    @classmethod
    def of(cls, name: str, names: Iterable[str]) -> "Part":
        """Return the part that computes an intermediate or a gradient; `names` are those of all intermediates, in order."""
        if name.startswith(GRADIENT_AT):  # the operation after it computes this gradient
            name = GRADIENT_OF + _next_intermediate(name.removeprefix(GRADIENT_AT), names)
        if name.startswith(GRADIENT_OF):
            part = cls.of(name.removeprefix(GRADIENT_OF), names)
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
        return f"{place} in the backward pass" if self.direction == "backward" else place

    def facts(self) -> dict[str, str]:
        """Return the name of the part and its fields, for JSON."""
        return {"name": str(self), **asdict(self)}


def _next_intermediate(name: str, names: Iterable[str]) -> str:
    """Return the first intermediate that is computed from the given one; `names` are in the order of computation."""
    later = list(names)
    later = later[later.index(name) + 1 :]
    skipped = ("k", "v", "weights") if name.rpartition(".")[2] in ("q", "k", "scores") else ()
    return next((each for each in later if each.rpartition(".")[2] not in skipped), name)


# Names of intermediates that are operations within a module.
OPERATIONS = frozenset(
    (
        *("tokens", "positions", "cosines", "sines", "embed"),
        *("q", "k", "v", "scores", "weights", "heads", "sum", "activation"),
        *("pool", "hidden", "first", "second", "logits", "loss"),
    )
)


HIDDEN_BY_FUSED_ATTENTION = ("scores", "weights")  # a fused kernel does not return them

RoundingErrors = Mapping[str, ErrorNorms]  # measured rounding errors by tensor; see `parity.comparison.amplification`
NO_ROUNDING_ERRORS: RoundingErrors = {}

CONSTANT_TABLES = ("positions", "cosines", "sines")  # a model may have them without a parameter, so without a gradient


@dataclass(frozen=True)
class Origin:
    """A part whose result is wrong although its input is right.

    name: name of the intermediate or of the gradient that is wrong.
    part: the part that computes it.
    error: relRMS of its result from the reference's input; infinite for the reasons below.
    twin: "jax" or "torch", the twin that is wrong; for a difference in precision, the less precise one.
    reason: "missing" if only one of the two passes has it, "shape" if it has another shape, "not finite" if `twin` computes
        NaN or infinities, "" for other results.
    dtype: the type in which the result is wrong.
    """

    name: str
    part: Part
    error: float
    twin: str
    reason: Literal["", "missing", "shape", "not finite"] = ""
    dtype: str = "float64"

    def facts(self) -> dict[str, Any]:
        """Return all values, for JSON."""
        return {
            "tensor": self.name,
            "part": self.part.facts(),
            "difference": self.error,
            "twin": self.twin,
            "reason": self.reason,
            "dtype": self.dtype,
        }


@dataclass(frozen=True)
class IsolationResult:
    """Result of testing every part in isolation.

    origins: parts that differ: in the forward pass, in the order of computation, and then in the backward pass.
    unjudged: names of tensors that are mostly rounding error in float64, so that a wrong formula could not be recognised ->
        their relative rounding error.
    largest_error: largest relRMS of all other tensors.
    """

    origins: tuple[Origin, ...]
    unjudged: dict[str, float]
    largest_error: float


def check_in_isolation(
    reference: PassResult, local: PassResult, twin: str, rounding: RoundingErrors = NO_ROUNDING_ERRORS
) -> IsolationResult:
    """Compare the result of every part in isolation with that of the reference, in float64.

    Args:
        reference: the pass that gave every part its inputs.
        local: the pass of `twin` that took its inputs from `reference`.
        twin: "jax" or "torch".
        rounding: measured rounding errors of each part in isolation; see `parity.comparison.amplification`.
    """
    names, found, unjudged, worst = list(reference.values), [], {}, 0.0
    # Only these intermediates get a gradient in every twin.
    with_gradient = [name for name in names if name.rpartition(".")[2] not in HIDDEN_BY_FUSED_ATTENTION]
    for name, error, scale in _compare_all(reference, local):
        relative, factor = error.relative_rms(scale), five_sigma_factor(error.entries)
        if not (relative <= FLOAT64_TOLERANCE or error.is_explained_by(rounding.get(name), factor)):
            order = with_gradient if name.startswith(GRADIENT_AT) else names
            found.append(Origin(name, Part.of(name, order), relative, twin, _reason(name, reference, local)))
        elif relative > FLOAT64_TOLERANCE and not factor * rounding[name].relative_rms(scale) <= MAX_TOLERANCE["float64"]:
            unjudged[name] = rounding[name].relative_rms(scale)
        else:
            worst = max(worst, relative)
    return IsolationResult(tuple(found), unjudged, worst)


def find_imprecise_parts(
    reference: PassResult, jax: PassResult, torch: PassResult, dtype: str, rounding: RoundingErrors = NO_ROUNDING_ERRORS
) -> tuple[list[Origin], dict[str, float]]:
    """Find the parts that one twin computes less precisely than the other, or less precisely than the type allows.

    The ratio of the two errors is not tested for gradients: these are sums that cancel, so an error may be small by chance.

    Args:
        reference: the pass in float64 that took the same rounded inputs in every part.
        jax, torch: the passes of both twins in `dtype`, with these inputs.
        dtype: the type of lower precision.
        rounding: measured errors of each part from rounding to `dtype`.

    Returns:
        The imprecise parts; and for the tensors whose rounding errors are too large to judge them, name -> relative error.
    """
    names, found, unjudged = list(reference.values), [], {}
    with_gradient = [name for name in names if name.rpartition(".")[2] not in HIDDEN_BY_FUSED_ATTENTION]
    torch_errors = {name: error for name, error, _ in _compare_all(reference, torch)}
    for name, jax_error, scale in _compare_all(reference, jax):
        torch_error = torch_errors.get(name)
        is_in_both = name.startswith((GRADIENT_OF, GRADIENT_AT)) or (name in jax.values and name in torch.values)
        if torch_error is None or not is_in_both:  # a fused kernel does not return its scores
            continue
        budget = ErrorBudget(dtype, rounding=rounding.get(name))
        accepts = budget.are_within_tolerance if name.startswith((GRADIENT_OF, GRADIENT_AT)) else budget.accepts
        if not accepts(jax_error, torch_error, scale=scale):
            is_jax = jax_error.norm > torch_error.norm
            twin, worse, run = ("jax", jax_error, jax) if is_jax else ("torch", torch_error, torch)
            order = with_gradient if name.startswith(GRADIENT_AT) else names
            relative, reason = worse.relative_rms(scale), _reason(name, reference, run)
            found.append(Origin(name, Part.of(name, order), relative, twin, reason, dtype))
        elif budget.is_amplified(scale) and not rounding[name].relative_rms(scale) <= MAX_TOLERANCE[dtype]:
            unjudged[name] = rounding[name].relative_rms(scale)
    return found, unjudged


def _reason(name: str, reference: PassResult, other: PassResult) -> Literal["", "missing", "not finite"]:
    """Return the reason of an `Origin` with this name."""
    found, expected = (_tensor(name, run) for run in (other, reference))
    if found is not None and not np.isfinite(found).all():
        return "not finite"
    return "missing" if found is None or expected is None else ""


def _tensor(name: str, run: PassResult) -> Array | None:
    """Return the tensor of a pass with a name of `_compare_all`, or None."""
    if name.startswith(GRADIENT_AT):
        return run.intermediate_gradients.get(name.removeprefix(GRADIENT_AT))
    if name.startswith(GRADIENT_OF):
        of = name.removeprefix(GRADIENT_OF)
        return run.gradients.get(of, run.intermediate_gradients.get(of))
    return run.values.get(name)


def _compare_all(reference: PassResult, other: PassResult) -> Iterator[tuple[str, ErrorNorms, float]]:
    """Yield name, error and scale of every intermediate, and then of every gradient; see `ErrorNorms.relative_rms`."""
    yield from ((name, error, 0.0) for name, error in compare_forward(reference, other))
    yield from compare_backward(reference, other)


def compare_forward(reference: PassResult, other: PassResult) -> Iterator[tuple[str, ErrorNorms]]:
    """Yield name and error of every intermediate, in the order of computation.

    The error of an intermediate that one of the two passes lacks is infinite.  An intermediate that the reference lacks
    comes before all others of its module.
    """
    extra_names = [name for name in other.values if name not in reference.values]
    for name, value in reference.values.items():
        for extra in [each for each in extra_names if name.startswith(each.rpartition(".")[0])]:
            extra_names.remove(extra)
            yield extra, ErrorNorms.infinite()
        yield name, ErrorNorms.of(other.values[name], value) if name in other.values else ErrorNorms.infinite()
    yield from ((name, ErrorNorms.infinite()) for name in extra_names)


def merge_names(first: Iterable[str], second: Iterable[str]) -> list[str]:
    """Return the names of the intermediates of two passes, each in the order of computation, in a common order.

    A name that only the second pass has comes directly before the next name of both.
    """
    names, end = list(first), None
    known = set(names)
    for name in reversed(list(second)):
        if name not in known:
            names.insert(len(names) if end is None else names.index(end), name)
        end = name
    return names


def compare_backward(reference: PassResult, other: PassResult) -> Iterator[tuple[str, ErrorNorms, float]]:
    """Yield name, error and scale of every gradient: of intermediates in backward order, of parameters, and of images."""
    for name in reversed(list(reference.values)):
        if name in other.intermediate_gradients and (
            name in reference.intermediate_gradients or name not in CONSTANT_TABLES
        ):
            expected = reference.intermediate_gradients.get(name, np.zeros(reference.values[name].shape))
            # Without a gradient in the reference, the intermediate itself is detached there.
            prefix = GRADIENT_AT if name in reference.intermediate_gradients else GRADIENT_OF
            yield f"{prefix}{name}", ErrorNorms.of(other.intermediate_gradients[name], expected), 0.0
    scales = module_scales(reference.gradients)
    for name, value in reference.gradients.items():
        error = ErrorNorms.of(other.gradients[name], value) if name in other.gradients else ErrorNorms.infinite()
        yield f"{GRADIENT_OF}{name}", error, scales[name]


def module_scales(tensors: Mapping[str, Any]) -> dict[str, float]:
    """Return the scale of the relative error of each parameter: the root-mean-square of all tensors of its module.

    Some gradients are zero except for rounding errors (the bias of keys cannot change a softmax), and the relative error of
    a tensor that is only rounding error means nothing.  Therefore the reference is taken to be at least this large.
    """
    sums: dict[str, ErrorNorms] = {}
    for name, value in tensors.items():
        sums[module_of(name)] = sums.get(module_of(name), ErrorNorms()).combined_with(ErrorNorms.of(value, value))
    return {name: (of := sums[module_of(name)]).reference_norm / math.sqrt(max(1, of.entries)) for name in tensors}


def module_of(name: str) -> str:
    """Return the module of a parameter, or of its gradient."""
    return name.rpartition(".")[0] or name


@dataclass(frozen=True)
class Bisection:
    """Result of a swap bisection.

    stage: the first wrong stage: "embed", "blocks.3", or "outputs" for all that follows the blocks.
    runs: name of the last stage that the suspect twin computed -> relRMS of the outputs.
    """

    stage: str
    runs: dict[str, float]

    def __str__(self) -> str:
        runs = ", ".join(f"{error:.1e} after {name}" for name, error in self.runs.items())
        return f"swap bisection: {self.stage} (outputs differ by {runs}, where the other twin takes over)"


def swap_bisection(
    reference: PassResult, suspect: PassResult, rest: TorchTwin, depth: int, tolerance: float = FLOAT64_TOLERANCE
) -> Bisection:
    """Find the first wrong stage of a twin in about log2(depth) runs.

    In each run the twin that may be wrong computes the first stages, and `rest` computes the others.

    Args:
        reference: the pass of `rest` alone.
        suspect: the pass of the twin that may be wrong.
        rest: the twin that computes the later stages.
        depth: number of blocks.
        tolerance: largest allowed relRMS of the logits.
    """
    stages = ["embed", *(f"blocks.{i}" for i in range(depth)), "outputs"]
    runs: dict[str, float] = {}
    low, high = -1, len(stages) - 1  # all stages up to `low` are right; among those up to `high` one is wrong
    while high - low > 1:
        middle = (low + high) // 2
        swapped = PassResult({stages[middle]: suspect.values[stages[middle]]})
        outputs = rest.run(backward=False, inputs_from=swapped).values["logits"]
        runs[stages[middle]] = ErrorNorms.of(outputs, reference.values["logits"]).relative_rms()
        if runs[stages[middle]] <= tolerance:
            low = middle
        else:
            high = middle
    return Bisection(stages[high], runs)
