"""The registry of checkpoint formats.

To add a format, write a module with a `FORMAT` in this folder (see `format.py`), import it here, and add it to one of the
tuples that make up `_MODULES`.  If the keys of a file fit several formats, one that `recognises` the file is preferred,
then the one that reads more of its arrays, then the one that is listed first.

Formats that users define are registered while a program runs.  A file that is written in one of them contains its table and
names its version, as in "mine@1f0c5a9e", so that it stays readable, whatever the file of the format says later.
"""

from collections.abc import Iterator
from contextlib import contextmanager

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
    hf_beit,
    hf_clip,
    hf_data2vec,
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
    timm_naflex,
    torch,
    torch_encoder,
    torchvision,
    tutorial,
)
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.format import Format
from vit_spec import InputError, nearest

__all__ = ["OWN", "Evidence", "Fields", "Format", "add_version", "formats", "get", "register", "registered", "revision"]

OWN = ("torch", "jax")  # the formats of the twins, which no other library has

_TWINS = (torch, jax)
_HUGGING_FACE = (
    *(hf_vit, hf_deit, hf_dinov2, hf_dinov2_reg, hf_dinov3, hf_siglip, hf_clip, hf_vit_mae),
    *(hf_beit, hf_data2vec),
)
_PYTORCH = (deit, dino, dinov2, dinov3, mae, openai_clip, torchvision, lucidrains, tutorial, torch_encoder)
_FLAX = (big_vision, google, scenic, big_vision_old, hf_flax, hf_flax_dinov2, hf_flax_clip)
_JAX_LIBRARIES = (bonsai_vit, bonsai_dinov3, equimo, keras_hub)
_ARTICLES = (article_xray_rope, article_multihead, article_sincos, article_rectangular, article_dino)
_MODULES = (timm, timm_naflex, *_TWINS, *_HUGGING_FACE, *_PYTORCH, *_FLAX, *_JAX_LIBRARIES, *_ARTICLES)
_FORMATS: dict[str, Format] = {module.FORMAT.name: module.FORMAT for module in _MODULES}


_DEFINED: dict[str, Format] = {}  # the formats that users registered, by name
_VERSIONS: dict[str, Format] = {}  # every format that is defined in a file, by name and version
_revision = 0


def formats() -> list[str]:
    """Return the name of every format, those that users registered last."""
    return [*_FORMATS, *_DEFINED]


def get(name: str) -> Format:
    """Return the format with a name such as "google"; "google:linen" also chooses its variant "linen".

    Raises:
        InputError: the format or the variant is unknown; the message suggests the nearest name.
    """
    format_name, _, variant = str(name).partition(":")  # it may be None
    found = _FORMATS.get(format_name) or _DEFINED.get(format_name) or _VERSIONS.get(format_name)
    if found is None:
        base, _, version = format_name.partition("@")
        if version:
            raise InputError(f"unknown version {version} of format {base!r}: give its table with --format-file")
        own = "or define it with --format-file FILE"
        hint = nearest(format_name, formats()) or f": give one of {', '.join(formats())}, {own}"
        raise InputError(f"unknown format {format_name!r}{hint}")
    return found.with_variant(variant) if variant else found


def register(format: Format) -> None:
    """Make a format that a user defines known by its name, and prefer it to built-in formats that fit a checkpoint too.

    A format of the same name that was registered before is replaced.  Checkpoints that were read in it stay in its version.

    Raises:
        InputError: the name is that of a built-in format.
    """
    global _revision
    _VERSIONS[add_version(format)] = format
    _DEFINED[format.name] = format
    _revision += 1


def add_version(format: Format) -> str:
    """Make a format that a file defines known by its name and version, which are returned; recognition does not try it.

    Raises:
        InputError: the name is that of a built-in format, or another table has this version.
    """
    definition = format.definition
    if definition is None or format.name in _FORMATS:
        where = f"{definition.source}: " if definition else ""
        raise InputError(f"{where}{format.name!r} is the name of a built-in format: give another name")
    name = f"{format.name}@{definition.version}"
    other = _VERSIONS.setdefault(name, format).definition
    if other and other.table != definition.table:
        raise InputError(f"{definition.source}: its table and that of {other.source} have one version: change the name")
    return name


@contextmanager
def registered(*new: Format) -> Iterator[None]:
    """Register formats for the duration of a `with` statement.

    Raises:
        InputError: two of them have the same name.
    """
    global _revision
    for n, format in enumerate(new):
        if format.name in [other.name for other in new[:n]]:
            where = format.definition.source if format.definition else ""
            raise InputError(f"{where}: another format file defines {format.name!r} too: give one of them another name")
    before = dict(_DEFINED)
    try:
        for format in new:
            register(format)
        yield
    finally:
        _DEFINED.clear()
        _DEFINED.update(before)
        _revision += 1


def revision() -> int:
    """Return a number that is another one whenever the registered formats are others, as a key for caches."""
    return _revision
