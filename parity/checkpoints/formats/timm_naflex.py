"""timm's `NaFlexVit`: positions are a grid, or a table of rows and one of columns, and patches have their channels last.

`NaFlexVit` also takes batches of patches from images of several sizes.  The twins take images of one size.  For images of
another size than its own, the class resizes the positions to the grid of the image.  With `pos_embed_ar_preserving`, it
resizes them to a square grid whose side is the longer side of that grid, and takes the first rows and columns.

Sources: huggingface/pytorch-image-models 1.0.31, timm/models/naflexvit.py; arXiv 2307.06304 (NaViT); arXiv 2502.14786
(SigLIP 2); arXiv 2412.07679 (RADIO).
"""

from collections.abc import Mapping
from typing import Any

from parity.checkpoints.formats import timm, timm_arguments, timm_config, timm_tables
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.library_files import LibraryFiles
from parity.checkpoints.formats.tables import replace_keys
from vit_spec import InputError, ViTConfig
from vit_spec.parts import UNGATED_ACTIVATIONS

_CLASS = "NaFlexVit"
_EMBEDDING = """
    patch_embed.proj.weight | embeds.proj.weight | width (ph pw rgb)
    patch_embed.proj.bias   | embeds.proj.bias   | width
    patch_embed.norm.weight | embeds.norm.weight | width
    patch_embed.norm.bias   | embeds.norm.bias   | width
    cls_token               | embeds.cls_token   | 1 1 width
    reg_token               | embeds.reg_token   | 1 register width
    pos_embed               | embeds.pos_embed   | 1 row column width
    pos_embed_y             | embeds.pos_embed_y | 1 row width
    pos_embed_x             | embeds.pos_embed_x | 1 column width
"""
_REPLACED = ("patch_embed.", "cls_token", "dist_token", "reg_token", "pos_embed", "head_dist", *timm_tables.RELATIVE)
_TABLE = replace_keys(timm_tables.TABLES["vit"], {}, _REPLACED) + _EMBEDDING


def read_config(evidence: Evidence) -> Fields:
    """Return the fields that config.json states, or that follow from the arguments in a checkpoint of timm's train.py.

    Raises:
        InputError: an architecture of another class, or one that computes another function.
    """
    fields = timm_arguments.fields_of_notes(evidence.notes, 0)
    if fields and timm_arguments.class_of(evidence.notes) != _CLASS:
        raise InputError(
            "its config.json or its arguments name another class than the NaFlexVit of its keys: give those of its weights"
        )
    return fields


def infer_assumed(evidence: Evidence) -> Fields:
    """Return how positions are resampled in the published models with these tensors."""
    fields: dict[str, Any] = {}
    if "pos_embed_y" in evidence.axes:
        is_square = evidence.sizes["row"] == evidence.sizes["column"]
        fields |= {"resampling.kernel": "bilinear", "resampling.antialias": False, "resampling.square": is_square}
    return {**fields, **timm_arguments.likely_fields(evidence.notes, 0)}


def unsupported(config: ViTConfig, variant: str) -> str:
    """Return the values in a config that `NaFlexVit` cannot express; "" if there are none."""
    c, r = config, config.resampling
    if what := timm.unsupported_by_all(c):
        return what
    if c.norms.after_blocks and c.norms.after_pool:
        return "norms.after_blocks=True with norms.after_pool=True"
    if c.attention.proj_bias != c.mlp.bias:
        return f"attention.proj_bias={c.attention.proj_bias} with mlp.bias={c.mlp.bias}"
    if c.head.pool == "attention" and (c.mlp.norm or not c.mlp.bias):  # the MLP of the pool has biases and no norm
        return f"head.pool='attention' with mlp.norm={c.mlp.norm} and mlp.bias={c.mlp.bias}"
    if c.positions.factorized and (r.kernel, r.antialias, r.align_corners) != ("bilinear", False, False):
        return f"positions.factorized=True with resampling {r.kernel!r} and antialias={r.antialias}, only linear tables"
    if c.positions.factorized and r.square and c.grid[0] != c.grid[1]:
        return f"positions.factorized=True and resampling.square=True with a grid of {c.grid[0]}x{c.grid[1]}"
    return ""


