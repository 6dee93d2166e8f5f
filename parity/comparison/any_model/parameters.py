"""Parameters of Flax and PyTorch models in one common form, so that they can be matched.

A stack of blocks in one array, such as nn.scan makes, becomes one parameter for each block.  Fused queries, keys and
values become several parameters, if the other side has them separately.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from numpy.typing import NDArray

from parity.comparison.any_model.names import quote_key, words

Path = tuple[str, ...]

FLAX_ROLES = {
    **{"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias", "mean": "mean", "var": "var"},
    **{"w": "weight", "b": "bias", "offset": "bias"},  # of Haiku, and of models written as functions
    **{"gamma": "weight", "beta": "bias", "moving_mean": "mean", "moving_variance": "var"},  # of Keras' normalisations
    **{"running_mean": "mean", "running_var": "var"},  # of functions that keep PyTorch's names
    "weight": "weight",  # of Equinox, with the axes of PyTorch
}
TORCH_ROLES = {
    **{"weight": "weight", "kernel": "weight", "scale": "weight", "bias": "bias"},
    # Of modules that make their own parameters:
    **{"w": "weight", "b": "bias", "gamma": "weight", "beta": "bias", "offset": "bias"},
    **{"running_mean": "mean", "running_var": "var"},
}
QKV = ("query", "key", "value")
FUSED = {"qkv": QKV, "kv": QKV[1:]}  # the word for several fused matrices -> the words for each
BY_TRIAL = "by trial: the other order fails"  # evidence of `Axes`


class Axes(NamedTuple):
    """The order of the axes of a matrix or a kernel of PyTorch.

    names: "out in", as linear layers and convolutions have it, or "in out", as transposed convolutions do, or
        "row width", as embeddings do, whose tables have this order in Flax too.
    evidence: a clause that says how it is known; "" if the class of the module fixes it.
    """

    names: str
    evidence: str = ""


class Parameter(NamedTuple):
    """One parameter: an array of a model, or a part of one.

    key: the key of the array.
    path: the names of the module and its parents.
    role: weight, bias, mean or var.
    is_kernel: whether it is a flax kernel, whose axes have another order than torch's.
    shape: shape of the parameter itself.
    dims: for each dimension of the array, the axes of the parameter in it (as numbers), and the fixed indices in it (as
        text, such as "qkv=0").
    order: how the order of the axes of a matrix is known: a clause that is printed, or "" if it is known for certain;
        None if it is not known.
    is_reversed: whether it is a kernel of a transposed convolution, whose axes of space flax reverses.
    """

    key: str
    path: Path
    role: str
    is_kernel: bool
    shape: tuple[int, ...]
    dims: tuple[tuple[int | str, ...], ...]
    order: str | None = None
    is_reversed: bool = False

    def layout(self, axes: Sequence[str]) -> str:
        """Return the layout of the parameter as a line "key | axes".

        axes: for each axis of the parameter its name, several names with spaces between them, or "1".
        """
        dims = [" ".join(entry if isinstance(entry, str) else axes[entry] for entry in dim) for dim in self.dims]
        texts = [" ".join(word for word in dim.split() if word != "1") or "1" for dim in dims]
        return f"{quote_key(self.key)} | {' '.join(f'({dim})' if ' ' in dim else dim for dim in texts) or '1'}"

    def part(self, axis: int, name: str, index: int, length: int, path: Path) -> "Parameter":
        """Return one of `length` equal parts along an axis, as a parameter of the module `path`.

        name: the name of the new axis that counts the parts.
        """
        removed, fixed = self.shape[axis] == length, f"{name}={index}"
        shape = list(self.shape)
        shape[axis : axis + 1] = [] if removed else [shape[axis] // length]

        def renumbered(entry: int | str) -> tuple[int | str, ...]:
            if isinstance(entry, str) or entry < axis:
                return (entry,)
            if entry == axis:
                return (fixed,) if removed else (fixed, entry)
            return (entry - removed,)

        dims = tuple(tuple(new for entry in dim for new in renumbered(entry)) for dim in self.dims)
        return self._replace(path=path, shape=tuple(shape), dims=dims)

    def transposed(self) -> "Parameter":
        """Return the same matrix with its two axes in the other order."""
        dims = tuple(tuple(entry if isinstance(entry, str) else 1 - entry for entry in dim) for dim in self.dims)
        return self._replace(shape=self.shape[::-1], dims=dims)

    def view(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the part of `array`, the array with this key, that is this parameter."""
        sizes = [[self.shape[entry] for entry in dim if isinstance(entry, int)] for dim in self.dims]
        indices = [[int(entry.partition("=")[2]) for entry in dim if isinstance(entry, str)] for dim in self.dims]
        selection = tuple(
            slice(index[0] * prod(own), (index[0] + 1) * prod(own)) if index else slice(None)
            for own, index in zip(sizes, indices, strict=True)
        )
        return array[selection]


