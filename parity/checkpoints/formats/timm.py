"""timm's Vision Transformers: the state dicts of `VisionTransformer`, `Eva`, `Beit` and `VisionTransformerRelPos`.

timm stores the weights of AugReg, DeiT, DINO, DINOv2, MAE, CLIP and SigLIP in this way too.  A folder with config.json is
what timm itself writes for a hub, and `timm.create_model("local-dir:FOLDER", pretrained=True)` opens it.

A CLIP classifier has no bias, and timm's always has one, so zeros are written.  Files from before timm 0.6 may have a
hidden layer with tanh before the classifier, `pre_logits.fc` (variant "legacy").  Later versions of timm drop it without a
message and then compute another function.  This variant is written only if it is chosen.  It is refused beside a
config.json.

Sources: huggingface/pytorch-image-models 1.0.31, timm/models/vision_transformer.py, deit.py, eva.py, beit.py,
vision_transformer_relpos.py, _hub.py; 0.4.12,
timm/models/vision_transformer.py for the legacy names.
"""

from collections.abc import Mapping

import numpy as np

from parity.checkpoints.formats import timm_arguments, timm_config, timm_tables, torch
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.library_files import LibraryFiles
from parity.checkpoints.formats.stored_constants import image_size_of_index, is_relative_index, is_zero
from parity.checkpoints.formats.tables import unsupported_head_width
from parity.checkpoints.layout import Array
from vit_spec import InputError, ViTConfig


def read_config(evidence: Evidence) -> Fields:
    """Return the fields that config.json states, or that follow from the arguments in a checkpoint of timm's train.py.

    If neither states the image size, an index of relative positions in an old file shows it.

    Raises:
        InputError: an architecture that computes another function, or a hidden layer beside a config.json.
    """
    if "architecture" in evidence.notes.get("config.json", {}) and "pre_logits.weight" in evidence.axes:
        raise InputError(
            "its pre_logits.fc is a layer of timm before 0.6, which timm 1.0 drops if it opens a folder with config.json: "
            "remove pre_logits.* for the function in timm 1.0, or remove config.json for the function in older versions"
        )
    if timm_arguments.class_of(evidence.notes) == "NaFlexVit":
        raise InputError(
            "its config.json or its arguments name a NaFlexVit, whose keys are others: give those of its weights"
        )
    timm_arguments.check_spelling(evidence.notes, evidence.sizes["width"], evidence.sizes["block"])
    return {**image_size_of_index(evidence), **timm_arguments.fields_of_notes(evidence.notes, evidence.sizes["rgb"])}


def infer_assumed(evidence: Evidence) -> Fields:
    """Return the positions, norms, pooling and number of heads that the published models with these tensors have.

    A fork of train.py names an architecture in its checkpoints, which is likely to be timm's.
    """
    fields: dict[str, object] = {}
    if evidence.variant.startswith("eva"):
        fields = _assumed_of_eva(evidence)
    elif evidence.variant.startswith("parallel"):
        fields = {"norms.order": "parallel", "norms.shared_norm": False}
    elif evidence.sizes["width"] == 1536 and "glu" in evidence.axes["blocks.mlp.fc1.weight"]:
        fields["num_heads"] = 24  # DINOv2's giant model; SigLIP 2's has this width and depth too, but 16 heads and no gate
    likely = timm_arguments.likely_fields(evidence.notes, evidence.sizes["rgb"])
    return {**fields, **timm_arguments.changed_fields(evidence.notes), **likely}


