"""The npz files of google-research/vision_transformer: ViT, AugReg and SAM checkpoints, and checkpoints of its trainer.

In the published files, the parts of a block are numbered together, as in Flax before linen: LayerNorm_0,
MultiHeadDotProductAttention_1, LayerNorm_2, MlpBlock_3 (variant "pre-linen").  convert_pre_linen
(flax:flax/training/checkpoints.py) renames them to linen's names, which number each class separately (variant "linen").

Source: vit_jax/models_vit.py, vit_jax/checkpoint.py.
"""

from parity.checkpoints.formats.behaviour import common_behaviour
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.linen import ASSUMED, CONSTRAINTS, LOOP, SPELLINGS, covers_class_token, position_line
from vit_spec import InputError, ViTConfig

LINEN = LOOP + position_line("Transformer/posembed_input/pos_embedding")

PRE_LINEN = (
    LINEN.replace("MultiHeadDotProductAttention_0", "MultiHeadDotProductAttention_1")
    .replace("LayerNorm_1", "LayerNorm_2")
    .replace("MlpBlock_0", "MlpBlock_3")
)


def read_config(evidence: Evidence) -> Fields:
    """Check that the model is not a hybrid, and return no fields.

    Raises:
        InputError: a ResNet precedes the patches.
    """
    if evidence.ignored_arrays:
        raise InputError("a ResNet precedes its patches (conv_root, block1, ...): hybrid models are not supported")
    return {}


def allowed_pools(config: ViTConfig) -> tuple[str, ...]:
    """Return the values that head.pool may have.

    Only `classifier` "token" and "token_unpooled" add a class token; "gap" and "unpooled" do not.
    """
    return ("token", "none") if config.tokens.class_token else ("mean", "none")


FORMAT = Format(
    name="google",
    description="google-research/vision_transformer: ViT and AugReg checkpoints",
    separator="/",
    tables={"pre-linen": PRE_LINEN, "linen": LINEN},
    spellings=SPELLINGS,
    ignored_keys={r"(conv_root|gn_root|block\d+)/.*": "part of a ResNet before the patches"},
    constraints={
        **CONSTRAINTS,
        "positions.kind": ("learned", "none"),
        "positions.covers": covers_class_token,
        "head.pool": allowed_pools,
    },
    assumed={**ASSUMED, "head.pool": "token"},
    read_config=read_config,
    assumed_behaviour=common_behaviour,
)
