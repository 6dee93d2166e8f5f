"""DINO's backbone: timm's names, no classifier.  In a checkpoint of training it is read from the teacher.

A published backbone has timm's keys and nothing else, and is read as timm's unless this format is asked for: then
positions are resampled with DINO's offset of 0.1, and pixels are ImageNet's.  Files of training are recognised.

Source: facebookresearch/dino 7c446df, vision_transformer.py and main_dino.py.
"""

from parity.checkpoints.formats.facebook import ALWAYS, ASSUMED, OFFSET, argued
from parity.checkpoints.formats.format import Evidence, Format
from parity.checkpoints.formats.tables import plain, respelled, uneven_heads
from parity.checkpoints.formats.torch import TABLE, untold

BACKBONE = respelled(
    plain(TABLE),
    {},
    (
        "dist_token",
        "reg_token",
        "norm_pre",
        "blocks.attn.q_bias",
        "blocks.attn.v_bias",
        "blocks.attn.q_norm",
        "blocks.attn.k_norm",
        "blocks.ls",
        "attn_pool",
        "fc_norm",
        "pre_logits",
        "head",
    ),
)


def recognises(evidence: Evidence) -> bool:
    """Whether the projection head of DINO's training lies beside the backbone, or the arguments of its script."""
    return any("head.last_layer." in key for key in evidence.beside) or argued(evidence, "momentum_teacher", "teacher_temp")


FORMAT = Format(
    name="dino",
    what="DINO's backbone, or its training checkpoint",
    separator=".",
    tables={"": BACKBONE},
    always={
        **ALWAYS,
        "num_classes": 0,
        "positions.covers": "all",
        "norms.layer_scale": None,
        "norms.after_blocks": True,
        "norms.after_pool": False,
        "head.pool": ("token",),
    },
    objection=lambda config, table: uneven_heads(config),
    assumed={**ASSUMED, **OFFSET},
    recognises=recognises,
    untold=untold,
)
