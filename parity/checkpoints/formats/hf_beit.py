"""Hugging Face's Beit: biases of queries and values, layer scale, and relative positions in a table.

There is one table for all blocks, or one in each block; transformers can have both kinds at once, `ViTConfig` cannot.  The
rows of a table are in the order of `vit_spec.positions.relative_index`.  transformers resizes tables as if the sides of
their grid were exchanged, and absolute positions as if the grid were square, so only square images are supported.

With `use_mean_pooling`, the mean of the patches has a norm, and the tokens have none.  Without it, the last norm is that of
all tokens, and the class token is pooled.  A BeitModel that was made with `add_pooling_layer=False` lacks the norm of the
mean: its output is that of the last block.

BeitForMaskedImageModeling and BeitForSemanticSegmentation return a result for each patch, and BeitBackbone feature maps
without a norm.  They are refused.

Sources: huggingface/transformers src/transformers/models/beit/modeling_beit.py, configuration_beit.py (defaults) and
src/transformers/conversion_mapping.py; 4.11 for the index of relative positions, which later releases do not store.
"""

from collections.abc import Callable, Mapping
from typing import Any

from parity.checkpoints.formats import hf_classes
from parity.checkpoints.formats import hugging_face as hf
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.library_files import LibraryFiles
from parity.checkpoints.formats.stored_constants import image_size_of_index, is_relative_index
from parity.checkpoints.formats.tables import replace_keys
from vit_spec import InputError, ViTConfig
from vit_spec.parts import UNGATED_ACTIVATIONS

DEFAULTS = {
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
    "use_absolute_position_embeddings": False,
    "use_relative_position_bias": False,
    "use_shared_relative_position_bias": False,
    "layer_scale_init_value": 0.1,
    "use_mean_pooling": True,
}
_FIELDS_OF_REFUSED_CLASSES = {  # those for segmentation and for feature maps
    "add_fpn": False,
    "auxiliary_channels": 256,
    "auxiliary_concat_input": False,
    "auxiliary_loss_weight": 0.4,
    "auxiliary_num_convs": 1,
    "pool_scales": [1, 2, 3, 6],
    "segmentation_indices": None,
    "semantic_loss_ignore_index": 255,
    "use_auxiliary_head": True,
}
BODY = """
    fc_norm.weight   | @pooler.layernorm.weight | pooled
    fc_norm.bias     | @pooler.layernorm.bias   | pooled
    blocks.ls1.gamma | {layer}.lambda_1         | width
    blocks.ls2.gamma | {layer}.lambda_2         | width
"""
_TABLE = "relative_position_bias.relative_position_bias_table"
POSITIONS_V4 = f"""
    blocks.attn.q_bias        | {{layer}}.attention.attention.query.bias | (head dim)
    blocks.attn.v_bias        | {{layer}}.attention.attention.value.bias | (head dim)
    rel_pos.table             | @encoder.{_TABLE}                        | offset head
    blocks.attn.rel_pos.table | {{layer}}.attention.attention.{_TABLE}   | offset head
"""
POSITIONS_V5 = f"""
    blocks.attn.q_bias        | {{layer}}.attention.q_proj.bias                    | (head dim)
    blocks.attn.v_bias        | {{layer}}.attention.v_proj.bias                    | (head dim)
    rel_pos.table             | @shared_position_bias.relative_position_bias_table | offset head
    blocks.attn.rel_pos.table | {{layer}}.{_TABLE}                                 | offset head
"""
_WITHOUT_KEY_BIAS = ("blocks.attn.qkv.bias",)
TEXT_V4 = "\n".join(
    (hf.EMBEDDINGS, BODY, hf.NORMS, replace_keys(hf.ATTENTION_V4, {}, _WITHOUT_KEY_BIAS), POSITIONS_V4, hf.MLP_V4)
)
TEXT_V5 = "\n".join(
    (hf.EMBEDDINGS, BODY, hf.NORMS, replace_keys(hf.ATTENTION_V5, {}, _WITHOUT_KEY_BIAS), POSITIONS_V5, hf.MLP)
)
LAYOUTS = {"v4": (TEXT_V4, "encoder.layer"), "v5": (TEXT_V5, "layers")}
_INDEX = r"(\w+\.)?encoder\.(layer\.\d+\.attention\.attention\.)?relative_position_bias\.relative_position_index"
IGNORED_KEYS = {
    **hf.MASK_TOKEN_KEY,
    _INDEX: "numbers that follow from the grid of patches, which transformers computes",
}
IGNORED_VALUES = {_INDEX: is_relative_index}
CONSTRAINTS: Fields = {
    **hf.COMMON_CONSTRAINTS,
    "image_size": hf.square_only("image_size"),
    "patch_size": hf.square_only("patch_size"),
    "tokens.class_token": True,
    "tokens.patch_bias": True,
    "positions.kind": ("learned", "none"),
    "positions.covers": ("all", "class"),
    "positions.relative": ("none", "table"),
    "attention.qkv_bias": "qv",
    "attention.proj_bias": True,
    "mlp.activation": UNGATED_ACTIVATIONS,
    "norms.after_blocks": (True, False),
    "norms.after_pool": (True, False),
    "head.pool": ("token", "mean"),
    "head.hidden": None,
    "head.bias": True,
}
ASSUMED: Fields = {
    **hf.BICUBIC,
    "norms.eps": 1e-12,
    "norms.layer_scale": 0.1,
    "mlp.activation": "gelu",
    "pixels.mean": (0.5,),
    "pixels.std": (0.5,),
}


