"""Matching of the modules of a Flax model with the modules of a PyTorch model by names, order and shapes.

Two modules can match if each of their parameters fits one of the rules below, which are the conventions of the
frameworks.  Among several candidates names decide first.  Numbers in names give the order of modules with the same name.
If neither names nor order decide, the match is ambiguous, which is an error.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.comparison.any_model.names import numbers, similarity
from parity.comparison.any_model.parameters import (
    Axes,
    Parameter,
    Path,
    flax_parameter,
    split_fused,
    torch_parameter,
    unstack_blocks,
)
from vit_spec import InputError

Shapes = Mapping[str, tuple[int, ...]]
MatchedEntries = tuple[dict[str, NDArray[np.bool_]], dict[str, NDArray[np.bool_]]]  # masks by key, of flax and of torch

Uses = tuple[Sequence[str], Sequence[str]]  # keys of flax and of torch, in the order of their first use
Rules = tuple[tuple[str, str], ...]
Rule = tuple[str, str, str]  # the axes in flax and in torch, and a note
Candidates = Mapping[tuple[Path, Path], Mapping[str, Rule]]  # modules that can match -> the rule of each role

# Axes of a kernel in flax and in torch; the first rule that fits the shapes applies.
KERNELS: Rules = (
    ("in out", "out in"),  # Dense
    ("in head dim", "(head dim) in"),  # DenseGeneral to heads
    ("head dim out", "out (head dim)"),  # DenseGeneral from heads
    ("in qkv head dim", "(qkv head dim) in"),
    ("x in out", "out in x"),  # Conv, also with groups
    ("y x in out", "out in y x"),
    ("z y x in out", "out in z y x"),
    ("in out", "out in 1"),  # Dense in flax, a convolution with a kernel of one entry in torch
    ("in out", "out in 1 1"),
)
SQUARE, SQUARE_AS_IT_IS = "square: transposed", "square: not transposed"  # notes of matrices with unknown orders of axes
UNTRANSPOSED: Rules = (("in out", "in out"),)  # torch multiplies from the right; tried only if nothing else fits
# ConvTranspose: flax also flips these kernels, which no layout expresses.
FLIPPED = [("x in out", "in out x"), ("y x in out", "in out y x"), ("z y x in out", "in out z y x")]

# Axis names of parameters that are not kernels.  The index is the number of axes longer than one in flax.
# SAME_AXES: torch has the same axes.  MERGED_AXES: torch merges them into one.
SAME_AXES = ["", "width", "row width", "x row width", "y x row width"]
MERGED_AXES = ["", "width", "head dim", "qkv head dim", "part qkv head dim"]


@dataclass(frozen=True)
class Evidence:
    """What is known of two models besides the names and shapes of their parameters.

    uses: for both sides, the keys in the order in which a forward pass first uses them; it decides where names do not.
    axes: the order of the axes of PyTorch's matrices by key, where it is known.
    """

    uses: Uses | None = None
    axes: Mapping[str, Axes] = field(default_factory=dict)


@dataclass(frozen=True)
class Module:
    """The parameters of one module, by role."""

    path: Path
    parameters: Mapping[str, Parameter]

    @cached_property
    def pattern(self) -> str:
        """The path with "#" for its numbers, and each parameter's role, number of axes, and whether it is a kernel."""
        kinds = sorted((role, each.is_kernel, len(each.shape)) for role, each in self.parameters.items())
        return f"{re.sub(r'[0-9]+', '#', '/'.join(self.path))} {kinds}"

    @cached_property
    def inner_pattern(self) -> str:
        """The pattern and the numbers in the last name of the path."""
        return f"{self.pattern} {numbers(self.path[-1:])}"

    @cached_property
    def size(self) -> int:
        """Number of entries of all parameters."""
        return sum(prod(each.shape) for each in self.parameters.values())


