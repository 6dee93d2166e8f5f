"""The names of "Vision Transformers, Explained" (lanl/vision_transformers_explained), with its fixed table of positions."""

from collections.abc import Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np

import vit_spec
from parity.checkpoints.formats.article import article
from parity.checkpoints.formats.format import Evidence, Fields
from parity.checkpoints.layout import Array
from vit_spec import InputError, ViTConfig
from vit_spec.positions import sincos_1d

TABLE = """
    patch_embed.proj.weight | patch_tokens.project.weight                | width (rgb ph pw)
    patch_embed.proj.bias   | patch_tokens.project.bias                  | width
    cls_token               | backbone.cls_token                         | 1 1 width
    blocks.norm1.weight     | backbone.blocks.{block}.norm1.weight       | width
    blocks.norm1.bias       | backbone.blocks.{block}.norm1.bias         | width
    blocks.attn.qkv.weight  | backbone.blocks.{block}.attn.qkv.weight    | (qkv head dim) width
    blocks.attn.proj.weight | backbone.blocks.{block}.attn.proj.weight   | width (head dim)
    blocks.attn.proj.bias   | backbone.blocks.{block}.attn.proj.bias     | width
    blocks.norm2.weight     | backbone.blocks.{block}.norm2.weight       | width
    blocks.norm2.bias       | backbone.blocks.{block}.norm2.bias         | width
    blocks.mlp.fc1.weight   | backbone.blocks.{block}.neuralnet.fc1.weight | ff width
    blocks.mlp.fc1.bias     | backbone.blocks.{block}.neuralnet.fc1.bias   | ff
    blocks.mlp.fc2.weight   | backbone.blocks.{block}.neuralnet.fc2.weight | width ff
    blocks.mlp.fc2.bias     | backbone.blocks.{block}.neuralnet.fc2.bias   | width
    norm.weight             | backbone.norm.weight                       | width
    norm.bias               | backbone.norm.bias                         | width
    head.weight             | backbone.head.weight                       | label feature
    head.bias               | backbone.head.bias                         | label
"""

ROUNDING: dict[str, float] = {  # machine epsilon of the types that tables are computed in
    np.dtype(kind).name: float(ml_dtypes.finfo(kind).eps)  # type: ignore[no-untyped-call]
    for kind in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
}


def table(config: ViTConfig) -> Array:
    """Return the positions that the article's model keeps, and does not train."""
    return vit_spec.position_table(config, config.grid)[0]


def settings(evidence: Evidence) -> Fields:
    """Return what the article fixes, after a look at the file's table: it must be the one that is computed here.

    Raises:
        InputError: other positions than the article's.
    """
    if "backbone.pos_embed" in evidence.ignored and not any(_within(evidence, name) for name in ROUNDING):
        raise InputError("its backbone.pos_embed is not the article's table of sinusoids: it cannot be read")
    return _ARTICLE.settings(evidence)


def untold(evidence: Evidence) -> Mapping[str, str]:
    """Return that the table is computed anew, where the file's is of less precision than its weights."""
    stored = evidence.ignored.get("backbone.pos_embed")
    if stored is None or _within(evidence, stored.dtype.name):
        return {}
    return {"position table": f"exact sinusoids; the file's are rounded, by up to {_errors(evidence).max():.0e}"}


def _within(evidence: Evidence, name: str) -> bool:
    """Whether the file's table is the article's, rounded to a type or computed in it.

    In a type of machine epsilon e an angle a comes out as a (1 + O(e)) and its sine is off by O(e) (1 + a).  Measured for
    65 to 1,025 positions, the constant is 0.25 where values were rounded and at most 2.8 where all was computed in the
    type; a table with another base is off by more than 100 of the coarsest type's.
    """
    errors = _errors(evidence)
    width = errors.shape[1]
    angles = np.arange(len(errors))[:, None] / 10000.0 ** (np.arange(width) // 2 * 2 / width)
    return bool((errors <= 8 * ROUNDING[name] * (1 + angles)).all())


def _errors(evidence: Evidence) -> Array:
    """Return how far each entry of the file's table is from the article's, (positions, width)."""
    found, width = evidence.ignored["backbone.pos_embed"], evidence.sizes["width"]
    expected = sincos_1d(found.size // width, width)
    return np.abs(np.asarray(found).reshape(expected.shape).astype(np.float64) - expected)


_ARTICLE = article(
    "article_rectangular",
    "the article with one number from a wide picture",
    {"": TABLE},
    ("in_channels", "image_size"),
    ignored={r"backbone\.pos_embed": "the fixed table, which is computed"},
    constants={"backbone.pos_embed | 1 token width": table},
)

FORMAT = replace(_ARTICLE, settings=settings, untold=untold)
