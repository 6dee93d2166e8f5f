"""Shared parts of the formats for the five articles.  Each format is the model of one article, with the article's names.

The structure of the model is fixed.  Sizes, the number of heads, eps and the activation may differ from the article's.
"""

from collections.abc import Mapping
from typing import Any

import vit_spec
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.tables import PLAIN_BLOCK
from vit_spec.config import FIELDS

FIXED_FIELDS = (
    *PLAIN_BLOCK,
    "tokens.class_token",
    "tokens.patch_bias",
    "positions.kind",
    "positions.rotary",
    "attention.qkv_bias",
    "attention.proj",
    "attention.proj_bias",
    "attention.value_skip",
    "norms.before_blocks",
    "norms.after_blocks",
    "norms.after_pool",
    "norms.shared_norm",
    "head.pool",
    "head.bias",
)
ASSUMED_FIELDS = ("num_heads", "mlp.activation", "norms.eps")


def article_format(
    name: str, description: str, tables: Mapping[str, str], choices: tuple[str, ...] = (), **options: Any
) -> Format:
    """Return the format of an article's model.

    Args:
        name: the name of the format, and of the model in `vit_spec.get`.
        description: `Format.description`.
        tables: `Format.tables`.
        choices: fields besides `ASSUMED_FIELDS` that may differ from the article's and that no tensor shows.
        options: further attributes of `Format`.
    """
    config = vit_spec.get(name)
    shown = ("positions.covers",) if config.positions.kind != "none" else ()
    fixed = ("positions.table",) if config.positions.kind == "fixed" else ()
    assumed = [*ASSUMED_FIELDS, *choices, *(field for field in FIELDS if field.startswith(("pixels.", "resampling.")))]
    training = ("tokens.init", "positions.table", "head.init", *(f for f in FIELDS if f.startswith("regularisation.")))
    return Format(
        name=name,
        description=description,
        separator=".",
        tables=tables,
        constraints={field: config.at(field) for field in (*FIXED_FIELDS, *shown, *fixed)},
        assumed={field: config.at(field) for field in assumed},
        read_config=lambda evidence: {field: config.at(field) for field in training},
        **options,
    )
