"""The registry of checkpoint formats.

To add a format, write a module with a `FORMAT` in this folder (see `format.py`) and list it in `_MODULES`.  If the keys of
a file fit two formats, the one listed first is taken, unless the other `recognises` the file.
"""

from parity.checkpoints.formats import (
    article_dino,
    article_multihead,
    article_rectangular,
    article_sincos,
    article_xray_rope,
    big_vision,
    big_vision_old,
    deit,
    dino,
    dinov2,
    dinov3,
    google,
    hf_clip,
    hf_deit,
    hf_dinov2,
    hf_dinov2_reg,
    hf_dinov3,
    hf_flax,
    hf_flax_clip,
    hf_flax_dinov2,
    hf_siglip,
    hf_vit,
    hf_vit_mae,
    jax,
    lucidrains,
    mae,
    openai_clip,
    scenic,
    timm,
    torch,
    torchvision,
    tutorial,
)
from parity.checkpoints.formats.format import Evidence, Fields, Format
from vit_spec import InputError, nearest

__all__ = ["Evidence", "Fields", "Format", "formats", "get"]

_TWINS = (torch, jax)
_HUGGING_FACE = (hf_vit, hf_deit, hf_dinov2, hf_dinov2_reg, hf_dinov3, hf_siglip, hf_clip, hf_vit_mae)
_PYTORCH = (deit, dino, dinov2, dinov3, mae, openai_clip, torchvision, lucidrains, tutorial)
_FLAX = (big_vision, google, scenic, big_vision_old, hf_flax, hf_flax_dinov2, hf_flax_clip)
_ARTICLES = (article_xray_rope, article_multihead, article_sincos, article_rectangular, article_dino)
_MODULES = (timm, *_TWINS, *_HUGGING_FACE, *_PYTORCH, *_FLAX, *_ARTICLES)
_FORMATS: dict[str, Format] = {module.FORMAT.name: module.FORMAT for module in _MODULES}


def formats() -> list[str]:
    """Return the name of every format."""
    return list(_FORMATS)


def get(name: str) -> Format:
    """Return the format with this name, "google", or with one of its variants chosen, "google:linen".

    Raises:
        InputError: an unknown name; suggests the nearest.
    """
    family, _, variant = name.partition(":")
    if family not in _FORMATS:
        hint = nearest(family, _FORMATS) or f": give one of {', '.join(_FORMATS)}"
        raise InputError(f"unknown format {family!r}{hint}")
    return _FORMATS[family].with_variant(variant) if variant else _FORMATS[family]
