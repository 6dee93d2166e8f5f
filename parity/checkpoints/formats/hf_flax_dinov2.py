"""The Flax Dinov2 of transformers v4.

It multiplies each layer scale by layerscale_value, twice.  In all published models the value is 1, which changes nothing.
For images of another size it resamples positions with jax.image's cubic kernel (a = -0.5), which the twins do not have.
The kernel of PyTorch's Dinov2 is assumed instead.

Source: huggingface/transformers 4.57, models/dinov2/modeling_flax_dinov2.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parity.checkpoints.formats import hf_dinov2
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.hf_flax import FLAX_ACTIVATIONS, SQUARE, flax_table
from vit_spec import InputError, ViTConfig

NAME = "hf-flax-dinov2"
TABLES = {"classifier": "v4", "bare": "v4-bare", "classifier-gated": "v4-gated", "bare-gated": "v4-gated-bare"}


def default_variant(config: ViTConfig) -> str:
    """Return the variant for a model with or without a classifier, and with the config's kind of MLP."""
    return ("classifier" if config.num_classes else "bare") + ("-gated" if config.mlp.is_gated else "")


def read_config(evidence: Evidence) -> Fields:
    """Return the fields that config.json and preprocessor_config.json state.

    Raises:
        InputError: the config.json of another model, or a layerscale_value other than 1.
    """
    fields = hf_dinov2.config_reader(NAME, hf_dinov2.TYPES)(evidence)
    if (scale := fields.get("norms.layer_scale", 1.0)) != 1.0:
        raise InputError(
            f"its config.json says layerscale_value {scale}, by which FlaxDinov2 multiplies every layer scale twice: "
            f"multiply layer_scale1 and layer_scale2 by {scale} ** 2, and write 1.0 there"
        )
    return fields


def json_files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the JSON files that transformers needs to open a folder."""
    found = hf_dinov2.json_files(config)
    return {**found, "config.json": {**found["config.json"], "layerscale_value": 1.0, "use_mask_token": False}}


FORMAT = replace(
    hf_dinov2.FORMAT,
    name=NAME,
    description="Dinov2 of Hugging Face transformers 4 in Flax",
    separator="/",
    tables={name: flax_table(hf_dinov2.FORMAT.tables[theirs]) for name, theirs in TABLES.items()},
    default_variant=default_variant,
    variant_spellings={},
    ignored_keys={r"(dinov2/)?embeddings/mask_token": "replaces masked patches in pre-training only"},
    constants={},
    constraints={**hf_dinov2.FORMAT.constraints, **SQUARE, "mlp.activation": (*FLAX_ACTIVATIONS, "swiglu")},
    read_config=read_config,
    library=replace(hf_dinov2.FORMAT.library, contents=json_files),
)
