"""CLIP's image tower, in the file of the whole model (table "clip") or alone ("tower").

The shared embedding is its classifier: a matrix that multiplies from the right, without a bias.  OpenCLIP keeps the same
names, for images that are not square too; its own models take the exact GELU, OpenAI's x * sigmoid(1.702 x), which files
tell only where they hold what OpenAI's archives do, or where open_clip_config.json lies beside them.  The text tower is
neither read nor written.

Sources: openai/CLIP d05afc4, clip/model.py; mlfoundations/open_clip, src/open_clip/transformer.py.
"""

from collections.abc import Mapping

from parity.checkpoints.formats import open_clip_config
from parity.checkpoints.formats.format import Evidence, Fields, Format
from parity.checkpoints.formats.tables import CLASSIC, uneven_heads
from parity.checkpoints.formats.untold import in_words
from vit_spec.models import CLIP

TOWER = """
    cls_token               | class_embedding      | width
    pos_embed               | positional_embedding | token width
    patch_embed.proj.weight | conv1.weight         | width rgb ph pw
    norm_pre.weight         | ln_pre.weight        | width
    norm_pre.bias           | ln_pre.bias          | width

    blocks.norm1.weight     | transformer.resblocks.{block}.ln_1.weight          | width
    blocks.norm1.bias       | transformer.resblocks.{block}.ln_1.bias            | width
    blocks.attn.qkv.weight  | transformer.resblocks.{block}.attn.in_proj_weight  | (qkv head dim) width
    blocks.attn.qkv.bias    | transformer.resblocks.{block}.attn.in_proj_bias    | (qkv head dim)
    blocks.attn.proj.weight | transformer.resblocks.{block}.attn.out_proj.weight | width (head dim)
    blocks.attn.proj.bias   | transformer.resblocks.{block}.attn.out_proj.bias   | width
    blocks.ls1.gamma        | transformer.resblocks.{block}.ls_1.gamma           | width
    blocks.norm2.weight     | transformer.resblocks.{block}.ln_2.weight          | width
    blocks.norm2.bias       | transformer.resblocks.{block}.ln_2.bias            | width
    blocks.mlp.fc1.weight   | transformer.resblocks.{block}.mlp.c_fc.weight      | ff width
    blocks.mlp.fc1.bias     | transformer.resblocks.{block}.mlp.c_fc.bias        | ff
    blocks.mlp.fc2.weight   | transformer.resblocks.{block}.mlp.c_proj.weight    | width ff
    blocks.mlp.fc2.bias     | transformer.resblocks.{block}.mlp.c_proj.bias      | width
    blocks.ls2.gamma        | transformer.resblocks.{block}.ls_2.gamma           | width

    norm.weight | ln_post.weight | width
    norm.bias   | ln_post.bias   | width
    head.weight | proj           | feature label
"""
_WHOLE = "\n".join(
    " | ".join([name, f"visual.{key}", axes])
    for name, key, axes in ([part.strip() for part in line.split("|")] for line in TOWER.splitlines() if line.strip())
)
_OPENAI = {"input_resolution", "context_length", "vocab_size"}  # clip/model.py, build_model


def settings(evidence: Evidence) -> Fields:
    """Return what open_clip_config.json says, or the activation where the file is OpenAI's own.

    Raises:
        InputError: as `open_clip_config.fields`.
    """
    own: Fields = {"mlp.activation": "quick_gelu"} if _OPENAI & evidence.ignored.keys() else {}
    return open_clip_config.fields(evidence.notes) or own


def untold(evidence: Evidence) -> Mapping[str, str]:
    """Return what no tensor shows, unless the file is OpenAI's own or open_clip_config.json lies beside it."""
    return {} if settings(evidence) else in_words(evidence)


FORMAT = Format(
    name="openai-clip",
    what="the image tower of CLIP as OpenAI and OpenCLIP keep it",
    separator=".",
    tables={"clip": _WHOLE, "tower": TOWER},
    ignored={
        r"transformer\..*|token_embedding\..*|positional_embedding|ln_final\..*|text_projection|text\..*": "the text tower",
        r"attn_mask": "what the text tower does not look at",
        r"logit_scale|logit_bias": "how images and texts are compared",
        r"input_resolution|context_length|vocab_size": "a size",
    },
    alone=("tower",),  # whose blocks have the text tower's keys: what else is there is the image tower's
    always={
        **CLASSIC,
        "positions.rotary": ("none",),  # Perception Encoders have these keys too, and no key for their rotation
        "tokens.patch_bias": False,
        "positions.covers": "all",
        "norms.before_blocks": True,
        "norms.after_blocks": True,
        "norms.after_pool": False,
        "head.pool": ("token",),
        "head.hidden": None,
        "head.bias": False,
    },
    objection=lambda config, table: uneven_heads(config),
    assumed={
        "norms.eps": 1e-5,
        "mlp.activation": "quick_gelu",
        "pixels.mean": CLIP.mean,
        "pixels.std": CLIP.std,
    },
    settings=settings,
    untold=untold,
    described_in=open_clip_config.FILE,
)
