"""Arrays of numpy, jax, torch and of files: their dtypes, and their values as arrays of numpy or torch.

Neither jax nor torch is imported until one of their arrays is passed in or asked for.
"""

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from parity.checkpoints.containers.container import StoredArray
from parity.checkpoints.layout import Array

if TYPE_CHECKING:
    import torch

FLOAT_DTYPES = {np.dtype(kind).name: np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)}


def shape_and_dtype(value: Any) -> tuple[tuple[int, ...] | None, str]:
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

    tensor = value.detach().cpu().resolve_conj().resolve_neg()  # NumPy has no lazy conjugation or negation
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy()
        return bits.view(FLOAT_DTYPES["bfloat16"])
    host: Array = tensor.numpy()
    return host


def round_to(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return values rounded once to the nearest number of a dtype; the same array if it has that dtype.

    A cast from float64 to bfloat16 goes through float32 (ml_dtypes 0.6) and so rounds twice.  Here the step to float32
    rounds to odd, which preserves on which side of a tie the number lies (Boldo and Melquiond, 2005).

    A number beyond the range of the dtype becomes an infinity: see `find_overflow`.
    """
    with np.errstate(over="ignore"):
        if dtype != FLOAT_DTYPES["bfloat16"] or values.dtype != np.float64:
            return values.astype(dtype, copy=False)
        narrow = values.astype(np.float32)
    bits = narrow.view(np.uint32)
    bits -= np.abs(narrow) > np.abs(values)  # round towards zero
    bits |= narrow != values  # and set the last bit of inexact results: round to odd
    return narrow.astype(dtype)


def find_overflow(values: Array, rounded: Array) -> float | None:
    """Return the first finite number that became an infinity when `values` were rounded; None if none did."""
    if rounded is values:
        return None
    infinite = np.isinf(rounded)
    if not infinite.any():  # almost always: no second pass
        return None
    lost = values[infinite & np.isfinite(values)]
    return float(lost[0]) if lost.size else None
