"""Accuracy and speed of the JAX twin's GELU, beside `jax.nn.gelu`: in float32, forward and with its gradient.

Run `python -m benchmarks.gelu`.  It prints the table of docs/reference/numerics.md.  Errors are relative to float64, in
units in the last place (ulp) of the exact value in float32.  The two are timed in turn, on the shape of the hidden units of
ViT-S/16 at 224 pixels and batch 32.
"""

import os
import platform
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import Any

import jax
import numpy as np
from scipy.special import erfc

from train.jax.runtime import keep_freed_memory
from vit_jax.layers import activation

SHAPE = (32, 197, 1536)
TURNS = 9
RANGES = {"0 to 6": (0, 6), "-1 to 0": (-1, 0), "-5 to -1": (-5, -1)}


def errors(gelu: Callable[[Any], Any], least: float, most: float) -> tuple[float, float]:
    """Return the largest error of values in an interval, in ulp and absolute."""
    x = np.linspace(least, most, 1_000_001, dtype=np.float32)
    wide = x.astype(np.float64)
    exact = 0.5 * wide * erfc(-wide / np.sqrt(2))
    error = np.abs(np.asarray(gelu(x), np.float64) - exact)
    return float(np.max(error / np.spacing(np.abs(exact).astype(np.float32)))), float(np.max(error))


def main() -> None:
    """Print the table."""
    keep_freed_memory()
    functions = {"jax.nn.gelu": partial(jax.nn.gelu, approximate=False), "vit_jax": lambda x: activation(x, "gelu")}
    x, gradient = np.random.default_rng(0).standard_normal((2, *SHAPE)).astype(np.float32)
    compiled = {}
    for name, gelu in functions.items():
        backward = jax.jit(lambda x, g, gelu=gelu: jax.vjp(gelu, x)[1](g)[0])
        compiled[name] = [partial(jax.jit(gelu), x), partial(backward, x, gradient)]
    times: dict[str, list[list[float]]] = {name: [[], []] for name in compiled}
    for turn in range(TURNS + 1):  # the first compiles
        for name, runs in compiled.items():
            for seconds, run in zip(times[name], runs, strict=True):
                start = time.perf_counter()
                jax.block_until_ready(run())
                if turn:
                    seconds.append(1e3 * (time.perf_counter() - start))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, jax {version('jax')}\n")
    print(f"| error | {' | '.join(RANGES)} | forward, ms | gradient, ms |")
    print(f"|---|{'---|' * (len(RANGES) + 2)}")
    for name, gelu in functions.items():
        found = (errors(jax.jit(gelu), *ends) for ends in RANGES.values())
        cells = [f"{ulp:.3g} ulp, {absolute:.0e}" for ulp, absolute in found]
        cells += [f"{median(each):.1f} ({min(each):.1f} to {max(each):.1f})" for each in times[name]]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
