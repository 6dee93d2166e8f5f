"""Comparison of intermediates and parameters, and the layer in which the difference probably arises."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from parity.checkpoints.arrays import FLOAT_DTYPES, round_to
from parity.checkpoints.layout import Array
from parity.comparison.diagnosis.chance import FEW_OUTPUTS, MAX_CHANCE, EffectDistribution
from parity.comparison.diagnosis.expected_outputs import Expected
from parity.comparison.diagnosis.hypothesis import Hypothesis, Rounding, Trial, build_model, model_inputs
from parity.comparison.localisation import merge_names
from parity.comparison.tolerances import FLOAT64_TOLERANCE, MAX_ERROR_RATIO, ErrorNorms
from vit_spec import rows

EARLY_INTERMEDIATES = ("tokens", "positions", "cosines", "sines", "columns", "rows")  # they depend on few weights or none
SIMILAR_SHARE = 0.9  # a layer that explains this part of what the likeliest explains is as likely
MIN_SHARE = 0.9  # of the squared difference that a layer must explain to be named from the logits alone
MIN_LIKELIEST_SHARE = 1 / 2  # to be named as the likeliest: below it, most of the squared difference has another cause


@dataclass(frozen=True)
class Suspect:
    """The layer in which the difference probably arises.

    is_measured: whether its output was compared with an expected intermediate; otherwise only logits were compared.
    value: relRMS of its output if measured, otherwise the share of the squared difference that a change of it explains.
    agrees: if measured, the last layer before it whose output agrees.
    is_by_chance: if not measured, whether the change of a wrong layer may explain as much by chance.
    independent_outputs: if not measured, how many independent outputs were compared.
    others: if not measured, other layers whose changes explain nearly as much.
    mismatch: if measured, how its name or shape differs from the other model's; "" if the values were compared.
    """

    name: str
    is_measured: bool
    value: float
    agrees: str = ""
    is_by_chance: bool = False
    independent_outputs: int = 0
    others: tuple[str, ...] = ()
    mismatch: str = ""

    def __str__(self) -> str:
        if self.is_measured:
            text = f"; {self.agrees} agrees" if self.agrees else ""
            difference = self.mismatch or f"by {self.value:.1e}"
            return f"the first layer that differs is {self.name}, {difference}{text}"
        if self.is_by_chance or self.value < MIN_SHARE:
            is_named = self.independent_outputs > FEW_OUTPUTS and self.value >= MIN_LIKELIEST_SHARE
            names = " and ".join((self.name, *self.others))
            would = "are {}, each of which would explain up to" if self.others else "is {}, which would explain"
            likeliest = f"; the likeliest {would.format(names)} {self.value:.0%} of the difference"
            return (
                f"the logits alone do not identify the layer{likeliest if is_named else ''}. "
                "To identify it, add intermediates such as blocks.0 (the output of the first block) to the expected outputs"
            )
        names = ", ".join((self.name, *self.others))
        output = "one of these outputs" if self.others else "this output"
        return (
            f"{names} or an earlier layer: a change of {output} alone would explain "
            f"{'up to ' if self.others else ''}{self.value:.0%} of the difference"
        )


def find_measured_suspect(
    trial: Trial, expected: Expected, tolerance: float, *, is_complete: bool = False
) -> Suspect | None:
    """Return the first layer whose intermediate differs, or None if no expected intermediate can be compared.

    is_complete: whether all intermediates of a model are expected, so that one of another name or shape differs.
    """
    if not expected.intermediates:
        return None
    values = intermediates(trial)
    logits_error = ErrorNorms.of(values.pop("logits"), expected.logits).relative_rms()
    compared = dict(_intermediate_errors(values, expected))
    names = merge_names(values, expected.intermediates) if is_complete else list(compared)
    if not names:
        return None
    errors = [(name, compared.get(name, math.inf)) for name in names]
    suspect = _first_above(errors, logits_error, tolerance, expected)
    if suspect.name in compared or suspect.name == "logits":
        return suspect
    return replace(suspect, mismatch=_describe_mismatch(values.get(suspect.name), expected.intermediates.get(suspect.name)))


def _describe_mismatch(value: Array | None, expected: Array | None) -> str:
    """Return how an intermediate that cannot be compared differs; None where a model lacks it."""
    if value is None:
        return "which is missing"
    return "which the other model lacks" if expected is None else f"which has shape {value.shape}, not {expected.shape}"


def find_likeliest_suspect(
    logits: Array,
    expected: Array,
    changed_outputs: Iterable[tuple[str, Array]],
    effects: EffectDistribution,
    models: int,
    independent_outputs: int,
) -> Suspect:
    """Return the layer whose change explains most of the difference of the logits.

    logits, expected: (B, outputs), the logits of the unchanged model, and the expected ones.
    changed_outputs: (layer, logits) of models with one layer changed.
    effects: the distribution of the effects of wrong causes on the logits.
    models: how many models were run.
    independent_outputs: how many of the logits are independent.
    """
    missing = (expected - logits).ravel()
    shares: dict[str, float] = {}
    for name, outputs in changed_outputs:
        if name and outputs.shape == logits.shape and np.isfinite(outputs).all():
            shares[name] = max(shares.get(name, 0.0), explained_share((outputs - logits).ravel(), missing))
    if not shares:
        return Suspect("logits", False, 0.0, is_by_chance=True)
    likeliest = max(shares, key=lambda name: shares[name])
    remaining = math.sqrt(max(0.0, 1 - shares[likeliest]))  # after a change of the fitted size
    is_by_chance = effects.chance(remaining, numbers=1, models=models) > MAX_CHANCE
    others = [name for name, share in shares.items() if share >= SIMILAR_SHARE * shares[likeliest] and name != likeliest]
    others.sort(key=lambda name: -shares[name])
    return Suspect(likeliest, False, shares[likeliest], "", is_by_chance, independent_outputs, tuple(others))


def first_differing_intermediate(trial: Trial, expected: Expected, tolerance: float) -> Suspect | None:
    """Return the first layer whose expected intermediate differs, or None if none differs or none can be compared.

    The images are run one after another, because the intermediates of many images take much memory.  If the expected
    outputs were computed in low precision, intermediates may differ by more than the logits.  Their rounding errors are
    measured on the first image.

    tolerance: the largest relRMS at which the logits match.
    """
    if not expected.intermediates:
        return None
    squares: dict[str, tuple[float, float]] = {}
    for index in range(len(expected)):
        image = replace(trial, images=trial.images[[index]])
        for name, norms in _intermediate_norms(intermediates(image), expected.select([index])):
            error, reference = squares.get(name, (0.0, 0.0))
            squares[name] = error + norms.norm**2, reference + norms.reference_norm**2
    errors = [(name, _ratio(math.sqrt(a), math.sqrt(b))) for name, (a, b) in squares.items()]
    suspect = _first_above(errors, 0.0, tolerance, expected) if errors else None
    if suspect is None or suspect.name == "logits":
        return None
    rounded = _rounding_errors(replace(trial, images=trial.images[:1]), expected.dtype)
    suspect = _first_above(
        [(name, error) for name, error in errors if error > MAX_ERROR_RATIO * rounded.get(name, 0.0)],
        0.0,
        tolerance,
        expected,
    )
    return None if suspect.name == "logits" else suspect


def _ratio(error: float, reference: float) -> float:
    return error / reference if reference else math.inf if error else 0.0


def _rounding_errors(trial: Trial, dtype: str) -> dict[str, float]:
    """Return the relRMS, by name, between intermediates that are computed in a dtype and those of the trial."""
    if dtype == "float64":
        return {}
    # A patch, here one that changes nothing, makes the model compute attention explicitly.
    # In half precision, a model usually rounds activations only.
    rounding = Rounding(dtype, weights=dtype == "float32")
    explicit = replace(trial, patches=(*trial.patches, lambda model: None), rounding=rounding)
    exact, rounded = intermediates(trial), intermediates(explicit)
    return {name: ErrorNorms.of(rounded[name], exact[name]).relative_rms() for name in exact if name in rounded}


def first_differing_layer(trial: Trial, expected: Expected, tolerance: float) -> str:
    """Return the first layer whose intermediate differs, or "" if no expected intermediate can be compared."""
    suspect = find_measured_suspect(trial, expected, tolerance)
    return suspect.name if suspect else ""


def _first_above(errors: list[tuple[str, float]], logits_error: float, tolerance: float, expected: Expected) -> Suspect:
    """Return the first layer whose error exceeds the tolerance, or the logits if none does.

    errors: (name, relRMS) in the order of computation.
    tolerance: the largest relRMS at which the logits match.
    expected: the expected outputs, whose intermediates may have larger tolerances.
    """
    agrees = ""
    for name, error in [*errors, ("logits", logits_error)]:
        if not (error <= tolerance or (name in expected.intermediates and error <= expected.tolerance_of(name))):
            return Suspect(name, True, error, agrees)
        agrees = name
    return Suspect("logits", True, logits_error, agrees)


def _intermediate_errors(values: Mapping[str, Array], expected: Expected) -> Iterator[tuple[str, float]]:
    """Yield (name, relRMS) of each intermediate that is expected too, in the order of computation."""
    for name, norms in _intermediate_norms(values, expected):
        yield name, norms.relative_rms()


def _intermediate_norms(values: Mapping[str, Array], expected: Expected) -> Iterator[tuple[str, ErrorNorms]]:
    """Yield (name, error) of each intermediate that is expected too, in the order of computation."""
    for name, value in values.items():
        if (
            name in expected.intermediates
            and (reference := match_layout(expected.intermediates[name], value.shape)) is not None
        ):
            yield name, ErrorNorms.of(value, reference)


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
    errors = list(_intermediate_errors(intermediates(trial), expected))
    return not errors or _first_above(errors, 0.0, tolerance, expected).name == "logits"


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
