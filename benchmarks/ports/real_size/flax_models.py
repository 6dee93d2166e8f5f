"""A UNet, a causal language model and a ResNet in Flax; the ResNet is the one of torchvision."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class ConvBlock(nn.Module):
    """Two convolutions, each with a group norm and SiLU."""

    width: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for n in (0, 3):
            x = nn.Conv(self.width, (3, 3), padding=1, name=f"layers_{n}")(x)
            x = nn.silu(nn.GroupNorm(8, epsilon=1e-5, use_fast_variance=False, name=f"layers_{n + 1}")(x))
        return x


def upsampled(x: Any) -> Any:
    """Repeat each pixel in both directions."""
    return x.repeat(2, 1).repeat(2, 2)


class UNet(nn.Module):
    """Two levels down and up; logits for each pixel."""

    width: int
    classes: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        fine = ConvBlock(self.width, name="down1")(x)
        coarse = ConvBlock(2 * self.width, name="down2")(nn.avg_pool(fine, (2, 2), (2, 2)))
        x = ConvBlock(4 * self.width, name="middle")(nn.avg_pool(coarse, (2, 2), (2, 2)))
        x = ConvBlock(2 * self.width, name="up2")(jnp.concatenate([upsampled(x), coarse], -1))
        x = ConvBlock(self.width, name="up1")(jnp.concatenate([upsampled(x), fine], -1))
        return nn.Conv(self.classes, (1, 1), name="head")(x)


class DecoderBlock(nn.Module):
    """A pre-norm block with causal attention."""

    heads: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        (batch, length, width), norm = x.shape, partial(nn.LayerNorm, epsilon=1e-5, use_fast_variance=False)
        qkv = nn.Dense(3 * width, name="qkv")(norm(name="norm1")(x)).reshape(batch, length, 3, self.heads, -1)
        q, k, v = (qkv[:, :, n] for n in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // self.heads) ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(batch, length, width)
        x = x + nn.Dense(width, name="proj")(y)
        return x + nn.Dense(width, name="fc2")(nn.gelu(nn.Dense(4 * width, name="fc1")(norm(name="norm2")(x))))


class Decoder(nn.Module):
    """A causal language model whose output layer is its table of embeddings."""

    vocabulary: int
    length: int
    width: int
    heads: int
    depth: int

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        tokens = nn.Embed(self.vocabulary, self.width, name="tokens")
        x = tokens(ids) + nn.Embed(self.length, self.width, name="positions")(jnp.arange(ids.shape[1]))
        for n in range(self.depth):
            x = DecoderBlock(self.heads, name=f"blocks_{n}")(x)
        return tokens.attend(nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name="norm")(x))


class Bottleneck(nn.Module):
    """Convolutions of 1, 3 and 1 pixels, each with a batch norm, beside a residual."""

    width: int
    stride: int
    train: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        norm = partial(nn.BatchNorm, use_running_average=not self.train, momentum=0.9, use_fast_variance=False)
        conv = partial(nn.Conv, use_bias=False)
        y = nn.relu(norm(name="bn1")(conv(self.width, (1, 1), name="conv1")(x)))
        y = nn.relu(norm(name="bn2")(conv(self.width, (3, 3), strides=self.stride, padding=1, name="conv2")(y)))
        y = norm(name="bn3")(conv(4 * self.width, (1, 1), name="conv3")(y))
        if x.shape != y.shape:
            x = norm(name="downsample_1")(conv(4 * self.width, (1, 1), strides=self.stride, name="downsample_0")(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """The ResNet of torchvision."""

    depths: Sequence[int]
    classes: int

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.Conv(64, (7, 7), strides=2, padding=3, use_bias=False, name="conv1")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, use_fast_variance=False, name="bn1")(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for level, depth in enumerate(self.depths):
            for n in range(depth):
                stride = 2 if level > 0 and n == 0 else 1
                x = Bottleneck(64 * 2**level, stride, train, name=f"layer{level + 1}_{n}")(x)
        return nn.Dense(self.classes, name="fc")(x.mean((1, 2)))
