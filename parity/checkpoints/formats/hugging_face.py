"""Shared parts of the formats of Hugging Face transformers: keys, and the JSON files beside the weights.

In transformers 4, each model had its own names for attention and MLP.  Transformers 5 has one set of names in memory and
still writes the old ones to disk (its conversion_mapping.py).  So files on the hub have the keys of variant "v4", which is
also the default for writing.  Variant "v5" has the keys of transformers 5 in memory, as `torch.save` stores a state dict.
Transformers 5 reads both.  A model with a classifier has a prefix before its other keys.  The variants "...-bare" are for
models without a classifier, whose keys have no prefix.

Sources: huggingface/transformers src/transformers/models/*/{configuration,modeling}_*.py, releases 4.57 and 5.23.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from parity.checkpoints.formats import hf_processor
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.hf_classes import BACKBONE_FIELDS, check_class, stated_class
from parity.checkpoints.formats.stored_constants import is_position_ids
from parity.checkpoints.formats.tables import PLAIN_BLOCK
from parity.checkpoints.layout import Array
from vit_spec import InputError, ViTConfig

V4_SPELLINGS = {"qkv": ("query", "key", "value")}
V5_SPELLINGS = {"qkv": ("q", "k", "v"), "glu": ("gate", "up")}

# `@` stands for the prefix of the model's keys, `{layer}` for the prefix of the keys of a block.
EMBEDDINGS = """
    patch_embed.proj.weight | @embeddings.patch_embeddings.projection.weight | width rgb ph pw
    patch_embed.proj.bias   | @embeddings.patch_embeddings.projection.bias   | width
    cls_token               | @embeddings.cls_token                          | 1 1 width
    pos_embed               | @embeddings.position_embeddings                | 1 token width
    norm.weight             | @layernorm.weight                              | width
    norm.bias               | @layernorm.bias                                | width
"""
NORMS = """
    blocks.norm1.weight | {layer}.layernorm_before.weight | width
    blocks.norm1.bias   | {layer}.layernorm_before.bias   | width
    blocks.norm2.weight | {layer}.layernorm_after.weight  | width
    blocks.norm2.bias   | {layer}.layernorm_after.bias    | width
"""
ATTENTION_V4 = """
    blocks.attn.qkv.weight  | {layer}.attention.attention.{qkv}.weight | (head dim) width
    blocks.attn.qkv.bias    | {layer}.attention.attention.{qkv}.bias   | (head dim)
    blocks.attn.proj.weight | {layer}.attention.output.dense.weight    | width (head dim)
    blocks.attn.proj.bias   | {layer}.attention.output.dense.bias      | width
"""
ATTENTION_V5 = """
    blocks.attn.qkv.weight  | {layer}.attention.{qkv}_proj.weight | (head dim) width
    blocks.attn.qkv.bias    | {layer}.attention.{qkv}_proj.bias   | (head dim)
    blocks.attn.proj.weight | {layer}.attention.o_proj.weight     | width (head dim)
    blocks.attn.proj.bias   | {layer}.attention.o_proj.bias       | width
"""
MLP = """
    blocks.mlp.fc1.weight | {layer}.mlp.fc1.weight | ff width
    blocks.mlp.fc1.bias   | {layer}.mlp.fc1.bias   | ff
    blocks.mlp.fc2.weight | {layer}.mlp.fc2.weight | width ff
    blocks.mlp.fc2.bias   | {layer}.mlp.fc2.bias   | width
"""
MLP_V4 = """
    blocks.mlp.fc1.weight | {layer}.intermediate.dense.weight | ff width
    blocks.mlp.fc1.bias   | {layer}.intermediate.dense.bias   | ff
    blocks.mlp.fc2.weight | {layer}.output.dense.weight       | width ff
    blocks.mlp.fc2.bias   | {layer}.output.dense.bias         | width
"""
GATED_V4 = """
    blocks.mlp.fc1.weight | {layer}.mlp.weights_in.weight  | (glu ff) width
    blocks.mlp.fc1.bias   | {layer}.mlp.weights_in.bias    | (glu ff)
    blocks.mlp.fc2.weight | {layer}.mlp.weights_out.weight | width ff
    blocks.mlp.fc2.bias   | {layer}.mlp.weights_out.bias   | width
