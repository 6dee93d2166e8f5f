"""A Flax module of the user, linen or NNX, as an `OwnModel`."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from parity.checkpoints.conversion import nest
from parity.checkpoints.layout import Array
from parity.comparison.any_model.trace.jaxpr import JaxprEvaluator
from parity.comparison.any_model.trace.scope import Scope, inner_jaxprs
from parity.comparison.framework_settings import QUICK_COMPILE, exact_jax
from parity.comparison.monte_carlo_arithmetic import perturb_array
from parity.comparison.own_model.construct import Built
from parity.comparison.own_model.model import (
    FIXED_DTYPE,
    ImageShape,
    OwnModel,
    Trace,
    Weights,
    as_float64,
    select_output,
    simple_settings,
)
from vit_spec import InputError
from vit_spec.errors import first_line

# Arguments of a forward pass that select inference, with the values for it.
_INFERENCE = {"train": False, "training": False, "is_training": False, "deterministic": True, "use_running_average": True}
# Operations that round their results; one that is missing here makes the measured rounding errors smaller.
_ROUNDED = frozenset(
    "add add_any sub mul div dot_general conv_general_dilated reduce_sum cumsum exp exp2 expm1 log log1p logistic tanh erf "
    "erfc sqrt rsqrt square integer_pow pow sin cos".split()
)


class FlaxModel(OwnModel):
    """A Flax module as a pure function, compiled for float64 on CPU."""

    twin = "jax"
    separator = "/"

    def __init__(self, built: Built) -> None:
        super().__init__(built.name)
        self.settings = [(name, value) for name, value in built.arguments.items()]
        self._channels_last = True
        self._compiled: dict[str, Any] = {}

    def _apply(self, weights: Mapping[str, Any], images: Any) -> Any:
        """Return the output for weights by key and images in the model's own order of axes."""
        raise NotImplementedError

    def run(self, weights: Weights, images: Array, inference: bool = False) -> Array:
        output = self._execute("run", self._output, weights, images)
        return np.asarray(output)

    def gradients(self, weights: Weights, images: Array, target: Array) -> tuple[Array, dict[str, Array]]:
        import jax

        step = jax.grad(self._loss, has_aux=True)
        found, output = self._execute("gradients", step, weights, images, target)
        unused = set(weights) - set(self.trace(weights, images).order)
        return np.asarray(output), {key: np.asarray(each) for key, each in found.items() if key not in unused}

    def perturbed_gradients(
        self, weights: Weights, images: Array, target: Array, seed: int
    ) -> tuple[Array, dict[str, Array]]:
        import jax
        import jax.numpy as jnp

        with exact_jax("float64"):
            arguments = (*self._arguments(weights, images), jnp.asarray(target))
            step = jax.make_jaxpr(jax.grad(self._loss, has_aux=True), return_shape=True)
            closed, shape = self._guarded(lambda: step(*arguments))
            with jax.disable_jit():  # scans run step by step, so that each has perturbations of its own
                found = _PerturbedOperands(seed).run(closed, jax.tree.leaves(arguments), Scope())
        gradients, output = jax.tree.unflatten(jax.tree.structure(shape), found)
        return np.asarray(output), {key: np.asarray(each) for key, each in gradients.items()}

    def _loss(self, weights: Any, images: Any, target: Any) -> Any:
        import jax.numpy as jnp

        output = self._output(weights, images)
        return jnp.square(output - target).mean(), output

    def trace(self, weights: Weights, images: Array) -> Trace:
        trace = Trace()
        with exact_jax("float64"):
            arrays, x = self._arguments(weights, images)
            closed = self._guarded(lambda: self._jitted("run", self._output).trace(arrays, x).jaxpr)
        names = dict(zip(closed.jaxpr.invars, sorted(arrays), strict=False))  # the last one is x
        _walk(closed.jaxpr, names, trace)
        return trace

    def _output(self, weights: Any, images: Any) -> Any:
        output = select_output(self._apply(weights, images))
        if output.ndim < 2:
            raise InputError(f"its output has the shape {output.shape}: return the logits of a batch, (B, classes)")
        if str(output.dtype) != "float64":
            raise InputError(f"its output is {output.dtype}, with weights and images in float64: {FIXED_DTYPE}")
        return output

    def _arguments(self, weights: Weights, images: Array) -> tuple[dict[str, Any], Any]:
        import jax

        arrays = {key: as_float64(array) for key, array in {**self.weights, **weights}.items()}
        x = as_float64(images)
        # jnp.asarray would compile a program for each shape.
        return jax.device_put(arrays), jax.device_put(x if self._channels_last else np.moveaxis(x, -1, 1))

    def _execute(self, name: str, function: Callable[..., Any], weights: Weights, *arrays: Array) -> Any:
        import jax.numpy as jnp

        with exact_jax("float64"):
            mine, x = self._arguments(weights, arrays[0])
            program = self._jitted(name, function)
            return self._guarded(lambda: program(mine, x, *(jnp.asarray(each) for each in arrays[1:])))

    def _jitted(self, name: str, function: Callable[..., Any]) -> Any:
        """Return the compiled function of a name, one for each shape of images, so that it is traced once for a shape."""
        import jax

        if name not in self._compiled:
            self._compiled[name] = jax.jit(function, compiler_options=QUICK_COMPILE)
        return self._compiled[name]

    def _guarded(self, run: Callable[[], Any]) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return run()
        except InputError:
            raise
        except (Exception, SystemExit, GeneratorExit) as error:  # of the user's code
            raise InputError(f"its forward pass raised {first_line(error)}") from None


