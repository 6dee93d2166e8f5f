"""Rates of the device through PyTorch."""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.machine import CALLS_ON_GPU, Shape, product_flops
from benchmarks.peers.torch_model import device, device_name, synchronize

__all__ = ["bandwidth", "device_name", "product_rate"]

REPEATS = 5
COPIED_BYTES = 1 << 28


def device_bytes() -> int | None:
    """Return the bytes of memory of a GPU; None for CPUs."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def _least_seconds(function: Callable[[], Any]) -> float:
    function()
    synchronize()
    calls, times = 1 if device().type == "cpu" else CALLS_ON_GPU, []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize()
        times.append((time.perf_counter() - start) / calls)
    return min(times)


def product_rate(shapes: list[tuple[Shape, int]], dtype: str) -> float:
    """Return the FLOP/s of products of these shapes into memory that is reused, each at the best of a few calls."""
    seconds = 0.0
    for (b, m, k, n), times in shapes:
        options = {"dtype": getattr(torch, dtype), "device": device()}
        x, y, out = (torch.ones(shape, **options) for shape in ((b, m, k), (b, k, n), (b, m, n)))
        if b == 1:
            x, y, out = x[0], y[0], out[0]
        seconds += times * _least_seconds(lambda x=x, y=y, out=out: torch.matmul(x, y, out=out))
    return product_flops(shapes) / seconds


def bandwidth() -> float:
    """Return the bytes/s, read and written, of a copy of a large array into memory that is reused."""
    x = torch.ones(COPIED_BYTES // 4, device=device())
    out = torch.empty_like(x)
    return 2 * x.nbytes / _least_seconds(lambda: out.copy_(x))
