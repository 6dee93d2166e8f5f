"""lucidrains' vit-pytorch: ViT and SimpleViT from before version 1.0.

Since 1.0, patches are normalized before and after their projection, which no other ViT does.  Such files are recognised and
refused.  A ViT of this library with pool="mean" averages its class token too.  No tensor shows that, so such a model is
read as one that classifies by its class token.

Source: vit-pytorch 0.40.2 and 1.9.2 (registry), vit_pytorch/vit.py, simple_vit.py and ats_vit.py.
"""

from collections.abc import Mapping

from parity.checkpoints.formats.behaviour import common_behaviour
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.tables import COMMON_CONSTRAINTS, replace_keys
from vit_spec import ViTConfig
from vit_spec.parts import UNGATED_ACTIVATIONS

_BLOCK = """
    blocks.norm1.weight     | transformer.layers.{block}.0.norm.weight       | width
    blocks.norm1.bias       | transformer.layers.{block}.0.norm.bias         | width
    blocks.attn.qkv.weight  | transformer.layers.{block}.0.to_qkv.weight     | (qkv head dim) width
    blocks.attn.proj.weight | transformer.layers.{block}.0.to_out.weight     | width (head dim)
    blocks.norm2.weight     | transformer.layers.{block}.1.net.0.weight      | width
    blocks.norm2.bias       | transformer.layers.{block}.1.net.0.bias        | width
    blocks.mlp.fc1.weight   | transformer.layers.{block}.1.net.1.weight      | ff width
    blocks.mlp.fc1.bias     | transformer.layers.{block}.1.net.1.bias        | ff
    blocks.mlp.fc2.weight   | transformer.layers.{block}.1.net.3.weight      | width ff
    blocks.mlp.fc2.bias     | transformer.layers.{block}.1.net.3.bias        | width
"""
_SIMPLE = f"""
    patch_embed.proj.weight | to_patch_embedding.1.weight | width (ph pw rgb)
    patch_embed.proj.bias   | to_patch_embedding.1.bias   | width
    {_BLOCK}
    fc_norm.weight | linear_head.0.weight | pooled
    fc_norm.bias   | linear_head.0.bias   | pooled
    head.weight    | linear_head.1.weight | label feature
    head.bias      | linear_head.1.bias   | label
"""
_TOKENS = """
    cls_token               | cls_token                                 | 1 1 width
    pos_embed               | pos_embedding                             | 1 token width
    blocks.attn.proj.bias   | transformer.layers.{block}.0.fn.to_out.0.bias | width
"""
_VIT = (
    replace_keys(
        _SIMPLE,
        {
            "0.to_qkv": "0.fn.to_qkv",
            "0.to_out": "0.fn.to_out.0",
            "1.net.0": "1.norm",
            "1.net.1": "1.fn.net.0",
            "1.net.3": "1.fn.net.3",
            "linear_head": "mlp_head",
        },
    )
    + _TOKENS
)
_VIT_FIELDS: Fields = {
    "tokens.class_token": True,
    "positions.kind": "learned",
    "positions.covers": "all",
    "attention.proj_bias": True,
    "head.pool": "token",
}
_SIMPLE_FIELDS: Fields = {
    "tokens.class_token": False,
    "positions.kind": "fixed",
    "positions.table": "sincos_2d_big_vision",
    "attention.proj_bias": False,
    "head.pool": "mean",
}
_CLASSES = {"vit": _VIT_FIELDS, "simple": _SIMPLE_FIELDS}
_ASSUMED = ("head.pool", "positions.table")  # other classes with the same keys have other values


def read_config(evidence: Evidence) -> Fields:
    """Return the fields that the variant's class fixes and that no tensor shows."""
    known = ("tokens.class_token", "attention.proj_bias", *_ASSUMED)  # tensors show these, or they are assumed
    return {name: value for name, value in _CLASSES[evidence.variant].items() if name not in known}


def infer_assumed(evidence: Evidence) -> Fields:
    """Return the fields of the variant's class that other classes with the same keys set differently.

    For example, SimpleViT of simple_vit_3d.py has the keys of simple_vit.py, but another table of positions.
    """
    return {name: value for name, value in _CLASSES[evidence.variant].items() if name in _ASSUMED}


def assumed_behaviour(evidence: Evidence) -> Mapping[str, str]:
    """Return the assumptions about what no tensor shows.

    One is that no tokens are dropped: the ViT of ats_vit.py has the keys of vit.py, and drops tokens from block to block.
    """
    common, sampled = common_behaviour(evidence), {"dropped tokens": "none"} if evidence.variant == "vit" else {}
    return {
        **common,
        "patch extraction": f"{common['patch extraction']}; the channels of a pixel are adjacent",
        **sampled,
        "queries, keys and values": "all queries, then all keys, then all values",
    }


def unsupported(config: ViTConfig, variant: str) -> str:
    """Return the values in a config that vit-pytorch's classes cannot express; "" if there are none."""
    if (config.num_heads, config.head_dim) == (1, config.width):
        return "num_heads=1 with a head as wide as the model, for which it has no output projection"
    expected = _CLASSES[variant]
    wrong = [f"{name}={config.at(name)!r}" for name, value in expected.items() if config.at(name) != value]
    return f"{', '.join(wrong)} in its variant {variant!r}" if wrong else ""


FORMAT = Format(
    name="lucidrains",
    description="lucidrains' vit-pytorch from before 1.0: ViT and SimpleViT",
    separator=".",
    tables={"vit": _VIT, "simple": _SIMPLE},
    default_variant=lambda config: "simple" if config.head.pool == "mean" else "vit",
    refused_keys={
        r"(^|\.)to_patch_embedding\.3\.weight$": "to_patch_embedding.1 and .3 normalize patches around their projection"
    },
    constraints={
        **COMMON_CONSTRAINTS,
        "tokens.patch_bias": True,
        "positions.kind": ("learned", "fixed"),
        "positions.rotary": "none",
        "attention.scale": None,  # code that copies these names often scales by the model's width, not the head's
        "attention.qkv_bias": "none",
        "attention.qk_norm": False,
        "mlp.activation": UNGATED_ACTIVATIONS,
        "norms.before_blocks": False,
        "norms.after_blocks": False,
        "norms.after_pool": True,
        "norms.layer_scale": None,
        "head.pool": ("token", "mean"),
        "head.hidden": None,
        "head.bias": True,
    },
    unsupported=unsupported,
    assumed={"norms.eps": 1e-5, "mlp.activation": "gelu"},
    infer_assumed=infer_assumed,
    read_config=read_config,
    assumed_behaviour=assumed_behaviour,
)
