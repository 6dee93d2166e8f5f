"""The models, meshes and steps that are compared, and the smallest batches with which a mesh is efficient."""

from bisect import bisect_left
from functools import cache, partial
from typing import Any, NamedTuple

import vit_spec
from benchmarks.scaling.times import Machine, StepTimes, step_times
from train.jax.memory_estimate import estimate_memory
from train.mesh import AxisSizes, parse_mesh
from train.plan import USABLE_FRACTION
from train.recipes import Recipe
from train.step_cost import MemoryEstimate
from vit_spec import ViTConfig

MODELS = ("vit_l16", "vit_g14", "vit_22b14")
COUNTS = (8, 16, 32, 64, 128, 256)
BATCH_SIZE = 4096
THRESHOLD = 0.8  # a mesh pays as long as its efficiency is no lower
MAX_IMAGES = 4096  # per shard of a batch
# By the name in the tables.  Eight devices are a node.
MESHES = {
    "data": "data=-1",
    "fsdp": "fsdp=-1",
    "data × fsdp=8": "data=-1,fsdp=8",
    "data × fsdp=4 × tensor=2": "data=-1,fsdp=4,tensor=2",
    "data × tensor=8": "data=-1,tensor=8",
    "fsdp × tensor=8": "fsdp=-1,tensor=8",
}


class Plan(NamedTuple):
    """A step of a model on a mesh, in bfloat16."""

    config: ViTConfig
    recipe: Recipe
    sizes: AxisSizes
    estimate: MemoryEstimate

    @property
    def memory(self) -> int:
        """Bytes per device with a fused attention kernel, which stores no attention weights."""
        return self.estimate.total - self.estimate.memory.get("attention weights", 0)

    def fits(self, machine: Machine) -> bool:
        """Return whether the usable memory of a device is enough."""
        return self.memory <= USABLE_FRACTION * machine.memory

    def times(self, machine: Machine, utilization: float) -> StepTimes:
        """Return the times of the step."""
        return step_times(self.config, self.recipe, self.sizes, self.estimate, machine, utilization)


@cache
def config_of(name: str) -> ViTConfig:
    """Return the config of a named model with 1,000 classes."""
    return vit_spec.get(name, num_classes=1000)


@cache
def make_plan(name: str, mesh: str, devices: int, images: int, remat: Any = "none", accumulate: int = 1) -> Plan:
    """Return the plan of a step with so many images in each shard of the batch."""
    config, sizes = config_of(name), parse_mesh(mesh, devices)
    batch_size = images * sizes["data"] * sizes["fsdp"]
    recipe = Recipe(batch_size=batch_size, mesh=mesh, dtype="bfloat16", remat=remat, accumulate=accumulate)
    return Plan(config, recipe, sizes, estimate_memory(config, recipe, sizes))


def fitting_plan(name: str, mesh: str, devices: int, machine: Machine, images: int | None = None) -> Plan | None:
    """Return the plan that recomputes least of those that fit, and accumulates only if it must; None if none fits.

    images: the number in each shard of the batch; by default the batch has `BATCH_SIZE`.
    """
    if images is None:
        sizes = parse_mesh(mesh, devices)
        images = BATCH_SIZE // (sizes["data"] * sizes["fsdp"])
    parts = [2**power for power in range(images.bit_length()) if images % 2**power == 0]
    for remat, accumulate in [("none", 1), ("dots", 1), *(("full", n) for n in parts)]:
        found = make_plan(name, mesh, devices, images, remat, accumulate)
        if found.fits(machine):
            return found
    return None


def smallest_batch(name: str, mesh: str, devices: int, machine: Machine, utilization: float, overlaps: bool) -> Plan | None:
    """Return the plan with the smallest batch that fits and has an efficiency of `THRESHOLD`; None if there is none.

    It recomputes least of those that fit.  It does not accumulate: each part of a batch has the collectives of a whole
    batch, and the sum of the gradients leaves less memory to it.

    overlaps: whether communication along `data` and `fsdp` overlaps with compute.
    """

    def pays(plan: Plan) -> bool:
        times = plan.times(machine, utilization)
        return (times.best_efficiency if overlaps else times.efficiency) >= THRESHOLD

    fewest = 1  # images in each shard that do not fit with less recomputation
    for remat in ("none", "dots", "full"):
        plans = [partial(make_plan, name, mesh, devices, images, remat) for images in range(fewest, MAX_IMAGES + 1)]
        first = bisect_left(plans, True, key=lambda make: pays(make()))
        limit = bisect_left(plans, True, key=lambda make: not make().fits(machine))
        if first < limit:
            return plans[first]()
        fewest += limit
    return None
