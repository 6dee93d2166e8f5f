"""Checkpoints in memory: validation against their config, and conversion from one format to another.

Neither jax nor torch is imported until one of their arrays is passed in or asked for.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal, get_args

import ml_dtypes
import numpy as np

from parity.checkpoints.assumptions import Assumption, Override
from parity.checkpoints.columns import Column, align, parameter_of, row_column
from parity.checkpoints.containers.container import StoredArray
from parity.checkpoints.formats import Format, get
from parity.checkpoints.layout import Array, Axis, Indices, Layout, ReadRange, Sizes, convert_chunks, split_by_source
from parity.checkpoints.preprocessing import Preprocessing
from vit_spec import InputError, ViTConfig, rows

if TYPE_CHECKING:
    import torch

Tree = Mapping[str, Any]  # key -> array, or nested; of numpy, jax or torch

TaskName = Literal["classes", "labels", "values"]
TASKS: tuple[TaskName, ...] = get_args(TaskName)

# If the config has this many times more arrays than the checkpoint, it is another model's, and its keys are not listed.
_MAX_MISSING_RATIO = 50

FLOAT_DTYPES = {np.dtype(kind).name: np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The weights of a model, together with its config.

    Attributes:
        config: the model.
        format: the name of the format of the arrays, with its variant if the format has several: "google:linen".
        arrays: key -> array, exactly as the format stores them.  Arrays of a file are read when they are used.
        container: the kind of file, e.g. "safetensors"; "" for weights that were not read from a file.
        assumed: the properties of the model that were assumed, because neither the file nor the file from which it was
            converted states them.
        overridden: the config overrides of the user that replace another value, which the file states.
        left: one line, with the reason, for each part of the file that was not read.
        labels: num_classes names of the outputs; None if the outputs have no names.
        preprocessing: how an image becomes the pixels that `config.pixels` normalizes; None if unknown.
        task: the meaning of the outputs: "classes" are logits of mutually exclusive classes, "labels" are logits of
            independent labels, "values" are numbers, as in a regression.
    """

    config: ViTConfig
    format: str
    arrays: Mapping[str, Any] = field(repr=False)
    container: str = ""
    assumed: tuple[Assumption, ...] = ()
    left: tuple[str, ...] = ()
    labels: tuple[str, ...] | None = field(default=None, repr=False)
    preprocessing: Preprocessing | None = None
    task: TaskName = "classes"
    overridden: tuple[Override, ...] = ()


@dataclass(frozen=True)
class ArrayConversion:
    """One array of a target format, computed from a checkpoint on demand.

    Attributes:
        key: the key of the array.
        shape: the shape of the array.
        dtype: the dtype of the array.
        runs: the parts of the array, in C order.  They are independent: threads may compute them at the same time.  Each is
            the offset of its first entry in the array, and a function that yields its entries in chunks: the offset of a
            chunk in the run, and its entries in one dimension.
    """

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    runs: Sequence[tuple[int, Callable[[], Iterator[tuple[int, Array]]]]]

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def chunks(self) -> Iterator[tuple[int, Array]]:
        """Yield the array in chunks in C order: the offset of the first entry, and the entries in one dimension."""
        for start, run in self.runs:
            for first, entries in run():
                yield start + first, entries

    def to_array(self) -> Array:
        """Return the whole array."""
        out = np.empty(prod(self.shape), self.dtype)
        for first, entries in self.chunks():
            out[first : first + len(entries)] = entries
        return out.reshape(self.shape)


def to_jax(weights: Tree | Checkpoint, config: ViTConfig | None = None) -> dict[str, Any]:
    """Convert weights to the parameters of `vit_jax`, bit for bit: nested dictionaries of new numpy arrays.

    Args:
        weights: the state dict of `vit_torch` (or of timm), or a checkpoint in any format.
        config: the model; None with a checkpoint, which has its own.

    Returns:
        The parameters; those of the blocks are stacked on a leading axis.

    Raises:
        InputError: the weights do not match the config; the message lists every wrong key.
    """
    return nest(converted_arrays(as_checkpoint(weights, config, "torch"), "jax"))


