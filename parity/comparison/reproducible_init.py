"""Numbers drawn from a seed that are the same on every machine and with every version of numpy, jax and torch.

numpy keeps the bits of its generators and not the numbers that it makes of them (NEP 19), and logarithms and sines differ
in the last digit between processors.  So these are made of the bits of Philox4x64-10, a published counter-based generator
(Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011), by integer sums, one division, one product and one sum,
each of which IEEE 754 rounds in one way only.  A stream is named by its seed and by what it is drawn for.
"""

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints.weights import Checkpoint, edited
from vit_spec import Row, ViTConfig, rows

PERTURBATION = 0.1  # of what starts as a constant: without it a norm that is left out would not show

_AT_ONCE = 2**20  # entries
_WORD = 2**21 - 1  # an entry is the sum of three such words: bell-shaped, cut at 3 standard deviations
_STD = math.sqrt((2**42 - 1) / 4)  # of that sum


def noise(seed: int, name: str, shape: tuple[int, ...], mean: float = 0.0, std: float = 1.0) -> NDArray[np.float32]:
    """Return independent entries of this mean and standard deviation, bell-shaped; none is exactly the mean."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    bits, out = np.random.Philox(key=key), np.empty(math.prod(shape), np.float32)
    for first in range(0, len(out), _AT_ONCE):
        part = out[first : first + _AT_ONCE]
        raw = bits.random_raw(len(part))
        total = (raw & _WORD) + (raw >> 21 & _WORD) + (raw >> 42 & _WORD)
        odd = 2 * total.astype(np.int64) - 3 * _WORD
        part[:] = odd / (2 * _STD) * std + mean
    return out.reshape(shape)


def weights(config: ViTConfig, seed: int) -> Checkpoint:
    """Return float32 weights of the size that a model's have, without a zero, a one or a symmetry to hide a mistake behind.

    What is drawn before training has the mean and the deviation of its law; what starts as a constant has `PERTURBATION`.
    """
    drawn: dict[str, Any] = {name: _parameter(row, seed) for name, row in rows(config).items()}
    return edited(Checkpoint(config, "jax", {}), config, drawn)


def images(config: ViTConfig, seed: int) -> NDArray[np.float32]:
    """Return two normalised images, (2, H, W, C)."""
    return noise(seed, "images", (2, *config.image_size, config.in_channels))


def _parameter(row: Row, seed: int) -> NDArray[np.float32]:
    if row.law is None:  # a table of sines
        return noise(seed, row.name, row.shape, std=float(np.float32(math.sqrt(0.5))))
    std = row.law.std if row.law.std > 1e-3 else PERTURBATION
    return noise(seed, row.name, row.shape, row.law.mean, float(np.float32(std)))  # powers differ in the last digit too
