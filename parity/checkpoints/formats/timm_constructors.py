"""Turn the arguments of timm's classes into fields of `ViTConfig`, as the constructors interpret them.

An unknown argument or value is refused, because it may change the function.

Sources: huggingface/pytorch-image-models 1.0.31, timm/models/vision_transformer.py (VisionTransformer), deit.py
(VisionTransformerDistilled), eva.py (Eva), beit.py (Beit), vision_transformer_relpos.py (VisionTransformerRelPos) and
naflexvit.py (NaFlexVit, NaFlexVitCfg, get_block_fn).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from parity.checkpoints.formats.format import Fields
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

# Arguments that act in training only, or that only allow other image sizes.
_NEUTRAL_ARGUMENTS = frozenset(
    "drop_rate pos_drop_rate patch_drop_rate proj_drop_rate attn_drop_rate drop_path_rate weight_init fix_init "
    "dynamic_img_size head_init_scale rope_shift_coords rope_jitter_coords rope_rescale_coords".split()
)

# The arguments of each class that are read, with the class's own defaults.
_ALL: Fields = {
    "img_size": 224,
    "patch_size": 16,
    "in_chans": 3,
    "num_classes": 1000,
    "embed_dim": 768,
    "depth": 12,
    "num_heads": 12,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "norm_layer": None,
}
_COMMON: Fields = {
    **_ALL,
    "qk_norm": False,
    "init_values": None,
    "class_token": True,
    "no_embed_class": False,
    "dynamic_img_pad": False,
}
_VIT: Fields = {
    **_COMMON,
    "global_pool": "token",
    "proj_bias": True,
    "pos_embed": "learn",
    "reg_tokens": 0,
    "pre_norm": False,
    "final_norm": True,
    "fc_norm": None,
    "pool_include_prefix": False,
    "act_layer": None,
    "mlp_layer": None,
    "block_fn": None,
    "embed_norm_layer": None,
    "scale_attn_norm": False,
    "scale_mlp_norm": False,
}
_EVA: Fields = {
    **_COMMON,
    "global_pool": "avg",
    "qkv_fused": True,
    "swiglu_mlp": False,
    "swiglu_align_to": 0,
    "scale_mlp": False,
    "scale_attn_inner": False,
    "use_post_norm": False,
    "attn_only_layer_scale": False,
    "attn_type": "eva",
    "num_reg_tokens": 0,
    "use_abs_pos_emb": True,
    "use_rot_pos_emb": False,
    "rope_type": "cat",
    "rope_temperature": 10000.0,
    "rope_grid_offset": 0.0,
    "rope_grid_indexing": "ij",
    "rope_rotate_half": False,
    "ref_feat_shape": None,
    "num_kv_heads": None,
    "use_pre_transformer_norm": False,
    "use_post_transformer_norm": None,
    "use_fc_norm": None,
    "attn_pool_num_heads": None,
    "attn_pool_mlp_ratio": None,
}

_BEIT: Fields = {
    **_ALL,
    "global_pool": "avg",
    "init_values": None,
    "swiglu_mlp": False,
    "scale_mlp": False,
    "use_abs_pos_emb": True,
    "use_rel_pos_bias": False,
    "use_shared_rel_pos_bias": False,
    "use_fc_norm": None,
}
_REL_POS: Fields = {
    **_ALL,
    "global_pool": "avg",
    "qk_norm": False,
    "init_values": 1e-6,
    "class_token": False,
    "fc_norm": False,
    "rel_pos_type": "mlp",
    "rel_pos_dim": None,
    "shared_rel_pos": False,
    "block_fn": None,
}

_NAFLEX: Fields = {
    **_ALL,
    "global_pool": "map",
    "qk_norm": False,
    "init_values": None,
    "class_token": False,
    "reg_tokens": 0,
    "proj_bias": True,
    "pos_embed": "learned",
    "pos_embed_grid_size": (16, 16),
    "pos_embed_interp_mode": "bicubic",
    "pos_embed_ar_preserving": False,
    "pos_embed_antialias": True,
    "pos_embed_align_corners": False,
    "dynamic_img_pad": False,
    "pre_norm": False,
    "final_norm": True,
    "fc_norm": None,
    "pool_include_prefix": False,
    "act_layer": None,
    "embed_norm_layer": None,
    "scale_attn_inner_norm": False,
    "scale_mlp_norm": False,
    "attn_pool_num_heads": None,
    "attn_pool_mlp_ratio": None,
}

# Arguments for which only these values are supported; any other value changes the function.
_VIT_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "attn_layer": (None, "", "Attention"),
    "embed_layer": (None, "PatchEmbed"),
    "use_naflex": (None, False),
}
_EVA_SUPPORTED: Mapping[str, tuple[Any, ...]] = {"use_naflex": (None, False)}
_REL_POS_SUPPORTED: Mapping[str, tuple[Any, ...]] = {"embed_layer": (None, "PatchEmbed"), "act_layer": (None,)}
_NAFLEX_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "embed_proj_type": ("linear",),
    "patchify_channels_last": (True,),
    "input_norm_layer": (None,),
    "rope_type": ("", "none"),
    "attn_type": ("standard",),
    "attn_layer": (None, "", "attn"),
    "attn_gated": (False,),
    "attn_only_layer_scale": (False,),
    "num_kv_heads": (None,),
    "swiglu_mlp": (False,),
    "mlp_layer": (None,),
    "block_fn": (None,),
}
# What acts only on batches of patches of several images, which are no input of the twins, or only beside what is refused.
_NAFLEX_NEUTRAL = frozenset(
    "pos_embed_use_grid_sample enable_patch_interpolator use_key_only_attn_mask qkv_fused swiglu_align_to rope_temperature "
    "rope_ref_feat_shape rope_grid_offset rope_grid_indexing rope_rotate_half rope_mrope_section".split()
)
# For each rope_type, only these values are supported.
_ROTARY_SUPPORTED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "dinov3": {"rope_grid_offset": (0, 0.0), "rope_grid_indexing": ("ij",), "rope_rotate_half": (True,)},
    "cat": {"rope_grid_indexing": ("ij", "xy"), "rope_rotate_half": (False,)},
    "mixed": {"rope_grid_indexing": ("xy",), "rope_rotate_half": (False,)},
}
_ROTARY_ARGUMENTS = frozenset({"rope_mrope_section"})


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
        return _CLASSES[cls](_Arguments(architecture, values))
    except InputError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise InputError(f"its config.json has arguments of the wrong type ({error}): correct it, or remove it") from None


def and_more(names: list[str]) -> str:
    """Return the text of a message after the first of several names: how many more, and up to five of them.

    For one name, return "".
    """
    return f" (and {len(names) - 1} more: {', '.join(map(repr, names[1:6]))})" if len(names) > 1 else ""


class _Arguments:
    """The arguments of a timm model, with methods that refuse what is not supported."""

    def __init__(self, architecture: str, values: Mapping[str, Any]) -> None:
        self.architecture, self.values = architecture, values
        self._defaults: dict[str, Any] = {}

    def read(self, defaults: Fields) -> dict[str, Any]:
        """Return the arguments with these names, or their defaults if they are not given."""
        self._defaults |= defaults
        return {name: self.values.get(name, default) for name, default in defaults.items()}

    def require_values(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise InputError for an argument in `allowed` whose value is not one of the values there."""
        for name, values in allowed.items():
            if name in self.values and not any(_is_same(self.values[name], value) for value in values):
                self.refuse(name)

    def require_known_names(self, *known: frozenset[str] | Mapping[str, Any]) -> None:
        """Raise InputError for an argument whose name is neither in `known` nor neutral."""
        if unknown := [name for name in self.values if not any(name in names for names in (_NEUTRAL_ARGUMENTS, *known))]:
            self.refuse(unknown[0], and_more(unknown))

    def refuse(self, name: str, more: str = "") -> NoReturn:
        """Raise InputError for an argument, with its value and `more`."""
        raise InputError(
            f"it is timm's {self.architecture} with {name}={self.values.get(name, self._defaults.get(name))!r}{more}, "
            f"which ViTConfig cannot express: it cannot be read"
        )


