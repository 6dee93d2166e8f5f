"""Memory and transfers of the training step, compiled for GPUs or TPUs that are not present, compared with the estimate.

    python -m benchmarks.cross_compile h200.txtpb       # for eight GPUs of the kind that the file describes
    python -m benchmarks.cross_compile v5e:2x4          # for the eight chips of a TPU topology
    python -m benchmarks.cross_compile h200.txtpb data=8 --optimizers --images 2     # all optimizers, with --remat full

It prints the tables "Compiled for GPUs and TPUs" of docs/measurements/training.md.  Nothing runs, so no times are measured.
The tables show that XLA compiles the step for those devices, whether it uses cuDNN's attention, and the memory and the
transfers of the program.

GPUs need JAX's plugin (jax-cuda13-plugin and jax-cuda13-pjrt, both of JAX's version, and nvidia-cudnn-cu13) and CUDA's
ptxas.  XLA's sources contain a description of each kind of GPU, in xla/backends/gpu/target_config/specs.  TPUs need the
libtpu that JAX's extra "tpu" names.
"""

import argparse
import os
import platform
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

from train.recipes.recipe import OptimizerName

MESHES = ["data=8", "fsdp=8", "data=2,fsdp=2,tensor=2"]
DEVICES = 8


def devices_of(text: str, nodes: int = 1) -> list[Any]:
    """Return eight GPUs of the kind that a file describes in each node, or the chips of a TPU topology.

    text: the path of the file, or the topology.
    """
    from jax.experimental.topologies import get_topology_desc

    if Path(text).is_file():
        described = {"topology": f"1x{nodes}x{DEVICES}", "target_config": Path(text).read_text(encoding="utf-8")}
        return list(get_topology_desc("", platform="cuda", **described).devices)
    return list(get_topology_desc(text, platform="tpu").devices)


def compile_step(devices: list[Any], model: str, recipe: Any) -> tuple[Any, Any, dict[str, int]]:
    """Compile the training step of a model for the devices.

    Returns the compiled step, its memory estimate, and the length of each mesh axis.
    """
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    import vit_spec
    from train.jax import sharding
    from train.jax.engine import JaxEngine
    from train.jax.memory_estimate import estimate_memory
    from train.mesh import AXES, axis_sizes
    from vit_jax import compilation

    class AbstractEngine(JaxEngine):
        """An engine whose state has shapes and dtypes only."""

        def _make_state(self, start: Any) -> Any:
            return jax.eval_shape(self._initial_state, start)

    def make_target_mesh(text: str, config: Any) -> Mesh:
        sizes = axis_sizes(text, len(devices), config)
        return Mesh(np.asarray(devices).reshape(tuple(sizes.values())), AXES, axis_types=(AxisType.Auto,) * len(AXES))

    config = vit_spec.get(model, num_classes=1000)
    device = patch.object(compilation, "default_device", lambda: devices[0])
    with patch.object(sharding, "make_mesh", make_target_mesh), device:
        engine = AbstractEngine(
            config, recipe, task="classes", learning_rate=lambda step: 1e-3, initial_weights=None, folder=Path("nowhere")
        )
        return engine.compiled_step, estimate_memory(config, recipe, engine.mesh.shape), dict(engine.mesh.shape)


def format_row(devices: list[Any], model: str, images: int, mesh: str, remat: str) -> str:
    """Return a row of the table: memory and transfers of the compiled step, and their ratios to the estimate.

    images: batch size per device.
    """
    from benchmarks.jax_program import analyze_program
    from train.recipes import Recipe

    recipe = Recipe(mesh=mesh, remat=remat, dtype="bfloat16", batch_size=images * len(devices))  # type: ignore[arg-type]
    step, estimate, sizes = compile_step(devices, model, recipe)
    memory, text = step.memory_analysis(), step.as_text()
    has_cudnn_attention = "__cudnn$fmhaSoftmaxBackward" in text
    temporary_estimate = (
        estimate.total - estimate.state - (estimate.memory.get("attention weights", 0) if has_cudnn_attention else 0)
    )
    transfer_cells = ["-", "-"]
    if devices[0].platform == "gpu":  # the TPU compiler's notation of collectives is not supported
        transferred = sum(analyze_program(step, sizes).transfers.values())
        transfer_cells = [f"{transferred / 2**20:.1f} MiB", f"{transferred / sum(estimate.transfers.values()):.4f}"]
    cells = [
        mesh,
        remat,
        "cuDNN" if has_cudnn_attention else "explicit",
        f"{memory.argument_size_in_bytes / 2**20:.1f} MiB",
        f"{memory.argument_size_in_bytes / estimate.state:.4f}",
        f"{memory.temp_size_in_bytes / 2**30:.2f} GiB",
        f"{memory.temp_size_in_bytes / temporary_estimate:.2f}",
        *transfer_cells,
    ]
    return f"| {' | '.join(cells)} |"


def format_optimizer_row(devices: list[Any], model: str, images: int, mesh: str, optimizer: str, ema: float) -> str:
    """Return a row of the table of optimizers: memory of the compiled step, and its ratio to the estimate.

    images: batch size per device; the fewer, the more of the memory belongs to the update.
    """
    from train.recipes import Optimizer, Recipe

    recipe = Recipe(
        mesh=mesh,
        remat="full",
        dtype="bfloat16",
        batch_size=images * len(devices),
        optimizer=Optimizer(name=optimizer),  # type: ignore[arg-type]
        ema=ema,
    )
    step, estimate, _ = compile_step(devices, model, recipe)
    memory = step.memory_analysis()
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes  # the new state is in the arrays of the old one
    cells = [mesh, optimizer, str(ema or "-"), f"{used / 2**20:.0f} MiB", f"{estimate.total / used:.2f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table, each row as soon as it is compiled."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("devices", metavar="FILE|TOPOLOGY")
    parser.add_argument("meshes", nargs="*", default=MESHES, metavar="MESH")
    parser.add_argument("--model", default="vit_b16")
    parser.add_argument("--images", type=int, default=128, help="batch size per device")
    parser.add_argument("--optimizers", action="store_true", help="print the memory of each optimizer, with --remat full")
    args = parser.parse_args()
    if not Path(args.devices).is_file() and ":" not in args.devices:
        parser.error(f"{args.devices!r} is neither a file nor a topology: give one such as v5e:2x4")
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}  # so that JAX does not search for the devices
    devices = devices_of(args.devices)
    setup = f"{len(devices)} x {devices[0].device_kind}, {args.model}, {args.images} images per device, bfloat16"
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "flax"))
    print(f"{setup}; {versions}, Python {platform.python_version()}\n")
    if args.optimizers:
        print("| mesh | optimizer | `--ema` | memory | estimate / memory |\n|---|---|---|---|---|")
        for mesh, ema, name in product(args.meshes, (0.0, 0.9999), get_args(OptimizerName)):
            print(format_optimizer_row(devices, args.model, args.images, mesh, name, ema), flush=True)
        return
    print("| mesh | `--remat` | attention | arguments | / estimate | temporary | / estimate | transfers | / estimate |")
    print("|---|---|---|---|---|---|---|---|---|")
    for mesh in args.meshes:
        for remat in ("none", "dots", "full"):
            print(format_row(devices, args.model, args.images, mesh, remat), flush=True)


if __name__ == "__main__":
    main()
