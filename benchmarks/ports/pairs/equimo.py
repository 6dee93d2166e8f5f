"""Equimo (Equinox) and its counterparts in timm, torchvision, transformers and vit-pytorch, all installed from packages."""

from typing import Any

from benchmarks.ports.declaration import Built, Pairs, TorchCall, floats, of_equinox

PAIRS = Pairs("equimo", ("equimo",), ("timm", "torchvision", "transformers", "vit_pytorch"))

IMAGES = floats(2, 3, 16, 16)
FEATURES = floats(2, 9, 32)
MAPS = floats(2, 16, 8, 8)
VIT = {"img_size": 16, "in_channels": 3, "dim": 32, "patch_size": 4, "num_heads": 4, "depths": [2], "num_classes": 5}


def key() -> Any:
    """Return a key."""
    import jax

    return jax.random.key(0)


def vit(**options: Any) -> Any:
    """Return a ViT of Equimo."""
    from equimo.models.vit import VisionTransformer

    defaults = {"reg_tokens": 0, "act_layer": "exactgelu", "eps": 1e-6, "global_pool": "token"}
    return VisionTransformer(**{**VIT, **defaults, **options}, key=key())


def timm_vit(**options: Any) -> Any:
    """Return a ViT of timm."""
    from timm.models.vision_transformer import VisionTransformer

    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
    return VisionTransformer(**{**sizes, **options})


def tanh_gelu() -> Any:
    """Return PyTorch's GELU in the approximation by tanh."""
    import torch

    return torch.nn.GELU(approximate="tanh")


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vit": ({}, {}),
    "vit_layer_scale": ({"init_values": 1e-5}, {"init_values": 1e-5}),
    "vit_qk_norm": ({"qk_norm": True, "eps": 1e-5}, {"qk_norm": True, "norm_eps": 1e-5}),
    "vit_mean": ({"global_pool": "avg"}, {"global_pool": "avg", "fc_norm": False}),
    "vit_no_class_token": (
        {"global_pool": "avg", "class_token": False, "global_pos_embed_cls": False},
        {"global_pool": "avg", "class_token": False, "fc_norm": False},
    ),
    "vit_registers": (
        {"reg_tokens": 3, "global_pos_embed_reg": True},
        {"reg_tokens": 3},
    ),
    "vit_dinov2": (
        {"reg_tokens": 4, "init_values": 1e-5, "global_pos_embed_reg": True},
        {"reg_tokens": 4, "init_values": 1e-5, "no_embed_class": False},
    ),
    "vit_no_biases": ({"qkv_bias": False}, {"qkv_bias": False}),
    "vit_wide_mlp": ({"mlp_ratio": 3.0}, {"mlp_ratio": 3.0}),
}
for name, (ours, theirs) in VARIANTS.items():

    def build_vit(ours: dict[str, Any] = ours, theirs: dict[str, Any] = theirs) -> Built:
        """Return ViTs of Equimo and timm."""
        if "norm_eps" in theirs:
            from functools import partial

            import torch

            theirs = {**theirs, "norm_layer": partial(torch.nn.LayerNorm, eps=theirs["norm_eps"])}
            theirs.pop("norm_eps")
        return of_equinox(vit(**ours), timm_vit(**theirs), IMAGES)

    PAIRS.add(name, f"Equimo VisionTransformer {ours or ''}", f"timm VisionTransformer {theirs or ''}", build_vit)


@PAIRS.pair("vit_tanh_gelu", "Equimo VisionTransformer, act_layer gelu", "timm VisionTransformer, tanh GELU")
def _() -> Built:
    return of_equinox(vit(act_layer="gelu"), timm_vit(act_layer=tanh_gelu), IMAGES)


@PAIRS.pair("vit_x_torchvision", "Equimo VisionTransformer", "torchvision VisionTransformer")
def _() -> Built:
    from torchvision.models import VisionTransformer

    return of_equinox(vit(), VisionTransformer(16, 4, 2, 4, 32, 128, num_classes=5), IMAGES)


def _hugging_face(name: str, config: str, options: dict[str, Any], call: Any) -> Any:
    import transformers

    settings = getattr(transformers, config)(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=16,
        patch_size=4,
        attn_implementation="eager",
        **options,
    )
    return TorchCall(getattr(transformers, name)(settings), call)


