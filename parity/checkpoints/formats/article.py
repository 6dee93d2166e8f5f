"""What the formats of the five articles share: each is the model of one article, and its names.

Structure is the article's own and fixed; sizes, heads, eps and the activation are its choices, and may be others.
"""

from collections.abc import Mapping
from typing import Any

import vit_spec
from parity.checkpoints.formats.format import Format
from vit_spec.config import FIELDS

STRUCTURE = (
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
CHOICES = ("num_heads", "mlp.activation", "norms.eps")


def article(name: str, what: str, tables: Mapping[str, str], choices: tuple[str, ...] = (), **options: Any) -> Format:
    """Return the format of an article's model.

    name: of the model too, see `vit_spec.get`.
    choices: what else of the config was the article's choice and shows in no tensor.
    options: of `Format`.
    """
    config = vit_spec.get(name)
    shown = ("positions.covers",) if config.positions.kind != "none" else ()
    fixed = ("positions.table",) if config.positions.kind == "fixed" else ()
    assumed = [*CHOICES, *choices, *(field for field in FIELDS if field.startswith(("pixels.", "resampling.")))]
    training = ("tokens.init", "positions.table", "head.init", *(f for f in FIELDS if f.startswith("regularisation.")))
    return Format(
        name=name,
        what=what,
        separator=".",
        tables=tables,
        always={field: config.at(field) for field in (*STRUCTURE, *shown, *fixed)},
        assumed={field: config.at(field) for field in assumed},
        settings=lambda evidence: {field: config.at(field) for field in training},
        **options,
    )
