"""Measure how `diagnose` answers random faults, which do not come from its catalogue.

    python -m benchmarks.random_faults                 # 100 faults of models 192 and 384 wide, three blocks deep
    python -m benchmarks.random_faults --count 20 --small

It prints the figures of the section "Random faults" of docs/measurements/parity.md.

One function call of a forward pass, in one block or in all blocks, is replaced by a random mutation
(`tests/faults/operations.py`).  The expected outputs are float64, float32, float32 stored as float64, rounded to five
decimals, or made with weights that were rounded afterwards, with or without intermediates.  An answer is right if the
causes that it names explain the outputs of the faulty model on new images.  Otherwise the answer must be UNKNOWN, and must
name the block of the fault or say that the logits alone do not identify it.
"""

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import vit_spec
from tests.faults.operations import Assessment, assess_random_fault
from tests.twins import small_config
from vit_spec import ViTConfig

MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("vit_s16", {}),
    ("vit_s16", {"head": {"pool": "mean"}, "norms": {"after_blocks": False, "after_pool": True}}),
    ("deit3_s16", {}),
    ("dinov2_g14", {}),
    ("dinov3_s16", {}),
    ("article_xray_rope", {}),
    ("deit_s16_distilled", {}),
    ("vit_s16", {"positions": {"kind": "fixed", "table": "sincos_2d_mae"}}),
    ("vit_s16", {"attention": {"qk_norm": True}}),
)


def config_of(seed: int, small: bool) -> ViTConfig:
    """Return the config of a fault: one of `MODELS`, 192 or 384 wide with heads of 64, on a grid of 4 x 3 patches.

    small: whether to return a small config of width 16 instead.
    """
    name, changes = MODELS[seed % len(MODELS)]
    base = vit_spec.get(name)
    if small:
        return small_config(base).replace(**changes)
    width = (192, 384)[seed // len(MODELS) % 2]
    size = (4 * base.patch_size[0], 3 * base.patch_size[1])
    sizes = {"width": width, "num_heads": width // 64, "mlp_dim": 4 * width, "depth": 3, "num_classes": 10}
    return base.replace(image_size=size, **sizes).replace(**changes)


def assess(case: tuple[int, bool]) -> Assessment:
    """Draw a fault and assess its diagnosis; an exception counts as a wrong outcome.

    case: the seed, and whether the model is small.
    """
    import torch

    torch.set_num_threads(1)
    seed, small = case
    try:
        return assess_random_fault(config_of(seed, small), seed, count=8)
    except Exception as error:
        outcome = f"wrong: traceback, {type(error).__name__}"
        return Assessment(f"seed {seed}", "", False, outcome, traceback.format_exc(limit=-2))


def main() -> None:
    """Print a line for each fault, then the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first fault")
    parser.add_argument("--small", action="store_true", help="use models of width 16")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of processes")
    args = parser.parse_args()
    start, totals = time.perf_counter(), {True: Counter[str](), False: Counter[str]()}
    seeds = [(args.seed + number, args.small) for number in range(args.count)]
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for (seed, _), result in zip(seeds, pool.map(assess, seeds), strict=True):
            totals[result.with_intermediates][result.outcome.partition(":")[0]] += 1
            conditions = "with intermediates" if result.with_intermediates else "logits alone"
            print(
                f"{seed}: {result.fault} | {result.precision}, {conditions} | {result.outcome} | {result.answer}",
                flush=True,
            )
    for with_inner, outcomes in totals.items():
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        print(f"{'With intermediates' if with_inner else 'By the logits alone'}, {sum(outcomes.values())} faults: {counts}")
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
