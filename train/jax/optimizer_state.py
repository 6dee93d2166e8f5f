"""The communication of the update of a parameter on a mesh, as XLA compiles it; without a framework."""

import math
from collections import Counter

from train.jax.parameter_tree import mesh_axes
from train.mesh import AXES, AxisSizes, Parameter
from train.optimizer_state import axis_lengths, factored_axes, is_orthogonalized
from vit_spec import ViTConfig

Transfers = Counter[tuple[str, str]]  # array entries, by kind of collective and mesh axis


def update_transfers(name: str, parameter: Parameter, config: ViTConfig, sizes: AxisSizes) -> Transfers:
    """Return the array entries that the update of a parameter sends in a step; see `MemoryEstimate.transfers`.

    The mesh axis "" stands for what a device does without communication.
    """
    rules = {"muon": _muon_transfers, "lamb": _lamb_transfers, "adafactor": _adafactor_transfers}
    return rules[name](parameter, config, sizes) if name in rules else Counter()


def distribution(parameter: Parameter, config: ViTConfig, sizes: AxisSizes) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes along which Muon distributes the matrices of an array, and the number of matrices per device.

    These are the axes that shard a matrix.  Before them come axes along which it is replicated, as long as there are no
    fewer matrices than devices.
    """
    count = parameter.row.size // _matrix_size(parameter, config)
    used = mesh_axes(parameter, config, sizes)
    sharding = [name for name in AXES if sizes[name] > 1 and name in used]
    devices, replicating = math.prod(sizes[name] for name in sharding), []
    for name in AXES:
        if sizes[name] > 1 and name not in used and devices * sizes[name] <= count:
            devices *= sizes[name]
            replicating.append(name)
    return (*replicating, *sharding), -(-count // devices)


def _matrix_size(parameter: Parameter, config: ViTConfig) -> int:
    """Return the number of entries of one matrix in an array of all blocks; q, k and v have one each."""
    return math.prod(config.sizes[word] for word in parameter.axes if word in ("width", "head", "dim", "ff"))


def _muon_transfers(parameter: Parameter, config: ViTConfig, sizes: AxisSizes) -> Transfers:
    """Return Muon's transfers: for sharded matrices an all-to-all before and after, for replicated ones an all-gather."""
    transfers: Transfers = Counter()
    axes, each = distribution(parameter, config, sizes) if is_orthogonalized(parameter) else ((), 0)
    size, used = each * _matrix_size(parameter, config), mesh_axes(parameter, config, sizes)
    for name in reversed(axes):
        if name in used:
            transfers["all-to-all", name] += 2 * size
        else:
            size *= sizes[name]
            transfers["all-gather", name] += size
    return transfers


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
