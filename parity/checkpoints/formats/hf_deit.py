"""Hugging Face's DeiT, which always has the distillation token.  Its output is the mean of two classifiers.

DeiTForImageClassification has a distillation token and classifies by the class token alone.  `ViTConfig` cannot express
that, so it is refused, also without its classifier.  DeiT without distillation is published as ViT.

Source: huggingface/transformers src/transformers/models/deit/modeling_deit.py, configuration_deit.py (defaults).
"""

from collections.abc import Mapping
from typing import Any

from parity.checkpoints.formats import hf_classes, hf_vit
from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.library_files import LibraryFiles
from vit_spec import InputError, ViTConfig
from vit_spec.models import IMAGENET

NAME, TYPES = "hf-deit", ("deit",)
DISTILLATION = """
    dist_token | @embeddings.distillation_token | 1 1 width
"""
CLASSIFIERS = """
    head.weight      | cls_classifier.weight          | label feature
    head.bias        | cls_classifier.bias            | label
    head_dist.weight | distillation_classifier.weight | label feature
    head_dist.bias   | distillation_classifier.bias   | label
"""
LAYOUTS = {name: (text + DISTILLATION, layer) for name, (text, layer) in hf_vit.LAYOUTS.items()}
SINGLE_CLASSIFIER = r"classifier\.(weight|bias)"


def read_config(evidence: Evidence) -> Fields:
    """Return the fields that config.json and preprocessor_config.json state.

    Raises:
        InputError: a classifier of the class token alone, the config.json of another model, or an unknown field or value.
    """
    if "classifier.weight" in evidence.ignored_arrays:
        raise InputError(
            "it is a DeiTForImageClassification, which has a distillation token and classifies by the class token alone; "
            "only DeiTForImageClassificationWithTeacher is supported: give that, or remove classifier.*"
        )
    if any("pooler" in key for key in evidence.ignored_arrays) and "head.weight" not in evidence.axes:
        raise InputError(
            "it is a DeiTModel with a pooler, which reads the class token alone; only the mean of both tokens is "
            "supported: remove pooler.* to get the mean"
        )
    return hf.config_fields(evidence, hf.read_config_json(evidence, NAME, TYPES, hf_vit.DEFAULTS))


def json_files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the JSON files that transformers needs to open a folder."""
    architecture = "DeiTForImageClassificationWithTeacher" if config.num_classes else "DeiTModel"
    qkv_bias = config.attention.qkv_bias == "qkv"
    return hf.folder_files(config, "bicubic", hf.config_json(config, "deit", architecture, qkv_bias=qkv_bias))


FORMAT = Format(
    name=NAME,
    description="distilled DeiT of Hugging Face transformers",
    separator=".",
    tables=hf.tables("deit.", LAYOUTS, CLASSIFIERS),
    default_variant=hf.default_variant,
    spellings=hf.V4_SPELLINGS,
    variant_spellings=hf.VARIANT_SPELLINGS,
    ignored_keys={
        **hf.MASK_TOKEN_KEY,
        SINGLE_CLASSIFIER: "the classifier of the class token alone",
        r"(deit\.)?pooler\.dense\.(weight|bias)": "the pooler of the class token alone",
        r"decoder\.0\.(weight|bias)": "the decoder of masked pre-training",
    },
    constraints={**hf_vit.CONSTRAINTS, "tokens.distillation": True, "positions.covers": "all"},
    assumed={**hf_vit.ASSUMED, "pixels.mean": IMAGENET.mean, "pixels.std": IMAGENET.std},
    read_config=read_config,
    assumed_behaviour=hf_classes.assumed_behaviour,
    library=LibraryFiles(contents=json_files, model_types=TYPES),
    recognises=lambda evidence: hf_classes.model_type(evidence) in TYPES,
)
