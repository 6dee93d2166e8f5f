"""A UNet and a causal language model in PyTorch; its counterparts are in `flax_models`."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class ConvBlock(nn.Sequential):
    """Two convolutions, each with a group norm and SiLU."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.GroupNorm(8, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(8, width),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Two levels down and up; logits for each pixel."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.down1, self.down2 = ConvBlock(3, width), ConvBlock(width, 2 * width)
        self.middle = ConvBlock(2 * width, 4 * width)
        self.up2, self.up1 = ConvBlock(6 * width, 2 * width), ConvBlock(3 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Any) -> Any:
        fine = self.down1(x)
        coarse = self.down2(functional.avg_pool2d(fine, 2))
        x = self.middle(functional.avg_pool2d(coarse, 2))
        x = self.up2(torch.cat([functional.interpolate(x, scale_factor=2), coarse], 1))
        x = self.up1(torch.cat([functional.interpolate(x, scale_factor=2), fine], 1))
        return self.head(x)


class DecoderBlock(nn.Module):
    """A pre-norm block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class Decoder(nn.Module):
    """A causal language model whose output layer is its table of embeddings."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([DecoderBlock(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)
