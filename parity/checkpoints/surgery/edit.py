"""Helpers of all operations: conversion to float64 and back, and the checkpoint with changes applied."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints.arrays import find_overflow, round_to
from parity.checkpoints.config_inference import update_assumptions
from parity.checkpoints.containers.container import StoredArray
from parity.checkpoints.conversion import ArrayConversion, plan_conversion, replace_parameters
from parity.checkpoints.formats import get
from parity.checkpoints.layout import Array
from parity.checkpoints.weights import Checkpoint
from vit_spec import InputError, ViTConfig

Changed = tuple[Checkpoint, str]  # the new checkpoint, and one line that describes the change
Float64 = NDArray[np.float64]


def to_float64(array: Array) -> Float64:
    """Return an array in float64, which represents all dtypes of weights exactly."""
    return array.astype(np.float64)


def round_parameter(name: str, values: Float64, dtype: np.dtype[Any]) -> Array:
    """Return the values of a parameter, rounded once to its dtype.

    Raises:
        InputError: a finite value is beyond the range of the dtype.
    """
    rounded = round_to(values, dtype)
    if (value := find_overflow(values, rounded)) is not None:
        wider = "float32" if dtype == np.float16 else "float64"
        raise InputError(
            f"{name} would have the entry {value:g}, which is infinite in {dtype}: first convert the checkpoint with "
            f"--dtype {wider} (dtype=) alone, then change the result"
        )
    return rounded


def apply_changes(
    checkpoint: Checkpoint, config: ViTConfig, changes: Mapping[str, Array], given: Iterable[str]
) -> Checkpoint:
    """Return the checkpoint with a new config and changed parameters.

    Preprocessing is scaled to a new image size if "image_size" is in `given`.  The labels stay if the number of outputs
    stays.

    Args:
        checkpoint: the checkpoint.
        config: the new config.
        changes: parameter -> array with the axes of its row in `vit_spec.rows(config)`.
        given: the fields, or nested dataclasses, of the config that the user chose; they are no longer assumptions.
    """
    given, preprocessing = tuple(given), checkpoint.preprocessing
    if preprocessing and "image_size" in given:
        checkpoint = replace(checkpoint, preprocessing=preprocessing.for_size(config.image_size))
    if config.num_classes != checkpoint.config.num_classes:
        checkpoint = replace(checkpoint, labels=None)
    assumed = update_assumptions(checkpoint.assumed, config, given)
    return replace(replace_parameters(_in_capable_format(checkpoint, config), config, changes), assumed=assumed)


def _in_capable_format(checkpoint: Checkpoint, config: ViTConfig) -> Checkpoint:
    """Return the checkpoint, converted to the format of `vit_torch` if its own format cannot store the new config."""
    try:
        get(checkpoint.format).layouts(config)
    except InputError:
        arrays = {each.key: ConvertedArray(each) for each in plan_conversion(checkpoint, "torch")}
        return replace(checkpoint, format="torch", arrays=arrays)
    return checkpoint


class ConvertedArray(StoredArray):
    """An array of another format, converted when it is read."""

    def __init__(self, conversion: ArrayConversion) -> None:
        self.conversion, self.shape, self.dtype = conversion, conversion.shape, conversion.dtype

    def read(self, start: int, stop: int) -> Array:
        return self.conversion.to_array().reshape(-1)[start:stop]
