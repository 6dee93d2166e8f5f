"""The arguments of timm's classes: their defaults, and the values that `ViTConfig` can express.

Sources: huggingface/pytorch-image-models 1.0.31, the modules that `timm_constructors` names.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from parity.checkpoints.formats.evidence import Fields
from vit_spec import InputError

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
COMMON: Fields = {
    **_ALL,
    "qk_norm": False,
    "init_values": None,
    "class_token": True,
    "no_embed_class": False,
    "dynamic_img_pad": False,
}
VIT: Fields = {
    **COMMON,
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
EVA: Fields = {
    **COMMON,
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
BEIT: Fields = {
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
REL_POS: Fields = {
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
NAFLEX: Fields = {
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
VIT_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "attn_layer": (None, "", "Attention"),
    "embed_layer": (None, "PatchEmbed"),
    "use_naflex": (None, False),
}
EVA_SUPPORTED: Mapping[str, tuple[Any, ...]] = {"use_naflex": (None, False)}
REL_POS_SUPPORTED: Mapping[str, tuple[Any, ...]] = {"embed_layer": (None, "PatchEmbed"), "act_layer": (None,)}
NAFLEX_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
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
NAFLEX_NEUTRAL = frozenset(
    "pos_embed_use_grid_sample enable_patch_interpolator use_key_only_attn_mask qkv_fused swiglu_align_to rope_temperature "
    "rope_ref_feat_shape rope_grid_offset rope_grid_indexing rope_rotate_half rope_mrope_section".split()
)
# For each rope_type, only these values are supported.
ROTARY_SUPPORTED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "dinov3": {"rope_grid_offset": (0, 0.0), "rope_grid_indexing": ("ij",), "rope_rotate_half": (True,)},
    "cat": {"rope_grid_indexing": ("ij", "xy"), "rope_rotate_half": (False,)},
    "mixed": {"rope_grid_indexing": ("xy",), "rope_rotate_half": (False,)},
}
ROTARY_ARGUMENTS = frozenset({"rope_mrope_section"})


class Arguments:
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


def and_more(names: list[str]) -> str:
    """Return the text of a message after the first of several names: how many more, and up to five of them.

    For one name, return "".
    """
    return f" (and {len(names) - 1} more: {', '.join(map(repr, names[1:6]))})" if len(names) > 1 else ""
