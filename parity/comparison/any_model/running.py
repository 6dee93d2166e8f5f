"""Running a Flax function and a PyTorch module that nobody here knows: their weights by key, outputs and gradients by name.

Everything runs on CPU, in the type that is asked for, on copies.
"""

import copy
import dataclasses
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.comparison.any_model.first_module import Path, flax_outputs, torch_outputs
from vit_spec import InputError

Array = NDArray[Any]
Tensors = dict[str, Array]
Permutations = Sequence[list[int] | None]
Loss = Callable[[Any], Any]

GRADIENT = "gradient of "
# What runs once in float64 need not be polished when it is compiled; in float32 its roundings are what is measured.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def frameworks() -> dict[str, str]:
    """Return the versions of what will run.

    Raises:
        InputError: a framework that is not installed.
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
    """Return the floating-point leaves of any tree by path, without the collection "params".

    Raises:
        InputError: what linen's `apply` would not take.
    """
    from flax import linen

    owner = getattr(flax_apply, "__self__", None)
    if isinstance(owner, linen.Module) and "params" not in params:
        raise InputError("model.apply takes variables with their collections: give {'params': params}, not params alone")
    return {key: np.asarray(leaf).astype(np.float64) for key, leaf in _leaves(params)[0] if key is not None}


def _leaves(params: Any) -> tuple[list[tuple[str | None, Any]], Any]:
    """Every leaf with its key, which is None of what is no weight (counters, random keys), and the tree around them."""
    import jax
    import jax.numpy as jnp

    found, tree = jax.tree_util.tree_flatten_with_path(params)
    leaves = []
    for path, leaf in found:
        names = [str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", "")))) for entry in path]
        if names[-1:] == ["value"] and not isinstance(path[-1], jax.tree_util.DictKey):  # the box of an nnx.Variable
            names.pop()
        real = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        leaves.append(("/".join(names).removeprefix("params/") if real else None, leaf))
    return leaves, tree


def torch_weights(module: Any) -> tuple[Tensors, dict[str, str], set[str]]:
    """Return a module's floating-point tensors by key; the keys that are left out, and why; and the buffers.

    A tensor that has several names goes by the first.
    """
    import torch

    if not isinstance(module, torch.nn.Module):
        raise InputError(f"torch_module is a {type(module).__name__}: give a torch.nn.Module")
    tensors: Tensors = {}
    skipped: dict[str, str] = {}
    first: dict[int, str] = {}
    state = {**module.state_dict(keep_vars=True)}
    for key, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            skipped[key] = "integers, which no weight is: it keeps its own values"
        elif (same := first.setdefault(id(tensor), key)) != key:
            skipped[key] = f"the same tensor as {same}"
        else:
            tensors[key] = tensor.detach().cpu().to(torch.float64).numpy()
    statistics = ("running_mean", "running_var")
    buffers = {key for key, _ in module.named_buffers() if key.rpartition(".")[2] not in statistics}
    return tensors, skipped, buffers


def flax_runner(
    flax_apply: Callable[..., Any], params: Any, weights: Tensors, inputs: Sequence[Array], loss: Loss | None, seed: int
) -> Callable[[str], tuple[Tensors, Tensors, Tensors]]:
    """Return a function of the type, which returns outputs and loss, weights' gradients by key, and inputs' gradients."""
    import jax
    import jax.numpy as jnp

    leaves, tree = _leaves(params)
    real = [n for n, x in enumerate(inputs) if np.issubdtype(x.dtype, np.floating)]
    order: list[str] = []

    def objective(weights: Any, floats: Any) -> Any:
        arguments = [jnp.asarray(x) for x in inputs]
        for n, x in zip(real, floats, strict=True):
            arguments[n] = x
        own = tree.unflatten([leaf if key is None else weights[key] for key, leaf in leaves])
        answer = flax_apply(own, *arguments)
        outputs = dict(_named(answer))
        order[:] = outputs  # jit sorts
        return (_distance(outputs, seed, jnp.asarray) if loss is None else loss(answer)), outputs

    def run(dtype: str) -> tuple[Tensors, Tensors, Tensors]:
        with _exact_jax(dtype):
            step = jax.jit(
                jax.value_and_grad(objective, argnums=(0, 1), has_aux=True),
                compiler_options=QUICK if dtype == "float64" else None,
            )
            cast = {key: jnp.asarray(np.asarray(array, dtype)) for key, array in weights.items()}
            (value, outputs), (gradients, floats) = step(cast, [jnp.asarray(np.asarray(inputs[n], dtype)) for n in real])
        of_inputs = {f"{GRADIENT}input {n}": np.asarray(x) for n, x in zip(real, floats, strict=True)}
        found = {**{name: np.asarray(outputs[name]) for name in order}, "loss": np.asarray(value)}
        _computed_in(dtype, "flax", found)
        return found, {key: np.asarray(x) for key, x in gradients.items()}, of_inputs

    return run


def torch_runner(
    module: Any, weights: Tensors, inputs: Sequence[Array], axes: Sequence[Permutations], loss: Loss | None, seed: int
) -> Callable[[str, list[str]], Tensors]:
    """Return a function of the type and of flax's names of outputs, which returns outputs, loss and all gradients by name.

    axes: permutations of inputs from flax's to torch's, and of outputs alike.
    """
    import torch

    back = [None if order is None else [order.index(n) for n in range(len(order))] for order in axes[1]]

    def run(dtype: str, names: list[str]) -> Tensors:
        own, tensors = _copied(module, weights, dtype), [torch.tensor(_cast(x, dtype)) for x in inputs]
        tensors = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in tensors]
        with _exact_torch():
            answer = _called(own, [_ordered(tensor, axes[0], n, f"input {n}") for n, tensor in enumerate(tensors)], dtype)
            outputs = _renamed(dict(_named(answer)), names)
            outputs = {name: _ordered(tensor, back, n, name) for n, (name, tensor) in enumerate(outputs.items())}
            value = _distance(outputs, seed, torch.tensor) if loss is None else loss(answer)
            parameters = dict(reversed(list(own.named_parameters())))
            wanted = {f"{GRADIENT}{key}": parameter for key, parameter in parameters.items()}
            wanted |= {f"{GRADIENT}input {n}": tensor for n, tensor in enumerate(tensors) if tensor.requires_grad}
            found = torch.autograd.grad(value, list(wanted.values()), allow_unused=True)
        gradients = {
            name: torch.zeros_like(tensor) if gradient is None else gradient
            for (name, tensor), gradient in zip(wanted.items(), found, strict=True)
        }
        arrays = {name: tensor.detach().numpy() for name, tensor in {**outputs, "loss": value, **gradients}.items()}
        _computed_in(dtype, "torch", arrays)
        return arrays

    return run


def flax_modules(
    flax_apply: Callable[..., Any], params: Any, weights: Tensors, inputs: Sequence[Array]
) -> dict[Path, Array]:
    """Return what each linen module returns in float64."""
    import jax.numpy as jnp

    leaves, tree = _leaves(params)
    with _exact_jax("float64"):
        own = tree.unflatten([leaf if key is None else jnp.asarray(weights[key]) for key, leaf in leaves])
        wide = [jnp.asarray(_cast(x, "float64")) for x in inputs]
        return flax_outputs(lambda: flax_apply(own, *wide), _named)


def torch_modules(module: Any, weights: Tensors, inputs: Sequence[Array], axes: Permutations) -> dict[Path, Array]:
    """Return what each module inside a PyTorch module returns in float64."""
    import torch

    tensors = [_ordered(torch.tensor(_cast(x, "float64")), axes, n, f"input {n}") for n, x in enumerate(inputs)]
    return torch_outputs(_copied(module, weights, "float64"), tensors, _named)


def _cast(array: Array, dtype: str) -> Array:
    """Floating-point inputs in another type, and integers as they are."""
    return array.astype(dtype) if np.issubdtype(array.dtype, np.floating) else array


def _copied(module: Any, weights: Tensors, dtype: str) -> Any:
    """A copy of a module with these weights, in eval mode, all of whose parameters have gradients."""
    import torch

    wide = getattr(torch, dtype)
    own = copy.deepcopy(module).to("cpu", wide).eval().requires_grad_()
    own.load_state_dict({key: torch.tensor(array).to(wide) for key, array in weights.items()}, strict=False)
    return own


@contextmanager
def _exact_jax(dtype: str) -> Iterator[None]:
    """JAX on CPU in a type, where matrices are multiplied in that type."""
    import jax

    cpu = jax.default_device(jax.devices("cpu")[0])
    with jax.enable_x64(dtype == "float64"), cpu, jax.default_matmul_precision("highest"):
        yield


@contextmanager
def _exact_torch() -> Iterator[None]:
    """PyTorch, where matrices are multiplied in their own type."""
    import torch

    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _called(module: Any, inputs: Sequence[Any], dtype: str) -> Any:
    try:
        return module(*inputs)
    except RuntimeError as error:
        if dtype == "float64" and "dtype" in str(error):
            what = str(error).splitlines()[0]
            raise InputError(f"the torch model does not run in float64 ({what}): {_REMEDY}") from None
        raise


_REMEDY = (
    "some part names its own type, so gate G0 cannot be had; let it compute in the type of its inputs "
    "(in flax dtype=None, in torch no .float() or dtype=torch.float32)"
)


def _computed_in(dtype: str, side: str, tensors: Tensors) -> None:
    """Refuse outputs that show that a model chose its own type."""
    for name, array in tensors.items():
        if array.dtype.kind not in "iub" and array.dtype != np.dtype(dtype):
            raise InputError(f"{name} of the {side} model is {array.dtype} where all it was given is {dtype}: {_REMEDY}")


def _named(answer: Any, name: str = "output") -> Iterator[tuple[str, Any]]:
    """Every array of what a model returned, by where it is: "output", "output.logits", "output.hidden.0"."""
    if answer is None:
        return
    if hasattr(answer, "shape") and hasattr(answer, "dtype"):
        yield name, answer
        return
    if isinstance(answer, Mapping):
        parts = answer.items()
    elif dataclasses.is_dataclass(answer):
        parts = {field.name: getattr(answer, field.name) for field in dataclasses.fields(answer)}.items()
    elif isinstance(answer, (tuple, list)):
        parts = dict(zip(getattr(answer, "_fields", range(len(answer))), answer, strict=True)).items()
    else:
        raise InputError(f"{name} of a model is a {type(answer).__name__}: return arrays, or tuples or dicts of them")
    for key, part in parts:
        yield from _named(part, f"{name}.{key}")


def _renamed(outputs: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """PyTorch's outputs in the order and under the names of flax's, by name or, where one side has none, by position."""
    names = [name for name in names if name != "loss"]
    if outputs.keys() == set(names):
        return {name: outputs[name] for name in names}
    bare = any(all(part.isdigit() for part in name.split(".")[1:]) for name in [*outputs, *names])
    if len(outputs) != len(names) or not bare:
        raise InputError(f"flax returns {', '.join(names)} and torch {', '.join(outputs)}: return the same from both")
    return dict(zip(names, outputs.values(), strict=True))


def _ordered(tensor: Any, axes: Permutations, n: int, name: str) -> Any:
    """A tensor with its axes in PyTorch's order."""
    permutation = axes[n] if n < len(axes) else None
    if permutation is None:
        return tensor
    if len(permutation) != tensor.ndim:
        raise InputError(f"{name} has {tensor.ndim} axes, and the line given for it has {len(permutation)}")
    return tensor.permute(permutation)


def _distance(outputs: Mapping[str, Any], seed: int, asarray: Callable[..., Any]) -> Any:
    """The mean squared distance of every output to noise of its own, summed."""
    rng, total = np.random.default_rng(seed + 1), 0.0
    for output in outputs.values():
        target = rng.standard_normal(tuple(output.shape))
        if "float" in str(output.dtype):
            total = total + ((output - asarray(target, dtype=output.dtype)) ** 2).mean()
    return total
