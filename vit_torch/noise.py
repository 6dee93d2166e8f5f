"""The random numbers of `vit_spec.noise` in PyTorch: equal to those of `vit_jax` to the bit, on any device.

Words are int32 here, since PyTorch has few operations for uint32: the same 32 bits, the highest of which is a sign.
"""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from vit_spec import ViTConfig
from vit_spec.errors import require
from vit_spec.noise import SITES_PER_PART, Site, check_seed, drop_path_rates, drop_threshold, num_parts

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = 0x1BD11BDA
_LOWEST = -(2**31)
_CHUNK = 1 << 20  # entries that are computed at a time on a CPU, so that they stay in its cache


class Key(NamedTuple):
    """The key of a forward pass, and which part of its images, heads and hidden units this process computes.

    Attributes:
        words: the key, (2,) int32; see `random_key`.
        first_image: the number of images of the whole batch before those of this process.
        shard: which of `shards` equal parts of the heads and hidden units this process has, if they are divided.
        shards: the number of these parts.
    """

    words: Tensor
    first_image: int = 0
    shard: int = 0
    shards: int = 1


class Noise(NamedTuple):
    """The random numbers of a part of the model in a forward pass, as `vit_spec.noise` defines them.

    Attributes:
        keys: the key of each `Site`, (SITES_PER_PART, 2) int32.
        key: the key of the forward pass.
        heads: the number of attention heads of the part, in all processes together.
        hidden: the number of hidden units of its MLP, in all processes together.
        drop_path_threshold: the `signed_threshold` of stochastic depth, a scalar int32: a tensor, because blocks differ in
            it and are compiled once.
    """

    keys: Tensor
    key: Key
    heads: int
    hidden: int
    drop_path_threshold: Tensor

    def words(self, site: Site, shape: tuple[int, ...]) -> Tensor:
        """Return the random words of an array of this process, int32.

        Args:
            site: the place of the array in the part.
            shape: its shape, (B of this process, ...).
        """
        count, key = prod(shape), self.keys[site]
        if not count:  # a batch without images
            return torch.empty(shape, dtype=torch.int32, device=key.device)
        step = count if torch.compiler.is_compiling() or key.device.type != "cpu" else _CHUNK
        parts = []
        for start in range(0, count, step):
            index = self._index(site, shape, torch.arange(start, min(start + step, count), device=key.device))
            x, y = threefry2x32(key, (index >> 32).int(), index.int())
            parts.append(x ^ y)
        return torch.cat(parts).view(shape)

    def _index(self, site: Site, shape: tuple[int, ...], entry: Tensor) -> Tensor:
        """Return the row-major indices in the whole array, for those in the array of this process, int64."""
        first_image, shard, shards = self.key[1:]
        first = first_image * prod(shape[1:])
        dim, length = (1, self.heads) if site == Site.ATTENTION else (len(shape) - 1, self.hidden)
        if site not in (Site.ATTENTION, Site.HIDDEN) or shape[dim] == length:
            return entry + first
        # A process has consecutive heads or hidden units of every token, and skips those of the others.
        own, whole = prod(shape[dim:]), prod(shape[dim:]) * shards
        return entry + entry // own * (whole - own) + first * shards + shard * own

    def keeps(self, site: Site, shape: tuple[int, ...], threshold: int | Tensor) -> Tensor:
        """Return where dropout with this `signed_threshold` keeps an entry, (*shape) bool; arguments as for `words`."""
        return _signed(self.words(site, shape)) >= threshold

    def order(self, site: Site, shape: tuple[int, ...]) -> Tensor:
        """Return the indices that sort the words along the last dimension, (*shape) int64; arguments as for `words`."""
        return _signed(self.words(site, shape)).argsort(dim=-1, stable=True)


def make_noise(config: ViTConfig, key: Key) -> tuple[Noise, list[Noise], Noise]:
    """Return the random numbers before the blocks, in each block, and in attention pooling, for a forward pass.

    Raises:
        InputError: the key is not a `Key`.
    """
    require(isinstance(key, Key), f"key is a {type(key).__name__}: give vit_torch.Key(vit_torch.random_key(seed))")
    parts = num_parts(config)
    numbers = torch.arange(parts * SITES_PER_PART, dtype=torch.int32, device=key.words.device)
    keys = torch.stack(threefry2x32(key.words, torch.zeros_like(numbers), numbers), dim=-1)
    heads = [config.num_heads] * (parts - 1) + [config.pool_heads]
    thresholds = torch.tensor([signed_threshold(rate) for rate in (0, *drop_path_rates(config), 0)], dtype=torch.int32)
    by_part = zip(keys.view(parts, SITES_PER_PART, 2), heads, thresholds.to(keys.device), strict=True)
    before, *inside, after = (Noise(own, key, heads, config.mlp_dim, threshold) for own, heads, threshold in by_part)
    return before, inside, after


def random_key(seed: int, *, device: torch.device | str | None = None) -> Tensor:
    """Return a key for `Key`, (2,) int32: the words of `jax.random.key(seed)`.

    Args:
        seed: from 0 up to 2^64 - 1.  JAX ignores the upper 32 bits unless 64-bit types are enabled.
        device: where the key is, and where random numbers are computed: that of the model.

    Raises:
        vit_spec.InputError: the seed is no integer, or out of range.
    """
    check_seed(seed)
    seed = int(seed)  # integers of numpy have at most 64 bits
    words = torch.tensor([seed >> 32, seed & 0xFFFFFFFF], dtype=torch.int64, device=device)
    return words.int()


def fold_in(key: Tensor, number: int) -> Tensor:
    """Return another key, (2,) int32, which depends on a key and a number from 0 up to 2^32 - 1: `jax.random.fold_in`."""
    low = torch.full((), number, dtype=torch.int64, device=key.device).int()
    return torch.stack(threefry2x32(key, torch.zeros_like(low), low))


def threefry2x32(key: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two words of Threefry-2x32 with 20 rounds for each pair of counters (x, y).

    Args:
        key: (2,) int32.
        x: upper words of the counters, int32.
        y: lower words of the counters, int32.
    """
    first, second = key.unbind()
    subkeys = first, second, first ^ second ^ _PARITY
    x, y = x + subkeys[0], y + subkeys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x += y
            # Right shifts of int32 copy the sign, so the upper bits are cleared.
            rotated = (y >> (32 - rotation)).bitwise_and_((1 << rotation) - 1)
            y = (y << rotation).bitwise_or_(rotated).bitwise_xor_(x)
        x += subkeys[(group + 1) % 3]
        y += subkeys[(group + 2) % 3] + (group + 1)
    return x, y


def signed_threshold(rate: float) -> int:
    """Return `drop_threshold(rate)` as an int32 with the same order: less 2^31."""
    return drop_threshold(rate) + _LOWEST


def _signed(words: Tensor) -> Tensor:
    """Return int32 words whose order is that of the words as unsigned integers: less 2^31."""
    return words ^ _LOWEST
