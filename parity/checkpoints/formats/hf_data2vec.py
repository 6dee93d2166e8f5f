"""Hugging Face's Data2VecVision: the layers of Beit under the names of transformers 4, which transformers 5 keeps.

Data2VecVisionModel has no pooler unless it is made with `add_pooling_layer=True`.  So a pooled mean without a classifier is
written as a Data2VecVisionForImageClassification without classes.

Source: huggingface/transformers src/transformers/models/data2vec/modeling_data2vec_vision.py,
configuration_data2vec_vision.py (defaults).
"""

from collections.abc import Mapping
from typing import Any

from parity.checkpoints.formats import hf_beit as beit
from parity.checkpoints.formats import hf_classes
from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.library_files import LibraryFiles
from vit_spec import ViTConfig

NAME, TYPES = "hf-data2vec", ("data2vec-vision",)


def has_pooler(config: ViTConfig) -> bool:
    """Return whether the class of a config is Data2VecVisionForImageClassification."""
    return bool(config.num_classes) or config.norms.after_pool


def json_files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the JSON files that transformers needs to open a folder."""
    architecture = "Data2VecVisionForImageClassification" if has_pooler(config) else "Data2VecVisionModel"
    return hf.folder_files(config, "bicubic", beit.config_json(config, *TYPES, architecture))


FORMAT = Format(
    name=NAME,
    description="Data2VecVision of Hugging Face transformers",
    separator=".",
    tables=hf.tables("data2vec_vision.", {"v4": beit.LAYOUTS["v4"]}, hf.CLASSIFIER),
    default_variant=lambda config: "v4" if has_pooler(config) else "v4-bare",
    spellings=hf.V4_SPELLINGS,
    ignored_keys=beit.IGNORED_KEYS,
    ignored_values=beit.IGNORED_VALUES,
    constraints=beit.CONSTRAINTS,
    unsupported=beit.unsupported,
    assumed=beit.ASSUMED,
    read_config=beit.config_reader(NAME, TYPES),
    assumed_behaviour=hf_classes.assumed_behaviour,
    library=LibraryFiles(contents=json_files, model_types=TYPES),
    recognises=lambda evidence: hf_classes.model_type(evidence) in TYPES,
)
