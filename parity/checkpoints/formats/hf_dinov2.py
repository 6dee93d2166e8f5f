"""Hugging Face's Dinov2: its classifier reads the class token and the mean of the patches.

It resamples positions by size and without antialiasing, where Meta's code scales by (new + 0.1) / old.

Source: huggingface/transformers src/transformers/models/dinov2/modeling_dinov2.py, configuration_dinov2.py (defaults).
"""

from collections.abc import Callable, Mapping
from typing import Any

from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.format import Evidence, Fields, Format
from vit_spec import InputError, ViTConfig
from vit_spec.models import IMAGENET

DEFAULTS = {
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "layerscale_value": 1.0,
    "image_size": 224,
    "patch_size": 14,
    "qkv_bias": True,
    "mlp_ratio": 4,
    "use_swiglu_ffn": False,
}
BODY = hf.EMBEDDINGS + hf.LAYER_SCALE
LAYOUTS = {
    "v4": (BODY + hf.ATTENTION_V4 + hf.MLP, "encoder.layer"),
    "v5": (BODY + hf.ATTENTION_V5 + hf.MLP, "encoder.layer"),
    "v4-gated": (BODY + hf.ATTENTION_V4 + hf.GATED_V4, "encoder.layer"),
    "v5-gated": (BODY + hf.ATTENTION_V5 + hf.GATED_V5, "encoder.layer"),
}
ALWAYS: Fields = {
    **hf.PLAIN,
    "image_size": hf.square("image_size"),
    "patch_size": hf.square("patch_size"),
    "tokens.class_token": True,
    "tokens.patch_bias": True,
    "positions.kind": "learned",
    "attention.proj_bias": True,
    "norms.layer_scale": lambda config: config.norms.layer_scale or 1.0,
    "head.pool": lambda config: "token_mean" if config.num_classes else "token",
    "head.hidden": None,
    "head.bias": True,
}
ASSUMED: Fields = {
    **hf.BICUBIC,
    "norms.eps": 1e-6,
    "norms.layer_scale": 1.0,
    "mlp.activation": "gelu",
    "pixels.mean": IMAGENET.mean,
    "pixels.std": IMAGENET.std,
}


def untold(evidence: Evidence) -> Mapping[str, str]:
    """Return what no tensor shows: RF-DETR's backbones have these keys, and their blocks attend within windows."""
    return {} if hf.model_type(evidence) else {"windows of attention": "none"}


def usual(config: ViTConfig) -> str:
    """Return the table that transformers writes."""
    gated = "-gated" if config.mlp.activation == "swiglu" else ""
    return f"v4{gated}" if config.num_classes else f"v4{gated}-bare"


def objection(config: ViTConfig, table: str) -> str:
    """Return what is wrong where a table is asked for that is for the other kind of MLP."""
    gated = config.mlp.activation == "swiglu"
    if gated == ("-gated" in table):
        return ""
    return f"an MLP that is {'gated' if gated else 'not gated'} as {table!r}"


def settings(name: str, types: tuple[str, ...]) -> Callable[[Evidence], Fields]:
    """Return the settings of the format of this name, which reads these `model_type`s."""

    def read(evidence: Evidence) -> Fields:
        told = hf.described(evidence, name, types, DEFAULTS)
        fields = hf.settings(evidence, told)
        fields["head.pool"] = "token_mean" if "head.weight" in evidence.axes else "token"
        if told:
            fields["mlp_dim"] = hidden(told)
            fields["norms.layer_scale"] = told["layerscale_value"]
        return fields

    return read


def hidden(told: Mapping[str, Any]) -> int:
    """Return the width of the MLPs: a gated one has two thirds of what the ratio says, in steps of 8.

    Raises:
        InputError: a width or a ratio that is no number.
    """
    width, found = told.get("hidden_size", 768), told["mlp_ratio"]
    if type(width) is not int or type(found) not in (int, float):
        raise InputError(f"its config.json says hidden_size {width!r} and mlp_ratio {found!r}: numbers were expected")
    whole = int(width * found)
    return (int(whole * 2 / 3) + 7) // 8 * 8 if told["use_swiglu_ffn"] else whole


def described(config: ViTConfig, model_type: str, model: str, **more: Any) -> dict[str, Any]:
    """Return config.json.

    model: what the names of its classes begin with.

    Raises:
        InputError: an MLP whose width no whole ratio yields, which is all that config.json can say.
    """
    gated = config.mlp.activation == "swiglu"
    architecture = f"{model}ForImageClassification" if config.num_classes else f"{model}Model"
    fields = {
        "mlp_ratio": ratio(config.width, config.mlp_dim, gated),
        "use_swiglu_ffn": gated,
        "qkv_bias": config.attention.qkv_bias == "qkv",
        "layerscale_value": config.norms.layer_scale,
    }
    written = hf.config_json(config, model_type, architecture, **fields, **more)
    return {**written, "hidden_act": "gelu"} if gated else written


def ratio(width: int, mlp_dim: int, gated: bool) -> int:
    """Return the mlp_ratio that yields this width of the MLP; a gated one has two thirds of it, in steps of 8.

    Raises:
        InputError: there is none.
    """
    for found in range(1, 4 * mlp_dim // width + 2):
        hidden = width * found
        if mlp_dim == ((int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden):
            return found
    raise InputError(
        f"mlp_dim={mlp_dim} of width {width}{', gated,' if gated else ''} is no whole mlp_ratio, which is what config.json "
        f"of Dinov2 has: write a file instead of a folder, or choose another format"
    )


def files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the files with which transformers opens a folder."""
    return hf.folder(config, "bicubic", described(config, "dinov2", "Dinov2"))


NAME, TYPES = "hf-dinov2", ("dinov2",)
TABLES = hf.tables("dinov2.", LAYOUTS, hf.CLASSIFIER)

FORMAT = Format(
    name=NAME,
    what="Dinov2 of Hugging Face transformers",
    separator=".",
    tables=TABLES,
    usual=usual,
    spellings=hf.V4,
    respelled=hf.RESPELLED,
    ignored=hf.MASK_TOKEN,
    constants=hf.masks("dinov2.", TABLES),
    always={**ALWAYS, "positions.covers": ("all", "class")},
    objection=objection,
    assumed=ASSUMED,
    settings=settings(NAME, TYPES),
    untold=untold,
    says=hf.SAYS,
    files=files,
    recognises=lambda evidence: hf.model_type(evidence) in TYPES,
    model_types=TYPES,
)
