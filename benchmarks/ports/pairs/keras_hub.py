"""keras-hub on Keras' JAX backend, `--source keras_hub=FOLDER`, and transformers, timm and torchvision.

The folder holds keras-hub and keras, with the packages that they need (namex, optree and h5py).  Models are built with
the dtype float64, which JAX reads as float32 without x64.  The parameters are the variables by their paths.
"""

import os
import re
from collections.abc import Callable
from typing import Any

from benchmarks.ports.declaration import Built, Pairs, TorchCall, floats, perturbed, tokens

PAIRS = Pairs("keras_hub", ("keras_hub",), ("transformers", "timm", "torchvision"), needs=("keras_hub",))
IMAGE_AXES = {"input_axes": "b y x c <-> b c y x"}
MAP_AXES = {**IMAGE_AXES, "output_axes": "b y x c <-> b c y x"}
TOKENS = tokens(2, 9, high=60)
TYPES = tokens(2, 9, high=5) % 2
IMAGES = floats(2, 16, 16, 3)

SIZES = {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "intermediate_dim": 48}
TEXT = {**SIZES, "vocabulary_size": 60, "max_sequence_length": 32}
HF_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
HF_TEXT = {**HF_SIZES, "vocab_size": 60, "max_position_embeddings": 32}
HF_VIT = {**HF_SIZES, "image_size": 16, "patch_size": 4}


def masked(x: Any) -> dict[str, Any]:
    """Return the inputs of a model for text: the tokens, and a mask of ones."""
    import jax.numpy as jnp

    return {"token_ids": x, "padding_mask": jnp.ones_like(x)}


def of_keras(
    name: str,
    options: dict[str, Any],
    module: Any,
    inputs: Any,
    *,
    call: Callable[..., Any] = lambda x: x,
    output: Callable[[Any], Any] = lambda y: y,
    task: str = "",
    without: str = "",
    dtype: str | None = "float64",
    **more: Any,
) -> Built:
    """Return a pair whose JAX side is a model of keras-hub, with random weights.

    call: returns the inputs of the Keras model for those of the pair.
    output: returns the output to compare.
    without: the start of the names of parameters that the output does not depend on, if there are any.
    task: the model with a head whose backbone is `name`; "" for the backbone alone.
    """
    os.environ["KERAS_BACKEND"] = "jax"
    import keras
    import keras_hub

    keras.utils.set_random_seed(0)

    if dtype:
        keras.config.set_dtype_policy(dtype)
    model = getattr(keras_hub.models, name)(**options)
    if task:
        model = getattr(keras_hub.models, task)(backbone=model, preprocessor=None)
    trained = {variable.path: variable.value for variable in model.trainable_variables}
    # The states of random number generators are no parameters.
    others = {variable.path: variable.value for variable in model.non_trainable_variables}
    assert len({**trained, **others}) == len(model.variables)
    statistics = {path: value for path, value in others.items() if path.endswith(("moving_mean", "moving_variance"))}
    order = [list(trained), list(others)]

    def apply(params: Any, *inputs: Any) -> Any:
        given = {**trained, **others, **params}
        lists = [[given[path] for path in paths] for paths in order]
        return output(model.stateless_call(*lists, call(*inputs), training=False)[0])

    used = {path: value for path, value in trained.items() if not path.startswith(without)} if without else trained
    return Built(apply, perturbed({**used, **statistics}), module, inputs, more)


def hugging_face(name: str, config: str, options: dict[str, Any], call: Any = None, **arguments: Any) -> Any:
    """Return a model of transformers that returns its last hidden states, or what `call` selects."""
    import transformers

    settings = getattr(transformers, config)(**options)
    settings._attn_implementation = "eager"
    return TorchCall(
        getattr(transformers, name)(settings, **arguments), call or (lambda module, *x: module(*x).last_hidden_state)
    )


OF_VIT = {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 48, "image_shape": (16, 16, 3), "patch_size": 4}