class LinenModel(FlaxModel):
    """A linen module."""

    def __init__(self, built: Built) -> None:
        super().__init__(built)
        self._module = built.model
        self._flags = _inference_flags(type(self._module).__call__)
        self._others: dict[str, Any] = {}

    def fit(self, images: ImageShape) -> str:
        import jax
        import jax.numpy as jnp
        from flax import linen
        from flax.core import meta

        self._channels_last, self._compiled = images.channels_last, {}
        size = (images.height, images.width)
        shape = (2, *size, images.channels) if images.channels_last else (2, images.channels, *size)
        settings: list[tuple[str, Any]] = []

        def record(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            settings.extend(simple_settings(context.module))
            return call(*args, **kwargs)

        def init() -> Any:
            keys = {name: jax.random.key(0) for name in ("params", "dropout")}
            return self._module.init(keys, jnp.zeros(shape), **self._flags)

        try:
            with exact_jax("float64"), linen.intercept_methods(record):
                program, variables = self._guarded(lambda: jax.make_jaxpr(init, return_shape=True)())
                variables = self._guarded(lambda: _with_constants(program, variables))
        except InputError as error:
            return str(error)
        variables = meta.unbox(variables)
        parameters = jax.tree.map(lambda leaf: np.zeros(leaf.shape), variables.get("params", {}))
        self.weights = dict(_flatten(parameters))
        self._others = {name: value for name, value in variables.items() if name not in ("params", "intermediates")}
        self.constants = {f"{name}/{key}": array for name, tree in self._others.items() for key, array in _flatten(tree)}
        self.settings += [each for each in settings if each not in self.settings]
        return ""

    def _apply(self, weights: Mapping[str, Any], images: Any) -> Any:
        return self._module.apply({"params": nest(weights.items()), **self._others}, images, **self._flags)


def _with_constants(program: Any, variables: Any) -> Any:
    """Return the variables of a module, of which those that are no parameters have values, which matter.

    program: the jaxpr that initializes the module.  The operations for parameters, and of the forward pass, are left out.
    """
    import jax
    from jax.interpreters import partial_eval

    paths, structure = jax.tree_util.tree_flatten_with_path(variables)
    needed = [path[0].key not in ("params", "intermediates") for path, _ in paths]
    if not any(needed):
        return variables
    jaxpr, _ = partial_eval.dce_jaxpr(program.jaxpr, needed)
    values = iter(jax.core.eval_jaxpr(jaxpr, program.consts))
    leaves = [next(values) if is_needed else leaf for (_, leaf), is_needed in zip(paths, needed, strict=True)]
    return jax.tree.unflatten(structure, leaves)


class NnxModel(FlaxModel):
    """An NNX module."""

    def __init__(self, built: Built) -> None:
        super().__init__(built)
        from flax import nnx

        model = nnx.clone(built.model)
        model.eval()
        _let_compute_in_float64(model)
        parts: Any = nnx.split(model, nnx.Param, ...)
        self._graph, self._state, self._rest = parts
        self.weights = {key: as_float64(array) for key, array in _flatten(nnx.to_pure_dict(self._state))}
        flat = {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(self._rest)}
        self.generators = frozenset(key for key, variable in flat.items() if isinstance(variable, nnx.RngState))
        self.constants = {key: np.asarray(variable[...]) for key, variable in flat.items() if key not in self.generators}
        for _, inner in nnx.iter_graph(model):
            if isinstance(inner, nnx.Module):
                self.settings += simple_settings(inner)
        self._flags = _inference_flags(type(model).__call__)

    def fit(self, images: ImageShape) -> str:
        self._channels_last, self._compiled = images.channels_last, {}
        try:
            self.trace({}, np.zeros((2, images.height, images.width, images.channels)))
        except InputError as error:
            return str(error)
        return ""

    def _apply(self, weights: Mapping[str, Any], images: Any) -> Any:
        from flax import nnx

        flat = dict(nnx.to_flat_state(self._state))
        for path, variable in flat.items():
            flat[path] = variable.replace(weights["/".join(map(str, path))])
        state = nnx.from_flat_state(flat)
        model = nnx.merge(self._graph, state, self._rest)
        return model(images, **self._flags)


class _PerturbedOperands(JaxprEvaluator):
    """Evaluates a jaxpr with random perturbations of the operands of the operations that round."""

    def __init__(self, seed: int) -> None:
        super().__init__(exact=False)
        self._rng = np.random.default_rng(seed)

    def bind(self, equation: Any, values: list[Any], scope: Scope) -> list[Any]:
        if equation.primitive.name in _ROUNDED:
            values = [self._perturb(value) for value in values]
        return self.operation(equation, values)

    def _perturb(self, value: Any) -> Any:
        import jax.numpy as jnp

        is_float = jnp.issubdtype(jnp.result_type(value), jnp.floating)
        return jnp.asarray(perturb_array(np.asarray(value), "float64", self._rng)) if is_float else value


def _flatten(tree: Any, path: str = "") -> Iterator[tuple[str, Array]]:
    for name, value in tree.items():
        key = f"{path}/{name}" if path else str(name)
        if isinstance(value, Mapping):
            yield from _flatten(value, key)
        else:
            yield key, np.asarray(value)


def _let_compute_in_float64(model: Any) -> None:
    """Let the layers of an NNX module that fix their dtype compute in float64, as `double()` does in PyTorch.

    nnx.Embed fixes the dtype of its initial values.  Attention without dropout calls jax.nn.dot_product_attention, whose
    softmax is in float32; with dropout it computes the same function by itself, in the dtype of its inputs.
    """
    import jax.numpy as jnp
    from flax import nnx

    def attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
        options |= {"dropout_rate": options["dropout_rate"] or 0.5}  # without effect: it is deterministic
        return nnx.dot_product_attention(query, key, value, **options)

    for _, inner in nnx.iter_graph(model):
        if isinstance(inner, nnx.MultiHeadAttention) and inner.attention_fn is nnx.dot_product_attention:
            inner.attention_fn = attention
        dtype = getattr(inner, "dtype", None) if isinstance(inner, nnx.Module) else None
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
            inner.dtype = jnp.float64


def _inference_flags(method: Callable[..., Any]) -> dict[str, bool]:
    """Return the arguments of a forward pass that select inference."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return {}
    return {name: value for name, value in _INFERENCE.items() if name in parameters}


def _walk(jaxpr: Any, names: Mapping[Any, str], trace: Trace) -> None:
    """Record the operations of a jaxpr, and of those inside it."""
    import jax

    names = dict(names)
    for equation in jaxpr.eqns:
        inner = [each for value in equation.params.values() for each in inner_jaxprs(value)]
        known = [names.get(v) if not isinstance(v, jax.extend.core.Literal) else None for v in equation.invars]
        for variable in equation.invars:
            if isinstance(variable, jax.extend.core.Literal) and np.ndim(variable.val) == 0:
                trace.number(float(variable.val))
        for each in inner:
            offset = len(equation.invars) - len(each.invars)  # of constants that only the outer operation has
            mapped = {v: name for v, name in zip(each.invars, known[max(0, offset) :], strict=False) if name}
            _walk(each, mapped, trace)
        if not inner:
            for name in filter(None, known):
                trace.use(name)
            trace.convert(*([v.aval for v in several] for several in (equation.invars, equation.outvars)))