@PAIRS.pair("vit_x_transformers", "Equimo VisionTransformer", "transformers ViTForImageClassification")
def _() -> Built:
    options = {"num_labels": 5, "layer_norm_eps": 1e-6}
    return of_equinox(
        vit(), _hugging_face("ViTForImageClassification", "ViTConfig", options, lambda module, x: module(x).logits), IMAGES
    )


@PAIRS.pair("dinov2_x_transformers", "Equimo VisionTransformer, DINOv2", "transformers Dinov2WithRegistersModel")
def _() -> Built:
    options = {"num_register_tokens": 4, "mlp_ratio": 4}
    module = _hugging_face(
        "Dinov2WithRegistersModel",
        "Dinov2WithRegistersConfig",
        options,
        lambda module, x: module(x).last_hidden_state[:, 0],
    )
    return of_equinox(vit(reg_tokens=4, init_values=1.0, num_classes=0, use_mask_token=True), module, IMAGES)


@PAIRS.pair(
    "vit_x_lucidrains",
    "Equimo VisionTransformer, no biases of queries, keys and values",
    "vit-pytorch ViT",
    layouts=("patch_embed/proj/weight | width c y x <-> to_patch_embedding.1.weight | width (y x c)",),
)
def _() -> Built:
    from vit_pytorch import ViT

    module = ViT(image_size=16, patch_size=4, num_classes=5, dim=32, depth=2, heads=4, dim_head=8, mlp_dim=128)
    return of_equinox(vit(eps=1e-5, qkv_bias=False), module, IMAGES)


@PAIRS.pair("attention_x_lucidrains", "Equimo Attention", "vit-pytorch Attention")
def _() -> Built:
    from equimo.layers.attention import Attention
    from vit_pytorch.vit import Attention as TorchAttention

    return of_equinox(Attention(32, 4, key=key(), qkv_bias=False), TorchAttention(32, 4, 8), FEATURES, call=with_key)


CONVNEXT = {"depths": [1, 1, 2, 1], "dims": [16, 24, 32, 40]}


def convnext(**options: Any) -> Any:
    """Return a ConvNeXt of Equimo."""
    from equimo.models.convnext import ConvNeXt

    return ConvNeXt(**CONVNEXT, num_classes=5, act_layer="exactgelu", key=key(), **options)


@PAIRS.pair("convnext", "Equimo ConvNeXt", "timm ConvNeXt")
def _() -> Built:
    from timm.models.convnext import ConvNeXt

    return of_equinox(convnext(), ConvNeXt(**CONVNEXT, num_classes=5, conv_mlp=True), floats(2, 3, 64, 64))


@PAIRS.pair("convnext_linear_mlp", "Equimo ConvNeXt", "timm ConvNeXt, with linear layers in the MLP")
def _() -> Built:
    from timm.models.convnext import ConvNeXt

    return of_equinox(convnext(), ConvNeXt(**CONVNEXT, num_classes=5), floats(2, 3, 64, 64))


@PAIRS.pair("convnext_x_transformers", "Equimo ConvNeXt", "transformers ConvNextForImageClassification, eps 1e-6")
def _() -> Built:
    import transformers

    config = transformers.ConvNextConfig(
        hidden_sizes=CONVNEXT["dims"], depths=CONVNEXT["depths"], num_labels=5, layer_norm_eps=1e-6
    )
    module = TorchCall(transformers.ConvNextForImageClassification(config), lambda module, x: module(x).logits)
    return of_equinox(convnext(), module, floats(2, 3, 64, 64))


@PAIRS.pair("convnext_x_torchvision", "Equimo ConvNeXt", "torchvision ConvNeXt")
def _() -> Built:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    dims, depths = [*CONVNEXT["dims"], None], CONVNEXT["depths"]
    settings = [CNBlockConfig(dims[n], dims[n + 1], depths[n]) for n in range(4)]
    return of_equinox(convnext(), ConvNeXt(settings, num_classes=5), floats(2, 3, 64, 64))


def with_key(module: Any, x: Any) -> Any:
    """Call a layer that needs a key."""
    return module(x, key())


@PAIRS.pair("attention", "Equimo Attention", "timm Attention")
def _() -> Built:
    from equimo.layers.attention import Attention
    from timm.layers import Attention as Other

    return of_equinox(Attention(32, 4, key=key()), Other(32, 4, qkv_bias=True), FEATURES, call=with_key)


