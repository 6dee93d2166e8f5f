"""The random numbers of training, as both twins compute them: dropout, stochastic depth and patch dropout.

A forward pass has a key of two 32-bit words.  The generator is Threefry-2x32 with 20 rounds (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011), as `jax.random` uses it.  Let f(key, (a, b)) be its two output words.

- The key of a place in the model is f(key, (0, 8 part + site)), `jax.random.fold_in(key, 8 * part + site)`.  Part 0 is
  everything before the blocks, parts 1 to depth are the blocks, and part depth + 1 is attention pooling.
- Entry i of an array, in row-major order over all images of the forward pass, has the word x ^ y of
  (x, y) = f(key of the place, (i >> 32, i mod 2^32)), as in `jax.random.bits` with `jax_threefry_partitionable`.
- Dropout keeps an entry whose word is at least `drop_threshold(rate)`.  Patch dropout keeps the patches with the smallest
  words, in ascending order.

So the number of an entry depends on its place alone: any process can compute those of its images, heads and hidden units.
Words are compared as integers; thus models in float32 and in float64 drop the same entries.
"""

import numbers
from enum import IntEnum

from vit_spec.config import ViTConfig
from vit_spec.errors import require


class Site(IntEnum):
    """A place within a part of the model where random numbers are used."""

    POSITIONS = 0
    """Dropout of tokens after positions are added, (B, T, width)."""
    PATCHES = 1
    """Patch dropout, (B, patches)."""
    ATTENTION = 2
    """Dropout of attention weights, (B, heads, T, S)."""
    ATTENTION_PATH = 3
    """Stochastic depth of attention, or of attention and MLP in parallel, (B, 1, 1)."""
    HIDDEN = 4
    """Dropout after the activation of the MLP, (..., mlp_dim)."""
    OUTPUT = 5
    """Dropout of the output of the MLP, (..., width)."""
    MLP_PATH = 6
    """Stochastic depth of the MLP, (B, 1, 1)."""


SITES_PER_PART = 8  # more than there are sites, so that a new one does not change the numbers of the others


def check_seed(seed: object) -> None:
    """Raise InputError unless the seed of a key is an integer of 64 bits, from 0 up to 2^64 - 1."""
    is_integer = isinstance(seed, numbers.Integral) and not isinstance(seed, bool)
    require(is_integer and 0 <= seed < 2**64, f"seed is {seed!r}: give an integer from 0 up to 2^64 - 1")  # type: ignore[operator]


def num_parts(config: ViTConfig) -> int:
    """Return the number of parts of a model: before the blocks, each block, and attention pooling."""
    return config.depth + 2


def drop_threshold(rate: float) -> int:
    """Return how many of the 2^32 words drop an entry, for a dropout rate from 0 up to 1; at most 2^32 - 1."""
    return min(round(rate * 2**32), 2**32 - 1)


def drop_path_rates(config: ViTConfig) -> list[float]:
    """Return the rate of stochastic depth of each block: it grows linearly from 0 to `regularisation.drop_path`."""
    return [config.regularisation.drop_path * i / max(1, config.depth - 1) for i in range(config.depth)]
