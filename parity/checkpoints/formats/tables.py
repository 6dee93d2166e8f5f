"""Tables that follow from another: the same parameters, some under other keys."""

from collections.abc import Mapping

from parity.checkpoints.formats.format import Fields
from vit_spec import ViTConfig

# What the transformers of hardly any library can be, beside those of this project.
ORDINARY: Fields = {
    "attention.proj": True,
    "attention.scale": None,
    "attention.value_skip": False,
    "norms.shared_norm": False,
}
UNGATED = ("gelu", "gelu_tanh", "quick_gelu", "relu", "none")

# What most of them are: a class token, learned positions, biases everywhere, plain MLPs.
CLASSIC: Fields = {
    **ORDINARY,
    "tokens.class_token": True,
    "tokens.patch_bias": True,
    "positions.kind": "learned",
    "positions.rotary": "none",
    "attention.qkv_bias": "qkv",
    "attention.proj_bias": True,
    "attention.qk_norm": False,
    "mlp.activation": UNGATED,
    "norms.before_blocks": False,
}


def respelled(table: str, keys: Mapping[str, str], without: tuple[str, ...] = ()) -> str:
    """Return a table with parts of its keys replaced, in order.

    keys: what is in a key, and what takes its place: {"ls1.gamma": "gamma_1"}.
    without: names of parameters, or beginnings of names, that are left out.

    Raises:
        KeyError: something that is in no key, or the name of no parameter.
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


def plain(table: str) -> str:
    """Return the lines of a table that hold no gate."""
    return "\n".join(line for line in table.splitlines() if "glu" not in line.rpartition("|")[2])


def gated(table: str) -> str:
    """Return the lines of a table that a model with gated MLPs has."""
    lines = plain(table).splitlines()
    return "\n".join(
        [line for line in lines if ".fc1." not in line] + [line for line in table.splitlines() if "glu" in line]
    )


def uneven_heads(config: ViTConfig) -> str:
    """Say that heads do not share the width evenly, where they do not."""
    even = config.num_heads * config.head_dim == config.width
    return (
        "" if even else f"attention.head_dim={config.head_dim} with {config.num_heads} heads in a width of {config.width}"
    )
