"""The parameter names of the article on findings in chest x-rays, whose model has rotary positions."""

import re
from collections.abc import Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np

from parity.checkpoints.formats.article import article_format
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.torch import assumed_behaviour
from parity.checkpoints.layout import Array
from vit_spec import InputError, ViTConfig, get
from vit_spec.positions import rotary_axial

TABLE = """
    patch_embed.proj.weight | patch_embedding.patch_embed.weight          | width (rgb ph pw)
    patch_embed.proj.bias   | patch_embedding.patch_embed.bias            | width
    cls_token               | cls_token                                   | 1 1 width
    blocks.norm1.weight     | transformer_blocks.{block}.norm1.weight     | width
    blocks.norm1.bias       | transformer_blocks.{block}.norm1.bias       | width
    blocks.attn.qkv.weight  | transformer_blocks.{block}.attn.qkv.weight  | (qkv head dim) width
    blocks.attn.qkv.bias    | transformer_blocks.{block}.attn.qkv.bias    | (qkv head dim)
    blocks.attn.proj.weight | transformer_blocks.{block}.attn.proj.weight | width (head dim)
    blocks.attn.proj.bias   | transformer_blocks.{block}.attn.proj.bias   | width
    blocks.norm2.weight     | transformer_blocks.{block}.norm2.weight     | width
    blocks.norm2.bias       | transformer_blocks.{block}.norm2.bias       | width
    blocks.mlp.fc1.weight   | transformer_blocks.{block}.mlp.0.weight     | ff width
    blocks.mlp.fc1.bias     | transformer_blocks.{block}.mlp.0.bias       | ff
    blocks.mlp.fc2.weight   | transformer_blocks.{block}.mlp.2.weight     | width ff
    blocks.mlp.fc2.bias     | transformer_blocks.{block}.mlp.2.bias       | width
    head.weight             | mlp_head.weight                             | label feature
    head.bias               | mlp_head.bias                               | label
"""

ROTARY_KEY = re.compile(r"(transformer_blocks\.\d+\.attn\.rope\.)([xy]_(?:cos|sin))")


def read_config(evidence: Evidence) -> Fields:
    """Return the fields that the article fixes, and the rotary base and the number of heads if the file has rotary tables.

    Raises:
        InputError: tables of another rotation than the article's.
    """
    fixed = _ARTICLE.read_config(evidence)
    blocks: dict[str, dict[str, Array]] = {}
    for key, stored in evidence.ignored_arrays.items():
        if found := ROTARY_KEY.fullmatch(key):
            blocks.setdefault(found[1], {})[found[2]] = np.asarray(stored)
    fields = [_fields_of_rotary_tables(prefix, tables, evidence.sizes["width"]) for prefix, tables in blocks.items()]
    if any(each != fields[0] for each in fields):
        raise InputError("its blocks have different tables of rotary positions: it cannot be read")
    return {**fixed, **(fields[0] if fields else {})}


def _fields_of_rotary_tables(prefix: str, tables: Mapping[str, Array], width: int) -> Fields:
    """Return the base of the rotation and the number of heads that the four tables of a block imply.

    Each table is (1 + rows * columns, head_dim / 2), with any dimensions of length one around it.  The slowest pair turns
    by 1 / base for each patch, so its largest angle gives the number of columns.  The fastest pair gives the base.
    """
    refused = InputError(f"its {prefix}* are not the article's tables of rotary positions: it cannot be read")
    if len(tables) != 4 or len({(each.shape, each.dtype) for each in tables.values()}) != 1:
        raise refused
    shape, dtype = tables["x_cos"].shape, tables["x_cos"].dtype
    half = shape[-1] if shape else 0
    tokens = tables["x_cos"].size // max(half, 1)
    if half < 2 or half % 2 or tokens < 2 or width % (2 * half):
        raise refused
    found = {name: each.reshape(tokens, half).astype(np.float64) for name, each in tables.items()}
    angles = np.arctan2(found["x_sin"], found["x_cos"])
    fastest = float(angles[1, 0])
    if not 0 < fastest < 1:
        raise refused
    measured = float(f"{fastest ** (-half / 2):.6g}")
    precision = float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
    for base in (get("article_xray_rope").positions.rotary_base, measured):
        columns = round(float(angles[:, -1].max()) * base)
        if columns < 1 or (tokens - 1) % columns:
            continue
        expected, allowed = _expected_tables(tokens, columns, half, base, precision)
        if all(np.abs(found[name] - table).max() <= allowed for name, table in expected.items()):
            return {"positions.rotary_base": base, "num_heads": width // (2 * half)}
    raise refused


def _expected_tables(tokens: int, columns: int, half: int, base: float, precision: float) -> tuple[dict[str, Array], float]:
    """Return the four tables of a block, by name, and the largest error of tables of this precision."""
    cos, sin = rotary_axial(((tokens - 1) // columns, columns), 2 * half, 1, base)
    # The error of sines that were computed in the dtype or rounded to it: see `article_rectangular`.
    allowed = 8 * precision * (1 + tokens / columns + columns)
    return {"x_cos": cos[:, :half], "y_cos": cos[:, half:], "x_sin": sin[:, :half], "y_sin": sin[:, half:]}, allowed


def _is_rotary_table(array: Array, config: ViTConfig) -> bool:
    """Return whether an array is a table for the base and the heads of a model, for any grid: the model computes others."""
    half, precision = config.head_dim // 2, float(ml_dtypes.finfo(array.dtype).eps)  # type: ignore[no-untyped-call]
    tokens, base = array.size // half, config.positions.rotary_base
    if array.size != tokens * half or array.shape[-1:] != (half,):
        return False
    found = array.reshape(tokens, half).astype(np.float64)
    for columns in (n for n in range(1, tokens) if (tokens - 1) % n == 0):
        expected, allowed = _expected_tables(tokens, columns, half, base, precision)
        if any(np.abs(found - table).max() <= allowed for table in expected.values()):
            return True
    return False


_TABLE_KEY = r"transformer_blocks\.\d+\.attn\.rope\.[xy]_(cos|sin)"
_ARTICLE = article_format(
    "article_xray_rope",
    "the article on chest x-rays, with rotary positions",
    {"": TABLE},
    ("in_channels", "image_size", "positions.rotary_base"),
    assumed_behaviour=assumed_behaviour,
    ignored_keys={_TABLE_KEY: "a rotary table, which is computed"},
    ignored_values={_TABLE_KEY: _is_rotary_table},
)

FORMAT = replace(_ARTICLE, read_config=read_config)
