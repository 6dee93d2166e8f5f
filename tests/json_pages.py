"""The tables of fields in the reference pages, and the fields of a JSON object in the same notation."""

import re
from collections.abc import Collection, Iterator
from typing import Any


def documented_fields(text: str, header: str = "field") -> set[str]:
    """Return the fields in the first table of a text whose first column has this header."""
    table = text.partition(f"| {header} |")[2].partition("\n\n")[0]
    return {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(.+?)`", row)}


def fields(value: Any, documented: Collection[str], path: str = "") -> Iterator[str]:
    """Yield the paths of the fields in a JSON value.

    Args:
        value: the value.
        documented: the fields of a page, which tell the objects whose keys are data, and those that it does not describe
            further.
        path: the path of the value.
    """
    inner = [name for name in documented if name.startswith((f"{path}.", f"{path}[]"))]
    if path in documented:
        yield path
        if not inner:
            return
    if isinstance(value, dict):
        has_data_as_keys = any(name.startswith(f"{path}.*") for name in inner)
        for key, each in value.items():
            name = "*" if has_data_as_keys else key
            yield from fields(each, documented, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for each in value:
            yield from fields(each, documented, f"{path}[]")
    elif path not in documented and not (value is None and inner):
        yield path
