"""Tensor parallelism of the PyTorch twin: heads and hidden units are divided among the processes of the axis `tensor`.

The first linear layer of attention or MLP computes a part of its outputs from the whole input; its backward pass sums the
gradients of the input.  The second one has a part of the inputs; its forward pass sums the outputs (Megatron-LM, arXiv
1909.08053).  Between them everything is computed for the heads or hidden units of this process.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from train.mesh import Shard
from vit_torch.layers import Linear
from vit_torch.model import Attention, AttentionPool, Mlp, RelativeBias, ViT


def part_of(entries: Tensor, shard: Shard, dim: int, index: int, count: int) -> Tensor:
    """Return the entries of one process, of a dimension that is divided among `count`."""
    groups = entries.unflatten(dim, (shard.groups, -1))
    return groups.chunk(count, dim + 1)[index].flatten(dim, dim + 1).contiguous()


def whole_of(parts: list[Tensor], shard: Shard, dim: int) -> Tensor:
    """Undo `part_of` for the parts of all processes."""
    return torch.cat([part.unflatten(dim, (shard.groups, -1)) for part in parts], dim + 1).flatten(dim, dim + 1)


def divide(model: ViT, shards: Mapping[str, tuple[Shard, ...]], index: int, group: dist.ProcessGroup) -> None:
    """Divide a model in place.

    Args:
        model: with all of its parameters.
        shards: how the dimensions of each parameter are sharded, by name.
        index: the number of this process in the group.
        group: the processes of the axis `tensor`.
    """
    count = group.size()
    for name, parameter in list(model.named_parameters()):
        for dim, shard in enumerate(shards[name]):
            if shard.axis == "tensor":
                owner, _, own_name = name.rpartition(".")
                entries = part_of(parameter.detach(), shard, dim, index, count)
                setattr(model.get_submodule(owner), own_name, nn.Parameter(entries, parameter.requires_grad))
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        is_divided = {
            child: any(shard.axis == "tensor" for shard in shards.get(f"{prefix}{child}.weight", ()))
            for child, _ in module.named_children()
        }
        for child, axis in _LAYERS.get(type(module), {}).items():
            if is_divided.get(child):
                _divide_layer(getattr(module, child), axis, group)


# The linear layers of each class that are divided: the axis of the outputs that is, or None for the first of the inputs.
_LAYERS: dict[type, dict[str, int | None]] = {
    Attention: {"qkv": 1, "proj": None},
    AttentionPool: {"q": 0, "kv": 1, "proj": None},
    Mlp: {"fc1": -1, "fc2": None},
    RelativeBias: {"fc2": 0},
}


def _divide_layer(layer: Linear, axis: int | None, group: dist.ProcessGroup) -> None:
    """Let a layer whose weights are divided compute with the other processes."""
    count = group.size()
    if axis is None:
        layer.inputs = (layer.inputs[0] // count, *layer.inputs[1:])
        layer.forward = partial(_sum_outputs, layer, group)  # type: ignore[method-assign]
    else:
        sizes = list(layer.outputs)
        sizes[axis] //= count
        layer.outputs = tuple(sizes)
        layer.forward = partial(_sum_gradients, layer, group)  # type: ignore[method-assign]


def _sum_gradients(layer: Linear, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    return Linear.forward(layer, _SumGradients.apply(x, group))


def _sum_outputs(layer: Linear, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    x = x.flatten(-len(layer.inputs))
    y: Tensor = _SumOutputs.apply(F.linear(x, layer.weight.to(x.dtype)), group)
    y = y if layer.bias is None else y + layer.bias.to(x.dtype)
    return y.unflatten(-1, layer.outputs)


class _SumGradients(torch.autograd.Function):
    """The identity, whose gradient is summed over the processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _SumOutputs(torch.autograd.Function):
    """The sum over the processes, each of which has the same gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
