"""The npz files of google-research/vision_transformer: ViT, AugReg and SAM checkpoints, and what its trainer writes.

vit_jax/models_vit.py, vit_jax/checkpoint.py.  The published files number the parts of a block across their classes, as
Flax did before linen; convert_pre_linen (flax:flax/training/checkpoints.py) turns that into the names of today's modules.
"""

from parity.checkpoints.formats.format import Evidence, Fields, Format
from parity.checkpoints.formats.linen import ALWAYS, ASSUMED, LOOP, SPELLINGS, class_row, positions
from parity.checkpoints.formats.untold import in_words
from vit_spec import InputError, ViTConfig

LINEN = LOOP + positions("Transformer/posembed_input/pos_embedding")

PRE_LINEN = (
    LINEN.replace("MultiHeadDotProductAttention_0", "MultiHeadDotProductAttention_1")
    .replace("LayerNorm_1", "LayerNorm_2")
    .replace("MlpBlock_0", "MlpBlock_3")
)


def settings(evidence: Evidence) -> Fields:
    """Refuse the hybrids.

    Raises:
        InputError: a ResNet lies ahead of the patches.
    """
    if evidence.ignored:
        raise InputError(
            "a ResNet lies ahead of its patches (conv_root, block1, ...): hybrids are not Vision Transformers here"
        )
    return {}


def pools(config: ViTConfig) -> tuple[str, ...]:
    """There is a class token if and only if it is used: `classifier` is token, gap, or one of the unpooled."""
    return ("token", "none") if config.tokens.class_token else ("mean", "none")


FORMAT = Format(
    name="google",
    what="google-research/vision_transformer: ViT and AugReg checkpoints",
    separator="/",
    tables={"pre-linen": PRE_LINEN, "linen": LINEN},
    spellings=SPELLINGS,
    ignored={r"(conv_root|gn_root|block\d+)/.*": "of a ResNet ahead of the patches"},
    always={**ALWAYS, "positions.kind": ("learned", "none"), "positions.covers": class_row, "head.pool": pools},
    assumed={**ASSUMED, "head.pool": "token"},
    settings=settings,
    untold=in_words,
)
