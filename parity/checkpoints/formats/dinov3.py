"""DINOv3's backbone as Meta publishes it: variant "swiglu" for the sizes with a plus and the 7B model, else "mlp".

One array contains the biases of queries, keys and values, and `bias_mask` sets the third for the keys to zero.  This third
is not read, and is written as zeros.  `rope_embed.periods` follow from the rotary base.  Meta's published periods are
rounded to bfloat16.  The twins compute exact periods, as timm and transformers do, so that outputs differ by this rounding
only.  Periods that are neither exact nor rounded are refused.

Source: facebookresearch/dinov3 6876159, dinov3/models/vision_transformer.py, layers/attention.py, layers/ffn_layers.py,
layers/rope_position_encoding.py, hub/backbones.py.
"""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from parity.checkpoints.containers.container import StoredArray
from parity.checkpoints.formats import torch
from parity.checkpoints.formats.dino import BACKBONE
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.facebook import ASSUMED, CONSTRAINTS
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.tables import replace_keys, unsupported_head_width
from parity.checkpoints.layout import Array
from vit_spec import InputError, ViTConfig
from vit_spec.parts import UNGATED_ACTIVATIONS

_COMMON = replace_keys(BACKBONE, {}, ("pos_embed", "blocks.attn.qkv.bias"))
_MORE = """
    reg_token          | storage_tokens                | 1 register width
    blocks.attn.q_bias | blocks.{block}.attn.qkv.bias  | (qkv=0 head dim)
    blocks.attn.v_bias | blocks.{block}.attn.qkv.bias  | (qkv=2 head dim)
    blocks.ls1.gamma   | blocks.{block}.ls1.gamma      | width
    blocks.ls2.gamma   | blocks.{block}.ls2.gamma      | width
"""
_GATE = """
    blocks.mlp.fc1.weight | blocks.{block}.mlp.{glu}.weight | ff width
    blocks.mlp.fc1.bias   | blocks.{block}.mlp.{glu}.bias   | ff
"""
_PERIODS, _MASK = "rope_embed.periods", "attn.qkv.bias_mask"
DEFAULT_BASE = 100.0  # hub/backbones.py, pos_embed_rope_base


