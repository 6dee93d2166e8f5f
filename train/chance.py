"""Random choices of the data, each a function of what it is for and of numbers that say where it is made."""

import numpy as np

# What a choice is for; ahead of the numbers, so that no two streams are the same.
SPLIT, ORDER, IMAGE, MIX, SHOTS = 1, 2, 3, 4, 5


def generator(purpose: int, *numbers: int) -> np.random.Generator:
    """Return a fresh generator for this purpose and these numbers, the same on every machine.

    The number of entries goes first: numpy pads seeds with zeros, and (1, 2) would equal (1, 2, 0).
    """
    return np.random.Generator(np.random.PCG64([len(numbers), purpose, *numbers]))
