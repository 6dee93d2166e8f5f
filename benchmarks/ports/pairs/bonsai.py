"""bonsai (jax-ml/bonsai): NNX ports of models of transformers, timm and torchvision, `--source bonsai=CLONE`."""

from typing import Any

from benchmarks.ports.declaration import Built, Pairs, TorchCall, floats, of_nnx, tokens

PAIRS = Pairs("bonsai", ("bonsai",), ("transformers", "timm", "torchvision"), needs=("bonsai",))

IMAGE_AXES = {"input_axes": "b y x c <-> b c y x"}


def rngs() -> Any:
    """Return the random keys of an NNX module."""
    from flax import nnx

    return nnx.Rngs(0)


def hugging_face(name: str, config: str, options: dict[str, Any], call: Any) -> Any:
    """Return a model of transformers."""
    import transformers

    settings = getattr(transformers, config)(**options)
    settings._attn_implementation = "eager"
    return TorchCall(getattr(transformers, name)(settings), call)


def logits(module: Any, *inputs: Any) -> Any:
    """Return the logits."""
    return module(*inputs).logits


def hidden(module: Any, *inputs: Any) -> Any:
    """Return the hidden states of the last layer."""
    return module(*inputs).last_hidden_state


def _convnext(eps: float, **given: Any) -> Built:
    from bonsai.models.convnext.modeling import ConvNeXt, ModelConfig

    model = ConvNeXt(ModelConfig((1, 1, 2, 1), (16, 24, 32, 40), 0.0, 5, layernorm_eps=eps), rngs=rngs())
    options = {"hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 2, 1], "num_labels": 5, **given}
    module = hugging_face("ConvNextForImageClassification", "ConvNextConfig", options, logits)
    return of_nnx(model, module, floats(2, 64, 64, 3), call=lambda m, x: m(x, rngs=None), **IMAGE_AXES)


PAIRS.add(
    "convnext",
    "bonsai ConvNeXt, layernorm_eps 1e-6",
    "transformers ConvNextForImageClassification, layer_norm_eps 1e-6",
    lambda: _convnext(1e-6, layer_norm_eps=1e-6),
)
PAIRS.add(
    "convnext_as_published",
    "bonsai ConvNeXt",
    "transformers ConvNextForImageClassification",
    lambda: _convnext(1e-12),
    disagreement="bonsai's LayerNorms all have the eps of the config, 1e-12 (bonsai/models/convnext/modeling.py:19); in "
    "transformers only the last one has it, and the others 1e-6 (models/convnext/modeling_convnext.py:75, 131 and 174)",
)


@PAIRS.pair("convnext_x_timm", "bonsai ConvNeXt, layernorm_eps 1e-6", "timm ConvNeXt")
def _() -> Built:
    from bonsai.models.convnext.modeling import ConvNeXt, ModelConfig
    from timm.models.convnext import ConvNeXt as Other

    model = ConvNeXt(ModelConfig((1, 1, 2, 1), (16, 24, 32, 40), 0.0, 5, layernorm_eps=1e-6), rngs=rngs())
    module = Other(depths=(1, 1, 2, 1), dims=(16, 24, 32, 40), num_classes=5)
    return of_nnx(model, module, floats(2, 64, 64, 3), call=lambda m, x: m(x, rngs=None), **IMAGE_AXES)


@PAIRS.pair("resnet", "bonsai ResNet", "transformers ResNetForImageClassification")
def _() -> Built:
    from bonsai.models.resnet.modeling import ModelConfig, ResNet

    model = ResNet(ModelConfig([1, 2, 1, 1], num_classes=5), rngs=rngs())
    module = hugging_face("ResNetForImageClassification", "ResNetConfig", {"depths": [1, 2, 1, 1], "num_labels": 5}, logits)
    return of_nnx(model, module, floats(2, 32, 32, 3), **IMAGE_AXES)


@PAIRS.pair("resnet_x_torchvision", "bonsai ResNet", "torchvision ResNet")
def _() -> Built:
    from bonsai.models.resnet.modeling import ModelConfig, ResNet
    from torchvision.models.resnet import Bottleneck
    from torchvision.models.resnet import ResNet as Other

    model = ResNet(ModelConfig([1, 2, 1, 1], num_classes=5), rngs=rngs())
    return of_nnx(model, Other(Bottleneck, [1, 2, 1, 1], 5), floats(2, 32, 32, 3), **IMAGE_AXES)


@PAIRS.pair("resnet_x_timm", "bonsai ResNet", "timm ResNet")
def _() -> Built:
    from bonsai.models.resnet.modeling import ModelConfig, ResNet
    from timm.models.resnet import Bottleneck
    from timm.models.resnet import ResNet as Other

    model = ResNet(ModelConfig([1, 2, 1, 1], num_classes=5), rngs=rngs())
    return of_nnx(model, Other(Bottleneck, (1, 2, 1, 1), 5), floats(2, 32, 32, 3), **IMAGE_AXES)


def _vit() -> Any:
    from bonsai.models.vit.modeling import ModelConfig, ViTClassificationModel

    return ViTClassificationModel(ModelConfig((16, 16), (4, 4), 3, 32, 0.0, 0.0, 4, 48, 1e-12, 2, 5), rngs=rngs())


VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}


