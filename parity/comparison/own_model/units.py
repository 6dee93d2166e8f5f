"""Layers of the user's model: the parameters that belong together, such as the weight and the bias of a linear layer."""

from collections.abc import Sequence
from dataclasses import dataclass

from parity.comparison.own_model.keys import Leaf


@dataclass(frozen=True)
class Unit:
    """A layer.

    Attributes:
        kind: "linear" has a matrix, "norm" a vector and a bias, "vector" only a vector.
        weight: its weight.
        bias: its bias; None if it has none.
    """

    kind: str
    weight: Leaf
    bias: Leaf | None = None

    @property
    def rank(self) -> int:
        """The position of its weight in the order of use."""
        return self.weight.rank

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Its parameters."""
        return (self.weight, self.bias) if self.bias else (self.weight,)


def find_units(leaves: Sequence[Leaf]) -> list[Unit]:
    """Return the layers of parameters, in the order of their use.  Each parameter is in one layer."""
    ordered = sorted(leaves, key=lambda leaf: leaf.rank)
    taken: set[Leaf] = set()
    units = []
    for leaf in ordered:  # first the biases that belong to a matrix
        if leaf.is_matrix:
            bias = _bias_of_matrix(leaf, ordered, taken)
            taken |= {leaf, *([bias] if bias else [])}
            units.append(Unit("linear", leaf, bias))
    for leaf in ordered:
        if leaf not in taken:
            bias = _bias_of_vector(leaf, ordered, taken)
            taken |= {leaf, *([bias] if bias else [])}
            units.append(Unit("norm" if bias else "vector", leaf, bias))
    return sorted(units, key=lambda unit: unit.rank)


def _bias_of_matrix(weight: Leaf, ordered: Sequence[Leaf], taken: set[Leaf]) -> Leaf | None:
    """Return the bias of a matrix: the one with its name, or the only one of its module, or the one that is used next."""
    near = [
        leaf
        for leaf in ordered
        if leaf not in taken and not leaf.is_matrix and leaf.parent == weight.parent and leaf.axes == weight.axes
    ]
    fitting = [leaf for leaf in near if leaf.size > 1 and weight.size % leaf.size == 0]
    name = weight.key.removeprefix(weight.parent)
    for old, new in (("weight", "bias"), ("kernel", "bias"), ("weights", "biases"), ("w", "b"), ("W", "b"), ("W", "B")):
        if old in name and (found := [leaf for leaf in fitting if leaf.key == weight.parent + name.replace(old, new)]):
            return found[0]
    matrices = [leaf for leaf in ordered if leaf.is_matrix and leaf.parent == weight.parent]
    if len(matrices) == 1 and len(near) == 1 and fitting and near[0].is_bias:
        return near[0]
    following = [leaf for leaf in fitting if leaf.rank == weight.rank + 1 and leaf.is_bias]
    return following[0] if following else None


def _bias_of_vector(weight: Leaf, ordered: Sequence[Leaf], taken: set[Leaf]) -> Leaf | None:
    """Return the bias of a norm: the vector of its module that is called a bias and is used with it."""
    if weight.is_bias:
        return None
    near = [leaf for leaf in ordered if leaf not in taken and leaf is not weight and leaf.parent == weight.parent]
    fitting = [leaf for leaf in near if leaf.is_bias and leaf.inner_shape == weight.inner_shape]
    adjacent = [leaf for leaf in fitting if abs(leaf.rank - weight.rank) == 1]
    return adjacent[0] if adjacent else (fitting[0] if len(fitting) == 1 and len(near) == 1 else None)
