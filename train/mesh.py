"""The mesh of devices and the sharding rules, for the parameters of either twin and without a framework.

The mesh has three axes.  Batches are sharded over `data` and `fsdp`; matrices and their optimizer state over `fsdp` by
width (fully sharded data parallelism, arXiv 1910.02054) and over `tensor` by heads and hidden units (tensor parallelism,
arXiv 1909.08053).  Norms, biases, tokens and position tables, about a hundredth of a model, are replicated along `fsdp`: to
gather them would take more messages than to gather the matrices.

A rule maps a named axis of `vit_spec.rows` to a mesh axis.  So it holds for every parameter and for every format:
`shard_dims` finds the named axis in the dimensions of the array.
"""

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from parity.checkpoints.formats import get
from vit_spec import InputError, Row, ViTConfig, nearest, rows

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")  # they shard a batch
SHARDING_RULES = {
    "width": "fsdp",
    "pooled": "fsdp",
    "feature": "fsdp",
    "head": "tensor",
    "ff": "tensor",
    "pool_head": "tensor",
}

MIN_REPORTED_FRACTION = 0.02  # of all parameters: if more of them stay replicated, a note says so

AxisSizes = Mapping[str, int]  # the length of each mesh axis


class Parameter(NamedTuple):
    """A parameter as a format stores it.

    dims: for each dimension of its array, the named axes that are merged into it, outermost first; () for length one.
    """

    row: Row
    dims: tuple[tuple[str, ...], ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The named axis of each dimension, "1" for length one; only for formats that merge no axes."""
        return tuple(dim[0] if dim else "1" for dim in self.dims)

    @property
    def is_stacked(self) -> bool:
        """Whether one array holds the parameters of all blocks, on its first dimension."""
        return self.dims[0] == ("block",)


class Shard(NamedTuple):
    """How one dimension of an array is sharded.

    axis: the mesh axis; None if the dimension is not sharded.
    groups: the number of equal, consecutive groups of the dimension that are sharded separately.  It is 1 if the dimension
        is cut into consecutive shards.  It is 3 for heads in `(qkv head dim)`: a device has a shard of the queries, one of
        the keys and one of the values.  DTensor calls this a strided shard.
    """

    axis: str | None = None
    groups: int = 1


def parse_mesh(text: str, devices: int) -> dict[str, int]:
    """Parse a mesh such as "data=-1,fsdp=4,tensor=2" and return the length of each axis, 1 for an axis that is not named.

    One axis may be -1: its length follows from the number of devices.

    Raises:
        InputError: an unknown axis (the message names the nearest), an axis given twice, or lengths whose product is not
            the number of devices.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        match = re.fullmatch(r"([a-z]+)=(-1|[1-9]\d*)", part)
        if not match or match[1] in sizes:
            raise InputError(f"--mesh {text!r}: {part!r} is not understood; write such as data=-1,fsdp=4,tensor=2")
        if match[1] not in AXES:
            raise InputError(f"--mesh has an unknown axis {match[1]!r}: give {', '.join(AXES)}{nearest(match[1], AXES)}")
        sizes[match[1]] = int(match[2])
    open_axes = [name for name, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size > 0)
    if len(open_axes) > 1:
        raise InputError(f"--mesh {text!r} has -1 for {' and '.join(open_axes)}: only one axis may be -1")
    if devices % known or (not open_axes and known != devices):
        raise InputError(
            f"--mesh {text!r} has a product of {known} for {devices} devices: "
            f"give lengths whose product is {devices}; one may be -1"
        )
    return {name: devices // known if sizes.get(name) == -1 else sizes.get(name, 1) for name in AXES}


def axis_sizes(text: str, devices: int, config: ViTConfig) -> dict[str, int]:
    """Return the length of each mesh axis for a model.

    Raises:
        InputError: as `parse_mesh`; or `tensor` does not divide the heads or the hidden units.
    """
    sizes = parse_mesh(text, devices)
    for count, what in ((config.num_heads, "heads"), (config.mlp_dim, "hidden units")):
        if count % sizes["tensor"]:
            raise InputError(
                f"--mesh has tensor={sizes['tensor']}, which does not divide the {count} {what}: give a divisor"
            )
    return sizes


def describe(sizes: AxisSizes, device: str) -> str:
    """Return the mesh and the name of its devices as text: "data=2, fsdp=4 (8 x NVIDIA H100)"."""
    count = math.prod(sizes.values())
    axes = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "1 device"
    return f"{axes} ({f'{count} x ' if count > 1 else ''}{device})"


def images_per_device(batch_size: int, accumulate: int, sizes: AxisSizes) -> int:
    """Return the number of images that a device has of each of the `accumulate` parts of a batch.

    Raises:
        InputError: the batch cannot be divided evenly; the message gives the next larger size that can.
    """
    num_shards = math.prod(sizes[name] for name in BATCH_AXES)
    parts = num_shards * accumulate
    if batch_size % parts:
        times = f" times {accumulate} parts (--accumulate)" if accumulate > 1 else ""
        raise InputError(
            f"--batch-size {batch_size} cannot be divided by {num_shards} (mesh axes data and fsdp){times}: "
            f"give {-(-batch_size // parts) * parts}"
        )
    return batch_size // parts


@lru_cache(maxsize=16)
def parameters(config: ViTConfig, format: str) -> Mapping[str, Parameter]:
    """Return the parameters of a model as a format stores them, by the names of their rows in `vit_spec.rows`."""
    known = rows(config)
    return MappingProxyType(
        {
            name: Parameter(known[name], tuple(tuple(axis.name for axis in dim) for dim in layout.dims))
            for name, layout in get(format).layouts(config).items()
        }
    )


def shard_dims(parameter: Parameter, config: ViTConfig, sizes: AxisSizes) -> tuple[Shard, ...]:
    """Return how each dimension of a parameter's array is sharded.

    A device gets the same entries in every format.
    """
    axes, shards = sharded_axes(parameter.row, config, sizes), []
    for dim in parameter.dims:
        positions = [position for position, axis in enumerate(dim) if axis in axes]
        outer = dim[: positions[0]] if positions else ()
        groups = math.prod(config.sizes[axis] for axis in outer)
        shards.append(Shard(axes[dim[positions[0]]], groups) if positions else Shard())
    return tuple(shards)


def sharded_axes(row: Row, config: ViTConfig, sizes: AxisSizes) -> dict[str, str]:
    """Return the mesh axis of each named axis that is sharded.

    A mesh axis shards one axis of a parameter, its inputs rather than its outputs, and only if it divides the length of
    that axis; `fsdp` shards matrices only.
    """
    found: dict[str, str] = {}
    for axis in reversed(row.axes):
        mesh_axis = SHARDING_RULES.get(axis)
        if mesh_axis is None or mesh_axis in found.values() or config.sizes[axis] % sizes[mesh_axis]:
            continue
        if row.decays or mesh_axis != "fsdp":
            found[axis] = mesh_axis
    return found


def is_shared_by_heads(row: Row) -> bool:
    """Return whether all heads have the same entries of a parameter, such as those of a norm of queries.

    Along `tensor` each device computes the gradient of its heads only, so these gradients are summed.
    """
    return "dim" in row.axes and "head" not in row.axes


def replication_note(config: ViTConfig, sizes: AxisSizes) -> str:
    """Return a line that names the parameters that stay replicated although the mesh should shard them; "" if they are few.

    The mesh axis in question is `fsdp`, or `tensor` if the mesh has no `fsdp`.
    """
    mesh_axis = next((name for name in ("fsdp", "tensor") if sizes[name] > 1), "")
    total = sum(row.size for row in rows(config).values())
    replicated = {
        name: row.size / total
        for name, row in rows(config).items()
        if mesh_axis not in sharded_axes(row, config, sizes).values()
    }
    if not mesh_axis or sum(replicated.values()) <= MIN_REPORTED_FRACTION:
        return ""
    largest = sorted(replicated.items(), key=lambda item: -item[1])[:3]
    names = ", ".join(f"{name} {share:.1%}" for name, share in largest) + ", ..." * (len(replicated) > 3)
    return f"{sum(replicated.values()):.1%} of the weights are not sharded by {mesh_axis}={sizes[mesh_axis]}: {names}"
