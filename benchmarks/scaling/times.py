"""The time of a step and of its collectives, computed from bytes, FLOPs, and the rates of devices and links."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from train.loop.peak_flops import PEAKS
from train.mesh import AXES, AxisSizes
from train.plan import bytes_sent
from train.recipes import Recipe
from train.step_cost import MemoryEstimate, Step
from vit_spec import ViTConfig

GIB = 1 << 30
COMBINED = 30 << 20  # bytes up to which XLA combines collectives: xla_gpu_all_gather_combine_threshold_bytes and its like


class Protocol(NamedTuple):
    """A way to pass data on between devices.

    is_tree: along a tree, which is for all-reduce only, instead of a ring.
    start: seconds before the first step.
    inside, across: seconds of a step inside a node, and from node to node.
    share: the share of the bandwidth that it reaches.
    """

    is_tree: bool
    start: float
    inside: float
    across: float
    share: float


@dataclass(frozen=True)
class Machine:
    """Devices and their links.

    memory: bytes of a device.
    node: number of devices that are joined by the faster links.
    inside, across: bytes per second that a device sends inside its node, and to other nodes.
    protocols: the fastest of them is taken.
    """

    name: str
    peak_flops: float
    memory: int
    node: int
    inside: float
    across: float
    protocols: tuple[Protocol, ...]


# The latencies and shares of bandwidth in NCCL's model of its protocols LL, LL128 and Simple, on rings and on trees
# (NVIDIA/nccl, src/graph/tuning.cc).
NCCL = (
    Protocol(False, 6.6e-6, 0.6e-6, 2.7e-6, 0.25),
    Protocol(False, 14e-6, 1.9e-6, 4.0e-6, 0.92),
    Protocol(False, 8.4e-6, 3.4e-6, 14e-6, 1.0),
    Protocol(True, 6.8e-6, 0.6e-6, 5.0e-6, 0.26),
    Protocol(True, 14e-6, 1.25e-6, 8.5e-6, 0.92),
    Protocol(True, 8.4e-6, 4.0e-6, 14e-6, 0.9),
)
# NVLink: 900 GB/s in both directions together.  InfiniBand: 400 Gb/s for each GPU.
H100 = Machine("H100", PEAKS["H100"], 80 * GIB, 8, 450e9, 50e9, NCCL)
# 1,200 GB/s in both directions of all six links, so a chip sends 200 GB/s along each of the three axes of the torus.  Every
# axis of a mesh is assumed to have one of them.  The latency is not published.
TPU_V5P = Machine("TPU v5p", 459e12, 95 * GIB, 256, 200e9, 200e9, (Protocol(False, 0.0, 0.0, 0.0, 1.0),))


class StepTimes(NamedTuple):
    """Seconds of the parts of a step.

    compute: with recomputation.
    hidden: communication along `data` and `fsdp`, which can overlap with compute.
    exposed: communication along `tensor`, for which the next operation waits.
    """

    compute: float
    hidden: float
    exposed: float

    @property
    def efficiency(self) -> float:
        """The share of compute in a step, if no communication overlaps."""
        return self.compute / sum(self)

    @property
    def best_efficiency(self) -> float:
        """The share of compute in a step, if all communication overlaps that can."""
        return self.compute / (max(self.compute, self.hidden) + self.exposed)


def group_shape(axes: str, sizes: AxisSizes, node: int) -> tuple[int, int]:
    """Return how many nodes a collective along mesh axes such as "data+fsdp" spans, and its devices in each of them.

    The devices of a node have consecutive numbers, and the last axis of a mesh varies fastest.
    """
    return _group_shape(axes, tuple(sizes.items()), node)


@cache
def _group_shape(axes: str, sizes: tuple[tuple[str, int], ...], node: int) -> tuple[int, int]:
    names, lengths = zip(*sizes, strict=True)
    devices = np.arange(math.prod(lengths)).reshape(lengths)
    group = devices[tuple(slice(None) if name in axes.split("+") else 0 for name in names)].ravel()
    nodes = len(np.unique(group // node))
    return nodes, group.size // nodes


def collective_time(kind: str, axes: str, size: float, sizes: AxisSizes, machine: Machine) -> float:
    """Return the seconds of one collective over an array of `size` bytes.

    A ring of n devices has n - 1 steps, and twice as many if it sums too (all-reduce).  Of a group that spans nodes, all
    devices in a node send to the next node at once.
    """
    nodes, local = group_shape(axes, sizes, machine.node)
    bandwidth = machine.inside if nodes == 1 else min(machine.inside, local * machine.across)
    sent, is_sum = bytes_sent(kind, axes, size, sizes), kind == "all-reduce"

    def latency(protocol: Protocol) -> float:
        inside, across = nodes * (local - 1), nodes - 1.0
        if protocol.is_tree:
            inside, across = local - 1, math.log2(nodes)
        return protocol.start + (1 + is_sum) * (inside * protocol.inside + across * protocol.across)

    usable = (protocol for protocol in machine.protocols if is_sum or not protocol.is_tree)
    return min(latency(protocol) + sent / (bandwidth * protocol.share) for protocol in usable)


def number_of_collectives(kind: str, axes: str, size: float, config: ViTConfig, recipe: Recipe, sizes: AxisSizes) -> int:
    """Return in how many collectives the GPU compiler sends the arrays of `size` bytes, which are in bfloat16.

    It combines the matrices of a block up to `COMBINED` bytes, forward and backward, and their gradients.
    It also combines the gradients of the vectors of a block, which are in float32.
    """
    step, passes = Step.of(config, recipe, sizes, 4), recipe.accumulate * config.depth
    if axes == "tensor":
        return math.ceil(size / (2 * recipe.accumulate * step.images * step.tokens * config.width))
    matrices = {p: 2 * p.row.size // config.depth for p in step.parameters if p.row.decays and p.is_stacked}
    gathered, scattered = (
        _number_of_groups([matrix // step.shards(p, *shard_axes) for p, matrix in matrices.items()])
        for shard_axes in (("tensor",), AXES)
    )
    if kind == "all-gather":
        return 2 * passes * gathered + 1
    is_sharded = any(step.shards(p, "fsdp") > 1 for p in matrices)
    if kind == "reduce-scatter" or (is_sharded and axes == "data"):
        return passes * scattered + 1
    return passes * (1 if is_sharded else scattered + 1) + 2


def _number_of_groups(sizes: list[int]) -> int:
    """Return the number of groups of at most `COMBINED` bytes, or of one array, that arrays are combined to."""
    groups, filled = 1, 0
    for size in sorted(sizes):
        groups, filled = (groups, filled + size) if filled + size <= COMBINED or not filled else (groups + 1, size)
    return groups


def step_times(
    config: ViTConfig, recipe: Recipe, sizes: AxisSizes, estimate: MemoryEstimate, machine: Machine, utilization: float
) -> StepTimes:
    """Return the times of a step.

    utilization: the share of its peak that a device reaches without communication.
    """
    seconds: Counter[str] = Counter()
    for (kind, axes), size in estimate.transfers.items():
        count = number_of_collectives(kind, axes, size, config, recipe, sizes)
        part = "exposed" if axes == "tensor" else "hidden"
        seconds[part] += count * collective_time(kind, axes, size / count, sizes, machine)  # type: ignore[assignment]
    flops = (estimate.flops + estimate.recomputed) / math.prod(sizes.values())
    return StepTimes(flops / (machine.peak_flops * utilization), seconds["hidden"], seconds["exposed"])
