"""Runs of any Flax function and any PyTorch module, which take weights by key and return outputs and gradients by name.

Everything runs on CPU, in the requested dtype, on copies of the models.
"""

import copy
import dataclasses
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.comparison.any_model.module_outputs import Path, capture_flax_outputs, capture_torch_outputs
from vit_spec import InputError

Array = NDArray[Any]
Tensors = dict[str, Array]
Permutations = Sequence[list[int] | None]
Loss = Callable[[Any], Any]

GRADIENT_OF = "gradient of "
# A float64 run is executed once, so compiling it quickly matters more than its speed.  The float32 run keeps XLA's default
# options, because its rounding errors are what is measured.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def framework_versions() -> dict[str, str]:
    """Return the versions of both frameworks, NumPy and Python, and the machine type.

    Raises:
        InputError: a framework is not installed.
    """
    try:
        import flax
        import jax
        import torch
    except ImportError as error:
        raise InputError(f"assert_parity runs both frameworks, and {error.name} is not installed: pip install it") from None
    versions = {"jax": jax.__version__, "flax": flax.__version__, "torch": torch.__version__, "numpy": np.__version__}
    return {**versions, "python": platform.python_version(), "machine": platform.machine()}


def flax_weights(flax_apply: Callable[..., Any], params: Any) -> Tensors:
    """Return the floating-point leaves of a pytree by path, as float64; the path leaves out the collection "params".

    Raises:
        InputError: `flax_apply` is linen's `apply`, and `params` has no collection "params".
    """
    from flax import linen

    owner = getattr(flax_apply, "__self__", None)
    if isinstance(owner, linen.Module) and "params" not in params:
        raise InputError("model.apply takes variables with their collections: give {'params': params}, not params alone")
    return {key: np.asarray(leaf).astype(np.float64) for key, leaf in _flatten(params)[0] if key is not None}


