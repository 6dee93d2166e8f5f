"""The parameter names of "Vision Transformers, Explained" (lanl/vision_transformers_explained), and its position table."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

import vit_spec
from parity.checkpoints.formats import torch
from parity.checkpoints.formats.article import article_format
from parity.checkpoints.formats.evidence import Evidence
from parity.checkpoints.layout import Array
from vit_spec import ViTConfig
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

EPSILON: dict[str, float] = {  # machine epsilon of the dtypes that a table may be computed in
    np.dtype(kind).name: float(ml_dtypes.finfo(kind).eps)  # type: ignore[no-untyped-call]
    for kind in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
}


def position_table(config: ViTConfig) -> Array:
    """Return the fixed position table, (tokens, width), which the article's state dict contains."""
    return vit_spec.position_table(config, config.grid)[0]


def assumed_behaviour(evidence: Evidence) -> Mapping[str, str]:
    """Return the assumptions about what no tensor shows.

    One is that the position table is recomputed, if the file's table has a lower precision than its dtype.
    """
    found = dict(torch.assumed_behaviour(evidence))
    stored = evidence.ignored_arrays.get("backbone.pos_embed")
    width = evidence.sizes["width"]
    if stored is not None and not _is_within_rounding(np.asarray(stored), width, stored.dtype.name):
        error = _table_errors(np.asarray(stored), width).max()
        found["position table"] = f"exact sinusoids; in the file, they are rounded by up to {error:.0e}"
    return found


def is_position_table(array: Array, config: ViTConfig) -> bool:
    """Return whether an array is the position table of a model, rounded to a dtype or computed in it."""
    is_rounded = any(_is_within_rounding(array, config.width, name) for name in EPSILON)
    return array.size == config.num_tokens * config.width and is_rounded


def _is_within_rounding(array: Array, width: int, dtype: str) -> bool:
    """Return whether an array is the article's table of this width, rounded to a dtype or computed in it.

    In a dtype with machine epsilon e, an angle a is computed as a (1 + O(e)), and the error of its sine is O(e) (1 + a).
    Measured for 65 to 1,025 positions, the constant is 0.25 for rounded values and at most 2.8 for values computed in the
    dtype.  The error of a table with another base is more than 100 times that of the coarsest dtype.
    """
    errors = _table_errors(array, width)
    angles = np.arange(len(errors))[:, None] / 10000.0 ** (np.arange(width) // 2 * 2 / width)
    return bool((errors <= 8 * EPSILON[dtype] * (1 + angles)).all())


def _table_errors(array: Array, width: int) -> Array:
    """Return the absolute error of each entry of a table, (positions, width)."""
    expected = sincos_1d(array.size // width, width)
    return np.abs(array.reshape(expected.shape).astype(np.float64) - expected)


_TABLE_KEY = r"backbone\.pos_embed"

FORMAT = article_format(
    "article_rectangular",
    "the article that predicts one number from a wide image",
    {"": TABLE},
    ("in_channels", "image_size"),
    assumed_behaviour=assumed_behaviour,
    ignored_keys={_TABLE_KEY: "the fixed position table, which is computed"},
    ignored_values={_TABLE_KEY: is_position_table},
    constants={"backbone.pos_embed | 1 token width": position_table},
)
