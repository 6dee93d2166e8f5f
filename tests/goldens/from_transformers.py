"""Golden files of Hugging Face transformers, with its own ("eager") attention."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.goldens.golden import Golden
from tests.goldens.peers import (
    Outputs,
    State,
    case,
    float64,
    golden,
    merge_projections,
    rename_keys,
    reshape_entries,
    tiny_config,
)
from vit_spec import ViTConfig

SQUARE = (12, 12)  # the image size for classes whose position table or images must be square


def hf(
    name: str,
    model: str,
    config: ViTConfig,
    rename: Callable[[State], State],
    run: Callable[[Any, Tensor], Outputs],
    size: tuple[int, int] | None = None,
    prepare: Callable[[Any], None] = lambda model: None,
    **options: Any,
) -> Golden:
    """Return the golden file of a class.

    model: the name of the class.
    prepare: a function that changes the new model in place, before its weights are drawn.
    options: fields of the config of the class.
    """
    cls = getattr(transformers, model)
    common = {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "image_size": config.image_size[0] if config.image_size == SQUARE else list(config.image_size),
        "patch_size": config.patch_size[0],
        "num_labels": config.num_classes,
        "attn_implementation": "eager",
    }
    with float64():
        peer = cls(cls.config_class(**{**common, **options}))
        prepare(peer)
        return golden(name, peer, config, rename, run, peer=f"transformers {transformers.__version__}", size=size)


EMBEDDINGS = {
    r"embeddings\.cls_token": "cls_token",
    r"embeddings\.position_embeddings": "pos_embed",
    r"embeddings\.patch_embeddings(\.projection)?": "patch_embed.proj",
}
ATTENTION = {
    r"attention\.([qkv])_proj": r"attn.\1",
    r"attention\.o_proj": "attn.proj",
}
QKV = ("q", "k", "v")
ViT_BLOCKS = {"layers": "blocks", "layernorm_before": "norm1", "layernorm_after": "norm2", "layernorm": "norm"}
DINO_BLOCKS = {r"layer\.": "blocks.", r"layer_scale(\d)\.lambda1": r"ls\1.gamma"}


# ViT and its masked autoencoder -------------------------------------------------------------------------------------


def vit_names(state: State) -> State:
    rules = {r"^vit\.": "", **EMBEDDINGS, **ViT_BLOCKS, **ATTENTION, "classifier": "head"}
    return merge_projections(rename_keys(state, rules), QKV, "qkv")


def vit_run(model: Any, images: Tensor) -> Outputs:
    options = {"interpolate_pos_encoding": True} if images.shape[2:] != tuple(model.vit.embeddings.image_size) else {}
    return {
        "logits": model(images, **options).logits,
        "norm": model.vit(images, **options).last_hidden_state,
    }


@case
def hf_vit() -> Golden:
    """transformers' ViT: eps 1e-12."""
    config = tiny_config(norms={"eps": 1e-12})
    return hf("hf_vit", "ViTForImageClassification", config, vit_names, vit_run, layer_norm_eps=1e-12)


@case
def hf_vit_resized() -> Golden:
    """Positions resampled to another grid as in transformers' ViT, DeiT, MAE and CLIP: bicubic without antialiasing."""
    config = tiny_config(image_size=SQUARE, norms={"eps": 1e-12}, resampling={"antialias": False})
    options = {"layer_norm_eps": 1e-12, "size": (20, 8)}
    return hf("hf_vit_resized", "ViTForImageClassification", config, vit_names, vit_run, **options)


@case
def hf_mae() -> Golden:
    """MAE's encoder with nothing masked: its fixed 2-D table, in which the class token has zeros."""
    config = tiny_config(
        image_size=SQUARE, num_classes=0, positions={"kind": "fixed", "table": "sincos_2d_mae"}, norms={"eps": 1e-12}
    )

    def rename(state: State) -> State:
        rules = {r"^embeddings\.position_embeddings": None, **EMBEDDINGS, **ViT_BLOCKS, **ATTENTION}
        del rules[r"embeddings\.position_embeddings"]
        return merge_projections(rename_keys(state, rules), QKV, "qkv")

    def run(model: Any, images: Tensor) -> Outputs:
        in_order = torch.arange(config.num_tokens - 1).expand(len(images), -1) / config.num_tokens
        tokens = model(images, noise=in_order).last_hidden_state
        return {"logits": tokens[:, 0], "norm": tokens}

    def prepare(model: Any) -> None:
        # transformers 5.23 leaves the position table of a new model at zero if the projection is initialized already.
        for part in (model.embeddings.patch_embeddings.projection, model.embeddings.position_embeddings):
            part._is_hf_initialized = False
        model.embeddings.initialize_weights()

    return hf("hf_mae", "ViTMAEModel", config, rename, run, prepare=prepare, mask_ratio=0.0, layer_norm_eps=1e-12)


# BEiT ---------------------------------------------------------------------------------------------------------------