def flax_parameter(key: str, shape: tuple[int, ...]) -> Parameter:
    """Return the parameter for a leaf of a pytree.

    If the last name of the key is not in FLAX_ROLES, the whole key is the path of the module, and the role is "weight".
    """
    path = tuple(key.removeprefix("batch_stats/").split("/"))
    role = FLAX_ROLES.get(path[-1])
    return _parameter(key, path[:-1] if role else path, role, path[-1] == "kernel", shape)


_SPELLED = re.compile(rf"(?:(.+)_)?({'|'.join(sorted(FLAX_ROLES, key=len, reverse=True))})(\d*)", re.IGNORECASE)


def split_flax_parameter(key: str, shapes: Mapping[str, tuple[int, ...]]) -> Parameter:
    """Return the parameter for a leaf of a pytree of a function, whose names need not be those of Flax.

    The last name may contain the module and a number, as in "fc1_w", "fc1.weight", "W1", or may be a number: one vector
    beside one array of more axes is a bias, as in a list of (W, b).

    shapes: of all leaves, by key.
    """
    path, shape = tuple(key.removeprefix("batch_stats/").replace(".", "/").split("/")), shapes[key]
    if found := _SPELLED.fullmatch(path[-1]):
        module, name, number = found.groups()
        name = name.lower()
        return _parameter(key, (*path[:-1], *filter(None, (module, number))), FLAX_ROLES[name], name == "kernel", shape)
    parent = key.rpartition("/")[0]
    siblings = [len(other) for name, other in shapes.items() if name.rpartition("/")[0] == parent]
    if path[-1].isdecimal() and len(siblings) == 2 and min(siblings) == 1 < max(siblings):
        return _parameter(key, path[:-1], "bias" if len(shape) == 1 else "weight", False, shape)
    return _parameter(key, path, None, False, shape)


def torch_parameter(key: str, shape: tuple[int, ...], axes: Axes | None = None) -> Parameter:
    """Return the parameter for an entry of a state dict.

    If the last name of the key is not in TORCH_ROLES, the whole key is the path of the module, and the role is "weight".

    axes: the order of the axes of a matrix, if it is known; the parameter has it as PyTorch's linear layers do.
    """
    found = _torch_parameter(key, shape)
    if axes is None or axes.names == "row width":
        return found
    is_other_order = axes.names == "in out"
    if is_other_order and len(shape) == 2:
        found = found.transposed()
    return found._replace(order=axes.evidence, is_reversed=is_other_order and len(shape) > 2)


def _torch_parameter(key: str, shape: tuple[int, ...]) -> Parameter:
    path = tuple(key.split("."))
    role, projection = (
        TORCH_ROLES.get(path[-1]),
        re.fullmatch(r"((?:in|q|k|v)_proj)_(weight|bias)", path[-1]),  # of torch.nn.MultiheadAttention
    )
    if projection:
        return _parameter(key, (*path[:-1], projection[1]), projection[2], False, shape)
    return _parameter(key, path[:-1] if role else path, role, False, shape)


def with_own_roles(parameters: Sequence[Parameter], separator: str) -> list[Parameter]:
    """Return the parameters, where those of one module that have the same role are modules of their own, by their names."""
    counts = Counter((parameter.path, parameter.role) for parameter in parameters)
    return [
        parameter._replace(path=tuple(parameter.key.split(separator)), role="weight")
        if counts[parameter.path, parameter.role] > 1
        else parameter
        for parameter in parameters
    ]


