"""Sketches: 32 numbers for each tensor, from which the distance of another tensor from it can be estimated.

A tensor of at most 32 entries is its own sketch.  A larger one is divided into 32 runs of consecutive entries, and the
sketch is the sum of each run, in which every entry has a random sign that never changes.  Such a projection keeps squared
distances on average (Alon, Matias and Szegedy, 1996), and the root of 32 of them has a relative standard deviation of an
eighth.  So a change of any entry shows in the sketch, which is enough for the float64 tolerance.  Changes that cancel to
twelve digits within every run do not show, and neither does the entry that changed.  Errors in float32, which are tested
to within a small factor, are never computed from sketches.
"""

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SKETCH_SIZE = 32


def sketch(tensor: Any) -> Array:
    """Return the sketch of a tensor: float64, (min(entries, SKETCH_SIZE),)."""
    flat = np.asarray(tensor, np.float64).reshape(-1)
    if flat.size <= SKETCH_SIZE:
        return flat
    length = -(-flat.size // SKETCH_SIZE)
    signed = np.zeros(length * SKETCH_SIZE)
    np.multiply(flat, _signs(flat.size), out=signed[: flat.size])
    sums: Array = signed.reshape(SKETCH_SIZE, length).sum(1)
    return sums


def root_mean_square(tensor: Any) -> float:
    """Return sqrt(mean(x^2)), in float64; 0 for a tensor without entries."""
    flat = np.asarray(tensor, np.float64).reshape(-1)
    return math.sqrt(float(np.vdot(flat, flat)) / max(flat.size, 1))


def _signs(count: int) -> NDArray[np.int8]:
    key = int.from_bytes(hashlib.sha256(b"signs of a sketch").digest()[:16], "little")
    bits = np.random.Philox(key=key).random_raw(-(-count // 64)).astype("<u8").view(np.uint8)
    return 1 - 2 * np.unpackbits(bits, count=count).view(np.int8)
