"""Hugging Face's ViTMAE, the encoder.

Its positions are a fixed table while it pre-trains; files hold them as a parameter, and as one they are read.
The library masks three patches of four unless its config says otherwise; what is written here says that none is.

Source: huggingface/transformers src/transformers/models/vit_mae/modeling_vit_mae.py, configuration_vit_mae.py.
"""

from collections.abc import Mapping
from typing import Any

from parity.checkpoints.formats import hf_vit
from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.format import Evidence, Fields, Format
from vit_spec import ViTConfig
from vit_spec.models import IMAGENET

NAME, TYPES = "hf-vit-mae", ("vit_mae",)


def settings(evidence: Evidence) -> Fields:
    """Return what config.json and preprocessor_config.json say.

    Raises:
        InputError: the config.json of another model, or one that says what is not known here.
    """
    return hf.settings(evidence, hf.described(evidence, NAME, TYPES, hf_vit.DEFAULTS))


def files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the files with which transformers opens a folder."""
    more = {"qkv_bias": config.attention.qkv_bias == "qkv", "mask_ratio": 0.0}
    return hf.folder(config, "bicubic", hf.config_json(config, "vit_mae", "ViTMAEModel", **more))


DECODER = r"decoder\.(mask_token|decoder_(pos_embed|(embed|norm|pred)\.(weight|bias)|(layers|encoder\.layer)\.\d+\..*))"

FORMAT = Format(
    name=NAME,
    what="encoder of ViTMAE of Hugging Face transformers",
    separator=".",
    tables=hf.tables("vit.", hf_vit.LAYOUTS, ""),
    usual=hf.usual,
    spellings=hf.V4,
    respelled=hf.RESPELLED,
    ignored={DECODER: "the decoder of pre-training"},
    always=hf_vit.ALWAYS,
    assumed={**hf_vit.ASSUMED, "pixels.mean": IMAGENET.mean, "pixels.std": IMAGENET.std},
    settings=settings,
    says=hf.SAYS,
    files=files,
    recognises=lambda evidence: hf.model_type(evidence) in TYPES,
    model_types=TYPES,
)
