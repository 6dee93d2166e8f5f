"""Hugging Face's CLIP, the image tower: the class token, normalised, onto the shared embedding where there is one.

CLIPVisionModelWithProjection has `visual_projection`, a matrix without bias; num_classes is the embedding's width.
CLIPVisionModel ends before it, and its `pooler_output` is what is computed here.

Source: huggingface/transformers src/transformers/models/clip/modeling_clip.py, configuration_clip.py (defaults).
"""

from collections.abc import Mapping
from typing import Any

from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.format import Evidence, Fields, Format
from vit_spec import ViTConfig
from vit_spec.models import CLIP

NAME, TYPES = "hf-clip", ("clip", "clip_vision_model")
DEFAULTS = {
    "num_attention_heads": 12,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "image_size": 224,
    "patch_size": 32,
}
TEXT = (
    hf.TOWER
    + """
    cls_token       | @embeddings.class_embedding | width
    norm_pre.weight | @pre_layrnorm.weight        | width
    norm_pre.bias   | @pre_layrnorm.bias          | width
    head.weight     | visual_projection.weight    | label feature
"""
)


def settings(evidence: Evidence) -> Fields:
    """Return what config.json and preprocessor_config.json say.

    Raises:
        InputError: the config.json of another model, or one that says what is not known here.
    """
    return hf.settings(evidence, hf.described(evidence, NAME, TYPES, DEFAULTS))


def files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the files with which transformers opens a folder."""
    architecture = "CLIPVisionModelWithProjection" if config.num_classes else "CLIPVisionModel"
    more = {"projection_dim": config.num_classes} if config.num_classes else {}
    return hf.folder(config, "bicubic", hf.config_json(config, "clip_vision_model", architecture, **more))


FORMAT = Format(
    name=NAME,
    what="image tower of CLIP of Hugging Face transformers",
    separator=".",
    tables={"v4": hf.table(TEXT, "vision_model."), "v5": hf.table(TEXT)},
    spellings=hf.V5,
    ignored=hf.TEXT_TOWER,
    always={
        **hf.PLAIN,
        "image_size": hf.square("image_size"),
        "patch_size": hf.square("patch_size"),
        "tokens.class_token": True,
        "tokens.patch_bias": False,
        "positions.kind": "learned",
        "positions.covers": ("all", "class"),
        "attention.qkv_bias": "qkv",
        "attention.proj_bias": True,
        "mlp.activation": hf.UNGATED,
        "norms.before_blocks": True,
        "head.pool": "token",
        "head.bias": lambda config: not config.num_classes and config.head.bias,
    },
    assumed={
        **hf.BICUBIC,
        "norms.eps": 1e-5,
        "mlp.activation": "quick_gelu",
        "pixels.mean": CLIP.mean,
        "pixels.std": CLIP.std,
    },
    settings=settings,
    says=hf.SAYS,
    files=files,
    recognises=lambda evidence: hf.model_type(evidence) in TYPES,
    model_types=TYPES,
)
