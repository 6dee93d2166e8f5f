"""The random numbers of `vit_spec.noise` in JAX: equal to those of `vit_torch` to the bit, on any device and mesh."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_spec import ViTConfig
from vit_spec.noise import SITES_PER_PART, Site, check_seed, drop_path_rates, drop_threshold, num_parts


class Noise(NamedTuple):
    """The random numbers of a part of the model in training, as `vit_spec.noise` defines them.

    Attributes:
        keys: a key for each `Site`, (SITES_PER_PART,).
        drop_path: the rate of stochastic depth and its `drop_threshold`, scalars.

    For all blocks together, each array has a leading axis of the length `config.depth`.
    """

    keys: Array
    drop_path: tuple[Array, Array]

    def words(self, site: Site, shape: tuple[int, ...]) -> Array:
        """Return the random words of an array of this shape, uint32."""
        return jax.random.bits(self.keys[site], shape, jnp.uint32)


def random_key(seed: int, *, impl: str | None = None) -> Array:
    """Return `jax.random.key(seed)` with all bits of the seed: without 64-bit types, jax ignores the upper 32.

    Args:
        seed: from 0 up to 2^64 - 1.
        impl: the name of jax's generator; None means its default.

    Raises:
        InputError: the seed is no integer, or out of range.
    """
    check_seed(seed)
    # Within a program, jax would compute the key in that program, which may be without 64-bit types.
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        return jax.random.key(np.uint64(seed), impl=impl)


def make_noise(config: ViTConfig, key: Array) -> tuple[Noise, Noise, Noise]:
    """Return the random numbers before the blocks, in the blocks, and in attention pooling, for a forward pass.

    Args:
        config: the model.
        key: the key of the forward pass.
    """
    parts = num_parts(config)
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(parts * SITES_PER_PART))
    keys = keys.reshape(parts, SITES_PER_PART, *key.shape)  # a key of the old kind is an array of two words
    rates = drop_path_rates(config)
    drop_path = jnp.asarray(rates, float), jnp.asarray([drop_threshold(rate) for rate in rates], jnp.uint32)
    none = jnp.zeros(()), jnp.zeros((), jnp.uint32)
    return Noise(keys[0], none), Noise(keys[1:-1], drop_path), Noise(keys[-1], none)
