"""Time of `vit_jax.compile_forward` and of `jax.jit(model.apply)` for the same weights and images, in float32.

Run `python -m benchmarks.compile_forward`.  It prints the table "Weights of blocks" of docs/performance.md.  The two take
turns; ratios are those within a turn.  Temporary memory is what the compiled program allocates at each call.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import numpy as np

import vit_jax
import vit_spec
from benchmarks.conversion import format_spread
from benchmarks.machine import keep_freed_memory
from vit_jax.api import _forward_program

MODELS = ("vit_ti16", "vit_s16", "vit_b16")
BATCH_SIZES = (1, 8)
TURNS = 15
SECONDS_OF_A_TURN = 0.5


def seconds(function: Callable[[], Any], calls: int) -> float:
    """Return the seconds of one of several calls."""
    start = time.perf_counter()
    for _ in range(calls):
        function().block_until_ready()
    return (time.perf_counter() - start) / calls


def temporary_bytes(function: Any, *arguments: Any) -> int:
    """Return the temporary memory of a jitted function."""
    return int(function.lower(*arguments).compile().memory_analysis().temp_size_in_bytes)


def main() -> None:
    """Print the table."""
    keep_freed_memory("jax")
    print(
        "| model | images | jit(apply), ms | compile_forward, ms | compile_forward / jit(apply) | temporary memory, MiB |"
    )
    print("|---|---|---|---|---|---|")
    for name in MODELS:
        config = vit_spec.get(name, num_classes=1000)
        model, variables = vit_jax.ViT(config), {"params": vit_jax.init(config)}
        for batch_size in BATCH_SIZES:
            images = jax.device_put(np.random.default_rng(0).normal(size=(batch_size, 224, 224, 3)).astype(np.float32))
            plain = jax.jit(model.apply, compiler_options=vit_jax.compiler_options(config, batch_size))
            program, own = _forward_program(model, variables["params"], batch_size)
            calls = partial(plain, variables, images), partial(program, own, images)
            np.testing.assert_allclose(*(call() for call in calls), rtol=1e-4, atol=1e-5)
            number = max(1, round(SECONDS_OF_A_TURN / seconds(calls[1], 1)))
            turns = []
            for turn in range(TURNS):
                order = (0, 1) if turn % 2 else (1, 0)
                measured = {which: seconds(calls[which], number) for which in order}
                turns.append([measured[0], measured[1]])
            times = (f"{1e3 * median(each):.1f}" for each in zip(*turns, strict=True))
            ratio = format_spread([ours / theirs for theirs, ours in turns])
            memory = [temporary_bytes(plain, variables, images), temporary_bytes(program, own, images)]
            sizes = " and ".join(f"{size / 2**20:.0f}" for size in memory)
            print(f"| {name} | {batch_size} | {' | '.join(times)} | {ratio} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
