"""Runs of a model in JAX on CPU, which take weights by key and return outputs and gradients by name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.any_model.outputs import Loss, check_loss, default_loss, named_arrays
from parity.comparison.any_model.random_masks import MaskStream
from parity.comparison.any_model.report import GRADIENT_OF, STATISTICS
from parity.comparison.any_model.trace.choices import Arithmetic, Choices, run_in_jax
from parity.comparison.any_model.trace.fixed_parts import FixedPart, fixed_parts
from parity.comparison.any_model.trace.flax_graph import record_flax, trace
from parity.comparison.any_model.trace.flax_modules import name_modules_of, scopes_for_modules
from parity.comparison.any_model.trace.graph import Graph
from parity.comparison.any_model.trace.jaxpr import JaxprEvaluator, has_rounded_numbers
from parity.comparison.any_model.trace.numbers import intended_numbers
from parity.comparison.any_model.trace.rounded_operations import longest_sum
from parity.comparison.any_model.trace.scope import Scope, has_operation
from parity.comparison.any_model.weights import flatten
from parity.comparison.framework_settings import QUICK_COMPILE, exact_jax

Tensors = dict[str, Array]


class FlaxRunner:
    """Runs the Flax model in a dtype, "float64" or "float32".

    Attributes:
        weights: the weights to run with, by key.
        parts: the parts that the model computes in a fixed lower precision, known after the run in float64, which computes
            them in float64.
        training: paths of the NNX modules that run in training mode, known after the run in float64.
        statistics: running statistics and other variables that the last run has updated in training, by key.
        skipped: names and types of the parts of the return value that are no arrays.
        constants: keys of the weights that have no counterpart in the other model.
        longest_sum: the largest number of terms that an operation adds, known after `run_by_operation`.
    """

    def __init__(
        self,
        flax_apply: Callable[..., Any],
        params: Any,
        weights: Tensors,
        inputs: Sequence[Array],
        *,
        masks: MaskStream | None,
        loss: Loss | None,
        seed: int,
    ) -> None:
        """Prepare the model.

        Args:
            flax_apply, params: as for `compare_models`.
            weights: the weights to run with, by key.
            inputs: the inputs, with the order of axes in Flax.
            masks: the masks of dropout in training; None in evaluation.
            loss: function of the outputs; None for the mean squared error from targets drawn with `seed`.
            seed: seed of the targets.
        """
        self._apply, self._masks, self._loss, self._seed = flax_apply, masks, loss, seed
        self.weights, self._inputs = weights, inputs
        self._leaves, self._unflatten = flatten(params)
        self._collections = {"batch_stats": None, **dict.fromkeys(params if isinstance(params, Mapping) else ())}
        self._float_inputs = [n for n, x in enumerate(inputs) if np.issubdtype(x.dtype, np.floating)]
        self.skipped: dict[str, str] = {}
        self.constants: frozenset[str] = frozenset()
        self.statistics: Tensors = {}
        self.longest_sum = 1
        self._dtype = "float64"
        self._order: list[str] = []
        self._names: tuple[str, ...] = ()
        self.parts: list[FixedPart] = []
        self.training: list[str] = []
        self._tables: list[tuple[Array, Array]] = []
        self._compiled: dict[tuple[str, tuple[str, ...]], Callable[..., Any]] = {}

    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the outputs by name."""
        shapes = self._shapes(self._traced)
        return {name: shapes[name].shape for name in self._order}

    @cached_property
    def _traced(self) -> str:
        """The dtype in which a run in float64 is traced: float32 if the model only runs without 64-bit types."""
        try:
            self._shapes("float64")
        except (TypeError, ValueError) as error:
            try:
                self._shapes("float32")
            except (TypeError, ValueError):
                raise error from None
            return "float32"
        return "float64"

    def _shapes(self, dtype: str) -> dict[str, Any]:
        import jax

        with exact_jax(dtype):
            weights, floats = self._arguments(dtype)
            found: dict[str, Any] = jax.eval_shape(
                lambda *given: self._outputs(*given)[1], weights, self._all_inputs(floats)
            )
            return found

    def run(self, dtype: str, names: Sequence[str]) -> tuple[Tensors, Tensors, Tensors]:
        """Return outputs and loss by name, gradients of the weights by key, and gradients of the inputs by name.

        names: the outputs to return, in this order.
        """
        import jax

        self._dtype, self._names = self._traced if dtype == "float64" else dtype, tuple(names)
        step = self._step()
        with exact_jax(dtype):
            arguments = self._arguments(dtype)
            compiled = self._compiled.pop((dtype, self._names), None)
            if compiled is None:
                self._compiled.clear()  # one at a time: JAX keeps the constants of live functions, and their dtypes
                compiled = self._compile_in_float64(step) if dtype == "float64" else jax.jit(step)
            if self._masks is None:  # whose shapes are known from the trace
                self._compiled[dtype, self._names] = compiled
            returned = compiled(*arguments)
        return self._by_name(returned)

    def run_by_operation(
        self, choices: Choices, arithmetics: Sequence[Arithmetic], names: Sequence[str]
    ) -> Iterator[tuple[Tensors, Tensors, Tensors]]:
        """Yield the same as `run` in each arithmetic, the first of which is float32 and records the choices.

        All runs are of one trace in float32, operation by operation, so that each choice is that of the float32 result.

        Raises:
            OtherOperationsError: a later run computes other operations.
        """
        import jax

        self._dtype, self._names = "float32", tuple(names)
        self._compiled.clear()
        with exact_jax("float32"):
            traced = jax.jit(self._step()).trace(*self._arguments("float32"))
        structure, self.longest_sum = jax.tree.structure(traced.out_info), longest_sum(traced.jaxpr.jaxpr)
        for arithmetic in arithmetics:
            dtype = "float64" if arithmetic == "float64" else "float32"
            with exact_jax("float32" if arithmetic == "float32" else "float64"):
                arguments = jax.tree.leaves(self._arguments(dtype))
                leaves = run_in_jax(traced.jaxpr, arguments, choices, self._replace, arithmetic)
            choices.rewind()
            yield self._by_name(jax.tree.unflatten(structure, leaves))

    @property
    def updated(self) -> list[str]:
        """Keys of the weights that the last run has changed in training."""
        own = {key: array for key, array in self.statistics.items() if key in self.weights}
        return [key for key, array in own.items() if not np.array_equal(array, self.weights[key].astype(array.dtype))]

    def _step(self) -> Callable[..., Any]:
        import jax

        step: Callable[..., Any] = jax.value_and_grad(self._objective, argnums=(0, 1), has_aux=True)
        return step

    def _by_name(self, returned: Any) -> tuple[Tensors, Tensors, Tensors]:
        """Return what a step has returned; see `run`."""
        (value, outputs), (gradients, of_inputs) = returned
        input_gradients = {f"{GRADIENT_OF}input {n}": _host(x) for n, x in zip(self._float_inputs, of_inputs, strict=True)}
        self.statistics = {
            name.removeprefix(STATISTICS): _host(each) for name, each in outputs.items() if name.startswith(STATISTICS)
        }
        tensors = {**{name: _host(outputs[name]) for name in self._names}, "loss": _host(value)}
        return tensors, {key: _host(x) for key, x in gradients.items()}, input_gradients

    def record(self, dtype: str) -> Graph:
        """Return the operations of a forward pass outside of jit, with all values."""
        import jax

        def compared(weights: Any, inputs: Any) -> list[Any]:
            outputs = self._outputs(weights, inputs)[1]
            return [outputs[name] for name in self._names or outputs]

        traced = self._traced if dtype == "float64" else dtype
        self._compiled.clear()  # JAX keeps the constants of live functions, and their dtypes
        with exact_jax(traced):
            weights, floats = self._arguments(traced)
            inputs = self._all_inputs(floats)
            closed = trace(compared, weights, inputs)
        with exact_jax(dtype):
            weights, floats = self._arguments(dtype)
            for n, x in zip(self._float_inputs, floats, strict=True):
                inputs[n] = x
            arguments = [jax.tree.leaves(weights), inputs]
            constants = [n for n, key in enumerate(sorted(weights)) if key in self.constants]  # as JAX orders a dict
            return record_flax(closed, *arguments, constants=constants, replace=self._replace, exact=dtype == "float64")

    def keys_by_use(self, graph: Graph) -> list[str]:
        """Return the keys of the weights in the order in which a recorded forward pass first uses them."""
        keys = sorted(self.weights)  # as JAX orders the entries of a dict
        return [keys[n] for n in graph.sources_by_use() if n < len(keys)]

    def use_tables(self, tables: list[tuple[Array, Array]]) -> None:
        """Use the second array of each pair instead of a constant of the model that equals the first."""
        self._tables = tables
        self._compiled.clear()

    def _compile_in_float64(self, step: Callable[..., Any]) -> Callable[..., Any]:
        import jax

        with exact_jax(self._traced), scopes_for_modules() as self.training:
            traced = jax.jit(step).trace(*self._arguments(self._traced))
        # The gradient of a strided convolution that is not optimized takes longer than everything else.
        options = None if has_operation(traced.jaxpr.jaxpr, "conv_general_dilated") else QUICK_COMPILE
        if self._traced == "float64":
            self.parts = fixed_parts(traced.jaxpr)
            if not (self.parts or self._tables or has_rounded_numbers(traced.jaxpr)):
                compiled: Callable[..., Any] = traced.lower().compile(options)
                return compiled
        else:
            self.parts = [FixedPart("flax", "", self._traced, "trace")]
        evaluator = JaxprEvaluator(self._replace)
        run = jax.jit(lambda leaves: evaluator.run(traced.jaxpr, leaves, Scope()), compiler_options=options)
        structure = jax.tree.structure(traced.out_info)
        return lambda *given: jax.tree.unflatten(structure, run(jax.tree.leaves(given)))

    def _arguments(self, dtype: str) -> tuple[dict[str, Any], list[Any]]:
        import jax.numpy as jnp

        weights = {key: np.asarray(array, dtype) for key, array in self.weights.items()}
        for key in self.constants if dtype == "float64" else ():
            narrow = weights[key].astype(np.float32)
            weights[key] = intended_numbers(narrow) if np.array_equal(narrow, weights[key]) else weights[key]
        inputs = [jnp.asarray(np.asarray(self._inputs[n], dtype)) for n in self._float_inputs]
        return {key: jnp.asarray(array) for key, array in weights.items()}, inputs

    def _all_inputs(self, floats: Any) -> list[Any]:
        import jax.numpy as jnp

        # Without 64-bit types JAX makes complex64 of these again.
        inputs = [jnp.asarray(x.astype(np.complex128) if x.dtype.kind == "c" else x) for x in self._inputs]
        for n, x in zip(self._float_inputs, floats, strict=True):
            inputs[n] = x
        return inputs

    def _outputs(self, weights: Any, inputs: Any) -> tuple[Any, dict[str, Any]]:
        own = self._unflatten([leaf if key is None else weights[key] for key, leaf in self._leaves])
        name_modules_of(own)
        with self._masks.in_flax() if self._masks else nullcontext():
            returned = self._apply(own, *inputs)
        outputs = dict(named_arrays(returned, skipped=self.skipped))
        if self._masks:
            outputs = {f"{STATISTICS}{key}" if (key := self._updated_key(name)) else name: x for name, x in outputs.items()}
            # NNX modules update theirs in place.
            outputs |= {f"{STATISTICS}{key}": leaf for key, leaf in flatten(own)[0] if key and leaf is not weights.get(key)}
        self._order = [name for name in outputs if not name.startswith(STATISTICS)]  # JAX sorts the keys of dicts
        return returned, outputs

    def _updated_key(self, name: str) -> str:
        """Return the key of the variable whose update an output is, which linen returns if it is mutable; else ""."""
        for collection in self._collections:
            _, found, path = name.partition(f".{collection}.")
            key = f"{collection}/{path.replace('.', '/')}"
            if found and (collection == "batch_stats" or key in self.weights):  # those of parameters are without "params/"
                return key
        return ""

    def _objective(self, weights: Any, floats: Any) -> Any:
        import jax.numpy as jnp

        returned, outputs = self._outputs(weights, self._all_inputs(floats))
        statistics = {name: each for name, each in outputs.items() if name.startswith(STATISTICS)}
        outputs = {name: outputs[name] for name in self._names}
        loss = (
            default_loss(outputs, self._seed, partial(jnp.asarray, dtype=self._dtype))
            if self._loss is None
            else check_loss(self._loss(returned), "flax")
        )
        return loss, {**outputs, **statistics}

    def _replace(self, array: Any) -> Any:
        for old, new in self._tables:
            if old.shape == array.shape and np.array_equal(old, array):
                return new
        return array


def remedy(error: Exception) -> str:
    """Return a clause that says how to avoid an error of JAX or Flax in a model; "" for other errors."""
    import jax
    from flax.errors import ScopeCollectionNotFound

    needs_values = (
        jax.errors.ConcretizationTypeError,
        jax.errors.NonConcreteBooleanIndexError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    )
    if isinstance(error, needs_values):
        return "; flax_apply runs under jax.jit, which has no values: use jnp.where, jax.numpy for NumPy, and fixed shapes"
    if isinstance(error, ScopeCollectionNotFound):
        return "; give this collection in params, and mutable to apply if the model changes it"
    if "Reverse-mode differentiation does not work for lax.while_loop" in str(error):
        return "; gradients are compared: use jax.lax.scan, or jax.lax.fori_loop with static bounds"
    return ""


def _host(array: Any) -> Array:
    """Return an array of JAX as one of NumPy; bfloat16 as float32, in which it is exact."""
    out = np.asarray(array)
    return out.astype(np.float32) if str(out.dtype) == "bfloat16" else out
