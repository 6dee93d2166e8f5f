"""Where the time of a training step of `train.jax` goes, by XLA's operations on a CPU, or by the kernels of a GPU.

Run `python -m benchmarks.profile_step [--model vit_s16] [--batch-size 8] [--dtype bfloat16] [--depth 4]`.  It prints a
table: the operations of a step, forward and backward, by the part of the model that they belong to, and their share of the
time of all.  Shares are of the sum over all operations, which on a CPU is more than the time of the step, because some run
at the same time.  Libraries' kernels on a GPU have names of their own, so both directions are together.  Fewer blocks
compile faster.
"""

import argparse
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
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
    """Return the part of the model by the `kernel_name` of each operation of a compiled program."""
    found = {}
    for line in program.splitlines():
        if name := INSTRUCTION.match(line):
            path = OP_NAME.search(line)
            found[kernel_name(name[1])] = part_of(name[1], path[1] if path else "")
    return found


def kernel_name(name: str) -> str:
    """Return the name of an operation as XLA writes it on GPUs, where names of kernels are identifiers."""
    return re.sub(r"\W", "_", name)


def part_of_event(name: str, parts: Mapping[str, str]) -> str | None:
    """Return the part of the model that an event of the profiler belongs to; None for what is no operation of a step.

    name: of an operation, or of a kernel of cuBLAS or cuDNN.
    parts: the parts of the program's operations, by `parts_of`.
    """
    if re.match(r"nvjet|cutlass|gemm|void cutlass", name):
        return "products"
    if "cudnn" in name:
        return "attention, fused kernels"
    return parts.get(kernel_name(name))


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
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--depth", type=int, help="number of blocks, by default the model's")
    args = parser.parse_args()
    make_engine = engine_class("train.jax")
    import jax

    config, count = vit_spec.get(args.model, num_classes=1000), args.batch_size
    config = config.replace(depth=args.depth or config.depth)
    recipe, folder = Recipe(batch_size=count, dtype=args.dtype), Path("unused")
    engine: Any = make_engine(
        config, recipe, task="classes", learning_rate=lambda step: 1e-4, initial_weights=None, folder=folder
    )
    images = np.random.default_rng(0).integers(0, 256, (count, *config.image_size, config.in_channels), np.uint8)
    batch = Batch(images, np.zeros(count, np.int32), np.arange(count), np.ones(count, bool))
    for _ in range(2):
        float(engine.step(batch)["loss"])
    parts, milliseconds = parts_of(engine.compiled_step.as_text()), Counter[str]()
    with tempfile.TemporaryDirectory() as trace:
        start = time.perf_counter()
        with jax.profiler.trace(trace):
            float(engine.step(batch)["loss"])
        seconds = time.perf_counter() - start
        for path in Path(trace).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                # On a GPU, other lines repeat the times of the kernels by other names.
                lines = (line for line in plane.lines if "GPU" not in plane.name or line.name.startswith("Stream"))
                for event in (event for line in lines for event in line.events):
                    if part := part_of_event(event.name, parts):
                        milliseconds[part] += event.duration_ns / 1e6
    total = sum(milliseconds.values())
    blocks = f"{config.depth} blocks of {args.model}, {count} images, {args.dtype}"
    print(f"{blocks}: a step takes {seconds:.3f} s, its operations together {total / 1e3:.3f} s\n")
    print("| operations | ms | share |\n|---|---|---|")
    for part, spent in milliseconds.most_common():
        print(f"| {part} | {spent:.2f} | {spent / total:.1%} |")


if __name__ == "__main__":
    main()
