"""Shared parts of the formats for DeiT, DINO, DINOv2, DINOv3 and MAE: timm's names, and Facebook's choices.

If the keys of a file are exactly timm's, only data beside the weights shows which format it is.
"""

from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.tables import PLAIN_VIT_CONSTRAINTS
from vit_spec.models import DINO_BICUBIC, IMAGENET, PLAIN_BICUBIC

# From vision_transformer.py or models*.py of each repository.  Rotary positions and the scale of the attention scores have
# no keys, and other code uses the same names for models with them, so these two are tuples: see `Format.constraints`.
CONSTRAINTS: Fields = {
    **PLAIN_VIT_CONSTRAINTS,
    "head.hidden": None,
    "positions.rotary": "none",
    "attention.scale": None,
}

# eps 1e-6 and exact GELU; the data loaders normalize by ImageNet's mean and standard deviation.
ASSUMED: Fields = {
    "norms.eps": 1e-6,
    "mlp.activation": "gelu",
    "pixels.mean": IMAGENET.mean,
    "pixels.std": IMAGENET.std,
}
BICUBIC: Fields = {
    "resampling.kernel": PLAIN_BICUBIC.kernel,
    "resampling.antialias": PLAIN_BICUBIC.antialias,
    "resampling.offset": PLAIN_BICUBIC.offset,
}
BICUBIC_WITH_OFFSET: Fields = {**BICUBIC, "resampling.offset": DINO_BICUBIC.offset}


def has_script_argument(evidence: Evidence, *names: str) -> bool:
    """Return whether the checkpoint contains the arguments of its training script, including one of these names."""
    return any(f"args/{name}" in evidence.notes for name in names)