@PAIRS.pair("vit", "bonsai ViTClassificationModel", "transformers ViTForImageClassification, tanh GELU")
def _() -> Built:
    options = {**VIT, "num_labels": 5, "hidden_act": "gelu_pytorch_tanh"}
    module = hugging_face("ViTForImageClassification", "ViTConfig", options, logits)
    return of_nnx(_vit(), module, floats(2, 16, 16, 3), call=lambda m, x: m(x, rngs=None), **IMAGE_AXES)


@PAIRS.pair(
    "vit_as_published",
    "bonsai ViTClassificationModel",
    "transformers ViTForImageClassification",
    disagreement="bonsai applies the GELU by tanh (bonsai/models/vit/modeling.py:115, jax.nn.gelu), and "
    "google/vit-base-patch16-224 the one by erf",
)
def _() -> Built:
    module = hugging_face("ViTForImageClassification", "ViTConfig", {**VIT, "num_labels": 5}, logits)
    return of_nnx(_vit(), module, floats(2, 16, 16, 3), call=lambda m, x: m(x, rngs=None), **IMAGE_AXES)


@PAIRS.pair(
    "dinov3",
    "bonsai Dinov3ViTModel",
    "transformers DINOv3ViTModel, tanh GELU",
    disagreement="the same function, but bonsai rounds queries and keys to bfloat16 for the rotation "
    "(bonsai/models/dinov3/modeling.py, apply_rotary_pos_emb), and transformers computes it in float32",
)
def _() -> Built:
    from bonsai.models.dinov3.modeling import Dinov3ViTModel, ModelConfig

    config = ModelConfig((4, 4), 32, 48, 2, 4, image_size=16)
    options = {**VIT, "num_register_tokens": 4, "hidden_act": "gelu_pytorch_tanh"}
    module = hugging_face("DINOv3ViTModel", "DINOv3ViTConfig", options, hidden)
    return of_nnx(Dinov3ViTModel(config, rngs()), module, floats(2, 3, 16, 16), call=lambda m, x: m(x)["last_hidden_state"])


def _mbconv(stride: int, expand: int) -> Built:
    from functools import partial

    from bonsai.models.efficientnet.modeling import MBConv, ModelConfig
    from timm.layers import SqueezeExcite
    from timm.models._efficientnet_blocks import DepthwiseSeparableConv, InvertedResidual
    from torch.nn import SiLU

    model = MBConv(16, 16, 3, stride, expand, 0.25, 1, cfg=ModelConfig.b0(), rngs=rngs())
    squeeze = partial(SqueezeExcite, rd_channels=4, gate_layer="sigmoid", act_layer=SiLU)
    if expand == 1:
        module: Any = DepthwiseSeparableConv(16, 16, 3, stride, act_layer=SiLU, se_layer=squeeze)
    else:
        module = InvertedResidual(16, 16, 3, stride, exp_ratio=expand, act_layer=SiLU, se_layer=squeeze)
    axes = {"output_axes": "b y x c <-> b c y x", **IMAGE_AXES}
    return of_nnx(model, module, floats(2, 8, 8, 16), call=lambda m, x: m(x, training=False), **axes)


PAIRS.add("mbconv", "bonsai MBConv of EfficientNet", "timm InvertedResidual", lambda: _mbconv(1, 4))
PAIRS.add("mbconv_strided", "bonsai MBConv of EfficientNet, strided", "timm InvertedResidual", lambda: _mbconv(2, 4))
PAIRS.add("mbconv_separable", "bonsai MBConv of EfficientNet", "timm DepthwiseSeparableConv", lambda: _mbconv(1, 1))


@PAIRS.pair("vgg19", "bonsai ConvBlock of VGG, three", "torchvision VGG features")
def _() -> Built:
    from bonsai.models.vgg19.modeling import ConvBlock
    from flax import nnx
    from torchvision.models.vgg import make_layers

    blocks = nnx.Sequential(
        ConvBlock(2, 3, 8, rngs=rngs()), ConvBlock(2, 8, 16, rngs=rngs()), ConvBlock(3, 16, 24, rngs=rngs())
    )
    module = make_layers([8, 8, "M", 16, 16, "M", 24, 24, 24, "M"])
    return of_nnx(blocks, module, floats(2, 16, 16, 3), output_axes="b y x c <-> b c y x", **IMAGE_AXES)


