"""Conversion of checkpoints from one format to another, and to the parameters of either twin: copies, and nothing else.

A conversion is planned from shapes alone, and each array is computed when it is written.  Neither jax nor torch is imported
until one of their arrays is passed in or asked for.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.checkpoints.arrays import FLOAT_DTYPES, as_array, as_tensor, find_overflow, round_to
from parity.checkpoints.columns import Column, align, parameter_of, row_column
from parity.checkpoints.containers.container import StoredArray
from parity.checkpoints.formats import get
from parity.checkpoints.layout import Array, Axis, Indices, Layout, ReadRange, Sizes, convert_chunks, split_by_source
from parity.checkpoints.weights import Checkpoint, Tree, as_checkpoint, validate
from vit_spec import InputError, ViTConfig, rows

if TYPE_CHECKING:
    import torch

Chunks = Iterator[tuple[int, Array]]  # (offset of the first entry, entries in one dimension)
Dtypes = Mapping[str, np.dtype[Any]]  # parameter -> its dtype


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


def to_torch(weights: Tree | Checkpoint, config: ViTConfig | None = None) -> "dict[str, torch.Tensor]":
    """Convert weights to the state dict of `vit_torch` (and of timm), bit for bit: new tensors on the CPU.

    Args:
        weights: the parameters of `vit_jax`, or a checkpoint in any format.
        config: the model; None with a checkpoint, which has its own.

    Raises:
        InputError: the weights do not match the config; the message lists every wrong key.
    """
    return {key: as_tensor(array) for key, array in converted_arrays(as_checkpoint(weights, config, "jax"), "torch")}


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
                runs = [(0, partial(_assembled_chunks, key, source, column, sizes, indices, dtype, read))]
            else:
                one = source[names[0]]
                runs = [
                    (first, partial(_converted_chunks, key, one, layout, sizes, part, dtype, read))
                    for first, part in split_by_source(one, layout, sizes, indices)
                ]
            yield ArrayConversion(key, layout.shape(sizes), dtype, runs)


def _converted_chunks(
    key: str, source: Layout, target: Layout, sizes: Sizes, indices: Indices, dtype: np.dtype[Any], read: ReadRange
) -> Chunks:
    """Yield the chunks of `convert_chunks`, rounded to `dtype`.

    Raises:
        InputError: a finite entry of the array `key` is beyond the range of the dtype.
    """
    for first, entries in convert_chunks(source, target, sizes, indices, read):
        rounded = round_to(entries, dtype)
        if (value := find_overflow(entries, rounded)) is not None:
            fits = np.isfinite(round_to(np.array([value]), FLOAT_DTYPES["bfloat16"])).all()
            advice = f"{'give bfloat16, or ' if fits else ''}leave --dtype (dtype=) out"
            raise InputError(f"{key} has the entry {value:g}, which is infinite in {dtype}: {advice}")
        yield first, rounded


def _assembled_chunks(
    key: str, source: Column, target: Column, sizes: Sizes, indices: Indices, dtype: np.dtype[Any], read: ReadRange
) -> Chunks:
    """Yield an array that stores several parameters, as one chunk.

    Entries that belong to no parameter are zero, such as the bias of keys in a model that has none.
    """
    array = np.zeros(next(iter(target.values())).shape(sizes), dtype)
    for name, layout in target.items():
        axes = [axis.parameter_axis for axis in layout.array_axes if axis.parameter_axis]
        own_key = "".join(f"{{{axis}}}" for axis in layout.key_axes)
        alone = Layout(own_key, tuple((Axis(each, each, 0),) for each in axes))
        view = layout.view(array, sizes, indices, axes)
        run = partial(_converted_chunks, key, source[name], alone, sizes, indices, dtype, read)
        view[...] = ArrayConversion(name, view.shape, dtype, [(0, run)]).to_array()
    yield 0, array.reshape(-1)


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
