"""Diagnose a checkpoint, given expected outputs (`diagnose`) or a correct checkpoint (`diagnose_against`)."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from parity.checkpoints.containers.header_checks import quote_names
from parity.checkpoints.conversion import parameter
from parity.checkpoints.layout import Array
from parity.checkpoints.surgery.edit import to_float64
from parity.checkpoints.weights import Checkpoint
from parity.comparison.diagnosis.catalogue import catalogue
from parity.comparison.diagnosis.evaluator import Result
from parity.comparison.diagnosis.expected_outputs import Expected
from parity.comparison.diagnosis.hypothesis import Hypothesis, Runner, Trial
from parity.comparison.diagnosis.output_precision import half_precision_dtype, narrowest_dtype
from parity.comparison.diagnosis.remedy import CommandLineSource, remedy
from parity.comparison.diagnosis.report import Cause, Diagnosis
from parity.comparison.diagnosis.search import MAX_REMAINING_COARSE, CauseSearch, SearchResult
from parity.comparison.diagnosis.suspects import (
    Suspect,
    first_differing_intermediate,
    intermediates,
    parameter_differences,
    uncompared_intermediates,
)
from parity.comparison.forward_backward import noise_images
from parity.comparison.progress import CountProgress
from parity.comparison.tolerances import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, MAX_ERROR_RATIO, ErrorNorms
from vit_spec import InputError, ViTConfig, count, rows
from vit_spec.config import FIELDS
from vit_spec.missing_packages import require_packages

# Models with more parameters are run in float32, others in float64, which takes twice as long.  ViT-B has 87 million.
MAX_FLOAT64_PARAMETERS = 100_000_000
NOISE_IMAGES = 4  # number of images that `diagnose_against` compares
MAX_IMAGES = 8  # indices of images that a remark lists

_LARGE_MODELS = f"models of more than {MAX_FLOAT64_PARAMETERS // 1_000_000} million parameters"


def diagnose(
    checkpoint: Checkpoint,
    expected: Expected,
    *,
    source: CommandLineSource | None = None,
    progress: CountProgress | None = None,
    pairs: int | None = None,
) -> Diagnosis:
    """Find the cause, or the two causes, that make the outputs of a checkpoint differ from the expected ones.

    Args:
        checkpoint: the checkpoint to diagnose; its model runs in float64, or in float32 if it has more than 100 million
            parameters.
        expected: from `read_expected_outputs` or `expected_outputs`.
        source: the checkpoint as the printed commands should name it.
        progress: called with a description, the number of models done and the total.
        pairs: how many pairs of causes to try, the likeliest first; the default depends on the cost of a forward pass.

    Returns:
        The causes that match, each with its fix, or the nearest ones; `str` gives the report.

    Raises:
        vit_spec.InputError: the outputs have another shape than the model's, the model gives NaN or infinities, `pairs` is
            negative, or PyTorch is not installed.
    """
    require_packages("diagnose runs the PyTorch twin", "torch")
    return _diagnose(
        checkpoint, _make_trial(checkpoint, expected), expected, source or CommandLineSource(), progress, pairs
    )


def diagnose_against(
    checkpoint: Checkpoint,
    other: Checkpoint,
    *,
    seed: int = 0,
    source: CommandLineSource | None = None,
    progress: CountProgress | None = None,
    pairs: int | None = None,
) -> Diagnosis:
    """Find out why a checkpoint does not compute the same function as another one that is correct.

    The other model computes the expected outputs and intermediates, for images of Gaussian noise.  The parameters are also
    compared one by one.

    Args:
        checkpoint: the checkpoint to diagnose.
        other: the correct checkpoint.
        seed: the seed of the noise images.
        source, progress, pairs: as in `diagnose`.

    Raises:
        vit_spec.InputError: the models differ in the shape of images or outputs, or as in `diagnose`.
    """
    require_packages("diagnose runs the PyTorch twin", "torch")
    a, b = checkpoint.config, other.config
    if a.in_channels != b.in_channels:
        raise InputError(
            f"the images of one model have {a.in_channels} channels, those of the other {b.in_channels}: "
            "give two models with the same number of channels"
        )
    a.grid_of(*b.image_size)  # raises InputError if these images do not fit the model
    images = noise_images(b, seed, NOISE_IMAGES).transpose(0, 3, 1, 2).astype(np.float64)
    images_only = Expected(images, True, np.zeros((NOISE_IMAGES, 1)), "float64")
    other_trial = replace(_make_trial(other, images_only), normalized_by=b.pixels)
    references = intermediates(other_trial)
    logits = references.pop("logits")
    dtype = "float64" if other_trial.weights["patch_embed.proj.weight"].dtype == np.float64 else narrowest_dtype(logits)
    expected = Expected(images, True, logits, dtype, references)
    trial = replace(_make_trial(checkpoint, expected), normalized_by=a.pixels)
    fields = tuple(f"{n} is {a.at(n)!r}, and {b.at(n)!r} in the other checkpoint" for n in FIELDS if a.at(n) != b.at(n))
    lines = (*fields, *parameter_differences(trial, other_trial, catalogue(trial)))
    # Models whose intermediates differ, for example by the order of heads, may compute the same function.
    result = _diagnose(
        checkpoint, trial, expected, source or CommandLineSource(), progress, pairs, must_intermediates_match=False
    )
    if lines and dtype == "float32" and result.passed and not result.matched:
        result = replace(
            result,
            possible_rounding=f"rounding to float32, in which {_LARGE_MODELS} are run,",
            decided_by="`python -m parity check` with `--against`, in float64,",
        )
    return replace(result, evidence=lines)


def _make_trial(checkpoint: Checkpoint, expected: Expected) -> Trial:
    """Return the unchanged model of a checkpoint, with the expected images."""
    config = checkpoint.config
    dtype = np.float32 if count(config) > MAX_FLOAT64_PARAMETERS else np.float64
    weights = {name: to_float64(parameter(checkpoint, name)).astype(dtype, copy=False) for name in rows(config)}
    return Trial(config, weights, expected.images, config.pixels if expected.is_normalized else None)


def _diagnose(
    checkpoint: Checkpoint,
    trial: Trial,
    expected: Expected,
    source: CommandLineSource,
    progress: CountProgress | None,
    pairs: int | None,
    *,
    must_intermediates_match: bool = True,
) -> Diagnosis:
    outputs = Runner().run(replace(trial, images=trial.images[:1]))
    shape = outputs.shape[1:]
    if not np.isfinite(outputs).all():
        raise InputError(
            "the model of this checkpoint gives NaN or infinite outputs: see `python -m parity inspect --values`"
        )
    if shape != expected.logits.shape[1:]:
        raise InputError(
            f"the expected outputs have shape {expected.logits.shape}, but the model gives {(len(expected), *shape)}: "
            "give outputs of this model"
        )
    if pairs is not None and pairs < 0:
        raise InputError(f"pairs is {pairs}: give a number from 0")
    search = CauseSearch(trial, expected, progress, pairs)
    result = search.run()
    is_wrong = result.baseline.error > result.tolerance
    is_compared = must_intermediates_match and not is_wrong
    differing = str(first_differing_intermediate(trial, expected, result.tolerance) or "") if is_compared else ""
    matches, others, disagreement = result.matches, result.others, ""
    if must_intermediates_match and is_wrong and matches and (left := _remaining_disagreement(trial, expected, result)):
        suspect, is_repaired = left
        disagreement = str(suspect)
        if not is_repaired:
            matches, others = (), (*matches, *others)
    matched = () if differing else tuple(_make_cause(match, checkpoint, source, is_match=True) for match in matches)
    layer = differing
    if is_wrong and (expected.intermediates or not matched):
        layer = search.suspect(result.tolerance, is_complete=not must_intermediates_match)
    hints = _hints(trial, expected, result) if is_wrong and not matched else ()
    if differing:
        hints = ("this difference does not change the outputs, or the intermediate is from another point of the model",)
    return Diagnosis(
        matched=matched,
        before=result.baseline.error,
        tolerance=result.tolerance,
        dtype=expected.dtype,
        outputs=expected.logits.size,
        tried=result.tried,
        pairs=result.pairs,
        runners_up=tuple(_make_cause(other, checkpoint, source, is_match=False) for other in others),
        apart=_how_to_distinguish(result) if len(matched) > 1 else "",
        suspect=layer,
        disagreement=disagreement,
        caveat=_caveat(trial, expected, result),
        precision=_describe_precision(expected, result),
        remarks=(*expected.remarks, *_uncompared(search), *_second_fault(result), *hints),
        discarded=result.discarded,
        possible_rounding=_possible_rounding(expected, result),
    )


def _remaining_disagreement(trial: Trial, expected: Expected, result: SearchResult) -> tuple[Suspect, bool] | None:
    """Return the first layer whose expected intermediate contradicts the first match, or None if none does.

    Also return whether the match repairs the first layer that differs without it: only then may it be one of two causes.
    """
    match = result.matches[0]
    if not expected.intermediates or any(cause.is_rounding for cause in match.causes):  # rounding cannot be reproduced
        return None
    tolerance = max(result.tolerance, MAX_ERROR_RATIO * match.error)
    after = first_differing_intermediate(match.trial, expected, tolerance)
    if after is None:
        return None
    before = first_differing_intermediate(trial, expected, tolerance)
    if before is None:
        return after, False
    order = list(intermediates(replace(trial, images=trial.images[:1])))
    if after.name == before.name:
        return after, after.value <= before.value * MAX_REMAINING_COARSE
    return after, order.index(after.name) > order.index(before.name)


def _caveat(trial: Trial, expected: Expected, result: SearchResult) -> str:
    """Return why the images may mislead: they have no detail, or may not be the pixels that they are taken for."""
    if untested := _untested_orders(expected.images, trial.config):
        return (
            f"these images have no detail to show faults in {' or '.join(untested)}, or to tell causes in the first layers "
            "apart: give other images"
        )
    causes = [cause for match in result.matches for cause in match.causes]
    unnormalized = {"pixels.mean": (0.0,), "pixels.std": (1.0,)}
    if expected.is_range_assumed and any(cause.fields == unnormalized for cause in causes):
        return (
            "the images were taken for pixels because all are in [0, 1]: if the model was given them as they are, this is "
            "no fault; to test the normalization too, save the pixels before it"
        )
    return ""


def _untested_orders(images: Array, c: ViTConfig) -> list[str]:
    """Return the orders and values that these images, (B, C, H, W), cannot test."""
    b, channels, height, width = images.shape
    ph, pw = c.patch_size
    whole = images[:, :, : height // ph * ph, : width // pw * pw]  # a model may pad the rest
    patches = whole.reshape(b, channels, height // ph, ph, width // pw, pw)
    patches = patches.transpose(0, 1, 2, 4, 3, 5).reshape(b, channels, -1, ph * pw)
    if not patches.shape[2]:
        return []
    is_uniform, is_repeated = (bool((patches == patches.take([0], axis)).all()) for axis in (3, 2))
    untested = ["the pixels of a patch"] if is_uniform and patches.shape[3] > 1 else []
    return [*untested, *(["the order of patches"] if is_repeated and patches.shape[2] > 1 else [])]


def _uncompared(search: CauseSearch) -> Iterator[str]:
    """Yield a remark that lists the expected intermediates that the model lacks, if there are any."""
    if names := uncompared_intermediates(search.trial, search.subset):
        yield f"{quote_names(names)}: ignored, because this model has no intermediate of that name and shape"


def _second_fault(result: SearchResult) -> Iterator[str]:
    """Yield a remark if the first match leaves more than rounding errors."""
    if not result.matches or result.rounding or all(cause.is_rounding for cause in result.matches[0].causes):
        return
    remaining, explained = result.matches[0].error, result.rounding_tolerance
    if remaining > explained:
        yield (
            f"the cause leaves a difference of {remaining:.1e}, but rounding errors of this model explain only "
            f"{explained:.1e}: there may be a second, smaller fault"
        )


def _possible_rounding(expected: Expected, result: SearchResult) -> str:
    """Describe the rounding that may cause the remaining difference; return "" if the difference is negligible."""
    if result.rounding:
        return result.rounding.what
    limit = min(FLOAT32_TOLERANCE, result.rounding_tolerance)
    return f"the rounding to {expected.dtype_text}" if result.baseline.error > limit else ""


def _describe_precision(expected: Expected, result: SearchResult) -> str:
    """Describe the precision of the expected outputs and the tolerance that follows from it."""
    text = f"the expected outputs are {expected.dtype_text}"
    if not result.rounding and result.tolerance < expected.tolerance:
        return f"{text}; tolerance {result.tolerance:.0e}, from the rounding errors of this model, which the cause leaves"
    if not result.rounding:
        return f"{text}; tolerance {result.tolerance:.0e}"
    remaining = result.matches[0].error if result.matches else result.baseline.error
    estimate = f"{result.rounding.what} causes about {result.rounding.error:.1e}"
    return f"{text}; the remaining difference of {remaining:.1e} is within what rounding may cause: {estimate}"


def _make_cause(result: Result, checkpoint: Checkpoint, source: CommandLineSource, *, is_match: bool) -> Cause:
    causes: tuple[Hypothesis, ...] = result.causes
    names, families = tuple(cause.name for cause in causes), tuple(cause.family for cause in causes)
    if is_match:
        names = tuple(f"{cause.name} ({cause.interval})" if cause.interval else cause.name for cause in causes)
    return Cause(names, families, result.error, remedy(causes, checkpoint, source))


def _how_to_distinguish(result: SearchResult) -> str:
    """Return a sentence that says whether other images would distinguish the matches.

    They are run on images of noise, in float64 also if the search was in float32, which absorbs a small epsilon.
    """
    runner, outputs, base = Runner(), [], result.baseline.trial
    images = np.random.default_rng(0).standard_normal(base.images[:2].shape)
    weights = {name: array.astype(np.float64, copy=False) for name, array in base.weights.items()}
    for match in result.matches:
        trial: Trial | None = replace(base, images=images, weights=weights)
        for cause in match.causes:
            trial = cause.apply(trial) if trial is not None else None
        if trial is not None:
            outputs.append(runner.run(trial))
    largest = max(ErrorNorms.of(output, outputs[0]).relative_rms() for output in outputs)
    differ = f"on images of noise their outputs differ by {largest:.1e}"
    if not math.isfinite(largest) or largest > result.tolerance:
        return f"other images would tell these causes apart: {differ}"
    if largest <= FLOAT64_TOLERANCE:
        return "no image of this size tells these causes apart: with these weights they are the same function"
    if base.weights["patch_embed.proj.weight"].dtype == np.float32:
        return f"{differ}, less than the tolerance, which is that of float32, in which {_LARGE_MODELS} are run"
    return f"{differ}, less than the tolerance: expected outputs in float64 would tell these causes apart"


def _hints(trial: Trial, expected: Expected, result: SearchResult) -> tuple[str, ...]:
    """Return remarks on what may explain a difference that no known cause explains."""
    hints = []
    if different := _images_that_differ(expected, result):
        numbers = ", ".join(map(str, different[:MAX_IMAGES])) + (", ..." if different[MAX_IMAGES:] else "")
        hints.append(
            f"only the outputs of {len(different)} of {len(expected)} images differ (counted from 0: {numbers}): they may "
            "come from other images, or from images that were preprocessed differently"
        )
    if order := _order_of_images(expected, result):
        hints.append(f"the outputs are those of the images in the order {', '.join(map(str, order))} (counted from 0)")
    if equal := _equal_images_that_differ(expected):
        pair = f"images {equal[0]} and {equal[1]} are equal but their outputs differ"
        hints.append(f"{pair}: dropout was left on, or the outputs are of other images")
    dtype = half_precision_dtype(trial.weights.values())
    if dtype:
        hints.append(f"all weights are {dtype} numbers: the expected outputs may come from weights of higher precision")
    return tuple(hints)


def _images_that_differ(expected: Expected, result: SearchResult) -> list[int]:
    """Return the indices of the images whose outputs differ by more than the tolerance, and far more than all others do.

    Return [] if there are no others, or if the tolerance happens to lie among errors of similar size.
    """
    differences = (result.baseline.outputs - expected.logits).reshape(len(expected), -1)
    limit = result.tolerance * float(np.linalg.norm(expected.logits)) / math.sqrt(len(expected))
    norms = np.linalg.norm(differences, axis=1)
    different, others = np.flatnonzero(norms > limit), norms[norms <= limit]
    is_apart = others.size and norms[different].min(initial=math.inf) > MAX_ERROR_RATIO * others.max()
    return [int(index) for index in different] if is_apart else []


def _order_of_images(expected: Expected, result: SearchResult) -> list[int]:
    """Return for each image the index of the one whose outputs are expected for it, or [] if outputs match none or its own.

    Outputs of a shuffled batch, or of files in another order, are right ones of other images.
    """
    outputs, logits = (array.reshape(len(expected), -1) for array in (result.baseline.outputs, expected.logits))
    distances = np.linalg.norm(logits[:, None] - outputs, axis=2)
    order, limit = distances.argmin(1), result.tolerance * np.linalg.norm(logits, axis=1)
    is_own = bool((distances.diagonal() <= limit).all())
    return [] if is_own or (distances.min(1) > limit).any() else [int(index) for index in order]


def _equal_images_that_differ(expected: Expected) -> tuple[int, int] | None:
    """Return the indices of two equal images whose outputs differ by more than the tolerance."""
    first: dict[bytes, int] = {}
    for n, image in enumerate(expected.images):
        m = first.setdefault(image.tobytes(), n)
        if ErrorNorms.of(expected.logits[n], expected.logits[m]).relative_rms() > expected.tolerance:
            return m, n
    return None
