"""Golden files of timm, whose parameter names are those of the PyTorch twin."""

from functools import partial
from typing import Any

import timm
import torch
from timm.layers import LayerNorm, SwiGLUPacked, build_sincos2d_pos_embed, resample_abs_pos_embed
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from tests.goldens.golden import Golden
from tests.goldens.peers import Outputs, State, case, float64, golden, merge_projections, rename_keys, tiny_config
from vit_spec import ViTConfig


def vit(name: str, config: ViTConfig, size: tuple[int, int] | None = None, tokens: str = "norm", **options: Any) -> Golden:
    """Return the golden file of a `VisionTransformer`.

    tokens: the twins' name of the output of `forward_features`.
    options: timm's arguments.
    """
    with float64():
        model = VisionTransformer(**common(config), **options)
        return golden(name, model, config, dict, partial(run, tokens), peer=f"timm {timm.__version__}", size=size)


def common(config: ViTConfig) -> dict[str, Any]:
    """Return the timm arguments that correspond to fields of the config."""
    return {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.in_channels,
        "num_classes": config.num_classes,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": config.mlp_dim / config.width * (2 if config.mlp.activation == "swiglu" else 1),
    }


def run(tokens: str, model: Any, images: Tensor) -> Outputs:
    """Return the logits, and the features under the name `tokens`."""
    return {"logits": model(images), tokens: model.forward_features(images)}


@case
def timm_plain() -> Golden:
    """The plain model on patches that are not square, and five channels."""
    return vit("timm_plain", tiny_config(image_size=(8, 24), patch_size=(4, 8), in_channels=5))


@case
def timm_mean_fc_norm() -> Golden:
    """The mean of the patches without the class token, and the norm after it."""
    config = tiny_config(head={"pool": "mean"}, norms={"after_blocks": False, "after_pool": True})
    return vit("timm_mean_fc_norm", config, tokens="blocks.1", global_pool="avg")


@case
def timm_resized() -> Golden:
    """Positions resampled to fewer rows and more columns: bicubic with antialiasing."""
    config = tiny_config(image_size=(20, 12))
    return vit("timm_resized", config, size=(12, 28), dynamic_img_size=True)


@case
def timm_resized_bilinear() -> Golden:
    """The resampling of positions in timm's loader of Google's files: bilinear without antialiasing."""
    config = tiny_config(image_size=(20, 12), resampling={"kernel": "bilinear", "antialias": False})
    size = (12, 28)

    def resized(model: Any, images: Tensor) -> Outputs:
        larger = VisionTransformer(**{**common(config), "img_size": size}).eval()
        options = {"new_size": [3, 7], "old_size": [5, 3], "interpolation": "bilinear", "antialias": False}
        positions = resample_abs_pos_embed(model.pos_embed, **options)
        larger.load_state_dict({**model.state_dict(), "pos_embed": positions})
        return run("norm", larger, images)

    with float64():
        model = VisionTransformer(**common(config))
        name, peer = "timm_resized_bilinear", f"timm {timm.__version__}"
        return golden(name, model, config, dict, resized, peer=peer, size=size)


@case
def timm_deit3_registers() -> Golden:
    """DeiT III and DINOv2 as timm has them: layer scale, registers, and positions of the patches alone."""
    config = tiny_config(tokens={"registers": 2}, positions={"covers": "none"}, norms={"layer_scale": 1e-5})
    return vit("timm_deit3_registers", config, init_values=1e-5, no_embed_class=True, reg_tokens=2)


@case
def timm_swiglu() -> Golden:
    """DINOv2's giant: gated MLPs, the gate in the first half of the rows."""
    return vit("timm_swiglu", tiny_config(mlp={"activation": "swiglu"}), mlp_layer=SwiGLUPacked, act_layer="silu")


@case
def timm_clip() -> Golden:
    """CLIP: a norm before the blocks, patches without a bias, x sigmoid(1.702 x), and another eps."""
    config = tiny_config(
        tokens={"patch_bias": False}, norms={"eps": 1e-5, "before_blocks": True}, mlp={"activation": "quick_gelu"}
    )
    options = {"pre_norm": True, "norm_layer": partial(LayerNorm, eps=1e-5), "act_layer": "quick_gelu"}
    return vit("timm_clip", config, **options)


@case
def timm_siglip() -> Golden:
    """SigLIP: no class token, a learned query that attends to the patches, tanh GELU, features without a classifier."""
    config = tiny_config(
        num_classes=0, tokens={"class_token": False}, head={"pool": "attention"}, mlp={"activation": "gelu_tanh"}
    )
    return vit("timm_siglip", config, class_token=False, global_pool="map", act_layer="gelu_tanh")


