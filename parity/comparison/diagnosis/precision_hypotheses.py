"""Hypotheses about lower precision: one operation or the whole model in half precision, or matrix products in TF32."""

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from parity.comparison.diagnosis import attention_variants as attention
from parity.comparison.diagnosis import patches, roundings, variants
from parity.comparison.diagnosis.hypothesis import FIX_REFERENCE_CODE, Hypothesis, Rounding
from parity.comparison.diagnosis.patches import Patch
from vit_spec import ViTConfig

HALF_DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def precision_hypotheses(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield hypotheses about computations that the reference model does in lower precision."""
    yield from _single_operations(c)
    yield from _whole_model(c)


def _hypothesis(name: str, family: str, patch: Patch, *, per_block: bool = False) -> Hypothesis:
    return Hypothesis(
        name,
        family,
        patch=patch,
        lowers_precision_of="operation",
        manual_fix=FIX_REFERENCE_CODE,
        per_block=per_block,
        rare=True,
    )


def _single_operations(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield single operations in half precision, with everything else in the dtype of the weights."""
    for dtype in HALF_DTYPES:
        cast = roundings.round_to(dtype)
        softmaxes: dict[str, Callable[..., Any]] = {
            f"scores are rounded to {dtype} before the softmax": lambda scores, cast=cast: cast(scores).softmax(-1),
            f"attention weights are rounded to {dtype}": lambda scores, cast=cast: cast(scores.softmax(-1)),
            f"the softmax is {dtype}": lambda scores, cast=cast: cast(cast(scores).softmax(-1)),
        }
        for name, function in softmaxes.items():
            yield _hypothesis(name, "precision of the softmax", attention.replace_softmax(function), per_block=True)
        yield _hypothesis(
            f"norms are {dtype}",
            "precision of norms",
            variants.replace_norm_forward(roundings.layer_norm_in_dtype(dtype)),
            per_block=True,
        )
        if c.positions.kind != "none":
            yield _hypothesis(
                f"positions are rounded to {dtype}", "precision of positions", patches.patch_intermediate("positions", cast)
            )
        if c.positions.rotary not in ("none", "mixed"):
            family = "precision of rotary positions"
            rotation = attention.replace_rotation(attention.rotate_in_dtype(dtype))
            yield _hypothesis(f"rotary positions are applied in {dtype}", family, rotation)
            yield _hypothesis(f"cosines and sines are rounded to {dtype}", family, _round_rotary_tables(cast))
            yield _hypothesis(
                f"rotary angles are rounded to {dtype}", family, attention.change_rotary_angles(_round_angles(dtype))
            )
        yield _hypothesis(f"images are rounded to {dtype}", "precision of images", roundings.round_images(cast))


def _round_rotary_tables(cast: Callable[[Any], Any]) -> Patch:
    def patch(model: Any) -> None:
        patches.intercept(model, lambda name, value: cast(value) if name in ("cosines", "sines") else value)

    return patch


def _round_angles(dtype: str) -> Callable[..., Any]:
    return lambda c, angles: angles.astype(HALF_DTYPES[dtype]).astype(np.float64)


def _whole_model(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield the whole model in half precision, and matrix products in TF32."""
    for dtype in HALF_DTYPES:
        fix_dtype = f"make the expected outputs in float32, or compare at {dtype}'s tolerance"
        names = {
            Rounding(dtype, activations=False): f"weights are rounded to {dtype}",
            Rounding(dtype, weights=False): f"activations are {dtype}",
            Rounding(dtype): f"weights and activations are {dtype}",
        }
        for rounding, name in names.items():
            yield Hypothesis(name, "dtype rounding", rounding=rounding, lowers_precision_of="model", manual_fix=fix_dtype)
    fix_tf32 = (
        "switch TF32 off (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32), then compare again"
    )
    products = {
        "the patch convolution only": (False, False, True),
        "all matrix products": (True, True, True),
        "all matrix products except those of attention": (True, False, True),
        "all matrix products except the patch convolution": (True, True, False),
        "linear layers only": (True, False, False),
    }
    for name, flags in products.items():
        yield Hypothesis(
            f"TF32 was used by {name}",
            "TF32",
            patch=roundings.tf32(*flags),
            lowers_precision_of="model",
            manual_fix=fix_tf32,
        )
