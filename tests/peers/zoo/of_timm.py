"""timm's Vision Transformers: every architecture, and arguments that change the function with or without the keys."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from timm.layers import GELUTanh, Mish, QuickGELU, RmsNorm, Swish
from timm.layers.create_act import _ACT_LAYER_DEFAULT
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed
from timm.models import list_models, save_for_hf
from timm.models import vision_transformer as vit
from timm.models.naflexvit import NaFlexVit
from timm.models.qwen3_vit import Qwen3VitEncoder
from torch import nn

from tests.goldens.peers import float64, rng_for  # before timm: it makes torchvision importable
from tests.peers.zoo.noise import perturb, uninitialised
from tests.peers.zoo.outcomes import AS_ASSUMED, NotInConfig, Peer, Property

VERSION = timm.__version__
MODULES = (
    "vision_transformer",
    "eva",
    "deit",
    "beit",
    "naflexvit",
    "qwen3_vit",
    "vision_transformer_hybrid",  # these three, because their keys might be mistaken for those of a plain ViT
    "vision_transformer_relpos",
    "vision_transformer_sam",
)
_MAX_TOKENS = 1100  # models with more tokens get smaller images: their attention would take long and test nothing more
_LARGER_THAN_LARGE = r"huge|giant|so400m"
_HUGE_BLOCKS = r"_[1357]b_|enormous|gigantic"  # over 60 million parameters a block


def architectures() -> list[str]:
    """Return the names of all architectures except those with huge blocks."""
    names = [name for module in MODULES for name in list_models(module=module)]
    return [name for name in names if not re.search(_HUGE_BLOCKS, name)]


def peer(architecture: str, **options: Any) -> Peer:
    """Return a peer: an architecture with arguments of its class, by default with one block."""
    label = " ".join([architecture, *(f"{key}={value!r}" for key, value in options.items())])
    model = _model(architecture, options, label)
    images = rng_for(f"{label} images").standard_normal((1, model.in_chans, *image_size(model)))
    return Peer(label, model, images, lambda module, pixels: module(pixels), PROPERTIES)


def _model(architecture: str, options: dict[str, Any], label: str) -> nn.Module:
    chosen = {**_one_block(architecture), **options}
    with float64(), uninitialised():
        model = timm.create_model(architecture, **chosen).eval()
        if "img_size" not in options and _tokens(model) > _MAX_TOKENS:
            ph, pw = _encoder(model).patch_embed.patch_size
            model = timm.create_model(architecture, **{**chosen, "img_size": (16 * ph, 16 * pw)}).eval()
    perturb(model, label)
    return model


def _encoder(model: nn.Module) -> nn.Module:
    """Return the module that contains the blocks: the model, or the vision tower within a classifier of Qwen3."""
    return getattr(model, "encoder", model)


def _tokens(model: nn.Module) -> int:
    return getattr(getattr(_encoder(model), "patch_embed", None), "num_patches", 0)


def image_size(model: nn.Module) -> tuple[int, int]:
    """Return the height and width of a model's images."""
    if isinstance(_encoder(model), Qwen3VitEncoder):  # it accepts any image size; this is the size of its position table
        side = _encoder(model).pos_embed_grid_size * _encoder(model).patch_embed.patch_size[0]
        return side, side
    if isinstance(model, NaFlexVit):  # likewise
        grid = model.embeds.pos_embed_grid_size or (16, 16)
        return tuple(length * side for length, side in zip(grid, model.embeds.patch_size, strict=True))
    own = getattr(getattr(_encoder(model), "patch_embed", None), "img_size", None)
    return tuple(own or model.pretrained_cfg["input_size"][1:])


def patch_side(architecture: str) -> int:
    """Return the side of an architecture's patches in pixels."""
    found = re.search(r"patch(\d+)", architecture)
    return int(found[1]) if found else 16


# Saving ---------------------------------------------------------------------------------------------------------------


