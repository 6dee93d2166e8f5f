"""Sharding of the JAX twin over a mesh of devices: the rules of `train.mesh` as `NamedSharding`s.

The model contains no sharding.  `constrain_modules` intercepts the calls of its modules and constrains their parameters
and outputs from outside.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from train.jax.parameter_tree import Tree, mesh_axes, tree
from train.mesh import AXES, BATCH_AXES, axis_sizes
from vit_jax.layers import ViTModule
from vit_spec import ViTConfig

# The shardings of outputs that are sharded along `tensor` too, by module: activations (B, T, ...) with an axis of heads.
HEADS = PartitionSpec(BATCH_AXES, None, None, "tensor", None)
OUTPUT_SPECS = {
    "qkv": HEADS,
    "kv": HEADS,
    **dict.fromkeys(("q", "q_norm", "k_norm"), PartitionSpec(BATCH_AXES, None, "tensor", None)),
}


def make_mesh(text: str, config: ViTConfig) -> Mesh:
    """Return the mesh of all devices that `--mesh` describes.

    Raises:
        InputError: as `train.mesh.axis_sizes`.
    """
    sizes = axis_sizes(text, jax.device_count(), config)
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def parameter_shardings(mesh: Mesh, config: ViTConfig) -> Tree:
    """Return the NamedSharding of each parameter."""
    return tree(config, lambda parameter: NamedSharding(mesh, PartitionSpec(*mesh_axes(parameter, config, mesh.shape))))


def shardings_like_parameters(state: Tree, known: Tree) -> Tree:
    """Return the sharding of each array of a state: that of the parameter with the same path and shape, else replicated.

    state: a pytree of shapes, such as an optimizer state, that contains pytrees with the structure of the parameters.
    known: a pytree of (shape, NamedSharding), one for each parameter.
    """
    leaves = jax.tree_util.tree_leaves_with_path(known, is_leaf=lambda node: isinstance(node, tuple))
    by_path = {_path_names(path): placed for path, placed in leaves}
    mesh = leaves[0][1][1].mesh

    def sharding_of(path: Any, leaf: Any) -> NamedSharding:
        names = _path_names(path)
        for first in range(len(names)):
            shape, sharding = by_path.get(names[first:], ((), None))
            if sharding is not None and shape == leaf.shape:
                return sharding
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding_of, state)


def _path_names(path: Any) -> tuple[str, ...]:
    return tuple(str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", "")))) for entry in path)


def place(values: Tree, shardings: Any) -> Tree:
    """Return host arrays, which all processes have, as global arrays; each process copies the entries of its devices.

    `jax.device_put` would gather each array from every process first, to compare them.

    Args:
        values: a pytree of arrays on the host.
        shardings: a pytree of the same structure, or one sharding for all.
    """

    def put(value: Any, sharding: NamedSharding) -> Array:
        array = np.asarray(value)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda value: put(value, shardings), values)
    return jax.tree.map(put, values, shardings)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch: the first axis along `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def process_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Return the indices of the images of a batch that this process loads, (B of this process,): those of its devices."""
    slices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    ranges = {(rows[0].start or 0, batch_size if rows[0].stop is None else rows[0].stop) for rows in slices if rows}
    return np.concatenate([np.arange(*each) for each in sorted(ranges)])


@contextmanager
def constrain_modules(mesh: Mesh, config: ViTConfig, remat: str) -> Iterator[None]:
    """Constrain the sharding of the parameters and outputs of the model's modules while the context is entered.

    Outputs are sharded by image, and by head or hidden unit where `_output_spec` says so.  Parameters outside of the blocks
    are all-gathered along `fsdp` in their own dtype; without the constraint, the compiler may first reshard them to another
    axis.  So are parameters of blocks that are recomputed (`remat`); without the constraint, the compiler may gather them
    twice in the backward pass.  It gathers those of other blocks where they are used, once in the forward and once in the
    backward pass.  With a constraint there, a gathered copy of every block would stay in memory.
    """
    if mesh.size == 1:
        yield
        return
    shardings = parameter_shardings(mesh, config)

    def constrain(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        value, module = call(*args, **kwargs), context.module
        if not isinstance(module, ViTModule):
            return value
        if context.method_name == "declare":
            sharding = _at_path(shardings, (*module.path, *args[:1]))
            if module.path[:1] != ("blocks",):
                return _all_gather(value, sharding)
            return value if remat == "none" else _all_gather_of_block(value, sharding)
        if context.method_name == "__call__":
            spec = partial(_output_spec, module)
            return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(x))), value)
        return value

    with nn.intercept_methods(constrain):
        yield


def _at_path(shardings: Tree, path: tuple[str, ...]) -> NamedSharding:
    for name in path:
        shardings = shardings[name]
    return shardings


def _all_gather(value: Array, sharding: NamedSharding) -> Array:
    """Gather a parameter along `fsdp`."""
    value = jax.lax.with_sharding_constraint(value, sharding)
    gathered = PartitionSpec(*(None if name == "fsdp" else name for name in sharding.spec))
    return jax.lax.with_sharding_constraint(value, NamedSharding(sharding.mesh, gathered))


def _all_gather_of_block(value: Array, stacked: NamedSharding) -> Array:
    """Gather a parameter of one block along `fsdp`, and shard its gradient as the parameter.

    Without a rule of its own, the gradient would be sharded as the gathered parameter, and all of it all-reduced.

    stacked: the sharding of the parameters of all blocks.
    """
    sharding = NamedSharding(stacked.mesh, PartitionSpec(*stacked.spec[1:]))

    @jax.custom_vjp
    def gather(value: Array) -> Array:
        return _all_gather(value, sharding)

    gather.defvjp(
        lambda value: (_all_gather(value, sharding), None),
        lambda _, gradient: (jax.lax.with_sharding_constraint(gradient, sharding),),
    )
    return gather(value)


def _output_spec(module: ViTModule, x: Array) -> PartitionSpec:
    """Return the sharding of an output of a module."""
    if module.name == "fc1":
        return PartitionSpec(BATCH_AXES, *(None,) * (x.ndim - 2), "tensor")
    return OUTPUT_SPECS.get(module.name or "", PartitionSpec(BATCH_AXES))