def match_lines(
    flax: Shapes,
    torch: Shapes,
    matched: MatchedEntries,
    known: Sequence[tuple[str, str]],
    optional: set[str],
    evidence: Evidence,
) -> tuple[list[tuple[str, str]], set[str]]:
    """Return a line and a note for each parameter that is not matched yet, and the optional torch keys left unmatched.

    flax, torch: shapes by key.
    matched: entries that the lines of the caller cover.
    known: pairs of a flax key and a torch key in these lines; the other parameters of their modules match too.
    optional: torch keys that need no counterpart.
    evidence: what is known of the models besides names and shapes.

    Raises:
        InputError: a parameter is ambiguous or has no counterpart.
    """
    left = [flax_parameter(key, shape) for key, shape in flax.items()]
    right = [torch_parameter(key, shape, evidence.axes.get(key)) for key, shape in torch.items()]
    attempts = [left]
    if (unstacked := unstack_blocks(left, right)) != left:
        attempts.append(unstacked)
    for n, parameters in enumerate(attempts):
        a, b = split_fused(parameters, right), split_fused(right, parameters)
        known_pairs = _known_module_pairs(a, b, known)
        try:
            return _match_modules(
                _unmatched_modules(a, matched[0]), _unmatched_modules(b, matched[1]), known_pairs, optional, evidence.uses
            )
        except InputError:
            if n == len(attempts) - 1:
                raise
    raise AssertionError("there is always an attempt")


# Rules --------------------------------------------------------------------------------------------------------------


@cache
def _find_rule(
    is_kernel: bool, flax: tuple[int, ...], torch: tuple[int, ...], rules: Rules, order: str | None, is_torch_like: bool
) -> Rule | None:
    """Return the rule for two shapes of the same role, or None if none fits.

    Its note is not empty if other axes would fit the same shapes, so that a convention or other evidence decided.

    order: how the order of torch's axes is known; see `Parameter`.
    is_torch_like: whether the axes of flax are known to have torch's order.
    """
    if is_kernel:
        fitting = [rule for rule in rules if _fits(rule, flax, torch)]
        if not fitting:
            return None
        sizes = dict(zip(fitting[0][0].split(), flax, strict=True))
        notes = ["heads in order"] if "head" in sizes and "(" in fitting[0][1] else []
        n_in, n_out = (prod(n for axis, n in sizes.items() if axis in group) for group in _input_and_output_axes(sizes))
        is_square = n_in == n_out and fitting[0][1] != "in out"
        notes += [SQUARE] if is_square and order is None else []
        note = f"by convention: {'; '.join(notes)}" if notes else ""
        return fitting[0][0], fitting[0][1], "; ".join(filter(None, [note, order if is_square else ""]))
    note = ""
    if len(flax) == len(torch) == 2 and flax == torch[::-1] and not is_torch_like:
        if flax != torch:
            return "in out", "out in", ""
        note = order or f"by convention: {SQUARE_AS_IT_IS}"
    a, b = ([n for n in shape if n > 1] for shape in (flax, torch))
    if len(a) >= len(SAME_AXES) or (a != b and b != [prod(a)]):
        return None
    axes = (SAME_AXES if a == b else MERGED_AXES)[len(a)].split()
    torch_axes = axes if a == b else [" ".join(axes)]
    return " ".join(_name_axes(flax, iter(axes))), " ".join(_name_axes(torch, iter(torch_axes))), note


def _input_and_output_axes(sizes: Mapping[str, int]) -> tuple[set[str], set[str]]:
    """Return the input axes of a flax kernel, and its output axes."""
    ends = {"in", "out"}
    if ends <= sizes.keys():
        return {"in"}, {"out"}
    return ({"in"}, set(sizes) - ends) if "in" in sizes else (set(sizes) - ends, {"out"})


def _name_axes(shape: tuple[int, ...], axes: Iterator[str]) -> Iterator[str]:
    """Yield the next name for each axis longer than one, and "1" for the others."""
    for n in shape:
        axis = next(axes) if n > 1 else "1"
        yield f"({axis})" if " " in axis else axis


def _split_dims(axes: str) -> list[str]:
    """Return the axes in each dimension, e.g. ["head dim", "in"] for "(head dim) in"."""
    return [dim.strip("()") for dim in re.findall(r"\([^)]*\)|\S+", axes)]


