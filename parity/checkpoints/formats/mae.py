"""MAE's encoder, as published, in a checkpoint of pre-training beside its decoder, or fine-tuned with a classifier.

An encoder alone has timm's keys, and is read as timm's unless the arguments of its script lie beside it or this format
is asked for.  Fine-tuned files take the mean of the patches and have their norm after it, `fc_norm`.  Positions are a
table of sines in pre-training; files hold its numbers, and fine-tuning trains them.  The decoder is never written.

Source: facebookresearch/mae efb2a80, models_mae.py, models_vit.py, main_pretrain.py and main_finetune.py.
"""

from parity.checkpoints.formats.dino import BACKBONE
from parity.checkpoints.formats.facebook import ALWAYS, ASSUMED, PLAIN, argued
from parity.checkpoints.formats.format import Evidence, Fields, Format
from parity.checkpoints.formats.tables import uneven_heads
from parity.checkpoints.formats.torch import untold
from vit_spec import ViTConfig

_CLASSIFIER = """
    fc_norm.weight | fc_norm.weight | pooled
    fc_norm.bias   | fc_norm.bias   | pooled
    head.weight    | head.weight    | label feature
    head.bias      | head.bias      | label
"""


DECODER = r"decoder_(pos_embed|(embed|norm|pred)\.(weight|bias)|blocks\.\d+\..*)"  # others have decoders of their own


def settings(evidence: Evidence) -> Fields:
    """Return how tokens are pooled, where the arguments of the script lie beside the weights."""
    said = evidence.notes.get("args/global_pool")
    return {"head.pool": "mean" if said else "token"} if isinstance(said, bool) else {}


def objection(config: ViTConfig, table: str) -> str:
    """Say what of a config MAE's classes cannot be."""
    norms, mean = config.norms, config.head.pool == "mean"
    if (norms.after_blocks, norms.after_pool) != (not mean, mean):
        return f"head.pool={config.head.pool!r} with norms.after_blocks={norms.after_blocks}, only the one or the other"
    return uneven_heads(config)


def recognises(evidence: Evidence) -> bool:
    """Whether the decoder lies beside the encoder, or the arguments of its scripts."""
    decoder = any(key.startswith("decoder") for key in evidence.ignored)
    finetuned = {"args/global_pool", "args/finetune", "args/layer_decay"} <= evidence.notes.keys()
    return decoder or finetuned or argued(evidence, "mask_ratio", "norm_pix_loss")


FORMAT = Format(
    name="mae",
    what="MAE's encoder, also beside its decoder or fine-tuned",
    separator=".",
    tables={"": BACKBONE + _CLASSIFIER},
    ignored={r"mask_token": "what the decoder reads in place of a hidden patch", DECODER: "MAE's decoder"},
    always={
        **ALWAYS,
        "positions.covers": "all",
        "norms.layer_scale": None,
        "head.pool": ("token", "mean"),
        "head.bias": True,
    },
    objection=objection,
    assumed={**ASSUMED, **PLAIN},
    settings=settings,
    recognises=recognises,
    untold=untold,
)
