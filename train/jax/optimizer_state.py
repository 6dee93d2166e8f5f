"""The communication of the update of a parameter on a mesh, as XLA compiles it; without a framework."""

import math
from collections import Counter

from train.jax.parameter_tree import mesh_axes
from train.mesh import AXES, AxisSizes, Parameter
from train.optimizer_state import axis_lengths, factored_axes, muon_transfers
from vit_spec import ViTConfig

Transfers = Counter[tuple[str, str]]  # array entries, by kind of collective and mesh axis


def update_transfers(name: str, parameter: Parameter, config: ViTConfig, sizes: AxisSizes) -> Transfers:
    """Return the array entries that the update of a parameter sends in a step; see `MemoryEstimate.transfers`.

    The mesh axis "" stands for what a device does without communication.
    """
    if name == "muon":
        return muon_transfers(parameter.row, config, sizes)
    rules = {"lamb": _lamb_transfers, "adafactor": _adafactor_transfers}
    return rules[name](parameter, config, sizes) if name in rules else Counter()


def _lamb_transfers(parameter: Parameter, config: ViTConfig, sizes: AxisSizes) -> Transfers:
    """Return LAMB's transfers: two norms of the weights of each block and two of the update.

    optax computes each norm twice; the second one avoids a division by zero.
    """
    if not (parameter.is_stacked and parameter.row.decays):
        return Counter()
    used = mesh_axes(parameter, config, sizes)
    return Counter({("all-reduce", name): 4 * config.depth for name in AXES if name in used and sizes[name] > 1})


def _adafactor_transfers(parameter: Parameter, config: ViTConfig, sizes: AxisSizes) -> Transfers:
    """Return Adafactor's transfers: means over each of the two longest axes and over both, all-reduced and all-gathered."""
    transfers: Transfers = Counter()
    shape = axis_lengths(parameter, config)
    if not (axes := factored_axes(parameter, config)):
        return transfers
    names = [name if name is not None and sizes[name] > 1 else None for name in mesh_axes(parameter, config, sizes)]
    local_shape = [length // (sizes[name] if name else 1) for length, name in zip(shape, names, strict=True)]
    for reduced in axes:
        rest = [i for i in range(len(shape)) if i != reduced]
        size = math.prod(local_shape[i] for i in rest)
        transfers["all-reduce", names[reduced] or ""] += size
        for i in reversed(rest):  # the last axis first, as the compiler does
            size *= shape[i] // local_shape[i]
            transfers["all-gather", names[i] or ""] += size
    if len(shape) > 2:  # else it is a scalar
        transfers["all-reduce", names[axes[0]] or ""] += math.prod(local_shape) // math.prod(local_shape[i] for i in axes)
    return transfers
