"""What does `diagnose` say of faults that are drawn from operations, and not from its catalogue?

    python -m benchmarks.random_faults                 # 100 faults of models 192 and 384 wide, three blocks deep
    python -m benchmarks.random_faults --count 20 --small

A call of a forward pass, in one block or in all, is replaced by a random mutation of it (`tests/faults/operations.py`); the
expected outputs are float64, float32, float32 written as float64, printed to five decimals, or made with weights that were
rounded afterwards, with or without intermediates.  An answer is right where the causes that it names explain the faulty
model's outputs on images that the diagnosis has not seen; otherwise it must be UNKNOWN, and name the block of the fault or
say that the logits alone do not tell it.
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
from tests.faults.operations import Judged, judged
from tests.twins import small
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


def config_of(seed: int, reduced: bool) -> ViTConfig:
    """Return the config of a fault: one of the structures, 192 or 384 wide with heads of 64, on a grid of 4 x 3 patches."""
    name, changes = MODELS[seed % len(MODELS)]
    base = vit_spec.get(name)
    if reduced:
        return small(base).replace(**changes)
    width = (192, 384)[seed // len(MODELS) % 2]
    size = (4 * base.patch_size[0], 3 * base.patch_size[1])
    sizes = {"width": width, "num_heads": width // 64, "mlp_dim": 4 * width, "depth": 3, "num_classes": 10}
    return base.replace(image_size=size, **sizes).replace(**changes)


def one(given: tuple[int, bool]) -> Judged:
    """Draw a fault and judge its diagnosis; a traceback is an outcome too."""
    import torch

    torch.set_num_threads(1)
    seed, reduced = given
    try:
        return judged(config_of(seed, reduced), seed, count=8)
    except Exception as error:
        told = f"wrong: traceback, {type(error).__name__}"
        return Judged(f"seed {seed}", "", False, told, traceback.format_exc(limit=-2))


def main() -> None:
    """Print a line for each fault, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="faults")
    parser.add_argument("--seed", type=int, default=0, help="of the first fault")
    parser.add_argument("--small", action="store_true", help="models 16 wide")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    given = parser.parse_args()
    start, totals = time.perf_counter(), {True: Counter[str](), False: Counter[str]()}
    seeds = [(given.seed + number, given.small) for number in range(given.count)]
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        for (seed, _), found in zip(seeds, pool.map(one, seeds), strict=True):
            totals[found.intermediates][found.outcome.partition(":")[0]] += 1
            inner = "with intermediates" if found.intermediates else "logits alone"
            print(f"{seed}: {found.fault} | {found.precision}, {inner} | {found.outcome} | {found.said}", flush=True)
    for given_inner, outcomes in totals.items():
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        print(
            f"{'With intermediates' if given_inner else 'By the logits alone'}, {sum(outcomes.values())} faults: {counts}"
        )
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
