"""Where to look when no cause is found, or before one is sought: the first layer that is under suspicion."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.diagnosis.expectations import Expected
from parity.diagnosis.trial import Hypothesis, Trial, model_of, shown
from parity.layout import Array
from parity.measures import Error
from parity.weights import FLOATS, rounded
from vit_spec import rows

STEP = 1e-4  # of an output's size, to see what the logits do


@dataclass(frozen=True)
class Suspect:
    """A layer, and what speaks against it.

    seen: whether its own output was compared; otherwise it is the one whose size would explain most of the difference.
    value: relRMS of its output where that was seen, otherwise the share of the squared difference that it explains.
    """

    name: str
    seen: bool
    value: float

    def __str__(self) -> str:
        if self.seen:
            return f"the first layer that differs is {self.name}, by {self.value:.1e}"
        if self.value < 1 / 2:
            return (
                f"no layer stands out; {self.name} comes first, its size would explain {self.value:.0%} of the difference"
            )
        return f"{self.name}: the size of its output alone would explain {self.value:.0%} of the difference"


def suspect(trial: Trial, expected: Expected, bar: float) -> Suspect:
    """Return the first layer whose output is not as expected, or by the logits alone the likeliest."""
    found = intermediates(trial)
    logits = found.pop("logits")
    if expected.intermediates:
        for name, value in found.items():
            if name in expected.intermediates:
                error = Error.of(value, expected.intermediates[name]).relative_rms()
                if not error <= bar:
                    return Suspect(name, True, error)
        return Suspect("logits", True, Error.of(logits, expected.logits).relative_rms())
    missing = (expected.logits - logits).ravel()
    shares = {name: _share(effect.ravel(), missing) for name, effect in _effects(trial, found, logits)}
    likeliest = max(shares, key=lambda each: shares[each])
    return Suspect(likeliest, False, shares[likeliest])


def intermediates(trial: Trial) -> dict[str, Array]:
    """Return every named intermediate of a trial, and the logits, float64."""
    return {name: tensor.double().numpy() for name, tensor in _run(trial).items()}


def _run(trial: Trial, fed: Mapping[str, Any] | None = None) -> dict[str, Any]:
    import torch

    import vit_torch

    model = model_of(trial)
    with torch.inference_mode():
        logits, found = vit_torch.intermediates(model, shown(trial, model), fed)
    return {**found, "logits": logits}


def _effects(trial: Trial, found: Mapping[str, Array], logits: Array) -> Iterator[tuple[str, Array]]:
    """What the logits do when the output of one layer grows."""
    import torch

    halves = [f"blocks.{n}.{half}" for n in range(trial.config.depth) for half in ("attn", "mlp")]
    for name in ("patch_embed", "positions", *halves, "norm", "attn_pool", "fc_norm", "pre_logits", "head"):
        if name in found:
            kind = trial.weights["patch_embed.proj.weight"].dtype
            grown = torch.from_numpy((found[name] * (1 + STEP)).astype(kind))
            yield name, _run(trial, {name: grown})["logits"].double().numpy() - logits


def _share(effect: Array, missing: Array) -> float:
    """The squared cosine."""
    sizes = float(effect @ effect) * float(missing @ missing)
    return float(effect @ missing) ** 2 / sizes if sizes else 0.0


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
