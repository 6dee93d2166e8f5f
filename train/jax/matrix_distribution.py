"""The distribution of matrices over the devices of a mesh, for Muon, which computes with whole matrices."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.jax.parameter_tree import mesh_axes
from train.mesh import AXES, Parameter
from train.optimizer_state import MATRIX_AXES, distribution
from vit_spec import ViTConfig


@dataclass(frozen=True)
class Distribution:
    """The distribution of the matrices in an array over the devices of a mesh: each device gets whole matrices.

    order: a permutation of the axes of the array: those that index matrices, then inputs, then outputs.
    shape: the lengths of the axes in that order.
    index_axes, input_axes: the number of axes that index matrices, and the number of input axes.
    devices: the length of each mesh axis over which the matrices are distributed.
    per_device: the number of matrices of each device.
    shardings: the successive shardings of the array (*devices, per_device, *inputs, *outputs).  Each moves one mesh axis
        from an axis of the matrices to that mesh axis's own axis in `devices`.
    """

    order: tuple[int, ...]
    shape: tuple[int, ...]
    index_axes: int
    input_axes: int
    devices: tuple[int, ...]
    per_device: int
    shardings: tuple[NamedSharding, ...]

    @property
    def _matrix_axes(self) -> tuple[int, ...]:
        return self.shape[self.index_axes :]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The numbers of inputs and of outputs of a matrix."""
        return math.prod(self._matrix_axes[: self.input_axes]), math.prod(self._matrix_axes[self.input_axes :])

    def scatter(self, x: Array) -> Array:
        """Distribute an array of the parameter's shape: (devices * per_device, inputs, outputs), padded with zeros."""
        x = x.transpose(self.order).reshape(-1, *self._matrix_axes)
        padding = math.prod(self.devices) * self.per_device - len(x)
        x = jnp.pad(x, ((0, padding), *((0, 0),) * len(self._matrix_axes))).reshape(
            *self.devices, self.per_device, *self._matrix_axes
        )
        for sharding in self.shardings:
            x = jax.lax.with_sharding_constraint(x, sharding)
        return x.reshape(-1, *self.matrix_shape)

    def gather(self, x: Array) -> Array:
        """Undo `scatter`."""
        x = x.reshape(*self.devices, self.per_device, *self._matrix_axes)
        for sharding in reversed(self.shardings):
            x = jax.lax.with_sharding_constraint(x, sharding)
        x = x.reshape(-1, *self._matrix_axes)[: math.prod(self.shape[: self.index_axes])]
        return x.reshape(self.shape).transpose(np.argsort(self.order))


def distribute(parameter: Parameter, config: ViTConfig, mesh: Mesh | None) -> Distribution:
    """Return the distribution of a parameter's matrices: see `train.optimizer_state.matrix_size`."""
    inner = tuple(i for i, word in enumerate(parameter.axes) if word in MATRIX_AXES and word != "width")
    width = (parameter.axes.index("width"),)
    inputs, outputs = (width, inner) if parameter.row.axes[-1] == "width" else (inner, width)
    index = tuple(i for i in range(len(parameter.axes)) if i not in inner + width)
    order = index + inputs + outputs
    shape = tuple(config.sizes[parameter.axes[i]] for i in order)
    sizes = mesh.shape if mesh is not None else dict.fromkeys(AXES, 1)
    names, per_device = distribution(parameter.row, config, sizes)
    shardings = []
    if mesh is not None and names:
        used = mesh_axes(parameter, config, sizes)
        spec: list[str | None] = [*(None for _ in names), None, *(used[i] for i in inputs + outputs)]
        shardings.append(NamedSharding(mesh, PartitionSpec(*spec)))
        for axis, name in enumerate(names):
            spec = [None if other == name else other for other in spec]
            spec[axis] = name
            shardings.append(NamedSharding(mesh, PartitionSpec(*spec)))
    devices = tuple(sizes[name] for name in names)
    return Distribution(order, shape, len(index), len(inputs), devices, per_device, tuple(shardings))
