"""Rates of the device through XLA."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.machine import CALLS_ON_GPU, Shape, product_flops
from vit_jax.compilation import ONEDNN, has_onednn

REPEATS = 5
COPIED_BYTES = 1 << 28


def device_name() -> str:
    """Return the name of the device, "cpu" for CPUs."""
    return jax.devices()[0].device_kind


def device_bytes() -> int | None:
    """Return the bytes of memory of a GPU that this process can use; None for CPUs."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def _least_seconds(function: Callable[..., Any], *arguments: Any) -> float:
    jax.block_until_ready(function(*arguments))
    calls, times = 1 if jax.default_backend() == "cpu" else CALLS_ON_GPU, []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return min(times)


def product_rate(shapes: list[tuple[Shape, int]], dtype: str) -> float:
    """Return the FLOP/s of products of these shapes, each at the best of a few calls, by each library that XLA has."""
    on_cpu = jax.default_backend() == "cpu"
    choices = [None, ONEDNN] if on_cpu and has_onednn() else [None]
    seconds = 0.0
    for (b, m, k, n), times in shapes:
        x = jnp.ones((b, m, k), dtype)
        y = jnp.ones((b, k, n), dtype)
        left, right = (x[0], y[0]) if b == 1 else (x, y)
        multiply = (jax.jit(jnp.matmul, compiler_options=options) for options in choices)
        seconds += times * min(_least_seconds(each, left, right) for each in multiply)
    return product_flops(shapes) / seconds


def bandwidth() -> float:
    """Return the bytes/s, read and written, of a copy of a large array."""
    x = jnp.ones(COPIED_BYTES // 4, jnp.float32)
    return 2 * x.nbytes / _least_seconds(jax.jit(lambda x: x + 1), x)
