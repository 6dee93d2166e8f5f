"""What two models return, by name, and which of it is compared."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vit_spec import InputError, nearest

Permutations = Sequence[list[int] | None]
Loss = Callable[[Any], Any]


def named_arrays(returned: Any, name: str = "output", skipped: dict[str, str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield every array in the return value of a model with its name: "output", "output.logits", "output.hidden.0".

    skipped: a dict to which the parts are added that are neither arrays nor containers of arrays, with their types.
    """
    if returned is None:
        return
    if hasattr(returned, "shape") and hasattr(returned, "dtype"):
        yield name, returned
        return
    if isinstance(returned, Mapping):
        parts = returned.items()
    elif dataclasses.is_dataclass(returned):
        parts = {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}.items()
    elif isinstance(returned, (tuple, list)):
        parts = dict(zip(getattr(returned, "_fields", range(len(returned))), returned, strict=True)).items()
    else:
        if skipped is not None:
            skipped[name] = type(returned).__name__
        return
    for key, part in parts:
        yield from named_arrays(part, f"{name}.{key}", skipped)


def pair_outputs(flax: Sequence[str], torch: Sequence[str], selected: Sequence[str]) -> dict[str, str]:
    """Return the names of Flax's outputs that are compared, with those of PyTorch's.

    Outputs have the same names, or else the same position; if both models name their outputs, those that both have are
    compared.

    selected: names of outputs to compare, or lines "flax name <-> torch name"; "output." may be left out.

    Raises:
        InputError: the models have no output in common, or a selected one does not exist.
    """
    if selected:
        return dict(_selected_pair(line, flax, torch) for line in selected)
    if set(flax) == set(torch):
        return {name: name for name in flax}
    is_unnamed = any(all(part.isdigit() for part in name.split(".")[1:]) for name in [*flax, *torch])
    if is_unnamed and len(flax) == len(torch):
        return dict(zip(flax, torch, strict=True))
    common = [name for name in flax if name in torch]
    if common and not is_unnamed:
        return {name: name for name in common}
    what = f"flax returns {', '.join(flax) or 'no array'} and torch {', '.join(torch) or 'no array'}"
    first, other = ([*names, "output"][0].removeprefix("output.") for names in (flax, torch))
    raise InputError(f"{what}: return the same from both, or select with outputs, as in '{first} <-> {other}'")


def _selected_pair(line: str, flax: Sequence[str], torch: Sequence[str]) -> tuple[str, str]:
    left, arrow, right = (word.strip() for word in line.partition("<->"))
    found = []
    for side, name, names in (("flax", left, flax), ("torch", right if arrow else left, torch)):
        full = name if name in names else f"output.{name}"
        if full not in names:
            hint = nearest(name, [each.removeprefix("output.") for each in names])
            what = hint or f"; it returns {', '.join(names)}"
            raise InputError(f"outputs {line!r}: {side} returns no {name}{what}")
        found.append(full)
    return found[0], found[1]


def parse_permutations(lines: str | Sequence[str]) -> list[list[int] | None]:
    """Return the permutation of axes that each line describes, from its left side to its right; None for an empty line.

    Raises:
        InputError: a line does not describe a permutation.
    """
    out: list[list[int] | None] = []
    for line in [lines] if isinstance(lines, str) else lines:
        left, right = (side.split() for side in (line.split("<->") if line.count("<->") == 1 else ("", "?")))
        if line and (sorted(left) != sorted(right) or len(set(left)) != len(left)):
            raise InputError(f"axes {line!r}: write the same axis names on both sides of <->, as in 'b y x c <-> b c y x'")
        out.append([left.index(word) for word in right] if line else None)
    return out


def permute(tensor: Any, axes: Permutations, n: int, name: str) -> Any:
    """Return a tensor with its axes permuted by the n-th permutation, if there is one; `name` is for the error message."""
    permutation = axes[n] if n < len(axes) else None
    if permutation is None:
        return tensor
    if len(permutation) != tensor.ndim:
        raise InputError(f"{name} has {tensor.ndim} axes, and the line given for it has {len(permutation)}")
    return tensor.permute(permutation)


def default_loss(outputs: Mapping[str, Any], seed: int, asarray: Callable[..., Any]) -> Any:
    """Return the sum over the floating-point outputs of the mean squared error from a standard normal target."""
    rng, total = np.random.default_rng(seed + 1), 0.0
    for output in outputs.values():
        target = rng.standard_normal(tuple(output.shape)).astype(np.float32)  # the same numbers in every dtype
        if "float" in str(output.dtype):
            total = total + ((output - asarray(target)) ** 2).mean()
    return total
