"""The Flax ViT of transformers v4: flax_model.msgpack, which no maintained library reads any more.

The models and their config.json are the same as in PyTorch.  The keys end in Flax's names for arrays, and the arrays have
another order of axes.

Source: huggingface/transformers 4.57, models/vit/modeling_flax_vit.py, modeling_flax_pytorch_utils.py.
"""

import re
from dataclasses import replace

from parity.checkpoints.formats import hf_vit
from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.evidence import Evidence, Fields
from vit_spec import ViTConfig

NAME = "hf-flax"
FLAX_ACTIVATIONS = (
    "gelu",
    "gelu_tanh",
    "quick_gelu",
    "relu",
    "silu",
)  # ACT2FN in modeling_flax_utils.py
SQUARE: Fields = {name: hf.square_only(name) for name in ("image_size", "patch_size")}


def flax_table(table: str) -> str:
    """Return a table for PyTorch with Flax's keys and order of axes.

    Weights of layers are (inputs, outputs) and named "kernel"; weights of norms are named "scale", and position tables
    "embedding".
    """
    lines = []
    for line in filter(str.strip, table.splitlines()):
        name, key, axes = (part.strip() for part in line.split("|"))
        dims = re.findall(r"\([^()]*\)|\S+", axes)
        if key.endswith("position_embedding.weight"):
            key = key.replace(".weight", ".embedding")
        elif key.endswith(".weight"):
            key = key.removesuffix("weight") + ("kernel" if len(dims) > 1 else "scale")
            dims = dims[2:] + dims[1::-1]
        lines.append(f"{name} | {key.replace('.', '/')} | {' '.join(dims)}\n")
    return "".join(lines)


def default_variant(config: ViTConfig) -> str:
    """Return the variant for a model with a classifier, or without."""
    return "classifier" if config.num_classes else "bare"


def read_config(evidence: Evidence) -> Fields:
    """Return the fields that config.json and preprocessor_config.json state.

    Raises:
        InputError: the config.json of another model, or an unknown field or value.
    """
    return hf.config_fields(evidence, hf.read_config_json(evidence, NAME, hf_vit.TYPES, hf_vit.DEFAULTS))


FORMAT = replace(
    hf_vit.FORMAT,
    name=NAME,
    description="ViT of Hugging Face transformers 4 in Flax",
    separator="/",
    tables={"classifier": flax_table(hf_vit.FORMAT.tables["v4"]), "bare": flax_table(hf_vit.FORMAT.tables["v4-bare"])},
    default_variant=default_variant,
    variant_spellings={},
    ignored_keys={},
    constraints={
        **hf_vit.CONSTRAINTS,
        **SQUARE,
        "mlp.activation": FLAX_ACTIVATIONS,
        "head.hidden": lambda config: (None, config.width),  # the pooler is as wide as the model
    },
    read_config=read_config,
)
