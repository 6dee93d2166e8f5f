"""transformers 4: Flax classes and PyTorch classes of the same models, `--source transformers4=FOLDER`.

The folder holds transformers below 5, with the versions of huggingface_hub and tokenizers that it needs.  Flax classes
compute in `dtype`, float32 unless it is given.  They are built with float64, which JAX reads as float32 without x64, and
some once more with the default.
"""

from functools import partial
from typing import Any

from benchmarks.ports.declaration import Built, Pairs, TorchCall, floats, perturbed, tokens

PAIRS = Pairs("transformers4", ("transformers",), ("transformers",), needs=("transformers4",))

TEXT = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
OF_GPT2 = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": 48}
OF_BART = {
    "vocab_size": 60,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
}
OF_T5 = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
IMAGES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16}
OF_VIT = {**IMAGES, "patch_size": 4}
LLAMA = {**TEXT, "num_key_value_heads": 2, "max_position_embeddings": 32}
OF_CONV = {"embedding_size": 16, "hidden_sizes": [16, 24, 32], "depths": [1, 2, 1]}
SPECIAL = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
OF_WHISPER = {**OF_BART, **SPECIAL, "num_mel_bins": 10, "max_source_positions": 12, "max_target_positions": 16}

TOKENS = tokens(2, 9, high=60)
PIXELS = floats(2, 3, 16, 16)


def main_output(returned: Any) -> Any:
    """Return the logits, or the hidden states of the last layer."""
    for name in ("logits", "prediction_logits", "last_hidden_state", "start_logits", "logits_per_image"):
        if (value := getattr(returned, name, None)) is not None:
            return value
    return returned[0]


def _clip(clip: Any, x: Any, min: Any = None, max: Any = None, *, a_min: Any = None, a_max: Any = None) -> Any:
    """Call jnp.clip also with the names that its arguments had when FlaxT5 was written."""
    return clip(x, a_min if min is None else min, a_max if max is None else max)


def build(
    name: str,
    config: str,
    options: dict[str, Any],
    inputs: Any,
    dtype: str | None = "float64",
    arguments: Any = ("input_ids",),
) -> Built:
    """Return the pair of the classes Flax`name` and `name`.

    arguments: the names of the inputs in Flax, and in PyTorch if they differ.
    """
    import jax.numpy as jnp
    import transformers

    if not isinstance(jnp.clip, partial):
        jnp.clip = partial(_clip, jnp.clip)
    settings = getattr(transformers, config)(**options)
    settings._attn_implementation = "eager"
    own = getattr(transformers, name)(settings)
    model = getattr(transformers, f"Flax{name}")(settings, **({"dtype": getattr(jnp, dtype)} if dtype else {}))
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)

    def apply(params: Any, *inputs: Any) -> Any:
        return main_output(model(**dict(zip(arguments, inputs, strict=True)), params=params))

    def call(module: Any, *inputs: Any) -> Any:
        return main_output(module(**dict(zip(arguments, inputs, strict=True))))

    return Built(apply, perturbed(model.params), TorchCall(own, call), inputs)


def declare(name: str, config: str, options: dict[str, Any], inputs: Any, **arguments: Any) -> None:
    """Declare the pair of the classes Flax`name` and `name`."""
    PAIRS.add(
        name,
        f"transformers 4 Flax{name}",
        f"transformers 4 {name}",
        lambda: build(name, config, options, inputs, **arguments),
    )


BOTH = {"arguments": ("input_ids", "decoder_input_ids")}
TWO = (TOKENS, tokens(2, 7, high=60, seed=2))
PICTURE = {"arguments": ("pixel_values",)}
for name in ("BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForQuestionAnswering"):
    declare(name, "BertConfig", TEXT, TOKENS)
for name in ("RobertaModel", "RobertaForTokenClassification"):
    declare(name, "RobertaConfig", {**TEXT, "max_position_embeddings": 32}, TOKENS)
