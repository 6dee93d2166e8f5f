"""Where to look when no cause is found, or before one is sought: the first layer that is under suspicion."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from parity.checkpoints.layout import Array
from parity.checkpoints.weights import FLOATS, rounded
from parity.comparison.diagnosis.expectations import Expected
from parity.comparison.diagnosis.trial import Hypothesis, Trial, model_of, shown
from parity.comparison.tolerances import FUNCTION, Error
from vit_spec import rows

CONSTANT = ("tokens", "positions", "cosines", "sines")  # intermediates that hardly depend on the weights
CLEAR = 0.9  # share of the squared difference that the logits alone must show for a layer, to name it without reserve


@dataclass(frozen=True)
class Suspect:
    """A layer, and what speaks against it.

    seen: whether its own output was compared; otherwise changes of it would explain most of the difference of the logits.
    value: relRMS of its output where that was seen, otherwise the share of the squared difference that is explained.
    after: the last layer that agrees ahead of it, where outputs were compared.
    """

    name: str
    seen: bool
    value: float
    after: str = ""

    def __str__(self) -> str:
        if self.seen:
            agrees = f"; {self.after} agrees" if self.after else ""
            return f"the first layer that differs is {self.name}, by {self.value:.1e}{agrees}"
        if self.value < CLEAR:
            return (
                f"the logits alone do not tell the layer; likeliest is {self.name}, a change of which would explain "
                f"{self.value:.0%} of the difference. Add intermediates to the expected outputs, such as blocks.0 (the "
                "output of the first block), and the first that differs is named"
            )
        return f"{self.name}: a change of its output alone would explain {self.value:.0%} of the difference"


def suspect(trial: Trial, expected: Expected, bar: float, places: Iterable[tuple[str, Array]]) -> Suspect:
    """Return the first layer whose output is not as expected, or by the logits alone the likeliest.

    places: layers, and what the logits are when something is changed there.
    """
    found = intermediates(trial)
    logits = found["logits"]
    if errors := list(_errors(found, expected)):
        return _first(errors, Error.of(logits, expected.logits).relative_rms(), bar)
    missing = (expected.logits - logits).ravel()
    shares: dict[str, float] = {}
    for name, outputs in places:
        if name and outputs.shape == logits.shape and np.isfinite(outputs).all():
            shares[name] = max(shares.get(name, 0.0), share((outputs - logits).ravel(), missing))
    if not shares:
        return Suspect("logits", False, 0.0)
    likeliest = max(shares, key=lambda each: shares[each])
    return Suspect(likeliest, False, shares[likeliest])


def first_that_differs(trial: Trial, expected: Expected, bar: float) -> str:
    """Return the first layer whose output is not as expected; nothing where no expected intermediate tells it."""
    if not expected.intermediates:
        return ""
    found = intermediates(trial)
    errors = list(_errors(found, expected))
    return _first(errors, Error.of(found["logits"], expected.logits).relative_rms(), bar).name if errors else ""


def _first(errors: list[tuple[str, float]], of_logits: float, bar: float) -> Suspect:
    after = ""
    for name, error in [*errors, ("logits", of_logits)]:
        if not error <= bar:
            return Suspect(name, True, error, after)
        after = name
    return Suspect("logits", True, of_logits, errors[-1][0])


def _errors(found: Mapping[str, Array], expected: Expected) -> Iterator[tuple[str, float]]:
    """Yield how far each intermediate is from the expected one, in the order of computation, where both are there."""
    for name, value in found.items():
        if name in expected.intermediates and (theirs := aligned(expected.intermediates[name], value.shape)) is not None:
            yield name, Error.of(value, theirs).relative_rms()


def aligned(array: Array, shape: tuple[int, ...]) -> Array | None:
    """Return an intermediate in the twins' shape: with heads merged or split, ahead of the tokens or after them."""
    if array.shape == shape:
        return array
    if array.ndim == len(shape) == 4 and array.swapaxes(1, 2).shape == shape:
        return array.swapaxes(1, 2)
    merged = array.size == math.prod(shape) and array.shape[:2] == shape[:2]
    return array.reshape(shape) if merged else None


def consistent(trial: Trial, expected: Expected, bar: float) -> bool:
    """Whether a model gives the expected intermediates, as far as it has them."""
    return all(error <= bar for _, error in _errors(intermediates(trial), expected))


def is_exact(trial: Trial, expected: Expected) -> bool:
    """Whether a model's intermediates agree with some of the expected ones to the last digits of float64.

    The expected outputs then come from the very weights, and were computed in float64, at least up to there.
    """
    of_weights = [error for name, error in _errors(intermediates(trial), expected) if name not in CONSTANT]
    return any(error <= FUNCTION for error in of_weights)


def intermediates(trial: Trial) -> dict[str, Array]:
    """Return every named intermediate of a trial, and the logits, float64."""
    import torch

    import vit_torch

    model = model_of(trial)
    with torch.inference_mode():
        logits, found = vit_torch.intermediates(model, shown(trial, model))
    return {name: tensor.double().numpy() for name, tensor in {**found, "logits": logits}.items()}


def share(effect: Array, missing: Array) -> float:
    """The share of a squared difference that an effect explains: the squared cosine, 0 where it is no number."""
    sizes = [float(np.abs(each).max(initial=0.0)) for each in (effect, missing)]
    if not all(0 < size < math.inf for size in sizes):
        return 0.0
    a, b = effect / sizes[0], missing / sizes[1]  # whose fourth powers are numbers, however large the outputs are
    return float(a @ b) ** 2 / (float(a @ a) * float(b @ b))


def unfitting(trial: Trial, expected: Expected) -> list[str]:
    """Return the expected intermediates that a model does not have, or has in another shape."""
    if not expected.intermediates:
        return []
    fitting = {name for name, _ in _errors(intermediates(trial), expected)}
    return [name for name in expected.intermediates if name not in fitting]


def evidence(trial: Trial, other: Trial, hypotheses: list[Hypothesis]) -> Iterator[str]:
    """Yield, for each parameter that differs from another model's, how it does: a line that needs no outputs."""
    declared, theirs = rows(trial.config), rows(other.config)
    for name in theirs:
        if name not in declared:
            yield f"{name} is missing"
    for name, row in declared.items():
        if name not in theirs or theirs[name].shape != row.shape:
            what = "is not in the other model" if name not in theirs else f"has shape {row.shape}, not {theirs[name].shape}"
            yield f"{name} {what}"
        elif not np.array_equal(trial.weights[name], other.weights[name]):
            yield f"{name} {_explained(name, trial, other, hypotheses)}"


def _explained(name: str, trial: Trial, other: Trial, hypotheses: list[Hypothesis]) -> str:
    mine, theirs = trial.weights[name], other.weights[name]
    for hypothesis in hypotheses:
        for edit in hypothesis.edits:
            if edit.parameter == name and np.array_equal(edit.of(trial.weights), theirs):
                return f"is the other's where {hypothesis.name}"
    for kind in ("bfloat16", "float16"):
        for a, b, what in ((mine, theirs, "the other's, rounded to"), (theirs, mine, "what the other rounds to")):
            if np.array_equal(_through(b, kind), a):
                return f"is {what} {kind}"
    return f"differs by {Error.of(mine, theirs).relative_rms():.1e}"


def _through(array: Array, kind: str) -> Array:
    return rounded(array, FLOATS[kind]).astype(array.dtype)