def unsupported(config: ViTConfig, variant: str) -> str:
    """Return norms that no value of `use_mean_pooling` gives, or an initial layer scale that means none; else ""."""
    norms, pool = (config.norms.after_blocks, config.norms.after_pool), config.head.pool
    usual = norms == {"token": (True, False), "mean": (False, True)}[pool]
    if not usual and (norms != (False, False) or pool == "mean" or config.num_classes):
        return f"head.pool={pool!r} with norms.after_blocks={norms[0]} and norms.after_pool={norms[1]}"
    if config.norms.layer_scale is not None and config.norms.layer_scale <= 0:
        return f"norms.layer_scale={config.norms.layer_scale}, only positive numbers"
    return ""


def config_reader(name: str, types: tuple[str, ...]) -> Callable[[Evidence], Fields]:
    """Return the function `Format.read_config` of a format.

    Args:
        name: the name of the format.
        types: the values of `model_type` that the format reads.
    """

    def read(evidence: Evidence) -> Fields:
        content = hf.read_config_json(evidence, name, types, {**DEFAULTS, **_FIELDS_OF_REFUSED_CLASSES})
        fields = {**image_size_of_index(evidence), **hf.config_fields(evidence, content)}
        if not content:
            return fields
        for size in ("image_size", "patch_size"):
            if len(set(fields[size])) > 1:
                raise InputError(
                    f"its config.json says {size} {content[size]!r}: only squares are supported, because transformers "
                    "computes the positions of others as if they were square"
                )
        relative, shared = (bool(content[f"use_{kind}relative_position_bias"]) for kind in ("", "shared_"))
        if relative and shared:
            raise InputError(
                "its config.json says use_relative_position_bias and use_shared_relative_position_bias: both together are "
                "not supported"
            )
        fields["positions.kind"] = "learned" if content["use_absolute_position_embeddings"] else "none"
        fields["positions.relative"] = "table" if relative or shared else "none"
        fields["positions.relative_shared"] = shared
        scale = content["layer_scale_init_value"]
        fields["norms.layer_scale"] = scale if scale > 0 else None
        classifies = hf_classes.CLASSES.get(hf_classes.stated_class(evidence)) == hf_classes.CLASSIFIED
        has_pooler = classifies or "head.weight" in evidence.axes or "fc_norm.weight" in evidence.axes
        takes_mean = bool(content["use_mean_pooling"])
        fields["norms.after_blocks"], fields["norms.after_pool"] = not takes_mean, takes_mean and has_pooler
        fields["head.pool"] = "mean" if takes_mean and has_pooler else "token"
        return fields

    return read


def config_json(config: ViTConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        config: the config of the model.
        model_type: the value of `model_type`.
        architecture: the class that the weights belong to.
    """
    relative, shared = config.positions.relative != "none", config.positions.relative_shared
    fields: dict[str, Any] = {
        "use_absolute_position_embeddings": config.positions.kind == "learned",
        "use_relative_position_bias": relative and not shared,
        "use_shared_relative_position_bias": shared,
        "use_mask_token": False,
        "use_mean_pooling": not config.norms.after_blocks,
        "layer_scale_init_value": float(config.norms.layer_scale or 0),
    }
    if architecture.endswith("Classification") and not config.num_classes:
        fields |= {"id2label": {}, "label2id": {}}  # without them, transformers assumes two classes
    return hf.config_json(config, model_type, architecture, **fields)


def json_files(config: ViTConfig) -> Mapping[str, Any]:
    """Return the JSON files that transformers needs to open a folder."""
    architecture = "BeitForImageClassification" if config.num_classes else "BeitModel"
    return hf.folder_files(config, "bicubic", config_json(config, *TYPES, architecture))


NAME, TYPES = "hf-beit", ("beit",)

FORMAT = Format(
    name=NAME,
    description="Beit of Hugging Face transformers",
    separator=".",
    tables=hf.tables("beit.", LAYOUTS, hf.CLASSIFIER),
    default_variant=hf.default_variant,
    spellings=hf.V4_SPELLINGS,
    variant_spellings=hf.VARIANT_SPELLINGS,
    ignored_keys=IGNORED_KEYS,
    ignored_values=IGNORED_VALUES,
    constraints=CONSTRAINTS,
    unsupported=unsupported,
    assumed=ASSUMED,
    read_config=config_reader(NAME, TYPES),
    assumed_behaviour=hf_classes.assumed_behaviour,
    library=LibraryFiles(contents=json_files, model_types=TYPES),
    recognises=lambda evidence: hf_classes.model_type(evidence) in TYPES,
)
