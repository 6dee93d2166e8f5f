"""Checkpoints of the ViT of google-research/scenic: a TrainState in msgpack.

The weights are under `params`, in older checkpoints under `optimizer/target`.

Source: scenic/projects/baselines/vit.py.
"""

from parity.checkpoints.formats.behaviour import common_behaviour
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.linen import (
    ASSUMED,
    CONSTRAINTS,
    LOOP,
    MAP_HEAD,
    SPELLINGS,
    covers_class_token,
    position_line,
)
from vit_spec import ViTConfig


def allowed_pools(config: ViTConfig) -> tuple[str, ...]:
    """Return the values that head.pool may have.

    Only `classifier` "token" adds a class token; "gap", "map" and "none" do not.
    """
    return ("token",) if config.tokens.class_token else ("mean", "attention", "none")


FORMAT = Format(
    name="scenic",
    description="google-research/scenic: the baseline ViT",
    separator="/",
    tables={
        "": LOOP.replace("| head/", "| output_projection/")
        + MAP_HEAD
        + position_line("Transformer/posembed_input/pos_embedding")
    },
    spellings=SPELLINGS,
    constraints={
        **CONSTRAINTS,
        "positions.kind": ("learned", "none"),
        "positions.covers": covers_class_token,
        "head.pool": allowed_pools,
    },
    assumed=ASSUMED,
    assumed_behaviour=common_behaviour,
)
