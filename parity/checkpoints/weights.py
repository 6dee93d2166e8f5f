"""Weights in memory: held to their config without mercy, and moved from one format to another.

Nothing here loads jax or torch before it is handed one of their arrays or asked for one.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal, get_args

import ml_dtypes
import numpy as np

from parity.checkpoints.config_inference import Assumption
from parity.checkpoints.containers.container import Stored
from parity.checkpoints.formats import Format, get
from parity.checkpoints.layout import Array, Axis, Column, Layout, Place, Read, Sizes, parts, runs
from parity.checkpoints.preprocessing import Preprocessing
from vit_spec import InputError, ViTConfig, rows

if TYPE_CHECKING:
    import torch

Tree = Mapping[str, Any]  # key -> array, or nested; of numpy, jax or torch

Answers = Literal["classes", "labels", "values"]
TASKS: tuple[Answers, ...] = get_args(Answers)

_PLAUSIBLE = 50  # times as many arrays as there are may be missing by mistake

FLOATS = {np.dtype(kind).name: np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Weights that know what they are the weights of.

    config: the model.
    format: the name of the format that the arrays are in, with its variant where it has several: "google:linen".
    arrays: key -> array, exactly as the format has them; of a file, read when they are used.
    container: what the file was, e.g. "safetensors".
    assumed: what of the config nothing in the file told, nor in the file that it was converted from.
    left: what of the file is not of this model, each in a line with the reason.
    labels: the names of the outputs, (num_classes,); None where they have none.
    preprocessing: how an image becomes the pixels that `config.pixels` normalizes; None where nothing tells.
    task: what the outputs are: logits of classes of which one holds, or of labels each for itself, or values.
    """

    config: ViTConfig
    format: str
    arrays: Mapping[str, Any] = field(repr=False)
    container: str = ""
    assumed: tuple[Assumption, ...] = ()
    left: tuple[str, ...] = ()
    labels: tuple[str, ...] | None = field(default=None, repr=False)
    preprocessing: Preprocessing | None = None
    task: Answers = "classes"


@dataclass(frozen=True)
class Task:
    """One array of a target format, to be made from a checkpoint.

    runs: what can be made independently, in C order: the first entry of a run, and a function that yields its entries,
        each time a first one, counted from the run's, and those from there on, in one dimension.
    """

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    runs: Sequence[tuple[int, Callable[[], Iterator[tuple[int, Array]]]]]

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def parts(self) -> Iterator[tuple[int, Array]]:
        """Yield all entries in C order."""
        for start, run in self.runs:
            for first, entries in run():
                yield start + first, entries

    def whole(self) -> Array:
        """Return the array."""
        out = np.empty(prod(self.shape), self.dtype)
        for first, entries in self.parts():
            out[first : first + len(entries)] = entries
        return out.reshape(self.shape)


def to_jax(weights: Tree | Checkpoint, config: ViTConfig | None = None) -> dict[str, Any]:
    """Return weights as the parameters of `vit_jax`: nested dictionaries of new numpy arrays, bit for bit.

    Args:
        weights: the state dict of `vit_torch` (or of timm), or a checkpoint in any format.
        config: the model; a checkpoint brings its own.

    Raises:
        InputError: weights that are not exactly this config's; lists every key that is wrong.
    """
    nested: dict[str, Any] = {}
    for key, array in translate(held(weights, config, "torch"), "jax"):
        *parents, leaf = key.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = array
    return nested


def to_torch(weights: Tree | Checkpoint, config: ViTConfig | None = None) -> "dict[str, torch.Tensor]":
    """Return weights as the state dict of `vit_torch` (and of timm): new tensors on the CPU, bit for bit.

    Args:
        weights: the parameters of `vit_jax`, or a checkpoint in any format.
        config: the model; a checkpoint brings its own.

    Raises:
        InputError: weights that are not exactly this config's; lists every key that is wrong.
    """
    import torch

    def tensor(array: Array) -> torch.Tensor:
        if array.dtype == FLOATS["bfloat16"]:  # of which numpy's and torch's know nothing of each other: hand over bits
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    return {key: tensor(array) for key, array in translate(held(weights, config, "jax"), "torch")}


def flatten(tree: Tree, format: Format) -> dict[str, Any]:
    """Return nested weights as one dictionary, keys joined as the format joins them.

    Raises:
        InputError: not a mapping of names, or a name given twice.
    """
    if not isinstance(tree, Mapping):
        raise InputError(f"weights are a {type(tree).__name__}: give a mapping of names to arrays, such as a state dict")
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if not isinstance(name, str):
            raise InputError(f"weights have the key {name!r}: keys must be strings")
        inner = flatten(value, format) if isinstance(value, Mapping) else {"": value}
        for rest, leaf in inner.items():
            key = f"{name}{format.separator}{rest}" if rest else name
            if key in flat:
                raise InputError(f"weights have {key} twice, nested and joined: leave one of them out")
            flat[key] = leaf
    return flat


