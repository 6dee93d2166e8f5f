"""The choices of a run: what a function computes by a comparison, kept from a run in float32 for one in float64.

ReLU and a maximum choose, and their derivatives jump where two numbers are equal.  Where two numbers differ by less than
rounding errors, float32 may choose otherwise than float64, and the gradient then differs by the whole jump.  That says
nothing about the accuracy of the model.  So the gradient in float32 is compared with the one in float64 that makes the same
choices: both are gradients of the same smooth function.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from parity.checkpoints.arrays import as_array
from parity.checkpoints.layout import Array
from parity.comparison.any_model.trace.fixed_parts import narrow_float
from parity.comparison.any_model.trace.jaxpr import UnrolledEvaluator
from parity.comparison.any_model.trace.rounded_operations import is_rounded_in_jax, round_in_jax, round_in_torch
from parity.comparison.any_model.trace.scope import Scope, has_operation
from parity.comparison.tolerances import AMPLIFIED_ERROR_FACTOR, FLOAT32_TOLERANCE

# Operations that choose by an operand: its index.  All others choose by results that are integers or truth values.
_CHOOSING_OPERANDS = {
    "select_and_scatter_add": 1,  # of JAX, the gradient of a maximum over windows
    "threshold_backward": 1,
    "hardtanh_backward": 1,
    "leaky_relu_backward": 1,
    "hardshrink_backward": 1,
    "softshrink_backward": 1,
}
# How a run computes: in float32, which records its choices; in float64, which makes and counts them; or, with the same
# choices, each operation in float64 whose results are rounded to float32.
Arithmetic = Literal["float32", "float64", "rounded"]

_SIGNS = ("sign", "sgn")
_UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided")  # their results say nothing
_JUMP = 1e-3  # relative change of an entry that counts as another choice, and not as rounding


class OtherOperationsError(Exception):
    """A run does not compute the operations whose choices were recorded."""


class Choices:
    """The choices of one run of a model, in the order of its operations, and how many of them one in float64 would change.

    Attributes:
        entries: number of entries that the run in float64 has chosen.
        changed: number of those that it would have chosen otherwise.
        arrays: the choices by the names of operations, each in their order.
    """

    def __init__(self, arrays: Mapping[str, list[Any]] = MappingProxyType({})) -> None:
        """Keep the arrays of choices by the names of operations, if they are known."""
        self.entries = self.changed = 0
        self.arrays: dict[str, list[Any]] = defaultdict(list, arrays)
        self._used: dict[str, int] = defaultdict(int)

    def record(self, name: str, array: Array) -> None:
        """Keep the next choice of an operation."""
        self.arrays[name].append(array.copy())

    def rewind(self) -> None:
        """Let the next run make the recorded choices from the first one on."""
        self._used.clear()

    def recorded(self, name: str, shape: tuple[int, ...]) -> Any:
        """Return the next choice of an operation, which has the same shape as in the first run.

        Raises:
            OtherOperationsError: the first run has made no such choice.
        """
        n, arrays = self._used[name], self.arrays[name]
        self._used[name] += 1
        if n >= len(arrays) or arrays[n].shape != shape:
            raise OtherOperationsError(name)
        return arrays[n]

    def count(self, own: Any, chosen: Any) -> None:
        """Count the entries of the result of an operation that differ between its own choice and the recorded one.

        own, chosen: arrays of NumPy or of JAX, which may be tracers.
        """
        self.entries += own.size
        one, other = own.astype(np.float64), chosen.astype(np.float64)
        self.changed += (abs(one - other) > _JUMP * abs(other)).sum()

    @property
    def are_changed_by_rounding(self) -> bool:
        """Whether the share of changed entries is that of numbers which rounding errors may take across a limit.

        Numbers of unit variance with errors of the tolerance of G1 cross zero in a share of about this tolerance; errors
        inside a model may be larger than those of its outputs, by the factor that amplified errors have.  The number of
        such entries varies by chance, as in a Poisson distribution: it may be five standard deviations larger.  One may
        always be changed, since the expected number for a small model is far below one.
        """
        mean = AMPLIFIED_ERROR_FACTOR * FLOAT32_TOLERANCE * self.entries
        return bool(self.changed <= mean + 5 * mean**0.5 + 1)


class ChoosingEvaluator(UnrolledEvaluator):
    """Evaluates a jaxpr in an arithmetic, and records its choices or makes the recorded ones."""

    def __init__(self, choices: Choices, replace: Any, arithmetic: Arithmetic) -> None:
        super().__init__(replace, exact=arithmetic == "float64")
        self._choices, self._arithmetic = choices, arithmetic

    def operation(self, equation: Any, values: Sequence[Any]) -> list[Any]:
        if self._arithmetic == "rounded" and is_rounded_in_jax(equation):
            return round_in_jax(equation, values)
        return super().operation(equation, values)

    def bind(self, equation: Any, values: list[Any], scope: Scope) -> list[Any]:
        name, found = equation.primitive.name, super().bind(equation, values, scope)
        if name in _CHOOSING_OPERANDS:
            n = _CHOOSING_OPERANDS[name]
            if self._arithmetic == "float32":
                self._choices.record(name, np.asarray(values[n]))
                return found
            operand = self._choices.recorded(name, np.shape(values[n])).astype(values[n].dtype)
            chosen = super().bind(equation, [*values[:n], operand, *values[n + 1 :]], scope)
            if self._exact:
                self._choices.count(found[0], chosen[0])
            return chosen
        return [self._chosen(name, each) for each in found] if any(map(_is_floating, values)) else found

    def _chosen(self, name: str, own: Any) -> Any:
        """Return the choice to use instead of one's own."""
        import jax.numpy as jnp

        if _is_floating(own) and name not in _SIGNS:
            return own
        if self._arithmetic == "float32":
            self._choices.record(name, np.asarray(own))
            return own
        chosen = self._choices.recorded(name, own.shape).astype(own.dtype)
        if self._exact:
            self._choices.count(own, chosen)
        return jnp.asarray(chosen)


