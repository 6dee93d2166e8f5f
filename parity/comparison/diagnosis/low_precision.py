"""Hypotheses about precision: a single place in half precision, a whole model, or products in TF32."""

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from parity.comparison.diagnosis import attention_variants as attention
from parity.comparison.diagnosis import patches, roundings, variants
from parity.comparison.diagnosis.patches import Patch
from parity.comparison.diagnosis.trial import CURE, Hypothesis
from vit_spec import ViTConfig

HALVES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def low_precision(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield what may have been computed in a lower type than the rest."""
    yield from _precision(c)
    yield from _roundings(c)


def _low(name: str, family: str, patch: Patch, *, by_block: bool = False) -> Hypothesis:
    return Hypothesis(name, family, patch=patch, cure=CURE, by_block=by_block)


def _precision(c: ViTConfig) -> Iterator[Hypothesis]:
    """Single places in half precision, all else in the type of the weights."""
    for kind in HALVES:
        low = roundings.rounded(kind)
        mixings: dict[str, Callable[..., Any]] = {
            f"scores are rounded to {kind} ahead of the softmax": lambda scores, low=low: low(scores).softmax(-1),
            f"attention weights are rounded to {kind}": lambda scores, low=low: low(scores.softmax(-1)),
            f"the softmax is {kind}": lambda scores, low=low: low(low(scores).softmax(-1)),
        }
        for name, function in mixings.items():
            yield _low(name, "precision of the softmax", attention.mixing(function), by_block=True)
        yield _low(f"norms are {kind}", "precision of norms", variants.whole_norms(roundings.norms_in(kind)), by_block=True)
        if c.positions.kind != "none":
            yield _low(f"positions are rounded to {kind}", "precision of positions", patches.at("positions", low))
        if c.positions.rotary != "none":
            family = "precision of rotary positions"
            whole = attention.turned_again(attention.in_lower_type(kind))
            yield _low(f"rotary positions are applied in {kind}", family, whole)
            yield _low(f"cosines and sines are rounded to {kind}", family, _both_tables(low))
            yield _low(f"rotary angles are rounded to {kind}", family, attention.changed(_angles_in(kind)))
        yield _low(f"images are rounded to {kind}", "precision of images", roundings.images(low))


def _both_tables(low: Callable[[Any], Any]) -> Patch:
    def patch(model: Any) -> None:
        patches.kept(model, lambda name, value: low(value) if name in ("cosines", "sines") else value)

    return patch


def _angles_in(kind: str) -> Callable[..., Any]:
    return lambda c, angles: angles.astype(HALVES[kind]).astype(np.float64)


def _roundings(c: ViTConfig) -> Iterator[Hypothesis]:
    for kind in HALVES:
        again = f"make the expected outputs in float32, or compare at {kind}'s tolerance"
        whats = {
            f"weights {kind}": f"weights are rounded to {kind}",
            kind: f"activations are {kind}",
            f"all {kind}": f"weights and activations are {kind}",
        }
        for rounding, what in whats.items():
            yield Hypothesis(what, "dtype rounding", rounding=rounding, cure=again)
    strict = "switch TF32 off (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32), then compare again"
    units = {
        "the patch convolution alone": (False, False, True),
        "all products": (True, True, True),
        "all products but those of attention": (True, False, True),
        "all products but the patches'": (True, True, False),
        "linear layers alone": (True, False, False),
    }
    for what, where in units.items():
        yield Hypothesis(f"TF32 was used by {what}", "TF32", patch=roundings.tf32(*where), cure=strict)
