"""The Dinov2 that transformers v4 had in Flax.

It multiplies each layer scale by layerscale_value, and that twice, which changes nothing where it is 1, as in all that was
published.  For images of another size it resamples positions by a cubic that no twin has (jax.image's, a = -0.5); what is
assumed is what PyTorch's Dinov2 does.

Source: huggingface/transformers 4.57, models/dinov2/modeling_flax_dinov2.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parity.checkpoints.formats import hf_dinov2
from parity.checkpoints.formats.format import Evidence, Fields
from parity.checkpoints.formats.hf_flax import SQUARE, UNGATED, flax
from vit_spec import InputError, ViTConfig

NAME = "hf-flax-dinov2"
TABLES = {"classifier": "v4", "bare": "v4-bare", "classifier-gated": "v4-gated", "bare-gated": "v4-gated-bare"}


def usual(config: ViTConfig) -> str:
    """Return the table of the class that has these outputs, and of its MLP."""
    return ("classifier" if config.num_classes else "bare") + ("-gated" if config.mlp.activation == "swiglu" else "")


def settings(evidence: Evidence) -> Fields:
    """Return what config.json and preprocessor_config.json say.

    Raises:
        InputError: the config.json of another model, or one that has layer scales multiplied.
    """
    fields = hf_dinov2.settings(NAME, hf_dinov2.TYPES)(evidence)
    if (scale := fields.get("norms.layer_scale", 1.0)) != 1.0:
        raise InputError(
            f"its config.json says layerscale_value {scale}, by which FlaxDinov2 multiplies every layer scale twice: "
            f"multiply layer_scale1 and layer_scale2 by {scale} ** 2, and write 1.0 there"
        )
    return fields


def files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the files with which transformers opens a folder."""
    found = hf_dinov2.files(config)
    return {**found, "config.json": {**found["config.json"], "layerscale_value": 1.0, "use_mask_token": False}}


FORMAT = replace(
    hf_dinov2.FORMAT,
    name=NAME,
    what="Dinov2 of Hugging Face transformers 4 in Flax",
    separator="/",
    tables={name: flax(hf_dinov2.FORMAT.tables[theirs]) for name, theirs in TABLES.items()},
    usual=usual,
    respelled={},
    ignored={r"(dinov2/)?embeddings/mask_token": "stands for masked patches in pre-training alone"},
    constants={},
    always={**hf_dinov2.FORMAT.always, **SQUARE, "mlp.activation": (*UNGATED, "swiglu")},
    settings=settings,
    says=hf_dinov2.FORMAT.says - {"norms.layer_scale"},
    files=files,
)
