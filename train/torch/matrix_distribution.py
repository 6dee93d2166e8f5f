"""The distribution of matrices over the processes of a mesh, for Muon, which computes with whole matrices."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from train.mesh import AXES, sharded_axes
from train.optimizer_state import MATRIX_AXES, distribution
from train.torch.sharding import ProcessMesh
from vit_spec import Row, ViTConfig


class MatrixDistribution:
    """The distribution of the matrices of a row over the processes of a mesh: each gets whole ones.

    Those that are sharded go through an all-to-all for each mesh axis.  Those that are replicated are there already, and
    the results of all processes are gathered.
    """

    def __init__(self, row: Row, config: ViTConfig, mesh: ProcessMesh | None) -> None:
        """Plan the distribution.  mesh: None if the parameters are not sharded."""
        self._count = math.prod(config.sizes[axis] for axis in row.axes if axis not in (*MATRIX_AXES, "block"))
        sizes = dict.fromkeys(AXES, 1) if mesh is None else mesh.sizes
        self._mesh, (self._axes, _) = mesh, distribution(row, config, sizes)
        # The dimension, outputs or inputs, of a matrix that each mesh axis shards
        width, other = (-1, -2) if row.axes[-1] == "width" else (-2, -1)
        self._dims = {name: width if axis == "width" else other for axis, name in sharded_axes(row, config, sizes).items()}

    def matrices(self, tensors: list[Tensor]) -> Tensor:
        """Return the entries of some blocks, (outputs, inputs) each, as (N, outputs of a matrix, inputs)."""
        return torch.stack(tensors).reshape(len(tensors) * self._count, -1, tensors[0].shape[1])

    def scatter(self, x: Tensor) -> Tensor:
        """Distribute matrices: (N, outputs, inputs) on this process to (M, all outputs, all inputs), padded with zeros."""
        if self._mesh is None:
            return x
        lengths = [self._mesh.sizes[name] for name in self._axes]
        x = F.pad(x, (0, 0, 0, 0, 0, -len(x) % math.prod(lengths))).unflatten(0, (*lengths, -1))
        for name in self._axes:
            if name in self._dims:
                x = torch.cat(self._mesh.all_to_all(x.unbind(), name), self._dims[name])
            else:
                x = x[self._mesh.index_along(name)]
        return x

    def gather(self, x: Tensor, blocks: int) -> Tensor:
        """Undo `scatter` of the matrices of this number of blocks."""
        if self._mesh is None:
            return x
        for name in reversed(self._axes):
            if name in self._dims:
                x = torch.stack(self._mesh.all_to_all(x.chunk(self._mesh.sizes[name], self._dims[name]), name))
            else:
                x = torch.stack(self._mesh.all_gather(x, name))
        return x.flatten(0, -3)[: blocks * self._count]
