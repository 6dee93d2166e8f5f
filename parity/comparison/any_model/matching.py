"""Matching of the modules of a Flax model with the modules of a PyTorch model by names, order and shapes.

Two modules can match if each of their parameters fits one of the rules of `parity.comparison.any_model.rules`.  Among
several candidates names decide first.  Numbers in names give the order of modules with the same name.  If neither names nor
order decide, the match is ambiguous, which is an error.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray

from parity.comparison.any_model.lines import ARROW
from parity.comparison.any_model.names import numbers, sameness, similarity
from parity.comparison.any_model.parameters import (
    Axes,
    Parameter,
    Path,
    flax_parameter,
    split_flax_parameter,
    split_fused,
    torch_parameter,
    unstack_blocks,
    with_own_roles,
)
from parity.comparison.any_model.rules import KERNELS, UNTRANSPOSED, Module, Rule, find_rules, module_lines
from vit_spec import InputError

Shapes = Mapping[str, tuple[int, ...]]
MatchedEntries = tuple[dict[str, NDArray[np.bool_]], dict[str, NDArray[np.bool_]]]  # masks by key, of flax and of torch

_PARAMETRIZED = "parametrizations"  # the name that torch.nn.utils.parametrize gives the modules of a computed tensor

Uses = tuple[Sequence[str], Sequence[str]]  # keys of flax and of torch, in the order of their first use
Optional = tuple[set[str], set[str]]  # keys of flax and of torch that need no counterpart
Candidates = Mapping[tuple[Path, Path], Mapping[str, Rule]]  # modules that can match -> the rule of each role


@dataclass(frozen=True)
class PairEvidence:
    """Knowledge of two models besides the names and shapes of their parameters.

    uses: for both sides, the keys in the order in which a forward pass first uses them; it decides where names do not.
    uses_first: whether this order decides before names.
    axes: the order of the axes of PyTorch's matrices by key, where it is known.
    tied: the further keys of PyTorch's tensors that have several, with the first key of each.
    splits_names: whether the names of Flax's leaves are split, as those of functions may need; see `split_flax_parameter`.
    """

    uses: Uses | None = None
    uses_first: bool = False
    axes: Mapping[str, Axes] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    splits_names: bool = False


def match_lines(
    flax: Shapes,
    torch: Shapes,
    matched: MatchedEntries,
    known: Sequence[tuple[str, str]],
    optional: Optional,
    evidence: PairEvidence,
) -> tuple[list[tuple[str, str]], Optional]:
    """Return a line and a note for each parameter that is not matched yet, and the optional keys left unmatched.

    flax, torch: shapes by key.
    matched: entries that the lines of the caller cover.
    known: pairs of a flax key and a torch key in these lines; the other parameters of their modules match too.
    optional: keys of flax and of torch that need no counterpart.
    evidence: what is known of the models besides names and shapes.

    Raises:
        InputError: a parameter is ambiguous or has no counterpart.
    """
    split = evidence.splits_names
    leaves = [split_flax_parameter(key, flax) if split else flax_parameter(key, shape) for key, shape in flax.items()]
    left = with_own_roles(leaves, "/")
    right = with_own_roles([torch_parameter(key, shape, evidence.axes.get(key)) for key, shape in torch.items()], ".")
    attempts = [left]
    if (unstacked := unstack_blocks(left, right)) != left:
        attempts.append(unstacked)
    for n, parameters in enumerate(attempts):
        a, b = split_fused(parameters, right), split_fused(right, parameters)
        known_pairs = _known_module_pairs(a, b, known)
        try:
            return _match_modules(
                _unmatched_modules(a, matched[0]), _unmatched_modules(b, matched[1]), known_pairs, optional, evidence
            )
        except InputError:
            if n == len(attempts) - 1:
                raise
    raise AssertionError("there is always an attempt")


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
    optional: Optional,
    evidence: PairEvidence,
) -> tuple[list[tuple[str, str]], Optional]:
    """Match modules, and return a line and a note for each parameter, and the optional keys left unmatched.

    The most certain matches come first.  Each step takes the first of these that finds a match: groups of modules with the
    same pattern, groups with the same inner pattern, single modules, each by their names; then the same groups without a
    word in common, if each is the only candidate of the other; then modules in the order in which a forward pass uses them,
    unless the evidence says that this order is the first step.

    Raises:
        InputError: a module is ambiguous or has no counterpart.
    """
    candidates = {(a.path, b.path): rules for a in flax for b in torch if (rules := find_rules(a, b, KERNELS))}
    unfit = [b for b in torch if not any((a.path, b.path) in candidates for a in flax)]
    candidates |= {(a.path, b.path): rules for a in flax for b in unfit if (rules := find_rules(a, b, UNTRANSPOSED))}
    by_path, chosen = {a.path: a for a in flax}, {b: a for a, b in known_pairs if (a, b) in candidates}
    group_keys: list[Callable[[Module], str]] = [
        lambda m: m.pattern,
        lambda m: m.inner_pattern,
        lambda m: "/".join(m.path),
    ]
    steps = [(group_key, by_name) for by_name in (True, False) for group_key in group_keys]
    uses = evidence.uses
    by_use: dict[Path, Path] = {}
    if uses and evidence.uses_first:
        left = [a for a in flax if a.path not in chosen.values()]
        by_use = _pairs_by_use(left, [b for b in torch if b.path not in chosen], candidates, uses)
        chosen |= by_use
    while True:
        flax_left = [a for a in flax if a.path not in chosen.values()]
        torch_left = [b for b in torch if b.path not in chosen]
        pairs = (_unambiguous_pairs(flax_left, torch_left, candidates, key, by_name) for key, by_name in steps)
        if not (new := next(filter(None, pairs), None)):
            break
        chosen |= new
    if uses:
        # Blocks need not have the same parts in both models, such as a norm that one of them has in the block before.
        for allowed in (_within_matched_parents(candidates, chosen), candidates):
            last = _pairs_by_use(flax_left, torch_left, allowed, uses)
            chosen |= last
            by_use |= last
            flax_left = [a for a in flax_left if a.path not in last.values()]
            torch_left = [b for b in torch_left if b.path not in last]
    of_flax, of_torch = unmatched = (_keys(flax_left) & optional[0], _keys(torch_left) & optional[1])
    flax_left = [a for a in flax_left if not _keys([a]) <= of_flax]
    torch_left = [b for b in torch_left if not _keys([b]) <= of_torch]
    if torch_left or flax_left:
        matched = [(by_path[chosen[b.path]], b) for b in torch if b.path in chosen]
        raise _unmatched_error(flax_left, torch_left, candidates, matched, evidence)
    ordered = {
        b.path for b in torch if b.path in chosen and _is_matched_by_order(by_path[chosen[b.path]], b, flax, candidates)
    }
    return [
        (line, "; ".join(filter(None, ["by order of use" if b.path in by_use else "by order" * (b.path in ordered), note])))
        for b in torch
        if b.path in chosen
        for line, note in module_lines(by_path[chosen[b.path]], b, candidates[chosen[b.path], b.path])
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
    # Of several names with the same words, such as norm and norm2, or proj and out_proj, the same name is the best.
    scores = {
        (a, b): (similarity(left[0], right[0]), sameness(left[0], right[0]))
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
        if (score[0] > 0) == by_name
        and all(sorted(row)[-1:] == [score] and row.count(score) == 1 for row in (by_flax[a], by_torch[b]))
    ]
    return {b: a for left, right in best for a, b in zip(groups[0][left], groups[1][right], strict=True)}


def _pairs_by_use(flax: list[Module], torch: list[Module], candidates: Candidates, uses: Uses) -> dict[Path, Path]:
    """Return torch path -> flax path for modules that a forward pass uses in the same order.

    Modules are matched only if as many modules of the other side can match each of them, and all of these can.
    """
    sides = [_sort_by_use(modules, keys) for modules, keys in zip((flax, torch), uses, strict=True)]
    partners = {b.path: frozenset(a.path for a in flax if (a.path, b.path) in candidates) for b in torch}
    groups: dict[frozenset[Path], list[Path]] = defaultdict(list)
    for b in torch:
        groups[partners[b.path]].append(b.path)
    pairs: dict[Path, Path] = {}
    for possible, paths in groups.items():
        if possible and len(possible) == len(paths) and not any(possible & other for other in groups if other != possible):
            used = [[path for path in side if path in own] for side, own in zip(sides, (possible, paths), strict=True)]
            # A model that does not use all of them has them in the order in which it declares them.
            if len(used[0]) != len(used[1]):
                used = [[a.path for a in flax if a.path in possible], paths]
            else:
                used[0] += [a.path for a in flax if a.path in possible and a.path not in used[0]]
                used[1] += [path for path in paths if path not in used[1]]
            pairs |= dict(zip(used[1], used[0], strict=True))
    return pairs


def _within_matched_parents(candidates: Candidates, chosen: Mapping[Path, Path]) -> Candidates:
    """Return the candidates whose numbered parents, such as blocks, are matched by the modules that are chosen already.

    chosen: torch path -> flax path.
    """
    partners: dict[Path, set[Path]] = defaultdict(set)
    for b, a in chosen.items():
        for outer_a, outer_b in zip(_numbered_parents(a), _numbered_parents(b), strict=False):
            partners[outer_b].add(outer_a)
    return {
        (a, b): rules
        for (a, b), rules in candidates.items()
        if all(
            outer_a in partners[outer_b] or not partners[outer_b]
            for outer_a, outer_b in zip(_numbered_parents(a), _numbered_parents(b), strict=False)
        )
    }


def _numbered_parents(path: Path) -> list[Path]:
    """Return the paths of the parents of a module whose names have a number, from the outermost."""
    return [path[: n + 1] for n, name in enumerate(path[:-1]) if numbers((name,))]


def _sort_by_use(modules: list[Module], keys: Sequence[str]) -> list[Path]:
    """Return the paths of the modules that a forward pass uses, in the order in which it uses the first of their keys."""
    ranks = {key: n for n, key in enumerate(keys)}
    first = {
        module.path: min(ranks[each.key] for each in module.parameters.values() if each.key in ranks)
        for module in modules
        if any(each.key in ranks for each in module.parameters.values())
    }
    return sorted(first, key=lambda path: (first[path], numbers(path)))


def _group_paths(modules: list[Module], group_key: Callable[[Module], str]) -> dict[str, list[Path]]:
    """Return the paths of the modules in each group, in the order of the numbers in the paths."""
    groups: dict[str, list[Path]] = defaultdict(list)
    for module in sorted(modules, key=lambda module: numbers(module.path)):
        groups[group_key(module)].append(module.path)
    return groups


def _keys(modules: Iterable[Module]) -> set[str]:
    return {each.key for module in modules for each in module.parameters.values()}


def _unmatched_error(
    flax: list[Module],
    torch: list[Module],
    candidates: Candidates,
    matched: list[tuple[Module, Module]],
    evidence: PairEvidence,
) -> InputError:
    """Return the error for modules that are left unmatched, beside pairs that are matched."""
    if counts := _block_counts(flax, torch, matched):
        return InputError(f"{counts}: give both models the same number of blocks")
    for key, first_key in evidence.tied.items() if not torch else ():
        path = torch_parameter(key, ()).path
        if own := [a for a in flax if similarity(a.path, path) > 0]:
            return InputError(
                f"torch ties {key} with {first_key}, and flax has {_describe_keys(own[0])} of its own: "
                f"tie the two in flax as well, or give torch a tensor of its own for {key}"
            )
    for b in torch if not flax else ():
        if untied := [pair for pair in matched if _could_be_tied(b, pair[1], evidence.axes)]:
            of_flax, of_torch = ("".join(_keys([module])) for module in untied[0])
            return InputError(
                f"torch has {_describe_keys(b)} of its own, and flax has no array left for it: if flax uses {of_flax} for "
                f"both, tie the two in torch as well, so that {''.join(_keys([b]))} is {of_torch}"
            )
    parametrized = [key for key in sorted(_keys(torch)) if f".{_PARAMETRIZED}." in f".{key}"]
    if parametrized:
        owner, _, name = f".{parametrized[0]}".rpartition(f".{_PARAMETRIZED}.")
        module, tensor = f"module{owner}", name.partition(".")[0]
        return InputError(
            f"no counterpart for torch's {parametrized[0]}, from which the module computes {tensor}: compare a copy after "
            f"torch.nn.utils.parametrize.remove_parametrizations({module}, {tensor!r}), or give it in layouts"
        )
    if lacking := max(_lacking_biases(flax, torch), default=None):
        return InputError(lacking[1])
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
                f"{module_lines(possible[0], b, candidates[possible[0].path, b.path])[0][0]!r}"
            )
    sides = [
        f"{side} {'; '.join(keys[:4])}{'; ...' if len(keys) > 4 else ''}"
        for side, modules in (("torch's", torch), ("flax's", flax))
        if (keys := [*dict.fromkeys(_describe_keys(module) for module in modules)])
    ]
    lines = (line for a in flax for b in torch for line in _example_lines(a, b))
    example = next(lines, "flax key | axes <-> torch key | axes")
    remedy = f"give it in layouts, such as {example!r} if that is right"
    return InputError(f"no counterpart by name and shape for {' and '.join(sides)}; {remedy}")


def _block_counts(flax: list[Module], torch: list[Module], matched: list[tuple[Module, Module]]) -> str:
    """Return how many blocks each model has, if unmatched blocks of both are alike and one model has fewer; else ""."""
    both = [_blocks(modules) for modules in (flax, torch)]
    if not all(both):
        return ""
    names, shapes = zip(*(max(each.items(), key=lambda block: block[1].total()) for each in both), strict=True)
    if (shapes[0] & shapes[1]).total() < max(each.total() for each in shapes) / 2:
        return ""
    all_of_flax, all_of_torch = [*flax, *(a for a, _ in matched)], [*torch, *(b for _, b in matched)]
    counts = [
        sum(_without_numbers(path) == _without_numbers(name) for path in _blocks(modules))
        for modules, name in zip((all_of_flax, all_of_torch), names, strict=True)
    ]
    if counts[0] == counts[1]:
        return ""
    first, second = (sep.join(_without_numbers(name)) for name, sep in zip(names, "/.", strict=True))
    return f"flax has {counts[0]} of {first}, and torch {counts[1]} of {second}"


def _blocks(modules: list[Module]) -> dict[Path, Counter[tuple[int, ...]]]:
    """Return the sorted shapes of the parameters of each outermost numbered parent."""
    found: dict[Path, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for module in modules:
        for path in _numbered_parents(module.path)[:1]:
            found[path].update(tuple(sorted(each.shape)) for each in module.parameters.values())
    return found


def _without_numbers(path: Path) -> Path:
    """Return a path with {n} for its numbers."""
    return tuple(re.sub(r"\d+", "{n}", part) for part in path)


def _lacking_biases(flax: list[Module], torch: list[Module]) -> Iterator[tuple[float, str]]:
    """Yield the similarity of the names and a message for two modules, equal but for a bias that one of them lacks."""
    for a, b in product(flax, torch):
        for module, other, side in ((b, a, "flax"), (a, b, "torch")):
            shapes = [{role: sorted(each.shape) for role, each in m.parameters.items()} for m in (module, other)]
            likeness = similarity(a.path, b.path)
            if shapes[0].pop("bias", None) and shapes[0] == shapes[1] and likeness and numbers(a.path) == numbers(b.path):
                bias = module.parameters["bias"]
                line = [bias.layout(["width"]), ARROW, "0"][:: -1 if side == "flax" else 1]
                yield (
                    likeness,
                    f"{bias.key} {bias.shape} has no counterpart in {side}, where {_describe_keys(other)} has no bias: "
                    f"add it there, or hold it at zero with the line {' '.join(line)!r} in layouts",
                )


def _example_lines(flax: Module, torch: Module) -> Iterator[str]:
    """Yield a line of `layouts` for each two parameters with the same lengths of axes, if all lengths differ."""
    for a in flax.parameters.values():
        axes = dict(zip(a.shape, "abcdefgh", strict=False))
        for b in torch.parameters.values():
            if len(axes) == len(a.shape) and sorted(a.shape) == sorted(b.shape):
                yield f"{a.layout(list(axes.values()))} {ARROW} {b.layout([axes[length] for length in b.shape])}"


def _could_be_tied(a: Module, b: Module, axes: Mapping[str, Axes]) -> bool:
    """Return whether two modules of torch each have one matrix, of the same shape, and one is a table of embeddings."""
    both = [[*module.parameters.values()] for module in (a, b)]
    if any(len(each) > 1 for each in both) or both[0][0].shape != both[1][0].shape:
        return False
    return any(axes[key].names == "row width" for key in _keys([a, b]) & axes.keys())


def _describe_keys(module: Module) -> str:
    """Return a module's keys with their shapes."""
    return " and ".join(f"{each.key} {each.shape}" for each in module.parameters.values())
