"""Pairing the modules of a Flax tree with those of a PyTorch module by their names, their order and their shapes.

Modules pair when each of their parameters fits by one of the rules that the frameworks follow.  Of several that fit,
names decide, numbers give the order, and what neither tells apart is an error.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.comparison.any_model.leaves import Leaf, Path, flax_leaf, split, torch_leaf, unstacked
from parity.comparison.any_model.names import likeness, numbers
from vit_spec import InputError

Shapes = Mapping[str, tuple[int, ...]]
Taken = tuple[dict[str, NDArray[np.bool_]], dict[str, NDArray[np.bool_]]]  # entries that lines hold, in flax and in torch

Rules = tuple[tuple[str, str], ...]
Rule = tuple[str, str, str]  # the axes in flax and in torch, and a note
Fits = Mapping[tuple[Path, Path], Mapping[str, Rule]]  # modules that can be one, and how

# How a kernel lies in flax and in torch; the first rule that fits holds.
KERNELS: Rules = (
    ("in out", "out in"),  # Dense
    ("in head dim", "(head dim) in"),  # DenseGeneral to heads
    ("head dim out", "out (head dim)"),  # DenseGeneral from heads
    ("in qkv head dim", "(qkv head dim) in"),
    ("x in out", "out in x"),  # Conv, of groups too
    ("y x in out", "out in y x"),
    ("z y x in out", "out in z y x"),
    ("in out", "out in 1"),  # a convolution of one pixel
    ("in out", "out in 1 1"),
)
UNMOVED: Rules = (("in out", "in out"),)  # a matrix that torch multiplies from the right: where nothing else fits
FLIPPED = [("x in out", "in out x"), ("y x in out", "in out y x"), ("z y x in out", "in out z y x")]  # ConvTranspose

# What the axes of all else are called, by how many are longer than one: where both sides have them, and where torch merges.
ARRAYS = ["", "width", "row width", "x row width", "y x row width"]
HEADS = ["", "width", "head dim", "qkv head dim", "part qkv head dim"]


@dataclass(frozen=True)
class Module:
    """The leaves of one path, by role."""

    path: Path
    leaves: Mapping[str, Leaf]

    @cached_property
    def pattern(self) -> str:
        """The path without its numbers, and what kind of module it is."""
        kinds = sorted((role, leaf.kernel, len(leaf.shape)) for role, leaf in self.leaves.items())
        return f"{re.sub(r'[0-9]+', '#', '/'.join(self.path))} {kinds}"

    @cached_property
    def inner_pattern(self) -> str:
        """The same, with the numbers of its own name."""
        return f"{self.pattern} {numbers(self.path[-1:])}"

    @cached_property
    def size(self) -> int:
        """How many numbers it holds."""
        return sum(prod(leaf.shape) for leaf in self.leaves.values())


def lines(
    flax: Shapes, torch: Shapes, taken: Taken, known: Sequence[tuple[str, str]], optional: set[str]
) -> tuple[list[tuple[str, str]], set[str]]:
    """Return a line for each parameter that is not taken yet, with a note, and the optional torch keys that are left.

    known: keys that lines were given for, which bind the rest of their modules.

    Raises:
        InputError: what is ambiguous or has no counterpart.
    """
    left, right = [flax_leaf(key, shape) for key, shape in flax.items()], [torch_leaf(key, s) for key, s in torch.items()]
    attempts = [left]
    if (unrolled := unstacked(left, right)) != left:
        attempts.append(unrolled)
    for n, leaves in enumerate(attempts):
        a, b = split(leaves, right), split(right, leaves)
        bound = _bound(a, b, known)
        try:
            return _matched(_modules(a, taken[0]), _modules(b, taken[1]), bound, optional)
        except InputError:
            if n == len(attempts) - 1:
                raise
    raise AssertionError("there is always an attempt")


# Rules --------------------------------------------------------------------------------------------------------------


@cache
def _rule(kernel: bool, flax: tuple[int, ...], torch: tuple[int, ...], rules: Rules) -> Rule | None:
    """The axes of two shapes of the same role, and what only convention says; nothing where they do not fit."""
    if kernel:
        fits = [rule for rule in rules if _fits(rule, flax, torch)]
        if not fits:
            return None
        sides = dict(zip(fits[0][0].split(), flax, strict=True))
        notes = ["heads in order"] if "head" in sides and "(" in fits[0][1] else []
        inner, outer = (prod(n for word, n in sides.items() if word in group) for group in _ends(sides))
        notes += ["square: inputs and outputs change places"] if inner == outer and fits[0][1] != "in out" else []
        return fits[0][0], fits[0][1], f"by convention: {'; '.join(notes)}" if notes else ""
    a, b = ([n for n in shape if n > 1] for shape in (flax, torch))
    if len(a) >= len(ARRAYS) or (a != b and b != [prod(a)]):
        return None
    names = (ARRAYS if a == b else HEADS)[len(a)].split()
    merged = names if a == b else [" ".join(names)]
    return " ".join(_worded(flax, iter(names))), " ".join(_worded(torch, iter(merged))), ""


def _ends(sides: Mapping[str, int]) -> tuple[set[str], set[str]]:
    """Which axes of a kernel are its inputs, and which its outputs."""
    ends = {"in", "out"}
    if ends <= sides.keys():
        return {"in"}, {"out"}
    return ({"in"}, set(sides) - ends) if "in" in sides else (set(sides) - ends, {"out"})


def _worded(shape: tuple[int, ...], axes: Iterator[str]) -> Iterator[str]:
    for n in shape:
        axis = next(axes) if n > 1 else "1"
        yield f"({axis})" if " " in axis else axis


def _dims(axes: str) -> list[str]:
    return [dim.strip("()") for dim in re.findall(r"\([^)]*\)|\S+", axes)]


def _fits(rule: tuple[str, str], flax: tuple[int, ...], torch: tuple[int, ...]) -> bool:
    left, right = rule[0].split(), _dims(rule[1])
    if len(left) != len(flax) or len(right) != len(torch):
        return False
    sizes = {"1": 1, **dict(zip(left, flax, strict=True))}
    return all(prod(sizes[word] for word in dim.split()) == n for dim, n in zip(right, torch, strict=True))


def _fitting(flax: Module, torch: Module, rules: Rules) -> dict[str, Rule] | None:
    """How each role's parameters fit; nothing where one does not."""
    if flax.size != torch.size or flax.leaves.keys() != torch.leaves.keys():
        return None
    found = {role: _rule(leaf.kernel, leaf.shape, torch.leaves[role].shape, rules) for role, leaf in flax.leaves.items()}
    return {role: rule for role, rule in found.items() if rule} if all(found.values()) else None


