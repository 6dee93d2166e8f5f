"""The parameters of vit_jax: weights are (inputs, outputs), heads are an axis, blocks are stacked on a leading axis."""

from parity.checkpoints.formats.behaviour import common_behaviour
from parity.checkpoints.formats.format import Format

TABLE = """
    patch_embed.proj.weight | patch_embed/proj/kernel | ph pw rgb width
    patch_embed.proj.bias   | patch_embed/proj/bias   | width
    patch_embed.norm.weight | patch_embed/norm/scale  | width
    patch_embed.norm.bias   | patch_embed/norm/bias   | width
    cls_token               | cls_token               | 1 1 width
    dist_token              | dist_token              | 1 1 width
    reg_token               | reg_token               | 1 register width
    pos_embed               | pos_embed               | 1 token width
    pos_embed_y             | pos_embed_y             | 1 row width
    pos_embed_x             | pos_embed_x             | 1 column width
    rel_pos.table           | rel_pos/table           | offset head
    rel_pos.fc1.weight      | rel_pos/fc1/kernel      | yx offset_ff
    rel_pos.fc1.bias        | rel_pos/fc1/bias        | offset_ff
    rel_pos.fc2.weight      | rel_pos/fc2/kernel      | offset_ff head
    rel_pos.fc2.bias        | rel_pos/fc2/bias        | head
    norm_pre.weight         | norm_pre/scale          | width
    norm_pre.bias           | norm_pre/bias           | width

    blocks.norm1.weight       | blocks/norm1/scale       | block width
    blocks.norm1.bias         | blocks/norm1/bias        | block width
    blocks.attn.qkv.weight    | blocks/attn/qkv/kernel   | block width qkv head dim
    blocks.attn.qkv.bias      | blocks/attn/qkv/bias     | block qkv head dim
    blocks.attn.q_bias        | blocks/attn/q_bias       | block head dim
    blocks.attn.v_bias        | blocks/attn/v_bias       | block head dim
    blocks.attn.q_norm.weight | blocks/attn/q_norm/scale | block dim
    blocks.attn.q_norm.bias   | blocks/attn/q_norm/bias  | block dim
    blocks.attn.k_norm.weight | blocks/attn/k_norm/scale | block dim
    blocks.attn.k_norm.bias   | blocks/attn/k_norm/bias  | block dim
    blocks.attn.freqs         | blocks/attn/freqs        | block xy head pair
    blocks.attn.rel_pos.table      | blocks/attn/rel_pos/table      | block offset head
    blocks.attn.rel_pos.fc1.weight | blocks/attn/rel_pos/fc1/kernel | block yx offset_ff
    blocks.attn.rel_pos.fc1.bias   | blocks/attn/rel_pos/fc1/bias   | block offset_ff
    blocks.attn.rel_pos.fc2.weight | blocks/attn/rel_pos/fc2/kernel | block offset_ff head
    blocks.attn.rel_pos.fc2.bias   | blocks/attn/rel_pos/fc2/bias   | block head
    blocks.attn.norm.weight   | blocks/attn/norm/scale   | block head dim
    blocks.attn.norm.bias     | blocks/attn/norm/bias    | block head dim
    blocks.attn.proj.weight   | blocks/attn/proj/kernel  | block head dim width
    blocks.attn.proj.bias     | blocks/attn/proj/bias    | block width
    blocks.ls1.gamma          | blocks/ls1/gamma         | block width
    blocks.norm2.weight       | blocks/norm2/scale       | block width
    blocks.norm2.bias         | blocks/norm2/bias        | block width
    blocks.mlp.fc1.weight     | blocks/mlp/fc1/kernel    | block width ff
    blocks.mlp.fc1.weight     | blocks/mlp/fc1/kernel    | block width glu ff
    blocks.mlp.fc1.bias       | blocks/mlp/fc1/bias      | block ff
    blocks.mlp.fc1.bias       | blocks/mlp/fc1/bias      | block glu ff
    blocks.mlp.norm.weight    | blocks/mlp/norm/scale    | block ff
    blocks.mlp.norm.bias      | blocks/mlp/norm/bias     | block ff
    blocks.mlp.fc2.weight     | blocks/mlp/fc2/kernel    | block ff width
    blocks.mlp.fc2.bias       | blocks/mlp/fc2/bias      | block width
    blocks.ls2.gamma          | blocks/ls2/gamma         | block width

    norm.weight               | norm/scale               | width
    norm.bias                 | norm/bias                | width
    attn_pool.latent          | attn_pool/latent         | 1 1 width
    attn_pool.q.weight        | attn_pool/q/kernel       | width pool_head pool_dim
    attn_pool.q.bias          | attn_pool/q/bias         | pool_head pool_dim
    attn_pool.kv.weight       | attn_pool/kv/kernel      | width kv pool_head pool_dim
    attn_pool.kv.bias         | attn_pool/kv/bias        | kv pool_head pool_dim
    attn_pool.proj.weight     | attn_pool/proj/kernel    | pool_head pool_dim width
    attn_pool.proj.bias       | attn_pool/proj/bias      | width
    attn_pool.norm.weight     | attn_pool/norm/scale     | width
    attn_pool.norm.bias       | attn_pool/norm/bias      | width
    attn_pool.mlp.fc1.weight  | attn_pool/mlp/fc1/kernel | width ff
    attn_pool.mlp.fc1.weight  | attn_pool/mlp/fc1/kernel | width glu ff
    attn_pool.mlp.fc1.bias    | attn_pool/mlp/fc1/bias   | ff
    attn_pool.mlp.fc1.bias    | attn_pool/mlp/fc1/bias   | glu ff
    attn_pool.mlp.norm.weight | attn_pool/mlp/norm/scale | ff
    attn_pool.mlp.norm.bias   | attn_pool/mlp/norm/bias  | ff
    attn_pool.mlp.fc2.weight  | attn_pool/mlp/fc2/kernel | ff width
    attn_pool.mlp.fc2.bias    | attn_pool/mlp/fc2/bias   | width
    fc_norm.weight            | fc_norm/scale            | pooled
    fc_norm.bias              | fc_norm/bias             | pooled
    pre_logits.weight         | pre_logits/kernel        | pooled feature
    pre_logits.bias           | pre_logits/bias          | feature
    head.weight               | head/kernel              | feature label
    head.bias                 | head/bias                | label
    head_dist.weight          | head_dist/kernel         | feature label
    head_dist.bias            | head_dist/bias           | label
"""

FORMAT = Format(
    name="jax",
    description="parameters of vit_jax, a Flax linen tree",
    separator="/",
    tables={"": TABLE},
    ignored_keys={r"to_nnx__rngs/.*": "random number generators of vit_jax.nnx"},
    assumed_behaviour=common_behaviour,
)