@PAIRS.pair("vit", "keras-hub ViTBackbone", "transformers ViTModel without its pooler")
def _() -> Built:
    module = hugging_face("ViTModel", "ViTConfig", {**HF_VIT, "layer_norm_eps": 1e-6}, add_pooling_layer=False)
    return of_keras("ViTBackbone", OF_VIT, module, IMAGES, **IMAGE_AXES)


@PAIRS.pair("vit_x_timm", "keras-hub ViTBackbone", "timm VisionTransformer without its head")
def _() -> Built:
    from timm.models.vision_transformer import VisionTransformer

    module = VisionTransformer(16, 4, 3, 0, embed_dim=32, depth=2, num_heads=4, mlp_ratio=1.5, global_pool="")
    return of_keras("ViTBackbone", OF_VIT, module, IMAGES, **IMAGE_AXES)


@PAIRS.pair("deit", "keras-hub DeiTBackbone", "transformers DeiTModel without its pooler")
def _() -> Built:
    module = hugging_face("DeiTModel", "DeiTConfig", {**HF_VIT, "layer_norm_eps": 1e-6}, add_pooling_layer=False)
    return of_keras("DeiTBackbone", {**SIZES, "image_shape": (16, 16, 3), "patch_size": 4}, module, IMAGES, **IMAGE_AXES)


@PAIRS.pair("dinov2", "keras-hub DINOV2Backbone", "transformers Dinov2Model")
def _() -> Built:
    sizes = {**SIZES, "intermediate_dim": 64, "image_shape": (16, 16, 3), "patch_size": 4}
    module = hugging_face("Dinov2Model", "Dinov2Config", {**HF_VIT, "mlp_ratio": 2})
    return of_keras("DINOV2Backbone", {**sizes, "position_embedding_shape": (16, 16, 3)}, module, IMAGES, **IMAGE_AXES)


@PAIRS.pair("bert", "keras-hub BertBackbone", "transformers BertModel, tanh GELU")
def _() -> Built:
    options = {**HF_TEXT, "hidden_act": "gelu_pytorch_tanh"}
    call = lambda m, x, types: tuple(m(x, token_type_ids=types).values())[:2]  # noqa: E731
    return of_keras(
        "BertBackbone",
        TEXT,
        hugging_face("BertModel", "BertConfig", options, call),
        (TOKENS, TYPES),
        call=lambda x, types: {**masked(x), "segment_ids": types},
        output=lambda y: (y["sequence_output"], y["pooled_output"]),
    )


@PAIRS.pair("electra", "keras-hub ElectraBackbone", "transformers ElectraModel, tanh GELU")
def _() -> Built:
    call = lambda m, x, types: m(x, token_type_ids=types).last_hidden_state  # noqa: E731
    sizes = {**SIZES, "vocab_size": 60, "max_sequence_length": 32, "embedding_dim": 16}
    module = hugging_face(
        "ElectraModel", "ElectraConfig", {**HF_TEXT, "embedding_size": 16, "hidden_act": "gelu_pytorch_tanh"}, call
    )
    given = lambda x, types: {**masked(x), "segment_ids": types}  # noqa: E731
    output = lambda y: y["sequence_output"]  # noqa: E731
    return of_keras("ElectraBackbone", sizes, module, (TOKENS, TYPES), call=given, output=output, without="pooled_dense")


INNER, ALBERT = "group_0_inner_layer_0", "model.encoder.albert_layer_groups.0.albert_layers.0"
OUT = f"{INNER}/self_attention_layer/attention_output"


