"""The estimate beside programs that are compiled for simulated devices, or for GPUs that are only described."""

import math
from typing import Any, NamedTuple

from benchmarks.scaling.plans import COUNTS, MESHES, MODELS, config_of
from benchmarks.scaling.times import GIB, H100, number_of_collectives
from train.jax.memory_estimate import Compiler, estimate_memory
from train.mesh import AxisSizes, parse_mesh
from train.plan import bytes_sent
from train.recipes import Recipe

IMAGES = 8  # in each shard of the batch


class Comparison(NamedTuple):
    """A compiled step beside its estimate.

    sizes: the length of each mesh axis.
    arguments, temporary: bytes per device of the program, divided by the estimate's.
    program, estimate: bytes by collective and axes, as in `MemoryEstimate.transfers`.
    executed, assumed: the number of collectives of the program, and that of `number_of_collectives`.
    """

    sizes: AxisSizes
    arguments: float
    temporary: float
    program: dict[tuple[str, str], int]
    estimate: dict[tuple[str, str], int]
    executed: int
    assumed: int


def compare(devices: list[Any], name: str, mesh: str, remat: Any, compiler: Compiler) -> Comparison:
    """Compile the step of a model for these devices, and compare it with the estimate.

    The step is in bfloat16 for GPUs, and in float32 for CPUs, whose compiler widens bfloat16.
    """
    from benchmarks.cross_compile import compile_step
    from benchmarks.jax_program import analyze_program, collectives

    sizes = parse_mesh(mesh, len(devices))
    recipe = Recipe(
        batch_size=IMAGES * sizes["data"] * sizes["fsdp"],
        mesh=mesh,
        remat=remat,
        dtype="bfloat16" if compiler == "gpu" else "float32",
    )
    step = compile_step(devices, name, recipe)[0]
    text, found = step.as_text(), analyze_program(step, sizes)
    estimate = estimate_memory(config_of(name), recipe, sizes, compiler=compiler)
    is_fused = "__cudnn$fmhaSoftmaxBackward" in text
    temporary = estimate.total - estimate.state - is_fused * estimate.memory.get("attention weights", 0)
    return Comparison(
        sizes,
        found.arguments / estimate.state,
        found.temporary / temporary,
        found.transfers,
        estimate.transfers,
        sum(each.times for each in collectives(text, sizes)),
        sum(number_of_collectives(*key, size, config_of(name), recipe, sizes) for key, size in estimate.transfers.items()),
    )


def print_simulated() -> None:
    """Print the sizes of the arrays that programs for simulated devices send, and whether they are as estimated."""
    import jax

    print("| model | mesh |" + "".join(f" {count} |" for count in COUNTS) + " as estimated | arguments / estimate |")
    print("|---" * (len(COUNTS) + 4) + "|")
    for name in MODELS:
        for label, mesh in MESHES.items():
            cells, found = [], []
            for count in COUNTS:
                pair = [compare(jax.devices()[:count], name, mesh, remat, "cpu") for remat in ("none", "full")]
                totals = [f"{sum(each.program.values()) / GIB:.3f}" for each in pair]
                cells.append(" or ".join(dict.fromkeys(totals)))
                found += pair
            differing = [each for each in found if each.program != each.estimate]
            verdict = f"{len(found) - len(differing)} of {len(found)}"
            largest = max((each.arguments for each in found), key=lambda ratio: abs(ratio - 1))
            print(f"| {name} | {label} | {' | '.join(cells)} | {verdict} | {largest:.6f} |", flush=True)
            for each in differing:
                print(f"{dict(each.sizes)}: {each.program} for {each.estimate}")


def print_described(description: str) -> None:
    """Print bytes, memory and number of collectives of the programs for GPUs that a file describes, beside the estimate."""
    from benchmarks.cross_compile import devices_of

    devices = devices_of(description, nodes=COUNTS[-1] // H100.node)
    print(f"{len(devices)} x {devices[0].device_kind}, {IMAGES} images in each shard of the batch, bfloat16\n")
    print(
        "| model | mesh | `--remat` | sent per device | / estimate | arguments / estimate | temporary / estimate ", end=""
    )
    print("| collectives | assumed |")
    print("|---" * 9 + "|")
    for name in MODELS:
        for label, mesh in MESHES.items():
            for remat in ("none", "full"):
                found = compare(devices, name, mesh, remat, "gpu")
                sent, estimated = (
                    math.fsum(bytes_sent(*key, size, found.sizes) for key, size in transfers.items())
                    for transfers in (found.program, found.estimate)
                )
                ratios = f"{sent / estimated:.4f} | {found.arguments:.4f} | {found.temporary:.2f}"
                cells = f"{name} | {label} | {remat} | {sent / GIB:.3f} GiB | {ratios} | {found.executed} | {found.assumed}"
                print(f"| {cells} |", flush=True)
