"""Compare the keys and shapes of a checkpoint with the table of a format: keys of each line, length of each axis."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from math import prod
from typing import Literal, NamedTuple

from parity.checkpoints.columns import SPLIT_AXES, Piece, parameter_of
from parity.checkpoints.containers.container import StoredArray
from parity.checkpoints.layout import FIXED_SIZES, Layout

Shape = tuple[int, ...]

MAX_MISSING_SHOWN = 20  # missing keys of one table line that a message lists
_MAX_INDICES = 256  # of an axis in keys, other than block
_MAX_PATTERNS = 4096  # of one line, for each block
_INDEX = r"(?:0|[1-9][0-9]{0,8})"  # as written in keys: int() also takes 01 and the digits of other scripts
_NUMBER = re.compile(_INDEX + r"(?!\d)")
_BLOCK = re.compile(r"\{block(?:\+(\d+))?\}")
_KEY_FIELD = re.compile(r"\{(\w+)(?:\+(\d+))?\}")
BlockField = tuple[str, str, int]  # what is before the number of a block in keys, its field, and the number of the first

# Axes that most formats merge -> the name of the length of the merged axis.
_MERGED_SIZES = {
    frozenset(("head", "dim")): "inner",
    frozenset(("pool_head", "pool_dim")): "pool_inner",
    frozenset(("rgb", "ph", "pw")): "patch",
}


class KeyIndex:
    """An index of keys by pattern: "blocks.3.norm1.bias" is block 3 of "blocks.{block}.norm1.bias"."""

    def __init__(self, arrays: dict[str, StoredArray]) -> None:
        self.arrays = arrays
        self._by_block: dict[frozenset[BlockField], dict[str, dict[int, str]]] = {}

    def by_block(self, fields: frozenset[BlockField]) -> dict[str, dict[int, str]]:
        """Return the keys with a number at one of `fields`: pattern -> block -> key."""
        if fields not in self._by_block:
            found: dict[str, dict[int, str]] = {}
            for prefix, field, first in fields:
                for key in self.arrays:
                    if key.startswith(prefix) and (number := _NUMBER.match(key, len(prefix))) and int(number[0]) >= first:
                        found.setdefault(f"{prefix}{field}{key[number.end() :]}", {})[int(number[0]) - first] = key
            self._by_block[fields] = found
        return self._by_block[fields]


class Mismatch(NamedTuple):
    """A key that contradicts the table of a format; its text is a part of an error.

    kind: "missing" from the file; "unexpected", not in the table; "ignored" by the user or by the file of the format,
        although it is in the table; or "misshapen", with an array of another shape.
    key: the key.
    detail: what to say about the key: the line of the table, or the shapes; may be empty.
    """

    kind: Literal["missing", "unexpected", "ignored", "misshapen"]
    key: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.key}{self.detail and f' {self.detail}'}"


@dataclass(frozen=True)
class LineMatch:
    """A line of a format's table, compared with the keys of a file.

    Attributes:
        layout: the line.
        present: keys of the line that the file has.
        missing: keys of the line that the file lacks.
    """

    layout: Layout
    present: tuple[str, ...]
    missing: tuple[str, ...]


def _length_of_axis(numbers: Collection[int]) -> int:
    """Return the length of an axis from the indices in keys: one more than the largest, unless too many are missing."""
    return min(max(numbers) + 1, len(numbers) + MAX_MISSING_SHOWN) if numbers else 0


def _count_indices(layouts: Iterable[Layout], arrays: Mapping[str, StoredArray]) -> dict[str, int]:
    """Return the length of each axis that has a number in keys, other than block: the heads, if their arrays are apart."""
    found: dict[str, set[int]] = defaultdict(set)
    for layout in layouts:
        if set(layout.key_axes) <= {"block", *FIXED_SIZES}:
            continue
        pattern = _key_pattern(layout)
        starts = {match[1]: int(match[2] or 0) for match in _KEY_FIELD.finditer(layout.key)}
        for match in filter(None, map(pattern.fullmatch, arrays)):
            for axis, number in match.groupdict().items():
                found[axis].add(int(number) - starts[axis])
    counts = {axis: _length_of_axis({n for n in ns if 0 <= n < _MAX_INDICES}) for axis, ns in found.items()}
    counts.pop("block", None)
    largest = max((prod(counts.get(axis, 1) for axis in layout.key_axes) for layout in layouts), default=0)
    return counts if largest <= _MAX_PATTERNS else {}  # too many: no key of these lines is found


def _key_pattern(layout: Layout) -> re.Pattern[str]:
    """Return a regular expression for the keys of a layout; each axis that is a number is a group of its name."""
    pattern, end = "", 0
    for field in _KEY_FIELD.finditer(layout.key):
        axis = field[1]
        words = layout.spellings.get(axis, tuple(map(str, range(FIXED_SIZES.get(axis, 0)))))
        index = f"(?:{'|'.join(map(re.escape, words))})" if words else f"(?P<{axis}>{_INDEX})"
        pattern, end = f"{pattern}{re.escape(layout.key[end : field.start()])}{index}", field.end()
    return re.compile(pattern + re.escape(layout.key[end:]))


def _key_patterns(layout: Layout, counts: Mapping[str, int]) -> tuple[str, ...]:
    """Return the keys of a layout with every axis except block spelled out: "layer.{block}.attn.query.weight", ...

    counts: the lengths of axes whose lengths depend on the config.
    """
    return _expand_pattern(layout.key, tuple(layout.spellings.items()), tuple(counts.items()))


@cache
def _expand_pattern(
    key: str, spellings: tuple[tuple[str, tuple[str, ...]], ...], counts: tuple[tuple[str, int], ...]
) -> tuple[str, ...]:
    """Return the result of `_key_patterns`; the cache needs hashable arguments."""
    field = _BLOCK.search(key)
    layout = Layout(_BLOCK.sub("{block}", key), (), {**dict(spellings), "block": (field[0] if field else "",)})
    return tuple(layout.keys({**dict.fromkeys(layout.key_axes, 0), **FIXED_SIZES, **dict(counts), "block": 1}))


def match_lines(table: Mapping[str, list[Layout]], index: KeyIndex) -> tuple[dict[str, list[LineMatch]], dict[str, int]]:
    """Return the lines of a table compared with keys, by parameter, and the lengths of axes that keys or formats fix."""
    layouts = [layout for found in table.values() for layout in found]
    counts = _count_indices(layouts, index.arrays)
    patterns = {layout.key: _key_patterns(layout, counts) for layout in layouts}
    expanded = [pattern for found in patterns.values() for pattern in found]
    fields = [(each[: match.start()], match) for each in expanded if (match := _BLOCK.search(each))]
    blocks = index.by_block(frozenset((prefix, match[0], int(match[1] or 0)) for prefix, match in fields))
    depth = _length_of_axis({n for pattern in expanded for n in blocks.get(pattern, ())})
    lines = {
        name: [_match_line(layout, patterns[layout.key], index.arrays, blocks, depth) for layout in found]
        for name, found in table.items()
    }
    return lines, {**FIXED_SIZES, **counts} | ({"block": depth} if depth else {})


def _match_line(
    layout: Layout,
    patterns: Iterable[str],
    arrays: Mapping[str, StoredArray],
    blocks: Mapping[str, Mapping[int, str]],
    depth: int,
) -> LineMatch:
    """Find the keys of one line, and at most `MAX_MISSING_SHOWN` missing keys for each pattern."""
    present: list[str] = []
    missing: list[str] = []
    for pattern in patterns:
        field = _BLOCK.search(pattern)
        if not field:
            (present if pattern in arrays else missing).append(pattern)
            continue
        found = blocks.get(pattern, {})
        present += [found[number] for number in sorted(found) if number < depth]
        if len(found) < depth:
            absent = (number for number in range(depth) if number not in found)
            first = int(field[1] or 0)
            missing += [pattern.replace(field[0], str(first + n)) for n in islice(absent, MAX_MISSING_SHOWN)]
    return LineMatch(layout, tuple(present), tuple(missing))


def solve_sizes(
    shapes: Mapping[str, list[tuple[Layout, Shape]]], known: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, frozenset[str]], list[Mismatch]]:
    """Return the length of each axis, the axes of each parameter, and a mismatch for each contradictory shape.

    A dimension with one unknown axis gives the length of that axis.  Table lines that do not fit these lengths are dropped.
    More entries are lengths of merged axes: see `_MERGED_SIZES`.

    Args:
        shapes: parameter, or piece of one -> its possible layouts, each with the shape of one of its arrays.
        known: the lengths that are known beforehand.
    """
    sizes, contradictions = dict(known), list[Mismatch]()
    open_lines = {name: list(lines) for name, lines in shapes.items()}
    while True:
        before = (len(sizes), sum(map(len, open_lines.values())))
        for name, lines in open_lines.items():
            fitting = [(layout, shape) for layout, shape in lines if _shape_fits(layout, shape, sizes)]
            if not fitting:
                layout, shape = lines[0]
                contradictions.append(Mismatch("misshapen", layout.key, f"{shape}, expected {layout.axes_text}"))
            open_lines[name] = fitting
            if len(fitting) == 1:
                for length, unknown in _unknown_axes(*fitting[0], sizes):
                    if len(unknown) == 1:
                        sizes[unknown[0]] = length
                    elif merged := _MERGED_SIZES.get(frozenset(unknown)):
                        sizes[merged] = length
        open_lines = {name: lines for name, lines in open_lines.items() if lines}
        if (len(sizes), sum(map(len, open_lines.values()))) == before or contradictions:
            break
    if "pair" in sizes:
        sizes.setdefault("dim", 2 * sizes["pair"])
    if "head" in sizes and "dim" in sizes:
        sizes["inner"] = sizes["head"] * sizes["dim"]
    for axis, parts in SPLIT_AXES.items():
        if sizes.keys() >= set(parts):
            sizes[axis] = prod(sizes[part] for part in parts)
    axes: dict[str, frozenset[str]] = {}
    for name, lines in open_lines.items():
        divided = Piece.parse(name).axis
        found = frozenset(lines[0][0].parameter_axes) | ({divided} if divided else set())
        axes[parameter_of(name)] = axes.get(parameter_of(name), frozenset()) | found
    return sizes, axes, contradictions


def _unknown_axes(layout: Layout, shape: Shape, sizes: Mapping[str, int]) -> Iterator[tuple[int, list[str]]]:
    """Yield for each dimension its length divided by the known lengths (-1 if not divisible), and the unknown axes."""
    for number, (length, dim) in enumerate(zip(shape, layout.dims, strict=True)):
        unknown = []
        if number == 0 and (layout.before or layout.after):
            others = [_count_if_known(segment, sizes) for segment in (*layout.before, *layout.after)]
            if None in others:
                continue
            length -= sum(count for count in others if count is not None)
        for axis in dim:
            if axis.name not in sizes:
                unknown.append(axis.name)
            elif length % sizes[axis.name] == 0:
                length //= sizes[axis.name]
            else:
                length = -1
        yield length, unknown


def _count_if_known(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int | None:
    """Return the product of the lengths of merged axes; None if it is not known."""
    missing = frozenset(axis for axis in axes if axis not in sizes)
    rest = sizes.get(_MERGED_SIZES.get(missing, "")) if missing else 1
    return None if rest is None else rest * prod(sizes[axis] for axis in axes if axis not in missing)


def _shape_fits(layout: Layout, shape: Shape, sizes: Mapping[str, int]) -> bool:
    """Return whether a layout can have this shape with the lengths that are known."""
    if len(shape) != len(layout.dims):
        return False
    return all(
        length >= 1
        and (length == 1 or bool(unknown))
        and sizes.get(_MERGED_SIZES.get(frozenset(unknown), ""), length) == length
        for length, unknown in _unknown_axes(layout, shape, sizes)
    )
