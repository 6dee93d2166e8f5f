"""Where the time of a training step of `train.jax` goes, by XLA's operations, on a CPU.

Run `python -m benchmarks.profile_step [--model vit_s16] [--batch-size 8]`.  It prints a table: the operations of a step,
forward and backward, by the part of the model that they belong to, and their share of the time of all.  Shares are of the
sum over all operations, which is more than the time of the step, because some run at the same time.
"""

import argparse
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import vit_spec
from benchmarks.input_pipeline import engine_class
from train.data.batches import Batch
from train.recipes import Recipe

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = ")
OP_NAME = re.compile(r'op_name="([^"]*)"')


def parts_of(program: str) -> dict[str, str]:
    """Return the part of the model by the name of each operation of a compiled program."""
    found = {}
    for line in program.splitlines():
        if name := INSTRUCTION.match(line):
            path = OP_NAME.search(line)
            found[name[1]] = part_of(name[1], path[1] if path else "")
    return found


def part_of(name: str, path: str) -> str:
    """Return the part of the model that an operation belongs to.

    name: of the operation, such as "onednn_fusion.12".
    path: its place in the traced program, such as "jit(_train)/transpose(jvp(ViT))/blocks/mlp/fc1/dot_general".
    """
    direction = "backward" if "transpose(" in path else "forward"
    if "dot" in name or "onednn" in name or path.endswith("dot_general"):
        return f"products, {direction}"
    if not re.search(r"jvp\(|checkpoint", path):
        return "optimizer, clipping, and the sum over parts"
    for module, pattern in (("norms", r"norm\d?/"), ("attention", r"/attn/"), ("MLP", r"/mlp/")):
        if re.search(pattern, path):
            return f"{module}, except products, {direction}"
    return f"other, {direction}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="vit_s16")
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    make_engine = engine_class("train.jax")
    import jax

    config, count = vit_spec.get(args.model, num_classes=1000), args.batch_size
    recipe, folder = Recipe(batch_size=count), Path("unused")
    engine: Any = make_engine(
        config, recipe, task="classes", learning_rate=lambda step: 1e-4, initial_weights=None, folder=folder
    )
    images = np.random.default_rng(0).integers(0, 256, (count, *config.image_size, config.in_channels), np.uint8)
    batch = Batch(images, np.zeros(count, np.int32), np.arange(count), np.ones(count, bool))
    for _ in range(2):
        float(engine.step(batch)["loss"])
    parts, milliseconds = parts_of(engine._compiled_step.as_text()), Counter[str]()
    with tempfile.TemporaryDirectory() as trace:
        start = time.perf_counter()
        with jax.profiler.trace(trace):
            float(engine.step(batch)["loss"])
        seconds = time.perf_counter() - start
        for path in Path(trace).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for event in (event for line in plane.lines for event in line.events if event.name in parts):
                    milliseconds[parts[event.name]] += event.duration_ns / 1e6
    total = sum(milliseconds.values())
    print(f"{args.model}, {count} images: a step takes {seconds:.2f} s, its operations together {total / 1e3:.2f} s\n")
    print("| operations | ms | share |\n|---|---|---|")
    for part, spent in milliseconds.most_common():
        print(f"| {part} | {spent:.0f} | {spent / total:.1%} |")


if __name__ == "__main__":
    main()
