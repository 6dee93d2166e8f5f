"""Linear layers of the PyTorch twin in float32, by oneDNN and by PyTorch's own choice, for the matrices of three models.

Run `python -m benchmarks.linear`.  It prints a table: 10^9 floating-point operations per second of both, and the time
with oneDNN divided by the other.  The two take turns.  docs/performance.md has some of its rows.
"""

import time
from collections.abc import Callable
from itertools import product
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

import vit_spec
from benchmarks.conversion import format_spread
from train.loop.process import keep_freed_memory
from vit_torch import linear as module

MODELS = ("vit_ti16", "vit_s16", "vit_b16")
TOKENS = 197
BATCH_SIZES = (1, 2, 4, 6, 8, 32)
TURNS = 9
FLOPS_OF_A_TURN = 2e9


def seconds(call: Callable[[], Tensor], calls: int) -> float:
    """Return the seconds of one of several calls."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


@torch.inference_mode()
def main() -> None:
    """Print the table."""
    keep_freed_memory()
    print(
        "| images | matrix | PyTorch, GFLOP/s | oneDNN, GFLOP/s | time of oneDNN / time of PyTorch |\n|---|---|---|---|---|"
    )
    for batch_size, model in product(BATCH_SIZES, MODELS):
        config = vit_spec.get(model)
        width, hidden, rows = config.width, config.mlp_dim, batch_size * TOKENS
        for inputs, outputs in ((width, 3 * width), (width, width), (width, hidden), (hidden, width)):
            x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
            calls: list[Callable[[], Tensor]] = [
                lambda x=x, w=weight, b=bias: F.linear(x, w, b),
                lambda x=x, w=weight, b=bias: module._OneDnnLinear.apply(x, w, b),
            ]
            flops = 2 * rows * inputs * outputs
            number = max(1, round(FLOPS_OF_A_TURN / flops))
            turns = [[seconds(call, number) for call in calls] for _ in range(TURNS + 1)][1:]  # the first warms up
            rates = (f"{flops / median(times) / 1e9:.0f}" for times in zip(*turns, strict=True))
            ratio = format_spread([ours / theirs for theirs, ours in turns])
            print(f"| {batch_size} | {inputs} x {outputs} | {' | '.join(rates)} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
