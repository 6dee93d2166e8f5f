"""Lines of a mapping that differ only in a number, as one line with an axis."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from itertools import product
from typing import Any

from parity.comparison.any_model.names import unquote_key

Shapes = Mapping[str, tuple[int, ...]]


def fold_lines(lines: Sequence[tuple[str, str]], flax: Shapes, torch: Shapes) -> list[tuple[str, str]]:
    """Return lines and notes with lines that differ only in a number replaced by one line with {n} or an axis.

    The number must count from 0 on both sides, and all arrays must have the same shape.
    """
    groups: dict[Any, list[list[str]]] = defaultdict(list)
    for line, note in lines:
        a, b = _line_keys(line)
        groups[re.sub(r"[0-9]+", "#", line), flax[unquote_key(a)], torch[unquote_key(b)], note].append(
            re.split(r"([0-9]+)", line)
        )
    keys = flax.keys() | torch.keys()
    return [(line, note) for (*_, note), group in groups.items() for line in _fold_group(group, keys)]


def _line_keys(line: str) -> list[str]:
    """Return the flax key and the torch key of a line, as it writes them."""
    return [side.partition("|")[0].strip() for side in line.split("<->")]


def _fold_group(lines: list[list[str]], keys: Set[str]) -> list[str]:
    """Return fewer lines for lines that differ only in numbers, or the same lines if they cannot be folded.

    Lines are not folded if their numbers do not count from 0, or if a key with the next number exists: the folded line
    would include that key too.

    lines: each split into tokens, of which every second one is a number.
    keys: all keys of both sides.
    """
    first = lines[0]
    middle = next(n for n, token in enumerate(first) if "<->" in token)
    for i, j in product(range(1, middle, 2), range(middle + 1, len(first), 2)) if len(lines) > 1 else ():
        if first[j - 1].endswith("=") or (first[i - 1].endswith("=") and not first[i - 1].endswith(" block=")):
            continue  # a part of an axis cannot be counted
        groups: dict[str, list[list[str]]] = defaultdict(list)
        for line in lines:
            groups["".join(token for n, token in enumerate(line) if n not in (i, j))].append(line)
        folded = [(_with_axis(group[0], i, j), len(group)) for group in groups.values()]
        next_keys = [
            unquote_key(re.sub(r"{\w+}", str(n), key)) for line, n in folded for key in _line_keys(line) if "{" in key
        ]
        columns = [[line[n] for line in group] for group in groups.values() for n in (i, j)]
        if all(column == [*map(str, range(len(column)))] for column in columns) and not keys & {*next_keys}:
            return [line for line, _ in folded]
    return ["".join(line) for line in lines]


def _with_axis(line: list[str], i: int, j: int) -> str:
    """Return the line with one axis for the numbers at `i` and `j`: {n} in both keys, or an axis of flax's array."""
    before, after = "".join(line[:i]), "".join(line[i + 1 : j])
    rest = "".join(line[j + 1 :])
    if before.endswith(" block="):
        return f"{before.removesuffix('=')}{after}{{block}}{rest}"
    return f"{before}{{n}}{after}{{n}}{rest}"
