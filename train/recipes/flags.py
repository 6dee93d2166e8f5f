"""The flags of a training run: one for each field of a recipe, with the docstring of the field as its help."""

import argparse
import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from functools import cache
from itertools import pairwise
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from train.recipes.fields import alternatives, describe_type, flag_name
from train.recipes.recipe import Recipe
from vit_spec import InputError, nearest

_PAIR = tuple[int, int]


class Flag(NamedTuple):
    """A flag for a field of a recipe.

    path: the dotted name of the field, such as "optimizer.weight_decay".
    kind: its type, such as `tuple[int, int] | None`.
    help: its docstring.
    default: its value in the recipe.
    """

    path: str
    kind: Any
    help: str
    default: Any

    @property
    def name(self) -> str:
        """The flag as typed: --optimizer.weight-decay."""
        return flag_name(self.path)

    @property
    def is_size(self) -> bool:
        """Whether the value is the height and width of an image, or one integer for a square."""
        return {int, _PAIR} <= set(alternatives(self.kind))

    @property
    def negation(self) -> str:
        """The flag that sets a bool to false: --augment.no-flip."""
        part, dot, leaf = self.name.rpartition(".")
        return f"{part}.no-{leaf}" if dot else f"--no-{self.name[2:]}"


class HelpFormatter(argparse.HelpFormatter):
    """Keep the paragraphs and commands of descriptions, and show the values of a flag as its metavar says."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = []
        for paragraph in text.split("\n\n"):
            lines = paragraph.splitlines() if paragraph.startswith("python -m ") else textwrap.wrap(paragraph, width)
            paragraphs.append("\n".join(indent + line for line in lines))
        return "\n\n".join(paragraphs)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar) if action.metavar else super()._format_args(action, default_metavar)


def add_flags(parser: argparse.ArgumentParser, recipe: Recipe) -> None:
    """Add the flags of a recipe to a parser, in one group for each nested dataclass.

    The parsed namespace has only the flags that are given, with their unconverted words: see `apply_flags`.
    """
    for title, text, flags in _groups(recipe):
        group = parser.add_argument_group(title, description=text)
        for flag in flags:
            default = " ".join(map(str, flag.default)) or "none" if isinstance(flag.default, tuple) else flag.default
            options: dict[str, Any] = {"dest": flag.path, "default": argparse.SUPPRESS}
            options["help"] = f"{flag.help} (default: {default})".replace("%", "%%")
            if flag.kind is bool:
                group.add_argument(flag.name, action="store_true", **options)
                group.add_argument(flag.negation, action="store_false", **{**options, "help": f"turn off {flag.name}"})
            else:
                lists = [get_args(kind) for kind in alternatives(flag.kind) if get_origin(kind) is tuple]
                several = [items for items in lists if Ellipsis in items]
                metavar = "|".join(
                    "HxW" if kind == _PAIR and flag.is_size else _metavar(kind) for kind in alternatives(flag.kind)
                )
                # None is one word also where the other values are two: `_parse` counts them.
                group.add_argument(
                    flag.name,
                    nargs="*" if lists else None,
                    metavar=metavar,
                    action="extend" if several else "store",
                    **options,
                )


def apply_flags(recipe: Recipe, given: Mapping[str, Any]) -> Recipe:
    """Return the recipe with the fields that flags set.

    Args:
        recipe: the recipe whose flags the parser had.
        given: for each flag given, the dotted name of its field, and a bool, or its words.

    Raises:
        InputError: a value that the type of its field does not have, or that the recipe refuses.
    """
    changes: dict[str, dict[str, Any]] = {}
    for flag in (flag for *_, flags in _groups(recipe) for flag in flags):
        if flag.path in given:
            part, _, leaf = flag.path.rpartition(".")
            changes.setdefault(part, {})[leaf] = _parse(flag, given[flag.path])
    own = changes.pop("", {})
    return replace(recipe, **own, **{part: replace(getattr(recipe, part), **changes[part]) for part in changes})


def _groups(part: Any, prefix: str = "") -> Iterator[tuple[str, str, list[Flag]]]:
    """Yield a dataclass and those nested in it: a title, the first paragraph of the docstring, and the flags."""
    cls: Any = type(part)
    kinds, texts, values = get_type_hints(cls), _field_docstrings(cls), vars(part)
    nested = [name for name in values if is_dataclass(values[name])]
    flags = [Flag(prefix + name, kinds[name], texts.get(name, ""), values[name]) for name in values if name not in nested]
    yield f"{prefix.rstrip('.') or 'run'} options", (inspect.getdoc(part) or "").partition("\n\n")[0], flags
    for name in nested:
        yield from _groups(values[name], f"{prefix}{name}.")


@cache  # a command needs them for each parse, and to read the source takes longer than all else in it
def _field_docstrings(cls: type) -> dict[str, str]:
    """Return the string that follows each annotated field in the source of a class, in one line."""
    body = next(node.body for node in ast.parse(inspect.getsource(cls)).body if isinstance(node, ast.ClassDef))
    return {
        ast.unparse(statement.target): " ".join(ast.literal_eval(text.value).split())
        for statement, text in pairwise(body)
        if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _metavar(kind: Any) -> str:
    items = get_args(kind)
    if get_origin(kind) is Literal:
        return "{" + ",".join(items) + "}"
    if get_origin(kind) is tuple:
        return f"[{_metavar(items[0])} ...]" if Ellipsis in items else " ".join(map(_metavar, items))
    return "None" if kind is NoneType else str(kind.__name__).upper()


def _parse(flag: Flag, given: bool | str | list[str]) -> Any:
    """Return the value of a flag; raise InputError if the words do not spell a value of its type."""
    if isinstance(given, bool):
        return given
    words = [given] if isinstance(given, str) else given
    if flag.is_size and re.fullmatch("[0-9]+x[0-9]+", words[0] if len(words) == 1 else ""):
        words = words[0].split("x")
    kinds = alternatives(flag.kind)
    for kind in kinds:
        try:
            return _convert(kind, words)
        except ValueError:
            pass
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    text = " ".join(words)
    expected = "an integer, HxW such as 384x256, or None" if flag.is_size else describe_type(flag.kind)
    raise InputError(f"{flag.name} is {text!r}: give {expected}{nearest(text, choices)}")


def _convert(kind: Any, words: list[str]) -> Any:
    """Return the value of a type, which is no union, that the words spell; raise ValueError if there is none."""
    items = get_args(kind)
    if get_origin(kind) is tuple:
        kinds = items[:1] * len(words) if Ellipsis in items else items
        return tuple(_convert(each, [word]) for each, word in zip(kinds, words, strict=True))
    (word,) = words
    if get_origin(kind) is Literal:
        return items[items.index(word)]
    if kind is NoneType and word != "None":
        raise ValueError
    return None if kind is NoneType else kind(word)