def periods(base: float, head_dim: int) -> Array:
    """Return the periods of the rotary frequencies of a head, (head_dim / 4,) in float64."""
    return np.asarray(base ** (2 * np.arange(head_dim // 4) / (head_dim // 2)), np.float64)


def read_config(evidence: Evidence) -> Fields:
    """Return the rotary base and the number of heads that the periods imply.

    Raises:
        InputError: periods that no base yields, or blocks without a mask for the bias of the keys.
    """
    masks = sum(key.endswith(_MASK) for key in evidence.ignored_arrays)
    if "blocks.attn.q_bias" in evidence.axes and masks != evidence.sizes["block"]:
        raise InputError(f"its blocks have attn.qkv.bias, but not all have {_MASK}, so keys have a bias: it cannot be read")
    fields: dict[str, object] = {"positions.rotary": "dinov3", "positions.rotary_base": DEFAULT_BASE}
    if _PERIODS in evidence.ignored_arrays:
        found = _read(evidence.ignored_arrays[_PERIODS])
        fields["positions.rotary_base"], _ = find_base(found)
        if evidence.sizes["inner"] % (4 * len(found)) == 0:
            fields["num_heads"] = evidence.sizes["inner"] // (4 * len(found))
    return fields


def _read(array: StoredArray) -> Array:
    return np.asarray(array.read(0, array.size), np.float64)


def assumed_behaviour(evidence: Evidence) -> Mapping[str, str]:
    """Return the assumptions about what no tensor shows, how coordinates are normalized, and that periods are exact.

    Periods are an assumption if the file's periods are rounded.
    For square images, the argument pos_embed_rope_normalize_coords makes no difference.
    """
    found = {
        **torch.assumed_behaviour(evidence),
        "rotary coordinates": "rows divided by the number of rows, columns by the number of columns",
    }
    if _PERIODS in evidence.ignored_arrays:
        _, kind = find_base(_read(evidence.ignored_arrays[_PERIODS]))
        found |= {"rotary periods": f"exact; in the file, they are rounded to {kind}"} if kind else {}
    return found


def find_base(found: Array) -> tuple[float, str]:
    """Return the base that yields these periods, and the dtype to which they are rounded; "" if float32 or none.

    Args:
        found: the periods of the file, (head_dim / 4,).

    Raises:
        InputError: no base that was tried yields them.
    """
    candidates = [DEFAULT_BASE]
    if len(found) > 1:
        implied = float(found[-1]) ** (len(found) / (len(found) - 1))
        candidates.append(float(f"{implied:.3g}"))
    for base in candidates:
        if (kind := _precision_of(found, base)) is not None:
            return base, kind
    raise InputError(
        f"{_PERIODS} are not base ** (2 i / {2 * len(found)}) for any base that was tried ({candidates}), "
        f"exact or rounded to bfloat16 or float16: it cannot be read"
    )


def _precision_of(found: Array, base: float) -> str | None:
    """Return the dtype to which the periods of a base are rounded, "" if float32 or none; None for other periods."""
    exact = periods(base, 4 * len(found))
    if np.allclose(found, exact, rtol=1e-6, atol=0):
        return ""
    for kind in (ml_dtypes.bfloat16, np.float16):
        if np.array_equal(found, exact.astype(np.float32).astype(kind).astype(np.float64)):
            return np.dtype(kind).name
    return None


def are_periods(array: Array, config: ViTConfig) -> bool:
    """Return whether an array has the periods of a model, exact or rounded."""
    found = np.asarray(array, np.float64)
    return found.shape == (config.head_dim // 4,) and _precision_of(found, config.positions.rotary_base) is not None


def _is_mask(array: Array, config: ViTConfig) -> bool:
    return np.array_equal(array, np.repeat([1, 0, 1], config.num_heads * config.head_dim))


def _mask(config: ViTConfig) -> Array | None:
    if config.attention.qkv_bias == "none":
        return None
    return np.repeat(np.array([1, 0, 1], np.float32), config.num_heads * config.head_dim)


_PERIODS_KEY, _MASK_KEY = r"rope_embed\.periods", r"blocks\.\d+\.attn\.qkv\.bias_mask"

FORMAT = Format(
    name="dinov3",
    description="DINOv3's backbone, with storage tokens and rotary positions",
    separator=".",
    tables={
        "mlp": _COMMON + _MORE,
        "swiglu": replace_keys(_COMMON, {"mlp.fc2": "mlp.w3"}, ("blocks.mlp.fc1",)) + _MORE + _GATE,
    },
    default_variant=lambda config: "swiglu" if config.mlp.is_gated else "mlp",
    spellings={"glu": ("w1", "w2")},
    ignored_keys={
        r"mask_token": "replaces masked patches in training",
        _PERIODS_KEY: "computed exactly from positions.rotary_base; published periods are rounded to bfloat16",
        _MASK_KEY: "sets the bias of the keys to zero",
        r"local_cls_norm\..*": "a norm of the small crops in training",
    },
    ignored_values={_PERIODS_KEY: are_periods, _MASK_KEY: _is_mask},
    constants={
        "mask_token | 1 width": lambda config: np.zeros(config.width, np.float32),
        "rope_embed.periods": lambda config: periods(config.positions.rotary_base, config.head_dim).astype(np.float32),
        "blocks.{block}.attn.qkv.bias_mask | (qkv head dim)": _mask,
    },
    constraints={
        **CONSTRAINTS,
        "attention.scale": None,
        "num_classes": 0,
        "positions.kind": "none",
        "positions.rotary": "dinov3",
        "attention.qkv_bias": ("qv", "none"),
        "mlp.activation": (*UNGATED_ACTIVATIONS, "swiglu"),
        "norms.after_blocks": True,
        "norms.after_pool": False,
        "head.pool": "token",
    },
    unsupported=lambda config, variant: unsupported_head_width(config),
    assumed={**ASSUMED, "norms.eps": 1e-5, "image_size": (224, 224)},
    read_config=read_config,
    assumed_behaviour=assumed_behaviour,
    recognises=lambda evidence: _PERIODS in evidence.ignored_arrays,
)
