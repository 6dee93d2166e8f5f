"""`assert_parity`: assert that a Flax model and a PyTorch module compute the same function with the same precision.

The checks and tolerances are the same as for the twins (`parity.comparison.tolerances`).  G0: in float64 on CPU, outputs
and gradients agree to 1e-12.  G1: in float32, the errors of both models from the float64 result are small and similar.
Weights and gradients are converted with the same mapping of parameters, which
`parity.comparison.any_model.correspondence` finds and the report shows.
"""

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, Literal

from parity.comparison.any_model.both_models import BothModels
from parity.comparison.any_model.comparison import Comparison
from parity.comparison.any_model.report import PairReport, UnequalWeightsError
from vit_spec import InputError

LEVELS = ("function", "precision")
WEIGHT_SOURCES = ("flax", "torch", "equal")


def assert_parity(
    flax_apply: Callable[..., Any],
    params: Any,
    torch_module: Any,
    inputs: Any,
    *,
    layouts: str | Sequence[str] = (),
    weights: Literal["flax", "torch", "equal"] = "flax",
    input_axes: str | Sequence[str] = (),
    output_axes: str | Sequence[str] = (),
    outputs: str | Sequence[str] = (),
    loss: Callable[[Any], Any] | tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None,
    train: bool = False,
    level: Literal["function", "precision"] = "precision",
    seed: int = 0,
) -> PairReport:
    """Assert that a Flax model and a PyTorch module compute the same function with the same precision.

    Both models run with the same weights and inputs, and outputs, loss and gradients are compared.  Neither model is
    changed: copies run on CPU, in evaluation mode unless `train` is given.

    Args:
        flax_apply: called as `flax_apply(params, *inputs)`: a linen `model.apply`, or any function; it is jitted.
        params: the first argument of `flax_apply`, a pytree: linen variables with their collections, an nnx.State, an
            nnx.Module or an Equinox module.
        torch_module: a torch.nn.Module, called as `torch_module(*inputs)`.
        inputs: one array of any framework, or a tuple of arrays; floating-point arrays are rounded to float32, complex
            ones to complex64, and gradients of complex ones are not compared; integers stay integers.
        layouts: lines "flax key | axes <-> torch key | axes" for parameters that names and shapes do not match.
        weights: the model whose weights both models run with; "equal" requires that they are already equal bit for bit.
        input_axes, output_axes: for each input or output in turn, its axes in Flax and in PyTorch, e.g.
            "b y x c <-> b c y x", or "" if their order is the same.  A single string is for the first one, and the order
            is the same for all that are not given.
        outputs: the outputs to compare, by name, such as "last_hidden_state" or "output <-> logits"; by default all that
            both models return.  A complex output is two, such as "output.real" and "output.imag".
        loss: function of a model's return value, written with operations that arrays of both frameworks have, or a pair of
            functions, one for Flax and one for PyTorch; the default is the mean squared error from standard normal targets,
            summed over the outputs, without entries that are infinite or at least 1e8, as those of masks.
        train: run PyTorch in training mode, and Flax as `flax_apply` says; the n-th dropout of both models has the same
            mask, and its rate is compared.  Running statistics and other buffers that change are compared if NNX modules
            update them, or if `flax_apply` returns them, as linen does with `mutable=["batch_stats"]`.
        level: "function" for G0 only, "precision" for G0 and G1.
        seed: seed of the targets of the default loss, and of the masks of dropout.

    Returns:
        The report of a pair of models that passes.

    Raises:
        AssertionError: a tensor exceeds its tolerance, and the message is the report; or weights="equal", and the weights
            differ.
        InputError: a framework is not installed, the mapping of parameters is ambiguous, inputs or outputs do not match,
            an output is NaN, a gradient is NaN in both models, JAX cannot trace or differentiate the Flax model, or a model
            cannot compute in float64.
    """
    __tracebackhide__ = True
    try:
        report = compare_models(
            flax_apply,
            params,
            torch_module,
            inputs,
            layouts=layouts,
            weights=weights,
            input_axes=input_axes,
            output_axes=output_axes,
            outputs=outputs,
            loss=loss,
            train=train,
            level=level,
            seed=seed,
        )
    except (InputError, UnequalWeightsError) as error:
        raise error.with_traceback(None) from error.__cause__  # pytest would print the source of this package
    if not report.passed:
        raise AssertionError(str(report))
    return report


def compare_models(
    flax_apply: Callable[..., Any],
    params: Any,
    torch_module: Any,
    inputs: Any,
    *,
    layouts: str | Sequence[str] = (),
    weights: Literal["flax", "torch", "equal"] = "flax",
    input_axes: str | Sequence[str] = (),
    output_axes: str | Sequence[str] = (),
    outputs: str | Sequence[str] = (),
    loss: Callable[[Any], Any] | tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None,
    train: bool = False,
    level: Literal["function", "precision"] = "precision",
    seed: int = 0,
) -> PairReport:
    """Return the report of `assert_parity` for a pair of models, whether it passes or not; the arguments are the same.

    Raises:
        UnequalWeightsError: weights="equal", and the weights differ; it is an AssertionError.
        InputError: as for `assert_parity`.
    """
    for name, value, known in (("level", level, LEVELS), ("weights", weights, WEIGHT_SOURCES)):
        if value not in known:
            raise InputError(f"{name} is {value!r}: give one of {', '.join(known)}")
    if not isinstance(train, bool):
        raise InputError(f"train is {train!r}: give True or False")
    if not isinstance(seed, Integral) or seed < 0:
        raise InputError(f"seed is {seed!r}: give an integer that is not negative")
    if not callable(flax_apply):
        raise InputError(f"flax_apply is a {type(flax_apply).__name__}: give a function, such as model.apply")
    models = BothModels(
        flax_apply,
        params,
        torch_module,
        inputs,
        weights=weights,
        axes=(input_axes, output_axes),
        outputs=outputs,
        loss=loss,
        train=train,
        seed=seed,
    )
    comparison = Comparison(models, torch_module, layouts)
    comparison.match()
    models.name_outputs()
    models.run("float64")
    if not models.is_same_function:
        comparison.use_one_table()
    if not models.is_same_function:
        comparison.try_orders_of_axes()
    if not models.is_same_function:
        comparison.try_order_of_use()
    if level == "precision":
        models.run("float32")
        if models.is_only_inexact:
            models.run_by_operation()
    return comparison.report(level)
