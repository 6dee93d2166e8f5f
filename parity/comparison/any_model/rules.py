"""The rules by which a parameter of Flax and one of PyTorch can be the same: their axes on both sides.

They are the conventions of the frameworks.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

from parity.comparison.any_model.names import numbers
from parity.comparison.any_model.parameters import Parameter, Path

Rules = tuple[tuple[str, str], ...]
Rule = tuple[str, str, str]  # the axes in flax and in torch, and a note

# Axes of a kernel in flax and in torch; the first rule that fits the shapes applies.
KERNELS: Rules = (
    ("in out", "out in"),  # Dense
    ("in head dim", "(head dim) in"),  # DenseGeneral to heads
    ("head dim out", "out (head dim)"),  # DenseGeneral from heads
    ("in qkv head dim", "(qkv head dim) in"),
    ("x in out", "out in x"),  # Conv, also with groups
    ("y x in out", "out in y x"),
    ("z y x in out", "out in z y x"),
    ("head in dim", "(head dim) in"),  # DenseGeneral of Gemma
    ("in out", "out in 1"),  # Dense in flax, a convolution with a kernel of one entry in torch
    ("in out", "out in 1 1"),
)
SQUARE, SQUARE_AS_IT_IS = "square: transposed", "square: not transposed"  # notes of matrices with unknown orders of axes
UNTRANSPOSED: Rules = (("in out", "in out"),)  # torch multiplies from the right; tried only if nothing else fits
# ConvTranspose: flax also reverses the axes of space, unless the layer has transpose_kernel=True.
REVERSED: Rules = (("-x in out", "in out x"), ("-y -x in out", "in out y x"), ("-z -y -x in out", "in out z y x"))
SQUARE_REVERSED = "as many channels in as out: reversed"  # note of these kernels where the other order fits as well

# Axis names of parameters that are not kernels, of which the last ones name the axes longer than one in flax.
SAME_AXES = ("t", "z", "y", "x", "row", "width")  # torch has the same axes
MERGED_AXES = ("part", "qkv", "head", "dim")  # torch merges them into one


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


@cache
def _find_rule(
    is_kernel: bool,
    flax: tuple[int, ...],
    torch: tuple[int, ...],
    rules: Rules,
    order: str | None,
    is_reversed: bool,
    is_torch_like: bool,
) -> Rule | None:
    """Return the rule for two shapes of the same role, or None if none fits.

    Its note is not empty if other axes would fit the same shapes, so that a convention or other evidence decided.

    order, is_reversed: how the order of torch's axes is known, and whether flax reverses some; see `Parameter`.
    is_torch_like: whether the axes of flax are known to have torch's order.
    """
    if is_kernel:
        fitting = [rule for rule in (*REVERSED * is_reversed, *rules) if _fits(rule, flax, torch)]
        if not fitting:
            return None
        if fitting[0] in REVERSED:
            return *fitting[0], order or (f"by convention: {SQUARE_REVERSED}" if len(fitting) > 1 else "")
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
        if order is not None:
            return "in out", "out in", order or f"by convention: {SQUARE}"
        note = f"by convention: {SQUARE_AS_IT_IS}"
    a, b = ([n for n in shape if n > 1] for shape in (flax, torch))
    names = SAME_AXES if a == b else MERGED_AXES
    if len(a) > len(names) or (a != b and b != [prod(a)]):
        return None
    axes = names[len(names) - len(a) :]
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
    left, right = rule[0].replace("-", "").split(), _split_dims(rule[1])
    if len(left) != len(flax) or len(right) != len(torch):
        return False
    sizes = {"1": 1, **dict(zip(left, flax, strict=True))}
    return all(prod(sizes[axis] for axis in dim.split()) == n for dim, n in zip(right, torch, strict=True))


def find_rules(flax: Module, torch: Module, rules: Rules) -> dict[str, Rule] | None:
    """Return the rule of each role; None if the roles differ or a parameter fits no rule."""
    if flax.size != torch.size or flax.parameters.keys() != torch.parameters.keys():
        return None
    found = {}
    for role, each in flax.parameters.items():
        other, is_torch_like = torch.parameters[role], each.key.endswith(("/weight", "/embedding"))
        evidence = (other.order, other.is_reversed, is_torch_like)
        found[role] = _find_rule(each.is_kernel, each.shape, other.shape, rules, *evidence)
    return {role: rule for role, rule in found.items() if rule} if all(found.values()) else None


def module_lines(flax: Module, torch: Module, rules: Mapping[str, Rule]) -> list[tuple[str, str]]:
    """Return a line and a note for each parameter of two modules."""
    return [
        (f"{flax.parameters[role].layout(_split_dims(a))} <-> {torch.parameters[role].layout(_split_dims(b))}", note)
        for role, (a, b, note) in rules.items()
    ]
