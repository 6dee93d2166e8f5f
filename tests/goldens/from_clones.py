"""Golden files of the original code of Meta and OpenAI and of two other repositories, from clones."""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from tests.goldens.golden import Golden
from tests.goldens.peers import (
    Outputs,
    State,
    at_commit,
    case,
    clone,
    float64,
    golden,
    merge_projections,
    rename_keys,
    reshape_entries,
    tiny_config,
)
from vit_spec import ViTConfig

SQUARE = (12, 12)  # the image size for classes whose position table or images must be square


# Meta ---------------------------------------------------------------------------------------------------------------


@case
def meta_dino() -> Golden:
    """DINO: positions scaled by (new + 0.1) / old, also along a side of unchanged size; the last attention map."""
    config = tiny_config(image_size=SQUARE, num_classes=0, resampling={"antialias": False, "offset": 0.1})

    def run(model: Any, images: Tensor) -> Outputs:
        return {
            "logits": model(images),
            "norm": model.get_intermediate_layers(images, 1)[0],
            "attention": model.get_last_selfattention(images),
        }

    with clone("dino"), float64():
        transformer = importlib.import_module("vision_transformer")
        model = transformer.VisionTransformer(
            img_size=[12],
            patch_size=4,
            embed_dim=config.width,
            depth=config.depth,
            num_heads=config.num_heads,
            mlp_ratio=1.5,
            qkv_bias=True,
            norm_layer=functools.partial(torch.nn.LayerNorm, eps=1e-6),
        )
        return golden("meta_dino", model, config, dict, run, peer=at_commit("facebookresearch/dino"), size=(12, 20))


def dinov2(name: str, config: ViTConfig, **options: Any) -> Golden:
    """Return the golden file of a DINOv2; `options` are arguments of its class."""

    def rename(state: State) -> State:
        state = rename_keys(state, {"mask_token": None})
        state = rename_keys(state, {"register_tokens": "reg_token"}) if config.tokens.registers else state
        return rename_keys(state, {r"mlp\.w12": "mlp.fc1", r"mlp\.w3": "mlp.fc2"}) if "ffn_layer" in options else state

    def run(model: Any, images: Tensor) -> Outputs:
        found = model.forward_features(images)
        return {"logits": model(images), "blocks.1": found["x_prenorm"]}

    with clone("dinov2"), float64():
        transformer = importlib.import_module("dinov2.models.vision_transformer")
        model = transformer.DinoVisionTransformer(
            img_size=12,
            patch_size=4,
            embed_dim=config.width,
            depth=config.depth,
            num_heads=config.num_heads,
            mlp_ratio=1.5,
            init_values=1e-5,
            block_chunks=0,
            num_register_tokens=config.tokens.registers,
            **options,
        )
        return golden(name, model, config, rename, run, peer=at_commit("facebookresearch/dinov2"), size=(20, 8))


@case
def meta_dinov2() -> Golden:
    """DINOv2: gated, layer scale, and DINO's rule for positions."""
    config = tiny_config(
        image_size=SQUARE,
        mlp_dim=16,
        num_classes=0,
        resampling={"antialias": False, "offset": 0.1},
        mlp={"activation": "swiglu"},
        norms={"layer_scale": 1e-5},
    )
    return dinov2("meta_dinov2", config, ffn_layer="swiglu")


@case
def meta_dinov2_registers() -> Golden:
    """DINOv2 with registers, which have no position; antialiasing, and no offset."""
    config = tiny_config(
        image_size=SQUARE,
        num_classes=0,
        tokens={"registers": 2},
        positions={"covers": "class"},
        norms={"layer_scale": 1e-5},
    )
    return dinov2("meta_dinov2_registers", config, interpolate_antialias=True, interpolate_offset=0.0)


def dinov3(name: str, config: ViTConfig, ffn_layer: str) -> Golden:
    """Return the golden file of a DINOv3 with one of its MLP classes."""

    def rename(state: State) -> State:
        rules: dict[str, str | None] = {"mask_token|bias_mask|periods": None, "storage_tokens": "reg_token"}
        state = rename_keys(state, rules)
        if config.mlp.activation == "swiglu":
            state = rename_keys(merge_projections(state, ("w1", "w2"), "fc1"), {r"mlp\.w3": "mlp.fc2"})
        result: State = {}
        for key, value in state.items():  # in the bias of q, k and v, the part of the keys is masked
            if key.endswith("qkv.bias"):
                q, _, v = value.chunk(3)
                result |= {key.replace("qkv.bias", "q_bias"): q, key.replace("qkv.bias", "v_bias"): v}
            else:
                result[key] = value
        return result

    def run(model: Any, images: Tensor) -> Outputs:
        for block in model.blocks:
            third = config.width
            block.attn.qkv.bias_mask.fill_(1.0)[third : 2 * third] = 0.0  # as `init_weights` does
        return {"logits": model(images), "blocks.1": model.forward_features(images)["x_prenorm"]}

    with clone("dinov3"), float64():
        transformer = importlib.import_module("dinov3.models.vision_transformer")
        model = transformer.DinoVisionTransformer(
            img_size=12,
            patch_size=4,
            embed_dim=config.width,
            depth=config.depth,
            num_heads=config.num_heads,
            ffn_ratio=1.5,
            ffn_layer=ffn_layer,
            layerscale_init=1e-5,
            norm_layer="layernormbf16",
            n_storage_tokens=config.tokens.registers,
            mask_k_bias=True,
            pos_embed_rope_dtype="fp32",
        )
        return golden(name, model, config, rename, run, peer=at_commit("facebookresearch/dinov3"))


