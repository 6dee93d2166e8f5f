"""What the formats of Hugging Face transformers share: keys, and the JSON files beside the weights.

Transformers 4 named the attention and the MLP of its ViTs model by model; transformers 5 names them alike, and still
writes the old keys to disk (conversion_mapping.py there).  So "v4" is what the hub has and what is written by default;
"v5" is the state dict of transformers 5, as `torch.save` keeps it.  Both are read by transformers 5.
The model of a classifier stands behind a prefix; "-bare" tables are those of a model for itself.

Sources: huggingface/transformers src/transformers/models/*/{configuration,modeling}_*.py, releases 4.57 and 5.23.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from parity.checkpoints.formats import hf_processor
from parity.checkpoints.formats.format import Evidence, Fields
from parity.checkpoints.layout import Array
from vit_spec import InputError, ViTConfig

V4 = {"qkv": ("query", "key", "value")}
V5 = {"qkv": ("q", "k", "v"), "glu": ("gate", "up")}

# `@` stands for what is in front of the model's keys.
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
TOWER = """
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

TEXT_TOWER = {
    r"text_model\..*|text_projection\.weight": "the text tower",
    r"logit_(scale|bias)": "of the comparison with texts",
    r"(vision_model\.)?embeddings\.position_ids": "the numbers 0, 1, 2, ...",
}
MASK_TOKEN = {r"(\w+\.)?embeddings\.mask_token": "stands for masked patches in pre-training alone"}
RESPELLED = {name: V5 for name in ("v5", "v5-bare", "v5-gated", "v5-gated-bare")}


def table(text: str, prefix: str = "", layer: str = "") -> str:
    """Return a table with its marks filled in: `@` the prefix of the model, `{layer}` where block number {block} is."""
    return text.replace("{layer}", f"@{layer}.{{block}}").replace("@", prefix)


def tables(prefix: str, texts: Mapping[str, tuple[str, str]], head: str, pooler: str = "") -> dict[str, str]:
    """Return two tables for each layout: behind a prefix, with a classifier, and "-bare", the model for itself.

    texts: layout -> what the model has for itself, and where its blocks are.
    head, pooler: what comes after the model behind a prefix, and without one.
    """
    found = {}
    for name, (text, layer) in texts.items():
        found[name] = table(text + head, prefix, layer)
        found[f"{name}-bare"] = table(text + pooler, "", layer)
    return found


def usual(config: ViTConfig) -> str:
    """Return the table that transformers writes: a model with a classifier stands behind a prefix."""
    return "v4" if config.num_classes else "v4-bare"


def square(name: str) -> Callable[[ViTConfig], Any]:
    """Return the rule that a size is a square, for `Format.always`."""
    return lambda config: ((config.at(name)[0],) * 2,)


def masks(prefix: str, names: Iterable[str]) -> dict[str, Callable[[ViTConfig], Array]]:
    """Return the mask token as `Format.constants` has it: zero in a new model, loaded, and used in pre-training alone.

    names: of the tables that have it; those of a model for itself end in "-bare".
    """
    places = [f"{name}: {'' if name.endswith('-bare') else prefix}embeddings.mask_token | 1 width" for name in names]
    return dict.fromkeys(places, lambda config: np.zeros(config.width, np.float32))


# config.json, read ----------------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "linear": "none",
}
SHOWN = {  # by tensors too
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_channels": "in_channels",
    "intermediate_size": "mlp_dim",
    "num_register_tokens": "tokens.registers",
}

