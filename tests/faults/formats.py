"""Mistakes in the layouts of the two formats that convert weights between the twins."""

from functools import partial

from tests.faults.planting import Fault

_torch = partial(Fault, file="parity/checkpoints/formats/torch.py")
_jax = partial(Fault, file="parity/checkpoints/formats/jax.py")

FAULTS = [
    _torch(
        name="rows of qkv as (head qkv dim)",
        old="attn.qkv.weight    | (qkv head dim) width",
        new="attn.qkv.weight    | (head qkv dim) width",
        part=r"blocks\.0\.attn\.qkv",
    ),
    _torch(
        name="biases of qkv as (qkv dim head)",
        old="attn.qkv.bias      | (qkv head dim)",
        new="attn.qkv.bias      | (qkv dim head)",
        part=r"blocks\.0\.attn\.qkv",
    ),
    _torch(
        name="columns of proj as (dim head)",
        old="attn.proj.weight   | width (head dim)",
        new="attn.proj.weight   | width (dim head)",
        part=r"blocks\.0\.attn\.proj",
        cause=r"columns of proj .*\(dim head\)",
    ),
    _torch(
        name="square proj transposed",
        old="attn.proj.weight   | width (head dim)",
        new="attn.proj.weight   | (head dim) width",
        part=r"blocks\.0\.attn\.proj",
        cause=r"attn\.proj lies as \(inputs outputs\)",
    ),
    _torch(
        name="rows and columns of a patch swapped",
        old="patch_embed.proj.weight | width rgb ph pw",
        new="patch_embed.proj.weight | width rgb pw ph",
        part=r"patch_embed\.proj",
        cause=r"pixels of a patch .*\(rgb pw ph\)",
    ),
    _torch(
        name="gates and values interleaved",
        old="blocks.{block}.mlp.fc1.weight     | (glu ff) width",
        new="blocks.{block}.mlp.fc1.weight     | (ff glu) width",
        model="dinov2_g14",
        part=r"blocks\.0\.mlp\.fc1",
    ),
    _torch(
        name="rows of the pooling's kv as (head kv dim)",
        old="attn_pool.kv.weight       | (kv pool_head pool_dim) width",
        new="attn_pool.kv.weight       | (pool_head kv pool_dim) width",
        model="siglip_b16",
        part=r"attn_pool\.kv",
    ),
    _torch(
        name="class and distillation tokens swapped",
        old="cls_token               | cls_token               | 1 1 width\n"
        "    dist_token              | dist_token              |",
        new="cls_token               | dist_token              | 1 1 width\n"
        "    dist_token              | cls_token               |",
        model="deit_s16_distilled",
        part="tokens",
        cause="class and distillation tokens are swapped",
    ),
    _jax(
        name="rows and columns of a patch swapped",
        old="ph pw rgb width",
        new="pw ph rgb width",
        part=r"patch_embed\.proj",
        cause=r"pixels of a patch .*\(rgb pw ph\)",
    ),
    _jax(
        name="norm's scale and bias swapped",
        old="blocks/norm2/scale       | block width\n    blocks.norm2.bias         | blocks/norm2/bias  ",
        new="blocks/norm2/bias        | block width\n    blocks.norm2.bias         | blocks/norm2/scale ",
        part=r"blocks\.0\.norm2",
    ),
    _jax(
        name="norms of queries and keys swapped",
        old="blocks/attn/q_norm/scale | block dim\n"
        "    blocks.attn.q_norm.bias   | blocks/attn/q_norm/bias  | block dim\n"
        "    blocks.attn.k_norm.weight | blocks/attn/k_norm/scale | block dim",
        new="blocks/attn/k_norm/scale | block dim\n"
        "    blocks.attn.q_norm.bias   | blocks/attn/q_norm/bias  | block dim\n"
        "    blocks.attn.k_norm.weight | blocks/attn/q_norm/scale | block dim",
        model="vit_22b14",
        part=r"blocks\.0\.attn\.q_norm",
    ),
]