@PAIRS.pair("attention_block", "Equimo AttentionBlock", "timm Block")
def _() -> Built:
    from equimo.layers.attention import AttentionBlock
    from timm.models.vision_transformer import Block

    block = AttentionBlock(32, 4, act_layer="exactgelu", eps=1e-6, key=key())
    return of_equinox(block, Block(32, 4, qkv_bias=True), FEATURES, call=with_key)


@PAIRS.pair("mlp", "Equimo Mlp", "timm Mlp")
def _() -> Built:
    from equimo.layers.ffn import Mlp
    from timm.layers import Mlp as Other

    return of_equinox(Mlp(32, hidden_dim=48, act_layer="exactgelu", key=key()), Other(32, 48), FEATURES, call=with_key)


@PAIRS.pair("swiglu", "Equimo SwiGlu", "timm SwiGLU", layouts=(
    "w1/weight | a b <-> fc1_g.weight | a b",
    "w2/weight | a b <-> fc1_x.weight | a b",
    "w3/weight | a b <-> fc2.weight | a b",
    "w1/bias | a <-> fc1_g.bias | a",
    "w2/bias | a <-> fc1_x.bias | a",
    "w3/bias | a <-> fc2.bias | a",
))  # fmt: skip
def _() -> Built:
    from equimo.layers.ffn import SwiGlu
    from timm.layers import SwiGLU

    return of_equinox(SwiGlu(32, hidden_dim=72, key=key()), SwiGLU(32, 48), FEATURES, call=with_key)


@PAIRS.pair("squeeze_excite", "Equimo SEModule", "timm SEModule")
def _() -> Built:
    from equimo.layers.squeeze_excite import SEModule
    from timm.layers import SEModule as Other

    return of_equinox(SEModule(16, rd_ratio=0.5, key=key()), Other(16, rd_ratio=0.5), MAPS)


@PAIRS.pair("effective_squeeze_excite", "Equimo EffectiveSEModule", "timm EffectiveSEModule")
def _() -> Built:
    from equimo.layers.squeeze_excite import EffectiveSEModule
    from timm.layers import EffectiveSEModule as Other

    return of_equinox(EffectiveSEModule(16, key=key()), Other(16), MAPS)


@PAIRS.pair("convnext_block", "Equimo ConvNeXtBlock", "timm ConvNeXtBlock")
def _() -> Built:
    from equimo.layers.convolution import ConvNeXtBlock
    from timm.models.convnext import ConvNeXtBlock as Other

    return of_equinox(ConvNeXtBlock(16, act_layer="exactgelu", key=key()), Other(16, conv_mlp=True), MAPS)


@PAIRS.pair("convnext_block_x_torchvision", "Equimo ConvNeXtBlock", "torchvision CNBlock")
def _() -> Built:
    from equimo.layers.convolution import ConvNeXtBlock
    from torchvision.models.convnext import CNBlock

    return of_equinox(ConvNeXtBlock(16, act_layer="exactgelu", key=key()), CNBlock(16, 1e-6, 0.0), MAPS)


@PAIRS.pair("layer_norm_2d", "Equimo LayerNorm2d", "timm LayerNorm2d")
def _() -> Built:
    from equimo.layers.norm import LayerNorm2d
    from timm.layers import LayerNorm2d as Other

    return of_equinox(LayerNorm2d(16, eps=1e-6), Other(16, eps=1e-6), MAPS)


@PAIRS.pair("rms_norm_2d", "Equimo RMSNorm2d", "timm RmsNorm2d")
def _() -> Built:
    from equimo.layers.norm import RMSNorm2d
    from timm.layers.norm import RmsNorm2d

    return of_equinox(RMSNorm2d(16, eps=1e-6), RmsNorm2d(16, eps=1e-6), MAPS)


@PAIRS.pair("patch_embedding", "Equimo PatchEmbedding", "timm PatchEmbed")
def _() -> Built:
    from equimo.layers.patch import PatchEmbedding
    from timm.layers import PatchEmbed

    return of_equinox(PatchEmbedding(3, 32, 4, img_size=16, key=key()), PatchEmbed(16, 4, 3, 32), IMAGES)


@PAIRS.pair("layer_scale", "Equimo LayerScale", "timm LayerScale2d")
def _() -> Built:
    from equimo.layers.norm import LayerScale
    from timm.layers.layer_scale import LayerScale2d

    return of_equinox(LayerScale(16, 0.1), LayerScale2d(16, 0.1), MAPS)
