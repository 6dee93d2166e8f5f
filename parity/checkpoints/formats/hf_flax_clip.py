"""The image tower of the Flax CLIP of transformers v4: FlaxCLIPVisionModel, and FlaxCLIPModel with its projection.

Source: huggingface/transformers 4.57, models/clip/modeling_flax_clip.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parity.checkpoints.formats import hf_clip
from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.hf_flax import FLAX_ACTIVATIONS, flax_table
from vit_spec import InputError, ViTConfig

NAME = "hf-flax-clip"


def read_config(evidence: Evidence) -> Fields:
    """Return the fields that config.json and preprocessor_config.json state.

    Raises:
        InputError: the config.json of another model, or an unknown field or value.
    """
    return hf.config_fields(evidence, hf.read_config_json(evidence, NAME, hf_clip.TYPES, hf_clip.DEFAULTS))


def json_files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the JSON files that transformers needs to open a folder.

    Raises:
        InputError: the config has a projection, which only the model with both towers has in Flax.
    """
    if config.num_classes:
        raise InputError(
            f"format {NAME!r} has no class for an image tower with num_classes={config.num_classes}: "
            "write a file instead of a folder, or remove the head with num_classes=0"
        )
    return hf_clip.json_files(config)


FORMAT = replace(
    hf_clip.FORMAT,
    name=NAME,
    description="image tower of CLIP of Hugging Face transformers 4 in Flax",
    separator="/",
    tables={"": flax_table(hf_clip.FORMAT.tables["v4"])},
    spellings={"qkv": ("q", "k", "v")},
    variant_spellings={},
    ignored_keys={
        r"text_model/.*|text_projection/kernel": "the text tower",
        "logit_scale": "scale for the comparison of images with texts",
    },
    ignored_values={},
    constraints={**hf_clip.FORMAT.constraints, "mlp.activation": FLAX_ACTIVATIONS},
    read_config=read_config,
    library=replace(hf_clip.FORMAT.library, contents=json_files),
)
