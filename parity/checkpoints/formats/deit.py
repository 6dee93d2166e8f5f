"""DeiT and DeiT III: timm's names, and for the latter `gamma_1` and `gamma_2` where timm has modules ls1 and ls2.

DeiT's files have timm's keys, and are read as timm's unless the arguments of its script lie beside them or this format
is asked for.  DeiT III adds positions before the class token joins, so that it has none.

Source: facebookresearch/deit 7e160fe, models.py, models_v2.py and main.py.
"""

from parity.checkpoints.formats.dino import BACKBONE
from parity.checkpoints.formats.facebook import ALWAYS, ASSUMED, PLAIN, argued
from parity.checkpoints.formats.format import Evidence, Fields, Format
from parity.checkpoints.formats.tables import uneven_heads
from parity.checkpoints.formats.torch import untold
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


def settings(evidence: Evidence) -> Fields:
    """Return which tokens have a position."""
    return {"positions.covers": _COVERS[evidence.variant]}


def objection(config: ViTConfig, table: str) -> str:
    """Say what of a config DeiT's classes cannot be."""
    if config.positions.covers != _COVERS[table]:
        return f"positions.covers={config.positions.covers!r} in its table {table!r}, only {_COVERS[table]!r}"
    return uneven_heads(config)


def recognises(evidence: Evidence) -> bool:
    """Whether there are DeiT III's scales, or the arguments of its script."""
    return {"blocks.ls1.gamma", "pos_embed"} <= evidence.axes.keys() or argued(evidence, "distillation_type")


FORMAT = Format(
    name="deit",
    what="DeiT, DeiT III, also distilled",
    separator=".",
    tables={"deit": BACKBONE + _HEAD + _DISTILLED, "deit3": BACKBONE + _HEAD + _SCALE},
    usual=lambda config: "deit" if config.norms.layer_scale is None else "deit3",
    always={
        **ALWAYS,
        "norms.after_blocks": True,
        "norms.after_pool": False,
        "head.pool": ("token",),
        "head.bias": True,
    },
    objection=objection,
    assumed={**ASSUMED, **PLAIN, "norms.layer_scale": 1e-4},
    settings=settings,
    recognises=recognises,
    untold=untold,
)
