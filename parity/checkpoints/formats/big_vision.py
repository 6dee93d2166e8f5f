"""The npz files of google-research/big_vision: plain ViTs, SigLIP and SigLIP 2, DeiT III for JAX.

big_vision/models/vit.py; blocks in a loop, or stacked where the model was built with scan=True.  Positions are learned
and added before a class token joins, or they are the fixed table that is computed and not kept.
"""

from parity.checkpoints.formats.format import Evidence, Fields, Format
from parity.checkpoints.formats.linen import ALWAYS, ASSUMED, LOOP, MAP_HEAD, SPELLINGS, STACKED, no_class_row, positions
from parity.checkpoints.formats.untold import in_words
from vit_spec import ViTConfig

TABLE = "sincos_2d_big_vision"
TAIL = MAP_HEAD + positions("pos_embedding")


def likely(evidence: Evidence) -> Fields:
    """Return that positions which are not kept are computed: `posemb` is learn or sincos2d.

    That is an assumption.  The ViT of google-research/vision_transformer, whose Encoder has the argument
    add_position_embedding, has the same keys without positions.
    """
    if "pos_embed" in evidence.axes:
        return {}
    covers: Fields = {"positions.covers": "none"} if "cls_token" in evidence.axes else {}
    return {"positions.kind": "fixed", "positions.table": TABLE, **covers}


def tables(config: ViTConfig) -> tuple[str, ...]:
    """The one fixed table; what a learned one starts from is not asked."""
    return (TABLE,) if config.positions.kind == "fixed" else (config.positions.table,)


def pools(config: ViTConfig) -> tuple[str, ...]:
    """There is a class token if and only if it is used: `pool_type` is tok, gap, map or none."""
    return ("token",) if config.tokens.class_token else ("mean", "attention", "none")


FORMAT = Format(
    name="big_vision",
    what="google-research/big_vision: plain ViTs, SigLIP, SigLIP 2",
    separator="/",
    tables={"loop": LOOP + TAIL, "scan": STACKED + TAIL},
    spellings=SPELLINGS,
    always={
        **ALWAYS,
        "positions.kind": ("learned", "fixed"),
        "positions.table": tables,
        "positions.covers": no_class_row,
        "head.pool": pools,
    },
    assumed=ASSUMED,
    likely=likely,
    untold=in_words,
)
