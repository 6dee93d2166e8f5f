"""Tables that are derived from other tables, and constraints that many formats share."""

from collections.abc import Mapping

from parity.checkpoints.formats.evidence import Fields
from vit_spec import ViTConfig
from vit_spec.parts import UNGATED_ACTIVATIONS

# The block of "An Image is Worth 16x16 Words" (arXiv 2010.11929), which almost every library has.
PLAIN_BLOCK: Fields = {
    "attention.out_norm": False,
    "mlp.bias": True,
    "mlp.norm": False,
    "norms.kind": "layer",
    "norms.bias": True,
    "norms.order": "pre",
    "norms.after_patches": False,
    "norms.mlp_layer_scale": True,
    "positions.relative": "none",
    "head.pool_prefix": False,
    "head.pool_heads": None,
}
# Fields of `ViTConfig` that have these values in the models of almost every library.
COMMON_CONSTRAINTS: Fields = {
    **PLAIN_BLOCK,
    "attention.proj": True,
    "attention.scale": None,
    "attention.value_skip": False,
    "norms.shared_norm": False,
}

# The ViT of most libraries: a class token, learned positions, biases in all layers, MLPs without a gate.
PLAIN_VIT_CONSTRAINTS: Fields = {
    **COMMON_CONSTRAINTS,
    "tokens.class_token": True,
    "tokens.patch_bias": True,
    "positions.kind": "learned",
    "positions.rotary": "none",
    "attention.qkv_bias": "qkv",
    "attention.proj_bias": True,
    "attention.qk_norm": False,
    "mlp.activation": UNGATED_ACTIVATIONS,
    "norms.before_blocks": False,
}


def has_layer_scale(config: ViTConfig) -> float:
    """Return the values of norms.layer_scale of models that have one, for `Format.constraints`: any, also zero."""
    return 1.0 if config.norms.layer_scale is None else config.norms.layer_scale


def replace_keys(table: str, keys: Mapping[str, str], without: tuple[str, ...] = ()) -> str:
    """Return a table with parts of its keys replaced.

    Args:
        table: the table.
        keys: part of a key -> its replacement, applied in order: {"ls1.gamma": "gamma_1"}.
        without: names of parameters, or beginnings of names, whose lines are dropped.

    Raises:
        KeyError: no key contains the part, or no parameter has the name.
    """
    lines = [[part.strip() for part in line.split("|")] for line in table.splitlines() if line.strip()]
    for name in without:
        if not any(line[0].startswith(name) for line in lines):
            raise KeyError(name)
    lines = [line for line in lines if not line[0].startswith(without)] if without else lines
    for old, new in keys.items():
        if not any(old in line[1] for line in lines):
            raise KeyError(old)
        lines = [[name, key.replace(old, new), axes] for name, key, axes in lines]
    return "\n".join(" | ".join(line) for line in lines)


def ungated(table: str) -> str:
    """Return a table without the lines for gated MLPs, which have the axis "glu"."""
    return "\n".join(line for line in table.splitlines() if "glu" not in line.rpartition("|")[2])


def unsupported_head_width(config: ViTConfig) -> str:
    """Return the values of a config whose heads together are not as wide as the model; "" if they are."""
    even = config.num_heads * config.head_dim == config.width
    return (
        "" if even else f"attention.head_dim={config.head_dim} with {config.num_heads} heads in a width of {config.width}"
    )