@PAIRS.pair("albert", "keras-hub AlbertBackbone", "transformers AlbertModel, tanh GELU", layouts=(
    f"{OUT}/kernel | head dim out <-> {ALBERT}.attention.dense.weight | out (head dim)",
    f"{OUT}/bias | out <-> {ALBERT}.attention.dense.bias | out",
    "pooled_dense/kernel | in out <-> model.pooler.weight | out in",
    "pooled_dense/bias | out <-> model.pooler.bias | out",
    f"{INNER}/self_attention_layer_norm/gamma | width <-> {ALBERT}.attention.LayerNorm.weight | width",
    f"{INNER}/self_attention_layer_norm/beta | width <-> {ALBERT}.attention.LayerNorm.bias | width",
))  # fmt: skip
def _() -> Built:
    options = {**HF_TEXT, "embedding_size": 16, "hidden_act": "gelu_pytorch_tanh"}
    call = lambda m, x, types: tuple(m(x, token_type_ids=types).values())[:2]  # noqa: E731
    return of_keras(
        "AlbertBackbone",
        {**TEXT, "embedding_dim": 16},
        hugging_face("AlbertModel", "AlbertConfig", options, call),
        (TOKENS, TYPES),
        call=lambda x, types: {**masked(x), "segment_ids": types},
        output=lambda y: (y["sequence_output"], y["pooled_output"]),
    )


def text(
    name: str,
    jax: str,
    torch: str,
    options: dict[str, Any],
    theirs: dict[str, Any],
    *,
    how: str = "",
    layouts: tuple[str, ...] = (),
    disagreement: str = "",
    **more: Any,
) -> None:
    """Declare a pair whose input are tokens: a backbone, or a model with a head and the logits as its output.

    jax: names of the backbone, and of the model with a head if there is one.
    how: what `options` or `theirs` set, in words.
    """
    backbone, _, task = jax.partition(" ")

    def build() -> Built:
        config = re.sub("(LMHead)?Model$|ForCausalLM$", "Config", torch)
        select = (lambda module, x: module(x).logits) if task else None
        return of_keras(
            backbone, options, hugging_face(torch, config, theirs, select), TOKENS, call=masked, task=task, **more
        )

    about = {"layouts": layouts, "disagreement": disagreement}
    PAIRS.add(name, f"keras-hub {task or backbone}{how}", f"transformers {torch}", build, **about)


def layers(*lines: str) -> tuple[str, ...]:
    """Return lines for the layers, whose names are abbreviated."""
    return tuple(f"transformer_layer_{{n}}/{line.replace('<-> ', '<-> model.layers.{n}.')}" for line in lines)


