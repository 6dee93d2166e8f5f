"""The declaration of all parameters of a ViT.

A row describes one parameter: an array with named axes, whose lengths `config.sizes` gives.  Names are those of the PyTorch
twin (and of timm) without block numbers: the `block` axis replaces them.  Shapes, parameter counts, FLOPs, initialisation,
weight decay, sharding and the contents of a checkpoint are all derived from these rows.

The `if` statements are in the same order as in the models: see `vit_jax/model.py` and `vit_torch/model.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from vit_spec.config import ViTConfig, check_config
from vit_spec.initialisation import ONES, ZEROS, Law, lecun_normal, xavier_uniform
from vit_spec.positions import TABLES

MLP_BIAS = Law("normal", (1e-6,))  # as in google-research/vision_transformer, vit_jax/models_vit.py


@dataclass(frozen=True)
class Row:
    """The description of one parameter.

    Attributes:
        name: its dotted name, e.g. "blocks.attn.qkv.weight".
        axes: its named axes, e.g. ("block", "qkv", "head", "dim", "width"); in a weight, the output axes come before the
            input axes.
        shape: the lengths of the axes.
        law: its initial distribution; None if its initial value is `vit_spec.position_table`.
        decays: whether weight decay applies (to matrices; not to norms, biases, tokens, position tables and layer scales).
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    law: Law | None
    decays: bool

    @property
    def size(self) -> int:
        """Number of entries."""
        return prod(self.shape)


def rows(config: ViTConfig) -> dict[str, Row]:
    """Return all parameters of the model by name, in the order in which the forward pass of a pre-norm model uses them."""
    check_config(config)  # before the cache, which cannot look up a value without a hash
    return _rows_by_name(config)


@lru_cache(maxsize=128)
def _rows_by_name(config: ViTConfig) -> dict[str, Row]:
    by_name: dict[str, Row] = {}
    for name, axes, law, decays in _rows(config):
        axis_names = tuple(axes.split())
        by_name[name] = Row(name, axis_names, tuple(config.sizes[axis] for axis in axis_names), law, decays)
    return by_name


Declaration = tuple[str, str, Law | None, bool]  # name, axes, law, decays


