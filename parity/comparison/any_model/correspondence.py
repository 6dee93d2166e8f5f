"""The mapping between the parameters of any Flax model and any PyTorch module, as pairs of layouts.

    encoder/layer_{n}/attn/query/kernel | in head dim  <->  layers.{n}.attn.in_proj_weight | (qkv=0 head dim) in

Each side is a line in the layout language of `parity.checkpoints.layout`.  Both sides of a pair have the same axes, so
weights and gradients are copied in either direction without arithmetic.  `match` first applies the lines that the caller
gives, and finds the other pairs by names, order and shapes.  It does not guess: an ambiguous parameter is an error, whose
message quotes a line that resolves the ambiguity.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.any_model.folding import fold_lines
from parity.comparison.any_model.lines import ARROW, Pair, Zero
from parity.comparison.any_model.matching import MatchedEntries, PairEvidence, match_lines
from parity.comparison.any_model.names import numbers, similarity, unquote_key, words
from parity.comparison.any_model.parameters import Axes
from parity.comparison.any_model.rules import SQUARE, SQUARE_AS_IT_IS, SQUARE_REVERSED
from vit_spec import InputError
from vit_spec.printable import printable

Arrays = Mapping[str, Array]
Shapes = Mapping[str, tuple[int, ...]]

SIDES = ("flax", "torch")
KERNEL = "kernel"  # the name of matrices of Flax's layers
_LAYER_OF_TORCH = re.compile(r"_l[0-9]+(?=$|_reverse$)")  # in the names that torch.nn.GRU gives its parameters


def _path(key: str) -> tuple[str, ...]:
    """Return the names of the modules around a parameter, and its own name at the end."""
    return tuple(key.replace(".", "/").split("/"))


def _differing_place(path: tuple[str, ...], other: tuple[str, ...]) -> int | None:
    """Return the index, from the end, of the only name in which two paths differ; None if several differ.

    The parameters' own names count only within one module.
    """
    if len(path) != len(other):
        return None
    places = [n for n in range(-len(path), -1) if path[n] != other[n]] or [-1]
    return places[0] if len(places) == 1 else None


def _namesakes(*sides: set[str]) -> dict[str, str]:
    """Return names of the first side -> the name of the second one with the same words, where each side has one of them.

    Names that have no such counterpart are compared again without the words that all names of their side have: the "proj"
    of gate_proj and up_proj does not tell these two apart.
    """
    all_words = [{name: words(name) for name in names} for names in sides]
    found = _pairs_by_words(*all_words)
    own_words = []
    for side, paired in zip(all_words, (set(found), set(found.values())), strict=True):
        shared = set.intersection(*map(set, side.values()))
        own_words.append(
            {name: tuple(w for w in several if w not in shared) for name, several in side.items() if name not in paired}
        )
    return found | _pairs_by_words(*own_words)


def _pairs_by_words(*sides: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return names of the first side -> the name of the second one, where each side has one name with these words."""
    by_words: list[dict[tuple[str, ...], list[str]]] = []
    for side in sides:
        by_words.append(defaultdict(list))
        for name, several in side.items():
            by_words[-1][tuple(sorted(several))].append(name)
    (of_first, of_second) = by_words
    common = [key for key in of_first if key and len(of_first[key]) == len(of_second.get(key, ())) == 1]
    return {of_first[key][0]: of_second[key][0] for key in common}


