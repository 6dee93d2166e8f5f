"""Write timm's config.json: express a config by an architecture and arguments.  `timm_arguments` reads them back.

Some arguments are classes of layers, which JSON cannot express.  They come from an architecture that has them.  All other
arguments are written.

Sources: huggingface/pytorch-image-models 1.0.31, timm/models/vision_transformer.py, deit.py, eva.py (one function for
each architecture), _hub.py and _factory.py (how config.json is read).
"""

from collections.abc import Mapping
from typing import Any

from parity.checkpoints.formats.format import Fields
from parity.checkpoints.formats.timm_constructors import ACTIVATIONS, POOLS
from vit_spec import InputError, ViTConfig

WRITTEN_FIELDS = frozenset({"norms.eps", "mlp.activation", "head.pool", "num_heads", "norms.layer_scale", "image_size"})


def json_files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the config.json from which timm builds the model of a config.

    Raises:
        InputError: the config has a value that no architecture and no argument in JSON expresses.
    """
    c, eva = config, config.positions.rotary == "dinov3" or config.attention.qkv_bias == "qv"
    if c.head.hidden is not None:
        raise InputError(f"timm has no layer for head.hidden={c.head.hidden}: choose another format")
    pool_names = {ours: theirs for theirs, ours in POOLS.items()}
    arguments = {
        "img_size": _size_json(c.image_size),
        "patch_size": _size_json(c.patch_size),
        "in_chans": c.in_channels,
        "embed_dim": c.width,
        "depth": c.depth,
        "num_heads": c.num_heads,
        "mlp_ratio": _mlp_ratio(c, 1 if eva or c.mlp.activation != "swiglu" else 2),
        "qkv_bias": c.attention.qkv_bias != "none",
        "qk_norm": c.attention.qk_norm,
        "init_values": c.norms.layer_scale,
        "class_token": c.tokens.class_token,
        "global_pool": pool_names.get(c.head.pool),
        **(_eva_arguments(c) if eva else _vit_arguments(c)),
    }
    data = {
        "num_classes": c.num_classes,
        "input_size": [c.in_channels, *c.image_size],
        "fixed_input_size": not (eva or c.tokens.pad),
        "mean": list(c.pixels.mean * (c.in_channels // len(c.pixels.mean))),
        "std": list(c.pixels.std * (c.in_channels // len(c.pixels.std))),
        "first_conv": "patch_embed.proj",
        "classifier": ["head", "head_dist"] if c.tokens.distillation else "head",
    }
    content = {"architecture": _architecture(c), "num_classes": c.num_classes, "num_features": c.width}
    return {
        "config.json": {**content, "global_pool": arguments["global_pool"], "model_args": arguments, "pretrained_cfg": data}
    }


# Architectures that fix what JSON cannot express: the class, the gated layer and eps.
_BASE_ARCHITECTURES = {
    "plain": {1e-6: "vit_base_patch16_224", 1e-5: "vit_base_patch16_clip_224"},
    "gated": {1e-6: "vit_giant_patch14_dinov2"},
    "distilled": {1e-6: "deit_base_distilled_patch16_224"},
    "eva": {1e-5: "vit_base_patch16_dinov3", 1e-6: "eva_giant_patch14_224"},
}


def _architecture(c: ViTConfig) -> str:
    """Return the architecture whose arguments the written ones override.

    Raises:
        InputError: no architecture of the config's class has its eps.
    """
    plain = "gated" if c.mlp.activation == "swiglu" else "plain"
    eva = c.positions.rotary == "dinov3" or c.attention.qkv_bias == "qv"
    kind = "eva" if eva else "distilled" if c.tokens.distillation else plain
    bases = _BASE_ARCHITECTURES[kind]
    if c.norms.eps not in bases:
        raise InputError(
            f"timm's config.json cannot express norms.eps={c.norms.eps} for such a model, only "
            f"{' or '.join(map(str, bases))}: write a file (weights.safetensors) instead of a folder, or set "
            f"norms.eps={next(iter(bases))}"
        )
    return bases[c.norms.eps]


def _vit_arguments(c: ViTConfig) -> Fields:
    """Return the arguments of `VisionTransformer` besides those that `json_files` gives to both classes."""
    activations = {ours: theirs for theirs, ours in ACTIVATIONS.items()} | {"swiglu": "silu"}
    return {
        "pos_embed": "learn" if c.positions.kind == "learned" else "none",
        "no_embed_class": c.num_covered == 0 and c.num_prefix > 0,
        "reg_tokens": c.tokens.registers,
        "pre_norm": c.norms.before_blocks,
        "final_norm": c.norms.after_blocks or c.norms.after_pool,
        "fc_norm": c.norms.after_pool,
        "act_layer": activations[c.mlp.activation],
        **({"dynamic_img_size": True, "dynamic_img_pad": True} if c.tokens.pad else {}),
    }


def _eva_arguments(c: ViTConfig) -> Fields:
    """Return the arguments of `Eva` besides those that `json_files` gives to both classes."""
    return {
        "num_reg_tokens": c.tokens.registers,
        "swiglu_mlp": c.mlp.activation == "swiglu",
        "swiglu_align_to": 1,  # gate and value are two layers, and the hidden width is not rounded up
        "attn_type": "rope" if c.attention.qkv_bias == "qkv" else "eva",
        "use_abs_pos_emb": c.positions.kind == "learned",
        "no_embed_class": c.positions.kind == "learned" and c.num_covered == 0 and c.num_prefix > 0,
        "use_rot_pos_emb": c.positions.rotary == "dinov3",
        "rope_type": "dinov3",
        "rope_temperature": c.positions.rotary_base,
        "rope_rotate_half": True,
        "use_pre_transformer_norm": c.norms.before_blocks,
        "use_post_transformer_norm": c.norms.after_blocks,
        "use_fc_norm": c.norms.after_pool,
        "dynamic_img_size": True,
        "dynamic_img_pad": c.tokens.pad,
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
