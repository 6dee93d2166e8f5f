"""timm's Vision Transformers: the state dict of `VisionTransformer`, and of `Eva` with DINOv3's rotary positions or none.

timm stores the weights of AugReg, DeiT, DINO, DINOv2, MAE, CLIP and SigLIP in this way too.  A folder with config.json is
what timm itself writes for a hub, and `timm.create_model("local-dir:FOLDER", pretrained=True)` opens it.

A CLIP classifier has no bias, and timm's always has one, so zeros are written.  Files from before timm 0.6 may have a
hidden layer with tanh before the classifier, `pre_logits.fc` (variant "legacy").  Later versions of timm drop it without a
message and then compute another function.  This variant is written only if it is chosen.  It is refused beside a
config.json.

Sources: huggingface/pytorch-image-models 1.0.31, timm/models/vision_transformer.py, deit.py, eva.py, _hub.py; 0.4.12,
timm/models/vision_transformer.py for the legacy names.
"""

from collections.abc import Mapping

import numpy as np

from parity.checkpoints.formats import timm_arguments, timm_config, torch
from parity.checkpoints.formats.format import Evidence, Fields, Format
from parity.checkpoints.formats.tables import COMMON_CONSTRAINTS, replace_keys, ungated, unsupported_head_width
from parity.checkpoints.layout import Array
from vit_spec import InputError, ViTConfig

