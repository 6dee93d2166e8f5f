"""Random weights and images that are the same on every machine and with every version of numpy, jax and torch.

numpy guarantees the bits of its generators but not the distributions that it computes from them (NEP 19), and
logarithms and sines differ in the last digit between processors.  So these numbers are computed from the bits of
Philox4x64-10, a published counter-based generator (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011),
by integer sums, one division, one product and one sum, each of which IEEE 754 rounds in only one way.  A seed and a
name identify a stream.
"""

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints.conversion import replace_parameters
from parity.checkpoints.weights import Checkpoint
from vit_spec import Row, ViTConfig, rows

# Standard deviation of parameters that are initialised to a constant.  With the constant itself, a comparison could not
# show that a norm is missing.
CONSTANT_INIT_STD = 0.1

_CHUNK = 2**20  # entries that are computed at a time
_WORD = 2**21 - 1  # an entry is the sum of three such words: nearly normal, at most 3 standard deviations
_STD = math.sqrt((2**42 - 1) / 4)  # standard deviation of that sum


def noise(seed: int, name: str, shape: tuple[int, ...], mean: float = 0.0, std: float = 1.0) -> NDArray[np.float32]:
    """Return an array of independent, nearly normal entries, float32; no entry equals the mean exactly.

    Args:
        seed, name: seed and name of the random stream, which determine every entry.
        shape: shape of the array.
        mean, std: mean and standard deviation of the entries.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    bits, out = np.random.Philox(key=key), np.empty(math.prod(shape), np.float32)
    for first in range(0, len(out), _CHUNK):
        part = out[first : first + _CHUNK]
        raw = bits.random_raw(len(part))
        total = (raw & _WORD) + (raw >> 21 & _WORD) + (raw >> 42 & _WORD)
        odd = 2 * total.astype(np.int64) - 3 * _WORD
        part[:] = odd / (2 * _STD) * std + mean
    return out.reshape(shape)


def weights(config: ViTConfig, seed: int) -> Checkpoint:
    """Return float32 weights with the scale of an initialised model, but no zeros, ones or symmetries that hide a bug.

    Randomly initialised parameters have the mean and the standard deviation of their initialisation; those that start as
    a constant have a standard deviation of `CONSTANT_INIT_STD`.
    """
    parameters: dict[str, Any] = {name: _parameter(row, seed) for name, row in rows(config).items()}
    return replace_parameters(Checkpoint(config, "jax", {}), config, parameters)


def images(config: ViTConfig, seed: int) -> NDArray[np.float32]:
    """Return two random normalized images, (2, H, W, C), float32."""
    return noise(seed, "images", (2, *config.image_size, config.in_channels))


def _parameter(row: Row, seed: int) -> NDArray[np.float32]:
    if row.law is None:  # a fixed table of sines and cosines
        return noise(seed, row.name, row.shape, std=float(np.float32(math.sqrt(0.5))))
    std = row.law.std if row.law.std > 1e-3 else CONSTANT_INIT_STD
    return noise(
        seed, row.name, row.shape, row.law.mean, float(np.float32(std))
    )  # float32, because powers also differ in the last digit