@case
def timm_registers_covered() -> Golden:
    """Registers that have positions of their own, and attention pooling over the patches only."""
    config = tiny_config(tokens={"class_token": False, "registers": 2}, head={"pool": "attention"})
    return vit("timm_registers_covered", config, class_token=False, reg_tokens=2, global_pool="map")


@case
def timm_qk_norm() -> Golden:
    """Normalized queries and keys, from a projection without a bias."""
    config = tiny_config(attention={"qk_norm": True, "qkv_bias": "none"})
    return vit("timm_qk_norm", config, qk_norm=True, qkv_bias=False)


@case
def timm_padded_tokens() -> Golden:
    """The classifier on every token; images padded to whole patches; no positions; ReLU."""
    config = tiny_config(
        tokens={"class_token": False, "pad": True},
        positions={"kind": "none"},
        mlp={"activation": "relu"},
        head={"pool": "none"},
    )
    options = {"class_token": False, "global_pool": "", "pos_embed": "none", "act_layer": "relu"}
    dynamic = {"dynamic_img_size": True, "dynamic_img_pad": True}
    return vit("timm_padded_tokens", config, size=(10, 23), **options, **dynamic)


@case
def timm_sincos() -> Golden:
    """timm's own order of a fixed 2-D table, for patches only."""
    config = tiny_config(positions={"kind": "fixed", "table": "sincos_2d_timm", "covers": "none"})

    def rename(state: State) -> State:
        return rename_keys(state, {"^pos_embed$": None})

    with float64():
        model = VisionTransformer(**common(config), no_embed_class=True)
        table = build_sincos2d_pos_embed(list(config.grid), config.width, dtype=torch.float64)
        model.pos_embed = torch.nn.Parameter(table[None], requires_grad=False)
        run_ = partial(run, "norm")
        return golden("timm_sincos", model, config, rename, run_, peer=f"timm {timm.__version__}")


@case
def timm_deit_distilled() -> Golden:
    """DeiT's second token and second head: at inference, the mean of the two."""
    config = tiny_config(tokens={"distillation": True})
    with float64():
        model, run_ = VisionTransformerDistilled(**common(config)), partial(run, "norm")
        return golden("timm_deit_distilled", model, config, dict, run_, peer=f"timm {timm.__version__}")


def dinov3(name: str, config: ViTConfig, **options: Any) -> Golden:
    """Return the golden file of an `Eva` with DINOv3's rotary positions, run on images of another size than its own."""

    def rename(state: State) -> State:
        state = rename_keys(state, {r"gamma_(\d)$": r"ls\1.gamma"})
        return merge_projections(state, ("fc1_g", "fc1_x"), "fc1") if config.mlp.activation == "swiglu" else state

    with float64():
        model = Eva(
            **{**common(config), "mlp_ratio": config.mlp_dim / config.width},
            **options,
            num_reg_tokens=config.tokens.registers,
            use_abs_pos_emb=False,
            use_rot_pos_emb=True,
            rope_type="dinov3",
            rope_temperature=config.positions.rotary_base,
            rope_rotate_half=True,
            norm_layer=partial(LayerNorm, eps=1e-5),
            init_values=1e-5,
            use_fc_norm=False,
            dynamic_img_size=True,
        )
        run_, size = partial(run, "norm"), (20, 16)
        return golden(name, model, config, rename, run_, peer=f"timm {timm.__version__}", size=size)


DINOV3 = tiny_config(
    width=16,  # heads of 8: two frequencies for rows and two for columns
    num_heads=2,
    tokens={"registers": 2},
    positions={"kind": "none", "rotary": "dinov3", "rotary_base": 100.0},
    norms={"eps": 1e-5, "layer_scale": 1e-5},
)


@case
def timm_dinov3() -> Golden:
    """timm's DINOv3: rotary positions, no bias of queries, keys and values, the mean of the patches after the norm."""
    config = DINOV3.replace(attention={"qkv_bias": "none"}, head={"pool": "mean"})
    return dinov3("timm_dinov3", config, qkv_bias=False, global_pool="avg")


@case
def timm_dinov3_gated() -> Golden:
    """Its gated form, with biases of queries and values, and the class token."""
    config = DINOV3.replace(attention={"qkv_bias": "qv"}, mlp={"activation": "swiglu"})
    options = {"qkv_bias": True, "global_pool": "token", "swiglu_mlp": True, "swiglu_align_to": 2}
    return dinov3("timm_dinov3_gated", config, **options)