def _assumed_of_eva(evidence: Evidence) -> dict[str, object]:
    """Return the assumptions about a model of the class `Eva`.

    A norm before the blocks is that of a Perception Encoder, which alone pools by attention, too.  EVA-02 alone has
    separate queries, keys and values or a packed gate together with positions.  A model without positions is a DINOv3,
    whose heads are 64 wide, and 128 wide in the 7B model.
    """
    axes, width = evidence.axes, evidence.sizes["width"]
    if any(name.startswith(("rel_pos.", "blocks.attn.rel_pos.")) for name in axes):  # a BEiT
        return {"positions.rotary": "none", **({} if "norm.weight" in axes else {"head.pool": "mean"})}
    if "blocks.attn.freqs" in axes:  # RoPE-ViT's mixed rotary positions, also of a model with a norm before the blocks
        return {"head.pool": "token" if "norm.weight" in axes else "mean"}
    if "norm_pre.weight" in axes:
        fields: dict[str, object] = {"positions.rotary": "rope_vit", "positions.rotary_start": 1.0, "norms.eps": 1e-5}
        fields |= {"positions.rotary_base": 10000.0, "head.pool": "mean"}
        if "attn_pool.latent" in axes:
            fields |= {"head.pool": "attention", "head.pool_heads": 8, "head.pool_prefix": "cls_token" in axes}
        return fields
    if "pos_embed" in axes:
        is_eva02 = evidence.variant != "eva"
        return {
            "positions.rotary": "eva" if is_eva02 else "none",
            **({} if "norm.weight" in axes else {"head.pool": "mean"}),
        }
    heads = {"num_heads": 32 if width == 4096 else width // 64} if width % 64 == 0 else {}
    pool = {} if "attn_pool.latent" in axes else {"head.pool": "mean"}
    eps = {} if "blocks.norm1.bias" not in axes else {"norms.eps": 1e-5}
    return {"positions.rotary": "dinov3", **eps, **pool, **heads}


def assumed_behaviour(evidence: Evidence) -> Mapping[str, str]:
    """Return the assumptions about what no tensor shows; none if the files name an architecture of timm."""
    if timm_arguments.names_architecture(evidence.notes):
        return {}
    found = dict(torch.assumed_behaviour(evidence))
    if foreign := timm_arguments.foreign_arguments(evidence.notes):
        names = ", ".join(foreign[:5]) + ", ..." * (len(foreign) > 5)
        found["arguments"] = f"without effect on the model: {names}, which timm's train.py does not have"
    return found


def unsupported(config: ViTConfig, variant: str) -> str:
    """Return the values in a config that timm's classes cannot express; "" if there are none."""
    c, pool = config, config.head.pool
    if what := unsupported_by_all(c):
        return what
    if pool == "attention":  # its MLP always has biases, and neither a gate nor a norm
        for name, value in (("activation", "swiglu"), ("bias", False), ("norm", True)):
            if getattr(c.mlp, name) == value:
                return f"head.pool='attention' with mlp.{name}={value!r}"
    if c.tokens.pad and c.image_size != tuple(n * p for n, p in zip(c.grid, c.patch_size, strict=True)):
        return f"image_size={c.image_size} with tokens.pad=True, only multiples of the patch size"
    if c.positions.kind == "learned" and c.num_covered not in (0, c.num_prefix):
        return f"positions.covers={c.positions.covers!r} with {c.tokens.registers} registers"
    if variant.startswith("parallel") != (c.norms.order == "parallel"):
        return f"norms.order={c.norms.order!r} in its variant {variant!r}"
    if c.positions.relative != "none":
        for name, allowed in timm_tables.RELATIVE_CONSTRAINTS.items():
            if c.at(name) not in allowed:
                return f"positions.relative={c.positions.relative!r} with {name}={c.at(name)!r}"
        if c.norms.after_blocks == c.norms.after_pool:
            both = f"norms.after_blocks={c.norms.after_blocks} and norms.after_pool={c.norms.after_pool}"
            return f"positions.relative={c.positions.relative!r} with {both}"
    what = _unsupported_eva(c, variant) if variant.startswith("eva") else _unsupported_vit(c, variant)
    return f"{what} in its variant {variant!r}" if what else ""


def unsupported_by_all(c: ViTConfig) -> str:
    """Return the values in a config that no class of timm can express; "" if there are none."""
    if what := unsupported_head_width(c):
        return what
    if c.norms.kind == "layer" and not c.norms.bias:
        return "norms.bias=False with norms.kind='layer'"
    if c.tokens.patch_bias == c.norms.before_blocks:
        return (
            f"norms.before_blocks={c.norms.before_blocks} with tokens.patch_bias={c.tokens.patch_bias}, only one of the two"
        )
    return ""


def _unsupported_vit(c: ViTConfig, variant: str) -> str:
    if c.positions.relative != "none" and (c.positions.kind, c.mlp.activation, c.mlp.norm) != ("none", "gelu", False):
        return (
            f"positions.relative={c.positions.relative!r} with positions.kind={c.positions.kind!r}, "
            f"mlp.activation={c.mlp.activation!r} and mlp.norm={c.mlp.norm}"
        )
    if timm_tables.is_eva(c):
        return (
            f"positions.rotary={c.positions.rotary!r} with attention.qkv_bias={c.attention.qkv_bias!r} and "
            f"norms.mlp_layer_scale={c.norms.mlp_layer_scale}"
        )
    if c.norms.after_blocks and c.norms.after_pool:
        return "norms.after_blocks=True with norms.after_pool=True"
    if c.tokens.distillation and (c.tokens.registers or c.num_covered != 2 or c.positions.kind != "learned"):
        return "tokens.distillation=True with registers, or without a position for each token"
    if c.head.pool_heads not in (None, c.num_heads):
        return f"head.pool_heads={c.head.pool_heads} with num_heads={c.num_heads}"
    if c.attention.proj_bias != c.mlp.bias:
        return f"attention.proj_bias={c.attention.proj_bias} with mlp.bias={c.mlp.bias}"
    if variant.startswith("parallel"):
        values = {"attention.out_norm": False, "attention.proj_bias": True, "mlp.norm": False}
        for name, value in values.items():
            if c.at(name) != value:
                return f"{name}={c.at(name)}"
        if c.mlp.is_gated or (c.attention.qkv_bias == "qkv") != (variant == "parallel"):
            return f"mlp.activation={c.mlp.activation!r} with attention.qkv_bias={c.attention.qkv_bias!r}"
    return ""


def _unsupported_eva(c: ViTConfig, variant: str) -> str:
    if c.mlp.activation not in ("gelu", "swiglu"):
        return f"mlp.activation={c.mlp.activation!r}"
    values = {"attention.proj_bias": True, "mlp.bias": True, "norms.after_patches": False}
    for name, value in values.items():
        if c.at(name) != value:
            return f"{name}={c.at(name)}"
    if c.positions.relative != "none" and (c.attention.qk_norm or c.norms.order != "pre" or c.num_prefix == 0):
        return (
            f"positions.relative={c.positions.relative!r} with attention.qk_norm={c.attention.qk_norm}, "
            f"norms.order={c.norms.order!r} and tokens.class_token={c.tokens.class_token}"
        )
    pools_prefix = c.head.pool == "attention" and c.num_prefix > 0
    if c.head.pool_prefix != pools_prefix and c.num_prefix:
        return f"head.pool={c.head.pool!r} with head.pool_prefix={c.head.pool_prefix}"
    packed, gated = variant.endswith("packed-gate"), c.mlp.is_gated
    if c.mlp.norm and gated and packed:
        return "mlp.norm=True with mlp.activation='swiglu'"
    if c.norms.order == "res_post" and c.attention.qk_norm:
        return "norms.order='res_post' with attention.qk_norm=True"
    if c.norms.order == "res_post" and gated and not (c.mlp.norm or packed):
        return "norms.order='res_post' with mlp.activation='swiglu'"
    return ""


def _zero_bias(config: ViTConfig) -> Array | None:
    return None if config.head.bias or not config.num_classes else np.zeros(config.num_classes, np.float32)


_BIAS, _INDEX = r"head\.bias", r"(rel_pos_bias|blocks\.\d+\.attn)\.relative_position_index"

FORMAT = Format(
    name="timm",
    description="timm's state_dict, or the folder that timm.create_model opens",
    separator=".",
    tables=timm_tables.TABLES,
    default_variant=timm_tables.default_variant,
    spellings={"glu": ("fc1_g", "fc1_x"), "qkv": ("q", "k", "v")},
    ignored_keys={
        _BIAS: "zeros, for a classifier without a bias",
        _INDEX: "numbers that follow from the grid of patches",
    },
    ignored_values={_BIAS: is_zero, _INDEX: is_relative_index},
    constants={"head.bias | label": _zero_bias},
    constraints={
        "attention.proj": True,
        "attention.scale": None,  # an assumption: models derived from timm 0.3's small ViT have another (qk_scale)
        "attention.value_skip": False,
        "positions.kind": ("learned", "none"),
        "positions.rotary": ("none", "dinov3", "eva", "rope_vit", "mixed"),
        "norms.order": ("pre", "res_post", "parallel"),
        "norms.shared_norm": False,
        "head.pool": ("token", "mean", "attention", "none"),
    },
    unsupported=unsupported,
    assumed={"norms.eps": 1e-6, "mlp.activation": "gelu", "resampling.kernel": "bicubic", "resampling.antialias": True},
    infer_assumed=infer_assumed,
    assumed_behaviour=assumed_behaviour,
    read_config=read_config,
    library=LibraryFiles(
        contents=timm_config.json_files,
        config_key="architecture",
        one_layout=True,  # the arguments in config.json choose the layers
        opens_shards=False,
    ),
    recognises=lambda evidence: timm_arguments.names_architecture(evidence.notes),
)
