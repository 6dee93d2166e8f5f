"""A torch.nn.Module of the user as an `OwnModel`."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.monte_carlo_arithmetic import perturb_operands
from parity.comparison.own_model.construct import Built, float64_by_default
from parity.comparison.own_model.model import (
    FIXED_DTYPE,
    ImageShape,
    OwnModel,
    Trace,
    Weights,
    select_output,
    simple_settings,
)
from vit_spec import InputError
from vit_spec.errors import first_line

_SAME_VALUES = (
    "a table reads files as they are, so save dict(model.named_parameters()) of the loaded model with torch.save, and give "
    "that file with a copy of the class without this step"
)


class TorchModel(OwnModel):
    """A copy of a PyTorch module in float64, on CPU, in eval mode."""

    twin = "torch"
    separator = "."

    def __init__(self, built: Built) -> None:
        super().__init__(built.name)
        import torch

        self._torch: Any = torch
        module: Any = copy.deepcopy(built.model).to("cpu").double().eval().requires_grad_()
        self._module = module
        state = module.state_dict()
        parameters = dict(module.named_parameters(remove_duplicate=False))
        owners: dict[int, str] = {}
        for key, parameter in parameters.items():
            if (first := owners.setdefault(id(parameter), key)) != key:
                raise InputError(f"{self.name} has {first} and {key} as one parameter, which ViTConfig cannot express")
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                raise InputError(f"{self.name} stores {key} in its state dict, which is no tensor")
            if not value.numel():  # containers leave empty arrays out
                continue
            (self.weights if key in parameters else self.constants)[key] = value.detach().numpy().copy()
        self.unsaved = {key: value.numpy().copy() for key, value in module.named_buffers() if key not in state}
        if changed := self._find_changed({**dict.fromkeys(parameters), **state}):
            raise InputError(f"{self.name} changes {changed} in its state_dict: {_SAME_VALUES}")
        self.settings = [(name, value) for name, value in built.arguments.items()]
        for inner in module.modules():
            self.settings += simple_settings(inner)
        self._channels_last = False
        self._runs = 0

    def fit(self, images: ImageShape) -> str:
        self._channels_last = images.channels_last
        x = np.zeros((2, images.height, images.width, images.channels))
        try:
            self.run({}, x)
        except InputError as error:
            return str(error)
        return ""

    def check_loading(self, arrays: Weights) -> None:
        module = self._module
        state = {**module.state_dict(), **{key: self._to_tensor(array) for key, array in arrays.items()}}
        try:
            with float64_by_default():
                module.load_state_dict(state)
        except (Exception, SystemExit, GeneratorExit) as error:  # of the user's code
            raise InputError(f"load_state_dict of the class raised {first_line(error)}") from None
        if changed := self._find_changed({key: self._to_tensor(array) for key, array in arrays.items()}):
            raise InputError(f"the class changes {changed} when it loads it: {_SAME_VALUES}")
        for key, buffer in module.named_buffers():  # the proof needs constants in float64, as the class makes them
            if key in self.constants:
                buffer.copy_(self._to_tensor(self.constants[key]))

    def run(self, weights: Weights, images: Array, inference: bool = False) -> Array:
        with self._running(inference):
            output, _ = self._forward(weights, images)
        array: Array = output.detach().numpy()
        return array

    def gradients(self, weights: Weights, images: Array, target: Array) -> tuple[Array, dict[str, Array]]:
        torch = self._torch
        with self._running():
            output, tensors = self._forward(weights, images)
            loss = (output - torch.from_numpy(target)).square().mean()
            if not output.requires_grad:
                raise InputError("its output has no gradients: leave out detach() and no_grad() in its forward pass")
            found = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
        return output.detach().numpy(), {
            key: gradient.numpy() for key, gradient in zip(tensors, found, strict=True) if gradient is not None
        }

    def perturbed_gradients(
        self, weights: Weights, images: Array, target: Array, seed: int
    ) -> tuple[Array, dict[str, Array]]:
        with perturb_operands("float64", seed):
            return self.gradients(weights, images, target)

    def trace(self, weights: Weights, images: Array) -> Trace:
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        trace, torch = Trace(), self._torch
        names: dict[int, str] = {}

        base: Any = TorchDispatchMode

        class Recorder(base):  # type: ignore[misc]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                leaves = tree_leaves((args, kwargs or {}))
                for leaf in leaves:
                    if isinstance(leaf, torch.Tensor) and id(leaf) in names:
                        trace.use(names[id(leaf)])
                    trace.number(leaf)
                returned = func(*args, **(kwargs or {}))
                trace.convert(*(filter(torch.is_tensor, each) for each in (leaves, tree_leaves(returned))))
                return returned

        with self._running():
            tensors = self._tensors(weights)
            names |= {id(tensor): key for key, tensor in tensors.items()}
            with Recorder():
                self._call(tensors, images)
        return trace

    def _tensors(self, weights: Weights) -> dict[str, Any]:
        tensors = {key: self._to_tensor(array) for key, array in {**self.weights, **weights}.items()}
        return {key: tensor.requires_grad_(tensor.is_floating_point()) for key, tensor in tensors.items()}

    def _to_tensor(self, array: Array) -> Any:
        """Return a copy of an array, which the model may change, with floating-point numbers in float64."""
        array = np.asarray(array)
        return self._torch.from_numpy(np.array(array) if array.dtype.kind in "iub" else np.array(array, np.float64))

    def _find_changed(self, state: Mapping[str, Any]) -> str:
        """Return the first key whose parameter or buffer has other values than in a state dict; "" if there is none."""
        parameters = self._module.named_parameters(remove_duplicate=False)
        own: dict[str, Any] = {**dict(parameters), **dict(self._module.named_buffers(remove_duplicate=False))}

        def is_same(key: str) -> bool:
            mine, stored = (each.detach().numpy() for each in (own[key], state[key]))
            return np.array_equal(mine, stored, equal_nan=mine.dtype.kind == "f")

        return next((key for key in state if key in own and (state[key] is None or not is_same(key))), "")

    def _forward(self, weights: Weights, images: Array) -> tuple[Any, dict[str, Any]]:
        tensors = self._tensors(weights)
        output = self._call(tensors, images)
        return output, {key: tensor for key, tensor in tensors.items() if tensor.requires_grad}

    def _call(self, tensors: Mapping[str, Any], images: Array) -> Any:
        torch = self._torch
        x = torch.from_numpy(np.array(images, np.float64))  # a copy: the model may change it
        x = x if self._channels_last else x.permute(0, 3, 1, 2)
        try:
            returned = torch.func.functional_call(self._module, dict(tensors), (x.contiguous(),))
        except (Exception, SystemExit, GeneratorExit) as error:  # of the user's code
            hint = f": {FIXED_DTYPE}" if "dtype" in str(error) else ""
            raise InputError(f"its forward pass raised {first_line(error)}{hint}") from None
        output = select_output(returned)
        if output.ndim < 2 or output.layout != torch.strided:
            raise InputError(f"its output has the shape {tuple(output.shape)}: return the logits of a batch, (B, classes)")
        if output.dtype != torch.float64:
            raise InputError(f"its output is {output.dtype}, with weights and images in float64: {FIXED_DTYPE}")
        return output

    @contextmanager
    def _running(self, inference: bool = False) -> Iterator[None]:
        """Run with gradients, so that no fused kernel for inference is used, and without effect on random numbers."""
        torch = self._torch
        self._runs += 1
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(not inference), float64_by_default():
            # Two runs of a model that draws random numbers differ.  `torch.manual_seed` also seeds GPUs, and takes longer.
            torch.default_generator.manual_seed(self._runs)
            yield
