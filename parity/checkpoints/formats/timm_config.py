"""Write timm's config.json: express a config by an architecture and arguments.  `timm_arguments` reads them back.

Some arguments are classes of layers, which JSON cannot express.  They come from an architecture that has them.  All other
arguments are written.

Sources: huggingface/pytorch-image-models 1.0.31, timm/models/vision_transformer.py, deit.py, eva.py (one function for
each architecture), _hub.py and _factory.py (how config.json is read).
"""

from collections.abc import Mapping
from typing import Any

from parity.checkpoints.formats import timm_tables
from parity.checkpoints.formats.evidence import Fields
from parity.checkpoints.formats.timm_constructors import ACTIVATIONS, POOLS
from vit_spec import InputError, ViTConfig
from vit_spec.positions import SCALED_ROTARY

_ACTIVATION_NAMES = {ours: theirs for theirs, ours in ACTIVATIONS.items()} | {"swiglu": "silu"}


def json_files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the config.json from which timm builds the model of a config.

    Raises:
        InputError: the config has a value that no architecture and no argument in JSON expresses.
    """
    c, eva = config, timm_tables.is_eva(config)
    if c.head.hidden is not None:
        raise InputError(f"timm has no layer for head.hidden={c.head.hidden}: choose another format")
    arguments = {
        "img_size": _size_json(c.image_size),
        **common_arguments(c, 1 if eva or _kind(c) != "gated" else 2),
    }
    if _kind(c) == "beit":
        arguments |= _beit_arguments(c)
    else:
        arguments |= {"qk_norm": c.attention.qk_norm, "class_token": c.tokens.class_token}
        arguments |= (
            _eva_arguments(c) if eva else _rel_pos_arguments(c) if c.positions.relative != "none" else _vit_arguments(c)
        )
    is_fixed = c.tokens.crop or c.positions.relative != "none" or not (eva or c.tokens.pad)
    return {"config.json": content(c, _architecture(c), arguments, is_fixed, "patch_embed.proj")}


def common_arguments(c: ViTConfig, parts: int = 1) -> dict[str, Any]:
    """Return the arguments that all classes have.

    Args:
        c: the config.
        parts: 2 if one layer computes gate and value of the MLP, and the ratio is that of its outputs, else 1.
    """
    return {
        "patch_size": _size_json(c.patch_size),
        "in_chans": c.in_channels,
        "embed_dim": c.width,
        "depth": c.depth,
        "num_heads": c.num_heads,
        "mlp_ratio": _mlp_ratio(c, parts),
        "qkv_bias": c.attention.qkv_bias != "none",
        "init_values": c.norms.layer_scale,
        "global_pool": {ours: theirs for theirs, ours in POOLS.items()}.get(c.head.pool),
    }


def content(
    c: ViTConfig, architecture: str, arguments: Mapping[str, Any], has_fixed_size: bool, projection: str
) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        c: the config.
        architecture: the architecture whose arguments are overridden.
        arguments: the arguments.
        has_fixed_size: whether the model accepts images of one size only.
        projection: the name of the module that projects patches.
    """
    data = {
        "num_classes": c.num_classes,
        "input_size": [c.in_channels, *c.image_size],
        "fixed_input_size": has_fixed_size,
        "mean": list(c.pixels.mean * (c.in_channels // len(c.pixels.mean))),
        "std": list(c.pixels.std * (c.in_channels // len(c.pixels.std))),
        "first_conv": projection,
        "classifier": ["head", "head_dist"] if c.tokens.distillation else "head",
    }
    return {
        "architecture": architecture,
        "num_classes": c.num_classes,
        "num_features": c.width,
        "global_pool": arguments["global_pool"],
        "model_args": arguments,
        "pretrained_cfg": data,
    }


# Architectures that fix what JSON cannot express: the class, the classes of layers and blocks, and kind and eps of norms.
_BASE_ARCHITECTURES = {
    "plain": {("layer", 1e-6): "vit_base_patch16_224", ("layer", 1e-5): "vit_base_patch16_clip_224"},
    "gated": {("layer", 1e-6): "vit_giant_patch14_dinov2"},
    "split gate": {("rms", 1e-5): "aimv2_large_patch14_224"},
    "distilled": {("layer", 1e-6): "deit_base_distilled_patch16_224"},
    "res_post": {("layer", 1e-6): "vit_base_patch16_rpn_224"},
    "parallel": {("layer", 1e-6): "vit_pwee_patch16_reg1_gap_256"},
    "beit": {("layer", 1e-6): "beit_base_patch16_224"},
    "relative pre": {("layer", 1e-6): "vit_relpos_base_patch16_224"},
    "relative res_post": {("layer", 1e-6): "vit_relpos_base_patch16_rpn_224"},
    "eva": {
        ("layer", 1e-5): "vit_base_patch16_dinov3",
        ("layer", 1e-6): "eva_giant_patch14_224",
        ("rms", 1e-6): "vit_base_patch16_sapiens2",
    },
}


def _kind(c: ViTConfig) -> str:
    """Return the kind of a config's architecture: a key of `_BASE_ARCHITECTURES`."""
    if c.positions.relative != "none":
        return "beit" if timm_tables.is_eva(c) else f"relative {c.norms.order}"
    if timm_tables.is_eva(c):
        return "eva"
    if c.tokens.distillation:
        return "distilled"
    if c.norms.order != "pre":
        return c.norms.order
    gated = "split gate" if timm_tables.default_variant(c) == "vit-split-gate" else "gated"
    return gated if c.mlp.is_gated else "plain"


def _architecture(c: ViTConfig) -> str:
    """Return the architecture whose arguments the written ones override.

    Raises:
        InputError: no architecture of the config's kind has its norms or its combination of layers.
    """
    kind, norm = _kind(c), (c.norms.kind, c.norms.eps)
    if c.mlp.is_gated and kind in ("distilled", "res_post"):
        raise InputError(
            "timm's config.json cannot express mlp.activation='swiglu' with such blocks: write a file "
            "(weights.safetensors) instead of a folder"
        )
    bases = dict(_BASE_ARCHITECTURES[kind])
    if (
        ("layer", 1e-6) in bases and kind != "eva" and c.positions.relative == "none"
    ):  # whose norm_layer can be a name, for the kind with timm's own eps
        bases.setdefault(("rms", 1e-6), bases["layer", 1e-6])
    if norm not in bases:
        known = " or ".join(f"{eps} with norms.kind={name!r}" for name, eps in bases)
        remedy = next((f", or set norms.eps={eps}" for name, eps in bases if name == c.norms.kind), "")
        raise InputError(
            f"timm's config.json cannot express norms.eps={c.norms.eps} with norms.kind={c.norms.kind!r} for such a model, "
            f"only {known}: write a file (weights.safetensors) instead of a folder{remedy}"
        )
    return bases[norm]


def _vit_arguments(c: ViTConfig) -> Fields:
    """Return the arguments of `VisionTransformer` besides those that `json_files` gives to both classes."""
    return {
        "pos_embed": "learn" if c.positions.kind == "learned" else "none",
        "no_embed_class": c.num_covered == 0 and c.num_prefix > 0,
        "reg_tokens": c.tokens.registers,
        "pre_norm": c.norms.before_blocks,
        "final_norm": c.norms.after_blocks or c.norms.after_pool,
        "fc_norm": c.norms.after_pool,
        "act_layer": activation_name(c),
        "proj_bias": c.attention.proj_bias,
        "scale_attn_norm": c.attention.out_norm,
        "scale_mlp_norm": c.mlp.norm,
        "pool_include_prefix": c.head.pool_prefix,
        **({"norm_layer": "rmsnorm"} if c.norms.kind == "rms" and c.norms.eps == 1e-6 else {}),
        **_embed_norm(c),
        **({"dynamic_img_size": True, "dynamic_img_pad": True} if c.tokens.pad else {}),
    }


def activation_name(c: ViTConfig) -> str:
    """Return timm's name of the activation; raise InputError if it has none."""
    if c.mlp.activation not in _ACTIVATION_NAMES:
        raise InputError(
            f"timm's config.json cannot store mlp.activation={c.mlp.activation!r}: write a file (weights.safetensors) "
            f"instead of a folder"
        )
    return _ACTIVATION_NAMES[c.mlp.activation]


def _embed_norm(c: ViTConfig) -> Fields:
    """Return the argument for a norm of the patch embeddings.  A name means timm's own eps.

    Raises:
        InputError: no name expresses this norm.
    """
    if c.norms.after_patches == (_kind(c) == "split gate"):  # as the base architecture has it
        return {}
    if c.norms.after_patches and c.norms.eps != 1e-6:
        raise InputError(
            f"timm's config.json cannot express norms.after_patches=True with norms.eps={c.norms.eps}: write a file "
            f"(weights.safetensors) instead of a folder, or set norms.eps=1e-06"
        )
    names = {"layer": "layernorm", "rms": "rmsnorm"}
    return {"embed_norm_layer": names[c.norms.kind] if c.norms.after_patches else ""}


def _eva_arguments(c: ViTConfig) -> Fields:
    """Return the arguments of `Eva` besides those that `json_files` gives to both classes."""
    variant, rotary = timm_tables.default_variant(c), c.positions.rotary
    scaled = rotary in SCALED_ROTARY
    return {
        "num_reg_tokens": c.tokens.registers,
        **({} if c.norms.kind == "layer" else {"num_kv_heads": [c.num_heads] * c.depth}),  # the base architecture has 12
        "qkv_fused": "split-qkv" not in variant,
        "swiglu_mlp": c.mlp.is_gated,
        # With an alignment, gate and value are two layers; a multiple of 1 does not round the hidden width up.
        "swiglu_align_to": 0 if c.mlp.norm or variant.endswith("packed-gate") else 1,
        "scale_mlp": c.mlp.norm,
        "scale_attn_inner": c.attention.out_norm,
        "attn_type": "rope" if c.attention.qkv_bias == "qkv" else "eva",
        "attn_only_layer_scale": not c.norms.mlp_layer_scale,
        "attn_pool_num_heads": c.head.pool_heads,
        "use_abs_pos_emb": c.positions.kind == "learned",
        "no_embed_class": c.positions.kind == "learned" and c.num_covered == 0 and c.num_prefix > 0,
        "use_rot_pos_emb": rotary != "none",
        "rope_type": {"dinov3": "dinov3", "mixed": "mixed"}.get(rotary, "cat"),
        "rope_temperature": c.positions.rotary_base,
        "rope_rotate_half": rotary == "dinov3",
        "rope_grid_indexing": "xy" if rotary in ("rope_vit", "mixed") else "ij",
        "rope_grid_offset": c.positions.rotary_start,
        "ref_feat_shape": list(c.positions.rotary_grid) if scaled and c.positions.rotary_grid else None,
        "use_post_norm": c.norms.order == "res_post",
        "use_pre_transformer_norm": c.norms.before_blocks,
        "use_post_transformer_norm": c.norms.after_blocks,
        "use_fc_norm": c.norms.after_pool,
        "dynamic_img_size": not c.tokens.crop,
        "dynamic_img_pad": c.tokens.pad,
    }


def _beit_arguments(c: ViTConfig) -> Fields:
    """Return the arguments of `Beit` besides those that `json_files` gives to all classes."""
    return {
        "swiglu_mlp": c.mlp.is_gated,
        "scale_mlp": c.mlp.norm,
        "use_abs_pos_emb": c.positions.kind == "learned",
        "use_rel_pos_bias": not c.positions.relative_shared,
        "use_shared_rel_pos_bias": c.positions.relative_shared,
        "use_fc_norm": c.norms.after_pool,
    }


def _rel_pos_arguments(c: ViTConfig) -> Fields:
    """Return the arguments of `VisionTransformerRelPos` besides those that `json_files` gives to all classes."""
    return {
        "fc_norm": c.norms.after_pool,
        "rel_pos_type": "mlp" if c.positions.relative == "mlp" else "bias",
        "rel_pos_dim": c.positions.relative_dim,
        "shared_rel_pos": c.positions.relative_shared,
    }


def _mlp_ratio(c: ViTConfig, parts: int) -> float:
    """Return a ratio for which timm's int(width * ratio) is `parts` times the hidden width of the MLPs.

    Args:
        c: the config.
        parts: 2 if one layer computes gate and value, else 1.
    """
    hidden = parts * c.mlp_dim
    ratio = hidden / c.width
    return ratio if int(c.width * ratio) == hidden else (hidden + 0.5) / c.width


def _size_json(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)