# Fields of config.json that leave the function alone: what acts in training, selects outputs, or is said of text.
NEUTRAL = frozenset(
    "_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path apply_layernorm architectures "
    "attention_dropout attention_probs_dropout_prob attn_implementation bad_words_ids begin_suppress_tokens bos_token_id "
    "chunk_size_feed_forward cross_attention_hidden_size decoder_hidden_size decoder_intermediate_size "
    "decoder_num_attention_heads decoder_num_hidden_layers decoder_start_token_id diversity_penalty do_sample "
    "drop_path_rate dropout dtype early_stopping encoder_no_repeat_ngram_size encoder_stride eos_token_id "
    "exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id hidden_dropout_prob id2label "
    "initializer_factor initializer_range is_encoder_decoder label2id length_penalty logit_scale_init_value mask_ratio "
    "max_length min_length model_type no_repeat_ngram_size norm_pix_loss num_beam_groups num_beams num_return_sequences "
    "out_features out_indices output_attentions output_hidden_states output_scores pad_token_id pooler_output_size "
    "pos_embed_jitter pos_embed_rescale pos_embed_shift prefix problem_type projection_dim remove_invalid_values "
    "repetition_penalty reshape_hidden_states return_dict return_dict_in_generate sep_token_id stage_names suppress_tokens "
    "task_specific_params temperature text_config text_config_dict text_model_config tf_legacy_loss tie_encoder_decoder "
    "tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p use_bfloat16 "
    "use_cache use_mask_token vision_config vision_config_dict vocab_size".split()
)
# The classes of transformers 4 and 5 that keep these models, ahead of which TF or Flax may stand.
CLASSES = frozenset(
    "CLIPForImageClassification CLIPModel CLIPVisionModel CLIPVisionModelWithProjection DINOv3ViTBackbone DINOv3ViTModel "
    "DeiTForImageClassification DeiTForImageClassificationWithTeacher DeiTForMaskedImageModeling DeiTModel "
    "Dinov2Backbone Dinov2ForImageClassification Dinov2Model Dinov2WithRegistersBackbone "
    "Dinov2WithRegistersForImageClassification Dinov2WithRegistersModel SiglipForImageClassification SiglipModel "
    "SiglipVisionModel ViTForImageClassification ViTForMaskedImageModeling ViTMAEForPreTraining ViTMAEModel "
    "ViTModel".split()
)
UNSET = ("add_cross_attention", "is_decoder", "pruned_heads")  # change the function unless they are false or empty
UNGATED = ("gelu", "gelu_tanh", "quick_gelu", "relu", "none")  # of mlp.activation

