"""Sketches of tensors, of at most 32 numbers; the distance between two sketches estimates the distance of the tensors.

A tensor of at most 32 entries is its own sketch.  A larger one is divided into 32 runs of consecutive entries, and the
sketch is the sum of each run, in which every entry is multiplied by a random sign that never changes.  Such a projection
keeps squared distances on average (Alon, Matias and Szegedy, 1996).  The root of the sum of 32 squares has a relative
standard deviation of an eighth.  So a change of any entry shows in the sketch, which is enough for the float64 tolerance.
Changes that cancel to twelve digits within every run do not show.  A sketch does not show which entry changed.  Errors in
float32, which are tested to within a small factor, are never computed from sketches.
"""

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints.layout import Array

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
    """Return the first `count` entries of a fixed sequence of random signs."""
    key = int.from_bytes(hashlib.sha256(b"signs of a sketch").digest()[:16], "little")
    bits = np.random.Philox(key=key).random_raw(-(-count // 64)).astype("<u8").view(np.uint8)
    return 1 - 2 * np.unpackbits(bits, count=count).view(np.int8)
