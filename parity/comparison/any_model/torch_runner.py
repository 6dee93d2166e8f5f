"""Runs of a PyTorch module on CPU, on copies that take weights by key and return outputs and gradients by name."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

from parity.checkpoints.arrays import as_array
from parity.checkpoints.layout import Array
from parity.comparison.any_model.outputs import Loss, Permutations, check_loss, default_loss, named_arrays, permute
from parity.comparison.any_model.random_masks import MaskStream
from parity.comparison.any_model.report import GRADIENT_OF, STATISTICS
from parity.comparison.any_model.trace.choices import Arithmetic, Choices, choose_in_torch
from parity.comparison.any_model.trace.fixed_parts import FixedPart
from parity.comparison.any_model.trace.graph import Graph
from parity.comparison.any_model.trace.numbers import intended_numbers
from parity.comparison.any_model.trace.torch_float64 import all_in_float64
from parity.comparison.any_model.trace.torch_graph import record_torch
from parity.comparison.any_model.weights import frozen_keys
from parity.comparison.tolerances import UNIT_ROUNDOFF
from vit_spec import InputError

Tensors = dict[str, Array]


class TorchRunner:
    """Runs the PyTorch module in a dtype, "float64" or "float32".

    Attributes:
        weights: the weights to run with, by key.
        parts: the parts that the module computes in a fixed lower precision, known after the run in float64, which
            computes them in float64.
        skipped: names and types of the parts of the return value that are no arrays.
        is_detached: whether the loss of the last run had no gradient, known after a run.
        is_random: whether the last run drew random numbers in evaluation, known after a run.
        changed_inputs: numbers of the inputs that the last run changed in place, known after a run.
        updated: keys of the buffers that the last run changed in training, such as running statistics.
        batch_norms: for the key of each running variance that the last run updated, the momentum and the number of
            entries of which it is the variance.
    """

    def __init__(
        self,
        module: Any,
        weights: Tensors,
        inputs: Sequence[Array],
        axes: Sequence[Permutations],
        *,
        masks: MaskStream | None,
        loss: Loss | None,
        seed: int,
    ) -> None:
        """Prepare the module.

        Args:
            module, inputs, masks, loss, seed: as in `FlaxRunner`.
            weights: as in `FlaxRunner`, with the keys and layouts of the state dict.
            axes: permutations of the axes of inputs, and of outputs, from Flax's order to PyTorch's.
        """
        self._module, self.weights, self._inputs, self._axes = module, weights, inputs, axes
        self._masks, self._loss, self._seed = masks, loss, seed
        self.parts: list[FixedPart] = []
        self.skipped: dict[str, str] = {}
        self.is_detached = self.is_random = False
        self.changed_inputs: list[int] = []
        self.updated: set[str] = set()
        self.batch_norms: dict[str, tuple[float, int]] = {}
        self._names: Mapping[str, str] = {}
        self._numbers: list[FixedPart] = []

    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the outputs by name, in the order of axes of PyTorch."""
        import torch

        with _exact_torch(), torch.no_grad():
            own, tensors = self._copy("float64"), self._permuted(self._tensors("float64"))
            with all_in_float64(own, []), self._given_masks():
                returned = _call(own, tensors, "float64")
        return {name: tuple(tensor.shape) for name, tensor in named_arrays(returned, skipped=self.skipped)}

    def run_by_operation(
        self, choices: Choices, arithmetics: Sequence[Arithmetic], names: Mapping[str, str]
    ) -> Iterator[Tensors]:
        """Yield the same as `run` in each arithmetic, the first of which is float32 and records the choices.

        Raises:
            OtherOperationsError: a later run computes other operations.
        """
        for arithmetic in arithmetics:
            dtype = "float64" if arithmetic == "float64" else "float32"
            yield self.run(dtype, names, choose_in_torch(choices, arithmetic))
            choices.rewind()

    def run(
        self,
        dtype: str,
        names: Mapping[str, str],
        mode: AbstractContextManager[Any] | None = None,
        roundoffs: float = 0.0,
        seed: int = 0,
    ) -> Tensors:
        """Return outputs, loss and all gradients by name, all in the order of axes in Flax except those of parameters.

        Args:
            dtype: "float64" or "float32".
            names: the names of Flax's outputs that are compared, with those of PyTorch's.
            mode: the context in which the forward and the backward pass run.
            roundoffs: how many unit roundoffs of the dtype each weight and input is perturbed by, at most.
            seed: seed of the perturbation.
        """
        import torch

        self._names = names
        parts: list[FixedPart] = []
        with _exact_torch(), ExitStack() as stack:
            own, tensors = self._copy(dtype), self._tensors(dtype)
            _perturb([*own.parameters(), *own.buffers(), *tensors], roundoffs * UNIT_ROUNDOFF[dtype], seed)
            buffers = {key: buffer.clone() for key, buffer in own.named_buffers() if self._masks}
            self.batch_norms = _watched_batch_norms(own)
            tensors = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in tensors]
            if dtype == "float64":
                stack.enter_context(all_in_float64(own, parts))
            if mode is not None:
                stack.enter_context(mode)
            with self._given_masks():
                # Copies, because a model may change its inputs in place, which autograd forbids for leaves.
                before = torch.get_rng_state()
                given = self._permuted([tensor.clone() for tensor in tensors])
                versions = [tensor._version for tensor in given]
                returned = _call(own, given, dtype)
                self.changed_inputs = [n for n, tensor in enumerate(given) if tensor._version != versions[n]]
                self.is_random = self._masks is None and not torch.equal(before, torch.get_rng_state())
            outputs = self._named(returned, names)
            value = (
                default_loss(outputs, self._seed, partial(torch.tensor, dtype=getattr(torch, dtype)))
                if self._loss is None
                else check_loss(self._loss(returned), "torch")
            )
            frozen = frozen_keys(self._module)  # gradients that no training uses
            parameters = {key: each for key, each in reversed(list(own.named_parameters())) if key not in frozen}
            variables = {f"{GRADIENT_OF}{key}": parameter for key, parameter in parameters.items()}
            variables |= {f"{GRADIENT_OF}input {n}": tensor for n, tensor in enumerate(tensors) if tensor.requires_grad}
            self.is_detached = not value.requires_grad
            if variables and value.requires_grad:
                computed = torch.autograd.grad(value, list(variables.values()), allow_unused=True)
            else:
                computed = (None,) * len(variables)  # type: ignore[assignment]
        self.parts = [*self._numbers, *parts] if dtype == "float64" else self.parts
        gradients = {
            name: torch.zeros_like(tensor) if gradient is None else gradient
            for (name, tensor), gradient in zip(variables.items(), computed, strict=True)
        }
        after = {key: buffer for key, buffer in own.named_buffers() if key in buffers and buffer.is_floating_point()}
        self.updated = {key for key, buffer in after.items() if not torch.equal(buffer, buffers[key])}
        statistics = {f"{STATISTICS}{key}": buffer for key, buffer in after.items()}
        tensors_by_name = {**outputs, "loss": value, **statistics, **gradients}
        return {name: _torch_host(tensor) for name, tensor in tensors_by_name.items()}

    def record(self, dtype: str) -> Graph:
        """Return the operations of a forward pass, with all values."""
        with _exact_torch(), self._given_masks():
            own, tensors = self._copy(dtype), self._tensors(dtype)
            return record_torch(
                own,
                self._permuted(tensors),
                lambda returned: [
                    tensor for name, tensor in named_arrays(returned) if not self._names or name in self._names.values()
                ],
                exact=dtype == "float64",
                constants=frozenset(key for key, _ in own.named_parameters() if key not in self.weights),
            )

    def keys_by_use(self, graph: Graph) -> list[str]:
        """Return the keys of the parameters in the order in which a recorded forward pass first uses them."""
        keys = [key for key, _ in self._module.named_parameters()]
        return [keys[n] for n in graph.sources_by_use() if n < len(keys)]

    def _copy(self, dtype: str) -> Any:
        own = _copy_module(self._module, self.weights, dtype, train=self._masks is not None)
        if dtype == "float64":
            self._numbers = [
                FixedPart("torch", key.rpartition(".")[0], "float32", "buffer")
                for key in _restore_numbers(self._module, own, self.weights.keys())
            ]
        return own

    def _given_masks(self) -> Any:
        return self._masks.in_torch() if self._masks else nullcontext()

    def _tensors(self, dtype: str) -> list[Any]:
        import torch

        return [cast_tensor(torch.tensor(x), dtype) for x in self._inputs]

    def _permuted(self, tensors: Sequence[Any]) -> list[Any]:
        # Contiguous, as users have them: PyTorch's kernels for channels last, which a view selects, are less accurate.
        return [permute(tensor, self._axes[0], n, f"input {n}").contiguous() for n, tensor in enumerate(tensors)]

    def _named(self, returned: Any, names: Mapping[str, str]) -> dict[str, Any]:
        """Return the outputs with the names and the order of axes of Flax's."""
        inverse = [None if order is None else [order.index(n) for n in range(len(order))] for order in self._axes[1]]
        outputs = dict(named_arrays(returned))
        return {name: permute(outputs[of_torch], inverse, n, name) for n, (name, of_torch) in enumerate(names.items())}


