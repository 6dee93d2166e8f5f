"""What a step of `train.torch` really sends and keeps, for one of several processes that need not exist.

    python -m tests.torch_costs

PyTorch's "fake" backend lets one process believe that it is one of eight: collectives return at once and move nothing.  A
dispatch mode sees each of them, with its tensors.  The program prints, as JSON, what was measured and what
`train.torch.memory_estimate` says, for each case: of the collectives, and of the training state.
"""

import json
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import vit_torch
from tests.torch_meshes import CONFIG, MODELS, RECIPE, make_batch, make_engine
from train.mesh import AXES
from train.recipes import OPTIMIZERS, Optimizer
from train.step_cost import Step
from train.torch.engine import TorchEngine
from train.torch.memory_estimate import estimate_memory, update_memory
from train.torch.sharding import local
from vit_spec import ViTConfig

MESHES = ("data=8", "fsdp=8", "tensor=2,data=4", "data=2,fsdp=2,tensor=2", "fsdp=4,data=2")
WAITING = ("wait_tensor", "_wrap_tensor_autograd")
KINDS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
}
NAMES = {
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
    "alltoall_base_": "alltoall",
}


class Collectives(TorchDispatchMode):
    """Adds up the bytes of the arrays that collectives gather or sum, by kind and mesh axis."""

    def __init__(self, engine: TorchEngine) -> None:
        super().__init__()
        self._axes = {tuple(dist.get_process_group_ranks(engine.mesh._group(axis))): axis for axis in AXES}
        self.bytes, self.calls = Counter[tuple[str, str]](), 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function.namespace in ("c10d", "_c10d_functional") and function._opname in NAMES:
            name = NAMES[function._opname]
            whole = args[1] if name == "reduce_scatter" else (out if isinstance(out, Tensor) else args[0])
            self.calls += 1
            if (axis := self._axis(args)) is not None:
                self.bytes[KINDS[name], axis] += _size(whole)
        elif function.namespace in ("c10d", "_c10d_functional") and function._opname not in WAITING:
            raise AssertionError(f"unknown collective {function._opname}")
        return out

    def _axis(self, args: Any) -> str | None:
        """Return the mesh axis whose processes take part, None for one process alone; a sub-mesh has own groups."""
        for each in args:
            if isinstance(each, str) and each not in ("sum", "avg"):
                each = dist.distributed_c10d._resolve_process_group(each)
            elif isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
                each = dist.ProcessGroup.unbox(each)
            if isinstance(each, dist.ProcessGroup):
                return self._axes[tuple(dist.get_process_group_ranks(each))] if each.size() > 1 else None
        raise AssertionError("a collective without a group")


def sum_buckets(engine: TorchEngine) -> None:
    """Let DDP sum its buckets by a hook of Python: the fake backend's futures have no result, which DDP's own needs."""

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        dist.all_reduce(bucket.buffer(), group=group)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    engine._forward.register_comm_hook(engine.mesh._group("data"), hook)


class LiveTensors(TorchDispatchMode):
    """Knows the storages that operations have made, and which of them are still in use."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    @property
    def bytes(self) -> int:
        """Bytes of the storages in use."""
        return sum(size for storage, size in self._made.values() if not storage.expired())


class PeakMemory(LiveTensors):
    """Keeps the largest sum of the storages in use after an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(function, types, args, kwargs)
        self.peak = max(self.peak, self.bytes)
        return out


def kept_bytes(config: ViTConfig, dtype: str, remat: Any, images: int, attention: Any = "fused") -> int:
    """Return the bytes that a forward pass of the twin leaves for the backward pass."""
    execution = vit_torch.Execution(dtype=getattr(torch, dtype), remat=remat, attention=attention)
    model, x = vit_torch.ViT(config, execution).train(), torch.zeros(images, config.in_channels, *config.image_size)
    with LiveTensors() as live:
        logits = model(x, vit_torch.Key(vit_torch.random_key(0)))
    assert logits.requires_grad
    return live.bytes


def kept_bytes_of_a_block(config: ViTConfig, dtype: str, remat: Any) -> int:
    """Return the bytes that a block leaves for each image, without those that it leaves whatever the number of images.

    The products of a single image keep views of queries, keys and values, and those of several images keep copies.
    """
    shallow = config.replace(depth=config.depth - 1)
    both = [[kept_bytes(each, dtype, remat, images) for each in (shallow, config)] for images in (2, 3)]
    (few, with_one_more), (many, with_another) = both
    return (with_another - many) - (with_one_more - few)