def _parameter(key: str, path: Path, role: str | None, is_kernel: bool, shape: tuple[int, ...]) -> Parameter:
    return Parameter(key, path, role or "weight", is_kernel, shape, tuple((n,) for n in range(len(shape))))


# Stacked and fused parameters ---------------------------------------------------------------------------------------


def unstack_blocks(flax: list[Parameter], torch: list[Parameter]) -> list[Parameter]:
    """Return flax's parameters with every stack of blocks, such as nn.scan makes, split into one parameter for each block.

    A subtree is a stack if the first dimension of all its arrays has the same length, and torch has a list of numbered
    modules with that length and with as many entries in total.
    """
    lists: dict[Path, dict[int, int]] = defaultdict(Counter)
    for parameter in torch:
        for n, name in enumerate(parameter.path):
            if name.isdigit():
                lists[parameter.path[:n]][int(name)] += prod(parameter.shape)
    known = {(len(items), sum(items.values())) for items in lists.values()}
    subtrees: dict[Path, list[Parameter]] = defaultdict(list)
    for parameter in flax:
        for n in range(len(parameter.path) + 1):
            subtrees[parameter.path[:n]].append(parameter)
    stacks: list[Path] = []
    for path in sorted(subtrees, key=len):
        parameters, inside = subtrees[path], any(path[: len(outer)] == outer for outer in stacks)
        lengths = {parameter.shape[:1] for parameter in parameters}
        if not inside and len(lengths) == 1 and all(lengths):
            [(length,)] = lengths
            if (length, sum(prod(parameter.shape) for parameter in parameters)) in known:
                stacks.append(path)
    out = []
    for parameter in flax:
        key_path = parameter.path
        depth = next((len(path) for path in stacks if key_path[: len(path)] == path), None)
        blocks = range(parameter.shape[0]) if depth is not None else ()
        out += [
            parameter.part(0, "block", n, parameter.shape[0], (*key_path[:depth], str(n), *key_path[depth:]))
            for n in blocks
        ] or [parameter]
    return out


def split_fused(parameters: list[Parameter], others: list[Parameter]) -> list[Parameter]:
    """Return the parameters with every fused query, key and value, or key and value, split if `others` has them apart."""
    other_words = {word for parameter in others for name in parameter.path for word in words(name)}
    is_split = {
        "qkv": other_words >= set(QKV) or (other_words >= {"query", "kv"} and "qkv" not in other_words),
        "kv": (other_words >= set(FUSED["kv"]) or "qkv" in other_words) and "kv" not in other_words,
    }
    return [part for parameter in parameters for part in _split(parameter, [kind for kind in FUSED if is_split[kind]])]


def _split(parameter: Parameter, kinds: Sequence[str]) -> list[Parameter]:
    """Return the parts of a parameter that is fused in one of these ways; else the parameter itself."""
    last_words = [words(name)[-1:] for name in parameter.path]
    place = next(((n, kind) for n, word in enumerate(last_words) for kind in kinds if word == (kind,)), None)
    if place is None:
        return [parameter]
    n, kind = place
    names = tuple("_".join((*words(parameter.path[n])[:-1], name)) for name in FUSED[kind])
    axis = _fused_axis(parameter, len(names))
    out = []
    for index, name in enumerate(names):
        path = (*parameter.path[:n], name, *parameter.path[n + 1 :])
        part = parameter if axis is None else parameter.part(axis, kind, index, len(names), path)
        out.append(part.transposed() if axis == 1 and not parameter.is_kernel else part)
    return out


def _fused_axis(parameter: Parameter, count: int) -> int | None:
    """Return the axis along which `count` matrices are concatenated or stacked; None if there is none.

    It is an output axis.  In a flax kernel it follows the input axis.  In a torch weight it is the first axis, or the
    second if torch multiplies by the weight from the right.
    """
    axes = range(1, len(parameter.shape)) if parameter.is_kernel else range(min(1, len(parameter.shape)))
    if not parameter.is_kernel and len(parameter.shape) == 2 and parameter.shape[1] == count * parameter.shape[0]:
        return 1
    sizes = parameter.shape
    return next((n for n in axes if sizes[n] == count), next((n for n in axes if sizes[n] % count == 0), None))