@case
def hf_beit() -> Golden:
    """transformers' BEiT: a table of relative positions in each block, layer scale, a norm of the mean of the patches."""
    config = tiny_config(
        depth=1,
        mlp_dim=4,
        image_size=SQUARE,
        positions={"kind": "none", "relative": "table"},
        attention={"qkv_bias": "qv"},
        norms={"eps": 1e-12, "layer_scale": 0.1, "after_blocks": False, "after_pool": True},
        head={"pool": "mean"},
    )

    def rename(state: State) -> State:
        rules = {r"^beit\.": "", r"pooler\.layernorm": "fc_norm", **EMBEDDINGS, **ViT_BLOCKS, "classifier": "head"}
        rules |= {r"lambda_(\d)": r"ls\1.gamma", r"attention\.([qv])_proj\.bias": r"attn.\1_bias", **ATTENTION}
        rules[r"relative_position_bias\.relative_position_bias_table"] = "attn.rel_pos.table"
        del rules[r"embeddings\.position_embeddings"], rules["layernorm"]  # it has neither
        return merge_projections(rename_keys(state, rules), QKV, "qkv")

    def run(model: Any, images: Tensor) -> Outputs:
        return {"logits": model(images).logits, "blocks.0": model.beit(images).last_hidden_state}

    return hf("hf_beit", "BeitForImageClassification", config, rename, run, use_relative_position_bias=True)


# DINO ---------------------------------------------------------------------------------------------------------------


def dinov2_names(state: State) -> State:
    state = rename_keys(state, {r"mask_token$": None, r"^dinov2(_with_registers)?\.": "", r"^encoder\.": ""})
    state = rename_keys(state, {**EMBEDDINGS, **DINO_BLOCKS, **ATTENTION, "^layernorm": "norm", "classifier": "head"})
    if "embeddings.register_tokens" in state:
        state = rename_keys(state, {r"embeddings\.register_tokens": "reg_token"})
    if any("gate_proj" in key for key in state):
        state = rename_keys(merge_projections(state, ("gate_proj", "up_proj"), "fc1"), {"down_proj": "fc2"})
    return merge_projections(state, QKV, "qkv")


@case
def hf_dinov2() -> Golden:
    """Gated DINOv2 on another input size (bicubic, no antialiasing, no offset), classified by class token and mean."""
    config = tiny_config(
        image_size=SQUARE,
        mlp_dim=16,
        resampling={"antialias": False},
        mlp={"activation": "swiglu"},
        norms={"layer_scale": 1.0},
        head={"pool": "token_mean"},
    )

    def run(model: Any, images: Tensor) -> Outputs:
        return {"logits": model(images).logits, "norm": model.dinov2(images).last_hidden_state}

    options = {"use_swiglu_ffn": True, "mlp_ratio": 2, "size": (8, 20)}
    return hf("hf_dinov2", "Dinov2ForImageClassification", config, dinov2_names, run, **options)


@case
def hf_dinov2_registers() -> Golden:
    """DINOv2 with registers: a position for the class token and none for the registers, antialiasing."""
    config = tiny_config(
        image_size=SQUARE,
        mlp_dim=24,
        tokens={"registers": 2},
        positions={"covers": "class"},
        norms={"layer_scale": 1.0},
        head={"pool": "token_mean"},
    )

    def run(model: Any, images: Tensor) -> Outputs:
        return {"logits": model(images).logits, "norm": model.dinov2_with_registers(images).last_hidden_state}

    options = {"num_register_tokens": 2, "mlp_ratio": 2, "size": (8, 20)}
    cls = "Dinov2WithRegistersForImageClassification"
    return hf("hf_dinov2_registers", cls, config, dinov2_names, run, **options)


def dinov3(name: str, config: ViTConfig, **options: Any) -> Golden:
    """Return the golden file of a DINOv3; `options` are fields of its config."""

    def rename(state: State) -> State:
        rules = {r"mask_token$": None, r"embeddings\.register_tokens": "reg_token", r"^model\.layer": "layer"}
        rules |= {key: value for key, value in EMBEDDINGS.items() if "position" not in key}
        state = rename_keys(state, {**rules, **DINO_BLOCKS, **ATTENTION, "down_proj": "fc2"})
        if config.mlp.activation == "swiglu":
            state = merge_projections(state, ("gate_proj", "up_proj"), "fc1")
        else:
            state = rename_keys(state, {"up_proj": "fc1"})
        if config.attention.qkv_bias == "qv":
            state = rename_keys(state, {r"\.([qv])\.bias": r".\1_bias"})
        return merge_projections(state, QKV, "qkv")

    def run(model: Any, images: Tensor) -> Outputs:
        found = model(images)
        return {"logits": found.pooler_output, "norm": found.last_hidden_state}

    options |= {"num_register_tokens": config.tokens.registers, "layer_norm_eps": 1e-5, "rope_theta": 100.0}
    return hf(name, "DINOv3ViTModel", config, rename, run, **options)


DINOV3 = tiny_config(
    width=16,
    num_heads=2,
    num_classes=0,
    tokens={"registers": 2},
    positions={"kind": "none", "rotary": "dinov3", "rotary_base": 100.0},
    norms={"eps": 1e-5, "layer_scale": 1.0},
)


