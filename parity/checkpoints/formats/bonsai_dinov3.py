"""The DINOv3 of jax-ml/bonsai, in Flax NNX: its state as nested dictionaries, `nnx.to_pure_dict(nnx.state(model))`.

It differs from the original in two ways.  Its GELU is the tanh approximation, and it rounds rotated queries and keys, and
the cosines and sines, to bfloat16.  The twins have the approximation, and do not round.

Source: jax-ml/bonsai 3628425, bonsai/models/dinov3/modeling.py.
"""

from collections.abc import Mapping

import numpy as np

from parity.checkpoints.formats.behaviour import common_behaviour
from parity.checkpoints.formats.evidence import Evidence
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.hf_dinov3 import no_registers
from parity.checkpoints.formats.hugging_face import square_only
from parity.checkpoints.formats.tables import COMMON_CONSTRAINTS, has_layer_scale, unsupported_head_width
from vit_spec.models import IMAGENET

_COMMON = """
    patch_embed.proj.weight | embeddings/patch_embeddings/kernel | ph pw rgb width
    patch_embed.proj.bias   | embeddings/patch_embeddings/bias   | width
    cls_token               | embeddings/cls_token               | 1 1 width
    reg_token               | embeddings/register_tokens         | 1 register width

    blocks.norm1.weight     | layer/{block}/norm1/scale              | width
    blocks.norm1.bias       | layer/{block}/norm1/bias               | width
    blocks.attn.qkv.weight  | layer/{block}/attention/{qkv}/kernel   | width (head dim)
    blocks.attn.qkv.bias    | layer/{block}/attention/{qkv}/bias     | (head dim)
    blocks.attn.q_bias      | layer/{block}/attention/q_proj/bias    | (head dim)
    blocks.attn.v_bias      | layer/{block}/attention/v_proj/bias    | (head dim)
    blocks.attn.proj.weight | layer/{block}/attention/o_proj/kernel  | (head dim) width
    blocks.attn.proj.bias   | layer/{block}/attention/o_proj/bias    | width
    blocks.ls1.gamma        | layer/{block}/layer_scale1/lambda1     | width
    blocks.norm2.weight     | layer/{block}/norm2/scale              | width
    blocks.norm2.bias       | layer/{block}/norm2/bias               | width
    blocks.mlp.fc2.weight   | layer/{block}/mlp/down_proj/kernel     | ff width
    blocks.mlp.fc2.bias     | layer/{block}/mlp/down_proj/bias       | width
    blocks.ls2.gamma        | layer/{block}/layer_scale2/lambda1     | width

    norm.weight | norm/scale | width
    norm.bias   | norm/bias  | width
"""
_MLP = """
    blocks.mlp.fc1.weight | layer/{block}/mlp/up_proj/kernel | width ff
    blocks.mlp.fc1.bias   | layer/{block}/mlp/up_proj/bias   | ff
"""
_GATED_MLP = """
    blocks.mlp.fc1.weight | layer/{block}/mlp/{glu}/kernel | width ff
    blocks.mlp.fc1.bias   | layer/{block}/mlp/{glu}/bias   | ff
"""


def assumed_behaviour(evidence: Evidence) -> Mapping[str, str]:
    """Return the assumptions about what no tensor shows, and that the rotation is exact."""
    return {
        **common_behaviour(evidence),
        "rotary coordinates": "rows divided by the number of rows, columns by the number of columns",
        "rotary rounding": "none; jax-ml/bonsai rounds rotated queries and keys to bfloat16",
    }


FORMAT = Format(
    name="bonsai-dinov3",
    description="DINOv3 of jax-ml/bonsai in Flax NNX",
    separator="/",
    tables={"mlp": _COMMON + _MLP, "gated": _COMMON + _GATED_MLP},
    default_variant=lambda config: "gated" if config.mlp.is_gated else "mlp",
    spellings={"qkv": ("q_proj", "k_proj", "v_proj"), "glu": ("gate_proj", "up_proj")},
    ignored_keys={"embeddings/mask_token": "replaces masked patches in pre-training only"},
    constants={
        "embeddings/mask_token | 1 1 width": lambda config: np.zeros(config.width, np.float32),
        "embeddings/register_tokens | 1 register width": no_registers,
    },
    constraints={
        **COMMON_CONSTRAINTS,
        "patch_size": square_only("patch_size"),
        "num_classes": 0,
        "tokens.class_token": True,
        "tokens.distillation": False,
        "tokens.patch_bias": True,
        "positions.kind": "none",
        "positions.rotary": "dinov3",
        "attention.qk_norm": False,
        "mlp.activation": ("gelu_tanh", "swiglu"),
        "norms.before_blocks": False,
        "norms.after_blocks": True,
        "norms.after_pool": False,
        "norms.layer_scale": has_layer_scale,
        "head.pool": "token",
        "head.hidden": None,
    },
    unsupported=lambda config, variant: unsupported_head_width(config),
    assumed={
        "image_size": (224, 224),
        "norms.eps": 1e-5,
        "norms.layer_scale": 1.0,
        "positions.rotary_base": 100.0,
        "mlp.activation": "gelu_tanh",
        "pixels.mean": IMAGENET.mean,
        "pixels.std": IMAGENET.std,
    },
    assumed_behaviour=assumed_behaviour,
)
