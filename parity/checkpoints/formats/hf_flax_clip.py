"""The image tower of the CLIP that transformers v4 had in Flax: FlaxCLIPVisionModel, and FlaxCLIPModel with its projection.

Source: huggingface/transformers 4.57, models/clip/modeling_flax_clip.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parity.checkpoints.formats import hf_clip
from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.format import Evidence, Fields
from parity.checkpoints.formats.hf_flax import UNGATED, flax
from vit_spec import InputError, ViTConfig

NAME = "hf-flax-clip"


def settings(evidence: Evidence) -> Fields:
    """Return what config.json and preprocessor_config.json say.

    Raises:
        InputError: the config.json of another model, or one that says what is not known here.
    """
    return hf.settings(evidence, hf.described(evidence, NAME, hf_clip.TYPES, hf_clip.DEFAULTS))


def files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the files with which transformers opens a folder.

    Raises:
        InputError: a projection; in Flax only the model of both towers has one.
    """
    if config.num_classes:
        raise InputError(
            f"format {NAME!r} has no class for an image tower with num_classes={config.num_classes}: "
            "write a file instead of a folder, or take the head off with num_classes=0"
        )
    return hf_clip.files(config)


FORMAT = replace(
    hf_clip.FORMAT,
    name=NAME,
    what="image tower of CLIP of Hugging Face transformers 4 in Flax",
    separator="/",
    tables={"": flax(hf_clip.FORMAT.tables["v4"])},
    spellings={"qkv": ("q", "k", "v")},
    respelled={},
    ignored={r"text_model/.*|text_projection/kernel": "the text tower", "logit_scale": "of the comparison with texts"},
    always={**hf_clip.FORMAT.always, "mlp.activation": UNGATED},
    settings=settings,
    files=files,
)
