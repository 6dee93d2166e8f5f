"""The training step compiled by XLA for GPUs or TPUs that are not here, and held against the plan.

    python -m benchmarks.elsewhere h200.txtpb       for eight GPUs of the kind that the file describes
    python -m benchmarks.elsewhere v5e:2x4          for the eight chips of a TPU topology

Nothing runs, so no time is told: that the compiler of those devices takes the step, on GPUs with cuDNN's attention, and
what its program keeps and sends.  GPUs need jax's plugin (jax-cuda13-plugin and jax-cuda13-pjrt, both of jax's
version, and nvidia-cudnn-cu13) and CUDA's ptxas; XLA's sources describe a GPU of each kind, in
xla/backends/gpu/target_config/specs.  TPUs need the libtpu that jax's extra "tpu" names.  It prints tables of
docs/training.md.
"""

import argparse
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

MESHES = ["data=8", "fsdp=8", "data=2,fsdp=2,tensor=2"]
DEVICES = 8


def topology(text: str) -> list[Any]:
    """Return the devices that a file describes, or that a TPU topology has."""
    from jax.experimental.topologies import get_topology_desc

    if Path(text).is_file():
        described = {"topology": f"1x1x{DEVICES}", "target_config": Path(text).read_text(encoding="utf-8")}
        return list(get_topology_desc("", platform="cuda", **described).devices)
    return list(get_topology_desc(text, platform="tpu").devices)


def compiled(devices: list[Any], model: str, **changes: Any) -> tuple[Any, Any, dict[str, int]]:
    """Return the step of a recipe, what was planned of it, and the mesh's axes."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    import vit_spec
    from train.jax import sharding
    from train.jax.engine import JaxEngine
    from train.jax.memory_estimate import needs
    from train.mesh import AXES, sizes_for
    from train.recipes import Recipe
    from vit_jax import layers

    class Unstarted(JaxEngine):
        """A trainer whose weights are shapes alone."""

        def _begin(self, start: Any) -> Any:
            return jax.eval_shape(self._drawn, start)

    def make(text: str, config: Any) -> Mesh:
        sizes = sizes_for(text, len(devices), config)
        return Mesh(np.asarray(devices).reshape(tuple(sizes.values())), AXES, axis_types=(AxisType.Auto,) * len(AXES))

    config, recipe = vit_spec.get(model, num_classes=1000), Recipe(**changes)
    with patch.object(sharding, "make", make), patch.object(layers, "_device", lambda: devices[0]):
        e = Unstarted(config, recipe, task="classes", rate=lambda step: 1e-3, start=None, folder=Path("nowhere"))
        return e._update, needs(config, recipe, e.mesh.shape), dict(e.mesh.shape)


def row(devices: list[Any], model: str, images: int, mesh: str, remat: str) -> str:
    """What a mesh's step takes and sends, and the share of the plan that it is."""
    from benchmarks.jax_program import program

    changes: dict[str, Any] = {"mesh": mesh, "remat": remat, "dtype": "bfloat16", "batch_size": images * len(devices)}
    step, planned, sizes = compiled(devices, model, **changes)
    memory, text = step.memory_analysis(), step.as_text()
    fused = "__cudnn$fmhaSoftmaxBackward" in text
    kept = planned.total - planned.state - (planned.memory.get("attention weights", 0) if fused else 0)
    sent = ["-", "-"]
    if devices[0].platform == "gpu":  # a TPU's compiler writes collectives in forms that are not read
        moved = sum(program(step, sizes).transfers.values())
        sent = [f"{moved / 2**20:.1f} MiB", f"{moved / sum(planned.transfers.values()):.4f}"]
    cells = [
        mesh,
        remat,
        "cuDNN" if fused else "written out",
        f"{memory.argument_size_in_bytes / 2**20:.1f} MiB",
        f"{memory.argument_size_in_bytes / planned.state:.4f}",
        f"{memory.temp_size_in_bytes / 2**30:.2f} GiB",
        f"{memory.temp_size_in_bytes / kept:.2f}",
        *sent,
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table, a row as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("devices", metavar="FILE|TOPOLOGY")
    parser.add_argument("meshes", nargs="*", default=MESHES, metavar="MESH")
    parser.add_argument("--model", default="vit_b16")
    parser.add_argument("--images", type=int, default=128, help="of each device")
    given = parser.parse_args()
    if not Path(given.devices).is_file() and ":" not in given.devices:
        parser.error(f"{given.devices!r} is no file, and no topology such as v5e:2x4")
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}  # of what is not here nothing is to be looked for
    devices = topology(given.devices)
    what = f"{len(devices)} x {devices[0].device_kind}, {given.model}, {given.images} images a device, bfloat16"
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "flax"))
    print(f"{what}; {versions}, Python {platform.python_version()}\n")
    print("| mesh | --remat | attention | arguments | of the plan | temporary | of the plan | sent | of the plan |")
    print("|---|---|---|---|---|---|---|---|---|")
    for mesh in given.meshes:
        for remat in ("none", "dots", "full"):
            print(row(devices, given.model, given.images, mesh, remat), flush=True)


if __name__ == "__main__":
    main()