def _fits(rule: tuple[str, str], flax: tuple[int, ...], torch: tuple[int, ...]) -> bool:
    """Return whether a rule for kernels gives these shapes the same lengths of axes on both sides."""
    left, right = rule[0].split(), _split_dims(rule[1])
    if len(left) != len(flax) or len(right) != len(torch):
        return False
    sizes = {"1": 1, **dict(zip(left, flax, strict=True))}
    return all(prod(sizes[axis] for axis in dim.split()) == n for dim, n in zip(right, torch, strict=True))


def _find_rules(flax: Module, torch: Module, rules: Rules) -> dict[str, Rule] | None:
    """Return the rule of each role; None if the roles differ or a parameter fits no rule."""
    if flax.size != torch.size or flax.parameters.keys() != torch.parameters.keys():
        return None
    found = {}
    for role, each in flax.parameters.items():
        other, is_torch_like = torch.parameters[role], each.key.endswith(("/weight", "/embedding"))
        found[role] = _find_rule(each.is_kernel, each.shape, other.shape, rules, other.order, is_torch_like)
    return {role: rule for role, rule in found.items() if rule} if all(found.values()) else None


def _module_lines(flax: Module, torch: Module, rules: Mapping[str, Rule]) -> list[tuple[str, str]]:
    """Return a line and a note for each parameter of two modules."""
    return [
        (f"{flax.parameters[role].layout(_split_dims(a))} <-> {torch.parameters[role].layout(_split_dims(b))}", note)
        for role, (a, b, note) in rules.items()
    ]


# Matching -----------------------------------------------------------------------------------------------------------


def _unmatched_modules(parameters: list[Parameter], matched: Mapping[str, NDArray[np.bool_]]) -> list[Module]:
    """Return the modules of the parameters that the caller's lines do not cover."""
    modules: dict[Path, dict[str, Parameter]] = defaultdict(dict)
    for parameter in parameters:
        if parameter.key not in matched or not parameter.view(matched[parameter.key]).all():
            modules[parameter.path][parameter.role] = parameter
    return [Module(path, by_role) for path, by_role in modules.items()]


def _known_module_pairs(
    flax: list[Parameter], torch: list[Parameter], known: Sequence[tuple[str, str]]
) -> list[tuple[Path, Path]]:
    """Return pairs of modules whose keys the caller's lines match, if both sides have as many parameters with that key."""
    paths: list[dict[str, list[Path]]] = []
    for parameters in (flax, torch):
        paths.append(defaultdict(list))
        for parameter in parameters:
            paths[-1][parameter.key].append(parameter.path)
    partners: dict[str, list[Path]] = defaultdict(list)
    for a, b in known:
        partners[a] += paths[1][b]
    both = [(paths[0][a], found) for a, found in partners.items()]
    return [pair for left, right in both if len(left) == len(right) for pair in zip(left, right, strict=True)]


