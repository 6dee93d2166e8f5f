"""Models other than ViTs, each in Flax and in PyTorch, written in the style of each framework."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen, nnx
from torch import nn

Array = Any


def random_variables(model: linen.Module, x: Array) -> Any:
    """Return variables of a linen model without zeros, ones or symmetries, so that a wrong mapping changes the outputs."""
    rng = np.random.default_rng(0)

    def random_leaf(path: Any, leaf: Any) -> Array:
        if path[-1].key in ("kernel", "embedding"):
            return jnp.asarray(rng.normal(0, np.prod(leaf.shape[:-1]) ** -0.5, leaf.shape), leaf.dtype)
        low, high = (0.5, 1.5) if path[-1].key in ("scale", "var") else (-0.3, 0.3)
        return jnp.asarray(rng.uniform(low, high, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(random_leaf, jax.eval_shape(model.init, jax.random.key(0), x))


def perturbed_module(module: nnx.Module) -> nnx.Module:
    """Return an NNX module with positive noise added to every weight, so that variances stay positive."""
    rng = np.random.default_rng(0)

    def add_noise(leaf: Array) -> Array:
        return leaf + rng.uniform(0.05, 0.3, leaf.shape).astype(leaf.dtype) if leaf.dtype == jnp.float32 else leaf

    graph, state = nnx.split(module)  # a tree of the module itself would part shared layers
    return nnx.merge(graph, jax.tree.map(add_noise, state))


class ConvNet(linen.Module):
    """Two convolutions, the second one depthwise, with batch norms, pooling and a classifier."""

    epsilon: float = 1e-5

    @linen.compact
    def __call__(self, x: Array) -> Array:
        x = linen.Conv(6, (3, 3), padding=1)(x)
        x = linen.relu(linen.BatchNorm(use_running_average=True, epsilon=self.epsilon)(x))
        x = linen.avg_pool(x, (2, 2), (2, 2))
        x = linen.Conv(6, (3, 3), padding=1, feature_group_count=6, use_bias=False)(x)
        x = linen.relu(linen.BatchNorm(use_running_average=True)(x))
        return linen.Dense(3)(x.mean((1, 2)))


def torch_conv_net() -> nn.Module:
    """Return the same network as a Sequential, in which the names of modules are numbers."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


WIDTH, HEADS, TOKENS, VOCABULARY = 16, 2, 5, 11


class Block(linen.Module):
    """A pre-norm block with causal attention."""

    @linen.compact
    def __call__(self, x: Array) -> Array:
        y = linen.LayerNorm(epsilon=1e-5, use_fast_variance=False)(x)
        mask = linen.make_causal_mask(x[..., 0])
        x = x + linen.MultiHeadDotProductAttention(HEADS)(y, y, mask=mask)
        y = linen.LayerNorm(epsilon=1e-5, use_fast_variance=False)(x)
        return x + linen.Dense(WIDTH)(linen.gelu(linen.Dense(24)(y), approximate=False))


class TextTransformer(linen.Module):
    """A decoder whose output head shares the embedding matrix; tokens (B, T) -> logits (B, T, vocabulary)."""

    @linen.compact
    def __call__(self, tokens: Array) -> Array:
        embed = linen.Embed(VOCABULARY, WIDTH, name="token_embed")
        x = embed(tokens) + linen.Embed(TOKENS, WIDTH, name="position_embed")(jnp.arange(tokens.shape[1]))
        for n in range(2):
            x = Block(name=f"layer_{n}")(x)
        return embed.attend(linen.LayerNorm(epsilon=1e-5, use_fast_variance=False, name="ln_f")(x))


class TorchBlock(nn.Module):
    """The same block, with fused query, key and value."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps), nn.LayerNorm(WIDTH, eps)
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.self_attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.linear2(nn.functional.gelu(self.linear1(self.norm2(x))))


class TorchTextTransformer(nn.Module):
    """The same decoder."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(TorchBlock(eps) for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH, 1e-5), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Mlp(nnx.Module):
    """Two square layers, a batch norm, dropout (off) and a head, in NNX."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.fc1, self.fc2 = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = self.dropout(self.norm(nnx.tanh(self.fc1(x))))
        return self.head(nnx.tanh(self.fc2(x)))


class TorchMlp(nn.Module):
    """The same network."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.fc2(self.norm(torch.tanh(self.fc1(x))))))
