"""What a mesh of devices is, and what of each parameter a device holds: rules from axis words, without a framework.

The mesh has three axes.  Images are split over `data` and `fsdp`; matrices, and all that an optimizer keeps for them, over
`fsdp` by their width (arXiv 1910.02054) and over `tensor` by heads and hidden units (arXiv 1909.08053).  Norms, biases,
tokens and tables, a hundredth of a model, are whole along `fsdp`: to fetch them would take more messages than the matrices.
A rule speaks of an axis word of `vit_spec.rows`, so every parameter has its place as soon as it has its name.
"""

import math
import re
from collections.abc import Mapping

from train.jax.trees import Leaf, tree
from vit_spec import InputError, ViTConfig, nearest

AXES = ("data", "fsdp", "tensor")
IMAGES = ("data", "fsdp")  # what a batch is split over
RULES = {"width": "fsdp", "pooled": "fsdp", "feature": "fsdp", "head": "tensor", "ff": "tensor"}

WHOLE = 0.02  # of all parameters: more than this on every device of a mesh that splits them is worth a word

Sizes = Mapping[str, int]  # how long each axis is


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


def split(leaf: Leaf, config: ViTConfig, sizes: Sizes) -> tuple[str | None, ...]:
    """Return the mesh axis that each dimension of a parameter's array is split over.

    An axis splits an array once, and only where it divides the word's length; `fsdp` splits matrices alone.
    """
    taken: list[str | None] = []
    for word in leaf.axes:
        name = RULES.get(word)
        fits = name is not None and name not in taken and config.sizes[word] % sizes[name] == 0
        taken.append(name if fits and (leaf.row.decays or name != "fsdp") else None)
    return tuple(taken)


def unsplit(config: ViTConfig, sizes: Sizes) -> str:
    """Say which parameters lie whole along the axis that is to split them, `fsdp` or else `tensor`; "" where few do."""
    axis = next((name for name in ("fsdp", "tensor") if sizes[name] > 1), "")
    leaves: list[Leaf] = []
    tree(config, leaves.append)
    total = sum(leaf.row.size for leaf in leaves)
    kept = {leaf.row.name: leaf.row.size / total for leaf in leaves if axis not in split(leaf, config, sizes)}
    if not axis or sum(kept.values()) <= WHOLE:
        return ""
    largest = sorted(kept.items(), key=lambda each: -each[1])[:3]
    names = ", ".join(f"{name} {share:.1%}" for name, share in largest) + ", ..." * (len(kept) > 3)
    return f"{sum(kept.values()):.1%} of the weights are not split by {axis}={sizes[axis]}: {names}"