def _lines(flax: Module, torch: Module, fit: Mapping[str, Rule]) -> list[tuple[str, str]]:
    """A line and a note for each parameter."""
    return [
        (f"{flax.leaves[role].line(_dims(a))} <-> {torch.leaves[role].line(_dims(b))}", note)
        for role, (a, b, note) in fit.items()
    ]


# Pairing ------------------------------------------------------------------------------------------------------------


def _modules(leaves: list[Leaf], taken: Mapping[str, NDArray[np.bool_]]) -> list[Module]:
    modules: dict[Path, dict[str, Leaf]] = defaultdict(dict)
    for leaf in leaves:
        if leaf.key not in taken or not leaf.view(taken[leaf.key]).all():
            modules[leaf.path][leaf.role] = leaf
    return [Module(path, found) for path, found in modules.items()]


def _bound(flax: list[Leaf], torch: list[Leaf], known: Sequence[tuple[str, str]]) -> list[tuple[Path, Path]]:
    """The modules that given lines pair, where each array of torch's is one parameter."""
    paths: list[dict[str, list[Path]]] = []
    for leaves in (flax, torch):
        paths.append(defaultdict(list))
        for leaf in leaves:
            paths[-1][leaf.key].append(leaf.path)
    partners: dict[str, list[Path]] = defaultdict(list)
    for a, b in known:
        partners[a] += paths[1][b]
    both = [(paths[0][a], found) for a, found in partners.items()]
    return [pair for left, right in both if len(left) == len(right) for pair in zip(left, right, strict=True)]


