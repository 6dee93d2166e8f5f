"""Parse config overrides as they are given on the command line: --set norms.eps=1e-5, or a shorter name of the field."""

import ast
import os.path
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from parity.checkpoints.containers import suffixes
from vit_spec import InputError, nearest
from vit_spec.config import FIELDS

_OPTION = "--set"
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=[^/]*")  # a path with a slash is no override


def split_overrides(arguments: Sequence[str]) -> list[str]:
    """Return a command line in which each override has its own --set: `--set a=1 b=2` becomes `--set a=1 --set b=2`.

    An argument after an override is one too if it is FIELD=VALUE and not a path: it has no slash, no suffix of a container,
    and no file has this name.
    """
    return list(_split_overrides(arguments))


def _split_overrides(arguments: Sequence[str]) -> Iterator[str]:
    is_value = was_override = False  # whether the argument is the value of --set; whether the last one was
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":  # what follows is no option
            yield argument
            yield from rest
        elif is_value or not was_override or not _is_override(argument):
            yield argument
            was_override = is_value or argument.startswith(f"{_OPTION}=")
            is_value = not is_value and argument == _OPTION
        else:
            yield from (_OPTION, argument)


def _is_override(argument: str) -> bool:
    """Return whether an argument that may be a path is an override."""
    return bool(_OVERRIDE.fullmatch(argument)) and not argument.endswith(suffixes()) and not os.path.lexists(argument)


def parse_overrides(texts: Iterable[str], option: str = _OPTION) -> dict[str, Any]:
    """Parse texts such as "head.pool=mean" or "image_size=256x128" to config overrides: dotted field -> value.

    A field may be given by its dotted name, by its last word if no other field ends in it, or with its part in the
    singular: norms.eps, eps or norm_eps.

    option: what precedes the texts where the user wrote them, for messages.

    Raises:
        InputError: a text is not FIELD=VALUE, or the field is ambiguous or unknown; the message suggests the nearest name.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value.strip():
            raise InputError(f"{option} {text!r} sets nothing: write it as norms.eps=1e-5")
        found[_resolve_field(name.strip(), option)] = _parse_value(value.strip())
    return found


def _resolve_field(name: str, option: str) -> str:
    """Return the dotted name of the field that a name or short name means."""
    if name in FIELDS:
        return name
    meant = {field for field in FIELDS if name in (field.rpartition(".")[2], _short_name(field))}
    if len(meant) == 1:
        return meant.pop()
    if meant:
        raise InputError(f"{option} {name} may mean {' or '.join(sorted(meant))}: say which")
    raise InputError(
        f"{option} {name} is not a field of the config{nearest(name, FIELDS) or ': `python -m parity inspect` lists them'}"
    )


def _short_name(field: str) -> str:
    """Return the short name of a dotted field: norm_eps for norms.eps."""
    part, _, word = field.rpartition(".")
    return f"{part.removesuffix('s')}_{word}"


def _parse_value(text: str) -> Any:
    """Parse a number, true, false, None, a size such as 256x128, a list, or else a word."""
    if size := re.fullmatch(r"(\d{1,18})x(\d{1,18})", text):
        return int(size[1]), int(size[2])
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
        repr(value)  # messages print it; Python refuses to print numbers with too many digits, which base 16 can make
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # e.g. a list as a key, too many brackets
        return text
    return value
