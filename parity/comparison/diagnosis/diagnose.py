"""The two questions: do weights give the outputs of a file, and do they give those of another model?"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from parity.checkpoints.containers.strict import listed
from parity.checkpoints.surgery.edit import float64
from parity.checkpoints.weights import Checkpoint, parameter
from parity.comparison.diagnosis.attempts import Finding, Progress
from parity.comparison.diagnosis.catalogue import catalogue
from parity.comparison.diagnosis.expectations import Expected
from parity.comparison.diagnosis.precision import narrowest, rounded_weights
from parity.comparison.diagnosis.remedy import Source, remedy
from parity.comparison.diagnosis.report import Cause, Diagnosis
from parity.comparison.diagnosis.search import Found, Search
from parity.comparison.diagnosis.suspects import evidence, intermediates, suspect, unfitting
from parity.comparison.diagnosis.trial import Hypothesis, Runner, Trial
from parity.comparison.forward_backward import noise
from parity.comparison.tolerances import Error
from vit_spec import InputError, count, rows
from vit_spec.config import FIELDS

LARGE = 20_000_000  # parameters; such models are run in float32
IMAGES = 4  # of noise, for a comparison with another model
NOISE = 1 / 2  # of the error may go before what is left no longer looks like noise


def diagnose(
    checkpoint: Checkpoint,
    expected: Expected,
    *,
    source: Source | None = None,
    progress: Progress | None = None,
    pairs: int | None = None,
) -> Diagnosis:
    """Find out why weights do not give the expected outputs: one cause of the catalogue, or two.

    Args:
        expected: what `read` or `expected` returned.
        source: how the weights are named in the commands that mend them.
        progress: called with what is tried, how many are done and how many there are.
        pairs: how many pairs to try; by default all where a pass is cheap, and otherwise the likeliest.

    Raises:
        vit_spec.InputError: outputs of another shape than the model's; PyTorch is not installed.
    """
    _need_torch()
    return _diagnose(checkpoint, _trial(checkpoint, expected), expected, source or Source(), progress, pairs)


def against(
    checkpoint: Checkpoint,
    other: Checkpoint,
    *,
    seed: int = 0,
    source: Source | None = None,
    progress: Progress | None = None,
    pairs: int | None = None,
) -> Diagnosis:
    """Find out why weights are not the same function as others that are known to be right.

    The expected outputs, and those of every layer, are what the other model makes of images of normal noise.  Parameters
    are compared one by one besides.

    Args:
        seed: of the images.
        source, progress, pairs: as in `diagnose`.

    Raises:
        vit_spec.InputError: models that take other images or give other outputs; PyTorch is not installed.
    """
    _need_torch()
    a, b = checkpoint.config, other.config
    if a.in_channels != b.in_channels:
        raise InputError(f"one takes images of {a.in_channels} channels, the other of {b.in_channels}: nothing to compare")
    a.grid_of(*b.image_size)
    images = noise(b, seed, IMAGES).transpose(0, 3, 1, 2).astype(np.float64)
    unknown = Expected(images, True, np.zeros((IMAGES, 1)), "float64")
    right = replace(_trial(other, unknown), normalised=b.pixels)
    inner = intermediates(right)
    logits = inner.pop("logits")
    kind = "float64" if right.weights["patch_embed.proj.weight"].dtype == np.float64 else narrowest(logits)
    found = Expected(images, True, logits, kind, inner)
    trial = replace(_trial(checkpoint, found), normalised=a.pixels)
    fields = tuple(f"{n} is {a.at(n)!r}, the other's {b.at(n)!r}" for n in FIELDS if a.at(n) != b.at(n))
    lines = (*fields, *evidence(trial, right, catalogue(trial)))
    result = _diagnose(checkpoint, trial, found, source or Source(), progress, pairs)
    return replace(result, evidence=lines)


def _need_torch() -> None:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise InputError("diagnose runs the PyTorch twin, and torch is not installed: install torch") from None


def _trial(checkpoint: Checkpoint, expected: Expected) -> Trial:
    """The model as its file has it."""
    config = checkpoint.config
    kind = np.float32 if count(config) > LARGE else np.float64
    weights = {name: float64(parameter(checkpoint, name)).astype(kind, copy=False) for name in rows(config)}
    return Trial(config, weights, expected.images, config.pixels if expected.normalised else None)


def _diagnose(
    checkpoint: Checkpoint,
    trial: Trial,
    expected: Expected,
    source: Source,
    progress: Progress | None,
    pairs: int | None,
) -> Diagnosis:
    outputs = Runner().run(replace(trial, images=trial.images[:1]))
    shape = outputs.shape[1:]
    if not np.isfinite(outputs).all():
        raise InputError(
            "the model of these weights gives NaN or infinite outputs: `python -m parity inspect --values` looks"
        )
    if shape != expected.logits.shape[1:]:
        raise InputError(
            f"the expected outputs have shape {expected.logits.shape}, the model gives {(len(expected), *shape)}: "
            "give those of this model"
        )
    if pairs is not None and pairs < 0:
        raise InputError(f"pairs is {pairs}: give a number from 0")
    search = Search(trial, expected, progress, pairs)
    found = search.run()
    matched = tuple(_cause(each, checkpoint, source) for each in found.matches)
    wrong = found.before.error > found.bar
    where = _suspect(search, found) if wrong and (expected.intermediates or not matched) else ""
    hints = _hints(trial, expected, found) if wrong and not matched else ()
    return Diagnosis(
        matched=matched,
        before=found.before.error,
        bar=found.bar,
        dtype=expected.dtype,
        outputs=expected.logits.size,
        tried=found.tried,
        pairs=found.pairs,
        runners_up=tuple(_cause(each, checkpoint, source) for each in found.others),
        apart=_apart(found) if len(matched) > 1 else "",
        suspect=where,
        precision=_precision(expected, found),
        remarks=(*expected.remarks, *_left_out(search), *hints),
        discarded=found.discarded,
    )


def _suspect(search: Search, found: Found) -> str:
    """The first layer that differs, by more than rounding where even the first ones differ by that."""
    bar = max([found.bar, *(level.tolerance for level in search.levels)])
    return str(suspect(search.trial, search.few, bar, search.places.outputs()))


def _left_out(search: Search) -> Iterator[str]:
    """Say which of the expected intermediates are compared with nothing."""
    if names := unfitting(search.trial, search.few):
        yield f"{listed(names)}: left out, as this model has none of that name and shape"


def _precision(expected: Expected, found: Found) -> str:
    """How precise the expected outputs are, and what follows from that."""
    text = f"the expected outputs hold numbers of {expected.digits}, and are compared to {found.bar:.0e}"
    if not found.level:
        return text
    left = found.matches[0].error if found.matches else found.before.error
    why = f"the difference of {left:.1e} that is left is what {found.level.what} makes ({found.level.error:.1e}, estimated)"
    return f"the expected outputs hold numbers of {expected.digits}; {why}"


def _cause(finding: Finding, checkpoint: Checkpoint, source: Source) -> Cause:
    causes: tuple[Hypothesis, ...] = finding.causes
    names, families = tuple(each.name for each in causes), tuple(each.family for each in causes)
    return Cause(names, families, finding.error, remedy(causes, checkpoint, source))


def _apart(found: Found) -> str:
    """What would tell matches apart: whether they are the same function on images of noise."""
    runner, outputs = Runner(), []
    images = np.random.default_rng(0).standard_normal(found.before.trial.images[:2].shape)
    for match in found.matches:
        again: Trial | None = replace(found.before.trial, images=images)
        for cause in match.causes:
            again = cause.apply(again) if again is not None else None
        if again is not None:
            outputs.append(runner.run(again))
    far = max(Error.of(each, outputs[0]).relative_rms() for each in outputs)
    if not math.isfinite(far) or far > found.bar:
        return f"images of noise would tell these causes apart: their outputs differ there by {far:.1e}"
    return "no image of this size tells these causes apart: with these weights they are the same function"


def _hints(trial: Trial, expected: Expected, found: Found) -> tuple[str, ...]:
    hints = []
    if repeated := _unsteady(expected):
        pair = f"images {repeated[0]} and {repeated[1]} are equal and their outputs are not"
        hints.append(f"{pair}: dropout was left on, or the outputs are of other images")
    elif not found.others or found.others[0].error > NOISE * found.before.error:
        hints.append("what is left looks like noise: if the expected outputs change from run to run, dropout was left on")
    kind = rounded_weights(trial.weights.values())
    if kind:
        hints.append(f"all weights are {kind} numbers: those of the expected outputs may be finer")
    return tuple(hints)


def _unsteady(expected: Expected) -> tuple[int, int] | None:
    """Two equal images whose outputs differ by more than any computation does."""
    first: dict[bytes, int] = {}
    for n, image in enumerate(expected.images):
        m = first.setdefault(image.tobytes(), n)
        if Error.of(expected.logits[n], expected.logits[m]).relative_rms() > expected.bar:
            return m, n
    return None
