"""Hypotheses about a bias of the attention scores that the checkpoint lacks, such as relative positions or a mask."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.diagnosis.expected_outputs import Expected
from parity.comparison.diagnosis.hypothesis import Hypothesis, Trial
from parity.comparison.diagnosis.patches import patch_intermediate
from parity.comparison.diagnosis.suspects import intermediates, match_layout
from parity.comparison.tolerances import FLOAT64_TOLERANCE

# Largest relative variation of a bias between images, as a share of the relative variation of the scores.  An error of
# queries or keys varies as the scores do, and is no bias.  If images are nearly equal, it varies little, as the scores do.
MAX_VARIATION = 1e-1
MANUAL_FIX = (
    "this checkpoint has no such bias: remove it from the model that made the expected outputs, or read a checkpoint with "
    "relative positions (positions.relative)"
)


def score_biases(trial: Trial, expected: Expected) -> Iterator[Hypothesis]:
    """Yield causes that add a bias to the attention scores of blocks, the same bias for every image.

    The bias is the difference between the expected scores and those of the model.  This needs `scores` or `weights` of
    attention among the expected intermediates, for images whose scores differ: with one image, or with equal images, any
    difference of queries or keys would look like a bias.  If they are given for one block only, the same bias in all blocks
    is tried as well.
    """
    biases: dict[int, Array] = {}
    for block in range(trial.config.depth):
        bias = _bias(_with_biases(trial, biases), expected, f"blocks.{block}.attn")
        if bias is not None:
            biases[block] = bias
    if biases:
        yield _hypothesis(biases, trial.config.depth)
    if len(biases) == 1 < trial.config.depth:
        yield _hypothesis(dict.fromkeys(range(trial.config.depth), *biases.values()), trial.config.depth)


def _with_biases(trial: Trial, biases: Mapping[int, Array]) -> Trial:
    return replace(trial, patches=(*trial.patches, partial(_add_biases, dict(biases)))) if biases else trial


def _add_biases(biases: Mapping[int, Array], model: Any) -> None:
    for block, bias in biases.items():
        patch_intermediate(f"blocks.{block}.attn.scores", partial(_add_bias, bias))(model)


def _add_bias(bias: Array, scores: Any) -> Any:
    return scores + scores.new_tensor(bias)


def _hypothesis(biases: Mapping[int, Array], depth: int) -> Hypothesis:
    blocks = "every block" if len(biases) == depth else f"block {', '.join(map(str, biases))}"
    return Hypothesis(
        f"a bias is added to the scores of {blocks}, the same for every image, as for relative positions",
        "bias of the scores",
        patch=partial(_add_biases, biases),
        manual_fix=MANUAL_FIX,
        layer=f"blocks.{next(iter(biases))}.attn" if len(biases) == 1 else "",
    )


def _bias(trial: Trial, expected: Expected, attention: str) -> Array | None:
    """Return the bias of the expected scores, (1, H, T, S).

    Returns None if neither scores nor weights of this attention are expected, or if their difference varies between images.
    """
    own, theirs = intermediates(trial), expected.intermediates
    if f"{attention}.scores" in theirs:
        difference = _difference(own[f"{attention}.scores"], theirs[f"{attention}.scores"])
    elif f"{attention}.weights" in theirs:
        # The weights determine each row of scores only up to a constant: choose it so that the largest entry is zero.
        difference = _difference(own[f"{attention}.weights"], theirs[f"{attention}.weights"], np.log)
        difference = None if difference is None else difference - difference.max(-1, keepdims=True)
    else:
        return None
    if difference is None:
        return None
    is_masked = np.isneginf(difference)
    if np.isnan(difference).any() or np.isposinf(difference).any() or (is_masked != is_masked[:1]).any():
        return None
    finite = np.where(is_masked, 0, difference)
    bias = finite.mean(0, keepdims=True)
    scores = own[f"{attention}.scores"]
    variation = np.linalg.norm(scores - scores.mean(0)) / np.linalg.norm(scores)
    limit = MAX_VARIATION * variation * np.linalg.norm(finite)
    if not (bias.any() or is_masked.any()) or variation <= FLOAT64_TOLERANCE or np.linalg.norm(finite - bias) > limit:
        return None
    return np.where(is_masked[:1], -np.inf, bias)


def _difference(own: Array, theirs: Array, function: Any = np.asarray) -> Array | None:
    """Return function(theirs) - function(own); None if the shapes do not match."""
    expected = match_layout(theirs, own.shape)
    if expected is None:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(expected == own, 0, function(expected) - function(own))
