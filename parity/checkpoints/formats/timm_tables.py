"""Where timm's classes store their parameters: a table for each set of keys, and the set that the class of a config has.

Sources: huggingface/pytorch-image-models 1.0.31, timm/models/vision_transformer.py (VisionTransformer, Block,
ParallelScalingBlock), eva.py (Eva, EvaAttention, EvaBlock), beit.py (Beit), vision_transformer_relpos.py
(VisionTransformerRelPos), timm/layers/attention.py (AttentionRope), pos_embed_rel.py (RelPosMlp, RelPosBias) and mlp.py
(Mlp, GluMlp, SwiGLU).
"""

from collections.abc import Mapping
from typing import Any

from parity.checkpoints.formats import torch
from parity.checkpoints.formats.tables import replace_keys, ungated
from vit_spec import ViTConfig


def _join(*tables: str) -> str:
    """Return one table with the lines of several."""
    return "\n".join(tables)


_FACTORS = ("pos_embed_",)  # beginnings of the names of factorized positions
RELATIVE = ("rel_pos", "blocks.attn.rel_pos")
_POOL_MLP = ("attn_pool.mlp.fc1", "attn_pool.mlp.norm", "attn_pool.mlp.fc2")
_POOL_MLP_LINES = "\n".join(line for line in ungated(torch.TABLE).splitlines() if line.strip().startswith(_POOL_MLP))
_VIT = replace_keys(
    torch.TABLE,
    {},
    (*_FACTORS, "pre_logits", "blocks.attn.q_bias", "blocks.attn.v_bias", "blocks.attn.freqs", *RELATIVE, *_POOL_MLP),
)
_PACKED_EVA = replace_keys(
    torch.TABLE,
    {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"},
    (
        "pos_embed_",
        "pre_logits",
        "dist_token",
        "head_dist",
        "patch_embed.norm",
        "blocks.attn.freqs",
        *RELATIVE,
        *_POOL_MLP,
    ),
)
_PACKED_EVA = _join(_PACKED_EVA, "blocks.attn.freqs | rope.freqs | xy block head pair", _POOL_MLP_LINES)
_AROUND_BLOCKS = _join(replace_keys(_VIT, {}, ("blocks.",)), _POOL_MLP_LINES)
_GATE = """
    blocks.mlp.fc1.weight | blocks.{block}.mlp.{glu}.weight | ff width
    blocks.mlp.fc1.bias   | blocks.{block}.mlp.{glu}.bias   | ff
"""
_SPLIT_QKV = """
    blocks.attn.qkv.weight | blocks.{block}.attn.{qkv}_proj.weight | (head dim) width
    blocks.attn.qkv.bias   | blocks.{block}.attn.{qkv}_proj.bias   | (head dim)
    blocks.attn.q_bias     | blocks.{block}.attn.q_proj.bias       | (head dim)
    blocks.attn.v_bias     | blocks.{block}.attn.v_proj.bias       | (head dim)
"""
# `Beit` and `VisionTransformerRelPos`: a table or an MLP, in each block or shared by all.
_BEIT = """
    rel_pos.table             | rel_pos_bias.relative_position_bias_table        | offset head
    blocks.attn.rel_pos.table | blocks.{block}.attn.relative_position_bias_table | offset head
"""
_REL_POS = "\n".join(
    f"""
    {name}.table      | {key}.relative_position_bias_table | offset head
    {name}.fc1.weight | {key}.mlp.fc1.weight               | offset_ff yx
    {name}.fc1.bias   | {key}.mlp.fc1.bias                 | offset_ff
    {name}.fc2.weight | {key}.mlp.fc2.weight               | head offset_ff
    {name}.fc2.bias   | {key}.mlp.fc2.bias                 | head
"""
    for name, key in {"rel_pos": "shared_rel_pos", "blocks.attn.rel_pos": "blocks.{block}.attn.rel_pos"}.items()
)
_QKV = ("blocks.attn.qkv.weight", "blocks.attn.qkv.bias", "blocks.attn.q_bias", "blocks.attn.v_bias")
# One layer computes the hidden units of the MLP, the queries, the keys and the values.
_PARALLEL = """
    blocks.norm1.weight       | blocks.{block}.in_norm.weight       | width
    blocks.norm1.bias         | blocks.{block}.in_norm.bias         | width
    blocks.attn.qkv.weight    | blocks.{block}.in_proj.weight       | [~ff (qkv head dim)] width
    blocks.attn.q_norm.weight | blocks.{block}.q_norm.weight        | dim
    blocks.attn.q_norm.bias   | blocks.{block}.q_norm.bias          | dim
    blocks.attn.k_norm.weight | blocks.{block}.k_norm.weight        | dim
    blocks.attn.k_norm.bias   | blocks.{block}.k_norm.bias          | dim
    blocks.attn.proj.weight   | blocks.{block}.attn_out_proj.weight | width (head dim)
    blocks.attn.proj.bias     | blocks.{block}.attn_out_proj.bias   | width
    blocks.ls1.gamma          | blocks.{block}.ls.gamma             | width
    blocks.mlp.fc1.weight     | blocks.{block}.in_proj.weight       | [ff ~(qkv head dim)] width
    blocks.mlp.fc2.weight     | blocks.{block}.mlp_out_proj.weight  | width ff
    blocks.mlp.fc2.bias       | blocks.{block}.mlp_out_proj.bias    | width
"""
_PARALLEL_BIAS = """
    blocks.attn.qkv.bias | blocks.{block}.in_proj.bias | [~ff (qkv head dim)]
    blocks.mlp.fc1.bias  | blocks.{block}.in_proj.bias | [ff ~(qkv head dim)]
"""
_PARALLEL_MLP_BIAS = "blocks.mlp.fc1.bias | blocks.{block}.mlp_bias | ff"
_HIDDEN = """
    pre_logits.weight | pre_logits.fc.weight | feature pooled
    pre_logits.bias   | pre_logits.fc.bias   | feature
"""

# The first is that of `VisionTransformer`.  "legacy" has the hidden layer of timm before 0.6.  Variants differ in the
# arrays of a gated MLP (one or two), and in those of queries, keys and values (one or three).
TABLES = {
    "vit": _join(_VIT, _POOL_MLP_LINES, _REL_POS),
    "eva": _join(ungated(_PACKED_EVA), _GATE, _BEIT),
    "legacy": _join(_VIT, _POOL_MLP_LINES, _HIDDEN),
    "vit-split-gate": _join(ungated(_VIT), _GATE, _POOL_MLP_LINES),
    "eva-packed-gate": _PACKED_EVA,
    "eva-split-qkv": _join(replace_keys(ungated(_PACKED_EVA), {}, _QKV), _SPLIT_QKV, _GATE),
    "eva-split-qkv-packed-gate": _join(replace_keys(_PACKED_EVA, {}, _QKV), _SPLIT_QKV),
    "parallel": _join(_AROUND_BLOCKS, _PARALLEL, _PARALLEL_BIAS),
    "parallel-no-qkv-bias": _join(_AROUND_BLOCKS, _PARALLEL, _PARALLEL_MLP_BIAS),
}


# What `Beit` and `VisionTransformerRelPos` have in common: the values of each field that they support.
RELATIVE_CONSTRAINTS: Mapping[str, tuple[Any, ...]] = {
    "tokens.registers": (0,),
    "tokens.distillation": (False,),
    "tokens.patch_bias": (True,),
    "tokens.pad": (False,),
    "positions.rotary": ("none",),
    "attention.proj_bias": (True,),
    "attention.out_norm": (False,),
    "mlp.bias": (True,),
    "norms.kind": ("layer",),
    "norms.after_patches": (False,),
    "norms.mlp_layer_scale": (True,),
    "head.pool": ("token", "mean", "none"),
    "head.pool_prefix": (False,),
}


def is_eva(c: ViTConfig) -> bool:
    """Return whether a config is a model of timm's classes `Eva` or `Beit`, and not of `VisionTransformer`."""
    return c.positions.rotary != "none" or c.attention.qkv_bias == "qv" or not c.norms.mlp_layer_scale


def default_variant(c: ViTConfig) -> str:
    """Return the variant that timm's published architectures with such blocks have."""
    gated = c.mlp.is_gated
    if c.norms.order == "parallel":
        return "parallel" if c.attention.qkv_bias == "qkv" else "parallel-no-qkv-bias"
    if not is_eva(c):
        return "vit-split-gate" if gated and not c.mlp.bias else "vit"
    if c.positions.relative != "none":  # BEiT
        return "eva"
    if c.positions.rotary == "eva" and c.attention.qkv_bias == "qv":  # EVA-02
        return "eva-split-qkv" if c.mlp.norm else "eva-packed-gate" if gated else "eva"
    if gated and not c.mlp.norm and c.norms.order == "res_post":  # `EvaBlockPostNorm`
        return "eva-packed-gate"
    return "eva-split-qkv-packed-gate" if not c.norms.mlp_layer_scale else "eva"
