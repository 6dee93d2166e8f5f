"""DINOv2's backbone, with or without registers.  The MLPs of the giant model are gated (variant "swiglu").

The class token has a position and registers have none: positions.covers="class".  timm adds that position to the class
token, which computes the same function and cannot be undone.  Training checkpoints may have their blocks in chunks,
`blocks.CHUNK.BLOCK`.  The block number does not restart in each chunk, so the chunk is removed from the key.

Source: facebookresearch/dinov2 b8931f7, dinov2/models/vision_transformer.py, layers/swiglu_ffn.py, hub/backbones.py.
"""

import numpy as np

from parity.checkpoints.formats.dino import BACKBONE
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.facebook import ASSUMED, BICUBIC_WITH_OFFSET, CONSTRAINTS
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.tables import replace_keys, unsupported_head_width
from parity.checkpoints.formats.torch import assumed_behaviour
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


def read_config(evidence: Evidence) -> Fields:
    """Return positions.covers: which tokens have a row in the position table."""
    return {"positions.covers": "class" if "reg_token" in evidence.axes else "all"}


def infer_assumed(evidence: Evidence) -> Fields:
    """Return what dinov2/hub/backbones.py sets: resampling for models with registers, 24 heads for the giant model."""
    registers = "reg_token" in evidence.axes
    fields: dict[str, object] = {"resampling.antialias": True, "resampling.offset": 0.0} if registers else {}
    return fields | ({"num_heads": 24} if evidence.sizes["width"] == 1536 else {})


def unsupported(config: ViTConfig, variant: str) -> str:
    """Return the values in a config that DINOv2's class cannot express; "" if there are none."""
    if config.num_covered != 1:
        return f"positions.covers={config.positions.covers!r}, only the class token's position"
    return unsupported_head_width(config)


FORMAT = Format(
    name="dinov2",
    description="DINOv2's backbone, also with registers",
    separator=".",
    tables={
        "mlp": BACKBONE + _MORE,
        "swiglu": replace_keys(BACKBONE, {"mlp.fc2": "mlp.w3"}, ("blocks.mlp.fc1",)) + _MORE + _GATE,
    },
    default_variant=lambda config: "swiglu" if config.mlp.is_gated else "mlp",
    aliases={r"blocks\.\d+\.(\d+)\.": r"blocks.\1."},
    ignored_keys={r"mask_token": "replaces masked patches in training"},
    constants={"mask_token | 1 width": lambda config: np.zeros(config.width, np.float32)},
    constraints={
        **{name: value for name, value in CONSTRAINTS.items() if name != "mlp.activation"},
        "num_classes": 0,
        "norms.after_blocks": True,
        "norms.after_pool": False,
        "head.pool": "token",
    },
    unsupported=unsupported,
    assumed={**ASSUMED, **BICUBIC_WITH_OFFSET},
    infer_assumed=infer_assumed,
    read_config=read_config,
    recognises=lambda evidence: "mask_token" in evidence.ignored_arrays,
    assumed_behaviour=assumed_behaviour,
)
