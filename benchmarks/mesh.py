"""Memory and communication of the compiled training step on eight simulated devices, compared with the estimate.

Run `python -m benchmarks.mesh [MESH ...] [--depths N ...]`.  It prints the tables "Eight simulated CPU devices" and
"Optimizers" of docs/measurements/training.md, and the compile time for each number of blocks in `--depths`, which is in the
section "Start-up time" there.  The model is ViT-Ti/16 with four heads, with eight images of 224x224 pixels per device, in
float32.  Nothing is trained.  The devices are simulated on the CPU.  The CPU compiler all-reduces gradients where the GPU
compiler reduce-scatters them.
"""

import argparse
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

DEVICES = 8
MESHES = ["data=8", "fsdp=8", "data=2,fsdp=4", "data=4,tensor=2", "data=2,fsdp=2,tensor=2"]
IMAGES_PER_DEVICE = 8
REPEATS = 5


def prepare(mesh: str, **changes: Any) -> tuple[Any, Any]:
    """Return an engine whose step is not compiled yet, and the memory estimate.

    changes: fields of the recipe; the value of `config` is a dict of fields of the config.
    """
    import vit_spec
    from train.jax.engine import JaxEngine
    from train.jax.memory_estimate import estimate_memory
    from train.recipes import Recipe

    config = vit_spec.get("vit_ti16", num_classes=1000, **{"num_heads": 4, **changes.pop("config", {})})
    recipe = Recipe(batch_size=IMAGES_PER_DEVICE * DEVICES, mesh=mesh, **changes)
    engine = JaxEngine(
        config, recipe, task="classes", learning_rate=lambda step: 1e-3, initial_weights=None, folder=Path("nowhere")
    )
    return engine, estimate_memory(config, recipe, engine.mesh.shape, compiler="cpu")


def print_meshes(meshes: list[str]) -> None:
    """Print memory and transfers of the step on each mesh, and their ratios to the estimate."""
    from benchmarks.jax_program import analyze_program

    print("| mesh | `--remat` | arguments | / estimate | temporary | / estimate | transfers | as estimated |")
    print("|---|---|---|---|---|---|---|---|")
    for mesh in meshes:
        for remat in ("none", "dots", "full"):
            engine, estimate = prepare(mesh, remat=remat)
            compiled = analyze_program(engine.compiled_step, engine.mesh.shape)
            transferred = sum(compiled.transfers.values())
            ratio, temporary_ratio = (
                compiled.arguments / estimate.state,
                compiled.temporary / (estimate.total - estimate.state),
            )
            agreement = (
                "yes"
                if compiled.transfers == estimate.transfers
                else f"{transferred / sum(estimate.transfers.values()):.3f}"
            )
            print(
                f"| {mesh} | {remat} | {compiled.arguments / 2**20:.1f} MiB | {ratio:.4f} "
                f"| {compiled.temporary / 2**20:.0f} MiB | {temporary_ratio:.2f} "
                f"| {transferred / 2**20:.1f} MiB | {agreement} |",
                flush=True,
            )


def print_optimizers(meshes: list[str]) -> None:
    """Print the bytes that a device sends with each optimizer, and the FLOPs beyond those with AdamW."""
    from benchmarks.jax_program import analyze_program
    from train.plan import bytes_sent
    from train.recipes import Optimizer

    print("\n| mesh | optimizer | sent per device | as estimated | FLOPs per device beyond AdamW's |")
    print("|---|---|---|---|---|")
    for mesh in meshes:
        adamw_flops = None
        for name in ("adamw", "muon", "adafactor", "lamb"):
            engine, estimate = prepare(mesh, optimizer=Optimizer(name=name))
            compiled = analyze_program(engine.compiled_step, engine.mesh.shape)
            flops = engine.compiled_step.cost_analysis()["flops"]
            adamw_flops = flops if adamw_flops is None else adamw_flops
            sent = sum(bytes_sent(*key, size, engine.mesh.shape) for key, size in compiled.transfers.items())
            agreement = "yes" if compiled.transfers == estimate.transfers else "no"
            print(
                f"| {mesh} | {name} | {sent / 2**20:.1f} MiB | {agreement} "
                f"| {round((flops - adamw_flops) / 1e9, 1) + 0} GFLOP |",
                flush=True,
            )


def print_compile_times(mesh: str, depths: list[int]) -> None:
    """Print the time to trace and compile the step for each number of blocks: median and range of `REPEATS`."""
    import jax

    times: dict[int, list[float]] = {depth: [] for depth in depths}
    for repeat in range(REPEATS + 1):
        for depth in depths:
            engine, _ = prepare(mesh, config={"depth": depth})
            jax.block_until_ready(engine.state)  # the initial weights are computed asynchronously
            start = time.perf_counter()
            assert engine.compiled_step
            if repeat:  # the first also does what a process does only once
                times[depth].append(time.perf_counter() - start)
    print("\n| blocks | compile time, s | / first row |")
    print("|---|---|---|")
    for depth, seconds in times.items():
        ratio = median(seconds) / median(times[depths[0]])
        print(f"| {depth} | {median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f}) | {ratio:.2f} |")


def main() -> None:
    """Print the tables, each row as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("meshes", nargs="*", default=MESHES, metavar="MESH")
    parser.add_argument("--depths", type=int, nargs="*", default=[12, 48], metavar="N")
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"  # before jax is imported
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "flax", "optax"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}\n")
    print_meshes(args.meshes)
    print_optimizers(args.meshes)
    print_compile_times(args.meshes[0], args.depths)


if __name__ == "__main__":
    main()
