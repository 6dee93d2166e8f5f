"""Initial values of parameters, sampled by numpy: the same numbers whatever the framework.

The twins sample the same distributions with the generators of their frameworks.
"""

import numpy as np
from numpy.typing import NDArray

from vit_spec.config import ViTConfig
from vit_spec.initialisation import TRUNCATED_STD, Law
from vit_spec.params import Row
from vit_spec.positions import rotary_frequencies
from vit_spec.tables import position_table

Float64 = NDArray[np.float64]


def sample_row(config: ViTConfig, row: Row, rng: np.random.Generator) -> Float64:
    """Return initial values of the parameters in a row, (*row.shape): of all blocks, if the row has them.

    Args:
        config: the config of the model.
        row: a row of `vit_spec.rows(config)`.
        rng: the source of the random numbers.
    """
    if row.law is None:
        return position_table(config, config.grid)[0].reshape(row.shape)
    return sample(row.law, row.shape, rng)


def sample(law: Law, shape: tuple[int, ...], rng: np.random.Generator) -> Float64:
    """Return random numbers of an initial distribution, (*shape); for "rotary", shape is (..., 2, heads, pairs)."""
    match law.kind:
        case "constant":
            return np.full(shape, law.mean)
        case "normal":
            return law.std * rng.standard_normal(shape)
        case "uniform":
            low, high = law.arguments
            return rng.uniform(low, high, shape)
        case "rotary":
            magnitude, angle = rotary_frequencies(shape[-1], *law.arguments)
            angle = angle + rng.uniform(0, 2 * np.pi, (*shape[:-3], shape[-2], 1))
            freqs: Float64 = magnitude * np.stack([np.cos(angle), np.sin(angle)], axis=-3)
            return freqs
    values: Float64 = rng.standard_normal(shape)
    while (outside := np.abs(values) > 2).any():
        values[outside] = rng.standard_normal(outside.sum())
    return law.std / TRUNCATED_STD * values
