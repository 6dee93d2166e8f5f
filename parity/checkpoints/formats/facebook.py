"""What the files of DeiT, DINO, DINOv2 and MAE have in common: timm's names, and how Facebook used these models.

Where a file is like timm's key by key, it is told apart only by what stands beside the weights.
"""

from parity.checkpoints.formats.format import Evidence, Fields
from parity.checkpoints.formats.tables import CLASSIC
from vit_spec.models import DINO_BICUBIC, IMAGENET, PLAIN_BICUBIC

# Norms over all tokens, eps 1e-6, a class token with a position, and GELU in all its exactness: each repository's own
# vision_transformer.py or models*.py.
# Rotary positions leave no key, nor does what scores are multiplied by: others keep models with them under the very same
# names, so a file alone does not tell.
ALWAYS: Fields = {**CLASSIC, "head.hidden": None, "positions.rotary": ("none",), "attention.scale": (None,)}

# Their data loaders normalise with ImageNet's mean and deviation.
ASSUMED: Fields = {
    "norms.eps": 1e-6,
    "mlp.activation": "gelu",
    "pixels.mean": IMAGENET.mean,
    "pixels.std": IMAGENET.std,
}
PLAIN: Fields = {
    "resampling.kernel": PLAIN_BICUBIC.kernel,
    "resampling.antialias": PLAIN_BICUBIC.antialias,
    "resampling.offset": PLAIN_BICUBIC.offset,
}
OFFSET: Fields = {**PLAIN, "resampling.offset": DINO_BICUBIC.offset}


def argued(evidence: Evidence, *names: str) -> bool:
    """Whether the arguments of the training script, which its checkpoints keep, have one of these names."""
    return any(f"args/{name}" in evidence.notes for name in names)
