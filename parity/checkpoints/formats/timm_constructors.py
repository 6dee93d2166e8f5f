"""Turn the arguments of timm's classes into fields of `ViTConfig`, as the constructors interpret them.

`timm_signatures` has the arguments of each class.  An unknown argument or value is refused, because it may change the
function.

Sources: huggingface/pytorch-image-models 1.0.31, timm/models/vision_transformer.py (VisionTransformer), deit.py
(VisionTransformerDistilled), eva.py (Eva), beit.py (Beit), vision_transformer_relpos.py (VisionTransformerRelPos) and
naflexvit.py (NaFlexVit, NaFlexVitCfg, get_block_fn).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from parity.checkpoints.formats.evidence import Fields
from parity.checkpoints.formats.timm_signatures import (
    BEIT,
    COMMON,
    EVA,
    EVA_SUPPORTED,
    NAFLEX,
    NAFLEX_NEUTRAL,
    NAFLEX_SUPPORTED,
    REL_POS,
    REL_POS_SUPPORTED,
    ROTARY_ARGUMENTS,
    ROTARY_SUPPORTED,
    VIT,
    VIT_SUPPORTED,
    Arguments,
)
from vit_spec import InputError

POOLS = {"token": "token", "avg": "mean", "map": "attention", "": "none"}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "swish": "silu",
    "silu": "silu",
    "mish": "mish",
    "identity": "none",
}
_GATES = ("GluMlp(act_layer=SiLU, gate_last=False)", "SwiGLU")  # whose gate is the SiLU of the first half
_RELATIVE_BLOCKS = {None: "pre", "RelPosBlock": "pre", "ResPostRelPosBlock": "res_post"}
_BLOCKS = {None: "pre", "Block": "pre", "ResPostBlock": "res_post", "ParallelScalingBlock": "parallel"}


def config_fields(cls: str, architecture: str, values: Fields) -> Fields:
    """Return the fields of `ViTConfig` for a model of timm.

    Args:
        cls: the name of the model's class.
        architecture: the name of the model in error messages.
        values: the arguments that are given; others have the defaults of the class.

    Raises:
        InputError: an unknown class, argument or value; names it.
    """
    if cls not in _CLASSES:
        raise InputError(
            f"its config.json names timm's {architecture}, a {cls}, which ViTConfig cannot express: it cannot be read"
        )
    try:
        return _CLASSES[cls](Arguments(architecture, values))
    except InputError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise InputError(f"its config.json has arguments of the wrong type ({error}): correct it, or remove it") from None


def _vit(given: Arguments) -> Fields:
    """Return the fields of `VisionTransformer`."""
    given.require_values(VIT_SUPPORTED)
    given.require_known_names(VIT, VIT_SUPPORTED)
    a = given.read(VIT)
    pool, prefix = a["global_pool"], a["class_token"] + a["reg_tokens"]
    if pool not in POOLS:
        given.refuse("global_pool")
    if a["block_fn"] not in _BLOCKS:
        given.refuse("block_fn")
    order = _BLOCKS[a["block_fn"]]
    if order == "parallel":  # these arguments have another effect on its blocks, or none
        for name, allowed in {
            "proj_bias": True,
            "mlp_layer": None,
            "scale_attn_norm": False,
            "scale_mlp_norm": False,
        }.items():
            if a[name] != allowed:
                given.refuse(name)
    if pool == "map" and (a["scale_mlp_norm"] or not a["proj_bias"]):  # the MLP of the pool has biases and no norm
        given.refuse("proj_bias" if not a["proj_bias"] else "scale_mlp_norm")
    if a["embed_norm_layer"] and _norm_kind(given, "embed_norm_layer") != _norm_kind(given, "norm_layer"):
        given.refuse("embed_norm_layer")
    if a["pos_embed"] not in ("", "none", "learn"):
        given.refuse("pos_embed")
    after_pool = pool == "avg" if a["fc_norm"] is None else bool(a["fc_norm"])
    found = _common(given, a)
    return {
        **found,
        "tokens.registers": a["reg_tokens"],
        "tokens.patch_bias": not a["pre_norm"],
        "positions.kind": "learned" if a["pos_embed"] == "learn" else "none",
        "positions.rotary": "none",
        **({"positions.covers": _covers(a)} if a["pos_embed"] == "learn" else {}),
        "attention.qkv_bias": "qkv" if a["qkv_bias"] else "none",
        "attention.proj_bias": bool(a["proj_bias"]),
        "attention.out_norm": bool(a["scale_attn_norm"]),
        "mlp.activation": _activation(given, a, pool),
        "mlp.bias": bool(a["proj_bias"]),
        "mlp.norm": bool(a["scale_mlp_norm"]),
        "mlp_dim": int(a["embed_dim"] * a["mlp_ratio"]) // (2 if str(a["mlp_layer"]).startswith("GluMlp") else 1),
        "norms.order": order,
        "norms.mlp_layer_scale": True,
        "norms.after_patches": bool(a["embed_norm_layer"]),
        "norms.before_blocks": bool(a["pre_norm"]),
        "norms.after_blocks": bool(a["final_norm"]) and not after_pool,
        "norms.after_pool": bool(a["final_norm"]) and after_pool,
        "norms.layer_scale": _layer_scale(a["init_values"], order),
        "head.pool_prefix": bool(a["pool_include_prefix"] and prefix and pool in ("avg", "map")),
        "head.pool_heads": None,
    }


def _layer_scale(initial: float | None, order: str) -> float | None:
    """Return norms.layer_scale.  Blocks have none for 0, except parallel ones; res-post-norm blocks scale their norms."""
    if order == "res_post":
        return None
    return initial if order == "parallel" else initial or None


def _distilled(given: Arguments) -> Fields:
    """Return the fields of `VisionTransformerDistilled`, which has no norm after the pool and no registers."""
    found = _vit(given)
    a = given.read(VIT)
    for name, allowed in (("global_pool", "token"), ("reg_tokens", 0), ("class_token", True), ("no_embed_class", False)):
        if a[name] != allowed:
            given.refuse(name)
    if a["fc_norm"] or a["pos_embed"] != "learn":
        given.refuse("fc_norm" if a["fc_norm"] else "pos_embed")
    return {**found, "tokens.distillation": True}


def _eva(given: Arguments) -> Fields:
    """Return the fields of `Eva`."""
    given.require_values(EVA_SUPPORTED)
    given.require_known_names(EVA, EVA_SUPPORTED, ROTARY_ARGUMENTS)
    a = given.read(EVA)
    pool, prefix = a["global_pool"], a["class_token"] + a["num_reg_tokens"]
    if pool not in POOLS:
        given.refuse("global_pool")
    if a["attn_type"] not in ("eva", "rope"):
        given.refuse("attn_type")
    kv_heads = a["num_kv_heads"] if isinstance(a["num_kv_heads"], list | tuple) else [a["num_kv_heads"]]
    if any(heads not in (None, a["num_heads"]) for heads in kv_heads):
        given.refuse("num_kv_heads")
    if pool == "map":
        _refuse_other_pooling(given, a)
    after_pool = pool == "avg" if a["use_fc_norm"] is None else bool(a["use_fc_norm"])
    after_blocks, post = a["use_post_transformer_norm"], bool(a["use_post_norm"])
    bias = ("qv" if a["attn_type"] == "eva" else "qkv") if a["qkv_bias"] else "none"
    hidden, align = int(a["embed_dim"] * a["mlp_ratio"]), a["swiglu_align_to"]
    return {
        **_common(given, a),
        **_rotary(given, a),
        "tokens.registers": a["num_reg_tokens"],
        "tokens.patch_bias": not a["use_pre_transformer_norm"],
        "positions.kind": "learned" if a["use_abs_pos_emb"] else "none",
        **({"positions.covers": _covers(a)} if a["use_abs_pos_emb"] else {}),
        "attention.qkv_bias": bias,
        "attention.proj_bias": True,
        "attention.out_norm": bool(a["scale_attn_inner"]),
        "mlp.activation": "swiglu" if a["swiglu_mlp"] else "gelu",
        "mlp.bias": True,
        "mlp.norm": bool(a["scale_mlp"]),
        "mlp_dim": hidden + (-hidden % align if a["swiglu_mlp"] and align and not (post and not a["scale_mlp"]) else 0),
        "norms.order": "res_post" if post else "pre",
        "norms.after_patches": False,
        "norms.before_blocks": bool(a["use_pre_transformer_norm"]),
        "norms.after_blocks": not after_pool if after_blocks is None else bool(after_blocks),
        "norms.after_pool": after_pool,
        "norms.layer_scale": None if post else a["init_values"],
        "norms.mlp_layer_scale": a["init_values"] is None or post or not a["attn_only_layer_scale"],
        "head.pool_prefix": pool == "map" and prefix > 0,  # Eva's pool includes the tokens before the patches
        "head.pool_heads": None if pool != "map" else a["attn_pool_num_heads"],
    }


def _beit(given: Arguments) -> Fields:
    """Return the fields of `Beit`."""
    given.require_known_names(BEIT)
    a = given.read(BEIT)
    if a["use_rel_pos_bias"] and a["use_shared_rel_pos_bias"]:
        given.refuse("use_shared_rel_pos_bias")
    after_pool = a["global_pool"] == "avg" if a["use_fc_norm"] is None else bool(a["use_fc_norm"])
    return {
        **_plain(given, a, after_pool),
        "positions.kind": "learned" if a["use_abs_pos_emb"] else "none",
        **({"positions.covers": "all"} if a["use_abs_pos_emb"] else {}),
        "positions.relative": "table" if a["use_rel_pos_bias"] or a["use_shared_rel_pos_bias"] else "none",
        "positions.relative_dim": None,
        "positions.relative_shared": bool(a["use_shared_rel_pos_bias"]),
        "attention.qkv_bias": "qv" if a["qkv_bias"] else "none",
        "mlp.activation": "swiglu" if a["swiglu_mlp"] else "gelu",
        "mlp.norm": bool(a["scale_mlp"]),
        "norms.order": "pre",
        "norms.layer_scale": a["init_values"] or None,
    }


def _rel_pos(given: Arguments) -> Fields:
    """Return the fields of `VisionTransformerRelPos`."""
    given.require_values(REL_POS_SUPPORTED)
    given.require_known_names(REL_POS, REL_POS_SUPPORTED)
    a = given.read(REL_POS)
    if a["block_fn"] not in _RELATIVE_BLOCKS:
        given.refuse("block_fn")
    kind, order = {"mlp": "mlp", "bias": "table"}.get(a["rel_pos_type"]), _RELATIVE_BLOCKS[a["block_fn"]]
    if kind is None:
        given.refuse("rel_pos_type")
    return {
        **_plain(given, a, bool(a["fc_norm"])),
        "positions.kind": "none",
        "positions.relative": kind,
        "positions.relative_dim": (a["rel_pos_dim"] or 128) if kind == "mlp" else None,
        "positions.relative_shared": bool(a["shared_rel_pos"]),
        "attention.qkv_bias": "qkv" if a["qkv_bias"] else "none",
        "mlp.activation": "gelu",
        "mlp.norm": False,
        "norms.order": order,
        "norms.layer_scale": _layer_scale(a["init_values"], order),
    }


def _naflex(given: Arguments) -> Fields:
    """Return the fields of `NaFlexVit`, without the image size, which is that of the grid of the stored positions."""
    given.require_values(NAFLEX_SUPPORTED)
    given.require_known_names(NAFLEX, NAFLEX_SUPPORTED, NAFLEX_NEUTRAL)
    a = given.read(NAFLEX)
    pool, kind = a["global_pool"], a["pos_embed"] or "none"
    if pool not in POOLS:
        given.refuse("global_pool")
    if kind not in ("none", "learned", "factorized"):
        given.refuse("pos_embed")
    if a["embed_norm_layer"] and _norm_kind(given, "embed_norm_layer") != _norm_kind(given, "norm_layer"):
        given.refuse("embed_norm_layer")
    if pool == "map" and (a["scale_mlp_norm"] or not a["proj_bias"]):  # the MLP of the pool has biases and no norm
        given.refuse("proj_bias" if not a["proj_bias"] else "scale_mlp_norm")
    if (a["attn_pool_mlp_ratio"] or a["mlp_ratio"]) != a["mlp_ratio"]:
        given.refuse("attn_pool_mlp_ratio")
    factorized, prefix = kind == "factorized", a["class_token"] + a["reg_tokens"]
    if factorized and a["pos_embed_ar_preserving"] and len(set(a["pos_embed_grid_size"])) > 1:
        given.refuse("pos_embed_ar_preserving")  # it then resizes positions even on their own grid
    after_pool = pool == "avg" if a["fc_norm"] is None else bool(a["fc_norm"])
    common = _common(given, {**COMMON, **a})
    return {
        **{name: value for name, value in common.items() if name != "image_size"},
        "tokens.registers": a["reg_tokens"],
        "tokens.patch_bias": not a["pre_norm"],
        "tokens.crop": False,
        "positions.kind": "none" if kind == "none" else "learned",
        "positions.rotary": "none",
        **({} if kind == "none" else {"positions.covers": "none", "positions.factorized": factorized}),
        "attention.qkv_bias": "qkv" if a["qkv_bias"] else "none",
        "attention.proj_bias": bool(a["proj_bias"]),
        "attention.out_norm": bool(a["scale_attn_inner_norm"]),
        "mlp.activation": _activation(given, {**a, "mlp_layer": None}, pool),
        "mlp.bias": bool(a["proj_bias"]),
        "mlp.norm": bool(a["scale_mlp_norm"]),
        "mlp_dim": int(a["embed_dim"] * a["mlp_ratio"]),
        "norms.order": "pre",
        "norms.mlp_layer_scale": True,
        "norms.after_patches": bool(a["embed_norm_layer"]),
        "norms.before_blocks": bool(a["pre_norm"]),
        "norms.after_blocks": bool(a["final_norm"]) and not after_pool,
        "norms.after_pool": bool(a["final_norm"]) and after_pool,
        "norms.layer_scale": a["init_values"] or None,
        "head.pool_prefix": bool(a["pool_include_prefix"] and prefix and pool in ("avg", "map")),
        "head.pool_heads": a["attn_pool_num_heads"] if pool == "map" else None,
        # One-dimensional tables are interpolated linearly, whatever the mode.
        "resampling.kernel": "bilinear" if factorized else a["pos_embed_interp_mode"],
        "resampling.antialias": bool(a["pos_embed_antialias"]) and not factorized,
        "resampling.align_corners": bool(a["pos_embed_align_corners"]) and not factorized,
        "resampling.square": bool(a["pos_embed_ar_preserving"]),
    }


def _plain(given: Arguments, a: Mapping[str, Any], after_pool: bool) -> Fields:
    """Return the fields that have the same values in all models with relative positions."""
    if a["global_pool"] not in ("token", "avg", ""):
        given.refuse("global_pool")
    return {
        **_common(given, {**COMMON, **a}),
        "tokens.registers": 0,
        "tokens.patch_bias": True,
        "positions.rotary": "none",
        "attention.proj_bias": True,
        "attention.out_norm": False,
        "mlp.bias": True,
        "mlp_dim": int(a["embed_dim"] * a["mlp_ratio"]),
        "norms.mlp_layer_scale": True,
        "norms.after_patches": False,
        "norms.before_blocks": False,
        "norms.after_blocks": not after_pool,
        "norms.after_pool": after_pool,
        "head.pool_prefix": False,
        "head.pool_heads": None,
    }


def _rotary(given: Arguments, a: Mapping[str, Any]) -> Fields:
    """Return the fields of rotary positions of `Eva`."""
    unscaled: Fields = {"positions.rotary_start": 0.0, "positions.rotary_grid": None}
    if not a["use_rot_pos_emb"]:
        return {"positions.rotary": "none", **unscaled}
    kind = a["rope_type"]
    if kind not in ROTARY_SUPPORTED:
        given.refuse("rope_type")
    for name, values in ROTARY_SUPPORTED[kind].items():
        if a[name] not in values:
            given.refuse(name)
    found: Fields = {"positions.rotary": kind, "positions.rotary_base": float(a["rope_temperature"])}
    if kind != "cat":
        return {**found, **unscaled}
    grid = a["ref_feat_shape"]
    return {
        **found,
        "positions.rotary": "eva" if a["rope_grid_indexing"] == "ij" else "rope_vit",
        "positions.rotary_start": float(a["rope_grid_offset"]),
        "positions.rotary_grid": (grid, grid) if isinstance(grid, int) else grid,
    }


def _common(given: Arguments, a: Mapping[str, Any]) -> Fields:
    """Return the fields for the arguments that all classes have."""
    size, patch = (
        tuple(each) if isinstance(each, list | tuple) else (each, each) for each in (a["img_size"], a["patch_size"])
    )
    kind, eps = _norm_kind(given, "norm_layer")
    return {
        "attention.scale": None,
        "attention.value_skip": False,
        "image_size": size,
        "patch_size": patch,
        "in_channels": a["in_chans"],
        "num_classes": a["num_classes"],
        "width": a["embed_dim"],
        "depth": a["depth"],
        "num_heads": a["num_heads"],
        "tokens.class_token": bool(a["class_token"]),
        "tokens.pad": bool(a["dynamic_img_pad"]),
        "tokens.crop": not a["dynamic_img_pad"] and any(n % p for n, p in zip(size, patch, strict=True)),
        "attention.qk_norm": bool(a["qk_norm"]),
        "norms.kind": kind,
        "norms.bias": kind == "layer",
        "norms.eps": eps,
        "head.pool": POOLS[a["global_pool"]],
    }


def _covers(a: Mapping[str, Any]) -> str:
    return "none" if a["no_embed_class"] else "all"


def _norm_kind(given: Arguments, name: str) -> tuple[str, float]:
    """Return kind and eps of a norm; other norms are refused.  timm's LayerNorm and RmsNorm have 1e-6 (layers/norm.py)."""
    found = re.fullmatch(r"(\w+)(?:\(eps=([\d.e-]+)\))?", str(given.values.get(name) or "layernorm"))
    kinds = {"layernorm": "layer", "rmsnorm": "rms"}
    if not found or found[1].replace("_", "").lower() not in kinds:
        given.refuse(name)
    return kinds[found[1].replace("_", "").lower()], float(found[2] or 1e-6)


