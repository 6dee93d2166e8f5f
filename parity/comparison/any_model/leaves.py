"""The parameters of two models as if every library wrote modules the same way.

One of a stack of blocks counts as a block of its own, and a fused query, key and value as three, where the other side has
them so.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from numpy.typing import NDArray

from parity.comparison.any_model.names import words

Path = tuple[str, ...]

FLAX_ROLES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias", "mean": "mean", "var": "var"}
TORCH_ROLES = {"weight": "weight", "bias": "bias", "running_mean": "mean", "running_var": "var"}
QKV = ("query", "key", "value")


class Leaf(NamedTuple):
    """One parameter, or the part of an array that counts as one.

    path: the names of its module.
    role: weight, bias, mean or var.
    kernel: whether it is a flax kernel, whose axes move.
    shape: of the parameter itself.
    frame: for each dimension of the array, the axes of the parameter (by number) and the fixed places that it holds.
    """

    key: str
    path: Path
    role: str
    kernel: bool
    shape: tuple[int, ...]
    frame: tuple[tuple[int | str, ...], ...]

    def line(self, axes: Sequence[str]) -> str:
        """The layout, with words (or 1, or nothing, or several) for the parameter's own axes."""
        dims = [" ".join(entry if isinstance(entry, str) else axes[entry] for entry in dim) for dim in self.frame]
        texts = [" ".join(word for word in dim.split() if word != "1") or "1" for dim in dims]
        return f"{self.key} | {' '.join(f'({dim})' if ' ' in dim else dim for dim in texts) or '1'}"

    def part(self, axis: int, word: str, place: int, length: int, path: Path) -> "Leaf":
        """One of `length` places of an axis, as a parameter of its own."""
        whole, fixed = self.shape[axis] == length, f"{word}={place}"
        shape = list(self.shape)
        shape[axis : axis + 1] = [] if whole else [shape[axis] // length]

        def renumbered(entry: int | str) -> tuple[int | str, ...]:
            if isinstance(entry, str) or entry < axis:
                return (entry,)
            if entry == axis:
                return (fixed,) if whole else (fixed, entry)
            return (entry - whole,)

        frame = tuple(tuple(new for entry in dim for new in renumbered(entry)) for dim in self.frame)
        return self._replace(path=path, shape=tuple(shape), frame=frame)

    def turned(self) -> "Leaf":
        """The same matrix, its two axes in the other order."""
        frame = tuple(tuple(entry if isinstance(entry, str) else 1 - entry for entry in dim) for dim in self.frame)
        return self._replace(shape=self.shape[::-1], frame=frame)

    def view(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return what it holds of its array."""
        sizes = [[self.shape[entry] for entry in dim if isinstance(entry, int)] for dim in self.frame]
        places = [[int(entry.partition("=")[2]) for entry in dim if isinstance(entry, str)] for dim in self.frame]
        index = tuple(
            slice(place[0] * prod(own), (place[0] + 1) * prod(own)) if place else slice(None)
            for own, place in zip(sizes, places, strict=True)
        )
        return array[index]


def flax_leaf(key: str, shape: tuple[int, ...]) -> Leaf:
    """A leaf of a tree; what is not called as layers call theirs is a module of its own."""
    path = tuple(key.removeprefix("batch_stats/").split("/"))
    role = FLAX_ROLES.get(path[-1])
    return _leaf(key, path[:-1] if role else path, role, path[-1] == "kernel", shape)


def torch_leaf(key: str, shape: tuple[int, ...]) -> Leaf:
    """An entry of a state dict, alike."""
    path = tuple(key.split("."))
    role, own = (
        TORCH_ROLES.get(path[-1]),
        re.fullmatch(r"((?:in|q|k|v)_proj)_(weight|bias)", path[-1]),
    )  # of MultiheadAttention
    if own:
        return _leaf(key, (*path[:-1], own[1]), own[2], False, shape)
    return _leaf(key, path[:-1] if role else path, role, False, shape)


def _leaf(key: str, path: Path, role: str | None, kernel: bool, shape: tuple[int, ...]) -> Leaf:
    return Leaf(key, path, role or "weight", kernel, shape, tuple((n,) for n in range(len(shape))))


# The same modules on both sides -------------------------------------------------------------------------------------


def unstacked(flax: list[Leaf], torch: list[Leaf]) -> list[Leaf]:
    """Flax's leaves with every stack of blocks, as of nn.scan, unrolled.

    A stack is a subtree whose leaves are all as long as a numbered list of torch's modules that holds as many numbers.
    """
    lists: dict[Path, dict[int, int]] = defaultdict(Counter)
    for leaf in torch:
        for n, part in enumerate(leaf.path):
            if part.isdigit():
                lists[leaf.path[:n]][int(part)] += prod(leaf.shape)
    known = {(len(items), sum(items.values())) for items in lists.values()}
    subtrees: dict[Path, list[Leaf]] = defaultdict(list)
    for leaf in flax:
        for n in range(len(leaf.path) + 1):
            subtrees[leaf.path[:n]].append(leaf)
    stacks: list[Path] = []
    for path in sorted(subtrees, key=len):
        leaves, inside = subtrees[path], any(path[: len(outer)] == outer for outer in stacks)
        lengths = {leaf.shape[:1] for leaf in leaves}
        if not inside and len(lengths) == 1 and all(lengths):
            [(length,)] = lengths
            if (length, sum(prod(leaf.shape) for leaf in leaves)) in known:
                stacks.append(path)
    out = []
    for leaf in flax:
        depth = next((len(path) for path in stacks if leaf.path[: len(path)] == path), None)
        places = range(leaf.shape[0]) if depth is not None else ()
        out += [
            leaf.part(0, "block", n, leaf.shape[0], (*leaf.path[:depth], str(n), *leaf.path[depth:])) for n in places
        ] or [leaf]
    return out


def split(leaves: list[Leaf], others: list[Leaf]) -> list[Leaf]:
    """The leaves with every fused query, key and value as three, if the other side has them so."""
    said = {word for leaf in others for part in leaf.path for word in words(part)}
    if not said.issuperset(QKV):
        return leaves
    out = []
    for leaf in leaves:
        fused = next((n for n, part in enumerate(leaf.path) if words(part) == ("qkv",)), None)
        if fused is None:
            out.append(leaf)
            continue
        axis = _fused_axis(leaf)
        for n, name in enumerate(QKV):
            path = (*leaf.path[:fused], name, *leaf.path[fused + 1 :])
            part = leaf if axis is None else leaf.part(axis, "qkv", n, 3, path)
            out.append(part.turned() if axis == 1 and not leaf.kernel else part)
    return out


def _fused_axis(leaf: Leaf) -> int | None:
    """Which axis of a fused parameter holds the three: outputs, which flax's kernels have last, and torch's first."""
    axes = range(1, len(leaf.shape)) if leaf.kernel else range(1)
    if not leaf.kernel and len(leaf.shape) == 2 and leaf.shape[1] == 3 * leaf.shape[0]:
        return 1  # but for matrices that torch multiplies from the right
    return next((n for n in axes if leaf.shape[n] == 3), next((n for n in axes if leaf.shape[n] % 3 == 0), None))
