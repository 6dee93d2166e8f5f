"""Fields of a config as they are set on the command line: norms.eps=1e-5, or by a shorter name that means one field."""

import ast
import re
from collections.abc import Iterable
from typing import Any

from vit_spec import InputError, nearest
from vit_spec.config import FIELDS


def assignments(texts: Iterable[str]) -> dict[str, Any]:
    """Return what texts such as "norm_eps=1e-5", "head.pool=mean" or "image_size=256x128" set.

    A field may be called by its dotted name, by its last word where no other field ends in it, or with its part in front
    as one would say it: norms.eps, eps, norm_eps.

    Raises:
        InputError: no assignment, or no such field; says the nearest.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value.strip():
            raise InputError(f"--set {text!r} sets nothing: write it as norms.eps=1e-5")
        found[_field(name.strip())] = _value(value.strip())
    return found


def _field(name: str) -> str:
    if name in FIELDS:
        return name
    meant = {field for field in FIELDS if name in (field.rpartition(".")[2], _spoken(field))}
    if len(meant) == 1:
        return meant.pop()
    if meant:
        raise InputError(f"--set {name} may mean {' or '.join(sorted(meant))}: say which")
    raise InputError(
        f"--set {name} is no field of the config{nearest(name, FIELDS) or ': `python -m parity inspect` lists them'}"
    )


def _spoken(field: str) -> str:
    """norms.eps as norm_eps."""
    part, _, word = field.rpartition(".")
    return f"{part.removesuffix('s')}_{word}"


def _value(text: str) -> Any:
    """Read a number, true, false, None, a size as 256x128, a list or a word."""
    if size := re.fullmatch(r"(\d{1,18})x(\d{1,18})", text):
        return int(size[1]), int(size[2])
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
        repr(value)  # as a message shows it: a number in base 16 may have more digits than Python prints
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # a list as a key; a text of brackets
        return text
    return value
