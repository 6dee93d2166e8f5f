"""The registry of checkpoint formats.

To add a format, write a module with a `FORMAT` in this folder (see `format.py`), import it here, and add it to one of the
tuples that make up `_MODULES`.  If the keys of a file fit several formats, one that `recognises` the file is preferred,
then the one that reads more of its arrays, then the one that is listed first.
"""

from parity.checkpoints.formats import (
    article_dino,
    article_multihead,
    article_rectangular,
    article_sincos,
    article_xray_rope,
    big_vision,
    big_vision_old,
    bonsai_dinov3,
    bonsai_vit,
    deit,
    dino,
    dinov2,
    dinov3,
    equimo,
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
    keras_hub,
    lucidrains,
    mae,
    openai_clip,
    scenic,
    timm,
    torch,
    torch_encoder,
    torchvision,
    tutorial,
)
from parity.checkpoints.formats.format import Evidence, Fields, Format
from vit_spec import InputError, nearest

__all__ = ["Evidence", "Fields", "Format", "formats", "get"]

_TWINS = (torch, jax)
_HUGGING_FACE = (hf_vit, hf_deit, hf_dinov2, hf_dinov2_reg, hf_dinov3, hf_siglip, hf_clip, hf_vit_mae)
_PYTORCH = (deit, dino, dinov2, dinov3, mae, openai_clip, torchvision, lucidrains, tutorial, torch_encoder)
_FLAX = (big_vision, google, scenic, big_vision_old, hf_flax, hf_flax_dinov2, hf_flax_clip)
_JAX_LIBRARIES = (bonsai_vit, bonsai_dinov3, equimo, keras_hub)
_ARTICLES = (article_xray_rope, article_multihead, article_sincos, article_rectangular, article_dino)
_MODULES = (timm, *_TWINS, *_HUGGING_FACE, *_PYTORCH, *_FLAX, *_JAX_LIBRARIES, *_ARTICLES)
_FORMATS: dict[str, Format] = {module.FORMAT.name: module.FORMAT for module in _MODULES}


def formats() -> list[str]:
    """Return the name of every format."""
    return list(_FORMATS)


def get(name: str) -> Format:
    """Return the format with a name such as "google"; "google:linen" also chooses its variant "linen".

    Raises:
        InputError: the format or the variant is unknown; the message suggests the nearest name.
    """
    format_name, _, variant = name.partition(":")
    if format_name not in _FORMATS:
        hint = nearest(format_name, _FORMATS) or f": give one of {', '.join(_FORMATS)}"
        raise InputError(f"unknown format {format_name!r}{hint}")
    return _FORMATS[format_name].with_variant(variant) if variant else _FORMATS[format_name]