# "self_attention" in the name of the first norm of a layer is nearer to "post_attention" than to "input".
NORM_SCALES = layers(
    "self_attention_layernorm/scale | width <-> input_layernorm.weight | width",
    "feedforward_layernorm/scale | width <-> post_attention_layernorm.weight | width",
)
NORMS = layers(
    "self_attention_layer_norm/gamma | width <-> input_layernorm.weight | width",
    "self_attention_layer_norm/beta | width <-> input_layernorm.bias | width",
    "feedforward_layer_norm/gamma | width <-> post_attention_layernorm.weight | width",
    "feedforward_layer_norm/beta | width <-> post_attention_layernorm.bias | width",
)
OF_DISTIL = {"vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 32}
text("distilbert", "DistilBertBackbone", "DistilBertModel", TEXT, OF_DISTIL)
OF_GPT2 = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": 48}
text("gpt2", "GPT2Backbone", "GPT2Model", TEXT, OF_GPT2)
text("gpt2_default_dtype", "GPT2Backbone", "GPT2Model", TEXT, OF_GPT2, how=", dtype float32", dtype=None)
text("gpt2_causal_lm", "GPT2Backbone GPT2CausalLM", "GPT2LMHeadModel", TEXT, OF_GPT2)
text("gpt_neox", "GPTNeoXBackbone", "GPTNeoXModel", TEXT, {**HF_TEXT, "hidden_act": "gelu_pytorch_tanh"}, layouts=NORMS)
OF_BLOOM = {"vocab_size": 60, "hidden_size": 32, "n_layer": 2, "n_head": 4}
# Of each head, the fused matrix of transformers has query, key and value in a row.
FUSED = tuple(
    f"transformer_layer_{{n}}/self_attention/{name}_dense/{line.format(part=part)}"
    for part, name in enumerate(("query", "key", "value"))
    for line in (
        "kernel | in head dim <-> model.h.{{n}}.self_attention.query_key_value.weight | (head qkv={part} dim) in",
        "bias | head dim <-> model.h.{{n}}.self_attention.query_key_value.bias | (head qkv={part} dim)",
    )
)
OURS_BLOOM = {**SIZES, "vocabulary_size": 60, "intermediate_dim": 128}
CONSTANT = (
    "the same function, but transformers rounds the constant of the GELU by tanh, the square root of 2/pi, to 8 digits "
    "(models/bloom/modeling_bloom.py, bloom_gelu_forward)"
)
text("bloom", "BloomBackbone", "BloomModel", OURS_BLOOM, OF_BLOOM, layouts=FUSED, disagreement=CONSTANT)
LLAMA = {
    "vocabulary_size": 60,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 32,
    "intermediate_dim": 48,
}
TIED = {**LLAMA, "tie_word_embeddings": True}
HF_LLAMA = {**HF_TEXT, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
OF_QWEN3 = {**TIED, "head_dim": 8, "sliding_window_size": None}
text("llama", "LlamaBackbone", "LlamaModel", TIED, HF_LLAMA, layouts=NORM_SCALES)
LM_SCALES = tuple(line.replace("<-> model.", "<-> model.model.") for line in NORM_SCALES)
text("llama_causal_lm", "LlamaBackbone LlamaCausalLM", "LlamaForCausalLM", LLAMA, HF_LLAMA, layouts=LM_SCALES)
text(
    "mistral_causal_lm",
    "MistralBackbone MistralCausalLM",
    "MistralForCausalLM",
    {**LLAMA, "sliding_window": 4},
    {**HF_LLAMA, "sliding_window": 4},
    layouts=LM_SCALES,
)
text("qwen2", "QwenBackbone", "Qwen2Model", LLAMA, HF_LLAMA, layouts=NORM_SCALES)
HF_QWEN3 = {**HF_LLAMA, "head_dim": 8}
EPS_OF_HEADS = (
    "the norms of queries and keys have the default eps of keras-hub's attention, 1e-5 (keras_hub/src/models/qwen3/"
    "qwen3_attention.py:42), because the decoder layer does not pass its own, 1e-6, which transformers has everywhere"
)
text("qwen3", "Qwen3Backbone", "Qwen3Model", OF_QWEN3, HF_QWEN3, layouts=NORM_SCALES, disagreement=EPS_OF_HEADS)
text(
    "qwen3_eps",
    "Qwen3Backbone",
    "Qwen3Model",
    {**OF_QWEN3, "layer_norm_epsilon": 1e-5},
    {**HF_QWEN3, "rms_norm_eps": 1e-5},
    how=", layer_norm_epsilon 1e-5",
    layouts=NORM_SCALES,
)
# The kernels of queries, keys and values have the axes (heads, in, dim), which no layer of Flax has.
GEMMA_LAYER = "model.layers.{n}"
GEMMA = (
    *(
        f"decoder_block_{{n}}/attention/{name}/kernel | head in dim"
        f" <-> {GEMMA_LAYER}.self_attn.{name[0]}_proj.weight | (head dim) in"
        for name in ("query", "key", "value")
    ),
    f"decoder_block_{{n}}/pre_attention_norm/scale | width <-> {GEMMA_LAYER}.input_layernorm.weight | width",
    f"decoder_block_{{n}}/pre_ffw_norm/scale | width <-> {GEMMA_LAYER}.post_attention_layernorm.weight | width",
)
text(
    "gemma",
    "GemmaBackbone",
    "GemmaModel",
    {**LLAMA, "hidden_dim": 64, "intermediate_dim": 96, "head_dim": 8},  # transformers rounds the root of other widths
    {**HF_LLAMA, "hidden_size": 64, "head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"},
    layouts=GEMMA,
)


def _resnet(block: str) -> Built:
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

    whole = ResNet(BasicBlock if block == "basic_block" else Bottleneck, [1, 2, 1, 1])
    module = TorchCall(IntermediateLayerGetter(whole, {"layer4": "out"}), lambda module, x: module(x)["out"])
    options = {
        "input_conv_filters": [64],
        "input_conv_kernel_sizes": [7],
        "stackwise_num_filters": [64, 128, 256, 512],
        "stackwise_num_blocks": [1, 2, 1, 1],
        "stackwise_num_strides": [1, 2, 2, 2],
        "block_type": block,
        "image_shape": (32, 32, 3),
    }
    return of_keras("ResNetBackbone", options, module, floats(2, 32, 32, 3), **MAP_AXES)


def _resnet_lines(convolutions: int, shortcuts: tuple[int, ...]) -> tuple[str, ...]:
    """Return lines for the norms of the blocks: their names in Keras have numbers, 0 for the one of the shortcut."""
    roles = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}
    names = [
        (f"stack{stack}_block{block}_{n}_bn", f"model.layer{stack + 1}.{block}.{f'bn{n}' if n else 'downsample.1'}")
        for stack, blocks in enumerate((1, 2, 1, 1))
        for block in range(blocks)
        for n in range(convolutions + 1)
        if n or (block == 0 and stack in shortcuts)
    ]
    return tuple(f"{own}/{a} | width <-> {other}.{b} | width" for own, other in names for a, b in roles.items())


RESNET, TORCH_RESNET = "keras-hub ResNetBackbone", "torchvision ResNet without its head"
PAIRS.add(
    "resnet_basic",
    f"{RESNET}, basic blocks",
    TORCH_RESNET,
    lambda: _resnet("basic_block"),
    layouts=_resnet_lines(2, (1, 2, 3)),
)
PAIRS.add(
    "resnet_bottleneck",
    f"{RESNET}, bottlenecks",
    TORCH_RESNET,
    lambda: _resnet("bottleneck_block"),
    layouts=_resnet_lines(3, (0, 1, 2, 3)),
)


@PAIRS.pair("vgg", "keras-hub VGGBackbone", "torchvision VGG features")
def _() -> Built:
    from torchvision.models.vgg import make_layers

    options = {"stackwise_num_repeats": [2, 2, 3], "stackwise_num_filters": [8, 16, 24], "image_shape": (16, 16, 3)}
    module = make_layers([8, 8, "M", 16, 16, "M", 24, 24, 24, "M"])
    return of_keras("VGGBackbone", options, module, IMAGES, **MAP_AXES)


OF_SWIN = {"image_shape": (32, 32, 3), "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
HF_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}


BLOCKS = [(stage, block) for stage in range(2) for block in range(2)]
SWIN_QKV = tuple(
    f"stage_{stage}/blocks_{block}/attn/attention_qkv/{ours} <-> {name}.{theirs}"
    for stage, block in BLOCKS
    for part in range(3)
    for name in [f"model.encoder.layers.{stage}.blocks.{block}.attention.{'qkv'[part]}_proj"]
    for ours, theirs in ((f"kernel | in (qkv={part} out)", "weight | out in"), (f"bias | (qkv={part} out)", "bias | out"))
)


@PAIRS.pair("swin", "keras-hub SwinTransformerBackbone", "transformers SwinModel without its pooler", layouts=SWIN_QKV)
def _() -> Built:
    module = hugging_face("SwinModel", "SwinConfig", {**HF_SWIN, "layer_norm_eps": 1e-5}, add_pooling_layer=False)
    return of_keras("SwinTransformerBackbone", OF_SWIN, module, floats(2, 32, 32, 3), **IMAGE_AXES)


@PAIRS.pair("swin_x_timm", "keras-hub SwinTransformerBackbone", "timm SwinTransformer without its head")
def _() -> Built:
    from timm.models.swin_transformer import SwinTransformer

    other = SwinTransformer(
        32, 4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4, num_classes=0, global_pool=""
    )
    module = TorchCall(other, lambda module, x: module(x).flatten(1, 2))
    return of_keras("SwinTransformerBackbone", OF_SWIN, module, floats(2, 32, 32, 3), **IMAGE_AXES)
