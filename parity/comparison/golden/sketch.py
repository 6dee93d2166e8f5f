"""A tensor in 32 numbers, enough to tell how far another one is from it.

A tensor of up to 32 entries is kept as it is.  A larger one is cut into 32 runs, and of each the sum is kept, every entry
with a random sign (fixed for all time): a projection.  The squared distance of two projections is on average that of the
tensors (as in Alon, Matias and Szegedy, 1996; over 32 runs its root scatters by an eighth), so a sketch sees a change of
every entry, and the bar of float64 needs no more.  What it cannot see are changes that cancel within each run to twelve
digits, and which entry changed.  Sizes of float32 errors, which are judged to a factor, are never taken from sketches.
"""

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

KEPT = 32


def sketch(tensor: Any) -> Array:
    """Return what is kept of a tensor: float64, (min(entries, KEPT),)."""
    flat = np.asarray(tensor, np.float64).reshape(-1)
    if flat.size <= KEPT:
        return flat
    length = -(-flat.size // KEPT)
    signed = np.zeros(length * KEPT)
    np.multiply(flat, _signs(flat.size), out=signed[: flat.size])
    sums: Array = signed.reshape(KEPT, length).sum(1)
    return sums


def root_mean_square(tensor: Any) -> float:
    """Return sqrt(mean(x^2)), in float64; 0 of nothing."""
    flat = np.asarray(tensor, np.float64).reshape(-1)
    return math.sqrt(float(np.vdot(flat, flat)) / max(flat.size, 1))


def _signs(count: int) -> NDArray[np.int8]:
    key = int.from_bytes(hashlib.sha256(b"signs of a sketch").digest()[:16], "little")
    bits = np.random.Philox(key=key).random_raw(-(-count // 64)).astype("<u8").view(np.uint8)
    return 1 - 2 * np.unpackbits(bits, count=count).view(np.int8)
