"""The image tower of Hugging Face's SigLIP, with attention pooling.  SigLIP 2 with a fixed resolution is the same model.

Positions are resampled to a size without antialiasing.  SigLIP 2 with a flexible resolution ("naflex") is another model.

Source: huggingface/transformers src/transformers/models/siglip/modeling_siglip.py, configuration_siglip.py (defaults).
"""

from collections.abc import Mapping
from typing import Any

from parity.checkpoints.formats import hf_classes
from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.library_files import LibraryFiles
from vit_spec import InputError, ViTConfig
from vit_spec.parts import UNGATED_ACTIVATIONS

NAME, TYPES = "hf-siglip", ("siglip", "siglip_vision_model")
DEFAULTS = {
    "num_attention_heads": 12,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "image_size": 224,
    "patch_size": 16,
    "vision_use_head": True,
}
TEXT = (
    hf.VISION_TOWER
    + """
    patch_embed.proj.bias    | @embeddings.patch_embedding.bias | width
    attn_pool.latent         | @head.probe                      | 1 1 width
    attn_pool.q.weight       | @head.attention.in_proj_weight   | (qkv=0 pool_head pool_dim) width
    attn_pool.q.bias         | @head.attention.in_proj_bias     | (qkv=0 pool_head pool_dim)
    attn_pool.kv.weight      | @head.attention.in_proj_weight   | (qkv=1:kv pool_head pool_dim) width
    attn_pool.kv.bias        | @head.attention.in_proj_bias     | (qkv=1:kv pool_head pool_dim)
    attn_pool.proj.weight    | @head.attention.out_proj.weight  | width (pool_head pool_dim)
    attn_pool.proj.bias      | @head.attention.out_proj.bias    | width
    attn_pool.norm.weight    | @head.layernorm.weight           | width
    attn_pool.norm.bias      | @head.layernorm.bias             | width
    attn_pool.mlp.fc1.weight | @head.mlp.fc1.weight             | ff width
    attn_pool.mlp.fc1.bias   | @head.mlp.fc1.bias               | ff
    attn_pool.mlp.fc2.weight | @head.mlp.fc2.weight             | width ff
    attn_pool.mlp.fc2.bias   | @head.mlp.fc2.bias               | width
"""
)


def read_config(evidence: Evidence) -> Fields:
    """Return the fields that config.json and preprocessor_config.json state.

    Raises:
        InputError: the config.json of another model, an unknown field or value, or a model without attention pooling.
    """
    content = hf.read_config_json(evidence, NAME, TYPES, DEFAULTS)
    if content and not content["vision_use_head"]:
        raise InputError(
            "its config.json says vision_use_head False: only the model with its attention pooling is supported"
        )
    if "attn_pool.latent" not in evidence.axes:
        raise InputError("its weights have no head.probe: only SigLIP with its attention pooling is supported")
    return hf.config_fields(evidence, content)


def json_files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the JSON files that transformers needs to open a folder."""
    return hf.folder_files(config, "bicubic", hf.config_json(config, "siglip_vision_model", "SiglipVisionModel"))


FORMAT = Format(
    name=NAME,
    description="image tower of SigLIP of Hugging Face transformers",
    separator=".",
    tables={"v4": hf.table(TEXT, "vision_model."), "v5": hf.table(TEXT)},
    spellings=hf.V5_SPELLINGS,
    ignored_keys=hf.TEXT_TOWER_KEYS,
    ignored_values=hf.TEXT_TOWER_VALUES,
    constraints={
        **hf.COMMON_CONSTRAINTS,
        "image_size": hf.square_only("image_size"),
        "patch_size": hf.square_only("patch_size"),
        "tokens.class_token": False,
        "tokens.patch_bias": True,
        "positions.kind": "learned",
        "positions.covers": ("all", "none"),
        "attention.qkv_bias": "qkv",
        "attention.proj_bias": True,
        "mlp.activation": UNGATED_ACTIVATIONS,
        "head.pool": "attention",
        "head.hidden": None,
    },
    assumed={
        **hf.BICUBIC,
        "norms.eps": 1e-6,
        "mlp.activation": "gelu_tanh",
        "pixels.mean": (0.5,),
        "pixels.std": (0.5,),
    },
    read_config=read_config,
    assumed_behaviour=hf_classes.assumed_behaviour,
    library=LibraryFiles(contents=json_files, model_types=TYPES),
    recognises=lambda evidence: hf_classes.model_type(evidence) in TYPES,
)
