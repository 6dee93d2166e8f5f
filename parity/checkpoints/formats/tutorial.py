"""The ViT of tutorials that use torch.nn.MultiheadAttention: `transformer.N` with norm1, attn, norm2 and `mlp`.

There are many files with these names; the tests compare with the outputs of one that was trained on CIFAR-10.  No tensor
shows the number of heads.  eps is torch.nn.LayerNorm's default.

Source: pytorch/pytorch 2.13, torch/nn/modules/activation.py (MultiheadAttention) and normalization.py (eps 1e-5).
"""

from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.tables import PLAIN_VIT_CONSTRAINTS, unsupported_head_width
from parity.checkpoints.formats.torch import assumed_behaviour

TABLE = """
    cls_token               | cls_token               | 1 1 width
    patch_embed.proj.weight | patch_embed.proj.weight | width rgb ph pw
    patch_embed.proj.bias   | patch_embed.proj.bias   | width
    pos_embed               | pos_embed.pos_embedding | 1 token width

    blocks.norm1.weight     | transformer.{block}.norm1.weight         | width
    blocks.norm1.bias       | transformer.{block}.norm1.bias           | width
    blocks.attn.qkv.weight  | transformer.{block}.attn.in_proj_weight  | (qkv head dim) width
    blocks.attn.qkv.bias    | transformer.{block}.attn.in_proj_bias    | (qkv head dim)
    blocks.attn.proj.weight | transformer.{block}.attn.out_proj.weight | width (head dim)
    blocks.attn.proj.bias   | transformer.{block}.attn.out_proj.bias   | width
    blocks.norm2.weight     | transformer.{block}.norm2.weight         | width
    blocks.norm2.bias       | transformer.{block}.norm2.bias           | width
    blocks.mlp.fc1.weight   | transformer.{block}.mlp.0.weight         | ff width
    blocks.mlp.fc1.bias     | transformer.{block}.mlp.0.bias           | ff
    blocks.mlp.fc2.weight   | transformer.{block}.mlp.3.weight         | width ff
    blocks.mlp.fc2.bias     | transformer.{block}.mlp.3.bias           | width

    norm.weight | norm.weight | width
    norm.bias   | norm.bias   | width
    head.weight | head.weight | label feature
    head.bias   | head.bias   | label
"""

FORMAT = Format(
    name="tutorial",
    description="ViT of tutorials, with torch.nn.MultiheadAttention",
    separator=".",
    tables={"": TABLE},
    constraints={
        **PLAIN_VIT_CONSTRAINTS,
        "positions.covers": "all",
        "norms.after_blocks": True,
        "norms.after_pool": False,
        "norms.layer_scale": None,
        "head.pool": "token",
        "head.hidden": None,
        "head.bias": True,
    },
    unsupported=lambda config, variant: unsupported_head_width(config),
    assumed={"norms.eps": 1e-5, "mlp.activation": "gelu", "num_heads": None},
    assumed_behaviour=assumed_behaviour,
)
