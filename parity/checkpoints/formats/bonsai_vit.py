"""The ViT of jax-ml/bonsai, in Flax NNX: its state as nested dictionaries, `nnx.to_pure_dict(nnx.state(model))`.

Its GELU is the tanh approximation, as in Google's code; transformers, whose weights it loads, computes the exact one.

Source: jax-ml/bonsai 3628425, bonsai/models/vit/modeling.py.
"""

from parity.checkpoints.formats.behaviour import common_behaviour
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.linen import SPELLINGS
from parity.checkpoints.formats.tables import PLAIN_VIT_CONSTRAINTS, unsupported_head_width
from vit_spec import ViTConfig

TABLE = """
    patch_embed.proj.weight | pos_embeddings/projection/kernel | ph pw rgb width
    patch_embed.proj.bias   | pos_embeddings/projection/bias   | width
    cls_token               | pos_embeddings/cls_token         | 1 1 width
    pos_embed               | pos_embeddings/pos_embeddings    | 1 token width

    blocks.norm1.weight     | layers/{block}/layernorm_before/scale  | width
    blocks.norm1.bias       | layers/{block}/layernorm_before/bias   | width
    blocks.attn.qkv.weight  | layers/{block}/attention/{qkv}/kernel  | width head dim
    blocks.attn.qkv.bias    | layers/{block}/attention/{qkv}/bias    | head dim
    blocks.attn.proj.weight | layers/{block}/attention/out/kernel    | head dim width
    blocks.attn.proj.bias   | layers/{block}/attention/out/bias      | width
    blocks.norm2.weight     | layers/{block}/layernorm_after/scale   | width
    blocks.norm2.bias       | layers/{block}/layernorm_after/bias    | width
    blocks.mlp.fc1.weight   | layers/{block}/linear1/kernel          | width ff
    blocks.mlp.fc1.bias     | layers/{block}/linear1/bias            | ff
    blocks.mlp.fc2.weight   | layers/{block}/linear2/kernel          | ff width
    blocks.mlp.fc2.bias     | layers/{block}/linear2/bias            | width

    norm.weight | ln/scale          | width
    norm.bias   | ln/bias           | width
    head.weight | classifier/kernel | feature label
    head.bias   | classifier/bias   | label
"""


def unsupported(config: ViTConfig, variant: str) -> str:
    """Return the values of a config that the class cannot have together, or a missing classifier; "" if there are none."""
    return unsupported_head_width(config) if config.num_classes else "num_classes=0"


FORMAT = Format(
    name="bonsai-vit",
    description="ViT of jax-ml/bonsai in Flax NNX",
    separator="/",
    tables={"": TABLE},
    spellings=SPELLINGS,
    ignored_keys={r"layers/\d+/attention/rngs/.*": "random number generators of dropout"},
    constraints={
        **PLAIN_VIT_CONSTRAINTS,
        "positions.covers": ("all", "class"),
        "mlp.activation": "gelu_tanh",
        "norms.after_blocks": True,
        "norms.after_pool": False,
        "norms.layer_scale": None,
        "head.pool": "token",
        "head.bias": True,
    },
    unsupported=unsupported,
    assumed={
        "norms.eps": 1e-12,
        # interpolate_posembed calls jax.image.resize(method="bicubic")
        "resampling.kernel": "bicubic",
        "resampling.antialias": True,
        "resampling.align_corners": False,
        "resampling.offset": 0.0,
    },
    assumed_behaviour=common_behaviour,
)
