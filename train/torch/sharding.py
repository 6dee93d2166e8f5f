"""The processes of a PyTorch run as a mesh, with one device each, and the sharding rules of `train.mesh` as DTensors.

Batches are divided among the processes of the mesh axes `data` and `fsdp`.  Along `fsdp` the matrices are sharded by width,
by FSDP2 (`fully_shard`), which gathers a block before it runs; along `tensor` heads and hidden units are divided, see
`train.torch.tensor_parallel`; along `data` all parameters are replicated.  The model contains nothing of this.

Queries, keys and values are one matrix, of which a process of the axis `tensor` has a part of each.  DTensor has no public
placement for that, so it describes the other two axes only.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import vit_torch
from train.mesh import AXES, BATCH_AXES, axis_sizes, is_shared_by_heads, shard_dims, sharded_axes
from train.mesh import Shard as MeshShard
from train.torch import tensor_parallel
from train.torch.parameter_tree import tree
from vit_spec import Row, ViTConfig, rows


class ProcessMesh:
    """The processes of a run, as a mesh with the axes of `train.mesh`.

    Attributes:
        sizes: the length of each axis.
        device: the device of this process.
        index, count: the number of this process among those that divide a batch, and how many these are.
        tensor_index: the number of this process among those that divide heads and hidden units.
        is_main: whether this is the main process.
    """

    def __init__(self, text: str, config: ViTConfig) -> None:
        """Arrange the processes as `--mesh` says.

        Raises:
            InputError: as `train.mesh.axis_sizes`.
        """
        num_processes = dist.get_world_size() if dist.is_initialized() else 1
        self.sizes = axis_sizes(text, num_processes, config)
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        process = dist.get_rank() if num_processes > 1 else 0
        self.count, self.is_main = num_processes // self.sizes["tensor"], process == 0
        self.index, self.tensor_index = divmod(process, self.sizes["tensor"])
        self._mesh: DeviceMesh | None = None
        if num_processes > 1:
            self._mesh = _device_mesh(self.device.type, tuple(self.sizes.values()), dist.group.WORLD)
        self._config = config
        # The ends of their names: the wrapper of a model or of a block adds a word before them.
        shared = (row.name.removeprefix("blocks.") for row in rows(config).values() if is_shared_by_heads(row))
        self._shared_by_heads = tuple(f".{name}" for name in shared)
        self._shards = tree(config, lambda each: shard_dims(each.parameter, config, self.sizes))

    def _group(self, axis: str) -> dist.ProcessGroup:
        assert self._mesh is not None
        return self._mesh.get_group(axis)

    def rows(self, batch_size: int) -> np.ndarray:
        """Return the indices of the images of a batch that this process loads, (B of this process,)."""
        local_size = batch_size // self.count
        return np.arange(self.index * local_size, (self.index + 1) * local_size)

    def distribute(self, model: vit_torch.ViT, dtype: torch.dtype | None) -> nn.Module:
        """Shard the parameters of a model in place, and return the module to call in a training step.

        dtype: that of activations; matrices are gathered in it.  None: that of the parameters.
        """
        if self.sizes["tensor"] > 1:
            tensor_parallel.divide(model, self._shards, self.tensor_index, self._group("tensor"))
        if self.sizes["fsdp"] == 1:
            model.to(self.device)
            if self._mesh is None or not any(parameter.requires_grad for parameter in model.parameters()):
                return model
            return DistributedDataParallel(model, process_group=self._group("data"), gradient_as_bucket_view=True)
        assert self._mesh is not None
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nothing changes it in place
        parameters = dict(model.named_parameters())
        dims = {parameter: _sharded_dim(self._shards[name], "fsdp") for name, parameter in parameters.items()}
        ignored = {parameter for parameter, dim in dims.items() if dim is None}
        for parameter in ignored:  # FSDP2 moves the others to the device when they are sharded
            parameter.data = parameter.data.to(self.device)
        options: dict[str, Any] = {
            "mesh": self._mesh[BATCH_AXES],
            "shard_placement_fn": lambda parameter: Shard(dims[parameter] or 0),
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
            if dtype is not None
            else MixedPrecisionPolicy(cast_forward_inputs=False),
            "ignored_params": ignored,
        }
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        return model

    def synchronize(self) -> None:
        """Wait until all processes have called this method."""
        if self._mesh is not None:
            dist.barrier()

    def from_main(self, value: Any) -> Any:
        """Return the value that the first process gives; every process calls it."""
        values = [value]
        if self._mesh is not None:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def reshard(self, model: nn.Module) -> None:
        """Free what a forward pass without a backward pass has gathered.

        FSDP2 leaves the parameters outside of the blocks gathered until the backward pass.  The next forward pass would
        compute with them, whatever the shards are by then.
        """
        if isinstance(model, FSDPModule):
            model.reshard()

    @contextmanager
    def gradients(self, forward: nn.Module, *, is_last: bool) -> Iterator[None]:
        """A context for the forward and the backward pass of one part of a batch.

        After the last part, each gradient is the mean over the processes of the sum over the parts.
        """
        if isinstance(forward, FSDPModule):
            forward.set_requires_gradient_sync(is_last)
        if isinstance(forward, DistributedDataParallel) and not is_last:
            with forward.no_sync():
                yield
            return
        yield
        if isinstance(forward, FSDPModule) and is_last:
            replicated = [each.grad for each in forward.parameters() if not isinstance(each, DTensor)]
            self._average([grad for grad in replicated if grad is not None])
        if self.sizes["tensor"] > 1 and is_last:
            shared = [p.grad for name, p in forward.named_parameters() if name.endswith(self._shared_by_heads)]
            for gradient in (grad for grad in shared if grad is not None):
                dist.all_reduce(gradient, group=self._group("tensor"))

    @torch.no_grad()
    def _sum(self, tensors: Sequence[Tensor], axes: Sequence[str]) -> None:
        """Replace tensors by their sums over the processes along some axes, in one collective for each axis."""
        axes = [axis for axis in axes if self.sizes[axis] > 1]
        if tensors and axes:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            for axis in axes:
                dist.all_reduce(flat, group=self._group(axis))
            sums = flat.split([tensor.numel() for tensor in tensors])
            torch._foreach_copy_(list(tensors), [each.view_as(tensor) for each, tensor in zip(sums, tensors, strict=True)])

    @torch.no_grad()
    def _average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over the processes that divide a batch."""
        if tensors:
            self._sum(tensors, BATCH_AXES)
            torch._foreach_div_(list(tensors), self.count)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a tensor over all processes."""
        if self.count > 1:
            value = value.clone()
            self._average([value])
        return value

    def gather_rows(self, local: Tensor) -> Tensor:
        """Return the rows of all processes, (B, ...), in the order of the batch, on the device of `local`."""
        for axis in reversed(BATCH_AXES):
            if self.sizes[axis] > 1:
                local = torch.cat(self.all_gather(local, axis))
        return local

    def index_along(self, axis: str) -> int:
        """Return the number of this process among those along an axis."""
        return 0 if self._mesh is None else self._mesh.get_local_rank(axis)

    def all_gather(self, tensor: Tensor, axis: str) -> list[Tensor]:
        """Return the tensors of all processes along an axis, which have the same shape."""
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.sizes[axis])]
        dist.all_gather(parts, tensor.contiguous(), group=self._group(axis))
        return parts

    def all_to_all(self, tensors: Sequence[Tensor], axis: str) -> tuple[Tensor, ...]:
        """Send the n-th tensor to the n-th process along an axis; return what each of them sent.  All have one shape."""
        sent = torch.stack(list(tensors))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group(axis))
        return received.unbind()

    def part_of(self, row: Row) -> tuple[slice, ...]:
        """Return the indices of the entries on this process along each axis of a row, except that of the blocks."""
        by_axis = sharded_axes(row, self._config, self.sizes)
        found = []
        for axis in row.axes[row.axes[0] == "block" :]:
            name = by_axis.get(axis)
            length = self._config.sizes[axis] // (self.sizes[name] if name else 1)
            start = length * (self.index_along(name) if name else 0)
            found.append(slice(start, start + length))
        return tuple(found)

    def roll(self, local: Tensor, shift: int) -> Tensor:
        """Return the rows of this process of the whole batch, rolled along its first axis."""
        if self.count == 1:
            return local.roll(shift, 0)
        if shift >= len(local):
            return self.gather_rows(local).roll(shift, 0)[self.index * len(local) : (self.index + 1) * len(local)]
        tails = self.gather_rows(local[len(local) - shift :])
        before = (self.index - 1) % self.count
        return torch.cat([tails[before * shift : (before + 1) * shift], local[: len(local) - shift]])

    def placement(self, name: str, parameter: Tensor) -> "Placement":
        """Return where the entries of a parameter are, which `distribute` has sharded."""
        dim = _sharded_dim(self._shards[name], "tensor")
        if dim is None or self.sizes["tensor"] == 1:
            return Placement(parameter)
        return Placement(parameter, dim, self._shards[name][dim], self.tensor_index, self._group("tensor"))

    def sum_shards(self, tensors: Sequence[Tensor], placements: Sequence["Placement"]) -> None:
        """Replace sums over the entries of parameters on this process by the sums over all their shards.

        tensors: one for each parameter, with one shape in all processes.
        placements: those of the parameters.
        """
        for axis in ("fsdp", "tensor"):
            self._sum([each for each, place in zip(tensors, placements, strict=True) if axis in place.axes], [axis])


@cache
def _device_mesh(device_type: str, sizes: tuple[int, ...], processes: dist.ProcessGroup | None) -> DeviceMesh:
    """Return the mesh of all processes, one for all engines: its groups have threads for as long as the process runs.

    processes: the default group, which is another one if `torch.distributed` is initialized again.
    """
    return init_device_mesh(device_type, sizes, mesh_dim_names=AXES)


@dataclass(frozen=True)
class Placement:
    """Where the entries of a parameter are, and of the tensors that are sharded as it is.

    parameter: the entries of this process of the axis `tensor`; a DTensor if `fsdp` shards them.
    dim, shard: the dimension that is divided along `tensor`, and how; None if there is none.
    index, group: the number of this process along `tensor`, and the processes along it.
    """

    parameter: Tensor
    dim: int | None = None
    shard: MeshShard | None = None
    index: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def entries(self) -> Tensor:
        """The entries of the parameter on this process."""
        return local(self.parameter)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that shard the parameter."""
        return ("fsdp",) * isinstance(self.parameter, DTensor) + ("tensor",) * (self.dim is not None)

    def gather(self, entries: Tensor) -> Tensor:
        """Return the entries of all processes along `tensor`.

        entries: those on this process; any tensor without the shape of the parameter's is the same in all processes.
        """
        if not self._is_of(entries) or self.dim is None or self.shard is None or self.group is None:
            return entries
        parts = [torch.empty_like(entries) for _ in range(self.group.size())]
        dist.all_gather(parts, entries.contiguous(), group=self.group)
        return tensor_parallel.whole_of(parts, self.shard, self.dim)

    def _is_of(self, entries: Tensor) -> bool:
        """Whether entries on this process are those of a tensor that is sharded as the parameter is."""
        return entries.shape == self.entries.shape

    def copy_to_host(self, entries: Tensor) -> Tensor:
        """Return a copy of what `gather` returns, on the CPU, as a DTensor if `fsdp` shards it."""
        copied = self.gather(entries).to("cpu", copy=True)
        return on_host(copied, self.parameter) if self._is_of(entries) else copied

    def empty_on_host(self, entries: Tensor) -> Tensor:
        """Return uninitialized memory for what `copy_to_host` returns; no process waits for another one."""
        sizes = list(entries.shape)
        if self._is_of(entries) and self.dim is not None and self.group is not None:
            sizes[self.dim] *= self.group.size()
        empty = torch.empty(sizes, dtype=entries.dtype, device="cpu")
        return on_host(empty, self.parameter) if self._is_of(entries) else empty

    def part(self, entries: Tensor) -> Tensor:
        """Return the entries of this process along `tensor`, from those of all processes along it."""
        if self.dim is None or self.shard is None or self.group is None:
            return entries
        return tensor_parallel.part_of(entries, self.shard, self.dim, self.index, self.group.size())

    def own(self, whole: Tensor) -> Tensor:
        """Return the entries of this process, from all entries of a tensor."""
        part = self.part(whole.to(self.entries.device))
        if not isinstance(self.parameter, DTensor):
            return part
        mesh, placements = self.parameter.device_mesh, self.parameter.placements
        return local(distribute_tensor(part, mesh, placements, src_data_rank=None))

    def full(self, entries: Tensor) -> Tensor:
        """Return all entries of a tensor, from those on this process."""
        whole = self.gather(entries)
        if not isinstance(self.parameter, DTensor) or not self._is_of(entries):
            return whole
        mesh, placements = self.parameter.device_mesh, self.parameter.placements
        return DTensor.from_local(whole, mesh, placements, run_check=False).full_tensor()


def _sharded_dim(shards: Iterable[MeshShard], axis: str) -> int | None:
    """Return the dimension that is sharded along a mesh axis; None if there is none."""
    return next((dim for dim, shard in enumerate(shards) if shard.axis == axis), None)


def local(tensor: Tensor) -> Tensor:
    """Return the entries of a tensor on this process, which share its memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()


def on_host(entries: Tensor, like: Tensor) -> Tensor:
    """Return entries on the CPU, of a tensor that is sharded as `like`, as that tensor: a DTensor if `like` is one."""
    if not isinstance(like, DTensor):
        return entries
    mesh = like.device_mesh  # to whose devices `from_local` would move the entries
    names = mesh.mesh_dim_names
    host_mesh = DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh.mesh, mesh_dim_names=names)
    return DTensor.from_local(entries, host_mesh, like.placements, run_check=False)