def _torch_host(tensor: Any) -> Array:
    """Return a tensor as an array of NumPy; bfloat16 as float32, in which it is exact."""
    import torch

    return as_array(tensor.float() if tensor.dtype == torch.bfloat16 else tensor)


def _copy_module(module: Any, weights: Tensors, dtype: str, train: bool) -> Any:
    """Return a copy of a module with these weights, in training or evaluation mode; all parameters require gradients."""
    import torch

    own = copy_in_dtype(module, dtype).train(train).requires_grad_()
    own.load_state_dict({key: cast_tensor(torch.tensor(array), dtype) for key, array in weights.items()}, strict=False)
    for original, parameter in zip(module.parameters(), own.parameters(), strict=True):
        for hook in (original._backward_hooks or {}).values():  # which deepcopy leaves out
            parameter.register_hook(hook)
    return own


def copy_in_dtype(module: Any, dtype: str, device: str = "cpu") -> Any:
    """Return a copy of a module on a device, with parameters and buffers as `cast_tensor` casts them.

    Raises:
        InputError: the module has an attribute that cannot be copied.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    kept = [each for inner in module.modules() for each in tree_leaves(vars(inner)) if isinstance(each, torch.Tensor)]
    # deepcopy refuses results of operations, such as an activation that a forward pass has stored.
    memo = {id(tensor): tensor.detach().clone() for tensor in kept if not tensor.is_leaf}
    try:
        own = copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        what = str(error).partition("\n")[0].rstrip(".")
        raise InputError(f"torch_module cannot be copied ({what}): remove the attribute that cannot be") from error
    # Module.to would make complex tensors real.
    return own._apply(lambda tensor: cast_tensor(tensor.to(device), dtype))


def cast_tensor(tensor: Any, dtype: str) -> Any:
    """Return floating-point numbers in a dtype, complex ones in complex128 for float64, else complex64, others as is."""
    import torch

    if tensor.is_complex():
        return tensor.to(torch.complex128 if dtype == "float64" else torch.complex64)
    return tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor


def _watched_batch_norms(module: Any) -> dict[str, tuple[float, int]]:
    """Return a dict that a forward pass fills: see `TorchRunner.batch_norms`."""
    from torch.nn.modules.batchnorm import _BatchNorm

    found: dict[str, tuple[float, int]] = {}

    def watch(key: str) -> Callable[..., None]:
        def hook(norm: Any, given: Any) -> None:
            if norm.training and norm.momentum is not None:
                found[key] = (norm.momentum, given[0].numel() // given[0].shape[1])

        return hook

    for path, inner in module.named_modules():
        if isinstance(inner, _BatchNorm) and inner.track_running_stats:
            inner.register_forward_pre_hook(watch(f"{path}.running_var".lstrip(".")))
    return found


def _restore_numbers(module: Any, copied: Any, keys: Collection[str]) -> Iterator[str]:
    """Give the constants of a copy in float64 the numbers that equal entries in float32 stand for; yield their keys.

    keys: keys of the tensors that have weights; the others are constants.
    """
    import torch

    own = dict(chain(copied.named_parameters(), copied.named_buffers()))
    for key, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.dtype == torch.float32 and key not in keys:
            numbers = torch.from_numpy(intended_numbers(tensor.detach().cpu().numpy()))
            if not torch.equal(numbers, own[key]):
                own[key].data.copy_(numbers)
                yield key


@contextmanager
def _exact_torch() -> Iterator[None]:
    """Run PyTorch with gradients, on the CPU, and with matrix products in the dtype of their operands.

    The caller may have disabled gradients, and may have another default device.
    """
    import torch

    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _perturb(tensors: Iterable[Any], largest: float, seed: int) -> None:
    """Change floating-point numbers in place by a random part of themselves."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors if largest else ():
        if tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
            tensor.data.mul_(1 + largest * (2 * noise - 1))


def _call(module: Any, inputs: Sequence[Any], dtype: str) -> Any:
    try:
        return module(*inputs)
    except RuntimeError as error:
        if dtype == "float64" and "dtype" in str(error):
            what = str(error).splitlines()[0]
            integers = [n for n, tensor in enumerate(inputs) if not (tensor.is_floating_point() or tensor.is_complex())]
            of_input = f"give input {integers[0]}, which has integers, as floating-point numbers, or " if integers else ""
            raise InputError(f"the torch model does not run in float64 ({what}): {of_input}{_REMEDY}") from None
        raise


_REMEDY = (
    "if a part of it has a fixed dtype that cannot be replaced, let it compute in the dtype of its inputs "
    "(in flax dtype=None, in torch no .float() or dtype=torch.float32)"
)
