"""More Flax classes in the styles of strangers: attention pooling, rotary positions, and attention of JAX and of NNX."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

Array = Any
IMAGE, PATCH, WIDTH, HEADS, HIDDEN, CLASSES = (16, 24), (4, 8), 64, 4, 80, 7
CELLS = (IMAGE[0] // PATCH[0]) * (IMAGE[1] // PATCH[1])


# big_vision -------------------------------------------------------------------------------------------------------------


class MlpBlock(linen.Module):
    mlp_dim: int = HIDDEN

    @linen.compact
    def __call__(self, x: Array) -> Array:
        return linen.Dense(WIDTH)(linen.gelu(linen.Dense(self.mlp_dim)(x)))


class MAPHead(linen.Module):
    """Multihead attention pooling."""

    num_heads: int

    @linen.compact
    def __call__(self, x: Array) -> Array:
        probe = self.param("probe", linen.initializers.xavier_uniform(), (1, 1, WIDTH))
        x = linen.MultiHeadDotProductAttention(num_heads=self.num_heads)(jnp.tile(probe, [len(x), 1, 1]), x)
        return (x + MlpBlock()(linen.LayerNorm()(x)))[:, 0]


class BigVision(linen.Module):
    """The structure of big_vision, with its class token, which the pooling includes."""

    image_size: tuple[int, int] = IMAGE
    pool_heads: int = 2

    @linen.compact
    def __call__(self, image: Array, *, train: bool = False) -> Array:
        x = linen.Conv(WIDTH, PATCH, PATCH, name="embedding")(image)
        x = x.reshape(len(x), -1, WIDTH) + self.param("pos_embedding", linen.initializers.normal(1.0), (1, CELLS, WIDTH))
        cls = self.param("cls", linen.initializers.normal(1.0), (1, 1, WIDTH))
        x = jnp.concatenate([jnp.tile(cls, [len(x), 1, 1]), x], axis=1)
        for n in range(2):
            y = linen.LayerNorm(name=f"encoderblock_{n}_ln_a")(x)
            x = x + linen.MultiHeadDotProductAttention(HEADS, name=f"encoderblock_{n}_att")(y)
            x = x + MlpBlock(name=f"encoderblock_{n}_mlp")(linen.LayerNorm(name=f"encoderblock_{n}_ln_b")(x))
        x = MAPHead(self.pool_heads)(linen.LayerNorm(name="encoder_norm")(x))
        return linen.Dense(CLASSES, name="head")(x)


# Attention of NNX and of JAX ----------------------------------------------------------------------------------------------


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(num_heads=HEADS, in_features=WIDTH, decode=False, rngs=rngs)
        self.fc1, self.fc2 = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(nnx.gelu(self.fc1(self.norm2(x))))


class NnxPlain(nnx.Module):
    """NNX's attention without dropout, in two blocks, with a mean of patches."""

    def __init__(self, *, image_size: tuple[int, int] = IMAGE, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Conv(3, WIDTH, PATCH, PATCH, rngs=rngs)
        self.pos = nnx.Param(jax.random.normal(rngs.params(), (1, CELLS, WIDTH)))
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])
        self.norm, self.head = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        x = self.embed(images)
        x = x.reshape(len(x), -1, WIDTH) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class AttendingBlock(linen.Module):
    """`jax.nn.dot_product_attention`, or scores and a softmax; an MLP with GELU, or a gated one with interleaved halves."""

    fused: bool
    rotary: bool = False
    gated: bool = False

    @linen.compact
    def __call__(self, x: Array) -> Array:
        y = linen.LayerNorm()(x)
        q, k, v = (linen.DenseGeneral((HEADS, WIDTH // HEADS), name=name)(y) for name in ("query", "key", "value"))
        if self.rotary:
            q, k = rotate(q), rotate(k)
        if self.fused:
            y = jax.nn.dot_product_attention(q, k, v)
        else:
            scores = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(q.shape[-1])
            y = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
        x = x + linen.DenseGeneral(WIDTH, axis=(-2, -1), name="out")(y)
        y = linen.Dense((1 + self.gated) * HIDDEN, name="up")(linen.LayerNorm()(x))
        y = y[..., ::2] * linen.silu(y[..., 1::2]) if self.gated else linen.gelu(y, approximate=False)
        return x + linen.Dense(WIDTH, name="down")(y)


def rotate(x: Array) -> Array:
    """EVA's rotary positions of the grid, with coordinates that are not scaled."""
    rows, columns, dim = IMAGE[0] // PATCH[0], IMAGE[1] // PATCH[1], x.shape[-1]
    theta = 10000.0 ** (-2 * jnp.arange(dim // 4) / (dim // 2))
    y, x_ = jnp.divmod(jnp.arange(rows * columns), columns)
    angle = jnp.concatenate([jnp.repeat(each[:, None] * theta, 2, axis=-1) for each in (y, x_)], axis=-1)[:, None]
    turned = jnp.stack([-x[..., 1::2], x[..., ::2]], axis=-1).reshape(x.shape)
    return x * jnp.cos(angle) + turned * jnp.sin(angle)


class Attending(linen.Module):
    """A mean of patches; positions are learned, or rotary."""

    fused: bool = False
    rotary: bool = False
    gated: bool = False
    image_size: tuple[int, int] = IMAGE
    num_heads: int = HEADS

    @linen.compact
    def __call__(self, images: Array) -> Array:
        x = linen.Conv(WIDTH, PATCH, PATCH)(images).reshape(len(images), -1, WIDTH)
        if not self.rotary:
            x = x + self.param("positions", linen.initializers.normal(1.0), (CELLS, WIDTH))
        for n in range(2):
            x = AttendingBlock(self.fused, self.rotary, self.gated, name=f"block{n}")(x)
        return linen.Dense(CLASSES)(linen.LayerNorm()(x.mean(1)))
