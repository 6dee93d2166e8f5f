"""The outputs of two models by name, and the choice of those that are compared."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from parity.comparison.any_model.trace.graph import MASKED
from vit_spec import InputError, nearest

Permutations = Sequence[list[int] | None]
Loss = Callable[[Any], Any]
NOT_COMPARED = "not compared"  # why an array is skipped: it was not selected, or one model returns it alone


def named_arrays(returned: Any, name: str = "output", skipped: dict[str, str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield every array in the return value of a model with its name: "output", "output.logits", "output.hidden.0".

    A complex array is yielded as two, "output.real" and "output.imag".

    skipped: a dict to which the parts are added that are neither arrays nor containers of arrays, with their types.
    """
    if returned is None:
        return
    if hasattr(returned, "shape") and hasattr(returned, "dtype"):
        if "complex" in str(returned.dtype):
            yield from ((f"{name}.{part}", getattr(returned, part)) for part in ("real", "imag"))
        else:
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

    Outputs have the same names, or else the same position; if both models name their outputs, one may return more than
    the other, and those that both have are compared.

    selected: names of outputs to compare, or lines "flax name <-> torch name"; "output." may be left out.

    Raises:
        InputError: the models have no output in common, each has one that the other has not, or a selected one does not
            exist.
    """
    if selected:
        return dict(_selected_pair(line, flax, torch) for line in selected)
    if set(flax) == set(torch):
        return {name: name for name in flax}
    is_unnamed = any(all(part.isdigit() for part in name.split(".")[1:]) for name in [*flax, *torch])
    if is_unnamed and len(flax) == len(torch):
        return dict(zip(flax, torch, strict=True))
    common, alone = [name for name in flax if name in torch], [name for name in flax if name not in torch]
    if common and not is_unnamed and not (alone and len(torch) > len(common)):
        return {name: name for name in common}
    what = f"flax returns {', '.join(flax) or 'no array'} and torch {', '.join(torch) or 'no array'}"
    if not (flax and torch):
        raise InputError(f"{what}: return arrays, or a tuple, list, dict or dataclass of arrays")
    unpaired = alone if common and not is_unnamed else flax, [name for name in torch if name not in common] or torch
    first, other = (names[0].removeprefix("output.") for names in unpaired)
    raise InputError(f"{what}: return the same from both, or select with outputs, as in '{first} <-> {other}'")


def not_compared(side: str, other_types: Mapping[str, str], names: Mapping[str, Any], compared: Any) -> dict[str, str]:
    """Return why parts of a return value are not compared."""
    kinds = {name: f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}" for name, kind in other_types.items()}
    out = {f"{name} of {side}": f"{kind}, which is no array" for name, kind in kinds.items()}
    return out | {f"{name} of {side}": NOT_COMPARED for name in names if name not in compared}


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


def as_lines(option: str, lines: Any) -> list[str]:
    """Return the value of an option as a list of lines; a single line may be given as a string.

    Raises:
        InputError: it is neither a string nor a sequence of strings.
    """
    out = [lines] if isinstance(lines, str) or not isinstance(lines, Sequence) else list(lines)
    if not all(isinstance(line, str) for line in out):
        raise InputError(f"{option} is {lines!r}: give a string, or a list of strings")
    return out


def parse_permutations(lines: Sequence[str]) -> list[list[int] | None]:
    """Return the permutation of axes that each line describes, from its left side to its right; None for an empty line.

    Raises:
        InputError: a line does not describe a permutation.
    """
    out: list[list[int] | None] = []
    for line in lines:
        left, right = (side.split() for side in (line.split("<->") if line.count("<->") == 1 else ("", "?")))
        if line and (sorted(left) != sorted(right) or len(set(left)) != len(left)):
            raise InputError(f"axes {line!r}: write the same axis names on both sides of <->, as in 'b y x c <-> b c y x'")
        out.append([left.index(word) for word in right] if line else None)
    return out


def permute(tensor: Any, axes: Permutations, n: int, name: str) -> Any:
    """Return a tensor with its axes permuted by the n-th permutation, if there is one; `name` is for the error message."""
    permutation = _permutation(tensor.ndim, axes, n, name)
    return tensor if permutation is None else tensor.permute(permutation)


def permuted_shape(shape: Sequence[int], axes: Permutations, n: int, name: str) -> tuple[int, ...]:
    """Return the shape of PyTorch's n-th output in the order of axes of Flax; `name` is for the error message.

    Raises:
        InputError: the line given for it has another number of axes.
    """
    permutation = _permutation(len(shape), axes, n, name)
    return tuple(shape if permutation is None else [shape[permutation.index(axis)] for axis in range(len(shape))])


def _permutation(n_axes: int, axes: Permutations, n: int, name: str) -> list[int] | None:
    permutation = axes[n] if n < len(axes) else None
    if permutation is not None and len(permutation) != n_axes:
        raise InputError(f"{name} has {n_axes} axes, and the line given for it has {len(permutation)}")
    return permutation


def parse_losses(loss: Any) -> tuple[Loss | None, Loss | None]:
    """Return the loss of Flax and that of PyTorch; None for the default one.

    Raises:
        InputError: it is neither a function nor a pair of functions.
    """
    losses = tuple(loss) if isinstance(loss, (tuple, list)) else (loss, loss)
    if len(losses) != 2 or not all(each is None or callable(each) for each in losses):
        raise InputError(f"loss is {loss!r}: give a function, or a pair of functions, one for flax and one for torch")
    return losses[0], losses[1]


def check_loss(value: Any, side: str) -> Any:
    """Return the value of a loss that the user has given.

    Raises:
        InputError: it is no floating-point array without axes.
    """
    shape, dtype = getattr(value, "shape", None), str(getattr(value, "dtype", ""))
    if shape is None or tuple(shape) or "float" not in dtype:
        what = (
            f"an array of {dtype} with shape {tuple(shape)}" if shape is not None and dtype else f"{type(value).__name__}"
        )
        raise InputError(f"loss returns {what} for {side}: return a floating-point array without axes, such as a mean")
    return value


def default_loss(outputs: Mapping[str, Any], seed: int, asarray: Callable[..., Any]) -> Any:
    """Return the sum over the floating-point outputs of the mean squared error from a standard normal target.

    Entries that a mask has made huge or infinite count as having no error: their squares would hide all other entries.

    asarray: makes of an array of NumPy one of the framework, in the dtype of the run.

    Raises:
        InputError: no output has floating-point entries, or any entries.
    """
    rng, terms = np.random.default_rng(seed + 1), []
    for output in outputs.values():
        target = rng.standard_normal(tuple(output.shape)).astype(np.float32)  # the same numbers in every dtype
        if "float" in str(output.dtype) and target.size:
            # In the dtype of the run, because float16 does not have numbers as large as those of masks.
            output = output * asarray(np.ones_like(target))
            error = (output.clip(-MASKED, MASKED) - asarray(target)) * (abs(output) < MASKED)
            terms.append((error**2).mean())
    if not terms:
        kinds = ", ".join(f"{name} ({output.dtype} {tuple(output.shape)})" for name, output in outputs.items())
        if outputs and all(0 in output.shape for output in outputs.values()):
            raise InputError(f"no output has an entry, {kinds}: give inputs with at least one example")
        what = f"of what is compared, {kinds or 'nothing'}, nothing has floating-point entries"
        raise InputError(f"{what}: compare other outputs, such as the logits")
    return sum(terms[1:], terms[0])
