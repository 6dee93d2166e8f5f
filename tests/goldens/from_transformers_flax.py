"""Golden files of the Flax models of transformers up to version 4, with the files that `save_pretrained` wrote."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict
from transformers import FlaxPreTrainedModel  # version 5 lacks it: `make` then skips this module

from tests.goldens.from_google import random_google_parameter
from tests.goldens.golden import Array, Golden, noise
from tests.goldens.peers import State, case, merge_projections, rename_keys, rng_for, tiny_config
from vit_spec import ViTConfig

Run = Callable[[Any, Any, Any], Any]  # a module, its variables, images (B, H, W, C) -> (B, num_classes)


def hf_flax(name: str, model: str, options: Any, config: ViTConfig, rename: Callable[[State], State], run: Run) -> Golden:
    """Fill a class with noise, run it in float64, and return its golden file with the files that `save_pretrained` writes.

    model: the name of the class.
    options: the config of the class.
    """
    with jax.enable_x64(True):
        peer: FlaxPreTrainedModel = getattr(transformers, model)(options, dtype=jnp.float64)
        rng, flat = rng_for(name), {}
        for key, like in flatten_dict(peer.params, sep="/").items():
            flat[key] = random_google_parameter(rng, f"/{key}", like.shape).astype(np.float32)
        peer.params = unflatten_dict(flat, sep="/")
        images = noise(rng, (2, config.in_channels, *config.image_size), 1.0)
        with tempfile.TemporaryDirectory() as folder:
            peer.save_pretrained(folder)
            files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
        variables = {"params": jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), peer.params)}
        logits = np.asarray(run(peer.module, variables, images.transpose(0, 2, 3, 1)))
    about = {"peer": f"transformers {transformers.__version__}", "class": f"transformers.{model}"}
    about |= {"jax": jax.__version__, "flax": flax.__version__}
    return Golden(config, torch_names(flat, rename), images, {"logits": logits}, about, files)


def torch_names(flat: dict[str, Array], rename: Callable[[State], State]) -> dict[str, Array]:
    """Return Flax's parameters with PyTorch's order of axes, under the names of the PyTorch twin."""
    state: State = {}
    for key, array in flat.items():
        words = key.replace("/kernel", "/weight").replace("/scale", "/weight").replace("/", ".")
        if key.endswith("kernel"):
            array = array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T
        state[words] = torch.tensor(array.astype(np.float64))
    return {key: value.numpy() for key, value in rename(state).items()}


EMBEDDINGS: dict[str, str | None] = {
    r"embeddings\.cls_token": "cls_token",
    r"embeddings\.position_embeddings": "pos_embed",
    r"embeddings\.patch_embeddings\.projection": "patch_embed.proj",
    r"^encoder\.layer\.": "blocks.",
    r"attention\.attention": "attn",
    r"attention\.output\.dense": "attn.proj",
}
QKV = ("query", "key", "value")


def common(config: ViTConfig) -> dict[str, Any]:
    """Return the config fields that all these classes have."""
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "image_size": config.image_size[0],
        "patch_size": config.patch_size[0],
        "layer_norm_eps": config.norms.eps,
    }


# ViT ----------------------------------------------------------------------------------------------------------------

VIT = {
    **EMBEDDINGS,
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    r"^layernorm": "norm",
    r"intermediate\.dense": "mlp.fc1",
    r"output\.dense": "mlp.fc2",
}


@case
def hf_flax_vit() -> Golden:
    """FlaxViT with a classifier: exact GELU, eps 1e-12."""
    config = tiny_config(image_size=(12, 12), norms={"eps": 1e-12}, resampling={"antialias": False})
    options = transformers.ViTConfig(**common(config), num_labels=config.num_classes)

    def rename(state: State) -> State:
        return merge_projections(rename_keys(state, {r"^vit\.": "", **VIT, "classifier": "head"}), QKV, "qkv")

    def run(module: Any, variables: Any, images: Any) -> Any:
        return module.apply(variables, images).logits

    return hf_flax("hf_flax_vit", "FlaxViTForImageClassification", options, config, rename, run)


@case
def hf_flax_vit_pooler() -> Golden:
    """FlaxViT without a classifier: a hidden layer with tanh, tanh GELU, no biases of queries, keys and values."""
    config = tiny_config(
        image_size=(12, 12),
        num_classes=0,
        norms={"eps": 1e-5},
        attention={"qkv_bias": "none"},
        mlp={"activation": "gelu_tanh"},
        head={"hidden": 12},
        resampling={"antialias": False},
    )
    options = transformers.ViTConfig(**common(config), qkv_bias=False, hidden_act="gelu_new")

    def rename(state: State) -> State:
        return merge_projections(rename_keys(state, {**VIT, r"pooler\.dense": "pre_logits"}), QKV, "qkv")

    def run(module: Any, variables: Any, images: Any) -> Any:
        return module.apply(variables, images).pooler_output

    return hf_flax("hf_flax_vit_pooler", "FlaxViTModel", options, config, rename, run)


# DINOv2 -------------------------------------------------------------------------------------------------------------

DINOV2 = {**EMBEDDINGS, r"layer_scale(\d)\.lambda1": r"ls\1.gamma", r"^layernorm": "norm"}
LIKE_DINOV2: dict[str, Any] = {
    "image_size": (12, 12),
    "pixels": {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
    "norms": {"layer_scale": 1.0},
    "resampling": {"antialias": False},
}


@case
def hf_flax_dinov2() -> Golden:
    """FlaxDinov2 with a classifier on the class token and the mean of the patches."""
    config = tiny_config(**LIKE_DINOV2, mlp_dim=24, head={"pool": "token_mean"})
    options = transformers.Dinov2Config(**common(config), mlp_ratio=2, num_labels=config.num_classes)

    def rename(state: State) -> State:
        rules = {"mask_token": None, r"^dinov2\.": "", **DINOV2, "classifier": "head"}
        return merge_projections(rename_keys(state, rules), QKV, "qkv")

    def run(module: Any, variables: Any, images: Any) -> Any:
        return module.apply(variables, images).logits

    return hf_flax("hf_flax_dinov2", "FlaxDinov2ForImageClassification", options, config, rename, run)


@case
def hf_flax_dinov2_gated() -> Golden:
    """FlaxDinov2 without a classifier, with gated MLPs."""
    config = tiny_config(**LIKE_DINOV2, num_classes=0, mlp_dim=16, mlp={"activation": "swiglu"})
    options = transformers.Dinov2Config(**common(config), mlp_ratio=2, use_swiglu_ffn=True)

    def rename(state: State) -> State:
        rules = {"mask_token": None, **DINOV2, "weights_in": "fc1", "weights_out": "fc2"}
        return merge_projections(rename_keys(state, rules), QKV, "qkv")

    def run(module: Any, variables: Any, images: Any) -> Any:
        return module.apply(variables, images).pooler_output

    return hf_flax("hf_flax_dinov2_gated", "FlaxDinov2Model", options, config, rename, run)


# CLIP ---------------------------------------------------------------------------------------------------------------

CLIP = {
    r"^vision_model\.": "",
    r"^embeddings\.class_embedding": "cls_token",
    r"^embeddings\.position_embedding\.embedding": "pos_embed",
    r"^embeddings\.patch_embedding": "patch_embed.proj",
    "pre_layrnorm": "norm_pre",
    r"^encoder\.layers": "blocks",
    "layer_norm": "norm",
    r"self_attn\.out_proj": "attn.proj",
    r"self_attn\.(\w+)_proj": r"attn.\1",
    "post_layernorm": "norm",
}
LIKE_CLIP: dict[str, Any] = {
    "image_size": (12, 12),
    "pixels": {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)},
    "tokens": {"patch_bias": False},
    "mlp": {"activation": "quick_gelu"},
    "resampling": {"antialias": False},
}


def clip_names(state: State, **more: str | None) -> State:
    state = merge_projections(rename_keys(state, {**CLIP, **more}), ("q", "k", "v"), "qkv")
    return {
        key: value.reshape(1, *([1] * (2 - value.ndim)), *value.shape) if key in TABLES else value
        for key, value in state.items()
    }


TABLES = ("cls_token", "pos_embed")  # keys whose arrays need leading axes of length one


@case
def hf_flax_clip() -> Golden:
    """FlaxCLIP's image tower alone: quick GELU, a norm before the blocks and one on the pooled token."""
    config = tiny_config(**LIKE_CLIP, num_classes=0, norms={"eps": 1e-5, "before_blocks": True})
    options = transformers.CLIPVisionConfig(**common(config))

    def run(module: Any, variables: Any, images: Any) -> Any:
        return module.apply(variables, images).pooler_output

    return hf_flax("hf_flax_clip", "FlaxCLIPVisionModel", options, config, clip_names, run)


@case
def hf_flax_clip_both() -> Golden:
    """FlaxCLIP with its projection, beside a text tower."""
    config = tiny_config(**LIKE_CLIP, norms={"eps": 1e-6, "before_blocks": True}, head={"bias": False})
    text = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    text |= {"max_position_embeddings": 4, "bos_token_id": 7, "eos_token_id": 8, "pad_token_id": 0}
    options = transformers.CLIPConfig(text, common(config), projection_dim=config.num_classes)

    def rename(state: State) -> State:
        return clip_names(
            {key: value for key, value in state.items() if "text" not in key}, logit_scale=None, visual_projection="head"
        )

    def run(module: Any, variables: Any, images: Any) -> Any:
        def project(module: Any, images: Any) -> Any:
            return module.visual_projection(module.vision_model(images).pooler_output)

        return module.apply(variables, images, method=project)

    return hf_flax("hf_flax_clip_both", "FlaxCLIPModel", options, config, rename, run)
