"""The values that two recorded models have in common, in whatever order of their axes."""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.any_model.trace.graph import INPUTS, WEIGHTS, Fingerprint, Graph, Index, Value, without_repetition

_MAX_PERMUTED = 5  # axes of arrays whose orders are compared
_SAME = 1e-9  # difference of entries of the same values, relative to the largest; their fingerprints agree to 1e-12


def classes_of_values(flax: Graph, torch: Graph) -> tuple[dict[int, int], dict[int, int]]:
    """Return for each graph the values that agree with one of the other graph, with a number for all equal values."""
    values, n_flax = [*flax.values, *torch.values], len(flax.values)
    index = Index(values)
    classes: tuple[dict[int, int], dict[int, int]] = ({}, {})
    unknown: tuple[set[int], set[int]] = (set(), set())
    for n, value in enumerate(values):
        equal = sorted(index.find(value.fingerprint)) if value.fingerprint is not None else []
        others = [m for m in equal if (m >= n_flax) != (n >= n_flax)]
        number = n - n_flax if n >= n_flax else n
        # Matching has found the order of the axes of a parameter, which may be another one on each side.
        is_weight = value.source == WEIGHTS and any(values[m].operation < 0 for m in equal)
        if any(is_weight or _may_have_same_order(value.array, values[m].array) for m in others):
            classes[n >= n_flax][number] = equal[0]
        elif not others:
            unknown[n >= n_flax].add(number)
    _add_stacked_values(values, index, n_flax, classes, unknown)
    for graph, known, own in zip((flax, torch), classes, unknown, strict=True):
        _add_repeated_values(graph, known, own)
    return classes


def _add_stacked_values(
    values: Sequence[Value],
    index: Index,
    n_flax: int,
    classes: tuple[dict[int, int], dict[int, int]],
    unknown: tuple[set[int], set[int]],
) -> None:
    """Add the values that stack several of the other model, as those of an ensemble under `jax.vmap`, and these.

    values: those of both models; the first `n_flax` are Flax's.
    unknown: as in `_add_repeated_values`, for each model.
    """
    ranges = (range(n_flax), range(n_flax, len(values)))
    for side, other in ((0, 1), (1, 0)):
        for n in sorted(unknown[side]):
            value = values[ranges[side][n]]
            members = _members(value.array, values, index, ranges[other]) if value.source == INPUTS else []
            own = [ranges[other].index(m) for m in members]
            if own:
                classes[side][n] = next((classes[other][m] for m in own if m in classes[other]), ranges[side][n])
                classes[other].update({m: classes[side][n] for m in own if m not in classes[other]})


def _members(array: Array | None, values: Sequence[Value], index: Index, others: range) -> list[int]:
    """Return the values among others that are parts of an array along one of its axes; each part has at least one of them.

    They are computed in the order of the parts.
    """
    for axis, n_parts in enumerate(() if array is None else array.shape):
        found: list[int] = []
        last = -1  # the first value of the last part
        for part in np.moveaxis(np.asarray(array), axis, 0):
            fingerprint = Fingerprint.of(part)
            equal = sorted(index.find(fingerprint)) if fingerprint is not None else []
            later = [m for m in equal if m in others and m > last and _may_have_same_order(part, values[m].array)]
            if not later:
                break
            last = later[0]
            found += later
        else:
            if n_parts > 1:
                return found
    return []


def _add_repeated_values(graph: Graph, classes: dict[int, int], unknown: set[int]) -> None:
    """Add the values that repeat one that agrees, as keys and values are for groups of queries, to its class.

    unknown: the values that the other model does not compute, in any order of their entries.
    """
    for operation in graph.operations:
        for n in unknown.intersection(operation.outputs):
            value = graph.values[n].fingerprint
            for given in operation.inputs:
                one = graph.values[given]
                if (
                    given in classes
                    and one.source == INPUTS
                    and value
                    and one.fingerprint
                    and value.repeats(one.fingerprint)
                ):
                    classes[n] = classes[given]


def _may_have_same_order(one: Any, other: Any) -> bool:
    """Return whether two arrays with the same entries have them in the same order, for some order of their axes.

    One of them may have merged axes.  If both have, in different ways, they may be in the same order.
    """
    if one is None or other is None:
        return True
    a, b = sorted((np.squeeze(without_repetition(each)) for each in (one, other)), key=lambda each: -each.ndim)
    if a.ndim > _MAX_PERMUTED:
        return True
    orders = [order for order in permutations(range(a.ndim)) if _is_merged([a.shape[n] for n in order], b.shape)]
    return not orders or any(have_same_places(a.transpose(order).reshape(b.shape), b) for order in orders)


def have_same_places(one: Array, other: Array) -> bool:
    """Return whether two arrays of the same shape, whose entries agree, have them in the same places."""
    size = float(np.abs(other[np.isfinite(other)]).max(initial=0.0))
    return np.allclose(one, other, rtol=0.0, atol=_SAME * size, equal_nan=True)


def _is_merged(shape: Sequence[int], merged: Sequence[int]) -> bool:
    """Return whether a shape becomes another one if consecutive axes are merged."""
    left = list(shape)
    for length in merged:
        product = 1
        while left and product < length:
            product *= left.pop(0)
        if product != length:
            return False
    return not left