declare("XLMRobertaModel", "XLMRobertaConfig", {**TEXT, "max_position_embeddings": 32}, TOKENS)
declare("RobertaPreLayerNormModel", "RobertaPreLayerNormConfig", {**TEXT, "max_position_embeddings": 32}, TOKENS)
# FlaxElectra takes ones as token types where none are given, and Electra zeros (modeling_flax_electra.py:796).
TYPES = {"arguments": ("input_ids", "token_type_ids")}
TYPED = (TOKENS, tokens(2, 9, high=5) % 2)
declare("ElectraModel", "ElectraConfig", {**TEXT, "embedding_size": 16}, TYPED, **TYPES)
declare("ElectraForMaskedLM", "ElectraConfig", {**TEXT, "embedding_size": 32}, TYPED, **TYPES)
PAIRS.add(
    "ElectraModel_without_token_types",
    "transformers 4 FlaxElectraModel",
    "transformers 4 ElectraModel",
    lambda: build("ElectraModel", "ElectraConfig", {**TEXT, "embedding_size": 16}, TOKENS),
    disagreement="FlaxElectraModel takes ones as token types where none are given, and ElectraModel zeros "
    "(transformers/models/electra/modeling_flax_electra.py:796)",
)
for name in ("AlbertModel", "AlbertForMaskedLM"):
    declare(name, "AlbertConfig", {**TEXT, "embedding_size": 16}, TOKENS)
