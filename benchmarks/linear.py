"""Matrix products in float32 on CPUs, by oneDNN and by each framework's own choice, for the shapes of three models.

Run `python -m benchmarks.linear torch` or `python -m benchmarks.linear jax`.  It prints a table: 10^9 floating-point
operations per second of both, and the time with oneDNN divided by the other.  The two take turns.  In PyTorch it measures
linear layers, in JAX products as XLA compiles them, also those of attention.  docs/performance.md has some of the rows.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import product
from statistics import median
from typing import Any

import numpy as np

import vit_spec
from benchmarks.conversion import format_spread
from benchmarks.machine import Shape, keep_freed_memory

MODELS = ("vit_ti16", "vit_s16", "vit_b16")
TOKENS = 197
BATCH_SIZES = (1, 2, 4, 6, 8, 32)
TURNS = 9
FLOPS_OF_A_TURN = 2e9

Call = Callable[[], Any]  # computes a product, and waits for it


def shapes(with_attention: bool) -> Iterator[tuple[int, Shape]]:
    """Yield the number of images and the shape (b, m, k, n) of b products of (m, k) by (k, n).

    with_attention: also the product of queries and keys.
    """
    for batch_size, model in product(BATCH_SIZES, MODELS):
        config = vit_spec.get(model)
        width, hidden, rows = config.width, config.mlp_dim, batch_size * TOKENS
        for inputs, outputs in ((width, 3 * width), (width, width), (width, hidden), (hidden, width)):
            yield batch_size, (1, rows, inputs, outputs)
        if with_attention:
            yield batch_size, (batch_size * config.num_heads, TOKENS, config.head_dim, TOKENS)


def torch_calls(shape: Shape) -> tuple[Call, Call]:
    """Return PyTorch's linear layer, and that by oneDNN."""
    import torch
    import torch.nn.functional as F

    from vit_torch import linear

    torch.set_grad_enabled(False)
    _, rows, inputs, outputs = shape
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    return lambda: F.linear(x, weight, bias), lambda: linear._OneDnnLinear.apply(x, weight, bias)


def jax_calls(shape: Shape) -> tuple[Call, Call]:
    """Return the product with XLA's default options, and with those of oneDNN."""
    import jax
    import jax.numpy as jnp

    from vit_jax.compilation import ONEDNN

    b, m, k, n = shape
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((b, m, k), (b, k, n)))
    if b == 1:
        x, y = x[0], y[0]
    default, onednn = (jax.jit(jnp.matmul, compiler_options=options) for options in (None, ONEDNN))
    return lambda: default(x, y).block_until_ready(), lambda: onednn(x, y).block_until_ready()


def seconds(call: Call, calls: int) -> float:
    """Return the seconds of one of several calls."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("framework", choices=("torch", "jax"))
    framework = parser.parse_args().framework
    keep_freed_memory(framework)
    make, own = (jax_calls, "YNN or Eigen") if framework == "jax" else (torch_calls, "MKL")
    print(f"| images | product | {own}, GFLOP/s | oneDNN, GFLOP/s | time of oneDNN / of {own} |\n|---|---|---|---|---|")
    for batch_size, (b, m, k, n) in shapes(with_attention=framework == "jax"):
        calls, flops = make((b, m, k, n)), 2 * b * m * k * n
        number = max(1, round(FLOPS_OF_A_TURN / flops))
        turns = [[seconds(call, number) for call in calls] for _ in range(TURNS + 1)][1:]  # the first warms up
        rates = (f"{flops / median(times) / 1e9:.0f}" for times in zip(*turns, strict=True))
        ratio = format_spread([ours / theirs for theirs, ours in turns])
        name = f"{k} x {n}" if b == 1 else f"{b} times {m} x {k} x {n}"
        print(f"| {batch_size} | {name} | {' | '.join(rates)} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
