"""Operations computed in float64 whose results are rounded to float32, and the length of the sums that they compute.

The float32 error of a long sum depends on the order in which a library adds, which says nothing about a model.  If every
operation is exact except for the rounding of its result, only the formulas of the model are left to differ.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from parity.comparison.any_model.trace.jaxpr import operation_in_float64
from parity.comparison.any_model.trace.scope import inner_jaxprs

# Arguments that operations of PyTorch change, although their schemas do not say so: here the running statistics.
_WRITTEN_ARGUMENTS = {"native_batch_norm": (3, 4)}


def is_rounded_in_jax(equation: Any) -> bool:
    """Return whether `round_in_jax` takes an operation: its floating-point numbers are in float32, and it computes."""
    dtypes = [str(getattr(each.aval, "dtype", "")) for each in (*equation.invars, *equation.outvars)]
    return equation.primitive.name != "reduce_precision" and {each for each in dtypes if "float" in each} == {"float32"}


def round_in_jax(equation: Any, values: Sequence[Any]) -> list[Any]:
    """Return the results of an operation of JAX that is computed in float64, rounded to float32.

    64-bit types must be enabled.
    """
    import jax.numpy as jnp

    pairs = zip(values, equation.invars, strict=True)
    wide = [jnp.asarray(value, "float64") if each.aval.dtype == "float32" else value for value, each in pairs]
    found = zip(operation_in_float64(equation, wide), equation.outvars, strict=True)
    return [(_rounded(each) if each.dtype == "float64" else each).astype(variable.aval.dtype) for each, variable in found]


def _rounded(array: Any) -> Any:
    """Return an array with the precision of float32, which XLA keeps; it may fuse a conversion with the next operation."""
    import jax

    return jax.lax.reduce_precision(array, 8, 23)


def round_in_torch(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation of PyTorch that is computed in float64, and rounded to float32.

    Operations on other floating-point types, views, random numbers and operations in place are computed as they are.
    """
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    schema, leaves = function._schema, tree_leaves((args, kwargs))
    types = {each.dtype for each in leaves if isinstance(each, torch.Tensor) and each.is_floating_point()}
    types |= {each for each in leaves if isinstance(each, torch.dtype)}
    is_in_place = schema.is_mutable or any(each.alias_info for each in schema.returns)
    if types != {torch.float32} or is_in_place or torch.Tag.nondeterministic_seeded in function.tags:
        return function(*args, **kwargs)

    def widened(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(torch.float64) if leaf.dtype == torch.float32 else leaf
        return torch.float64 if leaf is torch.float32 else leaf

    def narrowed(leaf: Any) -> Any:
        return leaf.to(torch.float32) if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 else leaf

    wide = tree_map(widened, args)
    try:
        found = function(*wide, **tree_map(widened, kwargs))
    except (RuntimeError, NotImplementedError):  # no kernel for float64
        return function(*args, **kwargs)
    for n in _WRITTEN_ARGUMENTS.get(schema.name.partition("::")[2], ()):
        if args[n] is not None:
            args[n].copy_(wide[n])
    return tree_map(narrowed, found)


def longest_sum(jaxpr: Any) -> int:
    """Return the largest number of terms that an operation of a jaxpr adds, or that the steps of a scan may add."""
    return max((n for equation in jaxpr.eqns for n in _sums(equation)), default=1)


def _sums(equation: Any) -> Iterator[int]:
    """Yield numbers of terms of the sums that an operation computes."""
    name, params = equation.primitive.name, equation.params
    shapes = [each.aval.shape for each in equation.invars if hasattr(each.aval, "shape")]
    if name == "dot_general":
        yield prod(shapes[0][axis] for axis in params["dimension_numbers"][0][0])
    elif name == "conv_general_dilated":
        yield prod(shapes[1]) // max(shapes[1][params["dimension_numbers"].rhs_spec[0]], 1)
    elif name == "reduce_sum":
        yield prod(shapes[0][axis] for axis in params["axes"])
    elif name == "reduce_window_sum":
        yield prod(params["window_dimensions"])
    elif name == "cumsum":
        yield shapes[0][params["axis"]]
    elif name in ("scatter-add", "scatter_add"):
        yield prod(shapes[1][:-1])
    elif name == "scan":
        yield params["length"]
    yield from (longest_sum(inner) for value in params.values() for inner in inner_jaxprs(value))
