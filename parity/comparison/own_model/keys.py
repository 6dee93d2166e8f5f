"""Patterns of keys: which number in a key is that of a block or of a head, and which words stand for q, k and v."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from parity.checkpoints.layout import Axis

Shape = tuple[int, ...]

_NUMBER = re.compile(r"(?<![0-9{+])\d+(?![0-9}])")
_BIAS = re.compile(r"(^|[^a-z])(bias|beta|b|offset|shift)([^a-z]|$)|bias|^b[qkvo]$", re.IGNORECASE)


@dataclass(frozen=True)
class Leaf:
    """The arrays of one parameter of the user's model.

    Attributes:
        key: the pattern of their keys, such as "layers.{block}.attn.heads.{head}.weight".
        shape: the shape of each array.
        rank: the position of the first of them in the order of their use.
        axes: the axes in the key.
        stacked: whether the first axis of the array is that of the blocks.
        part: the axis of the array of which the parameter takes a part; None if it takes all of the array.
    """

    key: str
    shape: Shape
    rank: int
    axes: tuple[str, ...] = ()
    stacked: bool = False
    part: Axis | None = None

    @property
    def inner_shape(self) -> Shape:
        """The shape of the arrays of one block."""
        return self.shape[1:] if self.stacked else self.shape

    @property
    def size(self) -> int:
        """Number of entries of one array, for one block."""
        return prod(self.inner_shape)

    @property
    def is_matrix(self) -> bool:
        """Whether the array may be the weight of a linear layer: it has two dimensions, and is not called a bias."""
        return sum(length > 1 for length in self.inner_shape) >= 2 and not self.is_bias

    @property
    def is_bias(self) -> bool:
        """Whether the last word of the key is a name for biases."""
        return bool(_BIAS.search(re.split(r"[./]", self.key)[-1]))

    @property
    def parent(self) -> str:
        """The key of the module that has this parameter."""
        return self.key[: max(self.key.rfind("."), self.key.rfind("/")) + 1]


@dataclass(frozen=True)
class Blocks:
    """A division of the parameters: those of the blocks, and the others, each in the order of their use.

    first: the number of the first block in keys.
    """

    depth: int
    first: int
    inner: tuple[Leaf, ...]
    outer: tuple[Leaf, ...]
    disorder: str = ""


def find_blocks(shapes: Mapping[str, Shape], order: Sequence[str]) -> list[Blocks]:
    """Return the divisions into blocks that the keys allow, those with the largest blocks first.

    shapes: the shapes of the parameters, by key.
    order: their keys, in the order of their use.
    """
    ranks = {key: rank for rank, key in enumerate(order)}
    found = [(sum(prod(shapes[key]) for key in members), blocks) for members, blocks in _numbered(shapes, ranks)]
    found += [(sum(prod(shapes[key]) for key in members), blocks) for members, blocks in _stacked(shapes, ranks)]
    return [blocks for _, blocks in sorted(found, key=lambda each: -each[0])]


def _numbered(shapes: Mapping[str, Shape], ranks: Mapping[str, int]) -> Iterator[tuple[list[str], Blocks]]:
    """Yield divisions in which each block has a number in its keys; several lists may have the same numbers."""
    groups: dict[str, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))  # prefix, number, rest -> key
    for key in shapes:
        for number in _NUMBER.finditer(key):
            groups[key[: number.start()]][int(number[0])][key[number.end() :]] = key
    by_range: dict[tuple[int, int], list[str]] = defaultdict(list)
    for prefix, numbered in groups.items():
        first, depth = min(numbered), len(numbered)
        structures = [{rest: shapes[key] for rest, key in inner.items()} for inner in numbered.values()]
        if set(numbered) == set(range(first, first + depth)) and all(each == structures[0] for each in structures):
            by_range[first, depth].append(prefix)
    for (first, depth), prefixes in by_range.items():
        outermost = [each for each in prefixes if not any(each != other and each.startswith(other) for other in prefixes)]
        chosen = [outermost] + ([[each] for each in outermost] if len(outermost) > 1 else [])
        for several in chosen:
            members, leaves, runs = [], [], []
            for prefix in several:
                for rest, key in groups[prefix][first].items():
                    field = "{block}" if not first else f"{{block+{first}}}"
                    leaves.append(Leaf(f"{prefix}{field}{rest}", shapes[key], ranks.get(key, -1), ("block",)))
                    runs.append([groups[prefix][first + n][rest] for n in range(depth)])
                    members += runs[-1]
            if sum(leaf.is_matrix for leaf in leaves) < 2:
                continue
            inside = set(members)
            outer = [Leaf(key, shape, ranks.get(key, -1)) for key, shape in shapes.items() if key not in inside]
            yield members, Blocks(depth, first, _sorted(leaves), _sorted(outer), _disorder(runs, ranks, depth))


def _disorder(runs: Sequence[Sequence[str]], ranks: Mapping[str, int], depth: int) -> str:
    """Return how the order of use contradicts the numbers of the blocks; "" if it does not."""
    sequences = [sorted(runs, key=lambda run: ranks.get(run[n], -1)) for n in range(depth)]
    for n in range(1, depth):
        last = max(ranks.get(run[n - 1], -1) for run in runs)
        if early := [run[n] for run in runs if ranks.get(run[n], -1) < last]:
            return f"{early[0]} is used before a parameter of the block ahead of it"
        if sequences[n] != sequences[0]:
            wrong = next(a for a, b in zip(sequences[n], sequences[0], strict=True) if a is not b)
            return f"{wrong[n]} is used at another place than {wrong[0]} of the first block"
    return ""


def _stacked(shapes: Mapping[str, Shape], ranks: Mapping[str, int]) -> Iterator[tuple[list[str], Blocks]]:
    """Yield divisions in which the parameters of all blocks are stacked on the first axis of arrays."""
    prefixes = {key[: match.end()] for key in shapes for match in re.finditer(r"[./]", key)}
    for prefix in sorted(prefixes):
        members = [key for key in shapes if key.startswith(prefix)]
        depths = {shapes[key][0] if shapes[key] else 0 for key in members}
        if len(depths) != 1 or len(members) == len(shapes):
            continue
        [depth] = depths
        leaves = [Leaf(key, shapes[key], ranks.get(key, -1), (), True) for key in members]
        if depth and sum(leaf.is_matrix for leaf in leaves) >= 2 and any(not leaf.is_matrix for leaf in leaves):
            outer = [Leaf(key, shape, ranks.get(key, -1)) for key, shape in shapes.items() if key not in members]
            yield members, Blocks(depth, 0, _sorted(leaves), _sorted(outer))


def _sorted(leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
    return tuple(sorted(leaves, key=lambda leaf: leaf.rank))


def group_heads(leaves: Sequence[Leaf]) -> tuple[tuple[Leaf, ...], int] | None:
    """Return the parameters of a block with a list of heads as one parameter, and the number of heads; None without one."""
    groups: dict[str, dict[int, dict[str, Leaf]]] = defaultdict(lambda: defaultdict(dict))
    for leaf in leaves:
        for number in _NUMBER.finditer(leaf.key):
            groups[leaf.key[: number.start()]][int(number[0])][leaf.key[number.end() :]] = leaf
    grouped: dict[Leaf, Leaf] = {}
    counts = set()
    for prefix, numbered in groups.items():
        first, count = min(numbered), len(numbered)
        structures = [{rest: leaf.shape for rest, leaf in inner.items()} for inner in numbered.values()]
        uniform = count > 1 and set(numbered) == set(range(first, first + count))
        if (
            uniform
            and all(each == structures[0] for each in structures)
            and any(leaf.is_matrix for leaf in numbered[first].values())
        ):
            counts.add(count)
            field = "{head}" if not first else f"{{head+{first}}}"
            for inner in numbered.values():
                for rest, leaf in inner.items():
                    base = numbered[first][rest]
                    grouped[leaf] = replace(base, key=f"{prefix}{field}{rest}", axes=(*base.axes, "head"))
    if len(counts) != 1:
        return None
    return _sorted(list(dict.fromkeys(grouped.get(leaf, leaf) for leaf in leaves))), counts.pop()


def join_words(keys: Sequence[str], axis: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the pattern of keys that differ in one word, and these words; None if they differ in more.

    >>> join_words(["attn.to_q.weight", "attn.to_k.weight"], "qkv")
    ("attn.to_{qkv}.weight", ("q", "k"))
    """
    prefix = _common_start(keys)
    rests = [key[len(prefix) :] for key in keys]
    suffix = _common_start([rest[::-1] for rest in rests])[::-1]
    words = tuple(rest[: len(rest) - len(suffix)] for rest in rests)
    if len(set(words)) != len(words) or not all(re.fullmatch(r"\w+", word) for word in words):
        return None
    return f"{prefix}{{{axis}}}{suffix}", words


def _common_start(texts: Sequence[str]) -> str:
    """Return the longest text with which all of some texts begin."""
    count = 0
    while all(len(text) > count and text[count] == texts[0][count] for text in texts):
        count += 1
    return texts[0][:count]
