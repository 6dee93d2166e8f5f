"""MAE's encoder: as published, in a pre-training checkpoint with its decoder, or fine-tuned with a classifier.

An encoder alone has timm's keys.  It is read as timm's unless the checkpoint contains the arguments of MAE's scripts, or
this format is given.  Fine-tuned models may take the mean of the patches, and then have a norm after it, `fc_norm`.
Positions are a fixed table of sinusoids in pre-training.  Files contain the table, and fine-tuning trains it, so it is read
as a parameter.  The decoder is never written.

Source: facebookresearch/mae efb2a80, models_mae.py, models_vit.py, main_pretrain.py and main_finetune.py.
"""

from parity.checkpoints.formats.dino import BACKBONE
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.facebook import ASSUMED, BICUBIC, CONSTRAINTS, has_script_argument
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.tables import unsupported_head_width
from parity.checkpoints.formats.torch import assumed_behaviour
from vit_spec import ViTConfig

_CLASSIFIER = """
    fc_norm.weight | fc_norm.weight | pooled
    fc_norm.bias   | fc_norm.bias   | pooled
    head.weight    | head.weight    | label feature
    head.bias      | head.bias      | label
"""


# Only the keys of MAE's own decoder: other models have other decoders.
DECODER = r"decoder_(pos_embed|(embed|norm|pred)\.(weight|bias)|blocks\.\d+\..*)"


def read_config(evidence: Evidence) -> Fields:
    """Return head.pool, if the checkpoint contains the arguments of a script that chooses it."""
    said = evidence.notes.get("args/global_pool")
    return {"head.pool": "mean" if said else "token"} if isinstance(said, bool) else {}


def unsupported(config: ViTConfig, variant: str) -> str:
    """Return the values in a config that MAE's classes cannot express; "" if there are none."""
    norms, mean = config.norms, config.head.pool == "mean"
    if (norms.after_blocks, norms.after_pool) != (not mean, mean):
        return (
            f"head.pool={config.head.pool!r} with norms.after_blocks={norms.after_blocks} and "
            f"norms.after_pool={norms.after_pool}"
        )
    return unsupported_head_width(config)


def recognises(evidence: Evidence) -> bool:
    """Return whether the file also has MAE's decoder, or the arguments of its scripts."""
    decoder = any(key.startswith("decoder") for key in evidence.ignored_arrays)
    finetuned = {"args/global_pool", "args/finetune", "args/layer_decay"} <= evidence.notes.keys()
    return decoder or finetuned or has_script_argument(evidence, "mask_ratio", "norm_pix_loss")


FORMAT = Format(
    name="mae",
    description="MAE's encoder, also beside its decoder or fine-tuned",
    separator=".",
    tables={"": BACKBONE + _CLASSIFIER},
    ignored_keys={r"mask_token": "replaces masked patches in the decoder", DECODER: "MAE's decoder"},
    constraints={
        **CONSTRAINTS,
        "positions.covers": "all",
        "norms.layer_scale": None,
        "head.pool": ("token", "mean"),
        "head.bias": True,
    },
    unsupported=unsupported,
    assumed={**ASSUMED, **BICUBIC},
    read_config=read_config,
    recognises=recognises,
    assumed_behaviour=assumed_behaviour,
)
