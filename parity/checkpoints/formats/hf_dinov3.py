"""Hugging Face's DINOv3ViT: rotary positions, registers, biases of queries and values, MLPs with or without a gate.

Source: huggingface/transformers src/transformers/models/dinov3_vit/modeling_dinov3_vit.py, configuration_dinov3_vit.py.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.checkpoints.formats import hf_classes
from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.library_files import LibraryFiles
from parity.checkpoints.formats.tables import has_layer_scale
from parity.checkpoints.layout import Array
from vit_spec import InputError, ViTConfig
from vit_spec.models import IMAGENET

NAME, TYPES = "hf-dinov3", ("dinov3_vit",)
DEFAULTS = {
    "num_attention_heads": 6,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "layerscale_value": 1.0,
    "rope_theta": 100.0,
    "image_size": 224,
    "patch_size": 16,
    "use_gated_mlp": False,
    "query_bias": True,
    "key_bias": False,
    "value_bias": True,
    "proj_bias": True,
    "mlp_bias": True,
}
BODY = """
    patch_embed.proj.weight | embeddings.patch_embeddings.weight | width rgb ph pw
    patch_embed.proj.bias   | embeddings.patch_embeddings.bias   | width
    cls_token               | embeddings.cls_token               | 1 1 width
    reg_token               | embeddings.register_tokens         | 1 register width

    blocks.attn.q_bias    | {layer}.attention.q_proj.bias | (head dim)
    blocks.attn.v_bias    | {layer}.attention.v_proj.bias | (head dim)
    blocks.mlp.fc1.weight | {layer}.mlp.{glu}_proj.weight | ff width
    blocks.mlp.fc1.bias   | {layer}.mlp.{glu}_proj.bias   | ff
    blocks.mlp.fc1.weight | {layer}.mlp.up_proj.weight    | ff width
    blocks.mlp.fc1.bias   | {layer}.mlp.up_proj.bias      | ff
    blocks.mlp.fc2.weight | {layer}.mlp.down_proj.weight  | width ff
    blocks.mlp.fc2.bias   | {layer}.mlp.down_proj.bias    | width

    norm.weight | norm.weight | width
    norm.bias   | norm.bias   | width
"""
_BIASES = {(True, True, True): "qkv", (True, False, True): "qv", (False, False, False): "none"}
TEXT = BODY + hf.LAYER_SCALE + hf.ATTENTION_V5


def read_config(evidence: Evidence) -> Fields:
    """Return the fields that config.json and preprocessor_config.json state.

    Raises:
        InputError: the config.json of another model, or an unknown field or value.
    """
    content = hf.read_config_json(evidence, NAME, TYPES, DEFAULTS)
    fields = hf.config_fields(evidence, content)
    if content:
        if content["use_gated_mlp"] and content["hidden_act"] != "silu":
            raise InputError(
                f"its config.json says hidden_act {content['hidden_act']!r} for a gated MLP: only 'silu' is supported"
            )
        fields |= hf.gate_fields(evidence, content, "use_gated_mlp")
        biases = tuple(bool(content[f"{name}_bias"]) for name in ("query", "key", "value"))
        if biases not in _BIASES:
            raise InputError(
                f"its config.json says query_bias, key_bias, value_bias {biases}, which ViTConfig cannot express"
            )
        fields["attention.qkv_bias"] = _BIASES[biases]
        fields["attention.proj_bias"] = bool(content["proj_bias"])
        fields["mlp.bias"] = bool(content["mlp_bias"])
        fields["positions.rotary_base"] = content["rope_theta"]
        fields["norms.layer_scale"] = content["layerscale_value"]
    return fields


def json_files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the JSON files that transformers needs to open a folder."""
    qkv_bias = config.attention.qkv_bias
    more: dict[str, Any] = {
        "rope_theta": config.positions.rotary_base,
        "query_bias": qkv_bias != "none",
        "key_bias": qkv_bias == "qkv",
        "value_bias": qkv_bias != "none",
        "proj_bias": config.attention.proj_bias,
        "mlp_bias": True,
        "layerscale_value": config.norms.layer_scale,
        "use_gated_mlp": config.mlp.is_gated,
        "num_register_tokens": config.tokens.registers,
    }
    return hf.folder_files(config, "bilinear", hf.config_json(config, *TYPES, "DINOv3ViTModel", **more))


def no_registers(config: ViTConfig) -> Array | None:
    """Return the empty array that transformers has for the registers of a model without registers."""
    return None if config.tokens.registers else np.zeros(0, np.float32)


FORMAT = Format(
    name=NAME,
    description="DINOv3ViT of Hugging Face transformers",
    separator=".",
    tables={"v4": hf.table(TEXT, layer="layer"), "v5": hf.table(TEXT, layer="model.layer")},
    spellings=hf.V5_SPELLINGS,
    ignored_keys=hf.MASK_TOKEN_KEY,
    constants={
        "embeddings.mask_token | 1 1 width": lambda config: np.zeros(config.width, np.float32),
        "embeddings.register_tokens | 1 register width": no_registers,
    },
    constraints={
        **hf.COMMON_CONSTRAINTS,
        "patch_size": hf.square_only("patch_size"),
        "num_classes": 0,
        "tokens.class_token": True,
        "tokens.patch_bias": True,
        "positions.kind": "none",
        "positions.rotary": "dinov3",
        "norms.layer_scale": has_layer_scale,
        "head.pool": "token",
        "head.hidden": None,
    },
    assumed={
        "norms.eps": 1e-5,
        "norms.layer_scale": 1.0,
        "positions.rotary_base": 100.0,
        "mlp.activation": "gelu",
        "pixels.mean": IMAGENET.mean,
        "pixels.std": IMAGENET.std,
    },
    read_config=read_config,
    assumed_behaviour=hf_classes.assumed_behaviour,
    library=LibraryFiles(contents=json_files, model_types=TYPES),
    recognises=lambda evidence: hf_classes.model_type(evidence) in TYPES,
)