def _is_same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _vit(given: _Arguments) -> Fields:
    """Return the fields of `VisionTransformer`."""
    given.require_values(_VIT_SUPPORTED)
    given.require_known_names(_VIT, _VIT_SUPPORTED)
    a = given.read(_VIT)
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


def _distilled(given: _Arguments) -> Fields:
    """Return the fields of `VisionTransformerDistilled`, which has no norm after the pool and no registers."""
    found = _vit(given)
    a = given.read(_VIT)
    for name, allowed in (("global_pool", "token"), ("reg_tokens", 0), ("class_token", True), ("no_embed_class", False)):
        if a[name] != allowed:
            given.refuse(name)
    if a["fc_norm"] or a["pos_embed"] != "learn":
        given.refuse("fc_norm" if a["fc_norm"] else "pos_embed")
    return {**found, "tokens.distillation": True}


def _eva(given: _Arguments) -> Fields:
    """Return the fields of `Eva`."""
    given.require_values(_EVA_SUPPORTED)
    given.require_known_names(_EVA, _EVA_SUPPORTED, _ROTARY_ARGUMENTS)
    a = given.read(_EVA)
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


def _beit(given: _Arguments) -> Fields:
    """Return the fields of `Beit`."""
    given.require_known_names(_BEIT)
    a = given.read(_BEIT)
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


