"""jax-models (DarshanDeshpande/jax-models), `--source jax_models=CLONE`, and transformers, timm and torchvision."""

from functools import partial
from typing import Any

from benchmarks.ports.declaration import Built, Pairs, TorchCall, floats, of_linen, perturbed

PAIRS = Pairs("jax_models", ("jax_models",), ("transformers", "timm", "torchvision"), needs=("jax_models",))


AXES = {"input_axes": "b y x c <-> b c y x"}


def tanh_gelu() -> Any:
    """Return the GELU by tanh, as the class that builds it."""
    import torch

    return partial(torch.nn.GELU, approximate="tanh")


def _swin(shift: bool, downsample: bool) -> Built:
    import transformers
    from jax_models.models.swin_transformer import SwinLayer
    from transformers.models.swin.modeling_swin import SwinPatchMerging, SwinStage

    model = SwinLayer((8, 8), 16, 4, 4, 2, True, 0.0, 0.0, [0.0, 0.0], 2 if shift else 1, downsample, deterministic=True)
    config = transformers.SwinConfig(
        embed_dim=16, window_size=4, mlp_ratio=2.0, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-5, drop_path_rate=0.0
    )
    config._attn_implementation = "eager"
    stage = SwinStage(config, 16, (8, 8), 2 if shift else 1, 4, [0.0, 0.0], SwinPatchMerging if downsample else None)
    module = TorchCall(stage, lambda module, x: module(x, (8, 8))[0])
    tokens = floats(2, 64, 16)
    return _with_constants(model, module, tokens)


def _with_constants(model: Any, module: Any, inputs: Any, **options: Any) -> Built:
    """Return a pair whose linen module has constants besides its parameters: masks, and indices of positions."""
    import jax

    variables = dict(model.init(jax.random.key(0), inputs))
    constants = {name: value for name, value in variables.items() if name != "params"}

    def apply(variables: Any, x: Any) -> Any:
        with jax.ensure_compile_time_eval():  # because the whole Swin reads its drop path rates by item()
            return model.apply({**constants, **variables}, x)

    return Built(apply, {"params": perturbed(variables["params"])}, module, inputs, options)


OURS, THEIRS = "jax-models SwinLayer", "transformers SwinStage, tanh GELU"
PAIRS.add("swin_layer", f"{OURS}, depth 2", THEIRS, lambda: _swin(True, False))
PAIRS.add("swin_layer_merging", f"{OURS}, depth 2, with merging", THEIRS, lambda: _swin(True, True))
PAIRS.add("swin_layer_unshifted", f"{OURS}, depth 1", THEIRS, lambda: _swin(False, False))


@PAIRS.pair("swin", "jax-models SwinTransformer", "transformers SwinForImageClassification, tanh GELU")
def _() -> Built:
    import transformers
    from jax_models.models.swin_transformer import SwinTransformer

    sizes = {"window_size": 4, "mlp_ratio": 2}
    model = SwinTransformer(
        emb_dim=16, depths=(2, 2), num_heads=(2, 4), **sizes, drop_path=0.0, num_classes=5, deterministic=True
    )
    options = {**sizes, "depths": [2, 2], "num_heads": [2, 4], "hidden_act": "gelu_pytorch_tanh"}
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, **options, layer_norm_eps=1e-5, num_labels=5
    )
    config._attn_implementation = "eager"
    module = TorchCall(transformers.SwinForImageClassification(config), lambda module, x: module(x).logits)
    return _with_constants(model, module, floats(2, 32, 32, 3), **AXES)


@PAIRS.pair("convnext_x_timm", "jax-models ConvNeXt", "timm ConvNeXt, tanh GELU")
def _() -> Built:
    from jax_models.models.convnext import ConvNeXt
    from timm.models.convnext import ConvNeXt as Other

    model = ConvNeXt((1, 1, 2, 1), (16, 24, 32, 40), num_classes=5, deterministic=True)
    module = Other(depths=(1, 1, 2, 1), dims=(16, 24, 32, 40), num_classes=5, act_layer="gelu_tanh")
    return of_linen(model, module, floats(2, 64, 64, 3), **AXES)


@PAIRS.pair("convnext", "jax-models ConvNeXt", "transformers ConvNextForImageClassification, tanh GELU")
def _() -> Built:
    import transformers
    from jax_models.models.convnext import ConvNeXt

    model = ConvNeXt((1, 1, 2, 1), (16, 24, 32, 40), num_classes=5, deterministic=True)
    sizes = {"depths": [1, 1, 2, 1], "hidden_sizes": [16, 24, 32, 40]}
    config = transformers.ConvNextConfig(**sizes, num_labels=5, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6)
    module = TorchCall(transformers.ConvNextForImageClassification(config), lambda module, x: module(x).logits)
    return of_linen(model, module, floats(2, 64, 64, 3), **AXES)


@PAIRS.pair("cait", "jax-models CaiT", "timm Cait, tanh GELU")
def _() -> Built:
    from jax_models.models.cait import CaiT
    from timm.models.cait import Cait as Other

    model = CaiT(4, 32, 2, 4, mlp_ratio=2.0, mlp_ratio_clstk=2.0, num_classes=5, deterministic=True)
    module = Other(
        16, 4, num_classes=5, embed_dim=32, depth=2, num_heads=4, mlp_ratio=2.0, mlp_ratio_token_only=2.0,
        act_layer=tanh_gelu(),
    )  # fmt: skip
    return of_linen(model, module, floats(2, 16, 16, 3), **AXES)


SEGFORMER_WIDTHS = (8, 16, 24, 32)


@PAIRS.pair(
    "segformer_encoder",
    "jax-models MixTransformer",
    "transformers SegformerModel, tanh GELU",
    disagreement="where keys and values are reduced, jax-models transposes the tokens to (channels, tokens) before it "
    "reshapes them to (height, width, channels) (jax_models/models/segformer.py, EfficientSelfAttention), and its norms "
    "have the eps 1e-6 everywhere",
    layouts=tuple(
        f"Block_{n}/EfficientSelfAttention_0/Dense_{dense}/{kernel} <-> "
        f"model.stages.{n}.blocks.0.attention.{name}_proj.{weight}"
        for n, width in enumerate(SEGFORMER_WIDTHS)
        for dense, name, out in (
            (0, "q", "out"),
            (1, "k", f"(kv=0 out:{width})"),
            (1, "v", f"(kv=1 out:{width})"),
            (2, "o", "out"),
        )
        for kernel, weight in ((f"kernel | in {out}", "weight | out in"), (f"bias | {out}", "bias | out"))
    ),
)
def _() -> Built:
    import transformers
    from jax_models.models.segformer import MixTransformer

    sizes = {"depths": [1, 1, 1, 1], "sr_ratios": [2, 2, 1, 1]}
    model = MixTransformer(emb_dims=SEGFORMER_WIDTHS, num_heads=(1, 2, 2, 4), **sizes, deterministic=True)
    config = transformers.SegformerConfig(
        hidden_sizes=list(SEGFORMER_WIDTHS), num_attention_heads=[1, 2, 2, 4], **sizes, hidden_act="gelu_pytorch_tanh"
    )
    module = TorchCall(transformers.SegformerModel(config), lambda module, x: module(x).last_hidden_state)
    built = _with_constants(model, module, floats(1, 64, 64, 3), output_axes="b y x c <-> b c y x", **AXES)
    return built._replace(flax_apply=lambda variables, x: built.flax_apply(variables, x)[-1])