def _matched(
    flax: list[Module], torch: list[Module], bound: list[tuple[Path, Path]], optional: set[str]
) -> tuple[list[tuple[str, str]], set[str]]:
    """Pair modules, the surest first: patterns of many before single ones, and names before being the only one to fit."""
    fits = {(a.path, b.path): found for a in flax for b in torch if (found := _fitting(a, b, KERNELS))}
    lonely = [b for b in torch if not any((a.path, b.path) in fits for a in flax)]
    fits |= {(a.path, b.path): found for a in flax for b in lonely if (found := _fitting(a, b, UNMOVED))}
    left, chosen = {a.path: a for a in flax}, {b: a for a, b in bound if (a, b) in fits}
    kinds: list[Callable[[Module], str]] = [lambda m: m.pattern, lambda m: m.inner_pattern, lambda m: "/".join(m.path)]
    steps = [(kind, named) for named in (True, False) for kind in kinds]
    while True:
        spare = [a for a in flax if a.path not in chosen.values()]
        rest = [b for b in torch if b.path not in chosen]
        pairs = (_sure(spare, rest, fits, kind, named) for kind, named in steps)
        if not (new := next(filter(None, pairs), None)):
            break
        chosen |= new
    kept = {leaf.key for b in rest for leaf in b.leaves.values()} & optional
    rest = [b for b in rest if not {leaf.key for leaf in b.leaves.values()} <= kept]
    if rest or spare:
        raise _unsettled(spare, rest, fits)
    ordered = {b.path for b in torch if b.path in chosen and _by_order(left[chosen[b.path]], b, flax, fits)}
    return [
        (line, "; ".join(filter(None, ["by order" if b.path in ordered else "", note])))
        for b in torch
        if b.path in chosen
        for line, note in _lines(left[chosen[b.path]], b, fits[chosen[b.path], b.path])
    ], kept


def _by_order(a: Module, b: Module, flax: list[Module], fits: Fits) -> bool:
    """Whether only the order of numbers, which are not the same, tells a module from its neighbours."""
    alike = [c for c in flax if c.pattern == a.pattern and c.path[:-1] == a.path[:-1] and (c.path, b.path) in fits]
    return len(alike) > 1 and numbers(a.path[-1:]) != numbers(b.path[-1:])


def _sure(
    spare: list[Module],
    rest: list[Module],
    fits: Fits,
    kind: Callable[[Module], str],
    named: bool,
) -> dict[Path, Path]:
    """The pairs, torch's to flax's, of groups that are each other's best, by name or (not named) for want of another."""
    groups = [_grouped(modules, kind) for modules in (spare, rest)]
    scores = {
        (a, b): likeness(left[0], right[0])
        for (a, left), (b, right) in product(groups[0].items(), groups[1].items())
        if len(left) == len(right) and all(pair in fits for pair in zip(left, right, strict=True))
    }
    by_flax, by_torch = defaultdict(list), defaultdict(list)
    for (a, b), score in scores.items():
        by_flax[a].append(score)
        by_torch[b].append(score)
    best = [
        (a, b)
        for (a, b), score in scores.items()
        if (score > 0) == named
        and all(sorted(row)[-1:] == [score] and row.count(score) == 1 for row in (by_flax[a], by_torch[b]))
    ]
    return {b: a for left, right in best for a, b in zip(groups[0][left], groups[1][right], strict=True)}


def _grouped(modules: list[Module], kind: Callable[[Module], str]) -> dict[str, list[Path]]:
    """The paths of modules of each kind, in the order of their numbers."""
    groups: dict[str, list[Path]] = defaultdict(list)
    for module in sorted(modules, key=lambda module: numbers(module.path)):
        groups[kind(module)].append(module.path)
    return groups