def _match_modules(
    flax: list[Module],
    torch: list[Module],
    known_pairs: list[tuple[Path, Path]],
    optional: set[str],
    uses: Uses | None,
) -> tuple[list[tuple[str, str]], set[str]]:
    """Match modules, and return a line and a note for each parameter, and the optional torch keys left unmatched.

    The most certain matches come first.  Each step takes the first of these that finds a match: groups of modules with the
    same pattern, groups with the same inner pattern, single modules, each by their names; then the same groups without a
    word in common, if each is the only candidate of the other; then modules in the order in which a forward pass uses them.

    Raises:
        InputError: a module is ambiguous or has no counterpart.
    """
    candidates = {(a.path, b.path): rules for a in flax for b in torch if (rules := _find_rules(a, b, KERNELS))}
    unfit = [b for b in torch if not any((a.path, b.path) in candidates for a in flax)]
    candidates |= {(a.path, b.path): rules for a in flax for b in unfit if (rules := _find_rules(a, b, UNTRANSPOSED))}
    by_path, chosen = {a.path: a for a in flax}, {b: a for a, b in known_pairs if (a, b) in candidates}
    group_keys: list[Callable[[Module], str]] = [
        lambda m: m.pattern,
        lambda m: m.inner_pattern,
        lambda m: "/".join(m.path),
    ]
    steps = [(group_key, by_name) for by_name in (True, False) for group_key in group_keys]
    while True:
        flax_left = [a for a in flax if a.path not in chosen.values()]
        torch_left = [b for b in torch if b.path not in chosen]
        pairs = (_unambiguous_pairs(flax_left, torch_left, candidates, key, by_name) for key, by_name in steps)
        if not (new := next(filter(None, pairs), None)):
            break
        chosen |= new
    by_use = _pairs_by_use(flax_left, torch_left, candidates, uses) if uses else {}
    chosen |= by_use
    flax_left = [a for a in flax_left if a.path not in by_use.values()]
    torch_left = [b for b in torch_left if b.path not in by_use]
    unmatched = {each.key for b in torch_left for each in b.parameters.values()} & optional
    torch_left = [b for b in torch_left if not {each.key for each in b.parameters.values()} <= unmatched]
    if torch_left or flax_left:
        raise _unmatched_error(flax_left, torch_left, candidates)
    ordered = {
        b.path for b in torch if b.path in chosen and _is_matched_by_order(by_path[chosen[b.path]], b, flax, candidates)
    }
    return [
        (line, "; ".join(filter(None, ["by order of use" if b.path in by_use else "by order" * (b.path in ordered), note])))
        for b in torch
        if b.path in chosen
        for line, note in _module_lines(by_path[chosen[b.path]], b, candidates[chosen[b.path], b.path])
    ], unmatched


def _is_matched_by_order(a: Module, b: Module, flax: list[Module], candidates: Candidates) -> bool:
    """Return whether only the order of the numbers in the last name decided, and these numbers differ."""
    alike = [c for c in flax if c.pattern == a.pattern and c.path[:-1] == a.path[:-1] and (c.path, b.path) in candidates]
    return len(alike) > 1 and numbers(a.path[-1:]) != numbers(b.path[-1:])


def _unambiguous_pairs(
    flax: list[Module],
    torch: list[Module],
    candidates: Candidates,
    group_key: Callable[[Module], str],
    by_name: bool,
) -> dict[Path, Path]:
    """Return torch path -> flax path for groups of modules that are each other's best candidate, without a tie.

    group_key: modules with the same key are a group; a group matches only as a whole, in the order of its numbers.
    by_name: match groups whose names have words in common; otherwise groups whose names have none, and which are each
        other's only candidate.
    """
    groups = [_group_paths(modules, group_key) for modules in (flax, torch)]
    scores = {
        (a, b): similarity(left[0], right[0])
        for (a, left), (b, right) in product(groups[0].items(), groups[1].items())
        if len(left) == len(right) and all(pair in candidates for pair in zip(left, right, strict=True))
    }
    by_flax, by_torch = defaultdict(list), defaultdict(list)
    for (a, b), score in scores.items():
        by_flax[a].append(score)
        by_torch[b].append(score)
    best = [
        (a, b)
        for (a, b), score in scores.items()
        if (score > 0) == by_name
        and all(sorted(row)[-1:] == [score] and row.count(score) == 1 for row in (by_flax[a], by_torch[b]))
    ]
    return {b: a for left, right in best for a, b in zip(groups[0][left], groups[1][right], strict=True)}


def _pairs_by_use(flax: list[Module], torch: list[Module], candidates: Candidates, uses: Uses) -> dict[Path, Path]:
    """Return torch path -> flax path for modules that a forward pass uses in the same order.

    Modules are matched only if as many modules of the other side can match each of them, and all of these can.
    """
    ordered = [_sort_by_use(modules, keys) for modules, keys in zip((flax, torch), uses, strict=True)]
    partners = {b.path: frozenset(a.path for a in ordered[0] if (a.path, b.path) in candidates) for b in ordered[1]}
    groups: dict[frozenset[Path], list[Path]] = defaultdict(list)
    for b in ordered[1]:
        groups[partners[b.path]].append(b.path)
    pairs: dict[Path, Path] = {}
    for possible, paths in groups.items():
        if possible and len(possible) == len(paths) and not any(possible & other for other in groups if other != possible):
            pairs |= dict(zip(paths, [a.path for a in ordered[0] if a.path in possible], strict=True))
    return pairs


