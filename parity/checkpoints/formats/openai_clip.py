"""CLIP's image tower: in the file of the whole model (variant "clip"), or alone ("tower").

The projection to the shared embedding is read as the classifier: a matrix that multiplies from the right, without a bias.
OpenCLIP has the same names, also for images that are not square.  OpenCLIP's own models use exact GELU, and OpenAI's use
x * sigmoid(1.702 x).  A file shows its activation only if it has the additional entries of OpenAI's archives, or if
open_clip_config.json lies beside it.  OpenCLIP's models may also take the mean of the patches, or return all tokens, and
may have no norm before the blocks.  The text tower is neither read nor written.

Sources: openai/CLIP d05afc4, clip/model.py; mlfoundations/open_clip, src/open_clip/transformer.py.
"""

import re
from collections.abc import Mapping

from parity.checkpoints.formats import open_clip_config
from parity.checkpoints.formats.behaviour import behaviour_of_module, common_behaviour
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.library_files import LibraryFiles
from parity.checkpoints.formats.tables import PLAIN_VIT_CONSTRAINTS, unsupported_head_width
from vit_spec import InputError
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
_WHOLE_MODEL = "\n".join(
    " | ".join([name, f"visual.{key}", axes])
    for name, key, axes in ([part.strip() for part in line.split("|")] for line in TOWER.splitlines() if line.strip())
)
_TEXT_TOWER = r"transformer\..*|token_embedding\..*|positional_embedding|ln_final\..*|text_projection|text\..*|logit_scale"
_TOKEN_EMBEDDING = r"(token|word)_embedding|embed_tokens|shared|wte"  # every text tower has one of these
_OPENAI_ENTRIES = {"input_resolution", "context_length", "vocab_size"}  # clip/model.py, build_model


def read_config(evidence: Evidence) -> Fields:
    """Return the fields that open_clip_config.json states, or the activation if the file is OpenAI's own.

    Raises:
        InputError: as `open_clip_config.config_fields`, or open_clip_config.json contradicts a file of OpenAI.
    """
    own: Fields = {"mlp.activation": "quick_gelu"} if _OPENAI_ENTRIES & evidence.ignored_arrays.keys() else {}
    stated = open_clip_config.config_fields(evidence.notes)
    if own and stated.get("mlp.activation", "quick_gelu") != "quick_gelu":
        raise InputError(
            f"its {open_clip_config.FILE} says mlp.activation={stated['mlp.activation']!r}, but the weights are a file of "
            f"OpenAI, whose models have 'quick_gelu': correct {open_clip_config.FILE}, or move the weights away from it"
        )
    return stated or own


def assumed_behaviour(evidence: Evidence) -> Mapping[str, str]:
    """Return the assumptions about what no tensor shows.

    They are those of `common_behaviour`, unless the file is OpenAI's own or open_clip_config.json lies beside it.  A whole
    CLIP has a text tower.  If there is none, "visual" is an image tower in another module, and arrays with names of the
    text tower are layers of that module.
    """
    found = {} if read_config(evidence) else common_behaviour(evidence)
    text = {key for key in evidence.ignored_arrays if re.match(_TEXT_TOWER, key)}
    if evidence.variant == "tower" or any(re.search(_TOKEN_EMBEDDING, key) for key in text):
        return found
    layers = sorted({key.partition(".")[0] for key in text})
    return {**behaviour_of_module(evidence, "visual"), **dict.fromkeys(layers, "without effect on the output of the model")}


FORMAT = Format(
    name="openai-clip",
    description="image tower of CLIP as stored by OpenAI and OpenCLIP",
    separator=".",
    tables={"clip": _WHOLE_MODEL, "tower": TOWER},
    ignored_keys={
        _TEXT_TOWER: "the text tower",
        r"attn_mask": "the attention mask of the text tower",
        r"logit_scale|logit_bias": "scale or bias for the comparison of images with texts",
        r"input_resolution|context_length|vocab_size": "a size, stored as an array",
    },
    strict_variants=("tower",),  # the image tower has keys that the text tower has too, so none can be ignored
    constraints={
        **PLAIN_VIT_CONSTRAINTS,
        "positions.rotary": "none",  # an assumption: Perception Encoders have these keys, and no key for rotary positions
        "tokens.patch_bias": False,
        "positions.covers": "all",
        "norms.before_blocks": (True, False),
        "norms.after_blocks": True,
        "norms.after_pool": False,
        "head.pool": ("token", "mean", "none"),
        "head.hidden": None,
        "head.bias": False,
    },
    unsupported=lambda config, variant: unsupported_head_width(config),
    assumed={
        "head.pool": "token",
        "norms.eps": 1e-5,
        "mlp.activation": "quick_gelu",
        "pixels.mean": CLIP.mean,
        "pixels.std": CLIP.std,
    },
    read_config=read_config,
    assumed_behaviour=assumed_behaviour,
    library=LibraryFiles(config_file=open_clip_config.FILE),
)