def _rel_pos(given: _Arguments) -> Fields:
    """Return the fields of `VisionTransformerRelPos`."""
    given.require_values(_REL_POS_SUPPORTED)
    given.require_known_names(_REL_POS, _REL_POS_SUPPORTED)
    a = given.read(_REL_POS)
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


def _naflex(given: _Arguments) -> Fields:
    """Return the fields of `NaFlexVit`, without the image size, which is that of the grid of the stored positions."""
    given.require_values(_NAFLEX_SUPPORTED)
    given.require_known_names(_NAFLEX, _NAFLEX_SUPPORTED, _NAFLEX_NEUTRAL)
    a = given.read(_NAFLEX)
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
    common = _common(given, {**_COMMON, **a})
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


def _plain(given: _Arguments, a: Mapping[str, Any], after_pool: bool) -> Fields:
    """Return the fields that have the same values in all models with relative positions."""
    if a["global_pool"] not in ("token", "avg", ""):
        given.refuse("global_pool")
    return {
        **_common(given, {**_COMMON, **a}),
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


def _rotary(given: _Arguments, a: Mapping[str, Any]) -> Fields:
    """Return the fields of rotary positions of `Eva`."""
    unscaled: Fields = {"positions.rotary_start": 0.0, "positions.rotary_grid": None}
    if not a["use_rot_pos_emb"]:
        return {"positions.rotary": "none", **unscaled}
    kind = a["rope_type"]
    if kind not in _ROTARY_SUPPORTED:
        given.refuse("rope_type")
    for name, values in _ROTARY_SUPPORTED[kind].items():
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


def _common(given: _Arguments, a: Mapping[str, Any]) -> Fields:
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


def _norm_kind(given: _Arguments, name: str) -> tuple[str, float]:
    """Return kind and eps of a norm; other norms are refused.  timm's LayerNorm and RmsNorm have 1e-6 (layers/norm.py)."""
    found = re.fullmatch(r"(\w+)(?:\(eps=([\d.e-]+)\))?", str(given.values.get(name) or "layernorm"))
    kinds = {"layernorm": "layer", "rmsnorm": "rms"}
    if not found or found[1].replace("_", "").lower() not in kinds:
        given.refuse(name)
    return kinds[found[1].replace("_", "").lower()], float(found[2] or 1e-6)


def _is_gated(a: Mapping[str, Any]) -> bool:
    return str(a["mlp_layer"] or "").startswith(("GluMlp", "SwiGLU"))


def _activation(given: _Arguments, a: Mapping[str, Any], pool: str) -> str:
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


def _refuse_other_pooling(given: _Arguments, a: Mapping[str, Any]) -> None:
    """Refuse attention pooling whose MLP, which has no gate and no norm, differs from that of the blocks."""
    for name in ("swiglu_mlp", "scale_mlp"):
        if a[name]:
            given.refuse(name)
    if (a["attn_pool_mlp_ratio"] or a["mlp_ratio"]) != a["mlp_ratio"]:
        given.refuse("attn_pool_mlp_ratio")


_CLASSES: dict[str, Callable[[_Arguments], Fields]] = {
    "VisionTransformer": _vit,
    "VisionTransformerDistilled": _distilled,
    "Eva": _eva,
    "Beit": _beit,
    "VisionTransformerRelPos": _rel_pos,
    "NaFlexVit": _naflex,
}