def _sort_by_use(modules: list[Module], keys: Sequence[str]) -> list[Module]:
    """Return modules in the order in which a forward pass uses the first of their keys."""
    ranks = {key: n for n, key in enumerate(keys)}

    def rank(module: Module) -> tuple[int, tuple[int, ...]]:
        return min(ranks.get(each.key, len(ranks)) for each in module.parameters.values()), numbers(module.path)

    return sorted(modules, key=rank)


def _group_paths(modules: list[Module], group_key: Callable[[Module], str]) -> dict[str, list[Path]]:
    """Return the paths of the modules in each group, in the order of the numbers in the paths."""
    groups: dict[str, list[Path]] = defaultdict(list)
    for module in sorted(modules, key=lambda module: numbers(module.path)):
        groups[group_key(module)].append(module.path)
    return groups


def _unmatched_error(flax: list[Module], torch: list[Module], candidates: Candidates) -> InputError:
    """Return the error for modules that are left unmatched."""
    for b in torch:
        possible = [a for a in flax if (a.path, b.path) in candidates]
        best = max((similarity(a.path, b.path) for a in possible), default=0.0)
        if len(equal := [a for a in possible if similarity(a.path, b.path) == best]) > 1:
            possible = equal
        if possible:  # a single one is also a candidate for another module
            names = [*dict.fromkeys(_describe_keys(a) for a in possible)]
            return InputError(
                f"{_describe_keys(b)} of torch could be {' or '.join(names[:4])}{' or ...' if len(names) > 4 else ''} of "
                "flax: the shapes fit and the names do not decide; give the right one in layouts, such as "
                f"{_module_lines(possible[0], b, candidates[possible[0].path, b.path])[0][0]!r}"
            )
    for a, b in product(flax, torch):
        left, right = a.parameters.get("weight"), b.parameters.get("weight")
        if left and right and left.is_kernel and any(_fits(rule, left.shape, right.shape) for rule in FLIPPED):
            return InputError(
                f"{left.key} {left.shape} and {right.key} {right.shape} look like a transposed convolution, whose kernel "
                "flax flips and torch does not, which no layout expresses; give the flax layer transpose_kernel=True"
            )
    sides = [
        f"{side} {'; '.join(keys[:4])}{'; ...' if len(keys) > 4 else ''}"
        for side, modules in (("torch's", torch), ("flax's", flax))
        if (keys := [*dict.fromkeys(_describe_keys(module) for module in modules)])
    ]
    return InputError(
        f"no counterpart by name and shape for {' and '.join(sides)}; "
        "give it in layouts as 'flax key | axes <-> torch key | axes'"
    )


def _describe_keys(module: Module) -> str:
    """Return a module's keys with their shapes."""
    return " and ".join(f"{each.key} {each.shape}" for each in module.parameters.values())


# Folding ------------------------------------------------------------------------------------------------------------


def fold_lines(lines: Sequence[tuple[str, str]], flax: Shapes, torch: Shapes) -> list[tuple[str, str]]:
    """Return lines and notes with lines that differ only in a number replaced by one line with {n} or an axis.

    The number must count from 0 on both sides, and all arrays must have the same shape.
    """
    groups: dict[Any, list[list[str]]] = defaultdict(list)
    for line, note in lines:
        a, b = _line_keys(line)
        groups[re.sub(r"[0-9]+", "#", line), flax[a], torch[b], note].append(re.split(r"([0-9]+)", line))
    keys = flax.keys() | torch.keys()
    return [(line, note) for (*_, note), group in groups.items() for line in _fold_group(group, keys)]


def _line_keys(line: str) -> list[str]:
    """Return the flax key and the torch key of a line."""
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
        next_keys = [re.sub(r"{\w+}", str(n), key) for line, n in folded for key in _line_keys(line) if "{" in key]
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
