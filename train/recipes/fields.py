"""The fields of a recipe: as a user types them, in messages, and in the JSON of a run."""

import math
from collections import Counter
from itertools import takewhile
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from vit_spec import InputError
from vit_spec.printable import printable

_MAX_CHARACTERS = 80  # of a value in the description of a difference
_MAX_BEFORE = 30  # of them, the equal ones before the first difference
_EXPECTED = {bool: "true or false", int: "an integer", float: "a number", str: "text", NoneType: "None"}


class FieldError(InputError):
    """A field of a recipe has an invalid value.  The message names the field; the command line names its flag instead.

    field: its dotted name.
    problem: the rest of the message, with the space or the colon before it.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}{problem}")
        self.field, self.problem = field, problem

    def of_flag(self) -> InputError:
        """Return the error that names the flag of the field."""
        return InputError(f"{flag_name(self.field)}{self.problem}")


def flag_name(field: str) -> str:
    """Return the flag of a field as typed: --optimizer.weight-decay."""
    return "--" + field.replace("_", "-")


def format_value(value: Any) -> str:
    """Return the value of a field as typed: 31 instead of 31.0, and "3 4" instead of (3, 4)."""
    if isinstance(value, list | tuple):
        return " ".join(map(format_value, value))
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def alternatives(kind: Any) -> list[Any]:
    """Return the types of a field in the order in which a value is converted to them: None first, str last."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return sorted(kinds, key=lambda each: (each is str) - (each is NoneType))


def describe_type(kind: Any) -> str:
    """Return words for the values that a field can have: "a number, or text"."""
    return ", or ".join(map(_describe_alternative, reversed(alternatives(kind))))


def _describe_alternative(kind: Any) -> str:
    items = get_args(kind)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(items)}"
    if get_origin(kind) is tuple:
        return f"{'' if Ellipsis in items else f'{len(items)} '}values, each {_describe_alternative(items[0])}"
    return _EXPECTED[kind]


def to_json(value: Any) -> Any:
    """Return fields of a recipe, or their values, as JSON can hold them: lists for tuples, and "inf" for infinity.

    JSON has no infinite numbers, and other programs refuse a file with the word that Python writes for them.
    """
    if isinstance(value, dict):
        return {name: to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(to_json, value))
    return format_value(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_json(name: str, value: Any, kind: Any) -> Any:
    """Return the value of a field that `to_json` has converted.

    name: the dotted name of the field.
    kind: its type.

    Raises:
        FieldError: a value of another type.
    """
    for each in alternatives(kind):
        try:
            return _convert(value, each)
        except ValueError:
            pass
    raise FieldError(name, f" is {printable(repr(value), max_length=_MAX_CHARACTERS)}: give {describe_type(kind)}")


def _convert(value: Any, kind: Any) -> Any:
    """Return a value of JSON as one of a type, which is no union; raise ValueError if it is none."""
    items = get_args(kind)
    if get_origin(kind) is tuple and isinstance(value, list):
        kinds = items[:1] * len(value) if Ellipsis in items else items
        return tuple(_convert(*pair) for pair in zip(value, kinds, strict=True))
    if kind is float and value == "inf":
        return math.inf
    is_literal = get_origin(kind) is Literal
    if value in items if is_literal else type(value) in ((int, float) if kind is float else (kind,)):
        return value
    raise ValueError


def describe_difference(name: str, was: Any, now: Any) -> str:
    """Return words about two different values of a field of a run, in its config.json and in the present command.

    Of long lists they have the entries that only one of the two has, of long texts the part around the first difference.
    """
    if isinstance(was, list) and isinstance(now, list) and max(len(str(was)), len(str(now))) > _MAX_CHARACTERS:
        of_run, given = Counter(map(repr, was)), Counter(map(repr, now))
        removed, added = _around_difference(*(", ".join(each.elements()) for each in (of_run - given, given - of_run)))
        if removed and added:
            return f"its {name} has {removed}, and here it has {added} instead"
        if removed or added:
            return f"its {name} has {removed}, and here it has not" if removed else f"its {name} lacks {added}"
        index = next(i for i, pair in enumerate(zip(was, now, strict=True)) if pair[0] != pair[1])
        name, was, now = f"{name}[{index}]", was[index], now[index]
    of_run_text, given_text = _around_difference(str(was), str(now))
    return f"its {name} is {of_run_text}, and here it is {given_text}"


def _around_difference(*texts: str) -> list[str]:
    """Return texts that are too long for a message without their parts far from the first difference."""
    if max(map(len, texts)) <= _MAX_CHARACTERS:
        return list(texts)
    equal = sum(1 for _ in takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False)))
    first = max(0, equal - _MAX_BEFORE)
    parts = [text[first : first + _MAX_CHARACTERS] for text in texts]
    ends = [first + len(part) < len(text) for part, text in zip(parts, texts, strict=True)]
    return ["..." * (first > 0) + part + "..." * is_cut for part, is_cut in zip(parts, ends, strict=True)]
