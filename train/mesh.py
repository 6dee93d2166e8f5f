"""The mesh of devices, and how it shards the parameters of either twin: rules from axis words, without a framework.

The mesh has three axes.  Batches are sharded over `data` and `fsdp`; matrices and their optimizer state over `fsdp` by
width (fully sharded data parallelism, arXiv 1910.02054) and over `tensor` by heads and hidden units (tensor parallelism,
arXiv 1909.08053).  Norms, biases, tokens and tables, a hundredth of a model, are replicated along `fsdp`: to gather them
would take more messages than to gather the matrices.  A rule names an axis word of `vit_spec.rows`, so it holds for every
parameter, and for every format: `split` finds the word in the dimensions of the array.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from parity.checkpoints.formats import get
from vit_spec import InputError, Row, ViTConfig, nearest, rows

AXES = ("data", "fsdp", "tensor")
IMAGES = ("data", "fsdp")  # the axes that shard a batch
RULES = {"width": "fsdp", "pooled": "fsdp", "feature": "fsdp", "head": "tensor", "ff": "tensor"}

WHOLE = 0.02  # of all parameters: a larger share that stays replicated is reported

Sizes = Mapping[str, int]  # the length of each axis of the mesh


class Parameter(NamedTuple):
    """One parameter as a format stores it.

    dims: for each dimension of its array, the axis words that are merged into it, outermost first; () for length one.
    """

    row: Row
    dims: tuple[tuple[str, ...], ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The word of each dimension, "1" where it has none; for formats that merge no words."""
        return tuple(dim[0] if dim else "1" for dim in self.dims)

    @property
    def stacked(self) -> bool:
        """Whether one array holds the parameters of all blocks, on its first dimension."""
        return self.dims[0] == ("block",)


class Shard(NamedTuple):
    """How one dimension of an array is sharded.

    axis: the axis of the mesh; None where each device has all of the dimension.
    groups: the number of equal, consecutive groups of the dimension that are sharded each by itself.  It is 1 where the
        dimension is cut into consecutive parts.  It is 3 for heads in `(qkv head dim)`: of each of the queries, the keys
        and the values a device has its part.  DTensor calls it a strided shard.
    """

    axis: str | None = None
    groups: int = 1


def parse(text: str, devices: int) -> dict[str, int]:
    """Return the lengths of the mesh's axes, as "data=-1,fsdp=4,tensor=2" says them: -1, for one, is what is left.

    Raises:
        InputError: an unknown axis (the nearest is named), one said twice, or lengths that do not multiply to the devices.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        found = re.fullmatch(r"([a-z]+)=(-1|[1-9]\d*)", part)
        if not found or found[1] in sizes:
            raise InputError(f"--mesh {text!r}: {part!r} is not understood; write such as data=-1,fsdp=4,tensor=2")
        if found[1] not in AXES:
            raise InputError(f"--mesh has an unknown axis {found[1]!r}: give {', '.join(AXES)}{nearest(found[1], AXES)}")
        sizes[found[1]] = int(found[2])
    open_axes = [name for name, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size > 0)
    if len(open_axes) > 1:
        raise InputError(f"--mesh {text!r} leaves {' and '.join(open_axes)} open: only one of them may be -1")
    if devices % known or (not open_axes and known != devices):
        raise InputError(
            f"--mesh {text!r} makes {known} of {devices} devices: let the lengths multiply to {devices}; one may be -1"
        )
    return {name: devices // known if sizes.get(name) == -1 else sizes.get(name, 1) for name in AXES}


def sizes_for(text: str, devices: int, config: ViTConfig) -> dict[str, int]:
    """Return the lengths of the mesh's axes for a model.

    Raises:
        InputError: as `parse`; heads or hidden units that `tensor` does not divide.
    """
    sizes = parse(text, devices)
    for count, what in ((config.num_heads, "heads"), (config.mlp_dim, "hidden units")):
        if count % sizes["tensor"]:
            raise InputError(
                f"--mesh has tensor={sizes['tensor']}, which does not divide the {count} {what}: give a divisor"
            )
    return sizes


def share_batch(batch_size: int, accumulate: int, sizes: Sizes) -> int:
    """Return how many images a device has of each of the `accumulate` parts of a batch.

    Raises:
        InputError: they do not divide it; the next number that they do is named.
    """
    holders = math.prod(sizes[name] for name in IMAGES)
    parts = holders * accumulate
    if batch_size % parts:
        several = f" times {accumulate} parts (--accumulate)" if accumulate > 1 else ""
        raise InputError(
            f"--batch-size {batch_size} does not divide by {holders} devices that share it{several}: "
            f"give {-(-batch_size // parts) * parts}"
        )
    return batch_size // parts


def parameters(config: ViTConfig, format: str) -> dict[str, Parameter]:
    """Return the parameters of a model by the names of their rows, as a format stores them."""
    known = rows(config)
    return {
        name: Parameter(known[name], tuple(tuple(axis.holder for axis in dim) for dim in layout.dims))
        for name, layout in get(format).layouts(config).items()
    }


def split(parameter: Parameter, config: ViTConfig, sizes: Sizes) -> tuple[Shard, ...]:
    """Return how each dimension of a parameter's array is sharded.

    The entries that a device has are the same in every format.
    """
    axes, found = _axes(parameter.row, config, sizes), []
    for dim in parameter.dims:
        places = [place for place, word in enumerate(dim) if word in axes]
        outer = dim[: places[0]] if places else ()
        found.append(Shard(axes[dim[places[0]]], math.prod(config.sizes[word] for word in outer)) if places else Shard())
    return tuple(found)


def _axes(row: Row, config: ViTConfig, sizes: Sizes) -> dict[str, str]:
    """Return the mesh axis of each axis word that is sharded.

    A mesh axis shards a parameter once, its inputs rather than its outputs, and only where it divides the word's length;
    `fsdp` shards matrices alone.
    """
    found: dict[str, str] = {}
    for word in reversed(row.axes):
        name = RULES.get(word)
        if name is None or name in found.values() or config.sizes[word] % sizes[name]:
            continue
        if row.decays or name != "fsdp":
            found[word] = name
    return found


def replicated(config: ViTConfig, sizes: Sizes) -> str:
    """Return the names of parameters that stay replicated although the mesh should shard them; "" if they are few.

    The axis in question is `fsdp`, or `tensor` where the mesh has no `fsdp`.
    """
    axis = next((name for name in ("fsdp", "tensor") if sizes[name] > 1), "")
    total = sum(row.size for row in rows(config).values())
    whole = {name: row.size / total for name, row in rows(config).items() if axis not in _axes(row, config, sizes).values()}
    if not axis or sum(whole.values()) <= WHOLE:
        return ""
    largest = sorted(whole.items(), key=lambda each: -each[1])[:3]
    names = ", ".join(f"{name} {share:.1%}" for name, share in largest) + ", ..." * (len(whole) > 3)
    return f"{sum(whole.values()):.1%} of the weights are not split by {axis}={sizes[axis]}: {names}"