"""
GATED_V5 = """
    blocks.mlp.fc1.weight | {layer}.mlp.{glu}_proj.weight | ff width
    blocks.mlp.fc1.bias   | {layer}.mlp.{glu}_proj.bias   | ff
    blocks.mlp.fc2.weight | {layer}.mlp.down_proj.weight  | width ff
    blocks.mlp.fc2.bias   | {layer}.mlp.down_proj.bias    | width
"""
LAYER_SCALE = """
    blocks.norm1.weight | {layer}.norm1.weight          | width
    blocks.norm1.bias   | {layer}.norm1.bias            | width
    blocks.ls1.gamma    | {layer}.layer_scale1.lambda1  | width
    blocks.norm2.weight | {layer}.norm2.weight          | width
    blocks.norm2.bias   | {layer}.norm2.bias            | width
    blocks.ls2.gamma    | {layer}.layer_scale2.lambda1  | width
"""
CLASSIFIER = """
    head.weight | classifier.weight | label feature
    head.bias   | classifier.bias   | label
"""
POOLER = """
    pre_logits.weight | pooler.dense.weight | feature pooled
    pre_logits.bias   | pooler.dense.bias   | feature
"""
VISION_TOWER = """
    patch_embed.proj.weight | @embeddings.patch_embedding.weight    | width rgb ph pw
    pos_embed               | @embeddings.position_embedding.weight | token width

    blocks.norm1.weight     | @encoder.layers.{block}.layer_norm1.weight           | width
    blocks.norm1.bias       | @encoder.layers.{block}.layer_norm1.bias             | width
    blocks.attn.qkv.weight  | @encoder.layers.{block}.self_attn.{qkv}_proj.weight  | (head dim) width
    blocks.attn.qkv.bias    | @encoder.layers.{block}.self_attn.{qkv}_proj.bias    | (head dim)
    blocks.attn.proj.weight | @encoder.layers.{block}.self_attn.out_proj.weight    | width (head dim)
    blocks.attn.proj.bias   | @encoder.layers.{block}.self_attn.out_proj.bias      | width
    blocks.norm2.weight     | @encoder.layers.{block}.layer_norm2.weight           | width
    blocks.norm2.bias       | @encoder.layers.{block}.layer_norm2.bias             | width
    blocks.mlp.fc1.weight   | @encoder.layers.{block}.mlp.fc1.weight               | ff width
    blocks.mlp.fc1.bias     | @encoder.layers.{block}.mlp.fc1.bias                 | ff
    blocks.mlp.fc2.weight   | @encoder.layers.{block}.mlp.fc2.weight               | width ff
    blocks.mlp.fc2.bias     | @encoder.layers.{block}.mlp.fc2.bias                 | width

    norm.weight             | @post_layernorm.weight                               | width
    norm.bias               | @post_layernorm.bias                                 | width
