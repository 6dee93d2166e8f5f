"""DeiT and DeiT III: timm's names, except that DeiT III has `gamma_1` and `gamma_2` for timm's ls1.gamma and ls2.gamma.

Files of DeiT have timm's keys.  They are read as timm's unless the checkpoint contains the arguments of DeiT's training
script, or this format is given.  DeiT III adds positions before it prepends the class token, which therefore has none.

Source: facebookresearch/deit 7e160fe, models.py, models_v2.py and main.py.
"""

from parity.checkpoints.formats.dino import BACKBONE
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.facebook import ASSUMED, BICUBIC, CONSTRAINTS, has_script_argument
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.tables import unsupported_head_width
from parity.checkpoints.formats.torch import assumed_behaviour
from vit_spec import ViTConfig

_HEAD = """
    head.weight | head.weight | label feature
    head.bias   | head.bias   | label
"""
_DISTILLED = """
    dist_token       | dist_token       | 1 1 width
    head_dist.weight | head_dist.weight | label feature
    head_dist.bias   | head_dist.bias   | label
"""
_SCALE = """
    blocks.ls1.gamma | blocks.{block}.gamma_1 | width
    blocks.ls2.gamma | blocks.{block}.gamma_2 | width
"""
_COVERS = {"deit": "all", "deit3": "none"}


def read_config(evidence: Evidence) -> Fields:
    """Return positions.covers: which tokens have a row in the position table."""
    return {"positions.covers": _COVERS[evidence.variant]}


def unsupported(config: ViTConfig, variant: str) -> str:
    """Return the values in a config that DeiT's classes cannot express; "" if there are none."""
    if config.positions.covers != _COVERS[variant]:
        return f"positions.covers={config.positions.covers!r} in its variant {variant!r}, only {_COVERS[variant]!r}"
    return unsupported_head_width(config)


def recognises(evidence: Evidence) -> bool:
    """Return whether the file has DeiT III's layer scales, or the arguments of DeiT's training script."""
    return {"blocks.ls1.gamma", "pos_embed"} <= evidence.axes.keys() or has_script_argument(evidence, "distillation_type")


FORMAT = Format(
    name="deit",
    description="DeiT, DeiT III, also distilled",
    separator=".",
    tables={"deit": BACKBONE + _HEAD + _DISTILLED, "deit3": BACKBONE + _HEAD + _SCALE},
    default_variant=lambda config: "deit" if config.norms.layer_scale is None else "deit3",
    constraints={
        **CONSTRAINTS,
        "norms.after_blocks": True,
        "norms.after_pool": False,
        "head.pool": "token",
        "head.bias": True,
    },
    unsupported=unsupported,
    assumed={**ASSUMED, **BICUBIC, "norms.layer_scale": 1e-4},
    read_config=read_config,
    recognises=recognises,
    assumed_behaviour=assumed_behaviour,
)