_POOL_MLP = ("attn_pool.mlp.fc1", "attn_pool.mlp.fc2")
_VIT = replace_keys(torch.TABLE, {}, ("pre_logits", "blocks.attn.q_bias", "blocks.attn.v_bias", *_POOL_MLP))
_POOL_MLP_LINES = "\n".join(line for line in ungated(torch.TABLE).splitlines() if line.strip().startswith(_POOL_MLP))
_EVA = replace_keys(
    ungated(torch.TABLE),
    {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"},
    ("pre_logits", "dist_token", "head_dist"),
)
_GATE = """
    blocks.mlp.fc1.weight | blocks.{block}.mlp.{glu}.weight | ff width
    blocks.mlp.fc1.bias   | blocks.{block}.mlp.{glu}.bias   | ff
"""
_HIDDEN = """
    pre_logits.weight | pre_logits.fc.weight | feature pooled
    pre_logits.bias   | pre_logits.fc.bias   | feature
"""


def read_config(evidence: Evidence) -> Fields:
    """Return the fields that config.json states, or that follow from the arguments in a checkpoint of timm's train.py.

    Raises:
        InputError: MLPs without biases, an architecture that computes another function, or a hidden layer beside a
            config.json.
    """
    if "architecture" in evidence.notes.get("config.json", {}) and "pre_logits.weight" in evidence.axes:
        raise InputError(
            "its pre_logits.fc is a layer of timm before 0.6, which timm 1.0 drops if it opens a folder with config.json: "
            "remove pre_logits.* for the function in timm 1.0, or remove config.json for the function in older versions"
        )
    if "blocks.mlp.fc1.bias" not in evidence.axes:
        raise InputError(
            "its MLPs have no biases (timm's proj_bias=False), which ViTConfig cannot express: it cannot be read"
        )
    return timm_arguments.fields_of_notes(evidence.notes, evidence.sizes["rgb"])


def infer_assumed(evidence: Evidence) -> Fields:
    """Return the positions, eps, pooling and number of heads that most models with these tensors have.

    An `Eva` model without a position table is a DINOv3, whose heads are 64 wide, and 128 wide in the 7B model.  A fork
    of train.py names an architecture in its checkpoints, which is likely to be timm's.
    """
    axes, width = evidence.axes, evidence.sizes["width"]
    fields: dict[str, object] = {}
    if evidence.variant == "eva" and "pos_embed" not in axes:
        fields |= {"positions.rotary": "dinov3", "norms.eps": 1e-5}
        fields |= {} if "attn_pool.latent" in axes else {"head.pool": "mean"}
        fields |= {"num_heads": 32 if width == 4096 else width // 64} if width % 64 == 0 else {}
    elif width == 1536 and "glu" in axes["blocks.mlp.fc1.weight"]:
        fields["num_heads"] = 24  # DINOv2's giant model; SigLIP 2's has this width and depth too, but 16 heads and no gate
    likely = timm_arguments.likely_fields(evidence.notes, evidence.sizes["rgb"])
    return {**fields, **timm_arguments.changed_fields(evidence.notes), **likely}


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
    if what := unsupported_head_width(c):
        return what
    if variant != "eva" and (c.positions.rotary == "dinov3" or c.attention.qkv_bias == "qv"):
        fields = f"positions.rotary={c.positions.rotary!r} with attention.qkv_bias={c.attention.qkv_bias!r}"
        return f"{fields} in its variant {variant!r}"
    if c.tokens.patch_bias == c.norms.before_blocks:
        return (
            f"norms.before_blocks={c.norms.before_blocks} with tokens.patch_bias={c.tokens.patch_bias}, only one of the two"
        )
    if c.mlp.activation == "swiglu" and pool == "attention":
        return "head.pool='attention' with mlp.activation='swiglu'"
    if c.tokens.pad and c.image_size != tuple(n * p for n, p in zip(c.grid, c.patch_size, strict=True)):
        return f"image_size={c.image_size} with tokens.pad=True, only multiples of the patch size"
    return _unsupported_eva(c) if variant == "eva" else _unsupported_vit(c)


def _unsupported_vit(c: ViTConfig) -> str:
    if c.norms.after_blocks and c.norms.after_pool:
        return "norms.after_blocks=True with norms.after_pool=True"
    if c.positions.kind == "learned" and c.num_covered not in (0, c.num_prefix):
        return f"positions.covers={c.positions.covers!r} with {c.tokens.registers} registers"
    if c.tokens.distillation and (c.tokens.registers or c.num_covered != 2 or c.positions.kind != "learned"):
        return "tokens.distillation=True with registers, or without a position for each token"
    return ""


def _unsupported_eva(c: ViTConfig) -> str:
    if c.mlp.activation not in ("gelu", "swiglu"):
        return f"mlp.activation={c.mlp.activation!r} in its variant 'eva'"
    if c.head.pool == "attention" and c.num_prefix:  # timm's Eva pools over these tokens too
        return f"head.pool='attention' with {c.num_prefix} tokens before the patches in its variant 'eva'"
    if c.positions.kind == "learned" and c.num_covered not in (0, c.num_prefix):
        return f"positions.covers={c.positions.covers!r} with {c.tokens.registers} registers"
    return ""


def _zero_bias(config: ViTConfig) -> Array | None:
    return None if config.head.bias or not config.num_classes else np.zeros(config.num_classes, np.float32)


FORMAT = Format(
    name="timm",
    description="timm's state_dict, or the folder that timm.create_model opens",
    separator=".",
    tables={"vit": f"{_VIT}\n{_POOL_MLP_LINES}", "eva": _EVA + _GATE, "legacy": f"{_VIT}\n{_POOL_MLP_LINES}{_HIDDEN}"},
    default_variant=lambda config: (
        "eva" if config.positions.rotary == "dinov3" or config.attention.qkv_bias == "qv" else "vit"
    ),
    spellings={"glu": ("fc1_g", "fc1_x")},
    ignored_keys={r"head\.bias": "zeros, for a classifier without a bias"},
    constants={"head.bias | label": _zero_bias},
    constraints={
        **COMMON_CONSTRAINTS,
        "attention.scale": None,  # an assumption: models derived from timm 0.3's small ViT have another (qk_scale)
        "positions.kind": ("learned", "none"),
        "positions.rotary": ("none", "dinov3"),
        "attention.proj_bias": True,
        "head.pool": ("token", "mean", "attention", "none"),
    },
    unsupported=unsupported,
    assumed={"norms.eps": 1e-6, "mlp.activation": "gelu", "resampling.kernel": "bicubic", "resampling.antialias": True},
    infer_assumed=infer_assumed,
    assumed_behaviour=assumed_behaviour,
    read_config=read_config,
    written_fields=timm_config.WRITTEN_FIELDS,
    json_files=timm_config.json_files,
    recognises=lambda evidence: timm_arguments.names_architecture(evidence.notes),
    config_key="architecture",
)
