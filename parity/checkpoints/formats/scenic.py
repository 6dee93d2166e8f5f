"""Checkpoints of the ViT of google-research/scenic: scenic/projects/baselines/vit.py.

A TrainState, with the weights under `params` (older ones: `optimizer/target`), in msgpack.
"""

from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.linen import ALWAYS, ASSUMED, LOOP, MAP_HEAD, SPELLINGS, class_row, positions
from parity.checkpoints.formats.untold import in_words
from vit_spec import ViTConfig


def pools(config: ViTConfig) -> tuple[str, ...]:
    """`classifier` is token with a class token, and gap, map or none without."""
    return ("token",) if config.tokens.class_token else ("mean", "attention", "none")


FORMAT = Format(
    name="scenic",
    what="google-research/scenic: the baseline ViT",
    separator="/",
    tables={
        "": LOOP.replace("| head/", "| output_projection/")
        + MAP_HEAD
        + positions("Transformer/posembed_input/pos_embedding")
    },
    spellings=SPELLINGS,
    always={**ALWAYS, "positions.kind": ("learned", "none"), "positions.covers": class_row, "head.pool": pools},
    assumed=ASSUMED,
    untold=in_words,
)