PLAIN: Fields = {  # what all of these models are
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
SAYS = frozenset(
    "image_size patch_size in_channels width depth num_heads mlp_dim num_classes attention.qkv_bias mlp.activation "
    "norms.eps norms.layer_scale pixels.mean pixels.std".split()
)


def unread(evidence: Evidence) -> Mapping[str, str]:
    """Return the layers behind the model that are not read, each of no effect in transformers' own classes.

    People's own classes have them under the same names, and use them: no config.json says that it is one of transformers'.
    """
    found = {key.split(".")[-3] for key in evidence.ignored if re.search(r"\b(pooler\.dense|decoder\.0)\.\w+$", key)}
    return {} if model_type(evidence) else dict.fromkeys(sorted(found), "of no effect on what the model puts out")


def model_type(evidence: Evidence) -> str:
    """Return what config.json says the model is; "" where there is none."""
    return str(evidence.notes.get("config.json", {}).get("model_type", ""))


def described(evidence: Evidence, name: str, types: tuple[str, ...], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json, of a model with two towers the vision tower's; {} where there is none.

    name: the format's.
    types: the `model_type`s that it reads.
    defaults: the fields that are read besides those that tensors show, with what transformers takes where one is left out.

    Raises:
        InputError: the config.json of another model or of somebody's own class, or a field that is not known here and may
            change the function.
    """
    whole = evidence.notes.get("config.json", {})
    if "model_type" not in whole:
        return {}
    if (kind := whole["model_type"]) not in types:
        raise InputError(
            f"its config.json is of model_type {kind!r}, format {name!r} is for {' or '.join(map(repr, types))}: "
            f"give the config.json of these very weights"
        )
    if foreign := _foreign(whole.get("architectures")):
        raise InputError(
            f"its config.json says that its class is {foreign!r}, which is none of transformers' and may compute something "
            f"else than model_type {kind!r} does: take architectures out of it if it does not"
        )
    told = dict(whole)
    for part in ("vision_config", "vision_config_dict"):  # the latter goes before the former (CLIPConfig)
        if whole.get(part) is not None:
            if not isinstance(whole[part], dict):
                raise InputError(f"its config.json says {part} {whole[part]!r}: an object was expected")
            told = {**(told if part == "vision_config_dict" else {}), **whole[part]}
    for fields in (whole, told):
        known = {*NEUTRAL, *SHOWN, *defaults}
        unknown = [key for key in fields if key not in known and not (key in UNSET and not fields[key])]
        if unknown:
            shown = ", ".join(f"{key}={fields[key]!r}" for key in unknown[:6])
            more = f" and {len(unknown) - 6} more" if len(unknown) > 6 else ""
            raise InputError(
                f"its config.json has {shown}{more}, which format {name!r} does not know and which may change the "
                f"function: take it out if it does not"
            )
    return {**defaults, **{key: value for key, value in told.items() if value is not None}}


def _foreign(named: Any) -> Any:
    """Return the class that config.json names, as `save_pretrained` writes it, if it is none of transformers'."""
    names = named if isinstance(named, list) else [named] if named else []
    return next((name for name in names if re.sub("^(TF|Flax)", "", str(name)) not in CLASSES), None)


def settings(evidence: Evidence, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the config that every such config.json has, and those of preprocessor_config.json.

    told: of `described`.

    Raises:
        InputError: an activation that is not known here, or a value of the wrong kind.
    """
    fields = pixels(evidence)
    if not told:
        return fields
    fields |= {ours: told[theirs] for theirs, ours in SHOWN.items() if theirs in told}
    if "qkv_bias" in told:
        fields["attention.qkv_bias"] = "qkv" if told["qkv_bias"] else "none"
    fields["num_heads"] = told["num_attention_heads"]
    fields["norms.eps"] = told["layer_norm_eps"]
    fields["image_size"] = pair(told["image_size"], "image_size")
    fields["patch_size"] = pair(told["patch_size"], "patch_size")
    if "glu" not in evidence.axes["blocks.mlp.fc1.weight"]:
        fields["mlp.activation"] = activation(told["hidden_act"])
    return fields


def activation(name: Any) -> str:
    """Return the activation that transformers calls by this name (src/transformers/activations.py).

    Raises:
        InputError: one that is not known here; says which are.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise InputError(f"its config.json says hidden_act {name!r}, known here are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def pair(value: Any, name: str) -> tuple[int, int]:
    """Return a size that is one number or two as (height, width).

    Raises:
        InputError: neither.
    """
    numbers = [value, value] if isinstance(value, int) else value
    if not isinstance(numbers, list) or [type(number) for number in numbers] != [int, int]:
        raise InputError(f"its config.json says {name} {value!r}: a number or two of them were expected")
    return numbers[0], numbers[1]


def pixels(evidence: Evidence) -> dict[str, Any]:
    """Return what preprocessor_config.json says that images are normalised by.

    Raises:
        InputError: what are not numbers.
    """
    return hf_processor.pixels(evidence.notes)


# config.json, written -------------------------------------------------------------------------------------------------

RESAMPLE = {"bilinear": 2, "bicubic": 3}  # the numbers that PIL gives them


def size(pair: tuple[int, int]) -> int | list[int]:
    """Return a size as config.json has it: one number for a square."""
    height, width = pair
    return height if height == width else [height, width]


def config_json(config: ViTConfig, model_type: str, architecture: str, **more: Any) -> dict[str, Any]:
    """Return what transformers' configurations of ViTs have in common, and `more`.

    architecture: the class whose weights these are.
    """
    spelled = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    fields: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "image_size": size(config.image_size),
        "patch_size": size(config.patch_size),
        "num_channels": config.in_channels,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "hidden_act": spelled.get(config.mlp.activation, "silu"),
        "layer_norm_eps": config.norms.eps,
        **more,
    }
    if config.num_classes and "projection_dim" not in more:
        labels = [f"LABEL_{n}" for n in range(config.num_classes)]
        fields["id2label"] = {str(n): label for n, label in enumerate(labels)}
        fields["label2id"] = {label: n for n, label in enumerate(labels)}
    return fields


def folder(config: ViTConfig, kernel: str, described: dict[str, Any]) -> dict[str, Any]:
    """Return the files with which transformers opens a folder: the model's config and how images are prepared.

    kernel: how images are resized.
    described: of `config_json`.
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
    return {"config.json": described, "preprocessor_config.json": preprocessor}