def save_folder(one: Peer, path: Path) -> Path:
    """Save a model as timm does for the hub, and return the folder."""
    save_for_hf(one.model, path, safe_serialization=True)
    return path


def save_state_dict(one: Peer, path: Path) -> Path:
    """Save the state dict alone, and return the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(one.model.state_dict(), path)
    return path


# Properties that no tensor shows --------------------------------------------------------------------------------------

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": GELUTanh,
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "none": nn.Identity,
}
_POOLS = {"token": "token", "avg": "mean", "map": "attention", "": "none"}


def _attention(model: nn.Module) -> nn.Module:
    block = _encoder(model).blocks[0]
    return getattr(block, "attn", block)  # parallel blocks compute attention themselves


_NORM_CLASSES = {"layer": nn.LayerNorm, "rms": RmsNorm}


def _norm_modules(model: nn.Module) -> list[nn.Module]:
    """Return the norms of a model, of any class."""
    return [module for module in model.modules() if hasattr(module, "eps") and hasattr(module, "normalized_shape")]


def _eps(model: nn.Module) -> Any:
    found = {module.eps for module in _norm_modules(model)}
    return found.pop() if len(found) == 1 else NotInConfig(f"eps of {found}")


def _assume_eps(model: nn.Module, value: float) -> None:
    for module in _norm_modules(model):
        module.eps = value


def _norm_kind(model: nn.Module) -> Any:
    found = {type(module) for module in _norm_modules(model)}
    names = [name for name, kind in _NORM_CLASSES.items() if all(issubclass(each, kind) for each in found)]
    return names[0] if names else NotInConfig(", ".join(sorted(each.__name__ for each in found)))


def _assume_norm_kind(model: nn.Module, value: str) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if child in _norm_modules(model) and not isinstance(child, _NORM_CLASSES[value]):
                changed = (
                    nn.RMSNorm(child.normalized_shape, child.eps)
                    if value == "rms"
                    else nn.LayerNorm(child.normalized_shape)
                )
                changed.weight = child.weight
                setattr(module, name, changed)


def _activation(model: nn.Module) -> Any:
    block = _encoder(model).blocks[0]
    mlp = getattr(block, "mlp", block)
    act = mlp.act if hasattr(mlp, "act") else mlp.mlp_act
    kind = {Swish: nn.SiLU, Mish: nn.Mish}.get(type(act), type(act))
    if type(mlp).__name__ in ("GluMlp", "SwiGLU"):
        return "swiglu"
    if getattr(act, "approximate", "none") == "tanh":
        return "gelu_tanh"
    names = [name for name, layer in _ACTIVATIONS.items() if issubclass(kind, layer)]
    return names[0] if names else NotInConfig(kind.__name__)


def _assume_activation(model: nn.Module, value: str) -> None:
    for name, module in model.named_modules():
        if name.endswith("mlp"):
            module.act = _ACTIVATIONS[value]()
        elif hasattr(module, "mlp_act"):
            module.mlp_act = _ACTIVATIONS[value]()


def _gate(model: nn.Module) -> Any:
    mlp = getattr(_encoder(model).blocks[0], "mlp", None)
    if mlp is None:
        return AS_ASSUMED
    usual = _activation(model) != "swiglu" or (type(mlp.act) is nn.SiLU and not getattr(mlp, "gate_last", False))
    return AS_ASSUMED if usual else NotInConfig(f"{type(mlp.act).__name__}, gate_last={getattr(mlp, 'gate_last', False)}")


def _assume_gate(model: nn.Module, value: str) -> None:
    for block in _encoder(model).blocks:
        block.mlp.act, block.mlp.gate_last = nn.SiLU(), False


def _pool(model: nn.Module) -> Any:
    return _POOLS.get(model.global_pool, NotInConfig(model.global_pool))


def _assume_pool(model: nn.Module, value: str) -> None:
    model.global_pool = {ours: theirs for theirs, ours in _POOLS.items()}[value]
    model.attn_pool = getattr(model, "attn_pool", None) if value == "attention" else None
    model.pool_include_prefix = False


def _pool_prefix(model: nn.Module) -> bool:
    if model.global_pool not in ("avg", "map") or not model.num_prefix_tokens:
        return False
    is_eva = type(model).__name__ == "Eva"
    return model.global_pool == "map" if is_eva else bool(getattr(model, "pool_include_prefix", False))


def _assume_pool_prefix(model: nn.Module, value: bool) -> None:
    first = 0 if value else model.num_prefix_tokens
    model.pool = lambda x, pool_type=None: (
        model.attn_pool(x[:, first:]) if model.attn_pool is not None else x[:, first:].mean(1)
    )


def _pool_heads(model: nn.Module) -> Any:
    if not hasattr(model.attn_pool, "latent"):
        return NotInConfig(type(model.attn_pool).__name__)
    heads = model.attn_pool.num_heads
    return None if heads == _attention(model).num_heads else heads


def _assume_pool_heads(model: nn.Module, value: int | None) -> None:
    pool = model.attn_pool
    pool.num_heads = value or _attention(model).num_heads
    pool.head_dim = model.embed_dim // pool.num_heads
    pool.scale = pool.head_dim**-0.5


_ROTARY = {RotaryEmbeddingDinoV3: "dinov3", RotaryEmbeddingMixed: "mixed"}


def _rotary(model: nn.Module) -> Any:
    rope = getattr(_encoder(model), "rope", None)
    if isinstance(_encoder(model), Qwen3VitEncoder):
        return NotInConfig(type(rope).__name__)  # of halves
    if isinstance(rope, RotaryEmbeddingCat):
        return "eva" if rope.grid_indexing == "ij" else "rope_vit"
    return "none" if rope is None else _ROTARY.get(type(rope), NotInConfig(type(rope).__name__))


def _rotation(model: nn.Module) -> Any:
    rope = getattr(_encoder(model), "rope", None)
    if rope is None or isinstance(_rotary(model), NotInConfig):
        return AS_ASSUMED  # `_rotary` reports the difference
    half = _attention(model).rotate_half
    settings, usual = (half,), (False,)
    if isinstance(rope, RotaryEmbeddingDinoV3):
        settings, usual = (half, rope.rotate_half, rope.grid_offset, rope.grid_indexing), (True, True, 0, "ij")
    if isinstance(rope, RotaryEmbeddingMixed):
        settings, usual = (half, rope.grid_indexing), (False, "xy")
    if isinstance(rope, RotaryEmbeddingCat):
        settings, usual = (half, rope.rotate_half, rope.in_pixels), (False, False, False)
    return AS_ASSUMED if settings == usual else NotInConfig(f"rotation {settings}")


def _assume_rotary(model: nn.Module, value: str) -> None:
    base, was_mixed = _base(model), getattr(model, "rope_mixed", False)
    if isinstance(_encoder(model), Qwen3VitEncoder):
        _encoder(model).rope.get_embed = lambda shape: None  # called even without rotary positions
        return
    if value == "mixed":  # its frequencies are parameters, so only its rotation may be an assumption
        model.rope.grid_indexing = "xy"
        model.rope._init_buffers()
        for block in model.blocks:
            block.attn.rotate_half = False
        return
    assert not was_mixed
    model.rope = None
    if value == "none":
        return
    grid, width = model.patch_embed.grid_size, model.embed_dim // _attention(model).num_heads
    shape = None if model.dynamic_img_size else grid
    if value == "dinov3":
        model.rope = RotaryEmbeddingDinoV3(width, temperature=base, feat_shape=shape)
    else:
        indexing = "ij" if value == "eva" else "xy"
        options = {"grid_indexing": indexing, "in_pixels": False, "feat_shape": shape}
        model.rope = RotaryEmbeddingCat(width, temperature=base, **options)
    for block in model.blocks:
        block.attn.rotate_half = value == "dinov3"


def _assume_rotation(model: nn.Module, value: str) -> None:
    """Give the kind of rotary positions its usual pairs and coordinates."""
    rope = _encoder(model).rope
    start, grid = getattr(rope, "grid_offset", 0.0), getattr(rope, "ref_feat_shape", None)
    _assume_rotary(model, _rotary(model))
    if isinstance(_encoder(model).rope, RotaryEmbeddingCat):
        _assume_start(model, start)
        _assume_grid(model, grid)


def _base(model: nn.Module) -> Any:
    return float(getattr(getattr(_encoder(model), "rope", None), "temperature", None) or 100.0)


def _assume_base(model: nn.Module, value: float) -> None:
    if isinstance(rope := getattr(model, "rope", None), RotaryEmbeddingDinoV3 | RotaryEmbeddingCat):
        rope.temperature = value
        rope.reset_parameters()


def _start(model: nn.Module) -> Any:
    return float(getattr(getattr(_encoder(model), "rope", None), "grid_offset", 0.0))


def _assume_start(model: nn.Module, value: float) -> None:
    if isinstance(rope := getattr(model, "rope", None), RotaryEmbeddingCat):
        rope.grid_offset = value
        rope.reset_parameters()


def _grid(model: nn.Module) -> Any:
    grid = getattr(getattr(_encoder(model), "rope", None), "ref_feat_shape", None)
    return tuple(grid) if grid else None


def _assume_grid(model: nn.Module, value: Any) -> None:
    if isinstance(rope := getattr(model, "rope", None), RotaryEmbeddingCat):
        rope.ref_feat_shape = value
        rope.reset_parameters()


def _assume_heads(model: nn.Module, value: int) -> None:
    for name, module in model.named_modules():
        if name.endswith(("attn", "attn_pool")):
            module.num_heads, module.head_dim = value, model.embed_dim // value
            module.scale = module.head_dim**-0.5


_ORDERS = {"Block": "pre", "EvaBlock": "pre", "ResPostBlock": "res_post", "EvaBlockPostNorm": "res_post"}
_ORDERS |= {"RelPosBlock": "pre", "ResPostRelPosBlock": "res_post"}


def _order(model: nn.Module) -> Any:
    kind = type(_encoder(model).blocks[0]).__name__
    return {**_ORDERS, "ParallelScalingBlock": "parallel"}.get(kind, NotInConfig(kind))


def _assume_order(model: nn.Module, value: str) -> None:
    assert value == "pre"
    for block in _encoder(model).blocks:
        block.forward = lambda x, rope=None, attn_mask=None, is_causal=False, shared_rel_pos=None, block=block: _pre_norm(
            block, x, {"rope": rope, "shared_rel_pos": shared_rel_pos}
        )


def _pre_norm(block: nn.Module, x: torch.Tensor, options: dict[str, torch.Tensor | None]) -> torch.Tensor:
    x = x + block.attn(block.norm1(x), **{name: value for name, value in options.items() if value is not None})
    return x + block.mlp(block.norm2(x))


def _bare_norms(model: nn.Module) -> Any:
    found = [name for name, module in model.named_modules() if _is_norm_without_weights(module)]
    return NotInConfig(f"norms without weights: {', '.join(found)}") if found else AS_ASSUMED


def _is_norm_without_weights(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not any(True for _ in module.parameters())  # a block may have such a name


def _assume_no_bare_norms(model: nn.Module, value: str) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if _is_norm_without_weights(child):
                setattr(module, name, nn.Identity())


def _patch_size(model: nn.Module) -> tuple[int, int]:
    embedding = model.embeds if isinstance(model, NaFlexVit) else _encoder(model).patch_embed
    return tuple(embedding.patch_size)


def _has_positions(model: nn.Module) -> bool:
    return any(getattr(module, "pos_embed", None) is not None for module in (model, getattr(model, "embeds", None)))


def _covers(model: nn.Module) -> Any:
    return "none" if isinstance(model, NaFlexVit) or getattr(model, "no_embed_class", False) else "all"


PROPERTIES = {
    "norms.eps": Property(_eps, _assume_eps),
    "mlp.activation": Property(_activation, _assume_activation),
    "head.pool": Property(_pool, _assume_pool),
    "num_heads": Property(lambda model: _attention(model).num_heads, _assume_heads),
    "positions.rotary": Property(_rotary, _assume_rotary),
    "positions.rotary_base": Property(_base, _assume_base),
    "positions.rotary_start": Property(_start, _assume_start),
    "positions.rotary_grid": Property(_grid, _assume_grid),
    "rotation": Property(_rotation, _assume_rotation),
    "norms.kind": Property(_norm_kind, _assume_norm_kind),
    "norms.order": Property(_order, _assume_order),
    "residual connections": Property(lambda model: AS_ASSUMED),
    "norms without weights": Property(_bare_norms, _assume_no_bare_norms),
    "MLP gate": Property(_gate, _assume_gate),
    "head.pool_prefix": Property(_pool_prefix, _assume_pool_prefix),
    "head.pool_heads": Property(_pool_heads, _assume_pool_heads),
    "mean pooling": Property(lambda model: AS_ASSUMED),
    "attention pattern": Property(lambda model: AS_ASSUMED),
    "queries, keys and values": Property(lambda model: AS_ASSUMED),
    "use of blocks": Property(lambda model: AS_ASSUMED),
    "further operations": Property(lambda model: AS_ASSUMED),
    "code around the model": Property(lambda model: AS_ASSUMED),  # the properties above describe it
    "outputs": Property(lambda model: AS_ASSUMED),
    "patch extraction": Property(lambda model: AS_ASSUMED),
    "use of positions": Property(lambda model: AS_ASSUMED),
    "relative positions": Property(lambda model: AS_ASSUMED),
    "attention.scale": Property(lambda model: None),
    "attention.value_skip": Property(lambda model: False),
    "positions.covers": Property(_covers),
    "positions.kind": Property(lambda model: "learned" if _has_positions(model) else "none"),
    "image_size": Property(image_size),
    "patch_size": Property(_patch_size),
    "in_channels": Property(lambda model: model.in_chans),
}


# Random arguments ----------------------------------------------------------------------------------------------------

_VITS = (
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_wee_patch16_reg1_gap_256",
    "vit_small_patch14_reg4_dinov2",
    "vit_xsmall_patch16_clip_224",
    "vit_medium_patch16_gap_256",
    "vit_base_patch16_siglip_224",
    "flexivit_small",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",
)
_EVAS = (
    "vit_small_patch16_dinov3",
    "vit_tiny_patch16_dinov3_qkvb",
    "vit_small_plus_patch16_dinov3",
    "vit_small_patch16_lingbot",
    "eva02_tiny_patch14_224",
    "vit_pe_core_tiny_patch16_384",
    "vit_pe_spatial_tiny_patch16_512",
    "vit_small_patch16_rope_224",
    "vit_small_patch16_rope_ape_224",
    "vit_small_patch16_rope_mixed_224",
)
_NAFLEX = ("naflexvit_base_patch16_gap", "naflexvit_base_patch16_map", "naflexvit_base_patch16_siglip")
_NORMS = ("layernorm", "layernormfp32", "rmsnorm", "rmsnormfp32", "simplenorm")

_COMMON: dict[str, tuple[Any, ...]] = {
    "num_heads": (1, 2, 3, 4, 6, 8, 12),
    "mlp_ratio": (1.7, 2.5, 3.3, 4.9),
    "qkv_bias": (True, False),
    "qk_norm": (True, False),
    "init_values": (None, 1e-5, 0.3),
    "class_token": (True, False),
    "no_embed_class": (True, False),
    "num_classes": (0, 1, 7, 1000),
    "in_chans": (1, 2, 4, 5),
    "patch_size": (4, 8, 12, 14, 16, (8, 16)),
    "dynamic_img_size": (True, False),
    "drop_path_rate": (0.1,),
}
_VIT_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **_COMMON,
    "global_pool": ("", "avg", "avgmax", "max", "token", "map", "prr"),
    "pool_include_prefix": (True, False),
    "act_layer": tuple(_ACT_LAYER_DEFAULT),
    "norm_layer": _NORMS,
    "embed_norm_layer": _NORMS,
    "attn_layer": ("attn", "diff"),
    "scale_attn_norm": (True,),
    "scale_mlp_norm": (True,),
    "proj_bias": (False,),
    "pos_embed": ("learn", "none", ""),
    "reg_tokens": (0, 1, 3, 4),
    "pre_norm": (True, False),
    "final_norm": (True, False),
    "fc_norm": (True, False),
    "dynamic_img_pad": (True,),
    "block_fn": (vit.ResPostBlock, vit.ParallelScalingBlock, vit.ParallelThingsBlock, vit.DiffParallelScalingBlock),
    "use_naflex": (True,),
}
_EVA_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **_COMMON,
    "global_pool": ("", "avg", "avgmax", "max", "token", "map"),
    "qkv_fused": (True, False),
    "swiglu_mlp": (True, False),
    "swiglu_align_to": (0, 8),
    "scale_mlp": (True, False),
    "scale_attn_inner": (True, False),
    "attn_type": ("eva", "rope"),
    "attn_only_layer_scale": (True,),
    "num_reg_tokens": (0, 1, 4),
    "num_kv_heads": (1,),
    "use_abs_pos_emb": (True, False),
    "use_rot_pos_emb": (True, False),
    "rope_type": ("cat", "mixed", "dinov3", "mrope"),
    "rope_grid_offset": (0.5, 1.0),
    "rope_grid_indexing": ("ij", "xy"),
    "rope_temperature": (10.0, 37.5, 10000.0),
    "rope_rotate_half": (True, False),
    "rope_shift_coords": (0.2,),
    "ref_feat_shape": ((7, 9),),
    "use_post_norm": (True, False),
    "use_pre_transformer_norm": (True, False),
    "use_post_transformer_norm": (True, False),
    "use_fc_norm": (True, False),
    "attn_pool_num_heads": (3,),
    "attn_pool_mlp_ratio": (2.0,),
    "dynamic_img_pad": (True,),
    "use_naflex": (True,),
}
_BEITS = ("beit_base_patch16_224", "beitv2_base_patch16_224")
_BEIT_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "num_heads": (1, 2, 3, 4, 6, 8, 12),
    "mlp_ratio": (1.7, 2.5),
    "qkv_bias": (True, False),
    "init_values": (None, 0.3),
    "num_classes": (0, 7),
    "in_chans": (1, 4),
    "global_pool": ("", "avg", "token"),
    "use_abs_pos_emb": (True, False),
    "use_rel_pos_bias": (True, False),
    "use_shared_rel_pos_bias": (True, False),
    "use_fc_norm": (True, False),
    "swiglu_mlp": (True,),
    "scale_mlp": (True,),
}
_REL_POS = ("vit_relpos_small_patch16_224", "vit_srelpos_small_patch16_224", "vit_relpos_small_patch16_rpn_224")
_REL_POS_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "num_heads": (1, 2, 3, 6),
    "qkv_bias": (True, False),
    "qk_norm": (True, False),
    "init_values": (None, 0.3),
    "class_token": (True, False),
    "num_classes": (0, 7),
    "global_pool": ("", "avg", "token"),
    "fc_norm": (True, False),
    "rel_pos_type": ("mlp", "mlp_swin", "bias"),
    "rel_pos_dim": (None, 5),
    "shared_rel_pos": (True, False),
}
_NAFLEX_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "global_pool": ("avg", "map", "token", "max"),
    "class_token": (True, False),
    "reg_tokens": (0, 1, 4),
    "pos_embed": ("learned", "factorized", "none"),
    "rope_type": ("axial", "dinov3"),
    "embed_proj_type": ("conv", "linear"),
    "num_heads": (6, 8, 12),
    "act_layer": ("gelu", "mish", "silu"),
    "pos_embed_grid_size": ((14, 14), (9, 12)),
}


def random_variation(seed: int) -> tuple[str, dict[str, Any]]:
    """Return a random architecture with one to four random arguments.  timm itself refuses some combinations."""
    rng = np.random.default_rng([seed, 15])
    names, options = (
        (_VITS, _VIT_ARGUMENTS),
        (_EVAS, _EVA_ARGUMENTS),
        (_VITS, _VIT_ARGUMENTS),
        (_EVAS, _EVA_ARGUMENTS),
        (_NAFLEX, _NAFLEX_ARGUMENTS),
        (_BEITS, _BEIT_ARGUMENTS),
        (_REL_POS, _REL_POS_ARGUMENTS),
    )[rng.integers(7)]
    architecture = names[rng.integers(len(names))]
    chosen = rng.choice(list(options), rng.integers(1, 5), replace=False)
    found = {str(key): options[key][rng.integers(len(options[key]))] for key in chosen}
    if rng.random() < 0.5 and names is not _NAFLEX:
        side = found.get("patch_size", patch_side(architecture))
        ph, pw = side if isinstance(side, tuple) else (side, side)
        found["img_size"] = (int(rng.integers(2, 7)) * ph, int(rng.integers(2, 7)) * pw)
    return architecture, found


# Architectures for the tests ------------------------------------------------------------------------------------------


def save_each_way(one: Peer, path: Path) -> Iterator[tuple[str, Path, bool]]:
    """Save a model as a folder and as a state dict; yield the name of the way, the path, and whether it has no config."""
    with contextlib.suppress(ValueError):  # arguments that JSON cannot express
        yield "folder", save_folder(one, path / "folder"), False
    yield "bare", save_state_dict(one, path / "bare" / "model.pth"), True


def signature(architecture: str) -> tuple[Any, ...]:
    """Return the class, the keys and the other properties of an architecture; equal ones need only one test."""
    with torch.device("meta"):
        model = timm.create_model(architecture, **_one_block(architecture))
    values = []
    for name, each in PROPERTIES.items():
        if name not in _SIZES:
            with contextlib.suppress(AttributeError):  # the class does not have this property
                values.append((name, each.truth(model)))
    kind = type(model).__name__
    if kind not in _READ_CLASSES or hasattr(getattr(model, "patch_embed", None), "backbone"):
        return (kind,)  # its keys are not a plain ViT's, so one model of the class is enough
    return kind, frozenset(model.state_dict()), *values


_READ_CLASSES = ("VisionTransformer", "VisionTransformerDistilled", "Eva", "Beit", "VisionTransformerRelPos", "NaFlexVit")
_SIZES = ("image_size", "patch_size", "in_channels", "num_heads")


def up_to_base() -> dict[str, tuple[Any, ...]]:
    """Return the architectures of at most 90 million parameters, with what distinguishes them besides the image size.

    ViT-B/16 has 86.6 million.  Two architectures are one function at different image sizes if they have the same class,
    shapes (but for those of positions) and properties.
    """
    found = {}
    for name in architectures():
        with torch.device("meta"):
            model = timm.create_model(name)
        if sum(parameter.numel() for parameter in model.parameters()) <= 90e6:
            shapes = ((key, tuple(value.shape)) for key, value in model.state_dict().items() if "pos" not in key)
            found[name] = (*shapes, *signature(name))
    return found


def _one_block(architecture: str) -> dict[str, Any]:
    """Return the arguments that make an architecture one block deep."""
    if found := re.search(r"(base|large|huge|giant)_patch16_sapiens2", architecture):
        # Its argument lists the number of key and value heads of each block; in the first block, it is that of the queries.
        return {"depth": 1, "num_kv_heads": ({"base": 12, "large": 16, "huge": 16, "giant": 24}[found[1]],)}
    if architecture.startswith("qwen3_vit"):
        return {"depth": 1, "pos_embed_grid_size": 16}
    if architecture.startswith("naflexvit") and "radio" in architecture:  # its grid of 128 x 128 would take long
        return {"depth": 1, "pos_embed_grid_size": (16, 16)}
    return {"depth": 1}


# The narrowest architecture of each signature, for `make test`.  Architectures larger than "large" are omitted.
DISTINCT = tuple(
    """
    aimv2_large_patch14_224
    beit3_base_patch16_224
    eva_large_patch14_196
    flexivit_small
    test_vit
    test_vit2
    test_vit3
    test_vit4
    deit_tiny_patch16_224
    vit_small_patch14_dinov2
    vit_small_patch14_reg4_dinov2
    vit_small_patch16_18x2_224
    vit_base_patch16_224_miil
    vit_xsmall_patch16_clip_224
    vit_base_patch16_clip_quickgelu_224
    vit_base_patch16_gap_224
    vit_small_patch16_36x1_224
    vit_base_patch16_radio_v3
    vit_base_patch16_reg4_gap_256
    vit_base_patch16_rpn_224
    vit_base_patch16_siglip_224
    vit_base_patch16_siglip_gap_224
    vit_base_patch16_xp_224
    vit_base_patch32_siglip_256
    vit_base_patch32_siglip_gap_256
    vit_medium_patch16_gap_240
    vit_wee_patch16_reg1_gap_256
    vit_dwee_patch16_reg1_gap_256
    vit_dpwee_patch16_reg1_gap_256
    vit_intern300m_patch14_448
    vit_small_patch8_224
    vit_pwee_patch16_reg1_gap_256
    vit_so150m2_patch16_reg1_gap_256
    vit_so150m_patch16_reg4_gap_256
    vit_so150m_patch16_reg4_map_256
    eva02_base_patch14_224
    eva02_base_patch14_448
    eva02_base_patch16_clip_224
    eva02_tiny_patch14_224
    eva02_tiny_patch14_336
    vit_small_patch16_dinov3
    vit_tiny_patch16_dinov3_qkvb
    vit_small_patch16_lingbot
    vit_small_patch16_rope_224
    vit_small_patch16_rope_ape_224
    vit_small_patch16_rope_mixed_224
    vit_small_patch16_rope_mixed_ape_224
    vit_medium_patch16_rope_reg1_gap_256
    vit_base_patch16_sapiens2
    vit_small_plus_patch16_dinov3
    vit_small_plus_patch16_dinov3_qkvb
    vit_mediumd_patch16_rope_reg1_gap_256
    vit_pe_core_tiny_patch16_384
    vit_pe_core_base_patch16_224
    vit_pe_lang_large_patch14_448
    vit_pe_spatial_tiny_patch16_512
    deit3_small_patch16_224
    deit_tiny_distilled_patch16_224
    beit_base_patch16_224
    naflexvit_base_patch16_gap
    naflexvit_base_patch16_parfac_gap
    naflexvit_base_patch16_map
    naflexvit_base_patch16_siglip
    naflexvit_base_patch16_radio_v3
    naflexvit_so150m2_patch16_reg1_gap
    naflexvit_so150m2_patch16_reg1_map
    vit_tiny_r_s16_p8_224
    vit_relpos_small_patch16_224
    vit_relpos_small_patch16_rpn_224
    vit_relpos_medium_patch16_cls_224
    vit_relpos_base_patch16_clsgap_224
    vit_relpos_base_patch16_plus_240
    vit_relpos_base_patch32_plus_rpn_256
    vit_srelpos_small_patch16_224
    qwen3_vit_88m
    qwen3_vit_88m_enc
    samvit_base_patch16_224
    """.split()
)


def untested_architectures() -> list[str]:
    """Return the architectures, up to the size "large", whose signature no architecture in `DISTINCT` has."""
    known = {signature(name) for name in DISTINCT}
    return [name for name in architectures() if not re.search(_LARGER_THAN_LARGE, name) and signature(name) not in known]
