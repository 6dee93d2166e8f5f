"""Flax classes in the styles of strangers: linen with setup and compact, scanned blocks, and NNX."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

Array = Any
IMAGE, PATCH, WIDTH, HEADS, HIDDEN, CLASSES = (16, 24), (4, 8), 48, 3, 80, 7
CELLS = (IMAGE[0] // PATCH[0]) * (IMAGE[1] // PATCH[1])


class CompactBlock(linen.Module):
    """flax's own attention; `train` selects dropout."""

    @linen.compact
    def __call__(self, x: Array, train: bool) -> Array:
        y = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(HEADS, dropout_rate=0.1, deterministic=not train)(y, y)
        y = linen.Dense(HIDDEN, name="expand")(linen.LayerNorm(name="before_mlp")(x))
        y = linen.Dropout(0.1, deterministic=not train)(linen.gelu(y))
        return x + linen.Dense(WIDTH, name="contract")(y)


class Compact(linen.Module):
    """Unrolled blocks, a class token, and the tanh approximation of GELU."""

    image_size: tuple[int, int] = IMAGE
    depth: int = 2

    @linen.compact
    def __call__(self, images: Array, train: bool = True) -> Array:
        x = linen.Conv(WIDTH, PATCH, PATCH, name="patches")(images)
        x = x.reshape(len(x), -1, WIDTH)
        cls = self.param("cls", linen.initializers.normal(1.0), (1, 1, WIDTH))
        x = jnp.concatenate([jnp.broadcast_to(cls, (len(x), 1, WIDTH)), x], axis=1)
        x = x + self.param("positions", linen.initializers.normal(1.0), (1, CELLS + 1, WIDTH))
        for n in range(self.depth):
            x = CompactBlock(name=f"layer{n}")(x, train)
        x = linen.LayerNorm(name="final")(x)
        return linen.Dense(CLASSES, name="classifier")(x[:, 0])


class Resizable(linen.Module):
    """No attribute for the size of images: the positions are made for those that initialize it."""

    @linen.compact
    def __call__(self, images: Array) -> Array:
        x = linen.Conv(WIDTH, PATCH, PATCH, name="patches")(images)
        x = x.reshape(len(x), -1, WIDTH)
        x = x + self.param("positions", linen.initializers.normal(1.0), (1, x.shape[1], WIDTH))
        return linen.Dense(CLASSES, name="head")(CompactBlock(name="layer0")(x, False).mean(1))


class SetupBlock(linen.Module):
    """One matrix for queries, keys and values, with axes (width, 3, heads, dim); norms share a scan."""

    def setup(self) -> None:
        self.first, self.second = linen.LayerNorm(epsilon=1e-5), linen.LayerNorm(epsilon=1e-5)
        self.qkv = linen.DenseGeneral((3, HEADS, WIDTH // HEADS))
        self.out = linen.DenseGeneral(WIDTH, axis=(-2, -1))
        self.up, self.down = linen.Dense(HIDDEN), linen.Dense(WIDTH)

    def __call__(self, x: Array, _: None) -> tuple[Array, None]:
        q, k, v = jnp.moveaxis(self.qkv(self.first(x)), 2, 0)
        x = x + self.out(linen.dot_product_attention(q, k, v))
        return x + self.down(linen.gelu(self.up(self.second(x)), approximate=False)), None


class Scanned(linen.Module):
    """Blocks that run by nn.scan, the mean of all tokens, and patches as a dense layer on (ph pw rgb)."""

    depth: int = 3

    def setup(self) -> None:
        self.project = linen.Dense(WIDTH)
        self.positions = self.param("positions", linen.initializers.normal(1.0), (CELLS, WIDTH))
        scan = linen.scan(SetupBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth)
        self.blocks = scan()
        self.norm, self.head = linen.LayerNorm(epsilon=1e-5), linen.Dense(CLASSES)

    def __call__(self, images: Array) -> dict[str, Array]:
        b, h, w, c = images.shape
        x = images.reshape(b, h // PATCH[0], PATCH[0], w // PATCH[1], PATCH[1], c).swapaxes(2, 3)
        x = self.project(x.reshape(b, -1, PATCH[0] * PATCH[1] * c)) + self.positions
        x, _ = self.blocks(x, None)
        return {"logits": self.head(self.norm(x.mean(1)))}


class Buffered(linen.Module):
    """`Scanned` with a patch convolution, and positions in a collection of constants."""

    image_size: tuple[int, int] = IMAGE
    factor: float = 1.0

    @linen.compact
    def __call__(self, images: Array) -> Array:
        x = linen.Conv(WIDTH, PATCH, PATCH, name="patches")(images)
        rows, columns = IMAGE[0] // PATCH[0], IMAGE[1] // PATCH[1]
        omega = 10000.0 ** (-jnp.arange(WIDTH // 4) / (WIDTH // 4))
        y, x_ = jnp.arange(rows).repeat(columns), jnp.tile(jnp.arange(columns), rows)
        angles = [axis[:, None] * omega for axis in (x_, y)]
        table = jnp.concatenate([f(angle) for angle in angles for f in (jnp.sin, jnp.cos)], axis=1)
        x = x.reshape(len(x), -1, WIDTH) + self.variable("constants", "table", lambda: self.factor * table).value
        scan = linen.scan(SetupBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = scan(name="blocks")(x, None)
        return linen.Dense(CLASSES)(linen.LayerNorm(epsilon=1e-5)(x).mean(1))


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, dropout_rate=0.1, rngs=rngs)
        self.fc1, self.fc2 = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.attn(self.norm1(x))
        return x + self.dropout(self.fc2(nnx.silu(self.fc1(self.norm2(x)))))


class Nnx(nnx.Module):
    """An NNX module with a list of blocks."""

    def __init__(self, depth: int = 2, *, image_size: tuple[int, int] = IMAGE, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Conv(3, WIDTH, PATCH, PATCH, rngs=rngs)
        self.cls = nnx.Param(jax.random.normal(rngs.params(), (WIDTH,)))
        self.positions = nnx.Embed(CELLS + 1, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        x = self.embed(images)
        x = x.reshape(len(x), -1, WIDTH)
        x = jnp.concatenate([jnp.broadcast_to(self.cls[...], (len(x), 1, WIDTH)), x], axis=1)
        x = x + self.positions(jnp.arange(CELLS + 1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Reversed(Compact):
    """`Compact` with one change: the residual connections of the last block are missing."""

    @linen.compact
    def __call__(self, images: Array, train: bool = False) -> Array:
        x = linen.Conv(WIDTH, PATCH, PATCH, name="patches")(images).reshape(len(images), -1, WIDTH)
        for n in range(self.depth):
            x = CompactBlock(name=f"layer{n}")(x, train) - (x if n else 0)
        return linen.Dense(CLASSES, name="classifier")(linen.LayerNorm(name="final")(x).mean(1))
