"""What a mesh costs: the compiled step against the plan, on eight simulated devices, and its compile time by depth.

Run `python -m benchmarks.mesh [MESH ...] [--depths N ...]`; it prints the tables of docs/training.md.  The model is the
ViT-Ti/16 with four heads, of 224x224 pixels and eight images a device, in float32; nothing is trained.  Devices are
simulated on the CPU, whose compiler sums gradients whole where a GPU's sums them into parts.
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
IMAGES = 8  # of each device
TURNS = 5


def prepared(mesh: str, **changes: Any) -> tuple[Any, Any]:
    """Return a trainer whose step is not compiled yet, and what was planned, for a config or recipe with changes."""
    import vit_spec
    from train.jax.engine import JaxEngine
    from train.jax.memory_estimate import needs
    from train.recipes import Recipe

    config = vit_spec.get("vit_ti16", num_classes=1000, **{"num_heads": 4, **changes.pop("config", {})})
    recipe = Recipe(batch_size=IMAGES * DEVICES, mesh=mesh, **changes)
    e = JaxEngine(config, recipe, task="classes", rate=lambda step: 1e-3, start=None, folder=Path("nowhere"))
    return e, needs(config, recipe, e.mesh.shape, scatters=False)


def table(meshes: list[str]) -> None:
    """What each mesh's step takes, keeps and sends, and the share of the plan that it is."""
    from benchmarks.jax_program import program

    print("| mesh | --remat | arguments | of the plan | temporary | of the plan | sent, whole arrays | as planned |")
    print("|---|---|---|---|---|---|---|---|")
    for mesh in meshes:
        for remat in ("none", "dots", "full"):
            e, planned = prepared(mesh, remat=remat)
            made = program(e._update, e.mesh.shape)
            sent = sum(made.transfers.values())
            share, kept = made.arguments / planned.state, made.temporary / (planned.total - planned.state)
            same = "yes" if made.transfers == planned.transfers else f"{sent / sum(planned.transfers.values()):.3f}"
            print(
                f"| {mesh} | {remat} | {made.arguments / 2**20:.1f} MiB | {share:.4f} | {made.temporary / 2**20:.0f} MiB "
                f"| {kept:.2f} | {sent / 2**20:.1f} MiB | {same} |",
                flush=True,
            )


def optimizers(meshes: list[str]) -> None:
    """What each optimizer's step sends, and what a device computes of it, beyond AdamW's."""
    from benchmarks.jax_program import program
    from train.plan import sent
    from train.recipes import Optimizer

    print("\n| mesh | optimizer | sent by a device | as planned | operations of a device beyond AdamW's |")
    print("|---|---|---|---|---|")
    for mesh in meshes:
        least = None
        for name in ("adamw", "muon", "adafactor", "lamb"):
            e, planned = prepared(mesh, optimizer=Optimizer(name=name))
            made = program(e._update, e.mesh.shape)
            flops = e._update.cost_analysis()["flops"]
            least = flops if least is None else least
            moved = sum(sent(*key, size, e.mesh.shape) for key, size in made.transfers.items())
            same = "yes" if made.transfers == planned.transfers else "no"
            print(
                f"| {mesh} | {name} | {moved / 2**20:.1f} MiB | {same} | {round((flops - least) / 1e9, 1) + 0} GFLOP |",
                flush=True,
            )


def depths(mesh: str, counts: list[int]) -> None:
    """How long the step takes to trace and to compile for so many blocks: medians of turns."""
    import jax

    took: dict[int, list[float]] = {depth: [] for depth in counts}
    for turn in range(TURNS + 1):
        for depth in counts:
            e, _ = prepared(mesh, config={"depth": depth})
            jax.block_until_ready(e._state)  # its weights are drawn in the background
            began = time.perf_counter()
            assert e._update
            if turn:  # the first pays for what is only ever done once
                took[depth].append(time.perf_counter() - began)
    print("\n| blocks | seconds to compile (least to most) | of the first |")
    print("|---|---|---|")
    for depth, seconds in took.items():
        share = median(seconds) / median(took[counts[0]])
        print(f"| {depth} | {median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f}) | {share:.2f} |")


def main() -> None:
    """Print the tables, a row as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("meshes", nargs="*", default=MESHES, metavar="MESH")
    parser.add_argument("--depths", type=int, nargs="*", default=[12, 48], metavar="N")
    given = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"  # ahead of jax
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "flax", "optax"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}\n")
    table(given.meshes)
    optimizers(given.meshes)
    depths(given.meshes[0], given.depths)


if __name__ == "__main__":
    main()
