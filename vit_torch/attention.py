"""Attention of the PyTorch twin, and rotary positions.  Unlike model.py, it may differ from `vit_jax/attention.py`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_spec.noise import Site
from vit_torch.layers import ViTModule, at_least_float32, dropout
from vit_torch.noise import Noise


def attention(
    module: ViTModule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    rate: float,
    noise: Noise | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute softmax(scale q k^T + bias) v for each head: (B, T, H, D), (B, S, H, D), (B, S, H, D) -> (B, T, H, D).

    Args:
        module: the module that records the intermediates; its execution options are used.
        q: queries, (B, T, H, D).
        k: keys, (B, S, H, D).
        v: values, (B, S, H, D).
        scale: factor of the scores.
        rate: dropout rate of the attention weights.
        noise: the random numbers of the module; None: those of PyTorch's generator.  With them, nothing is fused.
        bias: bias of the scores, (H, T, S); None for none.
    """
    rate = rate if module.training else 0.0
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
    if module.execution.attention == "fused" and (noise is None or not rate):
        mask = None if bias is None else bias[None]
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate, scale=scale)
    else:
        scores = attention_scores(q, k, scale)
        scores = scores if bias is None else scores + bias
        scores = module.intermediate("scores", scores)
        weights = scores.softmax(-1)
        module.record("weights", weights)
        x = dropout(module, weights, rate, noise, Site.ATTENTION).to(v.dtype) @ v
    return x.transpose(1, 2)


def attention_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scale q k^T, at least in float32: (B, H, T, D), (B, H, S, D) -> (B, H, T, S)."""
    # Scale the queries, not the scores: unscaled products may be beyond the range of float16.
    q = (scale * q.to(at_least_float32(q))).to(q.dtype)
    return (q @ k.transpose(2, 3)).to(at_least_float32(q))


def mix_rotary(coordinates: tuple[Tensor, ...], freqs: Tensor) -> tuple[Tensor, ...]:
    """Return cosines and sines of rotary embeddings with learned frequencies, (B or 1, T, H, D) each.

    Args:
        coordinates: columns x and rows y, (B or 1, T, 1, 1) each.
        freqs: frequencies for x and y of each pair of entries of each head, (2, H, D / 2).
    """
    x, y = coordinates
    fx, fy = freqs.to(x.dtype)
    angle = (x * fx + y * fy).repeat_interleave(2, -1)  # (B or 1, T, H, D)
    return angle.cos(), angle.sin()


def apply_rotary(x: Tensor, tables: tuple[Tensor, ...], kind: str) -> Tensor:
    """Rotate queries or keys by their position: (B, T, H, D) -> (B, T, H, D).

    Args:
        x: queries or keys, (B, T, H, D).
        tables: cosines and sines, (B or 1, T, H or 1, D) each.
        kind: `positions.rotary` of the config.
    """
    cos, sin = tables
    wide = x.to(cos.dtype)
    if kind == "dinov3":  # pairs are half a head apart
        first, second = wide.chunk(2, -1)
        rotated = torch.cat([-second, first], -1)
    else:  # interleaved pairs
        rotated = torch.stack([-wide[..., 1::2], wide[..., ::2]], -1).reshape(x.shape)
    return (wide * cos + rotated * sin).to(x.dtype)
