"""The names of the article's model that finds on chest x-rays, with positions that rotate."""

from parity.checkpoints.formats.article import article

TABLE = """
    patch_embed.proj.weight | patch_embedding.patch_embed.weight          | width (rgb ph pw)
    patch_embed.proj.bias   | patch_embedding.patch_embed.bias            | width
    cls_token               | cls_token                                   | 1 1 width
    blocks.norm1.weight     | transformer_blocks.{block}.norm1.weight     | width
    blocks.norm1.bias       | transformer_blocks.{block}.norm1.bias       | width
    blocks.attn.qkv.weight  | transformer_blocks.{block}.attn.qkv.weight  | (qkv head dim) width
    blocks.attn.qkv.bias    | transformer_blocks.{block}.attn.qkv.bias    | (qkv head dim)
    blocks.attn.proj.weight | transformer_blocks.{block}.attn.proj.weight | width (head dim)
    blocks.attn.proj.bias   | transformer_blocks.{block}.attn.proj.bias   | width
    blocks.norm2.weight     | transformer_blocks.{block}.norm2.weight     | width
    blocks.norm2.bias       | transformer_blocks.{block}.norm2.bias       | width
    blocks.mlp.fc1.weight   | transformer_blocks.{block}.mlp.0.weight     | ff width
    blocks.mlp.fc1.bias     | transformer_blocks.{block}.mlp.0.bias       | ff
    blocks.mlp.fc2.weight   | transformer_blocks.{block}.mlp.2.weight     | width ff
    blocks.mlp.fc2.bias     | transformer_blocks.{block}.mlp.2.bias       | width
    head.weight             | mlp_head.weight                             | label feature
    head.bias               | mlp_head.bias                               | label
"""

FORMAT = article(
    "article_xray_rope",
    "the article on chest x-rays: rotary positions",
    {"": TABLE},
    ("in_channels", "image_size", "positions.rotary_base"),
    ignored={r"transformer_blocks\.\d+\.attn\.rope\.[xy]_(cos|sin)": "a table that is computed"},
)
