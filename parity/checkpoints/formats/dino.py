"""DINO's backbone: timm's names, no classifier.  The teacher of a training checkpoint is read.

A published backbone has timm's keys and nothing else, so it is read as timm's unless this format is given.  In contrast to
timm's, this format resamples positions with DINO's offset of 0.1, and its pixels are normalized by ImageNet's statistics.
Training checkpoints are recognised.

Source: facebookresearch/dino 7c446df, vision_transformer.py and main_dino.py.
"""

from parity.checkpoints.formats.evidence import Evidence
from parity.checkpoints.formats.facebook import ASSUMED, BICUBIC_WITH_OFFSET, CONSTRAINTS, has_script_argument
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.tables import replace_keys, ungated, unsupported_head_width
from parity.checkpoints.formats.torch import TABLE, assumed_behaviour

BACKBONE = replace_keys(
    ungated(TABLE),
    {},
    (
        "dist_token",
        "reg_token",
        "pos_embed_",
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
    """Return whether the file also has the projection head of DINO's training, or the arguments of its script."""
    return any("head.last_layer." in key for key in evidence.other_keys) or has_script_argument(
        evidence, "momentum_teacher", "teacher_temp"
    )


FORMAT = Format(
    name="dino",
    description="DINO's backbone, or its training checkpoint",
    separator=".",
    tables={"": BACKBONE},
    constraints={
        **CONSTRAINTS,
        "num_classes": 0,
        "positions.covers": "all",
        "norms.layer_scale": None,
        "norms.after_blocks": True,
        "norms.after_pool": False,
        "head.pool": "token",
    },
    unsupported=lambda config, variant: unsupported_head_width(config),
    assumed={**ASSUMED, **BICUBIC_WITH_OFFSET},
    recognises=recognises,
    assumed_behaviour=assumed_behaviour,
)