@case
def hf_dinov3() -> Golden:
    """transformers' DINOv3: rotary positions, biases of queries and values, on another size than its own."""
    config = DINOV3.replace(attention={"qkv_bias": "qv"})
    options = {"query_bias": True, "key_bias": False, "value_bias": True, "size": (20, 16)}
    return dinov3("hf_dinov3", config, **options)


@case
def hf_dinov3_gated() -> Golden:
    """Its gated form, without those biases."""
    config = DINOV3.replace(attention={"qkv_bias": "none"}, mlp={"activation": "swiglu"})
    options = {"query_bias": False, "key_bias": False, "value_bias": False}
    return dinov3("hf_dinov3_gated", config, use_gated_mlp=True, hidden_act="silu", **options)


# CLIP and SigLIP ----------------------------------------------------------------------------------------------------

CLIP_BLOCKS = {
    r"^encoder\.layers": "blocks",
    r"layer_norm(\d)": r"norm\1",
    r"self_attn\.([qkv])_proj": r"attn.\1",
    r"self_attn\.out_proj": "attn.proj",
    "post_layernorm": "norm",
    r"^embeddings\.patch_embedding": "patch_embed.proj",
    r"^embeddings\.position_embedding\.weight": "pos_embed",
}


@case
def hf_clip() -> Golden:
    """CLIP's image tower with the projection to the shared embedding, which has no bias."""
    config = tiny_config(
        image_size=SQUARE,
        tokens={"patch_bias": False},
        mlp={"activation": "quick_gelu"},
        norms={"eps": 1e-5, "before_blocks": True},
        head={"bias": False},
    )

    def rename(state: State) -> State:
        rules = {r"^vision_model\.": "", r"^embeddings\.class_embedding": "cls_token", "pre_layrnorm": "norm_pre"}
        state = rename_keys(state, {**rules, **CLIP_BLOCKS, "visual_projection": "head"})
        return reshape_entries(merge_projections(state, QKV, "qkv"), cls_token=(1, 1, -1), pos_embed=(1, -1, config.width))

    def run(model: Any, images: Tensor) -> Outputs:
        found = model(images)
        return {"logits": found.image_embeds, "blocks.1": found.last_hidden_state}

    options = {"projection_dim": 5, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
    return hf("hf_clip", "CLIPVisionModelWithProjection", config, rename, run, **options)


def siglip_names(state: State) -> State:
    """Rename a state dict whose pooling head is PyTorch's MultiheadAttention, with one matrix for all projections."""
    pool = {
        r"^head\.probe": "attn_pool.latent",
        r"^head\.attention\.out_proj": "attn_pool.proj",
        r"^head\.layernorm": "attn_pool.norm",
        r"^head\.mlp": "attn_pool.mlp",
    }
    state = merge_projections(rename_keys(state, {**CLIP_BLOCKS, **pool}), QKV, "qkv")
    width = state["attn_pool.proj.bias"].shape[0]
    for kind in ("weight", "bias"):
        whole = state.pop(f"head.attention.in_proj_{kind}")
        state[f"attn_pool.q.{kind}"], state[f"attn_pool.kv.{kind}"] = whole[:width], whole[width:]
    return reshape_entries(state, pos_embed=(1, -1, width))


SIGLIP = tiny_config(
    image_size=SQUARE,
    num_classes=0,
    tokens={"class_token": False},
    mlp={"activation": "gelu_tanh"},
    head={"pool": "attention"},
)


@case
def hf_siglip() -> Golden:
    """SigLIP's image tower, whose pooling is PyTorch's multi-head attention."""

    def run(model: Any, images: Tensor) -> Outputs:
        found = model(images)
        return {"logits": found.pooler_output, "norm": found.last_hidden_state}

    options = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
    return hf("hf_siglip", "SiglipVisionModel", SIGLIP, siglip_names, run, **options)


@case
def hf_siglip2() -> Golden:
    """SigLIP 2 on images that keep their aspect ratio: patches as input, positions bilinear with antialiasing."""
    config = SIGLIP.replace(image_size=(16, 16), resampling={"kernel": "bilinear"})
    (ph, pw), size = config.patch_size, (8, 24)

    def rename(state: State) -> State:
        state = siglip_names(state)
        flat = state["patch_embed.proj.weight"]  # its inputs are (rows, columns, channels)
        state["patch_embed.proj.weight"] = flat.reshape(-1, ph, pw, config.in_channels).permute(0, 3, 1, 2)
        return state

    def run(model: Any, images: Tensor) -> Outputs:
        rows, columns = size[0] // ph, size[1] // pw
        patches = [
            images[:, :, ph * y : ph * (y + 1), pw * x : pw * (x + 1)].permute(0, 2, 3, 1).flatten(1)
            for y in range(rows)
            for x in range(columns)
        ]
        mask = torch.ones(len(images), len(patches), dtype=torch.int64)
        shapes = torch.tensor([[rows, columns]] * len(images))
        found = model(torch.stack(patches, 1), pixel_attention_mask=mask, spatial_shapes=shapes)
        return {"logits": found.pooler_output, "norm": found.last_hidden_state}

    options = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "num_patches": 16, "size": size}
    return hf("hf_siglip2", "Siglip2VisionModel", config, rename, run, **options)
