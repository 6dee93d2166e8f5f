"""The weights of two models by key, as float64 arrays, and what is known of them."""

import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np

from parity.checkpoints.arrays import as_array
from parity.checkpoints.layout import Array
from parity.comparison.any_model.parameters import Axes
from vit_spec import InputError

Tensors = dict[str, Array]


def flax_weights(flax_apply: Callable[..., Any], params: Any) -> tuple[Tensors, set[str]]:
    """Return the floating-point leaves of a pytree by path, and the paths of those that are optional.

    The leaves are float64 arrays, and the paths leave out the collection "params".  Optional are constants: arrays of an
    NNX module that are no nnx.Variable, and other collections of linen than parameters and running statistics.

    Raises:
        InputError: `flax_apply` is a module, or linen's `apply` and `params` has no collection "params"; or `params` has
            tensors of PyTorch.
    """
    _check_flax_model(flax_apply, params)
    tensors = {key: np.asarray(leaf).astype(np.float64) for key, leaf in flatten(params)[0] if key is not None}
    return tensors, _constant_keys(params, tensors)


def _check_flax_model(flax_apply: Callable[..., Any], params: Any) -> None:
    """Refuse what is often given in the place of a function and its parameters.

    Raises:
        InputError: as for `flax_weights`.
    """
    import jax
    from flax import linen, nnx

    if isinstance(flax_apply, linen.Module):
        raise InputError("flax_apply is a linen module: give its apply, as in model.apply, and its variables as params")
    equinox = sys.modules.get("equinox")  # a module of Equinox has imported it
    if isinstance(flax_apply, nnx.Module) or (equinox is not None and isinstance(flax_apply, equinox.Module)):
        name = type(flax_apply).__name__
        raise InputError(f"flax_apply is a module: give {name}.__call__, a function of model and inputs, and it as params")
    if any(type(leaf).__module__.partition(".")[0] == "torch" for leaf in jax.tree.leaves(params)):
        raise InputError("params has tensors of PyTorch: give the weights of the Flax model, as arrays of JAX")
    owner = getattr(flax_apply, "__self__", None)
    if isinstance(owner, linen.Module) and (not isinstance(params, Mapping) or "params" not in params):
        raise InputError("model.apply takes variables with their collections: give {'params': params}, not params alone")


def _constant_keys(params: Any, tensors: Tensors) -> set[str]:
    """Return the keys of the constants among the leaves of a pytree."""
    import jax
    from flax import nnx

    if isinstance(params, (nnx.Module, nnx.State)):
        state = nnx.state(params) if isinstance(params, nnx.Module) else params
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
        keys = [key for key, _ in flatten(state)[0]]
        return {key for key, path in zip(keys, paths, strict=True) if key is not None and not _is_value(path)}
    if isinstance(params, Mapping) and "params" in params:
        constants = tuple(f"{name}/" for name in params if name not in ("params", "batch_stats"))
        return {key for key in tensors if key.startswith(constants)} if constants else set()
    return set()


def trained_keys(params: Any, keys: Collection[str]) -> set[str]:
    """Return those keys of Flax's weights that are trained: of nnx.Param, of linen's collection "params", or else all."""
    from flax import nnx

    if isinstance(params, (nnx.Module, nnx.State)):
        state = nnx.state(params) if isinstance(params, nnx.Module) else params
        return {key for key, _ in flatten(nnx.filter_state(state, nnx.Param))[0] if key is not None}
    collections = set(params) - {"params"} if isinstance(params, Mapping) and "params" in params else ()
    return {key for key in keys if key.partition("/")[0] not in collections}


def _is_value(path: tuple[Any, ...]) -> bool:
    """Return whether a path leads to the value of an nnx.Variable."""
    import jax

    return not isinstance(path[-1], jax.tree_util.DictKey) and getattr(path[-1], "name", "") == "value"


