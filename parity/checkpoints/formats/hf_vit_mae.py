"""The encoder of Hugging Face's ViTMAE.

In pre-training, its positions are a fixed table.  Files contain the table, and it is read as a parameter.  transformers
masks three of four patches unless config.json says otherwise; the config.json that is written here has mask_ratio 0.

Source: huggingface/transformers src/transformers/models/vit_mae/modeling_vit_mae.py, configuration_vit_mae.py.
"""

from collections.abc import Mapping
from typing import Any

from parity.checkpoints.formats import hf_classes, hf_vit
from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.library_files import LibraryFiles
from vit_spec import ViTConfig
from vit_spec.models import IMAGENET

NAME, TYPES = "hf-vit-mae", ("vit_mae",)
DEFAULT_MASK_RATIO = 0.75


def read_config(evidence: Evidence) -> Fields:
    """Return the fields that config.json and preprocessor_config.json state.

    Raises:
        InputError: the config.json of another model, or an unknown field or value.
    """
    return hf.config_fields(evidence, hf.read_config_json(evidence, NAME, TYPES, hf_vit.DEFAULTS))


def assumed_behaviour(evidence: Evidence) -> Mapping[str, str]:
    """Return the assumptions about what no tensor shows, and that no patch is masked unless config.json says the same."""
    masks = evidence.notes.get("config.json", {}).get("mask_ratio", DEFAULT_MASK_RATIO) != 0
    return {**hf_classes.assumed_behaviour(evidence), **({"masked patches": "none"} if masks else {})}


def json_files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the JSON files that transformers needs to open a folder."""
    more = {"qkv_bias": config.attention.qkv_bias == "qkv", "mask_ratio": 0.0}
    return hf.folder_files(config, "bicubic", hf.config_json(config, "vit_mae", "ViTMAEModel", **more))


DECODER = r"decoder\.(mask_token|decoder_(pos_embed|(embed|norm|pred)\.(weight|bias)|(layers|encoder\.layer)\.\d+\..*))"

FORMAT = Format(
    name=NAME,
    description="encoder of ViTMAE of Hugging Face transformers",
    separator=".",
    tables=hf.tables("vit.", hf_vit.LAYOUTS, ""),
    default_variant=hf.default_variant,
    spellings=hf.V4_SPELLINGS,
    variant_spellings=hf.VARIANT_SPELLINGS,
    ignored_keys={DECODER: "the decoder of pre-training"},
    constraints=hf_vit.CONSTRAINTS,
    assumed={**hf_vit.ASSUMED, "pixels.mean": IMAGENET.mean, "pixels.std": IMAGENET.std},
    read_config=read_config,
    assumed_behaviour=assumed_behaviour,
    library=LibraryFiles(contents=json_files, model_types=TYPES),
    recognises=lambda evidence: hf_classes.model_type(evidence) in TYPES,
)
