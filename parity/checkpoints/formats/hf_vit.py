"""Hugging Face's ViT: eps 1e-12, and a classifier or a hidden layer with tanh ("pooler") on the class token.

Source: huggingface/transformers src/transformers/models/vit/modeling_vit.py, configuration_vit.py (defaults).
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

NAME, TYPES = "hf-vit", ("vit",)
DEFAULTS = {
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
    "pooler_act": "tanh",
    "qkv_bias": True,
}
LAYOUTS = {
    "v4": (hf.EMBEDDINGS + hf.NORMS + hf.ATTENTION_V4 + hf.MLP_V4, "encoder.layer"),
    "v5": (hf.EMBEDDINGS + hf.NORMS + hf.ATTENTION_V5 + hf.MLP, "layers"),
}
CONSTRAINTS: Fields = {
    **hf.COMMON_CONSTRAINTS,
    "tokens.class_token": True,
    "tokens.patch_bias": True,
    "positions.kind": "learned",
    "positions.covers": ("all", "class"),
    "attention.proj_bias": True,
    "mlp.activation": UNGATED_ACTIVATIONS,
    "head.pool": "token",  # an assumption without config.json: custom classifiers after a ViTModel may pool differently
    "head.bias": True,
}
ASSUMED: Fields = {**hf.BICUBIC, "norms.eps": 1e-12, "mlp.activation": "gelu", "pixels.mean": (0.5,), "pixels.std": (0.5,)}


def read_config(evidence: Evidence) -> Fields:
    """Return the fields that config.json and preprocessor_config.json state.

    Raises:
        InputError: the config.json of another model, or an unknown field or value.
    """
    content = hf.read_config_json(evidence, NAME, TYPES, DEFAULTS)
    if content and "pre_logits.weight" in evidence.axes and content["pooler_act"] != "tanh":
        raise InputError(f"its config.json says pooler_act {content['pooler_act']!r}: only 'tanh' is supported")
    return hf.config_fields(evidence, content)


def json_files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the JSON files that transformers needs to open a folder."""
    architecture = "ViTForImageClassification" if config.num_classes else "ViTModel"
    more: dict[str, Any] = {"qkv_bias": config.attention.qkv_bias == "qkv"}
    if config.head.hidden is not None:
        more |= {"pooler_output_size": config.head.hidden, "pooler_act": "tanh"}
    return hf.folder_files(config, "bilinear", hf.config_json(config, "vit", architecture, **more))


FORMAT = Format(
    name=NAME,
    description="ViT of Hugging Face transformers",
    separator=".",
    tables=hf.tables("vit.", LAYOUTS, hf.CLASSIFIER, hf.POOLER),
    default_variant=hf.default_variant,
    spellings=hf.V4_SPELLINGS,
    variant_spellings=hf.VARIANT_SPELLINGS,
    ignored_keys={
        **hf.MASK_TOKEN_KEY,
        r"vit\.pooler\.dense\.(weight|bias)": "the pooler, which the classifier does not read",
        r"decoder\.0\.(weight|bias)": "the decoder of masked pre-training",
    },
    constraints=CONSTRAINTS,
    assumed=ASSUMED,
    read_config=read_config,
    assumed_behaviour=hf_classes.assumed_behaviour,
    library=LibraryFiles(contents=json_files, model_types=TYPES),
    recognises=lambda evidence: hf_classes.model_type(evidence) in TYPES,
)