def assumed_behaviour(evidence: Evidence) -> Mapping[str, str]:
    """Return the assumptions of format "timm", and that a patch has its channels last (patchify_channels_last)."""
    found = dict(timm.assumed_behaviour(evidence))
    if "patch extraction" in found:
        found["patch extraction"] += "; the channels of a pixel are adjacent"
    return found


def json_files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the config.json from which timm builds the model of a config.

    Raises:
        InputError: the config has a value that JSON cannot express.
    """
    c, (name, eps) = config, (config.norms.kind, config.norms.eps)
    if eps != 1e-6:
        raise InputError(
            f"timm's config.json cannot express norms.eps={eps} for a NaFlexVit, only 1e-06: write a file "
            f"(weights.safetensors) instead of a folder, or set norms.eps=1e-06"
        )
    norm = {"layer": "layernorm", "rms": "rmsnorm"}[name]
    kind = "none" if c.positions.kind == "none" else "factorized" if c.positions.factorized else "learned"
    arguments = {
        **timm_config.common_arguments(c),
        "qk_norm": c.attention.qk_norm,
        "proj_bias": c.attention.proj_bias,
        "scale_attn_inner_norm": c.attention.out_norm,
        "scale_mlp_norm": c.mlp.norm,
        "act_layer": timm_config.activation_name(c),
        "norm_layer": norm,
        "embed_norm_layer": norm if c.norms.after_patches else None,
        "class_token": c.tokens.class_token,
        "reg_tokens": c.tokens.registers,
        "dynamic_img_pad": c.tokens.pad,
        "pre_norm": c.norms.before_blocks,
        "final_norm": c.norms.after_blocks or c.norms.after_pool,
        "fc_norm": c.norms.after_pool,
        "pool_include_prefix": c.head.pool_prefix,
        "attn_pool_num_heads": c.head.pool_heads,
        "pos_embed": kind,
        "pos_embed_grid_size": list(c.grid),
        "pos_embed_interp_mode": c.resampling.kernel,
        "pos_embed_antialias": c.resampling.antialias,
        "pos_embed_align_corners": c.resampling.align_corners,
        "pos_embed_ar_preserving": c.resampling.square,
    }
    return {"config.json": timm_config.content(c, "naflexvit_base_patch16_gap", arguments, False, "embeds.proj")}


FORMAT = Format(
    name="timm-naflex",
    description="timm's NaFlexVit, or the folder that timm.create_model opens",
    separator=".",
    tables={"": _TABLE},
    constraints={
        "attention.proj": True,
        "attention.scale": None,
        "attention.value_skip": False,
        "attention.qkv_bias": ("qkv", "none"),
        "tokens.distillation": False,
        "tokens.crop": False,
        "positions.kind": ("learned", "none"),
        "positions.covers": lambda config: "none" if config.positions.kind == "learned" else config.positions.covers,
        "positions.rotary": "none",
        "positions.relative": "none",
        "mlp.activation": UNGATED_ACTIVATIONS,
        "norms.order": "pre",
        "norms.shared_norm": False,
        "norms.mlp_layer_scale": True,
        "head.pool": ("token", "mean", "attention", "none"),
        "head.hidden": None,
        "head.bias": True,
        "resampling.offset": 0.0,
    },
    unsupported=unsupported,
    assumed={
        "norms.eps": 1e-6,
        "mlp.activation": "gelu",
        "resampling.kernel": "bicubic",
        "resampling.antialias": True,
        "resampling.square": False,
    },
    infer_assumed=infer_assumed,
    assumed_behaviour=assumed_behaviour,
    read_config=read_config,
    library=LibraryFiles(contents=json_files, config_key="architecture", opens_shards=False),
    recognises=lambda evidence: timm_arguments.names_architecture(evidence.notes),
)
