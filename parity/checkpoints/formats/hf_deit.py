"""Hugging Face's DeiT, which always has the distillation token; its outputs are the mean of two classifiers.

DeiTForImageClassification reads the class token alone beside a distillation token: no config says that.
DeiT without distillation is published as ViT.

Source: huggingface/transformers src/transformers/models/deit/modeling_deit.py, configuration_deit.py (defaults).
"""

from collections.abc import Mapping
from typing import Any

from parity.checkpoints.formats import hf_vit
from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.format import Evidence, Fields, Format
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
SINGLE = r"classifier\.(weight|bias)"


def settings(evidence: Evidence) -> Fields:
    """Return what config.json and preprocessor_config.json say.

    Raises:
        InputError: a classifier of the class token alone, the config.json of another model, or one that says what is
            not known here.
    """
    if "classifier.weight" in evidence.ignored:
        raise InputError(
            "it is a DeiTForImageClassification, which has a distillation token and classifies by the class token alone; "
            "known here is DeiTForImageClassificationWithTeacher: give that, or take classifier.* out"
        )
    if any("pooler" in key for key in evidence.ignored) and "head.weight" not in evidence.axes:
        raise InputError(
            "it is a DeiTModel with a pooler, which reads the class token alone; known here are both tokens' outputs: take "
            "pooler.* out to have those"
        )
    return hf.settings(evidence, hf.described(evidence, NAME, TYPES, hf_vit.DEFAULTS))


def files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the files with which transformers opens a folder."""
    architecture = "DeiTForImageClassificationWithTeacher" if config.num_classes else "DeiTModel"
    qkv_bias = config.attention.qkv_bias == "qkv"
    return hf.folder(config, "bicubic", hf.config_json(config, "deit", architecture, qkv_bias=qkv_bias))


FORMAT = Format(
    name=NAME,
    what="distilled DeiT of Hugging Face transformers",
    separator=".",
    tables=hf.tables("deit.", LAYOUTS, CLASSIFIERS),
    usual=hf.usual,
    spellings=hf.V4,
    respelled=hf.RESPELLED,
    ignored={
        **hf.MASK_TOKEN,
        SINGLE: "the classifier of the class token alone",
        r"(deit\.)?pooler\.dense\.(weight|bias)": "the pooler, of the class token alone",
        r"decoder\.0\.(weight|bias)": "the decoder of masked pre-training",
    },
    always={**hf_vit.ALWAYS, "tokens.distillation": True, "positions.covers": "all"},
    assumed={**hf_vit.ASSUMED, "pixels.mean": IMAGENET.mean, "pixels.std": IMAGENET.std},
    settings=settings,
    untold=hf.unread,
    says=hf.SAYS,
    files=files,
    recognises=lambda evidence: hf.model_type(evidence) in TYPES,
    model_types=TYPES,
)
