"""The image tower of Hugging Face's CLIP: the normalized class token, with or without a projection to the shared embedding.

CLIPVisionModelWithProjection has `visual_projection`, a matrix without bias; num_classes is the width of the embedding.
CLIPVisionModel has no projection; the twins compute its `pooler_output`.

Source: huggingface/transformers src/transformers/models/clip/modeling_clip.py, configuration_clip.py (defaults).
"""

from collections.abc import Mapping
from typing import Any

from parity.checkpoints.formats import hf_classes
from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.library_files import LibraryFiles
from vit_spec import ViTConfig
from vit_spec.models import CLIP
from vit_spec.parts import UNGATED_ACTIVATIONS

NAME, TYPES = "hf-clip", ("clip", "clip_vision_model")
DEFAULTS = {
    "num_attention_heads": 12,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "image_size": 224,
    "patch_size": 32,
}
TEXT = (
    hf.VISION_TOWER
    + """
    cls_token       | @embeddings.class_embedding | width
    norm_pre.weight | @pre_layrnorm.weight        | width
    norm_pre.bias   | @pre_layrnorm.bias          | width
    head.weight     | visual_projection.weight    | label feature
"""
)


def read_config(evidence: Evidence) -> Fields:
    """Return the fields that config.json and preprocessor_config.json state.

    Raises:
        InputError: the config.json of another model, or an unknown field or value.
    """
    return hf.config_fields(evidence, hf.read_config_json(evidence, NAME, TYPES, DEFAULTS))


def json_files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the JSON files that transformers needs to open a folder."""
    architecture = "CLIPVisionModelWithProjection" if config.num_classes else "CLIPVisionModel"
    more = {"projection_dim": config.num_classes} if config.num_classes else {}
    return hf.folder_files(config, "bicubic", hf.config_json(config, "clip_vision_model", architecture, **more))


FORMAT = Format(
    name=NAME,
    description="image tower of CLIP of Hugging Face transformers",
    separator=".",
    tables={"v4": hf.table(TEXT, "vision_model."), "v5": hf.table(TEXT)},
    spellings=hf.V5_SPELLINGS,
    ignored_keys=hf.TEXT_TOWER_KEYS,
    ignored_values=hf.TEXT_TOWER_VALUES,
    constraints={
        **hf.COMMON_CONSTRAINTS,
        "image_size": hf.square_only("image_size"),
        "patch_size": hf.square_only("patch_size"),
        "tokens.class_token": True,
        "tokens.patch_bias": False,
        "positions.kind": "learned",
        "positions.covers": ("all", "class"),
        "attention.qkv_bias": "qkv",
        "attention.proj_bias": True,
        "mlp.activation": UNGATED_ACTIVATIONS,
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
    read_config=read_config,
    assumed_behaviour=hf_classes.assumed_behaviour,
    library=LibraryFiles(contents=json_files, model_types=TYPES),
    recognises=lambda evidence: hf_classes.model_type(evidence) in TYPES,
)
