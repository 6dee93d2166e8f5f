"""A hypothesis strategy that draws random configs, for tests of properties that every model must have."""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

from hypothesis import strategies as st

from vit_spec import Attention, Head, Mlp, Norms, Positions, Resampling, Tokens, ViTConfig
from vit_spec.parts import Activation

RESAMPLING: dict[str, dict[str, Any]] = {
    "timm": {"kernel": "bicubic", "antialias": True},
    "timm npz, flexivit": {"kernel": "bilinear", "antialias": False},
    "Hugging Face, MAE, DeiT": {"kernel": "bicubic", "antialias": False},
    "DINO, DINOv2": {"kernel": "bicubic", "antialias": False, "offset": 0.1},
    "SigLIP 2 naflex": {"kernel": "bilinear", "antialias": True},
    "torchvision": {"kernel": "bicubic", "antialias": False, "align_corners": True},
    "big_vision": {"kernel": "bilinear", "antialias": False, "align_corners": True},
    "timm naflex": {"kernel": "bicubic", "antialias": True, "square": True},
}

ROTARY = ("none", "axial", "dinov3", "eva", "rope_vit", "mixed")


@st.composite
def configs(draw: st.DrawFn) -> ViTConfig:
    """Draw any config of a few thousand parameters."""
    return config_of_choices(lambda *values: draw(st.sampled_from(values)))


def config_of_choices(one: Callable[..., Any]) -> ViTConfig:
    """Return the config in which `one(*values)` chooses a value of each option."""
    flag = partial(one, True, False)
    heads, dim, patch, class_token = one(1, 2, 3), one(4, 8), (one(2, 3), one(2, 4)), flag()
    pool = one("mean", "attention", "none", *(["token", "token_mean"] if class_token else []))
    kind, proj, value_skip = one("learned", "fixed", "none"), flag(), flag()
    covers = one("all", "none", *(["class"] if class_token else []))
    factorized = kind == "learned" and covers == "none" and flag()
    laws = ("normal(0.02)", "uniform(0, 1)") if kind == "learned" else ()
    pads, order, rotary = one("refuse", "pad", "crop"), one("pre", "post", "res_post", "parallel"), one(*ROTARY)
    layer_scale = one(None, 0.1) if order != "res_post" else None
    norm_kind, relative = one("layer", "rms"), one("none", "none", "table", "mlp")
    has_free_head_dim = proj and not value_skip and flag()  # num_heads * head_dim may differ from width
    return ViTConfig(
        image_size=(patch[0] * one(1, 3), patch[1] * one(2, 3)),
        patch_size=patch,
        in_channels=one(1, 3, 5),
        width=one(8, 12) if has_free_head_dim else heads * dim,
        depth=one(1, 2, 3),
        num_heads=heads,
        mlp_dim=one(5, 16),
        num_classes=one(0, 1, 7),
        tokens=Tokens(
            class_token=class_token,
            registers=one(0, 2),
            distillation=class_token and pool == "token" and flag(),
            patch_bias=flag(),
            pad=pads == "pad",
            crop=pads == "crop",
        ),
        positions=Positions(
            kind=kind,
            table=one(*([] if factorized else ["sincos_1d"]), *laws),
            covers=covers,
            factorized=factorized,
            rotary=rotary,
            rotary_base=one(100.0, 10000.0),
            rotary_start=one(0.0, 1.0) if rotary in ("eva", "rope_vit") else 0.0,
            rotary_grid=one(None, (3, 5)) if rotary in ("eva", "rope_vit") else None,
            relative=relative,
            relative_dim=5 if relative == "mlp" else None,
            relative_shared=relative != "none" and flag(),
        ),
        resampling=Resampling(**RESAMPLING[one(*RESAMPLING)]),
        attention=Attention(
            head_dim=dim if has_free_head_dim else None,
            qkv_bias=one("qkv", "qv", "none"),
            proj=proj,
            proj_bias=flag(),
            scale=one(None, 0.3),
            qk_norm=flag(),
            out_norm=flag(),
            value_skip=value_skip,
        ),
        mlp=Mlp(
            activation=one(*get_args(Activation)),
            bias=flag(),
            norm=flag(),
        ),
        norms=Norms(
            kind=norm_kind,
            bias=norm_kind == "layer" and flag(),
            eps=one(1e-12, 1e-6, 1e-5),
            order=order,
            after_patches=flag(),
            before_blocks=flag(),
            after_blocks=flag(),
            after_pool=flag(),
            shared_norm=order != "parallel" and flag(),
            layer_scale=layer_scale,
            mlp_layer_scale=layer_scale is None or order == "parallel" or flag(),
        ),
        head=Head(
            pool=pool,
            pool_prefix=pool in ("mean", "attention") and flag(),
            pool_heads=one(None, 1, 2) if pool == "attention" else None,
            hidden=one(None, 6),
            bias=flag(),
        ),
    )
