"""DINOv2's backbone, with or without registers; the giant's MLPs gate (table "swiglu").

The class token has a position and registers have none, which is positions.covers="class"; timm folds that position into
the token, which computes the same and cannot be undone.  Checkpoints of training may keep blocks in chunks,
`blocks.CHUNK.BLOCK`, where blocks are counted through: the chunk is left out.

Source: facebookresearch/dinov2 b8931f7, dinov2/models/vision_transformer.py, layers/swiglu_ffn.py, hub/backbones.py.
"""

import numpy as np

from parity.checkpoints.formats.dino import BACKBONE
from parity.checkpoints.formats.facebook import ALWAYS, ASSUMED, OFFSET
from parity.checkpoints.formats.format import Evidence, Fields, Format
from parity.checkpoints.formats.tables import respelled, uneven_heads
from parity.checkpoints.formats.torch import untold
from vit_spec import ViTConfig

_MORE = """
    reg_token        | register_tokens           | 1 register width
    blocks.ls1.gamma | blocks.{block}.ls1.gamma | width
    blocks.ls2.gamma | blocks.{block}.ls2.gamma | width
"""
_GATE = """
    blocks.mlp.fc1.weight | blocks.{block}.mlp.w12.weight | (glu ff) width
    blocks.mlp.fc1.bias   | blocks.{block}.mlp.w12.bias   | (glu ff)
"""


def settings(evidence: Evidence) -> Fields:
    """Return which tokens have a position."""
    return {"positions.covers": "class" if "reg_token" in evidence.axes else "all"}


def likely(evidence: Evidence) -> Fields:
    """Return what dinov2/hub/backbones.py sets: how tables with registers are resampled, and the heads of the giant."""
    registers = "reg_token" in evidence.axes
    fields: dict[str, object] = {"resampling.antialias": True, "resampling.offset": 0.0} if registers else {}
    return fields | ({"num_heads": 24} if evidence.sizes["width"] == 1536 else {})


def objection(config: ViTConfig, table: str) -> str:
    """Say what of a config DINOv2's class cannot be."""
    if config.num_covered != 1:
        return f"positions.covers={config.positions.covers!r}, only the class token's position"
    return uneven_heads(config)


FORMAT = Format(
    name="dinov2",
    what="DINOv2's backbone, also with registers",
    separator=".",
    tables={
        "mlp": BACKBONE + _MORE,
        "swiglu": respelled(BACKBONE, {"mlp.fc2": "mlp.w3"}, ("blocks.mlp.fc1",)) + _MORE + _GATE,
    },
    usual=lambda config: "swiglu" if config.mlp.activation == "swiglu" else "mlp",
    aliases={r"blocks\.\d+\.(\d+)\.": r"blocks.\1."},
    ignored={r"mask_token": "what stands in for a hidden patch in training"},
    constants={"mask_token | 1 width": lambda config: np.zeros(config.width, np.float32)},
    always={
        **{name: value for name, value in ALWAYS.items() if name != "mlp.activation"},
        "num_classes": 0,
        "norms.after_blocks": True,
        "norms.after_pool": False,
        "head.pool": ("token",),
    },
    objection=objection,
    assumed={**ASSUMED, **OFFSET},
    likely=likely,
    settings=settings,
    recognises=lambda evidence: "mask_token" in evidence.ignored,
    untold=untold,
)