def _size(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all in nested lists."""
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_size, tensors))


def state_bytes(engine: TorchEngine) -> dict[str, int]:
    """Return the bytes of the training state and of the gradients on this process."""
    parts = {
        "parameters": list(engine._params.values()),
        "optimizer state": [entries for moments in engine._optimizer.moments.values() for entries in moments],
        "EMA": list((engine.state.ema or {}).values()),
        "gradients": [parameter.grad for parameter in engine._params.values()],
    }
    # A moment that an optimizer does not have for a parameter is a scalar.
    return {name: sum(local(each).nbytes for each in tensors if each.ndim) for name, tensors in parts.items()}


def update_peak(engine: TorchEngine, has_ema: bool) -> int:
    """Return the peak bytes of the temporary tensors of an update, after a step, which has made the gradients."""
    with PeakMemory() as memory:
        _, sound = engine._optimizer.step(1e-3)
        if has_ema:
            engine._update_ema(1, sound)
    return memory.peak


def cases() -> dict[str, dict[str, Any]]:
    """Return the arguments of `make_engine` for each case."""
    plain = {"mesh": "data=2,fsdp=2,tensor=2", "optimizer": Optimizer()}
    found = {f"mesh {mesh}": {**plain, "mesh": mesh} for mesh in MESHES}
    for name in OPTIMIZERS:
        found[name] = {**plain, "optimizer": Optimizer(name=name)}
    for name, changes in MODELS.items():
        found[name] = {**plain, "config": CONFIG.replace(**changes), "rng": "shared"}
    for remat in ("dots", "full"):
        found[f"remat {remat}"] = {**plain, "remat": remat}
        norms, rates = {"layer_scale": 0.1}, {"drop_path": 0.3}
        found[f"layer scale, remat {remat}"] = {**plain, "config": CONFIG.replace(norms=norms), "remat": remat}
        found[f"drop path, remat {remat}"] = {**plain, "config": CONFIG.replace(regularisation=rates), "remat": remat}
        dropout = CONFIG.replace(regularisation={"mlp_drop": 0.2})
        found[f"dropout, remat {remat}"] = {**plain, "config": dropout, "rng": "shared", "remat": remat}
    norms = {"layer_scale": 0.1, "mlp_layer_scale": False}
    found["layer scale of attention, remat full"] = {**plain, "config": CONFIG.replace(norms=norms), "remat": "full"}
    found["bfloat16"] = {**plain, "dtype": "bfloat16"}
    found["bfloat16 and replicated"] = {**plain, "mesh": "data=8", "dtype": "bfloat16"}
    found["one part"] = {**plain, "accumulate": 1}
    for order in ("res_post", "post", "parallel"):
        norms = {"order": order, "layer_scale": 0.1 if order == "parallel" else None}
        found[f"{order} with remat full"] = {**plain, "config": CONFIG.replace(norms=norms), "remat": "full"}
    return found


def main() -> None:
    """Print the measured and the estimated transfers of each case."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    results = {}
    for name, arguments in cases().items():
        options = {"config": CONFIG, **arguments}
        engine = make_engine(**options)
        if isinstance(engine._forward, DistributedDataParallel):
            sum_buckets(engine)
            for n in range(2):  # in the second step, DDP arranges its buckets and broadcasts their order
                engine.step(make_batch(n, engine.batch_rows))
        counted = CommDebugMode()
        with ExitStack() as stack:
            if name == "one part":  # it cannot count two forward passes
                stack.enter_context(counted)
            measured = stack.enter_context(Collectives(engine))
            engine.step(make_batch(2, engine.batch_rows))
        recipe = replace(RECIPE, **{key: value for key, value in arguments.items() if key not in ("config", "mesh")})
        estimate = estimate_memory(options["config"], recipe, engine.mesh.sizes)
        transfers = [
            {" ".join(key): size for key, size in sorted(found.items())} for found in (measured.bytes, estimate.transfers)
        ]
        names = ("parameters", "optimizer state", "EMA", "gradients")
        state = [state_bytes(engine), {name: estimate.memory[name] for name in names}]
        results[name] = {"transfers": transfers, "state": state}
        for ema in (0.0, recipe.ema):
            step = Step.of(options["config"], replace(recipe, ema=ema), engine.mesh.sizes, 4)
            results[name]["update" + " and EMA" * bool(ema)] = [update_peak(engine, bool(ema)), update_memory(step)]
        if name == "one part":
            results["calls"] = {"calls": [measured.calls, counted.get_total_counts()]}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
