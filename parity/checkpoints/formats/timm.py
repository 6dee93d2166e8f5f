"""timm's Vision Transformers: the state dict of `VisionTransformer`, and of `Eva` with DINOv3's rotary positions or none.

So are AugReg's weights, DeiT's, DINO's, DINOv2's, MAE's, CLIP's and SigLIP's as timm keeps them.  A folder with
config.json is what timm itself writes for a hub, and `timm.create_model("local-dir:FOLDER", pretrained=True)` opens it.

A CLIP classifier has no bias; timm's always has one, and zeros are written.  Files from before timm 0.6 may hold a
hidden layer with tanh ahead of the classifier, `pre_logits.fc`: table "legacy".  Later versions leave it out in silence
and so run another function; it is written only where that table is asked for, and beside a config.json refused.

Sources: huggingface/pytorch-image-models 1.0.31, timm/models/vision_transformer.py, deit.py, eva.py, _hub.py; 0.4.12,
timm/models/vision_transformer.py for the legacy names.
"""

import numpy as np

from parity.checkpoints.formats import timm_arguments, timm_config, torch
from parity.checkpoints.formats.format import Evidence, Fields, Format
from parity.checkpoints.formats.tables import ORDINARY, plain, respelled, uneven_heads
from parity.checkpoints.layout import Array
from vit_spec import InputError, ViTConfig

_POOL_MLP = ("attn_pool.mlp.fc1", "attn_pool.mlp.fc2")
_VIT = respelled(torch.TABLE, {}, ("pre_logits", "blocks.attn.q_bias", "blocks.attn.v_bias", *_POOL_MLP))
_POOL = "\n".join(line for line in plain(torch.TABLE).splitlines() if line.strip().startswith(_POOL_MLP))
_EVA = respelled(
    plain(torch.TABLE),
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


def settings(evidence: Evidence) -> Fields:
    """Return what config.json says, or what timm's train.py keeps beside weights.

    Raises:
        InputError: MLPs without biases, an architecture that is another function, or a hidden layer beside a config.json.
    """
    if "architecture" in evidence.notes.get("config.json", {}) and "pre_logits.weight" in evidence.axes:
        raise InputError(
            "its pre_logits.fc is a layer of timm before 0.6, and timm 1.0 opens a folder with a config.json without it: "
            "take pre_logits.* out for what timm 1.0 computes, or config.json away for what older ones do"
        )
    if "blocks.mlp.fc1.bias" not in evidence.axes:
        raise InputError(
            "its MLPs have no biases (timm's proj_bias=False), for which ViTConfig has no word: it cannot be read"
        )
    return timm_arguments.told(evidence.notes, evidence.sizes["rgb"])


def likely(evidence: Evidence) -> Fields:
    """Return what models with these tensors mostly are.

    Without a table of positions `Eva` is DINOv3, whose heads are 64 wide but for the 7B's.
    """
    axes, width = evidence.axes, evidence.sizes["width"]
    fields: dict[str, object] = {}
    if evidence.variant == "eva" and "pos_embed" not in axes:
        fields |= {"positions.rotary": "dinov3", "norms.eps": 1e-5}
        fields |= {} if "attn_pool.latent" in axes else {"head.pool": "mean"}
        fields |= {"num_heads": 32 if width == 4096 else width // 64} if width % 64 == 0 else {}
    elif width == 1536 and "glu" in axes["blocks.mlp.fc1.weight"]:
        fields["num_heads"] = 24  # DINOv2's giant; SigLIP 2's, of the same width and depth, has 16
    return fields


def objection(config: ViTConfig, table: str) -> str:
    """Say what of a config timm's classes cannot be."""
    c, pool = config, config.head.pool
    if what := uneven_heads(c):
        return what
    if table != "eva" and (c.positions.rotary == "dinov3" or c.attention.qkv_bias == "qv"):
        fields = f"positions.rotary={c.positions.rotary!r} with attention.qkv_bias={c.attention.qkv_bias!r}"
        return f"{fields} in its table {table!r}"
    if c.tokens.patch_bias == c.norms.before_blocks:
        return (
            f"norms.before_blocks={c.norms.before_blocks} with tokens.patch_bias={c.tokens.patch_bias}, only one of the two"
        )
    if c.mlp.activation == "swiglu" and pool == "attention":
        return "head.pool='attention' with mlp.activation='swiglu'"
    if c.tokens.pad and c.image_size != tuple(n * p for n, p in zip(c.grid, c.patch_size, strict=True)):
        return f"image_size={c.image_size} where tokens.pad is set"
    return _eva_objection(c) if table == "eva" else _vit_objection(c)


def _vit_objection(c: ViTConfig) -> str:
    if c.norms.after_blocks and c.norms.after_pool:
        return "norms.after_blocks=True with norms.after_pool=True"
    if c.positions.kind == "learned" and c.num_covered not in (0, c.num_prefix):
        return f"positions.covers={c.positions.covers!r} with {c.tokens.registers} registers"
    if c.tokens.distillation and (c.tokens.registers or c.num_covered != 2 or c.positions.kind != "learned"):
        return "tokens.distillation=True with registers, or without a position for each token"
    return ""


def _eva_objection(c: ViTConfig) -> str:
    if c.mlp.activation not in ("gelu", "swiglu"):
        return f"mlp.activation={c.mlp.activation!r} in its table 'eva'"
    if c.head.pool == "attention" and c.num_prefix:  # which timm's Eva lets the query read
        return f"head.pool='attention' with {c.num_prefix} tokens ahead of the patches in its table 'eva'"
    if c.positions.kind == "learned" and c.num_covered not in (0, c.num_prefix):
        return f"positions.covers={c.positions.covers!r} with {c.tokens.registers} registers"
    return ""


def _no_bias(config: ViTConfig) -> Array | None:
    return None if config.head.bias or not config.num_classes else np.zeros(config.num_classes, np.float32)


FORMAT = Format(
    name="timm",
    what="timm's state_dict, or the folder that timm.create_model opens",
    separator=".",
    tables={"vit": f"{_VIT}\n{_POOL}", "eva": _EVA + _GATE, "legacy": f"{_VIT}\n{_POOL}{_HIDDEN}"},
    usual=lambda config: "eva" if config.positions.rotary == "dinov3" or config.attention.qkv_bias == "qv" else "vit",
    spellings={"glu": ("fc1_g", "fc1_x")},
    ignored={r"head\.bias": "zeros, where the classifier has no bias"},
    constants={"head.bias | label": _no_bias},
    always={
        **ORDINARY,
        "attention.scale": (None,),  # of timm 0.3's small model and of its descendants it is another, argument qk_scale
        "positions.kind": ("learned", "none"),
        "positions.rotary": ("none", "dinov3"),
        "attention.proj_bias": True,
        "head.pool": ("token", "mean", "attention", "none"),
    },
    objection=objection,
    assumed={"norms.eps": 1e-6, "mlp.activation": "gelu", "resampling.kernel": "bicubic", "resampling.antialias": True},
    likely=likely,
    untold=lambda evidence: {} if timm_arguments.describes(evidence.notes) else torch.untold(evidence),
    settings=settings,
    says=timm_config.SAYS,
    files=timm_config.files,
    recognises=lambda evidence: timm_arguments.describes(evidence.notes),
)
