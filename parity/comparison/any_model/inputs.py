"""The inputs of both models, as arrays of NumPy."""

from typing import Any

import numpy as np

from parity.checkpoints.arrays import as_array
from parity.checkpoints.layout import Array
from vit_spec import InputError


def as_arrays(inputs: Any) -> list[Array]:
    """Return inputs as arrays; floating-point numbers as float32 and complex numbers as complex64, all others as they are.

    They are rounded for both dtypes, so that the runs in float32 do not add this rounding error.

    inputs: one array of any framework, or a tuple or list of them.

    Raises:
        InputError: an input is no array of numbers.
    """
    return [_as_array(x, n) for n, x in enumerate(inputs if isinstance(inputs, (tuple, list)) else (inputs,))]


def _as_array(x: Any, n: int) -> Array:
    try:
        array = as_array(x.float() if hasattr(x, "detach") and x.is_floating_point() else x)
        are_numbers = array.dtype.kind in "biufc" or array.dtype.name == "bfloat16"
    except (TypeError, ValueError, NotImplementedError):  # such as a key of random numbers, or a tensor without data
        are_numbers = False
    if not are_numbers:
        what = "give one array, or a tuple of arrays; a function around the model can pass it other arguments"
        raise InputError(f"input {n} is a {type(x).__name__}, which is no array of numbers: {what}")
    if array.dtype.kind in "iub":
        return array
    return array.astype(np.complex64 if array.dtype.kind == "c" else np.float32)