@dataclass(frozen=True)
class Correspondence:
    """The mapping of all parameters; `str` gives its lines.

    flax, torch: shapes by key; a flax key is the path joined by "/", without the collection "params".
    skipped: torch keys without a counterpart, and flax keys with " of flax" after them, and why they need none.
    zeros: the parameters of one side that are zero, and that the other side does not have.
    """

    pairs: tuple[Pair, ...]
    flax: Shapes
    torch: Shapes
    skipped: Mapping[str, str] = field(default_factory=dict)
    zeros: tuple[Zero, ...] = ()

    def squares(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return groups of square matrices, as a name and torch keys.

        The first groups are those whose order of axes a convention gives.  The last one, with the name "", is of those
        whose order is that of the class of their module or of the other matrices, which Flax's need not have.
        """
        groups: dict[str, list[str]] = {}
        for pair in self.pairs:
            keys = [b for _, b, *_ in pair.arrays()]
            if any(note in pair.note for note in (SQUARE, SQUARE_AS_IT_IS, SQUARE_REVERSED)):
                name = pair.torch.key.rpartition(".")[2]
                groups.setdefault(f"{name} reversed" if pair.reversed_axes else name, []).extend(keys)
            elif pair.matrix_axes("flax") == ["in", "out"] and pair.sizes["in"] == pair.sizes["out"]:
                groups.setdefault("", []).extend(keys)
        return [(name, tuple(dict.fromkeys(groups[name]))) for name in sorted(groups, key=lambda name: not name)]

    def squares_as_they_are(self) -> set[str]:
        """Return the torch keys of square matrices whose axes have the same order in both models by convention."""
        return {b for pair in self.pairs if SQUARE_AS_IT_IS in pair.note for _, b, *_ in pair.arrays()}

    def transposed_namesakes(self, note: str) -> list[str]:
        """Return the torch keys of transposed matrices with this note whose own names are the same in both models."""
        pairs = [pair for pair in self.pairs if note in pair.note and pair.matrix_axes("torch") == ["out", "in"]]
        both = [(a, b) for pair in pairs for a, b, *_ in pair.arrays()]
        return list(dict.fromkeys(b for a, b in both if _path(a)[-1] == _path(b)[-1]))

    def kernels_against_class(self, note: str, of_classes: Mapping[str, Axes]) -> list[str]:
        """Return the torch keys of matrices with this note whose axes have another order than their class says.

        Only counterparts of Flax's kernels count, which have one order in all layers; other names tell no order.

        of_classes: the order of axes of matrices whose class fixes it, by torch key.
        """
        found = []
        for pair in (pair for pair in self.pairs if note in pair.note):
            reversed_order = " ".join(reversed(pair.matrix_axes("torch")))
            for a, b, *_ in pair.arrays():
                if _path(a)[-1] == KERNEL and b in of_classes and of_classes[b].names == reversed_order:
                    found.append(b)
        return list(dict.fromkeys(found))

    def orders_of_siblings(self, known: Mapping[str, Axes]) -> dict[str, str]:
        """Return the order of axes of square matrices, "in out" or "out in", that all other matrices of their kind have.

        The keys are those of PyTorch.  Matrices of a kind are of classes that say the same order, or of none, and all of
        them are kernels, or none is.  Without class and kernels they also have the same name, as a table of positions has
        another one.  Only matrices count whose shapes tell the order.  All of a class may have the other order than it
        says, if Flax's layer has the order of PyTorch's.  Kernels with the order of their class are left out.

        known: the order of axes of matrices whose class fixes it, by torch key.
        """
        kinds: dict[str, tuple[str, str]] = {}
        orders: dict[tuple[str, str], set[str]] = defaultdict(set)
        for pair in self.pairs:
            axes, other_axes = (" ".join(pair.matrix_axes(side)) for side in SIDES)
            is_told = not pair.note and len({pair.sizes[axis] for axis in axes.split()}) == 2
            for a, b, *_ in pair.arrays():
                of_class, is_kernel = known[b].names if b in known else "", _path(a)[-1] == KERNEL
                kind = kinds[b] = (of_class, KERNEL if is_kernel else "" if of_class else _path(b)[-1])
                if is_told and axes == "in out":
                    orders[kind].add(other_axes)
                elif is_told and axes == "row width" and not is_kernel:
                    # Without a class the order is the same in both models by convention, and needs no evidence.
                    is_linear = of_class in ("in out", "out in")
                    orders[kind].add(other_axes.replace("row", "in").replace("width", "out") if is_linear else "")
        decided = {kind: found.pop() for kind, found in orders.items() if len(found) == 1}
        squares = [key for _, keys in self.squares() for key in keys]
        by_key = {key: decided.get(kinds[key], "") for key in squares}
        return {key: order for key, order in by_key.items() if order and kinds[key] != (order, KERNEL)}

    def keys(self) -> Iterator[tuple[str, str]]:
        """Yield flax key and torch key of each pair of arrays."""
        yield from ((a, b) for pair in self.pairs for a, b, *_ in pair.arrays())

    def contradicts_names(self, by_names: "Correspondence") -> list[tuple[str, str]]:
        """Return pairs of keys that contradict the names, of a mapping that another one by names is compared with.

        They give a module another sibling of the one with the same name in the other model, or with the same words, if both
        siblings have a counterpart by their words; or they have another order than the numbers in their names.
        """
        new, parted = dict(self.keys()), [(a, other) for a, b, other in self._moved(by_names) if self._decided(a, b, other)]
        groups: dict[tuple[str, str], list[tuple[tuple[int, ...], tuple[int, ...], str, str]]] = defaultdict(list)
        for a, b in new.items():
            patterns = [re.sub(r"[0-9]+", "#", key) for key in (a, b)]
            groups[patterns[0], patterns[1]].append((numbers(_path(a)), numbers(_path(b)), a, b))
        for group in groups.values():
            for one, other in pairwise(sorted(group)):
                if one[1] > other[1]:
                    parted += [one[2:], other[2:]]
        return list(dict.fromkeys(parted))

    def less_similar_than(self, by_names: "Correspondence") -> list[tuple[str, str]]:
        """Return pairs of keys whose names have less in common than those of a mapping by names."""
        return [
            (a, other)
            for a, b, other in self._moved(by_names)
            if similarity(_path(a), _path(b)) > similarity(_path(a), _path(other))
        ]

    def _moved(self, by_names: "Correspondence") -> Iterator[tuple[str, str, str]]:
        """Yield the flax keys with another counterpart than in a mapping by names: key, that counterpart, own one."""
        new, pairs = dict(self.keys()), set(self.keys())
        yield from ((a, b, new[a]) for a, b in by_names.keys() if a in new and (a, b) not in pairs)

    def _decided(self, a: str, b: str, other: str) -> bool:
        """Return whether names decide that the counterpart of a flax key is a torch key, and not another one."""
        paths = [_path(key) for key in (a, b, other)]
        place = _differing_place(*paths[1:])
        if place is None or len(paths[0]) < -place:
            return False
        own, name, name_of_other = (path[place] for path in paths)
        if own == name:  # blocks are numbered; their order is tested on its own
            return place >= -2 or not numbers((name,))
        plain, plain_other = (_LAYER_OF_TORCH.sub("", each) for each in (name, name_of_other))
        if place == -1 and own == plain != plain_other:
            return True
        siblings = [
            {path[len(around)] for path in map(_path, side) if path[: len(around)] == around and len(path) > len(around)}
            for side, around in ((self.flax, paths[0][:place]), (self.torch, paths[1][:place]))
        ]
        namesakes = _namesakes(*siblings)
        return namesakes.get(own) == name and name_of_other in namesakes.values()

    def to_torch(self, arrays: Arrays) -> dict[str, Array]:
        """Return arrays (weights or gradients) by torch key, C-contiguous, from arrays by flax key."""
        return self._convert(arrays, self.torch, 0, 1)

    def to_flax(self, arrays: Arrays) -> dict[str, Array]:
        """Return arrays (weights or gradients) by flax key, C-contiguous, from arrays by torch key."""
        return self._convert(arrays, self.flax, 1, 0)

    def held_at_zero(self, side: str, arrays: Arrays) -> Iterator[tuple[str, Array]]:
        """Yield the keys of one side's arrays that have entries held at zero, with views of these entries."""
        for zero in self.zeros:
            if zero.side == side:
                yield from zero.views(arrays)

    def _convert(self, arrays: Arrays, shapes: Shapes, source: int, target: int) -> dict[str, Array]:
        """Return arrays with the keys and shapes of the other side; `source` and `target` are 0 for flax, 1 for torch."""
        out: dict[str, Array] = {}
        side = SIDES[target]
        for key in (key for zero in self.zeros if zero.side == side for key in zero.keys):
            out[key] = np.zeros(shapes[key], next(iter(arrays.values())).dtype)
        for pair in self.pairs:
            for *keys, indices, axes in pair.arrays():
                array = np.asarray(arrays[keys[source]])
                if keys[target] not in out:
                    out[keys[target]] = np.zeros(shapes[keys[target]], array.dtype)
                both = (array, out[keys[target]]) if source == 0 else (out[keys[target]], array)
                views = pair.views(both, indices, axes)
                views[target][...] = views[source]
        return out

    def __str__(self) -> str:
        """Return a line for each pair, with its note, and one for each torch key without a counterpart."""
        left = max((len(pair.flax_line) for pair in self.pairs), default=0)
        lines = [
            f"  {pair.flax_line:{left}}  {ARROW}  {pair.torch}" + (f"    ({pair.note})" if pair.note else "")
            for pair in self.pairs
        ]
        lines += [f"  {zero}" for zero in self.zeros]
        lines += [f"  {key}: {why}" for key, why in self.skipped.items()]
        return "\n".join(map(printable, lines))


def match(
    flax: Shapes,
    torch: Shapes,
    *,
    layouts: Sequence[str] = (),
    skipped: Mapping[str, str] | None = None,
    optional: Iterable[str] = (),
    constants: Iterable[str] = (),
    evidence: PairEvidence | None = None,
) -> Correspondence:
    """Match the parameters of both sides.

    Args:
        flax: shapes by path, e.g. {"encoder/layer_0/attn/query/kernel": (16, 2, 8), "batch_stats/bn/mean": (16,)}.
        torch: shapes by key of the state dict.
        layouts: lines "flax key | axes <-> torch key | axes" for parameters that names and shapes do not match; an axis in
            braces in both keys counts from 0.  "flax key | axes <-> 0" and "0 <-> torch key | axes" are for parameters that
            are zero, and that the other side does not have.
        skipped: torch keys that are left out of `torch`, and why; they are only printed.
        optional: torch keys that need no counterpart, such as a mask in a buffer.
        constants: flax keys that need none.
        evidence: what is known of the models besides names and shapes; a line that it decides has a note.

    Raises:
        InputError: a parameter is ambiguous (the message quotes a line that resolves the ambiguity) or has no counterpart,
            or a line of `layouts` is wrong.
    """
    shapes, (flax, torch) = (flax, torch), ({key: shape or (1,) for key, shape in side.items()} for side in (flax, torch))
    evidence = evidence or PairEvidence()
    for line in layouts:
        key = unquote_key(line.partition(ARROW)[2].partition("|")[0].strip())
        if key in evidence.tied:
            what = f"torch has {key} as {evidence.tied[key]}, which is the same tensor"
            raise InputError(f"layout {line.strip()!r}: {what}: one line for that key is for both")
    parsed = [Zero.parse(line, flax, torch) or Pair.parse(line, flax, torch) for line in layouts]
    given = tuple(each for each in parsed if isinstance(each, Pair))
    zeros = tuple(each for each in parsed if isinstance(each, Zero))
    matched = _mark_matched_entries(given, zeros, flax, torch)
    known_keys = [keys[:2] for pair in given for keys in pair.arrays()]
    sides = (set(constants), set(optional))
    lines, (of_flax, of_torch) = match_lines(*shapes, matched, known_keys, sides, evidence)
    inferred = tuple(Pair.parse(line, flax, torch, note) for line, note in fold_lines(lines, flax, torch))
    _mark_matched_entries(given + inferred, zeros, flax, torch, complete=(set(flax) - of_flax, set(torch) - of_torch))
    what = "without a counterpart: it keeps its own values"
    reasons = {key: f"a buffer or frozen parameter {what}" for key in sorted(of_torch)}
    reasons |= {f"{key} of flax": f"a constant {what}" for key in sorted(of_flax)}
    return Correspondence(given + inferred, shapes[0], shapes[1], {**(skipped or {}), **reasons}, zeros)


def _mark_matched_entries(
    pairs: tuple[Pair, ...],
    zeros: tuple[Zero, ...],
    flax: Shapes,
    torch: Shapes,
    complete: tuple[set[str], set[str]] | None = None,
) -> MatchedEntries:
    """Return boolean arrays by key, of flax and of torch, which mark the entries that the pairs and the zeros cover.

    complete: if given, they must cover every entry of these flax keys and torch keys.

    Raises:
        InputError: two lines cover the same entry, or an entry that must be covered is not.
    """
    matched: MatchedEntries = ({}, {})
    of_flax, of_torch = matched

    def mark(line: Pair | Zero, key: str, view: Array) -> None:
        if view.any():
            what = f"another line also covers entries of {key}; each entry needs exactly one line"
            raise InputError(f"layout '{line}': {what}")
        view[...] = True

    for pair in pairs:
        for a, b, indices, axes in pair.arrays():
            masks = of_flax.setdefault(a, np.zeros(flax[a], bool)), of_torch.setdefault(b, np.zeros(torch[b], bool))
            for key, view in zip((a, b), pair.views(masks, indices, axes), strict=True):
                mark(pair, key, view)
    for zero in zeros:
        own, shapes = (of_flax, flax) if zero.side == "flax" else (of_torch, torch)
        for key in zero.keys:
            own.setdefault(key, np.zeros(shapes[key], bool))
        for key, view in zero.views(own):
            mark(zero, key, view)
    if complete is not None:
        for own, keys in zip((of_flax, of_torch), complete, strict=True):
            for key in sorted(keys):
                if key not in own or not own[key].all():
                    raise InputError(f"{key}: some of its entries have no counterpart; add a line for them to layouts")
    return matched
