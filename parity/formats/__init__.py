"""The formats that weights can be kept in.

To add one, write a module with a `FORMAT` beside this file, and list it in `_FORMATS`.
"""

from parity.formats import jax, torch
from parity.formats.format import Format
from vit_spec import InputError, nearest

__all__ = ["Format", "formats", "get"]

_FORMATS: dict[str, Format] = {module.FORMAT.name: module.FORMAT for module in (jax, torch)}


def formats() -> list[str]:
    """Return the name of every format."""
    return list(_FORMATS)


def get(name: str) -> Format:
    """Return the format of this name.

    Raises:
        InputError: an unknown name; says the nearest.
    """
    if name not in _FORMATS:
        hint = nearest(name, _FORMATS) or f": give one of {', '.join(_FORMATS)}"
        raise InputError(f"unknown format {name!r}{hint}")
    return _FORMATS[name]
