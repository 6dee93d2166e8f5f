"""Where the operations of a jaxpr come from: the module, and the lines of the model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from parity.comparison.any_model.trace.flax_modules import module_of
from parity.comparison.any_model.trace.places import Stack, user_stack

_TRACED_ONCE = ("jit", "pjit", "custom_jvp_call", "custom_vjp_call")


@dataclass(frozen=True)
class Scope:
    """Where a jaxpr is used.

    module: path of the module whose call contains it.
    stack: the lines of the model that call it, if it is inside another jaxpr.
    function: file and name of the function that was traced to it; JAX traces a function of its own only once, so the lines
        that call it are those of its first use, which may be elsewhere.
    """

    module: str = ""
    stack: Stack = ()
    function: tuple[str, str] | None = None

    def inside(self, equation: Any) -> "Scope":
        """Return the scope of the operations inside an operation, or of itself."""
        module = module_of(str(equation.source_info.name_stack), self.module)
        inner = next((each for value in equation.params.values() for each in inner_jaxprs(value)), None)
        info = getattr(inner, "debug_info", None)
        function = (
            (info.func_filename, info.func_name) if info is not None and equation.primitive.name in _TRACED_ONCE else None
        )
        return Scope(module, self.stack_of(equation), function)

    def stack_of(self, equation: Any) -> Stack:
        """Return the lines of the model that an operation in this scope comes from."""
        traceback = equation.source_info.traceback
        frames = [(f.file_name, f.line_num, f.function_name) for f in traceback.frames] if traceback else []
        if self.function is None:
            return user_stack(frames) or self.stack
        inside = [file == self.function[0] and name.rpartition(".")[2] == self.function[1] for file, _, name in frames]
        own = frames[: len(inside) - inside[::-1].index(True)] if any(inside) else []
        return (*user_stack(own), *self.stack)


def inner_jaxprs(value: Any) -> Iterator[Any]:
    """Yield the jaxprs in a parameter of an operation."""
    if hasattr(value, "jaxpr"):
        yield value.jaxpr
    elif hasattr(value, "eqns"):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from inner_jaxprs(each)


def has_operation(jaxpr: Any, name: str) -> bool:
    """Return whether a jaxpr, or one inside it, has an operation of this name."""
    return any(
        equation.primitive.name == name
        or any(has_operation(inner, name) for value in equation.params.values() for inner in inner_jaxprs(value))
        for equation in jaxpr.eqns
    )
