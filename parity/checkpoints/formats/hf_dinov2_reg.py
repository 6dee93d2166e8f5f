"""Hugging Face's Dinov2WithRegisters: positions for class token and patches, resampled with antialiasing.

Source: huggingface/transformers src/transformers/models/dinov2_with_registers/modeling_dinov2_with_registers.py.
"""

from collections.abc import Mapping
from typing import Any

from parity.checkpoints.formats import hf_dinov2 as dinov2
from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.format import Format
from vit_spec import ViTConfig

REGISTERS = """
    reg_token | @embeddings.register_tokens | 1 register width
"""
PREFIX = "dinov2_with_registers."
NAME, TYPES = "hf-dinov2-reg", ("dinov2_with_registers",)
LAYOUTS = {name: (text + REGISTERS, layer) for name, (text, layer) in dinov2.LAYOUTS.items()}
TABLES = hf.tables(PREFIX, LAYOUTS, hf.CLASSIFIER)


def files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the files with which transformers opens a folder."""
    registers = config.tokens.registers
    described = dinov2.described(config, *TYPES, "Dinov2WithRegisters", num_register_tokens=registers)
    return hf.folder(config, "bicubic", described)


FORMAT = Format(
    name=NAME,
    what="Dinov2WithRegisters of Hugging Face transformers",
    separator=".",
    tables=TABLES,
    usual=dinov2.usual,
    spellings=hf.V4,
    respelled=hf.RESPELLED,
    ignored=hf.MASK_TOKEN,
    constants=hf.masks(PREFIX, TABLES),
    always={
        **dinov2.ALWAYS,
        "tokens.registers": lambda config: config.tokens.registers or 4,
        "positions.covers": "class",
    },
    objection=dinov2.objection,
    assumed={**dinov2.ASSUMED, "resampling.antialias": True},
    settings=dinov2.settings(NAME, TYPES),
    untold=dinov2.untold,
    says=hf.SAYS | {"tokens.registers"},
    files=files,
    recognises=lambda evidence: hf.model_type(evidence) in TYPES,
    model_types=TYPES,
)
