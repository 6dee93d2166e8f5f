"""Hugging Face's Dinov2.  Its classifier reads the class token and the mean of the patches.

Dinov2ForImageClassification without a classifier returns both.  Its weights have the keys of Dinov2Model, which returns the
class token.  Only config.json distinguishes them.

It resamples positions to a given size, without antialiasing, whereas Meta's code scales them by (new + 0.1) / old.

Source: huggingface/transformers src/transformers/models/dinov2/modeling_dinov2.py, configuration_dinov2.py (defaults).
"""

from collections.abc import Callable, Mapping
from typing import Any

from parity.checkpoints.formats import hf_classes
from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.library_files import LibraryFiles
from parity.checkpoints.formats.tables import has_layer_scale
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
CONSTRAINTS: Fields = {
    **hf.COMMON_CONSTRAINTS,
    "image_size": hf.square_only("image_size"),
    "patch_size": hf.square_only("patch_size"),
    "tokens.class_token": True,
    "tokens.patch_bias": True,
    "positions.kind": "learned",
    "attention.proj_bias": True,
    "norms.layer_scale": has_layer_scale,
    "head.pool": lambda config: "token_mean" if config.num_classes else ("token", "token_mean"),
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


def default_variant(config: ViTConfig) -> str:
    """Return the variant that transformers writes."""
    gated = "-gated" if config.mlp.is_gated else ""
    return f"v4{gated}" if config.num_classes else f"v4{gated}-bare"


def unsupported(config: ViTConfig, variant: str) -> str:
    """Return the kind of the MLPs if a variant is for the other kind; "" if the variant can store the config."""
    gated = config.mlp.is_gated
    if gated == ("-gated" in variant):
        return ""
    return f"an MLP that is {'gated' if gated else 'not gated'} in its variant {variant!r}"


def config_reader(name: str, types: tuple[str, ...]) -> Callable[[Evidence], Fields]:
    """Return the function `Format.read_config` of a format.

    Args:
        name: the name of the format.
        types: the values of `model_type` that the format reads.
    """

    def read(evidence: Evidence) -> Fields:
        content = hf.read_config_json(evidence, name, types, DEFAULTS)
        fields = hf.config_fields(evidence, content)
        if content:
            output = hf_classes.CLASSES.get(hf_classes.stated_class(evidence))
            classifies = "head.weight" in evidence.axes or output == hf_classes.CLASSIFIED
            fields["head.pool"] = "token_mean" if classifies else "token"
            fields |= hf.gate_fields(evidence, content, "use_swiglu_ffn")
            fields["mlp_dim"] = mlp_width(content)
            fields["norms.layer_scale"] = content["layerscale_value"]
        return fields

    return read


def mlp_width(content: Mapping[str, Any]) -> int:
    """Return the hidden width of the MLPs: hidden_size times mlp_ratio.

    Gated MLPs have two thirds of this width, rounded up to a multiple of 8.

    Raises:
        InputError: a width or a ratio that is not a number.
    """
    width, ratio = content.get("hidden_size", 768), content["mlp_ratio"]
    if type(width) is not int or type(ratio) not in (int, float):
        raise InputError(f"its config.json says hidden_size {width!r} and mlp_ratio {ratio!r}: numbers were expected")
    hidden = int(width * ratio)
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if content["use_swiglu_ffn"] else hidden


def config_json(config: ViTConfig, model_type: str, model: str, **more: Any) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        config: the config of the model.
        model_type: the value of `model_type`.
        model: the beginning of the names of the model's classes, such as "Dinov2".
        more: further fields.

    Raises:
        InputError: no integer ratio yields the width of the MLPs, and config.json has integer ratios only.
    """
    gated = config.mlp.is_gated
    classifies = config.head.pool == "token_mean"
    architecture = f"{model}ForImageClassification" if classifies else f"{model}Model"
    fields: dict[str, Any] = {
        "mlp_ratio": find_mlp_ratio(config.width, config.mlp_dim, gated),
        "use_swiglu_ffn": gated,
        "qkv_bias": config.attention.qkv_bias == "qkv",
        "layerscale_value": config.norms.layer_scale,
    }
    if classifies and not config.num_classes:
        fields |= {"id2label": {}, "label2id": {}}  # without them, transformers assumes two classes
    written = hf.config_json(config, model_type, architecture, **fields, **more)
    return {**written, "hidden_act": "gelu"} if gated else written


def find_mlp_ratio(width: int, mlp_dim: int, gated: bool) -> int:
    """Return the mlp_ratio that yields the hidden width `mlp_dim` of the MLPs: the inverse of `mlp_width`.

    Raises:
        InputError: no integer yields it.
    """
    for ratio in range(1, 4 * mlp_dim // width + 2):
        hidden = width * ratio
        if mlp_dim == ((int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden):
            return ratio
    raise InputError(
        f"mlp_dim={mlp_dim} of width {width}{', gated,' if gated else ''} has no integer mlp_ratio, which config.json of "
        f"Dinov2 needs: write a file instead of a folder, or choose another format"
    )


def json_files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the JSON files that transformers needs to open a folder."""
    return hf.folder_files(config, "bicubic", config_json(config, "dinov2", "Dinov2"))


NAME, TYPES = "hf-dinov2", ("dinov2",)
TABLES = hf.tables("dinov2.", LAYOUTS, hf.CLASSIFIER)

FORMAT = Format(
    name=NAME,
    description="Dinov2 of Hugging Face transformers",
    separator=".",
    tables=TABLES,
    default_variant=default_variant,
    spellings=hf.V4_SPELLINGS,
    variant_spellings=hf.VARIANT_SPELLINGS,
    ignored_keys=hf.MASK_TOKEN_KEY,
    constants=hf.mask_token_constants("dinov2.", TABLES),
    constraints={**CONSTRAINTS, "positions.covers": ("all", "class")},
    unsupported=unsupported,
    assumed=ASSUMED,
    read_config=config_reader(NAME, TYPES),
    assumed_behaviour=hf_classes.assumed_behaviour,
    library=LibraryFiles(contents=json_files, model_types=TYPES),
    recognises=lambda evidence: hf_classes.model_type(evidence) in TYPES,
)
