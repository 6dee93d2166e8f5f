"""The graph of the operations of a PyTorch module."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from parity.checkpoints.arrays import as_array
from parity.comparison.any_model.trace.graph import CONSTANT, IDENTITY, INPUTS, WEIGHTS, Graph
from parity.comparison.any_model.trace.places import Stack, current_stack
from parity.comparison.any_model.trace.torch_float64 import all_in_float64, module_scopes

# Operations that are recorded as the simpler ones that they consist of, for which JAX has no single operation.
_DECOMPOSED = (
    "native_layer_norm",
    "native_group_norm",
    "_native_batch_norm_legit_no_training",
    "native_batch_norm",
    "addmm",
    "baddbmm",
)


def record_torch(
    module: Any, inputs: Sequence[Any], outputs_of: Any, exact: bool = True, constants: frozenset[str] = frozenset()
) -> Graph:
    """Return the graph of a module; the module itself is called, so it must be a copy.

    inputs: the arguments of the call.
    outputs_of: a function that returns the tensors in the return value of the module, in order.
    exact: whether all parts are computed in float64.
    constants: keys of parameters without a counterpart in the other model.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    graph = Graph(".")
    recorder = _make_recorder(graph)
    for key, tensor in module.named_parameters():
        recorder.add_source(tensor, CONSTANT if key in constants else WEIGHTS)
    for tensor in module.buffers():
        recorder.add_source(tensor, CONSTANT)
    for tensor in inputs:
        recorder.add_source(tensor, INPUTS)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(torch.no_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if exact:
            stack.enter_context(all_in_float64(module, []))
        recorder.scopes = stack.enter_context(module_scopes(module, recorder.pass_through))
        with recorder:
            returned = module(*inputs)
        graph.outputs = [recorder.value_of(tensor) for tensor in outputs_of(returned)]
    return graph


def _make_recorder(graph: Graph) -> Any:
    """Return a dispatch mode that adds every operation to a graph."""
    import torch
    from torch._decomp import get_decompositions
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.weak import WeakTensorKeyDictionary

    aten = torch.ops.aten
    decompositions = get_decompositions([getattr(aten, name) for name in _DECOMPOSED if hasattr(aten, name)])

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        scopes: Any = None

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self._stack: Stack = ()  # of an operation that is being decomposed
            self._values: Any = WeakTensorKeyDictionary()  # tensor -> index of its value
            self._written: dict[int, int] = {}  # address of a storage -> the last value written to it in place

        def add_source(self, tensor: Any, source: int) -> int:
            self._values[tensor] = n = graph.add_source(_host(tensor), source)
            return n

        def pass_through(self, path: str, given: Any, returned: Any) -> None:
            """Record the call of a module that returns what it is given."""
            if isinstance(returned, torch.Tensor) and any(each is returned for each in given):
                n = self.value_of(returned)
                stack = current_stack()
                [self._values[returned]] = graph.add(IDENTITY, path, stack, [n], [_host(returned)])

        def value_of(self, tensor: Any) -> int:
            """Return the index of the value of a tensor, which may have been changed in place through a view."""
            n: int | None = self._values.get(tensor)
            if n is None:
                if tensor.ndim == 0 and tensor.dtype == torch.float64:  # as PyTorch makes of numbers
                    graph.numbers.add(float(tensor))
                return self.add_source(tensor, CONSTANT)
            written = self._written.get(_storage(tensor), -1)
            if written > n:
                operation = graph.operations[graph.values[written].operation]
                [n] = graph.add(operation.name, operation.module, operation.stack, (n, written), [_host(tensor)])
                self._values[tensor] = n
            return n

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func in decompositions:
                stack, self._stack = self._stack, self._stack or current_stack()
                try:
                    with self:
                        return decompositions[func](*args, **kwargs)
                finally:
                    self._stack = stack
            given = tree_leaves((args, kwargs))
            graph.numbers |= {each for each in given if isinstance(each, float)}
            inputs = [self.value_of(each) for each in given if isinstance(each, torch.Tensor)]
            returned = func(*args, **kwargs)
            tensors = [each for each in tree_leaves(returned) if isinstance(each, torch.Tensor)]
            name = func._schema.name.partition("::")[2]
            arrays = [_host(each) for each in tensors]
            outputs = graph.add(name, self.scopes.current, self._stack or current_stack(), inputs, arrays)
            for tensor, n in zip(tensors, outputs, strict=True):
                self._values[tensor] = n
                if func._schema.is_mutable:
                    self._written[_storage(tensor)] = n
            return returned

    return Recorder()


def _storage(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return -1


def _host(tensor: Any) -> Any:
    """Return a tensor as an array of NumPy; a copy, because a later operation may change the tensor in place."""
    import torch

    try:
        return as_array(tensor.float() if tensor.dtype == torch.bfloat16 else tensor).copy()
    except (RuntimeError, TypeError):
        return np.zeros(0, np.int32)
