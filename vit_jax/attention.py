"""Attention of the JAX twin, and rotary positions.  Unlike model.py, it may differ from `vit_torch/attention.py`."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from vit_jax import compilation
from vit_jax.compilation import recompute_in_backward, stored, stored_exp
from vit_jax.execution import Execution
from vit_jax.layers import ViTModule, at_least_float32, dropout
from vit_jax.noise import Noise
from vit_spec import InputError
from vit_spec.noise import Site


def attention(
    module: ViTModule,
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    rate: float,
    noise: Noise | None,
    bias: Array | None = None,
) -> Array:
    """Compute softmax(scale q k^T + bias) v for each head: (B, T, H, D), (B, S, H, D), (B, S, H, D) -> (B, T, H, D).

    Args:
        module: the module that records the intermediates; its execution options are used.
        q: queries, (B, T, H, D).
        k: keys, (B, S, H, D).
        v: values, (B, S, H, D).
        scale: factor of the scores.
        rate: dropout rate of the attention weights.
        noise: the random numbers of the module; None without dropout.
        bias: bias of the scores, (H, T, S); None for none.

    Raises:
        InputError: the fused kernel is requested together with attention dropout or a bias of the scores.
    """
    if _uses_cudnn(module.execution, q, k, drops=rate > 0 and noise is not None, has_bias=bias is not None):
        return _cudnn_attention(q, k, v, scale)
    # Heads come before tokens, and the softmax divides after the second product, which has fewer entries: on CPU this is
    # several times faster than jax.nn.dot_product_attention (benchmarks/attention.py).
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))  # (B, H, T, D)
    dot = partial(lax.dot_general, precision=module.execution.precision, preferred_element_type=at_least_float32(q))
    # Scale the queries, not the scores: on CPU, XLA would compute scale * product - maximum with a single rounding.  The
    # largest difference, which should be 0, is then up to +-128 for scores of 3e9, and exp overflows or is 0 for all keys.
    q = (scale * q.astype(at_least_float32(q))).astype(q.dtype)
    q, k, v = map(stored, (q, k, v))
    scores = dot(q, k, (((3,), (3,)), ((0, 1), (0, 1))))  # (B, H, T, S)
    scores = scores if bias is None else scores + bias
    scores = module.intermediate("scores", scores)
    weights = stored_exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    total = weights.sum(-1, keepdims=True)
    module.record("weights", weights / total)
    weights = dropout(weights, rate, noise, Site.ATTENTION)
    weigh_values = recompute_in_backward(
        lambda weights, v: dot(weights.astype(v.dtype), v, (((3,), (2,)), ((0, 1), (0, 1))))
    )
    x = weigh_values(weights, v) / total  # (B, H, T, D)
    return jnp.swapaxes(x.astype(v.dtype), 1, 2)


def supports_cudnn_attention(device: jax.Device) -> bool:
    """Return whether cuDNN's fused attention runs on a device: an NVIDIA GPU from Ampere (compute capability 8.0) on."""
    generation = str(getattr(device, "compute_capability", "")).partition(".")[0]  # AMD GPUs have names such as gfx942
    return generation.isdigit() and int(generation) >= 8


def _uses_cudnn(execution: Execution, q: Array, k: Array, *, drops: bool, has_bias: bool) -> bool:
    """Return whether cuDNN's fused kernel computes the attention of queries q and keys k.

    Args:
        execution: the execution options of the model.
        q: queries, (B, T, H, D).
        k: keys, (B, S, H, D).
        drops: whether there is dropout of the attention weights.
        has_bias: whether there is a bias of the scores.

    Raises:
        InputError: as for `attention`.
    """
    kind, d = execution.attention, q.shape[-1]
    if kind == "cudnn" and drops:
        raise InputError('attention="cudnn" has no dropout: run with attention="auto", or set regularisation.attn_drop=0')
    if kind == "cudnn" and has_bias:
        raise InputError('attention="cudnn" has no relative positions: run with attention="auto"')
    is_half, is_plain = q.dtype in (jnp.bfloat16, jnp.float16), not drops and not has_bias
    device = compilation.default_device()
    is_supported = is_half and d % 8 == 0 and d <= 128 and is_plain and supports_cudnn_attention(device)
    is_self_attention = q.shape[1] == k.shape[1]  # jax refuses the gradient for the single query of attention pooling
    return is_self_attention and (kind == "cudnn" or (kind == "auto" and is_supported))


def _cudnn_attention(q: Array, k: Array, v: Array, scale: float) -> Array:
    """Compute attention with cuDNN's fused kernel, for as many queries as keys.

    jax differentiates the kernel only for an even number of tokens: check_is_flash_attention in jax/_src/cudnn mistakes the
    placeholder of a bias for a bias, and therefore refuses 197 tokens.  An odd number of tokens is padded by one token,
    which the kernel masks.
    """
    fused = partial(jax.nn.dot_product_attention, scale=scale, implementation="cudnn")
    batch, tokens = q.shape[:2]
    if tokens % 2 == 0:
        return fused(*map(stored, (q, k, v)))
    q, k, v = (stored(jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0)))) for x in (q, k, v))
    lengths = jnp.full(batch, tokens, jnp.int32)
    return stored(fused(q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths)[:, :tokens])


def mix_rotary(coordinates: tuple[Array, ...], freqs: Array) -> tuple[Array, ...]:
    """Return cosines and sines of rotary embeddings with learned frequencies, (B or 1, T, H, D) each.

    Args:
        coordinates: columns x and rows y, (B or 1, T, 1, 1) each.
        freqs: frequencies for x and y of each pair of entries of each head, (2, H, D / 2).
    """
    x, y = coordinates
    fx, fy = freqs.astype(x.dtype)
    angle = jnp.repeat(x * fx + y * fy, 2, axis=-1)  # (B or 1, T, H, D)
    return jnp.cos(angle), jnp.sin(angle)


def apply_rotary(x: Array, tables: tuple[Array, ...], kind: str) -> Array:
    """Rotate queries or keys by their position: (B, T, H, D) -> (B, T, H, D).

    Args:
        x: queries or keys, (B, T, H, D).
        tables: cosines and sines, (B or 1, T, H or 1, D) each.
        kind: `positions.rotary` of the config.
    """
    cos, sin = tables
    wide = x.astype(cos.dtype)
    if kind == "dinov3":  # pairs are half a head apart
        first, second = jnp.split(wide, 2, -1)
        rotated = jnp.concatenate([-second, first], -1)
    else:  # interleaved pairs
        rotated = jnp.stack([-wide[..., 1::2], wide[..., ::2]], -1).reshape(x.shape)
    return (wide * cos + rotated * sin).astype(x.dtype)