def flatten(params: Any) -> tuple[list[tuple[str | None, Any]], Callable[[list[Any]], Any]]:
    """Return every leaf with its key, and the function that makes the same pytree or NNX module of other leaves.

    Leaves that are not floating-point have None as key.  An nnx.Variable with several paths in an NNX module is one leaf.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    if isinstance(params, nnx.Module):  # as a pytree it would have a leaf for each path of a shared layer
        graph, state = nnx.split(params)
        leaves, unflatten = flatten(state)
        return leaves, lambda leaves: nnx.merge(graph, unflatten(leaves))
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    leaves = []
    for path, leaf in paths:
        names = [str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", "")))) for entry in path]
        if path and _is_value(path):
            names.pop()
        is_float = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        leaves.append(("/".join(names).removeprefix("params/") if is_float else None, leaf))
    return leaves, partial(jax.tree.unflatten, tree)


def torch_weights(module: Any) -> tuple[Tensors, dict[str, str], set[str]]:
    """Return a module's floating-point tensors by key, the keys that are left out and why, and those that are optional.

    The tensors are float64 arrays.  A tensor with several keys is returned under the first one.  Buffers and frozen
    parameters are optional, running statistics are not.

    Raises:
        InputError: `module` is not a torch.nn.Module, is compiled by TorchScript, has a complex parameter, or has a tensor
            without values.
    """
    import torch

    if not isinstance(module, torch.nn.Module):
        raise InputError(f"torch_module is a {type(module).__name__}: give a torch.nn.Module")
    for path, inner in module.named_modules():
        if isinstance(inner, torch.jit.ScriptModule):
            what = "is a module of TorchScript, whose operations cannot be traced"
            raise InputError(f"{path and f'{path} of '}torch_module {what}: give the module that torch.jit was given")
    check_has_values(module)
    tensors: Tensors = {}
    skipped: dict[str, str] = {}
    tied = tied_keys(module)
    for key, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            if isinstance(tensor, torch.nn.Parameter) and tensor.is_complex():
                raise InputError(
                    f"{key} of torch is a complex parameter: store its real and imaginary parts, as a real tensor"
                )
            skipped[key] = "not real numbers, so no weights: it keeps its own values"
        elif key in tied:
            skipped[key] = f"the same tensor as {tied[key]}"
        else:
            tensors[key] = as_array(tensor.to(torch.float64))
    statistics = ("running_mean", "running_var")
    frozen = frozen_keys(module)
    buffers = {key for key, _ in module.named_buffers() if key.rpartition(".")[2] not in statistics}
    return tensors, skipped, buffers | frozen


def check_has_values(module: Any) -> None:
    """Refuse a module with a tensor that has no values yet.

    Raises:
        InputError: a parameter or buffer has no shape, as in a lazy module before its first call, or is on the device meta.
    """
    from torch.nn.parameter import is_lazy

    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise InputError(f"{key} of torch has no shape before the first call: call the module once with inputs")
        if tensor.is_meta:
            raise InputError(f"{key} of torch is on the device meta, and has no values: make the module on cpu")


def tied_keys(module: Any) -> dict[str, str]:
    """Return the further keys of the tensors that a module has under several keys, with the first key of each."""
    first_keys: dict[int, str] = {}
    state = {**module.state_dict(keep_vars=True)}
    both = {key: first_keys.setdefault(id(tensor), key) for key, tensor in state.items()}
    return {key: first_key for key, first_key in both.items() if key != first_key}


def frozen_keys(module: Any) -> set[str]:
    """Return the keys of a module's frozen parameters, such as a table of positions; none if all are frozen."""
    trainable = {key: parameter.requires_grad for key, parameter in module.named_parameters()}
    return {key for key, is_trainable in trainable.items() if not is_trainable} if any(trainable.values()) else set()


def matrix_axes(module: Any) -> dict[str, Axes]:
    """Return the order of the axes of a module's matrices and kernels by key, for the classes that fix it."""
    import torch

    found: dict[str, Axes] = {}
    for path, inner in module.named_modules():
        is_linear = isinstance(inner, (torch.nn.Linear, torch.nn.MultiheadAttention))
        is_table = isinstance(inner, torch.nn.Embedding)
        is_convolution = isinstance(inner, torch.nn.modules.conv._ConvNd)
        # The layer of GPT-2 in transformers, which is a linear layer in spite of its name.
        is_of_gpt2 = type(inner).__name__ == "Conv1D" and hasattr(inner, "nf")
        is_other_order = is_of_gpt2 or isinstance(inner, torch.nn.modules.conv._ConvTransposeNd)
        names = "row width" if is_table else "in out" if is_other_order else "out in"
        if is_linear or is_table or is_convolution or is_of_gpt2:
            for name, parameter in inner.named_parameters(recurse=False):
                if parameter.ndim > 1:
                    found[f"{path}.{name}".lstrip(".")] = Axes(names)
    return found


def in_evaluation(params: Any) -> Any:
    """Return an NNX or Equinox module in evaluation mode, as a copy; any other parameters as they are."""
    from flax import nnx

    if isinstance(params, nnx.Module):
        params = nnx.clone(params)
        params.eval()
        return params
    equinox = sys.modules.get("equinox")  # a module of Equinox has imported it
    if equinox is not None and isinstance(params, equinox.Module):
        try:
            return equinox.nn.inference_mode(params)
        except ValueError:  # the arrays of a partitioned model, without its flags
            return params
    return params
