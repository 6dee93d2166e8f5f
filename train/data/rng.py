"""Random choices of the data, each a function of what it is for and of numbers that say where it is made."""

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

# What a choice is for; ahead of the numbers, so that no two streams are the same.
SPLIT, ORDER, IMAGE, MIX, SHOTS = 1, 2, 3, 4, 5


def generator(purpose: int, *numbers: int) -> np.random.Generator:
    """Return a fresh generator for this purpose and these numbers, the same on every machine."""
    hashed: Any = _Hashed(purpose, *numbers)  # numpy's stubs know no other ISeedSequence than its own
    return np.random.Generator(np.random.PCG64(hashed))


class _Hashed(ISeedSequence):
    """The hash of some numbers as a seed: every image has one, and numpy's own mixing takes several times as long."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = tuple(map(int, numbers))  # numpy's own write themselves otherwise

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        words = np.dtype(dtype).newbyteorder("<")
        digest = blake2b(repr(self._numbers).encode(), digest_size=n_words * words.itemsize).digest()
        return np.frombuffer(digest, words).astype(dtype, copy=False)