def _rows(c: ViTConfig) -> Iterator[Declaration]:
    width, inner = c.width, c.num_heads * c.head_dim
    token_law = Law.parse(c.tokens.init, "tokens.init")

    yield "patch_embed.proj.weight", "width rgb ph pw", lecun_normal(c.in_channels * prod(c.patch_size)), True
    if c.tokens.patch_bias:
        yield "patch_embed.proj.bias", "width", ZEROS, False
    if c.norms.after_patches:
        yield from _norm_rows("patch_embed.norm", "width", c)
    if c.tokens.class_token:
        yield "cls_token", "width", token_law, False
    if c.tokens.distillation:
        yield "dist_token", "width", token_law, False
    if c.tokens.registers:
        yield "reg_token", "register width", token_law, False
    if c.positions.kind == "learned":
        law = None if c.positions.table in TABLES else Law.parse(c.positions.table, "positions.table")
        if c.positions.factorized:
            yield "pos_embed_y", "row width", law, False
            yield "pos_embed_x", "column width", law, False
        else:
            yield "pos_embed", "token width", law, False
    if c.positions.relative_shared:
        yield from _relative_rows("rel_pos", "", c)
    if c.norms.before_blocks:
        yield from _norm_rows("norm_pre", "width", c)

    yield from _norm_rows("blocks.norm1", "block width", c)
    yield "blocks.attn.qkv.weight", "block qkv head dim width", xavier_uniform(width, inner), True
    if c.attention.qkv_bias == "qkv":
        yield "blocks.attn.qkv.bias", "block qkv head dim", ZEROS, False
    if c.attention.qkv_bias == "qv":
        yield "blocks.attn.q_bias", "block head dim", ZEROS, False
        yield "blocks.attn.v_bias", "block head dim", ZEROS, False
    if c.attention.qk_norm:
        yield from _norm_rows("blocks.attn.q_norm", "block dim", c)
        yield from _norm_rows("blocks.attn.k_norm", "block dim", c)
    if c.positions.rotary == "mixed":
        yield "blocks.attn.freqs", "block xy head pair", Law("rotary", (c.positions.rotary_base,)), False
    if c.positions.relative != "none" and not c.positions.relative_shared:
        yield from _relative_rows("blocks.attn.rel_pos", "block ", c)
    if c.attention.out_norm:
        yield from _norm_rows("blocks.attn.norm", "block head dim", c)
    if c.attention.proj:
        yield "blocks.attn.proj.weight", "block width head dim", xavier_uniform(inner, width), True
        if c.attention.proj_bias:
            yield "blocks.attn.proj.bias", "block width", ZEROS, False
    scale_law = None if c.norms.layer_scale is None else Law("constant", (c.norms.layer_scale,))
    if scale_law is not None:
        yield "blocks.ls1.gamma", "block width", scale_law, False
    if c.norms.has_second:
        yield from _norm_rows("blocks.norm2", "block width", c)
    yield from _mlp_rows("blocks.mlp", "block ", c)
    if c.norms.has_second_scale:
        yield "blocks.ls2.gamma", "block width", scale_law, False

    if c.norms.after_blocks:
        yield from _norm_rows("norm", "width", c)
    if c.head.pool == "attention":
        inner = c.pool_heads * c.pool_head_dim
        yield "attn_pool.latent", "width", xavier_uniform(1, width), False
        yield "attn_pool.q.weight", "pool_head pool_dim width", xavier_uniform(width, inner), True
        yield "attn_pool.q.bias", "pool_head pool_dim", ZEROS, False
        yield "attn_pool.kv.weight", "kv pool_head pool_dim width", xavier_uniform(width, inner), True
        yield "attn_pool.kv.bias", "kv pool_head pool_dim", ZEROS, False
        yield "attn_pool.proj.weight", "width pool_head pool_dim", xavier_uniform(inner, width), True
        yield "attn_pool.proj.bias", "width", ZEROS, False
        yield from _norm_rows("attn_pool.norm", "width", c)
        yield from _mlp_rows("attn_pool.mlp", "", c)
    if c.norms.after_pool:
        yield from _norm_rows("fc_norm", "pooled", c)
    if c.head.hidden is not None:
        yield "pre_logits.weight", "feature pooled", lecun_normal(c.sizes["pooled"]), True
        yield "pre_logits.bias", "feature", ZEROS, False
    if c.num_classes:
        for head in ("head", "head_dist") if c.tokens.distillation else ("head",):
            yield f"{head}.weight", "label feature", Law.parse(c.head.init, "head.init"), True
            if c.head.bias:
                yield f"{head}.bias", "label", ZEROS, False


def _norm_rows(name: str, axes: str, c: ViTConfig) -> Iterator[Declaration]:
    yield f"{name}.weight", axes, ONES, False
    if c.norms.bias:
        yield f"{name}.bias", axes, ZEROS, False


def _relative_rows(name: str, block: str, c: ViTConfig) -> Iterator[Declaration]:
    if c.positions.relative_dim is None:
        yield f"{name}.table", f"{block}offset head", ZEROS, False
    else:
        yield f"{name}.fc1.weight", f"{block}offset_ff yx", xavier_uniform(2, c.positions.relative_dim), True
        yield f"{name}.fc1.bias", f"{block}offset_ff", ZEROS, False
        yield f"{name}.fc2.weight", f"{block}head offset_ff", xavier_uniform(c.positions.relative_dim, c.num_heads), True
        yield f"{name}.fc2.bias", f"{block}head", ZEROS, False


def _mlp_rows(name: str, block: str, c: ViTConfig) -> Iterator[Declaration]:
    glu = "glu " if c.mlp.is_gated else ""
    yield f"{name}.fc1.weight", f"{block}{glu}ff width", xavier_uniform(c.width, c.mlp_dim), True
    if c.mlp.bias:
        yield f"{name}.fc1.bias", f"{block}{glu}ff", MLP_BIAS, False
    if c.mlp.norm:
        yield from _norm_rows(f"{name}.norm", f"{block}ff", c)
    yield f"{name}.fc2.weight", f"{block}width ff", xavier_uniform(c.mlp_dim, c.width), True
    if c.mlp.bias:
        yield f"{name}.fc2.bias", f"{block}width", MLP_BIAS, False
