"""Turn the arguments of timm's classes into fields of `ViTConfig`, as the constructors interpret them.

An unknown argument or value is refused, because it may change the function.

Sources: huggingface/pytorch-image-models 1.0.31, timm/models/vision_transformer.py (VisionTransformer), deit.py
(VisionTransformerDistilled) and eva.py (Eva).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from parity.checkpoints.formats.format import Fields
from vit_spec import InputError

POOLS = {"token": "token", "avg": "mean", "map": "attention", "": "none"}
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu", "identity": "none"}

# Arguments that act in training only, or that only allow other image sizes.
_NEUTRAL_ARGUMENTS = frozenset(
    "drop_rate pos_drop_rate patch_drop_rate proj_drop_rate attn_drop_rate drop_path_rate weight_init fix_init "
    "dynamic_img_size head_init_scale rope_shift_coords rope_jitter_coords rope_rescale_coords".split()
)

# The arguments of each class that are read, with the class's own defaults.
_COMMON: Fields = {
    "img_size": 224,
    "patch_size": 16,
    "in_chans": 3,
    "num_classes": 1000,
    "embed_dim": 768,
    "depth": 12,
    "num_heads": 12,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "qk_norm": False,
    "init_values": None,
    "class_token": True,
    "no_embed_class": False,
    "dynamic_img_pad": False,
    "norm_layer": None,
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
}
_EVA: Fields = {
    **_COMMON,
    "global_pool": "avg",
    "qkv_fused": True,
    "swiglu_mlp": False,
    "swiglu_align_to": 0,
    "attn_type": "eva",
    "num_reg_tokens": 0,
    "use_abs_pos_emb": True,
    "use_rot_pos_emb": False,
    "rope_type": "cat",
    "rope_temperature": 10000.0,
    "use_pre_transformer_norm": False,
    "use_post_transformer_norm": None,
    "use_fc_norm": None,
    "attn_pool_num_heads": None,
    "attn_pool_mlp_ratio": None,
}

# Arguments for which only these values are supported; any other value changes the function.
_VIT_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "block_fn": (None, "Block"),
    "attn_layer": (None, "", "Attention"),
    "embed_layer": (None, "PatchEmbed"),
    "embed_norm_layer": (None, ""),
    "scale_attn_norm": (False,),
    "scale_mlp_norm": (False,),
    "use_naflex": (None, False),
}
_EVA_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "scale_mlp": (False,),
    "scale_attn_inner": (False,),
    "use_post_norm": (False,),
    "attn_only_layer_scale": (False,),
    "use_naflex": (None, False),
}
_ROTARY_SUPPORTED: Mapping[str, tuple[Any, ...]] = {  # for rope_type="dinov3", the only type that ViTConfig has
    "rope_grid_offset": (0, 0.0),
    "rope_grid_indexing": ("ij",),
    "rope_rotate_half": (True,),
}
_ROTARY_ARGUMENTS = frozenset({*_ROTARY_SUPPORTED, "rope_type", "rope_temperature", "ref_feat_shape", "rope_mrope_section"})


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

    def refuse(self, name: str, more: str = "") -> None:
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
    if a["pool_include_prefix"] and prefix and pool in ("avg", "map"):
        given.refuse("pool_include_prefix")
    if not a["proj_bias"]:
        given.refuse("proj_bias")
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
        "mlp.activation": _activation(given, a, pool),
        "mlp_dim": int(a["embed_dim"] * a["mlp_ratio"]) // (2 if _is_gated(a) else 1),
        "norms.before_blocks": bool(a["pre_norm"]),
        "norms.after_blocks": bool(a["final_norm"]) and not after_pool,
        "norms.after_pool": bool(a["final_norm"]) and after_pool,
        "norms.layer_scale": a["init_values"] or None,
    }


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
    given.require_known_names(_EVA, _EVA_SUPPORTED, _ROTARY_ARGUMENTS, {"num_kv_heads": None})
    a = given.read(_EVA)
    pool, prefix = a["global_pool"], a["class_token"] + a["num_reg_tokens"]
    if pool not in POOLS or (pool == "map" and prefix):  # Eva's pool includes the tokens before the patches
        given.refuse("global_pool")
    if a["attn_type"] not in ("eva", "rope"):
        given.refuse("attn_type")
    if not a["qkv_fused"]:
        given.refuse("qkv_fused")
    if given.values.get("num_kv_heads") not in (None, a["num_heads"]):
        given.refuse("num_kv_heads")
    if pool == "map":
        _refuse_other_pooling(given, a)
    if a["use_rot_pos_emb"]:
        if a["rope_type"] != "dinov3":
            given.refuse("rope_type")
        for name, values in _ROTARY_SUPPORTED.items():
            defaults = {"rope_grid_offset": 0.0, "rope_grid_indexing": "ij", "rope_rotate_half": False}
            if given.values.get(name, defaults[name]) not in values:
                given.refuse(name)
    after_pool = pool == "avg" if a["use_fc_norm"] is None else bool(a["use_fc_norm"])
    after_blocks = a["use_post_transformer_norm"]
    bias = ("qv" if a["attn_type"] == "eva" else "qkv") if a["qkv_bias"] else "none"
    hidden, align = int(a["embed_dim"] * a["mlp_ratio"]), a["swiglu_align_to"]
    return {
        **_common(given, a),
        "tokens.registers": a["num_reg_tokens"],
        "tokens.patch_bias": not a["use_pre_transformer_norm"],
        "positions.kind": "learned" if a["use_abs_pos_emb"] else "none",
        **({"positions.covers": _covers(a)} if a["use_abs_pos_emb"] else {}),
        "positions.rotary": "dinov3" if a["use_rot_pos_emb"] else "none",
        "positions.rotary_base": float(a["rope_temperature"]),
        "attention.qkv_bias": bias,
        "mlp.activation": "swiglu" if a["swiglu_mlp"] else "gelu",
        "mlp_dim": hidden + (-hidden % align if a["swiglu_mlp"] and align else 0),
        "norms.before_blocks": bool(a["use_pre_transformer_norm"]),
        "norms.after_blocks": not after_pool if after_blocks is None else bool(after_blocks),
        "norms.after_pool": after_pool,
        "norms.layer_scale": a["init_values"],
    }


def _common(given: _Arguments, a: Mapping[str, Any]) -> Fields:
    """Return the fields for the arguments that all classes have."""
    size, patch = a["img_size"], a["patch_size"]
    return {
        "attention.scale": None,
        "attention.value_skip": False,
        "image_size": tuple(size) if isinstance(size, list | tuple) else (size, size),
        "patch_size": tuple(patch) if isinstance(patch, list | tuple) else (patch, patch),
        "in_channels": a["in_chans"],
        "num_classes": a["num_classes"],
        "width": a["embed_dim"],
        "depth": a["depth"],
        "num_heads": a["num_heads"],
        "tokens.class_token": bool(a["class_token"]),
        "tokens.pad": bool(a["dynamic_img_pad"]),
        "attention.qk_norm": bool(a["qk_norm"]),
        "norms.eps": _eps(given),
        "head.pool": POOLS[a["global_pool"]],
    }


def _covers(a: Mapping[str, Any]) -> str:
    return "none" if a["no_embed_class"] else "all"


def _eps(given: _Arguments) -> float:
    """Return eps of the norms; any norm but LayerNorm is refused.  timm's LayerNorm has 1e-6 (layers/norm.py)."""
    name = given.values.get("norm_layer")
    found = re.fullmatch(r"(\w+)(?:\(eps=([\d.e-]+)\))?", str(name or "layernorm"))
    if not found or found[1].replace("_", "").lower() != "layernorm":
        given.refuse("norm_layer")
    return float(found[2] or 1e-6) if found else 0.0


def _is_gated(a: Mapping[str, Any]) -> bool:
    return str(a["mlp_layer"] or "").startswith(("GluMlp", "SwiGLUPacked"))


def _activation(given: _Arguments, a: Mapping[str, Any], pool: str) -> str:
    """Return the activation of the MLPs.  Blocks pass act_layer to the constructor of mlp_layer."""
    name = str(a["act_layer"] or "gelu").lower()
    if _is_gated(a):
        if name != "silu" or a["mlp_layer"] != "GluMlp(act_layer=SiLU, gate_last=False)":
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
    """Refuse attention pooling whose heads or MLP differ from those of the blocks."""
    if (a["attn_pool_num_heads"] or a["num_heads"]) != a["num_heads"]:
        given.refuse("attn_pool_num_heads")
    if (a["attn_pool_mlp_ratio"] or a["mlp_ratio"]) != a["mlp_ratio"] or a["swiglu_mlp"]:
        given.refuse("attn_pool_mlp_ratio" if not a["swiglu_mlp"] else "swiglu_mlp")


_CLASSES: dict[str, Callable[[_Arguments], Fields]] = {
    "VisionTransformer": _vit,
    "VisionTransformerDistilled": _distilled,
    "Eva": _eva,
}
