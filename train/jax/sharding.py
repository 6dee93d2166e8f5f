"""Where the functional twin's numbers lie on a mesh of devices: the rules of `train.mesh` as shardings.

The model knows nothing of it: what its modules hold and give is held to its place from outside, as they are called.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from train.jax.parameter_tree import mesh_axes, tree
from train.mesh import AXES, IMAGES, sizes_for
from vit_jax.layers import Part
from vit_spec import InputError, ViTConfig

Tree = Any

# What modules give, where that is split by more than images: tokens (B, T, ...) before heads and hidden units are summed.
HEADS = PartitionSpec(IMAGES, None, None, "tensor", None)
SPLIT = {
    "qkv": HEADS,
    "kv": HEADS,
    **dict.fromkeys(("q", "q_norm", "k_norm"), PartitionSpec(IMAGES, None, "tensor", None)),
}


def join_cluster() -> None:
    """Become one of several processes, where the environment says that there are: jax finds Slurm, MPI, TPU pods itself.

    Elsewhere JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say it.

    Raises:
        InputError: one of these three without the others, or no number.
    """
    env = os.environ
    several = any(int(env.get(name, "1") or 1) > 1 for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"))
    if "JAX_COORDINATOR_ADDRESS" in env:
        try:
            count, own = (int(env[name]) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        except (KeyError, ValueError):
            raise InputError(
                "JAX_COORDINATOR_ADDRESS is set: give JAX_NUM_PROCESSES and JAX_PROCESS_ID beside it, numbers both"
            ) from None
        jax.distributed.initialize(env["JAX_COORDINATOR_ADDRESS"], count, own)
    elif several or "," in env.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in env:
        jax.distributed.initialize()


def make(text: str, config: ViTConfig) -> Mesh:
    """Return the mesh of all devices that the text asks for.

    Raises:
        InputError: as `train.mesh.sizes_for`.
    """
    sizes = sizes_for(text, jax.device_count(), config)
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def described(mesh: Mesh) -> str:
    """The mesh in words: "data=2, fsdp=4 (8 x NVIDIA H100)"."""
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1) or "1 device"
    return f"{sizes} ({f'{mesh.size} x ' if mesh.size > 1 else ''}{mesh.devices.flat[0].device_kind})"


def parameters(mesh: Mesh, config: ViTConfig) -> Tree:
    """Return where each parameter lies, a NamedSharding each."""
    return tree(config, lambda parameter: NamedSharding(mesh, PartitionSpec(*mesh_axes(parameter, config, mesh.shape))))


def like_parameters(state: Tree, places: Tree) -> Tree:
    """Return where the parts of a state lie: beside the parameter whose path and shape they have, or else whole.

    state: shapes, such as those of an optimizer's state, holding trees in the form of the parameters.
    places: (shape, NamedSharding) of each parameter, in a tree.
    """
    leaves = jax.tree_util.tree_leaves_with_path(places, is_leaf=lambda node: isinstance(node, tuple))
    known = {_words(path): place for path, place in leaves}
    mesh = leaves[0][1][1].mesh

    def place(path: Any, leaf: Any) -> NamedSharding:
        words = _words(path)
        for first in range(len(words)):
            shape, sharding = known.get(words[first:], ((), None))
            if sharding is not None and shape == leaf.shape:
                return sharding
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(place, state)


def _words(path: Any) -> tuple[str, ...]:
    return tuple(str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", "")))) for entry in path)


def images(mesh: Mesh) -> NamedSharding:
    """Where a batch lies: images, and all that there is one of for each, along `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(IMAGES))


def rows_here(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Return which images of a batch this process feeds: those of its own devices, (B here,), in their order."""
    found = images(mesh).addressable_devices_indices_map((batch_size,)).values()
    places = {(part[0].start or 0, batch_size if part[0].stop is None else part[0].stop) for part in found if part}
    return np.concatenate([np.arange(*place) for place in sorted(places)])


@contextmanager
def held(mesh: Mesh, config: ViTConfig) -> Iterator[None]:
    """While entered, what the model's modules hold and give is held to its place.

    What they give: images apart, and heads and hidden units too.  What they hold outside of the blocks is fetched from the
    devices along `fsdp` as it is, in its own type; left alone, the compiler may first carry it to another axis.  That of a
    block is fetched where it is used, once forward and once back: a fetched copy of every block would be kept otherwise.
    """
    if mesh.size == 1:
        yield
        return
    places = parameters(mesh, config)

    def hold(call: Callable[..., Any], arguments: Any, options: Any, context: Any) -> Any:
        value, module = call(*arguments, **options), context.module
        if not isinstance(module, Part):
            return value
        if context.method_name == "declare" and module.path[:1] != ("blocks",):
            return _fetched(value, _at(places, (*module.path, *arguments[:1])))
        if context.method_name == "__call__":
            return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, _spec(module, x))), value)
        return value

    with nn.intercept_methods(hold):
        yield


def _at(places: Tree, path: tuple[str, ...]) -> NamedSharding:
    for word in path:
        places = places[word]
    return places


def _fetched(value: Array, place: NamedSharding) -> Array:
    """A parameter with all its parts along `fsdp`."""
    value = jax.lax.with_sharding_constraint(value, place)
    here = PartitionSpec(*(None if name == "fsdp" else name for name in place.spec))
    return jax.lax.with_sharding_constraint(value, NamedSharding(place.mesh, here))


def _spec(module: Part, x: Array) -> PartitionSpec:
    """How what a module gives is split."""
    if module.name == "fc1":
        return PartitionSpec(IMAGES, *(None,) * (x.ndim - 2), "tensor")
    return SPLIT.get(module.name or "", PartitionSpec(IMAGES))