def run_in_jax(closed: Any, arguments: Sequence[Any], choices: Choices, replace: Any, arithmetic: Arithmetic) -> list[Any]:
    """Return the results of a ClosedJaxpr in an arithmetic.

    In float32 each operation is compiled alone, because fused operations would round, and choose, otherwise.  In float64,
    compiling all of them at once takes a fraction of the time; only loops are evaluated step by step.
    """
    import jax

    if arithmetic == "float32" or any(has_operation(closed.jaxpr, name) for name in ("scan", "while", "cond")):
        return ChoosingEvaluator(choices, replace, arithmetic).run(closed, arguments, Scope())

    def run(arguments: Sequence[Any], arrays: Mapping[str, list[Any]]) -> tuple[list[Any], Any]:
        own = Choices(arrays)
        results = ChoosingEvaluator(own, replace, arithmetic).run(closed, arguments, Scope())
        choices.entries += own.entries  # which shapes tell, while tracing
        return results, own.changed

    results: list[Any]
    results, changed = jax.jit(run)(arguments, dict(choices.arrays))
    choices.changed += int(changed)
    return results


def choose_in_torch(choices: Choices, arithmetic: Arithmetic) -> Any:
    """Return a context manager in which PyTorch records the choices of its operations, or makes the recorded ones."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map

    def recorded(name: str, own: Any) -> Any:
        array = choices.recorded(name, tuple(own.shape))
        return torch.tensor(array if array.dtype.kind in "biu" else array.astype(np.float64)).to(own.dtype)

    def chosen(name: str, own: Any) -> Any:
        is_choice = isinstance(own, torch.Tensor) and (not own.is_floating_point() or name in _SIGNS)
        if not is_choice or own.is_complex():
            return own
        if arithmetic == "float32":
            choices.record(name, as_array(own))
            return own
        found = recorded(name, own)
        if arithmetic == "float64":
            choices.count(as_array(own), as_array(found))
        return found

    def computed(function: Any, args: Any, kwargs: Any) -> Any:
        return round_in_torch(function, args, kwargs) if arithmetic == "rounded" else function(*args, **kwargs)

    class Choosing(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name = kwargs or {}, function._schema.name.partition("::")[2]
            found = computed(function, args, kwargs)
            if name in _CHOOSING_OPERANDS:
                n = _CHOOSING_OPERANDS[name]
                if arithmetic == "float32":
                    choices.record(name, as_array(args[n]))
                    return found
                same = computed(function, (*args[:n], recorded(name, args[n]), *args[n + 1 :]), kwargs)
                if arithmetic == "float64":
                    choices.count(as_array(found), as_array(same))
                return same
            given = (each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor))
            if function._schema.is_mutable or name in _UNWRITTEN or not any(each.is_floating_point() for each in given):
                return found
            return tree_map(lambda each: chosen(name, each), found)

    return Choosing()  # type: ignore[no-untyped-call]


def _is_floating(value: Any) -> bool:
    return bool(narrow_float(value)) or str(getattr(value, "dtype", "")) == "float64" or isinstance(value, float)
