"""The parameter names of the article with learned positions that start as sinusoids.

Attention and MLP of a block share one norm.
"""

from parity.checkpoints.formats.article import article_format
from parity.checkpoints.formats.behaviour import common_behaviour

TABLE = """
    patch_embed.proj.weight | patchemb.projection.0.weight         | width rgb ph pw
    patch_embed.proj.bias   | patchemb.projection.0.bias           | width
    cls_token               | patchemb.cls_token                   | 1 1 width
    pos_embed               | patchemb.pos_embed                   | token width
    blocks.norm1.weight     | attention.{block}.ll.weight          | width
    blocks.norm1.bias       | attention.{block}.ll.bias            | width
    blocks.attn.qkv.weight  | attention.{block}.att.{qkv}.weight   | (head dim) width
    blocks.attn.qkv.bias    | attention.{block}.att.{qkv}.bias     | (head dim)
    blocks.mlp.fc1.weight   | attention.{block}.ff.ff.0.weight     | ff width
    blocks.mlp.fc1.bias     | attention.{block}.ff.ff.0.bias       | ff
    blocks.mlp.fc2.weight   | attention.{block}.ff.ff.1.weight     | width ff
    blocks.mlp.fc2.bias     | attention.{block}.ff.ff.1.bias       | width
    head.weight             | ff.weight                            | label feature
    head.bias               | ff.bias                              | label
"""

FORMAT = article_format(
    "article_sincos",
    "the article with positions that start as sinusoids",
    {"": TABLE},
    ("attention.scale",),
    assumed_behaviour=common_behaviour,
    spellings={"qkv": ("query", "key", "value")},
)