def _flatten(params: Any) -> tuple[list[tuple[str | None, Any]], Any]:
    """Return every leaf with its key, and the tree definition; leaves that are not floating-point have None as key."""
    import jax
    import jax.numpy as jnp

    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    leaves = []
    for path, leaf in paths:
        names = [str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", "")))) for entry in path]
        if names[-1:] == ["value"] and not isinstance(path[-1], jax.tree_util.DictKey):  # the value of an nnx.Variable
            names.pop()
        is_float = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        leaves.append(("/".join(names).removeprefix("params/") if is_float else None, leaf))
    return leaves, tree


def torch_weights(module: Any) -> tuple[Tensors, dict[str, str], set[str]]:
    """Return a module's floating-point tensors by key, the keys that are left out and why, and the keys of its buffers.

    The tensors are float64 arrays.  A tensor with several keys is returned under the first one.  Running statistics do not
    count as buffers.

    Raises:
        InputError: `module` is not a torch.nn.Module.
    """
    import torch

    if not isinstance(module, torch.nn.Module):
        raise InputError(f"torch_module is a {type(module).__name__}: give a torch.nn.Module")
    tensors: Tensors = {}
    skipped: dict[str, str] = {}
    first_keys: dict[int, str] = {}
    state = {**module.state_dict(keep_vars=True)}
    for key, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            skipped[key] = "integers, which are not weights: it keeps its own values"
        elif (first_key := first_keys.setdefault(id(tensor), key)) != key:
            skipped[key] = f"the same tensor as {first_key}"
        else:
            tensors[key] = tensor.detach().cpu().to(torch.float64).numpy()
    statistics = ("running_mean", "running_var")
    buffers = {key for key, _ in module.named_buffers() if key.rpartition(".")[2] not in statistics}
    return tensors, skipped, buffers


def make_flax_runner(
    flax_apply: Callable[..., Any], params: Any, weights: Tensors, inputs: Sequence[Array], loss: Loss | None, seed: int
) -> Callable[[str], tuple[Tensors, Tensors, Tensors]]:
    """Return a function that runs the Flax model in a dtype, "float64" or "float32".

    It returns outputs and loss by name, gradients of the weights by key, and gradients of the inputs by name.

    Args:
        weights: the weights to run with, by key.
        inputs: the inputs, with the order of axes in Flax.
        loss: function of the outputs; None for the mean squared error from targets drawn with `seed`.
    """
    import jax
    import jax.numpy as jnp

    leaves, tree = _flatten(params)
    float_inputs = [n for n, x in enumerate(inputs) if np.issubdtype(x.dtype, np.floating)]
    order: list[str] = []

    def objective(weights: Any, floats: Any) -> Any:
        arguments = [jnp.asarray(x) for x in inputs]
        for n, x in zip(float_inputs, floats, strict=True):
            arguments[n] = x
        own = tree.unflatten([leaf if key is None else weights[key] for key, leaf in leaves])
        returned = flax_apply(own, *arguments)
        outputs = dict(_named_arrays(returned))
        order[:] = outputs  # jit returns dicts with sorted keys
        return (_default_loss(outputs, seed, jnp.asarray) if loss is None else loss(returned)), outputs

    def run(dtype: str) -> tuple[Tensors, Tensors, Tensors]:
        with _exact_jax(dtype):
            step = jax.jit(
                jax.value_and_grad(objective, argnums=(0, 1), has_aux=True),
                compiler_options=QUICK_COMPILE if dtype == "float64" else None,
            )
            cast = {key: jnp.asarray(np.asarray(array, dtype)) for key, array in weights.items()}
            floats = [jnp.asarray(np.asarray(inputs[n], dtype)) for n in float_inputs]
            (value, outputs), (gradients, of_inputs) = step(cast, floats)
        input_gradients = {f"{GRADIENT_OF}input {n}": np.asarray(x) for n, x in zip(float_inputs, of_inputs, strict=True)}
        tensors = {**{name: np.asarray(outputs[name]) for name in order}, "loss": np.asarray(value)}
        _check_dtypes(dtype, "flax", tensors)
        return tensors, {key: np.asarray(x) for key, x in gradients.items()}, input_gradients

    return run


def make_torch_runner(
    module: Any, weights: Tensors, inputs: Sequence[Array], axes: Sequence[Permutations], loss: Loss | None, seed: int
) -> Callable[[str, list[str]], Tensors]:
    """Return a function that runs the PyTorch module in a dtype, "float64" or "float32".

    It takes the dtype and the names of Flax's outputs, and returns outputs, loss and all gradients by name.  Outputs and
    gradients of inputs have the order of axes in Flax.

    Args:
        weights, inputs, loss, seed: as in `make_flax_runner`; weights have the keys and layouts of the state dict.
        axes: permutations of the axes of inputs, and of outputs, from Flax's order to PyTorch's.
    """
    import torch

    inverse = [None if order is None else [order.index(n) for n in range(len(order))] for order in axes[1]]

    def run(dtype: str, names: list[str]) -> Tensors:
        own, tensors = _copy_module(module, weights, dtype), [torch.tensor(_cast_floats(x, dtype)) for x in inputs]
        tensors = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in tensors]
        with _exact_torch():
            returned = _call(own, [_permute(tensor, axes[0], n, f"input {n}") for n, tensor in enumerate(tensors)], dtype)
            outputs = _rename_outputs(dict(_named_arrays(returned)), names)
            outputs = {name: _permute(tensor, inverse, n, name) for n, (name, tensor) in enumerate(outputs.items())}
            value = _default_loss(outputs, seed, torch.tensor) if loss is None else loss(returned)
            parameters = dict(reversed(list(own.named_parameters())))
            variables = {f"{GRADIENT_OF}{key}": parameter for key, parameter in parameters.items()}
            variables |= {f"{GRADIENT_OF}input {n}": tensor for n, tensor in enumerate(tensors) if tensor.requires_grad}
            computed = torch.autograd.grad(value, list(variables.values()), allow_unused=True)
        gradients = {
            name: torch.zeros_like(tensor) if gradient is None else gradient
            for (name, tensor), gradient in zip(variables.items(), computed, strict=True)
        }
        arrays = {name: tensor.detach().numpy() for name, tensor in {**outputs, "loss": value, **gradients}.items()}
        _check_dtypes(dtype, "torch", arrays)
        return arrays

    return run


def flax_module_outputs(
    flax_apply: Callable[..., Any], params: Any, weights: Tensors, inputs: Sequence[Array]
) -> dict[Path, Array]:
    """Return the first output of each linen module in float64, by the path of the module."""
    import jax.numpy as jnp

    leaves, tree = _flatten(params)
    with _exact_jax("float64"):
        own = tree.unflatten([leaf if key is None else jnp.asarray(weights[key]) for key, leaf in leaves])
        arguments = [jnp.asarray(_cast_floats(x, "float64")) for x in inputs]
        return capture_flax_outputs(lambda: flax_apply(own, *arguments), _named_arrays)


def torch_module_outputs(module: Any, weights: Tensors, inputs: Sequence[Array], axes: Permutations) -> dict[Path, Array]:
    """Return the first output of each module inside a PyTorch module in float64, by the path of the module."""
    import torch

    tensors = [_permute(torch.tensor(_cast_floats(x, "float64")), axes, n, f"input {n}") for n, x in enumerate(inputs)]
    return capture_torch_outputs(_copy_module(module, weights, "float64"), tensors, _named_arrays)