"""

_POSITION_IDS = r"(vision_model\.)?embeddings\.position_ids"
TEXT_TOWER_KEYS = {
    r"text_model\..*|text_projection\.weight": "the text tower",
    r"logit_(scale|bias)": "scale or bias for the comparison of images with texts",
    _POSITION_IDS: "the numbers 0, 1, 2, ...",
}
TEXT_TOWER_VALUES = {_POSITION_IDS: is_position_ids}
MASK_TOKEN_KEY = {r"(\w+\.)?embeddings\.mask_token": "replaces masked patches in pre-training only"}
VARIANT_SPELLINGS = {name: V5_SPELLINGS for name in ("v5", "v5-bare", "v5-gated", "v5-gated-bare")}


def table(text: str, prefix: str = "", layer: str = "") -> str:
    """Return a table with `@` replaced by `prefix`, and `{layer}` by the prefix of the keys of block {block}.

    Args:
        text: the table.
        prefix: the prefix of the model's keys.
        layer: the key of the list of blocks, without `prefix`.
    """
    return text.replace("{layer}", f"@{layer}.{{block}}").replace("@", prefix)


def tables(prefix: str, texts: Mapping[str, tuple[str, str]], head: str, pooler: str = "") -> dict[str, str]:
    """Return two tables for each set of keys: one with a prefix and a classifier, and one without, "...-bare".

    Args:
        prefix: the prefix of the model's keys if there is a classifier.
        texts: name of the set, such as "v4" -> the table of the model, and the key of its list of blocks.
        head: lines for the classifier.
        pooler: lines for the pooler of a model without a classifier.
    """
    found = {}
    for name, (text, layer) in texts.items():
        found[name] = table(text + head, prefix, layer)
        found[f"{name}-bare"] = table(text + pooler, "", layer)
    return found


def default_variant(config: ViTConfig) -> str:
    """Return the variant that transformers writes."""
    return "v4" if config.num_classes else "v4-bare"


def square_only(name: str) -> Callable[[ViTConfig], Any]:
    """Return the constraint that the size in a field is square, for `Format.constraints`."""
    return lambda config: ((config.at(name)[0],) * 2,)


def mask_token_constants(prefix: str, names: Iterable[str]) -> dict[str, Callable[[ViTConfig], Array]]:
    """Return the mask token for `Format.constants`.

    transformers loads it and uses it in pre-training only; in a new model it is zero.

    Args:
        prefix: the prefix of the model's keys in variants that do not end in "-bare".
        names: the variants that have a mask token.
    """
    lines = [f"{name}: {'' if name.endswith('-bare') else prefix}embeddings.mask_token | 1 width" for name in names]
    return dict.fromkeys(lines, lambda config: np.zeros(config.width, np.float32))


# config.json, read ----------------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "mish": "mish",
    "linear": "none",
}
SIZE_FIELDS = {  # in config.json -> in `ViTConfig`: fields that tensors show too
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_channels": "in_channels",
    "intermediate_size": "mlp_dim",
    "num_register_tokens": "tokens.registers",
}

# Fields of config.json that do not change the function: they act in training, select outputs, or are about text.
NEUTRAL_FIELDS = frozenset(
    "_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures "
    "attention_dropout attention_probs_dropout_prob attn_implementation bad_words_ids begin_suppress_tokens bos_token_id "
    "chunk_size_feed_forward cross_attention_hidden_size decoder_hidden_size decoder_intermediate_size "
    "decoder_num_attention_heads decoder_num_hidden_layers decoder_start_token_id diversity_penalty do_sample "
    "drop_path_rate dropout dtype early_stopping encoder_no_repeat_ngram_size encoder_stride eos_token_id "
    "exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id hidden_dropout_prob id2label "
    "initializer_factor initializer_range is_encoder_decoder label2id length_penalty logit_scale_init_value mask_ratio "
    "max_length min_length model_type no_repeat_ngram_size norm_pix_loss num_beam_groups num_beams num_return_sequences "
    "output_attentions output_hidden_states output_scores pad_token_id pooler_output_size "
    "pos_embed_jitter pos_embed_rescale pos_embed_shift prefix problem_type projection_dim remove_invalid_values "
    "repetition_penalty reshape_hidden_states return_dict return_dict_in_generate sep_token_id stage_names suppress_tokens "
    "task_specific_params temperature text_config text_config_dict text_model_config tf_legacy_loss tie_encoder_decoder "
    "tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p use_bfloat16 "
    "use_cache use_mask_token vision_config vision_config_dict vocab_size".split()
)
_TOWER_CONFIGS = {  # model_type -> fields with the config of the vision tower
    "clip": ("vision_config", "vision_config_dict"),
    "clip_vision_model": ("vision_config",),
    "siglip": ("vision_config",),
    "siglip_vision_model": ("vision_config",),
}
_VISION_TYPES = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}  # of two towers -> of the image tower alone
UNSET_FIELDS = ("add_cross_attention", "is_decoder", "pruned_heads")  # change the function unless they are false or empty

COMMON_CONSTRAINTS: Fields = {  # of all models in these formats
    **PLAIN_BLOCK,
    "positions.rotary": "none",
    "attention.head_dim": None,
    "attention.proj": True,
    "attention.scale": None,
    "attention.value_skip": False,
    "norms.before_blocks": False,
    "norms.after_blocks": True,
    "norms.after_pool": False,
    "norms.shared_norm": False,
}
BICUBIC: Fields = {
    "resampling.kernel": "bicubic",
    "resampling.antialias": False,
    "resampling.align_corners": False,
    "resampling.offset": 0.0,
}


def read_config_json(evidence: Evidence, name: str, types: tuple[str, ...], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json, or of its vision tower if it has two towers; {} if there is no config.json.

    Args:
        evidence: what the checkpoint shows about the model.
        name: the name of the format.
        types: the values of `model_type` that the format reads.
        defaults: the fields to read besides `SIZE_FIELDS`, with transformers' defaults for fields that are left out.

    Raises:
        InputError: the config.json is for another model or a class that the twins cannot express, or has an unknown field,
            which may change the function.
    """
    whole = evidence.notes.get("config.json", {})
    if "model_type" not in whole:
        return {}
    if (kind := whole["model_type"]) not in types:
        raise InputError(
            f"its config.json is of model_type {kind!r}, format {name!r} is for {' or '.join(map(repr, types))}: "
            f"give the config.json of these weights"
        )
    named = stated_class(evidence)
    # In a config of two towers, fields outside of vision_config do not describe the image tower.
    content = {} if kind in _VISION_TYPES else dict(whole)
    for part in ("vision_config", "vision_config_dict"):  # the second replaces the whole first (CLIPConfig)
        if whole.get(part) is not None and part in _TOWER_CONFIGS.get(kind, ()):
            if not isinstance(whole[part], dict):
                raise InputError(f"its config.json says {part} {whole[part]!r}: an object was expected")
            content = dict(whole[part])
    if kind in _VISION_TYPES and not any(isinstance(whole.get(part), dict) for part in _TOWER_CONFIGS[kind]):
        if flat := [key for key in whole if key in {*SIZE_FIELDS, *defaults}]:
            raise InputError(
                f"its config.json is of model_type {kind!r}, which has two towers, but has {', '.join(flat)} outside of "
                f"vision_config: give model_type {_VISION_TYPES[kind]!r} if they describe the image tower"
            )
    for fields in (whole, content):
        known = {*NEUTRAL_FIELDS, *BACKBONE_FIELDS, *SIZE_FIELDS, *defaults, "num_labels"}
        unknown = [key for key in fields if key not in known and not (key in UNSET_FIELDS and not fields[key])]
        unknown += [key for key in _TOWER_CONFIGS["clip"] if fields.get(key) and key not in _TOWER_CONFIGS.get(kind, ())]
        if unknown:
            shown = ", ".join(f"{key}={fields[key]!r}" for key in unknown[:6])
            more = f" and {len(unknown) - 6} more" if len(unknown) > 6 else ""
            raise InputError(
                f"its config.json has {shown}{more}, which format {name!r} does not know and which may change the "
                f"function: remove it if it does not"
            )
    if "label" in evidence.sizes and not kind.startswith("clip"):  # the output of CLIP is a projection
        for fields in (whole, content):
            _check_num_labels(fields, evidence.sizes["label"])
    _check_types(content, {**defaults, "apply_layernorm": True})
    check_class(named, evidence, content)
    return {**defaults, **{key: value for key, value in content.items() if value is not None}}


