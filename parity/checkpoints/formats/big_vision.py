"""The npz files of google-research/big_vision: plain ViTs, SigLIP and SigLIP 2, DeiT III for JAX.

Each block has its own keys (variant "loop"), or blocks are stacked if the model was built with scan=True ("scan").
Positions are a learned table, or a fixed table that is computed and not stored.  They are added to the patches before the
class token is prepended.

Source: big_vision/models/vit.py.
"""

from parity.checkpoints.formats.behaviour import common_behaviour
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.linen import (
    ASSUMED,
    CONSTRAINTS,
    LOOP,
    MAP_HEAD,
    SPELLINGS,
    STACKED,
    covers_patches_only,
    position_line,
)
from vit_spec import ViTConfig

SINCOS_TABLE = "sincos_2d_big_vision"
HEAD_AND_POSITIONS = MAP_HEAD + position_line("pos_embedding")


def infer_assumed(evidence: Evidence) -> Fields:
    """Return that positions are a computed table if the file has no table, since `posemb` is "learn" or "sincos2d".

    This is an assumption: the ViT of google-research/vision_transformer, whose Encoder has the argument
    add_position_embedding, has the same keys and may have no positions.
    """
    if "pos_embed" in evidence.axes:
        return {}
    covers: Fields = {"positions.covers": "none"} if "cls_token" in evidence.axes else {}
    return {"positions.kind": "fixed", "positions.table": SINCOS_TABLE, **covers}


def allowed_position_tables(config: ViTConfig) -> tuple[str, ...]:
    """Return the values that positions.table may have; any value if the table is learned, which it only initialises."""
    return (SINCOS_TABLE,) if config.positions.kind == "fixed" else (config.positions.table,)


def allowed_pools(config: ViTConfig) -> tuple[str, ...]:
    """Return the values that head.pool may have.

    Only `pool_type` "tok" adds a class token; "gap", "map" and "none" do not.
    """
    return ("token",) if config.tokens.class_token else ("mean", "attention", "none")


FORMAT = Format(
    name="big_vision",
    description="google-research/big_vision: plain ViTs, SigLIP, SigLIP 2",
    separator="/",
    tables={"loop": LOOP + HEAD_AND_POSITIONS, "scan": STACKED + HEAD_AND_POSITIONS},
    spellings=SPELLINGS,
    constraints={
        **CONSTRAINTS,
        "positions.kind": ("learned", "fixed"),
        "positions.table": allowed_position_tables,
        "positions.covers": covers_patches_only,
        "head.pool": allowed_pools,
    },
    assumed=ASSUMED,
    infer_assumed=infer_assumed,
    assumed_behaviour=common_behaviour,
)
