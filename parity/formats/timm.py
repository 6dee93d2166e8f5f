"""timm's Vision Transformers: the state dict of `VisionTransformer` and, with DINOv3's rotary positions, of `Eva`.

So are AugReg's weights, DeiT's, DINO's, DINOv2's, MAE's, CLIP's and SigLIP's as timm keeps them.  A folder with
config.json is what timm itself writes for a hub, and `timm.create_model("local-dir:FOLDER", pretrained=True)` opens it.

A CLIP classifier has no bias; timm's always has one, and zeros are written.  Files from before timm 0.6 may hold a
hidden layer with tanh ahead of the classifier, `pre_logits.fc`: table "legacy".  Later versions leave it out in silence
and so run another function; it is written only where that table is asked for.

Sources: huggingface/pytorch-image-models 1.0.31, timm/models/vision_transformer.py, deit.py, eva.py, _hub.py; 0.4.12,
timm/models/vision_transformer.py for the legacy names.
"""

import numpy as np

from parity.formats import timm_config
from parity.formats.format import Evidence, Fields, Format
from parity.formats.tables import ORDINARY, plain, respelled, uneven_heads
from parity.formats.torch import TABLE
from parity.layout import Array
from vit_spec import InputError, ViTConfig

_POOL_MLP = ("attn_pool.mlp.fc1", "attn_pool.mlp.fc2")
_VIT = respelled(TABLE, {}, ("pre_logits", "blocks.attn.q_bias", "blocks.attn.v_bias", *_POOL_MLP))
_POOL = "\n".join(line for line in plain(TABLE).splitlines() if line.strip().startswith(_POOL_MLP))
_EVA = respelled(
    plain(TABLE),
    {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"},
    ("pre_logits", "dist_token", "head_dist", "pos_embed", "blocks.attn.qkv.bias"),
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
    """Return what config.json says, and what is known of the sizes that DINOv2 and DINOv3 were published in.

    Raises:
        InputError: MLPs without biases, or an architecture that is another function.
    """
    axes, width = evidence.axes, evidence.sizes["width"]
    if "blocks.mlp.fc1.bias" not in axes:
        raise InputError(
            "its MLPs have no biases (timm's proj_bias=False), for which ViTConfig has no word: it cannot be read"
        )
    fields: dict[str, object] = {}
    if evidence.variant == "eva":
        fields |= {
            "positions.kind": "none",
            "positions.rotary": "dinov3",
            "positions.rotary_base": 100.0,
            "norms.eps": 1e-5,
        }
        fields |= {} if "attn_pool.latent" in axes else {"head.pool": "mean"}
        if width % 64 == 0:  # heads of 64, but for the 7B
            fields["num_heads"] = 32 if width == 4096 else width // 64
    elif "fc_norm.weight" in axes:  # which timm makes where it takes a mean, unless told otherwise
        fields["head.pool"] = "mean"
    if evidence.variant != "eva" and width == 1536 and "glu" in axes["blocks.mlp.fc1.weight"]:
        fields["num_heads"] = 24  # DINOv2's giant; SigLIP 2's, of the same width and depth, has 16
    return {**fields, **timm_config.fields(evidence)}


def objection(config: ViTConfig, table: str) -> str:
    """Say what of a config timm's classes cannot be."""
    c, pool = config, config.head.pool
    if what := uneven_heads(c):
        return what
    if (c.positions.rotary == "dinov3") != (table == "eva"):
        return f"positions.rotary={c.positions.rotary!r} in its table {table!r}"
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
    if c.positions.kind != "none":
        return "positions.rotary='dinov3' with a table of positions"
    if c.mlp.activation not in ("gelu", "swiglu"):
        return f"positions.rotary='dinov3' with mlp.activation={c.mlp.activation!r}"
    if c.head.pool == "attention" and c.num_prefix:  # which timm's Eva lets the query read
        return f"positions.rotary='dinov3' with head.pool='attention' and {c.num_prefix} tokens ahead of the patches"
    return ""


def _no_bias(config: ViTConfig) -> Array | None:
    return None if config.head.bias or not config.num_classes else np.zeros(config.num_classes, np.float32)


FORMAT = Format(
    name="timm",
    what="timm's state_dict, or the folder that timm.create_model opens",
    separator=".",
    tables={"vit": f"{_VIT}\n{_POOL}", "eva": _EVA + _GATE, "legacy": f"{_VIT}\n{_POOL}{_HIDDEN}"},
    usual=lambda config: "eva" if config.positions.rotary == "dinov3" else "vit",
    spellings={"glu": ("fc1_g", "fc1_x")},
    ignored={r"head\.bias": "zeros, where the classifier has no bias"},
    constants={"head.bias | label": _no_bias},
    always={
        **ORDINARY,
        "positions.kind": ("learned", "none"),
        "positions.rotary": ("none", "dinov3"),
        "attention.proj_bias": True,
        "head.pool": ("token", "mean", "attention", "none"),
    },
    objection=objection,
    assumed={"norms.eps": 1e-6, "mlp.activation": "gelu", "resampling.kernel": "bicubic", "resampling.antialias": True},
    settings=settings,
    says=timm_config.SAYS,
    files=timm_config.files,
    recognises=lambda evidence: "architecture" in evidence.notes.get("config.json", {}),
)