@PAIRS.pair(
    "densenet121",
    "bonsai DenseNet",
    "torchvision DenseNet",
    disagreement="bonsai pads the strided stem and its pooling by SAME (bonsai/models/densenet121/modeling.py:103-106), "
    "as Keras does, and torchvision by 3 and by 1",
)
def _() -> Built:
    from bonsai.models.densenet121.modeling import DenseNet, ModelConfig
    from torchvision.models.densenet import DenseNet as Other

    model = DenseNet(ModelConfig(5, [2, 2], 8), rngs=rngs())
    return of_nnx(model, Other(8, (2, 2), 16, num_classes=5), floats(2, 32, 32, 3), **IMAGE_AXES)


@PAIRS.pair("densenet_block", "bonsai DenseBlock and TransitionLayer", "torchvision _DenseBlock and _Transition")
def _() -> Built:
    import torch
    from bonsai.models.densenet121.modeling import DenseBlock, TransitionLayer
    from flax import nnx
    from torchvision.models.densenet import _DenseBlock, _Transition

    model = nnx.Sequential(DenseBlock(2, 16, 8, rngs=rngs()), TransitionLayer(32, 16, rngs=rngs()))
    module = torch.nn.Sequential(_DenseBlock(2, 16, 4, 8, 0.0), _Transition(32, 16))
    return of_nnx(model, module, floats(2, 8, 8, 16), output_axes="b y x c <-> b c y x", **IMAGE_AXES)


UMT5 = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}


@PAIRS.pair("umt5_encoder", "bonsai UMT5EncoderModel", "transformers UMT5EncoderModel")
def _() -> Built:
    import jax.numpy as jnp
    from bonsai.models.umt5.modeling import ModelConfig, UMT5EncoderModel

    model = UMT5EncoderModel(ModelConfig(**UMT5, dropout_rate=0.0), rngs=rngs())
    module = hugging_face("UMT5EncoderModel", "UMT5Config", UMT5, hidden)
    call = lambda m, x: m(x, jnp.ones_like(x))  # noqa: E731
    return of_nnx(model, module, tokens(2, 9, high=60), call=call)


@PAIRS.pair(
    "whisper_encoder",
    "bonsai WhisperEncoder",
    "transformers WhisperEncoder, whose keys have no bias",
    layouts=("layers/{n}/self_attn/key/bias | head dim <-> 0",),
    disagreement="bonsai applies the GELU by tanh (bonsai/models/whisper/modeling.py:168), and transformers the one by erf",
)
def _() -> Built:
    import dataclasses

    import transformers
    from bonsai.models.whisper.modeling import ModelConfig, WhisperEncoder
    from transformers.models.whisper.modeling_whisper import WhisperEncoder as Other

    sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    more = {"num_mel_bins": 10, "max_source_positions": 12}
    config = dataclasses.replace(ModelConfig.whisper_tiny(), **sizes, **more)
    module = TorchCall(Other(transformers.WhisperConfig(**sizes, **more, attn_implementation="eager")), hidden)
    built = of_nnx(WhisperEncoder(config, rngs=rngs()), module, floats(2, 24, 10), input_axes="b t c <-> b c t")
    for layer in built.params.layers:
        layer.self_attn.key.bias[...] = 0.0 * layer.self_attn.key.bias[...]
    return built


VJEPA2 = {
    "crop_size": 16,
    "frames_per_clip": 4,
    "hidden_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "mlp_ratio": 2.0,
    "pred_hidden_size": 48,
    "pred_num_attention_heads": 2,
    "pred_num_hidden_layers": 2,
    "patch_size": 4,
    "tubelet_size": 2,
    "in_chans": 3,
    "num_pooler_layers": 1,
}


@PAIRS.pair("vjepa2", "bonsai VJEPA2Encoder", "transformers VJEPA2Encoder")
def _() -> Built:
    from bonsai.models.vjepa2.modeling import ModelConfig, VJEPA2Model

    module = TorchCall(hugging_face("VJEPA2Model", "VJEPA2Config", VJEPA2, hidden).model.encoder, hidden)
    model = VJEPA2Model(ModelConfig(**VJEPA2), rngs())
    return of_nnx(model.encoder, module, floats(1, 4, 16, 16, 3), input_axes="b t y x c <-> b t c y x")


@PAIRS.pair("qwen3", "bonsai Qwen3", "transformers Qwen3ForCausalLM")
def _() -> Built:
    import jax.numpy as jnp
    from bonsai.models.qwen3.modeling import ModelConfig, Qwen3, init_cache

    config = ModelConfig(2, 60, 32, 48, 4, 8, 2, 10000, 1.0, 1e4, 1e-6, False)
    options = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},  # bonsai ignores that of its config
        "tie_word_embeddings": False,
    }
    module = hugging_face("Qwen3ForCausalLM", "Qwen3Config", options, logits)
    call = lambda m, x: m(x, cache=init_cache(config, 2, 9, 0, jnp.float64), segment_ids=jnp.ones_like(x))  # noqa: E731
    return of_nnx(Qwen3(config, rngs=rngs()), module, tokens(2, 9, high=60), call=call)