DISTIL = {"vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
for name in ("DistilBertModel", "DistilBertForMaskedLM"):
    declare(name, "DistilBertConfig", DISTIL, TOKENS)
declare("RoFormerModel", "RoFormerConfig", {**TEXT, "embedding_size": 32, "max_position_embeddings": 32}, TOKENS)
declare("BigBirdModel", "BigBirdConfig", {**TEXT, "attention_type": "original_full"}, TOKENS)
for name in ("GPT2Model", "GPT2LMHeadModel"):
    declare(name, "GPT2Config", OF_GPT2, TOKENS)
declare(
    "GPTNeoForCausalLM",
    "GPTNeoConfig",
    {
        "vocab_size": 60,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
        "max_position_embeddings": 32,
    },
    TOKENS,
)
declare("GPTJForCausalLM", "GPTJConfig", {**OF_GPT2, "rotary_dim": 4}, TOKENS)
for name in ("LlamaModel", "LlamaForCausalLM"):
    declare(name, "LlamaConfig", LLAMA, TOKENS)
declare("MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": 16}, TOKENS)
PAIRS.add(
    "MistralForCausalLM_short_window",
    "transformers 4 FlaxMistralForCausalLM",
    "transformers 4 MistralForCausalLM",
    lambda: build("MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": 4}, TOKENS),
    disagreement="with a sliding window of n, the Flax class attends to n + 1 tokens, and PyTorch's to n "
    "(transformers/models/mistral/modeling_flax_mistral.py, triu with k=-sliding_window)",
)
declare("GemmaForCausalLM", "GemmaConfig", {**LLAMA, "head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"}, TOKENS)
declare("BloomForCausalLM", "BloomConfig", {"vocab_size": 60, "hidden_size": 32, "n_layer": 2, "n_head": 4}, TOKENS)
declare(
    "OPTForCausalLM",
    "OPTConfig",
    {
        "vocab_size": 60,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "max_position_embeddings": 32,
    },
    TOKENS,
)
declare(
    "XGLMForCausalLM",
    "XGLMConfig",
    {"vocab_size": 60, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 32},
    TOKENS,
)
for name in ("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "LongT5ForConditionalGeneration"):
    declare(name, name.replace("ForConditionalGeneration", "Config"), OF_T5, TWO, **BOTH)
for name in ("BartForConditionalGeneration", "MBartForConditionalGeneration", "PegasusForConditionalGeneration"):
    declare(name, name.replace("ForConditionalGeneration", "Config"), OF_BART, TWO, **BOTH)
declare("BlenderbotForConditionalGeneration", "BlenderbotConfig", OF_BART, TWO, **BOTH)
declare("BlenderbotSmallForConditionalGeneration", "BlenderbotSmallConfig", OF_BART, TWO, **BOTH)
declare("MarianMTModel", "MarianConfig", {**OF_BART, "pad_token_id": 1}, TWO, **BOTH)
for name in ("ViTModel", "ViTForImageClassification"):
    declare(name, "ViTConfig", OF_VIT, PIXELS, **PICTURE)
declare("BeitForImageClassification", "BeitConfig", {**OF_VIT, "use_relative_position_bias": True}, PIXELS, **PICTURE)
declare("BeitModel", "BeitConfig", {**OF_VIT, "use_absolute_position_embeddings": True}, PIXELS, **PICTURE)
declare("Dinov2Model", "Dinov2Config", OF_VIT, PIXELS, **PICTURE)
declare(
    "ResNetForImageClassification", "ResNetConfig", {**OF_CONV, "layer_type": "bottleneck"}, floats(2, 3, 32, 32), **PICTURE
)
declare("ResNetModel", "ResNetConfig", {**OF_CONV, "layer_type": "basic"}, floats(2, 3, 32, 32), **PICTURE)
declare("RegNetForImageClassification", "RegNetConfig", {**OF_CONV, "groups_width": 8}, floats(2, 3, 32, 32), **PICTURE)
declare(
    "WhisperForConditionalGeneration",
    "WhisperConfig",
    OF_WHISPER,
    (floats(2, 10, 24), tokens(2, 7, high=60)),
    arguments=("input_features", "decoder_input_ids"),
)
CLIP_VISION = {**IMAGES, "patch_size": 4}
CLIP_TEXT = {**TEXT, "max_position_embeddings": 16, "eos_token_id": 2}
declare("CLIPVisionModel", "CLIPVisionConfig", CLIP_VISION, PIXELS, **PICTURE)
declare("CLIPTextModel", "CLIPTextConfig", CLIP_TEXT, TOKENS)
declare(
    "CLIPModel",
    "CLIPConfig",
    {"text_config": CLIP_TEXT, "vision_config": CLIP_VISION, "projection_dim": 24},
    (TOKENS, PIXELS),
    arguments=("input_ids", "pixel_values"),
)
declare(
    "Wav2Vec2Model",
    "Wav2Vec2Config",
    {
        **TEXT,
        "conv_dim": [16, 16],
        "conv_kernel": [5, 3],
        "conv_stride": [3, 2],
        "num_feat_extract_layers": 2,
        "feat_extract_norm": "layer",
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
        "do_stable_layer_norm": True,
    },
    floats(2, 120),
    arguments=("input_values",),
)

# Once more with the default dtype, which fixes float32 in the Flax classes.
for name, config, options, inputs, more in (
    ("BertModel", "BertConfig", TEXT, TOKENS, {}),
    ("GPT2LMHeadModel", "GPT2Config", OF_GPT2, TOKENS, {}),
    ("LlamaForCausalLM", "LlamaConfig", LLAMA, TOKENS, {}),
    ("ViTForImageClassification", "ViTConfig", OF_VIT, PIXELS, PICTURE),
    ("ResNetModel", "ResNetConfig", {**OF_CONV, "layer_type": "basic"}, floats(2, 3, 32, 32), PICTURE),
    ("T5ForConditionalGeneration", "T5Config", OF_T5, TWO, BOTH),
):
    PAIRS.add(
        f"{name}_default_dtype",
        f"transformers 4 Flax{name}, dtype float32",
        f"transformers 4 {name}",
        lambda name=name, config=config, options=options, inputs=inputs, more=more: build(
            name, config, options, inputs, dtype=None, **more
        ),
    )