def _unsettled(spare: list[Module], rest: list[Module], fits: Fits) -> InputError:
    """What to say of modules that did not pair."""
    for b in rest:
        candidates = [a for a in spare if (a.path, b.path) in fits]
        best = max((likeness(a.path, b.path) for a in candidates), default=0.0)
        if len(equal := [a for a in candidates if likeness(a.path, b.path) == best]) > 1:
            candidates = equal
        if candidates:  # a single one is wanted by another module too
            named = [*dict.fromkeys(_keys(a) for a in candidates)]
            return InputError(
                f"{_keys(b)} of torch could be {' or '.join(named[:4])}{' or ...' if len(named) > 4 else ''} of flax: the "
                "shapes fit and the names do not decide; give the right one in layouts, such as "
                f"{_lines(candidates[0], b, fits[candidates[0].path, b.path])[0][0]!r}"
            )
    for a, b in product(spare, rest):
        left, right = a.leaves.get("weight"), b.leaves.get("weight")
        if left and right and left.kernel and any(_fits(rule, left.shape, right.shape) for rule in FLIPPED):
            return InputError(
                f"{left.key} {left.shape} and {right.key} {right.shape} look like a transposed convolution, whose kernel "
                "flax flips and torch does not: no layout says that; build flax's with transpose_kernel=True"
            )
    sides = [
        f"{side} {'; '.join(keys[:4])}{'; ...' if len(keys) > 4 else ''}"
        for side, modules in (("torch's", rest), ("flax's", spare))
        if (keys := [*dict.fromkeys(_keys(module) for module in modules)])
    ]
    return InputError(
        f"no counterpart by name and shape for {' and '.join(sides)}; "
        "give it in layouts as 'flax key | axes <-> torch key | axes'"
    )


def _keys(module: Module) -> str:
    """A module's keys, with their shapes."""
    return " and ".join(f"{leaf.key} {leaf.shape}" for leaf in module.leaves.values())


# Showing ------------------------------------------------------------------------------------------------------------


def folded(lines: Sequence[tuple[str, str]], flax: Shapes, torch: Shapes) -> list[tuple[str, str]]:
    """Write lines that differ in one number only, which counts from zero on both sides, as one with {n} or an axis."""
    groups: dict[Any, list[list[str]]] = defaultdict(list)
    for line, note in lines:
        a, b = _keys_of(line)
        groups[re.sub(r"[0-9]+", "#", line), flax[a], torch[b], note].append(re.split(r"([0-9]+)", line))
    keys = flax.keys() | torch.keys()
    return [(line, note) for (*_, note), group in groups.items() for line in _fold(group, keys)]


def _keys_of(line: str) -> list[str]:
    return [side.partition("|")[0].strip() for side in line.split("<->")]


def _fold(lines: list[list[str]], keys: Set[str]) -> list[str]:
    """Lines that differ in numbers, which are every second token; as one only where no more keys go on counting."""
    first = lines[0]
    middle = next(n for n, token in enumerate(first) if "<->" in token)
    for i, j in product(range(1, middle, 2), range(middle + 1, len(first), 2)) if len(lines) > 1 else ():
        groups: dict[str, list[list[str]]] = defaultdict(list)
        for line in lines:
            groups["".join(token for n, token in enumerate(line) if n not in (i, j))].append(line)
        braced = [(_braced(group[0], i, j), len(group)) for group in groups.values()]
        next_keys = [re.sub(r"{\w+}", str(n), key) for line, n in braced for key in _keys_of(line) if "{" in key]
        columns = [[line[n] for line in group] for group in groups.values() for n in (i, j)]
        if all(column == [*map(str, range(len(column)))] for column in columns) and not keys & {*next_keys}:
            return [line for line, _ in braced]
    return ["".join(line) for line in lines]


def _braced(line: list[str], i: int, j: int) -> str:
    """The line with its numbers at `i` and `j` as one axis: of flax's array, or spelled in both keys."""
    before, after = "".join(line[:i]), "".join(line[i + 1 : j])
    rest = "".join(line[j + 1 :])
    if before.endswith(" block="):
        return f"{before.removesuffix('=')}{after}{{block}}{rest}"
    return f"{before}{{n}}{after}{{n}}{rest}"
