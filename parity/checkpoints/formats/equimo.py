"""The VisionTransformer of Equimo, in Equinox: the arrays of the module by their paths, joined by slashes.

Equinox itself writes arrays without names (`weights.eqx`), which only the module in memory can give:

    leaves = jax.tree_util.tree_leaves_with_path(equinox.filter(model, equinox.is_array))
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}

Rotary periods follow from the rotary base.  Equimo computes them in bfloat16; periods that are rounded to it are read as
exact ones, as for DINOv3.  `mask_token` is not written.

Without the argument `global_pool`, a module returns the mean of the patch tokens, also if it has a class token.  For images
smaller than the table of positions, jax.image resamples without antialiasing, with a kernel (a = -0.5) that the twins do
not have; what is assumed of resampling holds for larger images.

Source: equimo 1.1.0, models/vit.py, layers/attention.py, layers/posemb.py, layers/ffn.py.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.checkpoints.containers.container import StoredArray
from parity.checkpoints.formats import torch
from parity.checkpoints.formats.dinov3 import are_periods, find_base, periods
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.hugging_face import square_only
from parity.checkpoints.formats.tables import COMMON_CONSTRAINTS, unsupported_head_width
from parity.checkpoints.layout import Array
from vit_spec import ViTConfig

_COMMON = """
    patch_embed.proj.weight | patch_embed/proj/weight | width rgb ph pw
    patch_embed.proj.bias   | patch_embed/proj/bias   | width 1 1
    cls_token               | cls_token               | 1 width
    reg_token               | reg_tokens              | register width
    pos_embed               | global_pos_embed/weight | token width

    blocks.norm1.weight       | blocks/0/blocks/{block}/prenorm/weight     | width
    blocks.norm1.bias         | blocks/0/blocks/{block}/prenorm/bias       | width
    blocks.attn.qkv.weight    | blocks/0/blocks/{block}/attn/qkv/weight    | (qkv head dim) width
    blocks.attn.qkv.bias      | blocks/0/blocks/{block}/attn/qkv/bias      | (qkv head dim)
    blocks.attn.q_norm.weight | blocks/0/blocks/{block}/attn/q_norm/weight | dim
    blocks.attn.q_norm.bias   | blocks/0/blocks/{block}/attn/q_norm/bias   | dim
    blocks.attn.k_norm.weight | blocks/0/blocks/{block}/attn/k_norm/weight | dim
    blocks.attn.k_norm.bias   | blocks/0/blocks/{block}/attn/k_norm/bias   | dim
    blocks.attn.proj.weight   | blocks/0/blocks/{block}/attn/proj/weight   | width (head dim)
    blocks.attn.proj.bias     | blocks/0/blocks/{block}/attn/proj/bias     | width
    blocks.ls1.gamma          | blocks/0/blocks/{block}/ls1/gamma          | width
    blocks.norm2.weight       | blocks/0/blocks/{block}/norm/weight        | width
    blocks.norm2.bias         | blocks/0/blocks/{block}/norm/bias          | width
    blocks.ls2.gamma          | blocks/0/blocks/{block}/ls2/gamma          | width

    norm.weight | norm/weight | width
    norm.bias   | norm/bias   | width
    head.weight | head/weight | label feature
    head.bias   | head/bias   | label
"""
_MLP = """
    blocks.mlp.fc1.weight | blocks/0/blocks/{block}/mlp/fc1/weight | ff width
    blocks.mlp.fc1.bias   | blocks/0/blocks/{block}/mlp/fc1/bias   | ff
    blocks.mlp.fc2.weight | blocks/0/blocks/{block}/mlp/fc2/weight | width ff
    blocks.mlp.fc2.bias   | blocks/0/blocks/{block}/mlp/fc2/bias   | width
"""
_OUTPUT = """
    blocks.mlp.fc2.weight | blocks/0/blocks/{block}/mlp/w3/weight | width ff
    blocks.mlp.fc2.bias   | blocks/0/blocks/{block}/mlp/w3/bias   | width
"""
_SWIGLU = """
    blocks.mlp.fc1.weight | blocks/0/blocks/{block}/mlp/{glu}/weight | ff width
    blocks.mlp.fc1.bias   | blocks/0/blocks/{block}/mlp/{glu}/bias   | ff
"""
_SWIGLU_FUSED = """
    blocks.mlp.fc1.weight | blocks/0/blocks/{block}/mlp/w12/weight | (glu ff) width
    blocks.mlp.fc1.bias   | blocks/0/blocks/{block}/mlp/w12/bias   | (glu ff)
