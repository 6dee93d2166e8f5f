"""Comparison of intermediates and parameters, and the layer in which the difference probably arises."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from parity.checkpoints.layout import Array
from parity.checkpoints.weights import FLOAT_DTYPES, round_to
from parity.comparison.diagnosis.expected_outputs import Expected
from parity.comparison.diagnosis.hypothesis import Hypothesis, Trial, build_model, model_inputs
from parity.comparison.tolerances import FLOAT64_TOLERANCE, ErrorNorms
from vit_spec import rows

EARLY_INTERMEDIATES = ("tokens", "positions", "cosines", "sines")  # they depend on few weights or none
MIN_SHARE = 0.9  # of the squared difference that a layer must explain to be named from the logits alone


@dataclass(frozen=True)
class Suspect:
    """The layer in which the difference probably arises.

    is_measured: whether its output was compared with an expected intermediate; otherwise only logits were compared.
    value: relRMS of its output if measured, otherwise the share of the squared difference that a change of it explains.
    agrees: if measured, the last layer before it whose output agrees.
    """

    name: str
    is_measured: bool
    value: float
    agrees: str = ""

    def __str__(self) -> str:
        if self.is_measured:
            text = f"; {self.agrees} agrees" if self.agrees else ""
            return f"the first layer that differs is {self.name}, by {self.value:.1e}{text}"
        if self.value < MIN_SHARE:
            return (
                f"the logits alone do not identify the layer; the likeliest is {self.name}, which would explain "
                f"{self.value:.0%} of the difference. To identify it, add intermediates such as blocks.0 (the output of "
                "the first block) to the expected outputs"
            )
        return f"{self.name}: a change of its output alone would explain {self.value:.0%} of the difference"


def find_suspect(
    trial: Trial, expected: Expected, tolerance: float, changed_outputs: Iterable[tuple[str, Array]]
) -> Suspect:
    """Return the first layer whose intermediate differs, or the likeliest layer if only logits are expected.

    changed_outputs: (layer, logits) of models with one layer changed.
    """
    values = intermediates(trial)
    logits = values["logits"]
    if errors := list(_intermediate_errors(values, expected)):
        return _first_above(errors, ErrorNorms.of(logits, expected.logits).relative_rms(), tolerance)
    missing = (expected.logits - logits).ravel()
    shares: dict[str, float] = {}
    for name, outputs in changed_outputs:
        if name and outputs.shape == logits.shape and np.isfinite(outputs).all():
            shares[name] = max(shares.get(name, 0.0), explained_share((outputs - logits).ravel(), missing))
    if not shares:
        return Suspect("logits", False, 0.0)
    likeliest = max(shares, key=lambda name: shares[name])
    return Suspect(likeliest, False, shares[likeliest])


def first_differing_layer(trial: Trial, expected: Expected, tolerance: float) -> str:
    """Return the first layer whose intermediate differs, or "" if no expected intermediate can be compared."""
    if not expected.intermediates:
        return ""
    values = intermediates(trial)
    errors = list(_intermediate_errors(values, expected))
    return (
        _first_above(errors, ErrorNorms.of(values["logits"], expected.logits).relative_rms(), tolerance).name
        if errors
        else ""
    )


def _first_above(errors: list[tuple[str, float]], logits_error: float, tolerance: float) -> Suspect:
    """Return the first layer whose error exceeds the tolerance, or the logits if none does.

    errors: (name, relRMS) in the order of computation.
    """
    agrees = ""
    for name, error in [*errors, ("logits", logits_error)]:
        if not error <= tolerance:
            return Suspect(name, True, error, agrees)
        agrees = name
    return Suspect("logits", True, logits_error, errors[-1][0])


def _intermediate_errors(values: Mapping[str, Array], expected: Expected) -> Iterator[tuple[str, float]]:
    """Yield (name, relRMS) of each intermediate that is expected too, in the order of computation."""
    for name, value in values.items():
        if (
            name in expected.intermediates
            and (reference := match_layout(expected.intermediates[name], value.shape)) is not None
        ):
            yield name, ErrorNorms.of(value, reference).relative_rms()


def match_layout(array: Array, shape: tuple[int, ...]) -> Array | None:
    """Return an expected intermediate in the shape of the twins, or None if it does not fit.

    The heads may be merged or split, and their axis may come before or after the axis of tokens.
    """
    if array.shape == shape:
        return array
    if array.ndim == len(shape) == 4 and array.swapaxes(1, 2).shape == shape:
        return array.swapaxes(1, 2)
    merged = array.size == math.prod(shape) and array.shape[:2] == shape[:2]
    return array.reshape(shape) if merged else None


def matches_intermediates(trial: Trial, expected: Expected, tolerance: float) -> bool:
    """Return whether every expected intermediate that can be compared is within the tolerance."""
    return all(error <= tolerance for _, error in _intermediate_errors(intermediates(trial), expected))


def has_exact_intermediates(trial: Trial, expected: Expected) -> bool:
    """Return whether an intermediate agrees with the expected one to the last digits of float64.

    The expected outputs then come from exactly these weights and were computed in float64, at least up to this layer.
    """
    errors = [
        error for name, error in _intermediate_errors(intermediates(trial), expected) if name not in EARLY_INTERMEDIATES
    ]
    return any(error <= FLOAT64_TOLERANCE for error in errors)


def intermediates(trial: Trial) -> dict[str, Array]:
    """Return every named intermediate of a trial, and its logits, as float64."""
    import torch

    import vit_torch

    model = build_model(trial)
    with torch.inference_mode():
        logits, values = vit_torch.intermediates(model, model_inputs(trial, model))
    return {name: tensor.double().numpy() for name, tensor in {**values, "logits": logits}.items()}


def explained_share(effect: Array, missing: Array) -> float:
    """Return the share of a squared difference that an effect explains: the squared cosine, or 0 if it is undefined."""
    magnitudes = [float(np.abs(each).max(initial=0.0)) for each in (effect, missing)]
    if not all(0 < size < math.inf for size in magnitudes):
        return 0.0
    a, b = effect / magnitudes[0], missing / magnitudes[1]  # so that fourth powers do not overflow
    return float(a @ b) ** 2 / (float(a @ a) * float(b @ b))


def uncompared_intermediates(trial: Trial, expected: Expected) -> list[str]:
    """Return the names of expected intermediates that a model lacks or has in another shape."""
    if not expected.intermediates:
        return []
    compared = {name for name, _ in _intermediate_errors(intermediates(trial), expected)}
    return [name for name in expected.intermediates if name not in compared]


def parameter_differences(trial: Trial, other: Trial, hypotheses: list[Hypothesis]) -> Iterator[str]:
    """Yield a line for each parameter that differs between two models; neither model is run.

    hypotheses: causes whose edits may explain a difference.
    """
    declared, theirs = rows(trial.config), rows(other.config)
    for name in theirs:
        if name not in declared:
            yield f"{name} is missing"
    for name, row in declared.items():
        if name not in theirs or theirs[name].shape != row.shape:
            what = "is not in the other model" if name not in theirs else f"has shape {row.shape}, not {theirs[name].shape}"
            yield f"{name} {what}"
        elif not np.array_equal(trial.weights[name], other.weights[name]):
            yield f"{name} {_describe_difference(name, trial, other, hypotheses)}"


def _describe_difference(name: str, trial: Trial, other: Trial, hypotheses: list[Hypothesis]) -> str:
    mine, theirs = trial.weights[name], other.weights[name]
    for hypothesis in hypotheses:
        for edit in hypothesis.edits:
            if edit.parameter == name and np.array_equal(edit.evaluate(trial.weights), theirs):
                return f"equals the other checkpoint's if {hypothesis.name}"
    for dtype in ("bfloat16", "float16"):
        for a, b, relation in (
            (mine, theirs, "equals the other checkpoint's rounded to"),
            (theirs, mine, "would equal the other checkpoint's if it were rounded to"),
        ):
            if np.array_equal(_round_through(b, dtype), a):
                return f"{relation} {dtype}"
    return f"differs by {ErrorNorms.of(mine, theirs).relative_rms():.1e}"


def _round_through(array: Array, dtype: str) -> Array:
    return round_to(array, FLOAT_DTYPES[dtype]).astype(array.dtype)
