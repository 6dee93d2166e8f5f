"""Counter-based random numbers of data and initial weights: a pure function of a purpose and integers, such as a seed."""

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

# The purposes of random numbers.  They are hashed with the other integers, so no two purposes share a stream.
SPLIT, ORDER, IMAGE, MIX, SHOTS, WEIGHTS, BOOTSTRAP, FOLDS = 1, 2, 3, 4, 5, 6, 7, 8


def generator(purpose: int, *numbers: int) -> np.random.Generator:
    """Return a new generator for a purpose and integers, such as (IMAGE, seed, epoch, row); the same on every machine."""
    hashed: Any = _HashSeed(purpose, *numbers)  # numpy's type stubs accept no other ISeedSequence than its own
    return np.random.Generator(np.random.PCG64(hashed))


class _HashSeed(ISeedSequence):
    """A hash of integers as a seed.  Every image needs one, and numpy's SeedSequence takes several times as long."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = tuple(map(int, numbers))  # numpy integers have another repr

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        words = np.dtype(dtype).newbyteorder("<")
        digest = blake2b(repr(self._numbers).encode(), digest_size=n_words * words.itemsize).digest()
        return np.frombuffer(digest, words).astype(dtype, copy=False)
