"""The names of "Vision Transformers, Explained" (lanl/vision_transformers_explained), with its fixed table of positions."""

from dataclasses import replace

import ml_dtypes
import numpy as np

import vit_spec
from parity.formats.article import article
from parity.formats.format import Evidence, Fields
from parity.layout import Array
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


def table(config: ViTConfig) -> Array:
    """Return the positions that the article's model keeps, and does not train."""
    return vit_spec.position_table(config, config.grid)[0]


def settings(evidence: Evidence) -> Fields:
    """Return what the article fixes, after a look at the file's table: it must be the one that is computed here.

    Raises:
        InputError: other positions than the article's.
    """
    if found := evidence.ignored.get("backbone.pos_embed"):
        expected = sincos_1d(found.size // evidence.sizes["width"], evidence.sizes["width"])
        table = np.asarray(found).reshape(expected.shape)
        rounding = float(ml_dtypes.finfo(table.dtype).eps)  # type: ignore[no-untyped-call]
        if not np.abs(table - expected).max() <= 64 * rounding:  # of sines, and of their angles
            raise InputError("its backbone.pos_embed is not the article's table of sinusoids: it cannot be read")
    return _ARTICLE.settings(evidence)


_ARTICLE = article(
    "article_rectangular",
    "the article with one number from a wide picture",
    {"": TABLE},
    ("in_channels", "image_size"),
    ignored={r"backbone\.pos_embed": "the fixed table, which is computed"},
    constants={"backbone.pos_embed | 1 token width": table},
)

FORMAT = replace(_ARTICLE, settings=settings)
