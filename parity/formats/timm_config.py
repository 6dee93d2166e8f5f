"""timm's config.json, both ways: what an architecture is beyond its tensors, and how to name any config.

An architecture is a function that fixes arguments of a class; `model_args` go before them.  What those functions say
and tensors do not is the rules below.  To write, the few arguments that JSON cannot say (classes of layers) are taken
from an architecture that has them, and all others are given.

Sources: huggingface/pytorch-image-models 1.0.31, timm/models/vision_transformer.py, deit.py, eva.py (one function for
each architecture), _hub.py and _factory.py (how config.json is read).
"""

import re
from collections.abc import Mapping
from typing import Any

from parity.formats.format import Evidence, Fields
from vit_spec import InputError, ViTConfig
from vit_spec.models import IMAGENET

# Architectures whose class is `VisionTransformer`, `VisionTransformerDistilled`, or `Eva` with DINOv3's positions ...
_OURS = r"(vit|test_vit|deit3?|flexivit|eva_large)_?\w*"
# ... and of these, the ones that compute something else with the same keys, or have keys of their own.
_OTHERS = (
    r"_rpn_|_xp_|x2_|_rope|relpos|srelpos|test_vit[34]|_p?d?p?(dwee|pwee|dpwee|dlittle)_|lingbot|sapiens|_pe_|hybrid|resnet"
)

_RULES: tuple[tuple[str, Fields], ...] = (
    (r"", {"norms.eps": 1e-6, "mlp.activation": "gelu", "head.pool": "token", "positions.covers": "all"}),
    (r"clip|dinov3", {"norms.eps": 1e-5}),
    (r"quickgelu", {"mlp.activation": "quick_gelu"}),
    (r"patch32_siglip|large_patch16_siglip(_gap)?_512|so400m_patch16_siglip|giantopt", {"mlp.activation": "gelu_tanh"}),
    (r"_gap_|dinov3|eva_large|test_vit2", {"head.pool": "mean"}),
    (r"_map_|siglip_\d", {"head.pool": "attention"}),
    (r"deit3|flexivit|radio|_reg\d_(dinov2|tipsv2)", {"positions.covers": "none"}),
    (r"(wee|little|medium|mediumd|betwixt|base)_patch16_reg\d_gap", {"positions.covers": "none"}),
    (r"flexivit|radio", {"resampling.kernel": "bilinear", "resampling.antialias": False}),
)

# The first that is found in the name; widths and depths do not tell.
_HEADS = (
    (r"7b_", 32),
    (r"giant_\w*(dinov2|tipsv2|radio)", 24),
    (r"huge_plus\w*dinov3", 20),
    (r"vit_base_patch16_gap|intern300m|so400m|large|huge|giant|gigantic", 16),
    (r"base_patch\d+_plus|so150m_", 14),
    (r"so150m2", 13),
    (r"base", 12),
    (r"betwixt", 10),
    (r"medium", 8),
    (r"xsmall|wee", 4),
    (r"small", 6),
    (r"little", 5),
    (r"tiny", 3),
    (r"test_vit", 2),
)

_POOLS = {"token": "token", "avg": "mean", "map": "attention", "": "none"}
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu", "identity": "none"}

SAYS = frozenset({"norms.eps", "mlp.activation", "head.pool", "num_heads", "norms.layer_scale", "image_size"})


def fields(evidence: Evidence) -> Fields:
    """Return what config.json says of a model; nothing where there is none of timm's.

    Raises:
        InputError: an architecture that is no ViT of this kind, or an argument for which the config has no word.
    """
    config = evidence.notes.get("config.json", {})
    if "architecture" not in config:
        return {}
    name, given = str(config["architecture"]), config.get("model_args") or {}
    if not re.fullmatch(_OURS, name) or re.search(_OTHERS, name):
        raise InputError(f"its config.json names timm's {name}, for which ViTConfig has no word: it cannot be read")
    for argument in ("pool_include_prefix", "attn_layer", "block_fn", "norm_layer"):
        if given.get(argument) not in (None, False, "layernorm"):
            raise InputError(f"its config.json has {argument}={given[argument]!r}, for which ViTConfig has no word")
    found: dict[str, Any] = {}
    for pattern, fields in _RULES:
        found |= fields if re.search(pattern, name) else {}
    found["num_heads"] = next((heads for pattern, heads in _HEADS if re.search(pattern, name)), None)
    found |= _data(config.get("pretrained_cfg", config), evidence.sizes["rgb"])
    found |= _arguments(given, config.get("global_pool"))
    if "glu" in evidence.axes["blocks.mlp.fc1.weight"]:
        found.pop("mlp.activation")
    if evidence.variant == "eva" or "pos_embed" not in evidence.axes:
        found.pop("positions.covers")
    return {key: value for key, value in found.items() if value is not None}


def _data(cfg: Mapping[str, Any], channels: int) -> Fields:
    """Return what the model was trained to see."""
    found: dict[str, Any] = {}
    if cfg.get("input_size"):
        found["image_size"] = tuple(cfg["input_size"][1:])
    for name in ("mean", "std"):  # timm's own where they are left out, whatever the architecture's are
        values = cfg.get(name) or getattr(IMAGENET, name)
        if len(values) in (1, channels):
            found[f"pixels.{name}"] = tuple(values)
    return found


