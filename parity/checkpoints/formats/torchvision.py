"""torchvision's VisionTransformer.  Variant "legacy" has the names of MLPs from before 0.13, which torchvision also reads.

The class has square images, square patches, three channels and a class token.

Source: pytorch/vision 0.28, torchvision/models/vision_transformer.py, where `interpolate_embeddings` has the resampling.
"""

from parity.checkpoints.formats.behaviour import common_behaviour
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.tables import PLAIN_VIT_CONSTRAINTS, replace_keys, unsupported_head_width
from vit_spec import ViTConfig
from vit_spec.models import IMAGENET

TABLE = """
    cls_token               | class_token           | 1 1 width
    patch_embed.proj.weight | conv_proj.weight      | width rgb ph pw
    patch_embed.proj.bias   | conv_proj.bias        | width
    pos_embed               | encoder.pos_embedding | 1 token width

    blocks.norm1.weight     | encoder.layers.encoder_layer_{block}.ln_1.weight                    | width
    blocks.norm1.bias       | encoder.layers.encoder_layer_{block}.ln_1.bias                      | width
    blocks.attn.qkv.weight  | encoder.layers.encoder_layer_{block}.self_attention.in_proj_weight  | (qkv head dim) width
    blocks.attn.qkv.bias    | encoder.layers.encoder_layer_{block}.self_attention.in_proj_bias    | (qkv head dim)
    blocks.attn.proj.weight | encoder.layers.encoder_layer_{block}.self_attention.out_proj.weight | width (head dim)
    blocks.attn.proj.bias   | encoder.layers.encoder_layer_{block}.self_attention.out_proj.bias   | width
    blocks.norm2.weight     | encoder.layers.encoder_layer_{block}.ln_2.weight                    | width
    blocks.norm2.bias       | encoder.layers.encoder_layer_{block}.ln_2.bias                      | width
    blocks.mlp.fc1.weight   | encoder.layers.encoder_layer_{block}.mlp.0.weight                   | ff width
    blocks.mlp.fc1.bias     | encoder.layers.encoder_layer_{block}.mlp.0.bias                     | ff
    blocks.mlp.fc2.weight   | encoder.layers.encoder_layer_{block}.mlp.3.weight                   | width ff
    blocks.mlp.fc2.bias     | encoder.layers.encoder_layer_{block}.mlp.3.bias                     | width

    norm.weight       | encoder.ln.weight       | width
    norm.bias         | encoder.ln.bias         | width
    pre_logits.weight | heads.pre_logits.weight | feature pooled
    pre_logits.bias   | heads.pre_logits.bias   | feature
    head.weight       | heads.head.weight       | label feature
    head.bias         | heads.head.bias         | label
"""


def unsupported(config: ViTConfig, variant: str) -> str:
    """Return the sizes in a config that torchvision's class cannot express; "" if there are none."""
    if len({*config.image_size}) > 1 or len({*config.patch_size}) > 1:
        return f"image_size={config.image_size} with patch_size={config.patch_size}, only squares"
    return unsupported_head_width(config)


FORMAT = Format(
    name="torchvision",
    description="torchvision's VisionTransformer",
    separator=".",
    tables={"mlp": TABLE, "legacy": replace_keys(TABLE, {"mlp.0": "mlp.linear_1", "mlp.3": "mlp.linear_2"})},
    aliases={r"heads\.(?=(weight|bias)$)": "heads.head."},  # of a model with one linear layer in its place
    constraints={
        **PLAIN_VIT_CONSTRAINTS,
        "in_channels": 3,
        "positions.covers": "all",
        "norms.after_blocks": True,
        "norms.after_pool": False,
        "norms.layer_scale": None,
        "head.pool": "token",
        "head.bias": True,
    },
    unsupported=unsupported,
    assumed={
        "norms.eps": 1e-6,
        "mlp.activation": "gelu",
        "pixels.mean": IMAGENET.mean,
        "pixels.std": IMAGENET.std,
        "resampling.kernel": "bicubic",
        "resampling.antialias": False,
        "resampling.align_corners": True,
    },
    assumed_behaviour=common_behaviour,
)
