"""Hugging Face's ViT: eps 1e-12, the class token through a classifier, or through a layer with tanh ("pooler").

Source: huggingface/transformers src/transformers/models/vit/modeling_vit.py, configuration_vit.py (defaults).
"""

from collections.abc import Mapping
from typing import Any

from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.format import Evidence, Fields, Format
from vit_spec import InputError, ViTConfig

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
ALWAYS: Fields = {
    **hf.PLAIN,
    "tokens.class_token": True,
    "tokens.patch_bias": True,
    "positions.kind": "learned",
    "positions.covers": ("all", "class"),
    "attention.proj_bias": True,
    "mlp.activation": hf.UNGATED,
    "head.pool": ("token",),  # people's own classifiers on a ViTModel, which have these keys too, may pool otherwise
    "head.bias": True,
}
ASSUMED: Fields = {**hf.BICUBIC, "norms.eps": 1e-12, "mlp.activation": "gelu", "pixels.mean": (0.5,), "pixels.std": (0.5,)}


def settings(evidence: Evidence) -> Fields:
    """Return what config.json and preprocessor_config.json say.

    Raises:
        InputError: the config.json of another model, or one that says what is not known here.
    """
    told = hf.described(evidence, NAME, TYPES, DEFAULTS)
    if told and "pre_logits.weight" in evidence.axes and told["pooler_act"] != "tanh":
        raise InputError(f"its config.json says pooler_act {told['pooler_act']!r}: only 'tanh' is known here")
    return hf.settings(evidence, told)


def untold(evidence: Evidence) -> Mapping[str, str]:
    """Return what no tensor shows of the pooler, and of what else lies behind the model."""
    pooled = "pre_logits.weight" in evidence.axes and not hf.model_type(evidence)
    return {**({"activation of the pooler": "tanh"} if pooled else {}), **hf.unread(evidence)}


def files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the files with which transformers opens a folder."""
    architecture = "ViTForImageClassification" if config.num_classes else "ViTModel"
    more: dict[str, Any] = {"qkv_bias": config.attention.qkv_bias == "qkv"}
    if config.head.hidden is not None:
        more |= {"pooler_output_size": config.head.hidden, "pooler_act": "tanh"}
    return hf.folder(config, "bilinear", hf.config_json(config, "vit", architecture, **more))


FORMAT = Format(
    name=NAME,
    what="ViT of Hugging Face transformers",
    separator=".",
    tables=hf.tables("vit.", LAYOUTS, hf.CLASSIFIER, hf.POOLER),
    usual=hf.usual,
    spellings=hf.V4,
    respelled=hf.RESPELLED,
    ignored={
        **hf.MASK_TOKEN,
        r"vit\.pooler\.dense\.(weight|bias)": "the pooler, which no classifier reads",
        r"decoder\.0\.(weight|bias)": "the decoder of masked pre-training",
    },
    always=ALWAYS,
    assumed=ASSUMED,
    settings=settings,
    untold=untold,
    says=hf.SAYS,
    files=files,
    recognises=lambda evidence: hf.model_type(evidence) in TYPES,
    model_types=TYPES,
)