def _arguments(given: Mapping[str, Any], pool: str | None) -> Fields:
    """Return what arguments say that go before the architecture's own.

    Raises:
        InputError: a value for which the config has no word.
    """
    found: dict[str, Any] = {}
    pool = given.get("global_pool", pool)
    if pool is not None:
        found["head.pool"] = _word("global_pool", pool, _POOLS)
    if given.get("act_layer") not in (None, "silu"):
        found["mlp.activation"] = _word("act_layer", given["act_layer"], _ACTIVATIONS)
    for argument, field in (("num_heads", "num_heads"), ("init_values", "norms.layer_scale"), ("img_size", "image_size")):
        if given.get(argument) is not None:
            value = given[argument]
            found[field] = tuple(value) if isinstance(value, list) else value
    if given.get("norm_layer") == "layernorm":
        found["norms.eps"] = 1e-6
    if "no_embed_class" in given:
        found["positions.covers"] = "none" if given["no_embed_class"] else "all"
    if "rope_temperature" in given:
        found["positions.rotary_base"] = float(given["rope_temperature"])
    if given.get("dynamic_img_pad"):
        found["tokens.pad"] = True
    return found


def _word(argument: str, value: Any, words: Mapping[str, str]) -> str:
    if value not in words:
        raise InputError(f"its config.json has {argument}={value!r}, for which ViTConfig has no word: it cannot be read")
    return words[value]


def files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the config.json with which timm makes this very model.

    Raises:
        InputError: something that timm can compute, and that no architecture and no argument in JSON says.
    """
    c, eva = config, config.positions.rotary == "dinov3"
    if c.head.hidden is not None:
        raise InputError(f"timm has no layer for head.hidden={c.head.hidden}: write another format")
    pools = {ours: theirs for theirs, ours in _POOLS.items()}
    arguments = {
        "img_size": _plain(c.image_size),
        "patch_size": _plain(c.patch_size),
        "in_chans": c.in_channels,
        "embed_dim": c.width,
        "depth": c.depth,
        "num_heads": c.num_heads,
        "mlp_ratio": _ratio(c, 1 if eva or c.mlp.activation != "swiglu" else 2),
        "qkv_bias": c.attention.qkv_bias != "none",
        "qk_norm": c.attention.qk_norm,
        "init_values": c.norms.layer_scale,
        "class_token": c.tokens.class_token,
        "global_pool": pools.get(c.head.pool),
        **(_eva(c) if eva else _vit(c)),
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


# Architectures that have what JSON cannot say: the class, the gated layer, eps.
_BASES = {
    "plain": {1e-6: "vit_base_patch16_224", 1e-5: "vit_base_patch16_clip_224"},
    "gated": {1e-6: "vit_giant_patch14_dinov2"},
    "distilled": {1e-6: "deit_base_distilled_patch16_224"},
    "eva": {1e-5: "vit_base_patch16_dinov3", 1e-6: "eva_giant_patch14_224"},
}


def _architecture(c: ViTConfig) -> str:
    """Return an architecture from which arguments make this model."""
    plain = "gated" if c.mlp.activation == "swiglu" else "plain"
    kind = "eva" if c.positions.rotary == "dinov3" else "distilled" if c.tokens.distillation else plain
    bases = _BASES[kind]
    if c.norms.eps not in bases:
        raise InputError(
            f"timm's config.json has no word for norms.eps={c.norms.eps} here, only for {' or '.join(map(str, bases))}: "
            f"write a file, as in weights.safetensors, or set norms.eps={next(iter(bases))}"
        )
    return bases[c.norms.eps]


def _vit(c: ViTConfig) -> Fields:
    """Return the arguments that `VisionTransformer` alone has."""
    activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()} | {"swiglu": "silu"}
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


def _eva(c: ViTConfig) -> Fields:
    """Return the arguments that `Eva` alone has."""
    return {
        "num_reg_tokens": c.tokens.registers,
        "swiglu_mlp": c.mlp.activation == "swiglu",
        "swiglu_align_to": 1,  # gate and value as two layers, and no more hidden units than asked for
        "use_abs_pos_emb": False,
        "use_rot_pos_emb": True,
        "rope_type": "dinov3",
        "rope_temperature": c.positions.rotary_base,
        "rope_rotate_half": True,
        "use_pre_transformer_norm": c.norms.before_blocks,
        "use_post_transformer_norm": c.norms.after_blocks,
        "use_fc_norm": c.norms.after_pool,
        "dynamic_img_size": True,
        "dynamic_img_pad": c.tokens.pad,
    }


def _ratio(c: ViTConfig, parts: int) -> float:
    """Return a ratio from which timm's int(width * ratio) is the hidden width."""
    hidden = parts * c.mlp_dim
    ratio = hidden / c.width
    return ratio if int(c.width * ratio) == hidden else (hidden + 0.5) / c.width


def _plain(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)
