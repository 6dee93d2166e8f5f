"""Shared parts of the formats for Google's ViTs: the parameter names of Flax linen, and the choices of Google's code.

Sources: google-research/big_vision:big_vision/models/vit.py, google-research/vision_transformer:vit_jax/models_vit.py,
google-research/scenic:scenic/projects/baselines/vit.py.
"""

from parity.checkpoints.formats.evidence import Fields
from parity.checkpoints.formats.tables import PLAIN_BLOCK
from vit_spec import ViTConfig
from vit_spec.parts import UNGATED_ACTIVATIONS

SPELLINGS = {"qkv": ("query", "key", "value"), "kv": ("key", "value")}

# Blocks stacked on a leading axis, as nn.scan stores them.
STACKED = """
    patch_embed.proj.weight | embedding/kernel | ph pw rgb width
    patch_embed.proj.bias   | embedding/bias   | width
    cls_token               | cls              | 1 1 width

    blocks.norm1.weight     | Transformer/encoderblock/LayerNorm_0/scale                           | block width
    blocks.norm1.bias       | Transformer/encoderblock/LayerNorm_0/bias                            | block width
    blocks.attn.qkv.weight  | Transformer/encoderblock/MultiHeadDotProductAttention_0/{qkv}/kernel | block width head dim
    blocks.attn.qkv.bias    | Transformer/encoderblock/MultiHeadDotProductAttention_0/{qkv}/bias   | block head dim
    blocks.attn.proj.weight | Transformer/encoderblock/MultiHeadDotProductAttention_0/out/kernel   | block head dim width
    blocks.attn.proj.bias   | Transformer/encoderblock/MultiHeadDotProductAttention_0/out/bias     | block width
    blocks.norm2.weight     | Transformer/encoderblock/LayerNorm_1/scale                           | block width
    blocks.norm2.bias       | Transformer/encoderblock/LayerNorm_1/bias                            | block width
    blocks.mlp.fc1.weight   | Transformer/encoderblock/MlpBlock_0/Dense_0/kernel                   | block width ff
    blocks.mlp.fc1.bias     | Transformer/encoderblock/MlpBlock_0/Dense_0/bias                     | block ff
    blocks.mlp.fc2.weight   | Transformer/encoderblock/MlpBlock_0/Dense_1/kernel                   | block ff width
    blocks.mlp.fc2.bias     | Transformer/encoderblock/MlpBlock_0/Dense_1/bias                     | block width

    norm.weight       | Transformer/encoder_norm/scale | width
    norm.bias         | Transformer/encoder_norm/bias  | width
    pre_logits.weight | pre_logits/kernel              | pooled feature
    pre_logits.bias   | pre_logits/bias                | feature
    head.weight       | head/kernel                    | feature label
    head.bias         | head/bias                      | label
"""

# A key for each block, as a loop over blocks stores them.
LOOP = STACKED.replace("encoderblock/", "encoderblock_{block}/").replace("| block ", "| ")

MAP_HEAD = """
    attn_pool.latent         | MAPHead_0/probe                                         | 1 1 width
    attn_pool.q.weight       | MAPHead_0/MultiHeadDotProductAttention_0/query/kernel   | width pool_head pool_dim
    attn_pool.q.bias         | MAPHead_0/MultiHeadDotProductAttention_0/query/bias     | pool_head pool_dim
    attn_pool.kv.weight      | MAPHead_0/MultiHeadDotProductAttention_0/{kv}/kernel    | width pool_head pool_dim
    attn_pool.kv.bias        | MAPHead_0/MultiHeadDotProductAttention_0/{kv}/bias      | pool_head pool_dim
    attn_pool.proj.weight    | MAPHead_0/MultiHeadDotProductAttention_0/out/kernel     | pool_head pool_dim width
    attn_pool.proj.bias      | MAPHead_0/MultiHeadDotProductAttention_0/out/bias       | width
    attn_pool.norm.weight    | MAPHead_0/LayerNorm_0/scale                             | width
    attn_pool.norm.bias      | MAPHead_0/LayerNorm_0/bias                              | width
    attn_pool.mlp.fc1.weight | MAPHead_0/MlpBlock_0/Dense_0/kernel                     | width ff
    attn_pool.mlp.fc1.bias   | MAPHead_0/MlpBlock_0/Dense_0/bias                       | ff
    attn_pool.mlp.fc2.weight | MAPHead_0/MlpBlock_0/Dense_1/kernel                     | ff width
    attn_pool.mlp.fc2.bias   | MAPHead_0/MlpBlock_0/Dense_1/bias                       | width
"""


def position_line(key: str) -> str:
    """Return the line of a table for a position table that is stored under `key`."""
    return f"pos_embed | {key} | 1 token width\n"


def covers_class_token(config: ViTConfig) -> tuple[str, ...]:
    """Return the values that positions.covers may have if positions are added to the class token too."""
    return ("all", "class") if config.tokens.class_token else ("all", "class", "none")


def covers_patches_only(config: ViTConfig) -> tuple[str, ...]:
    """Return the values that positions.covers may have if the class token is prepended after positions are added."""
    return ("none",) if config.tokens.class_token else ("all", "class", "none")


def _allowed_head_dims(config: ViTConfig) -> tuple[int | None, ...]:
    """Return the values that attention.head_dim may have: linen's attention divides the width among the heads."""
    return (None, config.width // config.num_heads)


CONSTRAINTS: Fields = {
    **PLAIN_BLOCK,
    "tokens.patch_bias": True,
    "positions.rotary": "none",
    "attention.head_dim": _allowed_head_dims,
    "attention.qkv_bias": "qkv",
    "attention.proj": True,
    "attention.proj_bias": True,
    "attention.scale": None,
    "attention.value_skip": False,
    "mlp.activation": UNGATED_ACTIVATIONS,
    "norms.after_blocks": True,
    "norms.shared_norm": False,
    "head.bias": True,
}

# flax.linen.gelu is the tanh approximation; eps of flax.linen.LayerNorm is 1e-6; value_range(-1, 1) scales pixels;
# position tables are resized by scipy.ndimage.zoom(order=1) (vit_jax/checkpoint.py interpolate_posembed, resample_posemb).
ASSUMED: Fields = {
    "mlp.activation": "gelu_tanh",
    "norms.eps": 1e-6,
    "pixels.mean": (0.5,),
    "pixels.std": (0.5,),
    "resampling.kernel": "bilinear",
    "resampling.antialias": False,
    "resampling.align_corners": True,
    "resampling.offset": 0.0,
}