def check(checkpoint: Checkpoint) -> dict[str, np.dtype[Any]]:
    """Return the dtype of each parameter, after holding every key to the config, both ways.

    Raises:
        InputError: one, that lists every missing, unexpected, misshapen and mistyped key, with what was expected.
    """
    config, format, arrays = checkpoint.config, get(checkpoint.format), checkpoint.arrays
    wrong: dict[str, list[str]] = {"missing": [], "unexpected": [], "misshapen": [], "of a wrong dtype": []}
    dtypes, expected, column = {}, set(), format.layouts(config)
    count = sum(prod(config.sizes[word] for word in place.spelled) for place in column.values())
    if count > _PLAUSIBLE * (len(arrays) + 1):  # whose names would fill a screen, or the memory
        raise InputError(
            f"these weights are not the config's in format {format.name!r}: they are {len(arrays):,} arrays, and a model "
            f"of depth={config.depth} has {count:,}. Give the config that they were made with"
        )
    for name, place in column.items():
        shape, seen = place.shape(config.sizes), set()
        for key in place.keys(config.sizes):
            expected.add(key)
            if key not in arrays:
                wrong["missing"].append(f"{key} | {place.axes} {shape}")
                continue
            given, dtype = _facts(arrays[key])
            if dtype not in FLOATS:
                wrong["of a wrong dtype"].append(f"{key} is {dtype}, expected one of {', '.join(FLOATS)}")
                continue
            if given != shape:
                wrong["misshapen"].append(f"{key} {given}, expected {place.axes} {shape}")
            seen.add(dtype)
        if len(seen) > 1:
            wrong["of a wrong dtype"].append(f"{place.key} is {' and '.join(sorted(seen))}, expected one of them")
        dtypes[name] = FLOATS[seen.pop()] if seen else FLOATS["float32"]
    extra = [key for key in arrays if key not in expected and not any(re.fullmatch(p, key) for p in format.passed)]
    wrong["unexpected"] = [f"{key!r} {_facts(arrays[key])[0] or ''}".strip() for key in extra]

    if lists := [f"{len(keys)} {what}: {'; '.join(keys)}" for what, keys in wrong.items() if keys]:
        raise InputError(
            f"these weights are not the config's in format {format.name!r}: {'. '.join(lists)}. "
            f"Give the config and the format that they were made with, or correct these keys"
        )
    return dtypes


def translate(checkpoint: Checkpoint, to: str) -> Iterator[tuple[str, Array]]:
    """Yield every key of the format `to` with a new numpy array, after `check`.

    Raises:
        InputError: an unknown format, one that cannot hold this config, or weights that fail `check`; before any work.
    """
    return ((task.key, task.whole()) for task in plan(checkpoint, to))


def plan(checkpoint: Checkpoint, to: str, dtype: np.dtype[Any] | None = None) -> list[Task]:
    """Return what it takes to have a checkpoint in the format `to`, array by array, after `check`.

    dtype: what to round the parameters to; None leaves every bit as it is.

    Raises:
        InputError: as `translate`.
    """
    config, target = checkpoint.config, get(to)
    column, dtypes = target.layouts(config), check(checkpoint)
    if dtype is not None:
        dtypes = dict.fromkeys(dtypes, dtype)
    source = get(checkpoint.format).layouts(config)
    read = _reader(checkpoint.arrays)
    tasks = list(_tasks(source, column, config.sizes, dtypes, read))
    for name, layout in target.copied(config).items():
        tasks += _tasks({name: source[name]}, {name: layout}, config.sizes, dtypes, read)
    widest = max(dtypes.values(), key=lambda each: each.itemsize)
    for key, array in target.fixed(config).items():
        values = array.astype(widest) if array.dtype.kind == "f" else array
        tasks.append(Task(key, values.shape, values.dtype, [(0, partial(_known, values))]))
    return tasks


def parameter(checkpoint: Checkpoint, name: str) -> Array:
    """Return one parameter as a new array with the axes of its row in `vit_spec.rows`, in their order."""
    config = checkpoint.config
    source, target = get(checkpoint.format).layouts(config)[name], _own(name, rows(config)[name].axes)
    [task] = _tasks({name: source}, {name: target}, config.sizes, check(checkpoint), _reader(checkpoint.arrays))
    return task.whole()


def edited(checkpoint: Checkpoint, config: ViTConfig, changes: Mapping[str, Array]) -> Checkpoint:
    """Return the checkpoint of another config, in the same format, with some parameters new and all others as they are.

    config: what the checkpoint is to be the weights of.
    changes: parameter -> array with the axes of its row in `vit_spec.rows(config)`.

    Raises:
        InputError: the format has no place for the config.
    """
    column, before = get(checkpoint.format).layouts(config), get(checkpoint.format).layouts(checkpoint.config)
    shared = {column[name].key for name in changes if column[name].is_part}
    new = {name: layout for name, layout in column.items() if name in changes or layout.key in shared}
    kept = [layout for name, layout in before.items() if name in column and name not in new]
    arrays = {key: checkpoint.arrays[key] for layout in kept for key in layout.keys(checkpoint.config.sizes)}

    values = {name: changes[name] if name in changes else parameter(checkpoint, name) for name in new}
    own = {name: _own(name, rows(config)[name].axes) for name in new}
    dtypes = {name: array.dtype for name, array in values.items()}
    made = {task.key: task.whole() for task in _tasks(own, new, config.sizes, dtypes, _reader(values))}
    return replace(checkpoint, config=config, arrays={**arrays, **made})


