"""Hugging Face's Dinov2WithRegisters: positions for the class token and the patches, resampled with antialiasing.

Source: huggingface/transformers src/transformers/models/dinov2_with_registers/modeling_dinov2_with_registers.py.
"""

from collections.abc import Mapping
from typing import Any

from parity.checkpoints.formats import hf_classes
from parity.checkpoints.formats import hf_dinov2 as dinov2
from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.library_files import LibraryFiles
from vit_spec import ViTConfig

REGISTERS = """
    reg_token | @embeddings.register_tokens | 1 register width
"""
PREFIX = "dinov2_with_registers."
NAME, TYPES = "hf-dinov2-reg", ("dinov2_with_registers",)
LAYOUTS = {name: (text + REGISTERS, layer) for name, (text, layer) in dinov2.LAYOUTS.items()}
TABLES = hf.tables(PREFIX, LAYOUTS, hf.CLASSIFIER)


def unsupported(config: ViTConfig, variant: str) -> str:
    """Return what a variant cannot store: no registers, or the other kind of MLPs; "" if it can store the config."""
    return dinov2.unsupported(config, variant) if config.tokens.registers else "tokens.registers=0, only positive numbers"


def json_files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the JSON files that transformers needs to open a folder."""
    registers = config.tokens.registers
    content = dinov2.config_json(config, *TYPES, "Dinov2WithRegisters", num_register_tokens=registers)
    return hf.folder_files(config, "bicubic", content)


FORMAT = Format(
    name=NAME,
    description="Dinov2WithRegisters of Hugging Face transformers",
    separator=".",
    tables=TABLES,
    default_variant=dinov2.default_variant,
    spellings=hf.V4_SPELLINGS,
    variant_spellings=hf.VARIANT_SPELLINGS,
    ignored_keys=hf.MASK_TOKEN_KEY,
    constants=hf.mask_token_constants(PREFIX, TABLES),
    constraints={
        **dinov2.CONSTRAINTS,
        "positions.covers": "class",
    },
    unsupported=unsupported,
    assumed={**dinov2.ASSUMED, "resampling.antialias": True},
    read_config=dinov2.config_reader(NAME, TYPES),
    assumed_behaviour=hf_classes.assumed_behaviour,
    library=LibraryFiles(contents=json_files, model_types=TYPES),
    recognises=lambda evidence: hf_classes.model_type(evidence) in TYPES,
)