DINOV3 = tiny_config(
    width=16,
    num_heads=2,
    mlp_dim=24,
    num_classes=0,
    tokens={"registers": 2},
    positions={"kind": "none", "rotary": "dinov3", "rotary_base": 100.0},
    attention={"qkv_bias": "qv"},
    norms={"eps": 1e-5, "layer_scale": 1e-5},
)


@case
def meta_dinov3() -> Golden:
    """DINOv3: rotary positions by halves on patches alone, no bias of keys, eps 1e-5; periods as hub/backbones.py."""
    return dinov3("meta_dinov3", DINOV3, "mlp")


@case
def meta_dinov3_gated() -> Golden:
    """DINOv3's "plus" sizes: a gated MLP, whose width is two thirds of the ratio's."""
    return dinov3("meta_dinov3_gated", DINOV3.replace(mlp_dim=16, mlp={"activation": "swiglu"}), "swiglu")


# OpenAI -------------------------------------------------------------------------------------------------------------


@case
def openai_clip() -> Golden:
    """CLIP's image tower: the class and position embeddings are sums, and the projection multiplies from the right."""
    config = tiny_config(
        image_size=SQUARE,
        mlp_dim=48,
        tokens={"patch_bias": False},
        mlp={"activation": "quick_gelu"},
        norms={"eps": 1e-5, "before_blocks": True},
        head={"bias": False},
    )

    def rename(state: State) -> State:
        rules = {
            "^class_embedding": "cls_token",
            "^positional_embedding": "pos_embed",
            "^conv1": "patch_embed.proj",
            "^ln_pre": "norm_pre",
            "^ln_post": "norm",
            r"^transformer\.resblocks": "blocks",
            r"ln_(\d)": r"norm\1",
            r"attn\.in_proj_": "attn.qkv.",
            r"attn\.out_proj": "attn.proj",
            r"mlp\.c_fc": "mlp.fc1",
            r"mlp\.c_proj": "mlp.fc2",
            "^proj$": "head.weight",
        }
        state = reshape_entries(rename_keys(state, rules), cls_token=(1, 1, -1), pos_embed=(1, -1, config.width))
        return {**state, "head.weight": state["head.weight"].T.contiguous()}

    with clone("CLIP/clip"), float64():  # not the package, which imports the dependencies of its tokenizer
        transformer = importlib.import_module("model")
        model = transformer.VisionTransformer(12, 4, config.width, config.depth, config.num_heads, 5)
        return golden("openai_clip", model, config, rename, lambda m, x: {"logits": m(x)}, peer=at_commit("openai/CLIP"))


# Two other repositories ---------------------------------------------------------------------------------------------


@case
def schh_rotary() -> Golden:
    """The axial rotary positions of article_xray_rope: counted from 1, theta from i = 1, neighbouring pairs."""
    config = tiny_config(
        image_size=SQUARE,
        width=16,
        num_heads=2,
        mlp_dim=32,
        positions={"kind": "none", "rotary": "axial"},
        norms={"eps": 1e-5},
    )

    def rename(state: State) -> State:
        rules: dict[str, str | None] = {
            "rotary_embedding": None,
            r"^embedding\.conv1": "patch_embed.proj",
            r"^embedding\.cls_token": "cls_token",
            "^encoder": "blocks",
            "out_projection": "proj",
            "attention": "attn",
            r"\.fc": ".mlp.fc",
            r"^classifier\.mlp\.fc": "head",
        }
        return merge_projections(rename_keys(state, rules), ("queries", "keys", "values"), "qkv")

    with clone("2D-Positional-Encoding-Vision-Transformer"), float64():
        vit = importlib.import_module("vit_model")
        model = vit.VisionTransformer(3, 16, 2, 2, 2, 12, 4, 5, pos_embed="rope")
        peer = at_commit("s-chh/2D-Positional-Encoding-Vision-Transformer")
        return golden("schh_rotary", model, config, rename, lambda m, x: {"logits": m(x)}, peer=peer)


@case
def lanl_rectangular() -> Golden:
    """article_rectangular's own code: a fixed 1-D table, and values added to the output of attention."""
    config = tiny_config(
        in_channels=1,
        num_classes=1,
        positions={"kind": "fixed", "table": "sincos_1d"},
        attention={"qkv_bias": "none", "value_skip": True},
        norms={"eps": 1e-5},
    )

    def rename(state: State) -> State:
        rules: dict[str, str | None] = {
            "pos_embed": None,
            r"^backbone\.": "",
            r"^patch_tokens\.project": "patch_embed.proj",
        }
        state = rename_keys(state, {**rules, "neuralnet": "mlp"})
        return reshape_entries(state, **{"patch_embed.proj.weight": (config.width, 1, *config.patch_size)})

    def run(model: Any, images: Tensor) -> Outputs:
        return {"logits": model(images)}

    with clone("vision_transformers_explained/modules"), float64():
        vit = importlib.import_module("vit")
        model = vit.ViT_Model((1, *config.image_size), 4, 12, 1, 3, 1.5, 2)
        peer = at_commit("lanl/vision_transformers_explained")
        return golden("lanl_rectangular", model, config, rename, run, peer=peer)