Parts = Iterator[tuple[int, Array]]
Dtypes = Mapping[str, np.dtype[Any]]  # of each parameter


def _own(name: str, axes: Sequence[str]) -> Layout:
    """The layout of a parameter as `vit_spec.rows` declares it."""
    return Layout(name, tuple((Axis(word, word, 0),) for word in axes))


def _tasks(source: Column, target: Column, sizes: Sizes, dtypes: Dtypes, read: Read) -> Iterator[Task]:
    """Yield a task for each key of the target column, in its order."""
    owners: dict[str, list[str]] = defaultdict(list)
    for name, layout in target.items():
        owners[layout.key].append(name)
    for names in owners.values():
        layout, dtype = target[names[0]], dtypes[names[0]]
        for key, at in layout.places(sizes, {}):
            if layout.is_part:
                column = {name: target[name] for name in names}
                made = [(0, partial(_assembled, source, column, sizes, at, dtype, read))]
            else:
                one = source[names[0]]
                places = runs(one, layout, sizes, at)
                made = [(first, partial(_moved, one, layout, sizes, place, dtype, read)) for first, place in places]
            yield Task(key, layout.shape(sizes), dtype, made)


def _moved(source: Layout, target: Layout, sizes: Sizes, at: Place, dtype: np.dtype[Any], read: Read) -> Parts:
    for first, entries in parts(source, target, sizes, at, read):
        yield first, rounded(entries, dtype)


def _assembled(source: Column, target: Column, sizes: Sizes, at: Place, dtype: np.dtype[Any], read: Read) -> Parts:
    """An array of several parameters, with zeros where none of them is: a bias of keys that the model does not have."""
    whole = np.zeros(next(iter(target.values())).shape(sizes), dtype)
    for name, layout in target.items():
        words = [axis.word for axis in layout.flat if axis.word]
        spelled = "".join(f"{{{word}}}" for word in layout.spelled)
        view = layout.view(whole, sizes, at, words)
        run = partial(_moved, source[name], _own(spelled, words), sizes, at, dtype, read)
        view[...] = Task(name, view.shape, dtype, [(0, run)]).whole()
    yield 0, whole.reshape(-1)


def rounded(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return values of another type, rounded once to the nearest; of the same type, themselves.

    A cast of float64 to bfloat16 goes through float32 (ml_dtypes 0.6) and rounds twice.  So float32 is rounded to odd
    first, which keeps the side of a tie on which the number lies (Boldo and Melquiond, 2005).
    """
    if dtype != FLOATS["bfloat16"] or values.dtype != np.float64:
        return values.astype(dtype, copy=False)
    narrow = values.astype(np.float32)
    bits = narrow.view(np.uint32)
    bits -= np.abs(narrow) > np.abs(values)  # towards zero
    bits |= narrow != values
    return narrow.astype(dtype)


def _known(values: Array) -> Parts:
    yield 0, values.reshape(-1)


def _reader(arrays: Mapping[str, Any]) -> Read:
    """Read a file's arrays by pieces; of arrays in memory hand out views."""
    last: dict[str, Array] = {}

    def read(key: str, first: int, last_entry: int) -> Array:
        array = arrays[key]
        if isinstance(array, Stored):
            return array.read(first, last_entry)
        flat = last.get(key)
        if flat is None:  # flattening may copy: once is enough
            flat = _on_host(array).reshape(-1)
            last.clear()
            last[key] = flat
        return flat[first:last_entry]

    return read


def held(weights: Tree | Checkpoint, config: ViTConfig | None, format: str) -> Checkpoint:
    """Return the checkpoint that was given, or the one that weights in `format` and their config are."""
    if isinstance(weights, Checkpoint):
        if config is not None:
            raise InputError("a checkpoint brings its own config: leave the second argument out")
        return weights
    if config is None:
        raise InputError("weights alone do not say which model they are of: give its config as the second argument")
    return Checkpoint(config, format, flatten(weights, get(format)))


def _facts(value: Any) -> tuple[tuple[int, ...] | None, str]:
    """Return an array's shape and the name of its dtype; of anything else its type, and no shape."""
    if isinstance(value, Stored):
        return value.shape, value.dtype.name
    if not hasattr(value, "__array__") or getattr(value, "is_meta", False):
        return None, f"a {type(value).__name__} without values"
    return tuple(value.shape), str(value.dtype).removeprefix("torch.")


def _on_host(value: Any) -> Array:
    """Return an array of numpy, jax or torch as numpy's, sharing memory where it can."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    import torch

    tensor = value.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy()
        return bits.view(FLOATS["bfloat16"])
    host: Array = tensor.numpy()
    return host