def _is_gated(a: Mapping[str, Any]) -> bool:
    return str(a["mlp_layer"] or "").startswith(("GluMlp", "SwiGLU"))


def _activation(given: Arguments, a: Mapping[str, Any], pool: str) -> str:
    """Return the activation of the MLPs.  Blocks pass act_layer to the constructor of mlp_layer."""
    name = str(a["act_layer"] or "gelu").lower()
    if _is_gated(a):
        if name != "silu" or a["mlp_layer"] not in _GATES:
            given.refuse("act_layer" if name != "silu" else "mlp_layer")
        if pool == "map":
            given.refuse("mlp_layer")
        return "swiglu"
    if a["mlp_layer"] not in (None, "Mlp"):
        given.refuse("mlp_layer")
    if name not in ACTIVATIONS:
        given.refuse("act_layer")
    return ACTIVATIONS[name]


def _refuse_other_pooling(given: Arguments, a: Mapping[str, Any]) -> None:
    """Refuse attention pooling whose MLP, which has no gate and no norm, differs from that of the blocks."""
    for name in ("swiglu_mlp", "scale_mlp"):
        if a[name]:
            given.refuse(name)
    if (a["attn_pool_mlp_ratio"] or a["mlp_ratio"]) != a["mlp_ratio"]:
        given.refuse("attn_pool_mlp_ratio")


_CLASSES: dict[str, Callable[[Arguments], Fields]] = {
    "VisionTransformer": _vit,
    "VisionTransformerDistilled": _distilled,
    "Eva": _eva,
    "Beit": _beit,
    "VisionTransformerRelPos": _rel_pos,
    "NaFlexVit": _naflex,
}