def _check_num_labels(fields: Mapping[str, Any], outputs: int) -> None:
    """Raise InputError if a config.json states another number of classes than the classifier has outputs."""
    if (stated := fields.get("num_labels", outputs)) != outputs or isinstance(stated, bool):
        raise InputError(
            f"its config.json says num_labels {stated!r}, but its tensors show {outputs} outputs: give the config.json of "
            f"these weights"
        )


def _check_types(content: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise InputError if a switch or a number in config.json has a value of another type than its default.

    transformers takes the text "false" for true, and null for false or for an error.
    """
    for name, value in content.items():
        default = defaults.get(name)
        if name in ("image_size", "patch_size"):  # which may be pairs: see `parse_size`
            continue
        if isinstance(default, bool) and not isinstance(value, bool):
            raise InputError(f"its config.json says {name} {value!r}: true or false was expected")
        if type(default) in (int, float) and type(value) not in (int, float):
            raise InputError(f"its config.json says {name} {value!r}: a number was expected")


def gate_fields(evidence: Evidence, content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return mlp.activation if the MLPs have a gate, whose activation no field of config.json changes; else {}.

    Args:
        evidence: what the checkpoint shows about the model.
        content: the result of `read_config_json`.
        name: the field that says whether MLPs have a gate.

    Raises:
        InputError: the tensors show the other kind of MLP.
    """
    is_gated = "glu" in evidence.axes["blocks.mlp.fc1.weight"]
    if content[name] != is_gated:
        raise InputError(
            f"its config.json says {name} {content[name]!r}, but its tensors show MLPs {'with' if is_gated else 'without'} "
            f"a gate: give the config.json of these weights"
        )
    return {"mlp.activation": "swiglu"} if is_gated else {}


def config_fields(evidence: Evidence, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ViTConfig` that every such config.json states, and the fields of preprocessor_config.json.

    Args:
        evidence: what the checkpoint shows about the model.
        content: the result of `read_config_json`.

    Raises:
        InputError: an unknown activation, or a value of the wrong type.
    """
    fields = pixel_fields(evidence)
    if not content:
        return fields
    fields |= {ours: content[theirs] for theirs, ours in SIZE_FIELDS.items() if theirs in content}
    if "qkv_bias" in content:
        fields["attention.qkv_bias"] = "qkv" if content["qkv_bias"] else "none"
    fields["num_heads"] = content["num_attention_heads"]
    fields["norms.eps"] = content["layer_norm_eps"]
    fields["image_size"] = parse_size(content["image_size"], "image_size")
    fields["patch_size"] = parse_size(content["patch_size"], "patch_size")
    pairs = zip(fields["image_size"], fields["patch_size"], strict=True)
    fields["tokens.crop"] = any(patch and size % patch for size, patch in pairs)  # a convolution leaves out the remainder
    if "glu" not in evidence.axes["blocks.mlp.fc1.weight"]:
        fields["mlp.activation"] = parse_activation(content["hidden_act"])
    return fields


def parse_activation(name: Any) -> str:
    """Return the value of mlp.activation for transformers' name of an activation (src/transformers/activations.py).

    Raises:
        InputError: an unknown name; lists the known ones.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise InputError(f"its config.json says hidden_act {name!r}, supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def parse_size(value: Any, name: str) -> tuple[int, int]:
    """Return a size in JSON, one number or [height, width], as (height, width).

    Raises:
        InputError: the value is neither.
    """
    numbers = [value, value] if isinstance(value, int) else value
    if not isinstance(numbers, list) or [type(number) for number in numbers] != [int, int]:
        raise InputError(f"its config.json says {name} {value!r}: one or two numbers were expected")
    return numbers[0], numbers[1]


def pixel_fields(evidence: Evidence) -> dict[str, Any]:
    """Return the fields in `pixels` that preprocessor_config.json states.

    Raises:
        InputError: a value that is not a number.
    """
    return hf_processor.pixel_fields(evidence.notes)


# config.json, written -------------------------------------------------------------------------------------------------

RESAMPLE = {"bilinear": 2, "bicubic": 3}  # PIL's numbers of the filters


def size_json(pair: tuple[int, int]) -> int | list[int]:
    """Return a size as config.json states it: one number for a square."""
    height, width = pair
    return height if height == width else [height, width]


def config_json(config: ViTConfig, model_type: str, architecture: str, **more: Any) -> dict[str, Any]:
    """Return the content of config.json: the fields that all of these models have, and `more`.

    Args:
        config: the config of the model.
        model_type: the value of `model_type`.
        architecture: the class that the weights belong to.
        more: further fields.

    Raises:
        InputError: transformers has no name for the activation.
    """
    spelled = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())} | {"swiglu": "silu"}
    if config.mlp.activation not in spelled:
        raise InputError(
            f"transformers' config.json cannot store mlp.activation={config.mlp.activation!r}: write a file "
            f"(weights.safetensors) instead of a folder"
        )
    fields: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "image_size": size_json(config.image_size),
        "patch_size": size_json(config.patch_size),
        "num_channels": config.in_channels,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "hidden_act": spelled[config.mlp.activation],
        "layer_norm_eps": config.norms.eps,
        **more,
    }
    if config.num_classes and "projection_dim" not in more:
        labels = [f"LABEL_{n}" for n in range(config.num_classes)]
        fields["id2label"] = {str(n): label for n, label in enumerate(labels)}
        fields["label2id"] = {label: n for n, label in enumerate(labels)}
    return fields


def folder_files(config: ViTConfig, kernel: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON files that transformers needs to open a folder: the model's config and its image processor.

    Args:
        config: the config of the model.
        kernel: the filter that resizes images, a key of `RESAMPLE`.
        content: the content of config.json.
    """
    mean, std = (list(values) * (config.in_channels // len(values)) for values in (config.pixels.mean, config.pixels.std))
    preprocessor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": dict(zip(("height", "width"), config.image_size, strict=True)),
        "resample": RESAMPLE[kernel],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }
    return {"config.json": content, "preprocessor_config.json": preprocessor}