def nest(arrays: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return arrays, or other values, with keys such as "blocks/norm1/scale" as nested dictionaries."""
    nested: dict[str, Any] = {}
    for key, array in arrays:
        *parents, leaf = key.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = array
    return nested


def to_torch(weights: Tree | Checkpoint, config: ViTConfig | None = None) -> "dict[str, torch.Tensor]":
    """Convert weights to the state dict of `vit_torch` (and of timm), bit for bit: new tensors on the CPU.

    Args:
        weights: the parameters of `vit_jax`, or a checkpoint in any format.
        config: the model; None with a checkpoint, which has its own.

    Raises:
        InputError: the weights do not match the config; the message lists every wrong key.
    """
    return {key: as_tensor(array) for key, array in converted_arrays(as_checkpoint(weights, config, "jax"), "torch")}


def flatten(tree: Tree, format: Format) -> dict[str, Any]:
    """Return nested weights as one dictionary, with keys joined by the format's separator.

    Raises:
        InputError: the tree is not a mapping, a key is not a string, or two entries have the same joined key.
    """
    if not isinstance(tree, Mapping):
        raise InputError(
            f"weights are a {type(tree).__name__}: give a mapping of names to arrays, such as a state dict or "
            "nnx.state(model, nnx.Param)"
        )
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


def validate(checkpoint: Checkpoint) -> dict[str, np.dtype[Any]]:
    """Check that a checkpoint has exactly the keys, shapes and dtypes of its config, and return each parameter's dtype.

    Raises:
        InputError: a key is missing, unexpected, misshapen or of a wrong dtype; the message lists every such key, with the
            expected shape or dtype.
    """
    config, format, arrays = checkpoint.config, get(checkpoint.format), checkpoint.arrays
    wrong: dict[str, list[str]] = {"missing": [], "unexpected": [], "misshapen": [], "of a wrong dtype": []}
    dtypes: dict[str, np.dtype[Any]] = {}
    expected, column = set(), format.layouts(config)
    count = sum(prod(config.sizes[axis] for axis in layout.key_axes) for layout in column.values())
    if count > _MAX_MISSING_RATIO * (len(arrays) + 1):  # the missing keys would fill a screen, or the memory
        raise InputError(
            f"these weights do not match the config in format {format.name!r}: they are {len(arrays):,} arrays, but a "
            f"model of depth={config.depth} has {count:,}. Give the config that they were made with"
        )
    for name, layout in column.items():
        parameter, shape, seen = parameter_of(name), layout.shape(config.sizes), set()
        for key in layout.keys(config.sizes):
            expected.add(key)
            if key not in arrays:
                wrong["missing"].append(f"{key} | {layout.axes_text} {shape}")
                continue
            given, dtype = _shape_and_dtype(arrays[key])
            if dtype not in FLOAT_DTYPES:
                wrong["of a wrong dtype"].append(f"{key} is {dtype}, expected one of {', '.join(FLOAT_DTYPES)}")
                continue
            if given != shape:
                wrong["misshapen"].append(f"{key} {given}, expected {layout.axes_text} {shape}")
            seen.add(dtype)
        seen |= {dtypes[parameter].name} if parameter in dtypes else set()  # of another piece
        if len(seen) > 1:
            wrong["of a wrong dtype"].append(f"{layout.key} is {' and '.join(sorted(seen))}, expected one of them")
        if seen:
            dtypes[parameter] = FLOAT_DTYPES[min(seen)]
    others = [key for key in arrays if key not in expected]
    extra = [key for key in others if not any(re.fullmatch(p, key) for p in format.ignored_keys_of_variant)]
    wrong["unexpected"] = [f"{key!r} {_shape_and_dtype(arrays[key])[0] or ''}".strip() for key in extra]

    if not wrong["misshapen"] and not wrong["missing"]:  # else a hostile config may give arrays of any size
        format.check_column(column, config.sizes)
    if lists := [f"{len(keys)} {what}: {'; '.join(keys)}" for what, keys in wrong.items() if keys]:
        raise InputError(
            f"these weights do not match the config in format {format.name!r}: {'. '.join(lists)}. "
            f"Give the config and the format that they were made with, or correct these keys"
        )
    check_ignored_values(format, config, {key: arrays[key] for key in others})
    return dtypes


def check_ignored_values(format: Format, config: ViTConfig, arrays: Mapping[str, Any]) -> None:
    """Check that arrays are what the reason says for which a format ignores them, if it is about their values.

    Args:
        format: the format of the arrays.
        config: the model.
        arrays: arrays that are not parameters of the model, by key.

    Raises:
        InputError: an array has other values, so the model may be another one than the config describes.
    """
    # No such array is larger than a table of all pairs of tokens, a value for each, or the classifier's bias.
    largest = max(config.num_tokens * max(config.num_tokens, config.width), config.num_classes)
    for pattern, has_values in format.ignored_values.items():
        for key in sorted(key for key in arrays if re.fullmatch(pattern, key)):
            shape, _ = _shape_and_dtype(arrays[key])
            if shape is None or prod(shape) > largest or not has_values(as_array(arrays[key]), config):
                raise InputError(
                    f"{key} of format {format.name!r} has other values than expected ({format.ignored_keys[pattern]}), so "
                    f"it cannot be ignored: give the config that it was made with, or correct {key}"
                )


def converted_arrays(checkpoint: Checkpoint, to: str) -> Iterator[tuple[str, Array]]:
    """Convert a checkpoint to the format `to`: yield every key with a new numpy array.

    Raises:
        InputError: the format is unknown or cannot store this config, or the weights do not match their config.  The call
            raises it, before any array is converted.
    """
    return ((conversion.key, conversion.to_array()) for conversion in plan_conversion(checkpoint, to))


def plan_conversion(checkpoint: Checkpoint, to: str, dtype: np.dtype[Any] | None = None) -> list[ArrayConversion]:
    """Validate a checkpoint and return the arrays of the format `to`, to be computed on demand.

    Args:
        checkpoint: the checkpoint.
        to: the name of the target format.
        dtype: the dtype to round the parameters to; None keeps every bit.

    Raises:
        InputError: for the reasons given in `converted_arrays`.
    """
    config, target = checkpoint.config, get(to)
    column, dtypes = target.layouts(config), validate(checkpoint)
    if dtype is not None:
        dtypes = dict.fromkeys(dtypes, dtype)
    target.check_column(column, config.sizes)
    source = get(checkpoint.format).layouts(config)
    read = _entry_reader(checkpoint.arrays)
    planned = list(_plan_column(source, column, config.sizes, dtypes, read))
    for name, layout in target.duplicate_layouts(config).items():
        planned += _plan_column(source, {name: layout}, config.sizes, dtypes, read)
    widest = max(dtypes.values(), key=lambda each: each.itemsize)
    for key, array in target.constant_arrays(config).items():
        values = array.astype(widest) if array.dtype.kind == "f" else array
        planned.append(ArrayConversion(key, values.shape, values.dtype, [(0, partial(_constant_chunks, values))]))
    return planned


def parameter(checkpoint: Checkpoint, name: str) -> Array:
    """Return one parameter as a new array with the axes of its row in `vit_spec.rows`, in their order."""
    config = checkpoint.config
    source, target = get(checkpoint.format).layouts(config), row_column(config, [name])
    dtypes, read = validate(checkpoint), _entry_reader(checkpoint.arrays)
    [conversion] = _plan_column(source, target, config.sizes, dtypes, read)
    return conversion.to_array()


def checksum(checkpoint: Checkpoint) -> str:
    """Return the SHA-256 of the parameters, which does not depend on the format of the checkpoint.

    They are read as float64, in the order of `vit_spec.rows`.
    """
    found = hashlib.sha256()
    for name in rows(checkpoint.config):
        found.update(name.encode())
        found.update(np.ascontiguousarray(parameter(checkpoint, name), "<f8").data)
    return found.hexdigest()


def replace_parameters(checkpoint: Checkpoint, config: ViTConfig, changes: Mapping[str, Array]) -> Checkpoint:
    """Return a checkpoint of another config in the same format: some parameters are replaced, the others stay unread.

    Args:
        checkpoint: the checkpoint.
        config: the config of the new checkpoint.
        changes: parameter -> array with the axes of its row in `vit_spec.rows(config)`.

    Raises:
        InputError: the format cannot store the config.
    """
    column, before = get(checkpoint.format).layouts(config), get(checkpoint.format).layouts(checkpoint.config)
    shared = {layout.key for name, layout in column.items() if parameter_of(name) in changes and layout.is_part}
    renewed = {parameter_of(name) for name, layout in column.items() if layout.key in shared} | changes.keys()
    new = {name: layout for name, layout in column.items() if parameter_of(name) in renewed}
    kept = [layout for name, layout in before.items() if name in column and name not in new]
    arrays = {key: checkpoint.arrays[key] for layout in kept for key in layout.keys(checkpoint.config.sizes)}

    values = {name: changes[name] if name in changes else parameter(checkpoint, name) for name in renewed}
    own = row_column(config, values)
    dtypes = {name: array.dtype for name, array in values.items()}
    planned = _plan_column(own, new, config.sizes, dtypes, _entry_reader(values))
    made = {conversion.key: conversion.to_array() for conversion in planned}
    return replace(checkpoint, config=config, arrays={**arrays, **made})


Chunks = Iterator[tuple[int, Array]]  # (offset of the first entry, entries in one dimension)
Dtypes = Mapping[str, np.dtype[Any]]  # parameter -> its dtype


def _plan_column(
    source: Column, target: Column, sizes: Sizes, dtypes: Dtypes, read: ReadRange
) -> Iterator[ArrayConversion]:
    """Yield the conversion of each key of the target column, in its order."""
    source, target = align(source, target)
    owners: dict[str, list[str]] = defaultdict(list)
    for name, layout in target.items():
        owners[layout.key].append(name)
    for names in owners.values():
        layout, dtype = target[names[0]], dtypes[parameter_of(names[0])]
        for key, indices in layout.indexed_keys(sizes, {}):
            if layout.is_part:
                column = {name: target[name] for name in names}
                runs = [(0, partial(_assembled_chunks, source, column, sizes, indices, dtype, read))]
            else:
                one = source[names[0]]
                runs = [
                    (first, partial(_converted_chunks, one, layout, sizes, part, dtype, read))
                    for first, part in split_by_source(one, layout, sizes, indices)
                ]
            yield ArrayConversion(key, layout.shape(sizes), dtype, runs)


def _converted_chunks(
    source: Layout, target: Layout, sizes: Sizes, indices: Indices, dtype: np.dtype[Any], read: ReadRange
) -> Chunks:
    """Yield the chunks of `convert_chunks`, rounded to `dtype`."""
    for first, entries in convert_chunks(source, target, sizes, indices, read):
        yield first, round_to(entries, dtype)


def _assembled_chunks(
    source: Column, target: Column, sizes: Sizes, indices: Indices, dtype: np.dtype[Any], read: ReadRange
) -> Chunks:
    """Yield an array that stores several parameters, as one chunk.

    Entries that belong to no parameter are zero, such as the bias of keys in a model that has none.
    """
    array = np.zeros(next(iter(target.values())).shape(sizes), dtype)
    for name, layout in target.items():
        axes = [axis.parameter_axis for axis in layout.array_axes if axis.parameter_axis]
        key = "".join(f"{{{axis}}}" for axis in layout.key_axes)
        view, alone = layout.view(array, sizes, indices, axes), Layout(key, tuple((Axis(each, each, 0),) for each in axes))
        run = partial(_converted_chunks, source[name], alone, sizes, indices, dtype, read)
        view[...] = ArrayConversion(name, view.shape, dtype, [(0, run)]).to_array()
    yield 0, array.reshape(-1)


def round_to(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return values rounded once to the nearest number of a dtype; the same array if it has that dtype.

    A cast from float64 to bfloat16 goes through float32 (ml_dtypes 0.6) and so rounds twice.  Here the step to float32
    rounds to odd, which preserves on which side of a tie the number lies (Boldo and Melquiond, 2005).
    """
    if dtype != FLOAT_DTYPES["bfloat16"] or values.dtype != np.float64:
        return values.astype(dtype, copy=False)
    narrow = values.astype(np.float32)
    bits = narrow.view(np.uint32)
    bits -= np.abs(narrow) > np.abs(values)  # round towards zero
    bits |= narrow != values  # and set the last bit of inexact results: round to odd
    return narrow.astype(dtype)


def _constant_chunks(values: Array) -> Chunks:
    """Yield an array as one chunk."""
    yield 0, values.reshape(-1)


def _entry_reader(arrays: Mapping[str, Any]) -> ReadRange:
    """Return a function that reads a range of an array: from the file, or as a view of an array in memory."""
    latest: dict[str, Array] = {}

    def read(key: str, start: int, stop: int) -> Array:
        array = arrays[key]
        if isinstance(array, StoredArray):
            return array.read(start, stop)
        flat = latest.get(key)
        if flat is None:  # flattening may copy: keep the result for the next range of the same array
            flat = as_array(array).reshape(-1)
            latest.clear()
            latest[key] = flat
        return flat[start:stop]

    return read


def as_checkpoint(weights: Tree | Checkpoint, config: ViTConfig | None, format: str) -> Checkpoint:
    """Return `weights` if they are a checkpoint, otherwise a checkpoint of them, their config and their format.

    Raises:
        InputError: a checkpoint together with a config, or weights without one.
    """
    if isinstance(weights, Checkpoint):
        if config is not None:
            raise InputError("a checkpoint has its own config: leave the second argument out")
        return weights
    if config is None:
        raise InputError("weights alone do not say which model they belong to: give its config as the second argument")
    return Checkpoint(config, format, flatten(weights, get(format)))


def _shape_and_dtype(value: Any) -> tuple[tuple[int, ...] | None, str]:
    """Return the shape of an array and the name of its dtype; for anything else None and the name of its type."""
    if isinstance(value, StoredArray):
        return value.shape, value.dtype.name
    if not hasattr(value, "__array__") or getattr(value, "is_meta", False):
        return None, f"a {type(value).__name__} without values"
    return tuple(value.shape), str(value.dtype).removeprefix("torch.")


def as_tensor(array: Array) -> "torch.Tensor":
    """Return a numpy array as a tensor, which shares its memory."""
    import torch

    if array.dtype == FLOAT_DTYPES["bfloat16"]:  # torch does not accept the dtype of ml_dtypes: pass the bits
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(value: Any) -> Array:
    """Return an array of numpy, jax or torch as a numpy array, which shares its memory where possible."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    import torch

    tensor = value.detach().cpu().resolve_neg()  # the imaginary part of a conjugate is stored negated
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy()
        return bits.view(FLOAT_DTYPES["bfloat16"])
    host: Array = tensor.numpy()
    return host
