"""The ViT that transformers v4 had in Flax: flax_model.msgpack, which nothing that is maintained reads any more.

The models, their config.json and their keys are those of PyTorch, but for what Flax calls the arrays and how it orders
their axes.

Source: huggingface/transformers 4.57, models/vit/modeling_flax_vit.py, modeling_flax_pytorch_utils.py.
"""

import re
from dataclasses import replace

from parity.checkpoints.formats import hf_vit
from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.format import Evidence, Fields
from vit_spec import ViTConfig

NAME = "hf-flax"
UNGATED = ("gelu", "gelu_tanh", "quick_gelu", "relu")  # of modeling_flax_utils.py, ACT2FN
SQUARE: Fields = {name: hf.square(name) for name in ("image_size", "patch_size")}


def flax(table: str) -> str:
    """Return a table of PyTorch's keys as Flax has them: inputs before outputs, and weights by the kind of layer."""
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


def usual(config: ViTConfig) -> str:
    """Return the table of the class that has these outputs."""
    return "classifier" if config.num_classes else "bare"


def settings(evidence: Evidence) -> Fields:
    """Return what config.json and preprocessor_config.json say.

    Raises:
        InputError: the config.json of another model, or one that says what is not known here.
    """
    return hf.settings(evidence, hf.described(evidence, NAME, hf_vit.TYPES, hf_vit.DEFAULTS))


FORMAT = replace(
    hf_vit.FORMAT,
    name=NAME,
    what="ViT of Hugging Face transformers 4 in Flax",
    separator="/",
    tables={"classifier": flax(hf_vit.FORMAT.tables["v4"]), "bare": flax(hf_vit.FORMAT.tables["v4-bare"])},
    usual=usual,
    respelled={},
    ignored={},
    always={
        **hf_vit.ALWAYS,
        **SQUARE,
        "mlp.activation": UNGATED,
        "head.hidden": lambda config: (None, config.width),  # the pooler is as wide as the model
    },
    settings=settings,
)
