"""A bias of attention's scores that the weights lack, read off expected intermediates: relative positions, or a mask."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.diagnosis.expectations import Expected
from parity.comparison.diagnosis.patches import at
from parity.comparison.diagnosis.suspects import aligned, intermediates
from parity.comparison.diagnosis.trial import Hypothesis, Trial

STEADY = 1e-2  # of a bias, at most, may differ from image to image; what is left is judged by the outputs
CURE = (
    "these weights have no such bias, and the twins add none: leave it out of the model that made the expected outputs, "
    "or take another model"
)


def score_biases(trial: Trial, expected: Expected) -> Iterator[Hypothesis]:
    """Yield the causes that add to the scores of blocks what the expected ones have more, the same for every image.

    Expected intermediates must hold `scores` or `weights` of attention, for two images at least: of a single image any
    difference of queries or keys would look like a bias.  Where one block's alone are expected, it may be that of all.
    """
    if len(expected) < 2:
        return
    found: dict[int, Array] = {}
    for number in range(trial.config.depth):
        bias = _bias(_with(trial, found), expected, f"blocks.{number}.attn")
        if bias is not None:
            found[number] = bias
    if found:
        yield _hypothesis(found, trial.config.depth)
    if len(found) == 1 < trial.config.depth:
        yield _hypothesis(dict.fromkeys(range(trial.config.depth), *found.values()), trial.config.depth)


def _with(trial: Trial, biases: Mapping[int, Array]) -> Trial:
    return replace(trial, patches=(*trial.patches, partial(_add, dict(biases)))) if biases else trial


def _add(biases: Mapping[int, Array], model: Any) -> None:
    for number, bias in biases.items():
        at(f"blocks.{number}.attn.scores", partial(_plus, bias))(model)


def _plus(bias: Array, scores: Any) -> Any:
    return scores + scores.new_tensor(bias)


def _hypothesis(biases: Mapping[int, Array], depth: int) -> Hypothesis:
    which = "every block" if len(biases) == depth else f"block {', '.join(map(str, biases))}"
    return Hypothesis(
        f"a bias is added to the scores of {which}, the same for every image, as for relative positions",
        "bias of the scores",
        patch=partial(_add, biases),
        cure=CURE,
        where=f"blocks.{next(iter(biases))}.attn" if len(biases) == 1 else "",
    )


def _bias(trial: Trial, expected: Expected, part: str) -> Array | None:
    """Return what the expected scores have more, (1, H, T, S); None where they are not expected, or images differ in it."""
    own, theirs = intermediates(trial), expected.intermediates
    if f"{part}.scores" in theirs:
        more = _difference(own[f"{part}.scores"], theirs[f"{part}.scores"])
    elif f"{part}.weights" in theirs:
        # The softmax leaves its rows undetermined by a constant: their largest entry counts as zero.
        more = _difference(own[f"{part}.weights"], theirs[f"{part}.weights"], np.log)
        more = None if more is None else more - more.max(-1, keepdims=True)
    else:
        return None
    if more is None or len(more) < 2:
        return None
    hidden = np.isneginf(more)
    if np.isnan(more).any() or np.isposinf(more).any() or (hidden != hidden[:1]).any():
        return None
    plain = np.where(hidden, 0, more)
    bias = plain.mean(0, keepdims=True)
    if not (bias.any() or hidden.any()) or np.linalg.norm(plain - bias) > STEADY * np.linalg.norm(plain):
        return None
    return np.where(hidden[:1], -np.inf, bias)


def _difference(own: Array, theirs: Array, of: Any = np.asarray) -> Array | None:
    """Return theirs - own, of a function of both; None where the shapes are not the same."""
    there = aligned(theirs, own.shape)
    if there is None:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(there == own, 0, of(there) - of(own))
