"""The state dict of vit_torch: weights are (outputs, inputs), heads are merged, each block has its own keys.

The names are those of timm, DeiT, DINO and MAE.
"""

from collections.abc import Mapping

from parity.checkpoints.formats.behaviour import common_behaviour
from parity.checkpoints.formats.evidence import Evidence
from parity.checkpoints.formats.format import Format

TABLE = """
    patch_embed.proj.weight | patch_embed.proj.weight | width rgb ph pw
    patch_embed.proj.bias   | patch_embed.proj.bias   | width
    patch_embed.norm.weight | patch_embed.norm.weight | width
    patch_embed.norm.bias   | patch_embed.norm.bias   | width
    cls_token               | cls_token               | 1 1 width
    dist_token              | dist_token              | 1 1 width
    reg_token               | reg_token               | 1 register width
    pos_embed               | pos_embed               | 1 token width
    pos_embed_y             | pos_embed_y             | 1 row width
    pos_embed_x             | pos_embed_x             | 1 column width
    rel_pos.table           | rel_pos.table           | offset head
    rel_pos.fc1.weight      | rel_pos.fc1.weight      | offset_ff yx
    rel_pos.fc1.bias        | rel_pos.fc1.bias        | offset_ff
    rel_pos.fc2.weight      | rel_pos.fc2.weight      | head offset_ff
    rel_pos.fc2.bias        | rel_pos.fc2.bias        | head
    norm_pre.weight         | norm_pre.weight         | width
    norm_pre.bias           | norm_pre.bias           | width

    blocks.norm1.weight       | blocks.{block}.norm1.weight       | width
    blocks.norm1.bias         | blocks.{block}.norm1.bias         | width
    blocks.attn.qkv.weight    | blocks.{block}.attn.qkv.weight    | (qkv head dim) width
    blocks.attn.qkv.bias      | blocks.{block}.attn.qkv.bias      | (qkv head dim)
    blocks.attn.q_bias        | blocks.{block}.attn.q_bias        | (head dim)
    blocks.attn.v_bias        | blocks.{block}.attn.v_bias        | (head dim)
    blocks.attn.q_norm.weight | blocks.{block}.attn.q_norm.weight | dim
    blocks.attn.q_norm.bias   | blocks.{block}.attn.q_norm.bias   | dim
    blocks.attn.k_norm.weight | blocks.{block}.attn.k_norm.weight | dim
    blocks.attn.k_norm.bias   | blocks.{block}.attn.k_norm.bias   | dim
    blocks.attn.freqs         | blocks.{block}.attn.freqs         | xy head pair
    blocks.attn.rel_pos.table      | blocks.{block}.attn.rel_pos.table      | offset head
    blocks.attn.rel_pos.fc1.weight | blocks.{block}.attn.rel_pos.fc1.weight | offset_ff yx
    blocks.attn.rel_pos.fc1.bias   | blocks.{block}.attn.rel_pos.fc1.bias   | offset_ff
    blocks.attn.rel_pos.fc2.weight | blocks.{block}.attn.rel_pos.fc2.weight | head offset_ff
    blocks.attn.rel_pos.fc2.bias   | blocks.{block}.attn.rel_pos.fc2.bias   | head
    blocks.attn.norm.weight   | blocks.{block}.attn.norm.weight   | (head dim)
    blocks.attn.norm.bias     | blocks.{block}.attn.norm.bias     | (head dim)
    blocks.attn.proj.weight   | blocks.{block}.attn.proj.weight   | width (head dim)
    blocks.attn.proj.bias     | blocks.{block}.attn.proj.bias     | width
    blocks.ls1.gamma          | blocks.{block}.ls1.gamma          | width
    blocks.norm2.weight       | blocks.{block}.norm2.weight       | width
    blocks.norm2.bias         | blocks.{block}.norm2.bias         | width
    blocks.mlp.fc1.weight     | blocks.{block}.mlp.fc1.weight     | ff width
    blocks.mlp.fc1.weight     | blocks.{block}.mlp.fc1.weight     | (glu ff) width
    blocks.mlp.fc1.bias       | blocks.{block}.mlp.fc1.bias       | ff
    blocks.mlp.fc1.bias       | blocks.{block}.mlp.fc1.bias       | (glu ff)
    blocks.mlp.norm.weight    | blocks.{block}.mlp.norm.weight    | ff
    blocks.mlp.norm.bias      | blocks.{block}.mlp.norm.bias      | ff
    blocks.mlp.fc2.weight     | blocks.{block}.mlp.fc2.weight     | width ff
    blocks.mlp.fc2.bias       | blocks.{block}.mlp.fc2.bias       | width
    blocks.ls2.gamma          | blocks.{block}.ls2.gamma          | width

    norm.weight               | norm.weight               | width
    norm.bias                 | norm.bias                 | width
    attn_pool.latent          | attn_pool.latent          | 1 1 width
    attn_pool.q.weight        | attn_pool.q.weight        | (pool_head pool_dim) width
    attn_pool.q.bias          | attn_pool.q.bias          | (pool_head pool_dim)
    attn_pool.kv.weight       | attn_pool.kv.weight       | (kv pool_head pool_dim) width
    attn_pool.kv.bias         | attn_pool.kv.bias         | (kv pool_head pool_dim)
    attn_pool.proj.weight     | attn_pool.proj.weight     | width (pool_head pool_dim)
    attn_pool.proj.bias       | attn_pool.proj.bias       | width
    attn_pool.norm.weight     | attn_pool.norm.weight     | width
    attn_pool.norm.bias       | attn_pool.norm.bias       | width
    attn_pool.mlp.fc1.weight  | attn_pool.mlp.fc1.weight  | ff width
    attn_pool.mlp.fc1.weight  | attn_pool.mlp.fc1.weight  | (glu ff) width
    attn_pool.mlp.fc1.bias    | attn_pool.mlp.fc1.bias    | ff
    attn_pool.mlp.fc1.bias    | attn_pool.mlp.fc1.bias    | (glu ff)
    attn_pool.mlp.norm.weight | attn_pool.mlp.norm.weight | ff
    attn_pool.mlp.norm.bias   | attn_pool.mlp.norm.bias   | ff
    attn_pool.mlp.fc2.weight  | attn_pool.mlp.fc2.weight  | width ff
    attn_pool.mlp.fc2.bias    | attn_pool.mlp.fc2.bias    | width
    fc_norm.weight            | fc_norm.weight            | pooled
    fc_norm.bias              | fc_norm.bias              | pooled
    pre_logits.weight         | pre_logits.weight         | feature pooled
    pre_logits.bias           | pre_logits.bias           | feature
    head.weight               | head.weight               | label feature
    head.bias                 | head.bias                 | label
    head_dist.weight          | head_dist.weight          | label feature
    head_dist.bias            | head_dist.bias            | label
"""


def assumed_behaviour(evidence: Evidence) -> Mapping[str, str]:
    """Return the assumptions about what no tensor shows, and in which libraries with these keys differ.

    Queries, keys and values are one array, and other code with these names may interleave them in it.
    """
    return {**common_behaviour(evidence), "queries, keys and values": "all queries, then all keys, then all values"}


FORMAT = Format(
    name="torch",
    description="state_dict of vit_torch, with timm's names",
    separator=".",
    tables={"": TABLE},
    assumed_behaviour=assumed_behaviour,
)