def _cast_floats(array: Array, dtype: str) -> Array:
    """Return a floating-point array in another dtype, and any other array as it is."""
    return array.astype(dtype) if np.issubdtype(array.dtype, np.floating) else array


def _copy_module(module: Any, weights: Tensors, dtype: str) -> Any:
    """Return a copy of a module with these weights, in eval mode; all its parameters require gradients."""
    import torch

    torch_dtype = getattr(torch, dtype)
    own = copy.deepcopy(module).to("cpu", torch_dtype).eval().requires_grad_()
    own.load_state_dict({key: torch.tensor(array).to(torch_dtype) for key, array in weights.items()}, strict=False)
    return own


@contextmanager
def _exact_jax(dtype: str) -> Iterator[None]:
    """Run JAX on CPU in a dtype, with matrix products computed in that dtype."""
    import jax

    cpu = jax.default_device(jax.devices("cpu")[0])
    with jax.enable_x64(dtype == "float64"), cpu, jax.default_matmul_precision("highest"):
        yield


@contextmanager
def _exact_torch() -> Iterator[None]:
    """Run PyTorch with matrix products computed in the dtype of their operands."""
    import torch

    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _call(module: Any, inputs: Sequence[Any], dtype: str) -> Any:
    try:
        return module(*inputs)
    except RuntimeError as error:
        if dtype == "float64" and "dtype" in str(error):
            what = str(error).splitlines()[0]
            raise InputError(f"the torch model does not run in float64 ({what}): {_REMEDY}") from None
        raise


_REMEDY = (
    "a part of it has a fixed dtype, so it cannot be checked in float64; let it compute in the dtype of its inputs "
    "(in flax dtype=None, in torch no .float() or dtype=torch.float32)"
)


def _check_dtypes(dtype: str, side: str, tensors: Tensors) -> None:
    """Raise InputError for a floating-point tensor that has another dtype than the weights and inputs, `dtype`."""
    for name, array in tensors.items():
        if array.dtype.kind not in "iub" and array.dtype != np.dtype(dtype):
            raise InputError(f"{name} of the {side} model is {array.dtype}, with weights and inputs in {dtype}: {_REMEDY}")


def _named_arrays(returned: Any, name: str = "output") -> Iterator[tuple[str, Any]]:
    """Yield every array in the return value of a model with its name: "output", "output.logits", "output.hidden.0".

    Raises:
        InputError: a part of the value is neither an array nor a container of arrays.
    """
    if returned is None:
        return
    if hasattr(returned, "shape") and hasattr(returned, "dtype"):
        yield name, returned
        return
    if isinstance(returned, Mapping):
        parts = returned.items()
    elif dataclasses.is_dataclass(returned):
        parts = {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}.items()
    elif isinstance(returned, (tuple, list)):
        parts = dict(zip(getattr(returned, "_fields", range(len(returned))), returned, strict=True)).items()
    else:
        raise InputError(f"{name} of a model is a {type(returned).__name__}: return arrays, or tuples or dicts of them")
    for key, part in parts:
        yield from _named_arrays(part, f"{name}.{key}")


def _rename_outputs(outputs: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return PyTorch's outputs with the names and the order of Flax's outputs, matched by name, or else by position.

    Raises:
        InputError: the numbers of outputs differ, or both models name their outputs and the names differ.
    """
    names = [name for name in names if name != "loss"]
    if outputs.keys() == set(names):
        return {name: outputs[name] for name in names}
    is_unnamed = any(all(part.isdigit() for part in name.split(".")[1:]) for name in [*outputs, *names])
    if len(outputs) != len(names) or not is_unnamed:
        raise InputError(f"flax returns {', '.join(names)} and torch {', '.join(outputs)}: return the same from both")
    return dict(zip(names, outputs.values(), strict=True))


def _permute(tensor: Any, axes: Permutations, n: int, name: str) -> Any:
    """Return a tensor with its axes permuted by the n-th permutation, if there is one; `name` is for the error message."""
    permutation = axes[n] if n < len(axes) else None
    if permutation is None:
        return tensor
    if len(permutation) != tensor.ndim:
        raise InputError(f"{name} has {tensor.ndim} axes, and the line given for it has {len(permutation)}")
    return tensor.permute(permutation)


def _default_loss(outputs: Mapping[str, Any], seed: int, asarray: Callable[..., Any]) -> Any:
    """Return the sum over the floating-point outputs of the mean squared error from a standard normal target."""
    rng, total = np.random.default_rng(seed + 1), 0.0
    for output in outputs.values():
        target = rng.standard_normal(tuple(output.shape))
        if "float" in str(output.dtype):
            total = total + ((output - asarray(target, dtype=output.dtype)) ** 2).mean()
    return total
