"""Speed of the JAX twin's explicit attention compared with `jax.nn.dot_product_attention`: forward pass, float32.

Run `python -m benchmarks.attention`.  It prints the median time of both, and the median and range of their ratio within
pairs of alternating runs.  No page has these figures; a comment in `vit_jax/attention.py` cites the result.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import linen as nn

import vit_jax
import vit_spec
from vit_jax.attention import attention
from vit_jax.layers import ViTModule

PAIRS = 15


def time_call(run: Callable[..., Any], *arrays: Any) -> float:
    """Return the seconds from the call until its result is computed; JAX returns before that."""
    start = time.perf_counter()
    jax.block_until_ready(run(*arrays))
    return time.perf_counter() - start


def main() -> None:
    """Time both on the shapes of ViT-S/16 at 224 pixels and batch 32."""
    config = vit_spec.get("vit_s16")
    module = ViTModule(config, vit_jax.Execution(attention="explicit"))
    shape = (32, config.num_tokens, config.num_heads, config.head_dim)
    q, k, v = np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
    ours = jax.jit(partial(nn.apply(partial(attention, scale=config.scale, rate=0.0, noise=None), module), {}))
    theirs = jax.jit(jax.nn.dot_product_attention)
    np.testing.assert_allclose(ours(q, k, v), theirs(q, k, v), rtol=1e-4, atol=1e-5)
    times = [(time_call(theirs, q, k, v), time_call(ours, q, k, v)) for _ in range(PAIRS)]
    for name, seconds in zip(("jax.nn.dot_product_attention", "vit_jax"), zip(*times, strict=True), strict=True):
        print(f"{name}: {1e3 * statistics.median(seconds):.1f} ms on {jax.devices()[0].device_kind}, {shape}")
    ratios = [theirs / ours for theirs, ours in times]
    print(f"ratio: {statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f}, {PAIRS} pairs)")


if __name__ == "__main__":
    main()
