"""The optimizer state of a parameter, and the matrices of Muon: what is the same in both trainers."""

import math
from collections import Counter

from train.mesh import AXES, AxisSizes, Parameter, sharded_axes
from train.recipes.optimizer_constants import MIN_FACTORED_SIZE
from vit_spec import Row, ViTConfig

MATRIX_AXES = ("width", "head", "dim", "ff")  # of one matrix; the others of a row index matrices


def state_size(name: str, parameter: Parameter, local_size: int, config: ViTConfig) -> int:
    """Return the number of entries of the optimizer state on one device.

    name: name of the optimizer.
    local_size: entries of the parameter on the device.
    """
    if name == "adafactor":
        return local_size + _factored_size(parameter, config, local_size)
    if name == "muon":
        return local_size if is_orthogonalized(parameter.row) else 2 * local_size
    return {"adamw": 2, "lamb": 2, "sgd": 1, "lion": 1}[name] * local_size


def _factored_size(parameter: Parameter, config: ViTConfig, local_size: int) -> int:
    """Return the number of entries of Adafactor's second moments on one device.

    Factored parameters have a row and a column along their two longest axes, replicated on every device: optax,
    transforms/_factorized.py (arXiv 1804.04235).
    """
    shape, axes = axis_lengths(parameter, config), factored_axes(parameter, config)
    return sum(math.prod(shape) // shape[i] for i in axes) if axes else local_size


def factored_axes(parameter: Parameter, config: ViTConfig) -> tuple[int, ...]:
    """Return the second longest and the longest axis, except that of the blocks, if Adafactor factors them, else ()."""
    shape = axis_lengths(parameter, config)
    axes = tuple(sorted(range(parameter.is_stacked, len(shape)), key=shape.__getitem__)[-2:])
    return axes if len(axes) == 2 and shape[axes[0]] >= MIN_FACTORED_SIZE else ()


def axis_lengths(parameter: Parameter, config: ViTConfig) -> tuple[int, ...]:
    """Return the length of each dimension of a parameter's array."""
    return tuple(config.sizes.get(word, 1) for word in parameter.axes)


# Muon -----------------------------------------------------------------------------------------------------------------


def is_orthogonalized(row: Row) -> bool:
    """Whether Muon orthogonalizes the update of a parameter: the matrices of the blocks that read or write tokens.

    The MLP of relative positions is no such matrix: it maps offsets to the heads, and may be shared by all blocks.
    """
    return row.axes[0] == "block" and row.decays and "width" in row.axes


def matrix_size(row: Row, config: ViTConfig) -> int:
    """Return the number of entries of one matrix of a row: q, k, v, and the two of a gated MLP have one each."""
    return math.prod(config.sizes[axis] for axis in row.axes if axis in MATRIX_AXES)


def distribution(row: Row, config: ViTConfig, sizes: AxisSizes) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes along which Muon distributes the matrices of a row, and the number of matrices per device.

    These are the axes that shard a matrix.  Before them come axes along which it is replicated, as long as there are no
    fewer matrices than devices.
    """
    count, used = row.size // matrix_size(row, config), sharded_axes(row, config, sizes).values()
    sharding = [name for name in AXES if sizes[name] > 1 and name in used]
    devices, replicating = math.prod(sizes[name] for name in sharding), []
    for name in AXES:
        if sizes[name] > 1 and name not in used and devices * sizes[name] <= count:
            devices *= sizes[name]
            replicating.append(name)
    return (*replicating, *sharding), -(-count // devices)


def muon_transfers(row: Row, config: ViTConfig, sizes: AxisSizes) -> Counter[tuple[str, str]]:
    """Return the array entries that Muon sends for a row, by kind of collective and mesh axis.

    There is an all-to-all before and after for sharded matrices, and an all-gather for replicated ones.
    """
    transfers: Counter[tuple[str, str]] = Counter()
    axes, each = distribution(row, config, sizes) if is_orthogonalized(row) else ((), 0)
    size, used = each * matrix_size(row, config), sharded_axes(row, config, sizes).values()
    for name in reversed(axes):
        if name in used:
            transfers["all-to-all", name] += 2 * size
        else:
            size *= sizes[name]
            transfers["all-gather", name] += size
    return transfers