"""
_PERIODS = "local_pos_embed/patch_rope/freqs"


def _read(array: StoredArray) -> Array:
    return np.asarray(array.read(0, array.size), np.float64)


def read_config(evidence: Evidence) -> Fields:
    """Return the rotary base and the number of heads that the periods imply.

    Raises:
        InputError: periods that no base yields, as those of ViT-5.
    """
    if _PERIODS not in evidence.ignored_arrays:
        return {}
    found = _read(evidence.ignored_arrays[_PERIODS])
    base, _ = find_base(found)
    fields: dict[str, Any] = {"positions.rotary": "dinov3", "positions.rotary_base": base}
    if evidence.sizes["inner"] % (4 * len(found)) == 0:
        fields["num_heads"] = evidence.sizes["inner"] // (4 * len(found))
    return fields


def infer_assumed(evidence: Evidence) -> Fields:
    """Return the activation and the epsilon of the published sizes that have these tensors.

    With layer scale: DINOv2 and TIPS, which have a table of positions, and DINOv3.  Without: SigLIP 2, which has no class
    token, and the plain ViT.
    """
    if "blocks.ls1.gamma" in evidence.axes:
        is_large_epsilon, activation = "pos_embed" not in evidence.axes, "gelu"
    else:
        is_large_epsilon, activation = "cls_token" in evidence.axes, "gelu_tanh"
    gated = "glu" in evidence.axes["blocks.mlp.fc1.weight"]
    return {"norms.eps": 1e-5 if is_large_epsilon else 1e-6, "mlp.activation": "swiglu" if gated else activation}


def assumed_behaviour(evidence: Evidence) -> Mapping[str, str]:
    """Return the assumptions about what no tensor shows, how coordinates are normalized, and that periods are exact."""
    found = dict(torch.assumed_behaviour(evidence))
    if _PERIODS in evidence.ignored_arrays:
        found["rotary coordinates"] = "rows divided by the number of rows, columns by the number of columns"
        _, kind = find_base(_read(evidence.ignored_arrays[_PERIODS]))
        found |= {"rotary periods": f"exact; in the file, they are rounded to {kind}"} if kind else {}
    return found


def _periods(config: ViTConfig) -> Array | None:
    if config.positions.rotary == "none":
        return None
    return periods(config.positions.rotary_base, config.head_dim).astype(np.float32)


def _allowed_image_sizes(config: ViTConfig) -> Any:
    """Return the values that image_size may have: a table of positions is square."""
    return (config.image_size[0],) * 2 if config.positions.kind == "learned" else config.image_size


FORMAT = Format(
    name="equimo",
    description="VisionTransformer of Equimo in Equinox, with named arrays",
    separator="/",
    tables={
        "mlp": _COMMON + _MLP,
        "swiglu": _COMMON + _SWIGLU + _OUTPUT,
        "swiglufused": _COMMON + _SWIGLU_FUSED + _OUTPUT,
    },
    default_variant=lambda config: "swiglu" if config.mlp.is_gated else "mlp",
    spellings={"glu": ("w1", "w2")},
    ignored_keys={
        "mask_token": "replaces masked patches in training",
        _PERIODS: "computed exactly from positions.rotary_base; Equimo computes periods in bfloat16",
        "local_cls_norm/.*": "a norm of the small crops in training",
    },
    ignored_values={_PERIODS: are_periods},
    refused_keys={r"^local_pos_embed/reg_rope/": "rotary positions of registers"},
    constants={_PERIODS: _periods},
    constraints={
        **COMMON_CONSTRAINTS,
        "image_size": lambda config: (_allowed_image_sizes(config),),
        "patch_size": square_only("patch_size"),
        "tokens.distillation": False,
        "tokens.patch_bias": True,
        "positions.kind": ("learned", "none"),
        "positions.rotary": ("none", "dinov3"),
        "attention.qkv_bias": ("qkv", "none"),
        "mlp.activation": ("gelu", "gelu_tanh", "relu", "swiglu"),
        "norms.before_blocks": False,
        "norms.after_blocks": True,
        "norms.after_pool": False,
        "head.pool": ("token", "mean"),
        "head.hidden": None,
        "head.bias": True,
    },
    unsupported=lambda config, variant: unsupported_head_width(config),
    assumed={"head.pool": "mean"},
    infer_assumed=infer_assumed,
    read_config=read_config,
    assumed_behaviour=assumed_behaviour,
    recognises=lambda evidence: _PERIODS in evidence.ignored_arrays,
)
