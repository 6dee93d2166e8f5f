"""The paths of the modules of a Flax or Equinox model in the name stacks of its operations.

While a model is traced, every call of a module opens a named scope, whose name is the path of the module in brackets.  An
operation belongs to the innermost such scope.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_SCOPE = re.compile(r"\[([^\[\]]*)\]")


def module_of(scopes: str, default: str = "") -> str:
    """Return the path of the innermost module in a name stack, or a default if it has none."""
    found = _SCOPE.findall(scopes)
    return found[-1] if found else default


_Children = Callable[[Any], Iterator[tuple[str, Any]]]
_active: list["_Paths"] = []  # of the kinds of modules whose calls open scopes now


@contextmanager
def scopes_for_modules() -> Iterator[list[str]]:
    """Open a named scope in every call of a linen, NNX or Equinox module.

    Yields:
        A list to which the path of every NNX module is added that is called in training mode.
    """
    training: list[str] = []
    with _linen_scopes(), _class_scopes(_nnx_classes(), _nnx_children, training):
        with _class_scopes(_equinox_classes(), _equinox_children, []):
            yield training


def name_modules_of(model: Any) -> None:
    """Give the modules inside a model their paths, if a method of it will be called that opens no scope."""
    for paths in _active:
        paths.add(model, "")


def _named_scope(path: str) -> Any:
    import jax

    return jax.named_scope(f"[{path}]")


def _visible(returned: Any, given: Any) -> Any:
    """Return what a module returns; a copy of it if it is what it was given, so that the call leaves an operation."""
    import jax

    if isinstance(returned, jax.core.Tracer) and any(each is returned for each in given):
        return jax.numpy.array(returned, copy=True)
    return returned


@contextmanager
def _linen_scopes() -> Iterator[None]:
    from flax import linen

    def interceptor(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name == "setup":
            return call(*args, **kwargs)
        with _named_scope("/".join(context.module.path)):
            return _visible(call(*args, **kwargs), args)

    with linen.intercept_methods(interceptor):
        yield


class _Paths:
    """The paths of modules that do not know them.

    The first module that is called is the model, unless `name_modules_of` has named one.
    """

    def __init__(self, children: _Children, training: list[str]) -> None:
        self._children, self._training = children, training
        self._known: dict[int, tuple[str, Any]] = {}  # the module is kept, so that no other object gets its id
        self._calls: list[str] = []  # the paths of the modules that are being called, the innermost last

    def add(self, module: Any, path: str) -> None:
        """Add the path of a module, and those of all of its parts."""
        left = [(path, module)]
        while left:
            path, part = left.pop()
            if id(part) not in self._known:
                self._known[id(part)] = (path, part)
                left += [(f"{path}/{name}".lstrip("/"), each) for name, each in self._children(part)]

    def _path_of_copy(self, module: Any) -> str:
        """Return the path of a module that was made while the model ran, as `nnx.scan` makes them.

        It is that of the only module of its class inside the one that is being called, or else ends in its class.
        """
        outer = f"{self._calls[-1]}/".lstrip("/")
        same = {path for path, each in self._known.values() if type(each) is type(module) and path.startswith(outer)}
        return same.pop() if len(same) == 1 else f"{outer}{type(module).__name__}"

    @contextmanager
    def calling(self, module: Any) -> Iterator[None]:
        """Open a scope for the call of a module."""
        if id(module) not in self._known:  # the model, or a copy that was made while it ran
            self.add(module, self._path_of_copy(module) if self._calls else "")
        self._calls.append(self._known[id(module)][0])
        is_random = getattr(module, "deterministic", None) is False and getattr(module, "rate", 1) > 0
        if is_random or getattr(module, "use_running_average", None) is False:
            self._training.append(self._calls[-1])
        try:
            with _named_scope(self._calls[-1]):
                yield
        finally:
            self._calls.pop()


@contextmanager
def _class_scopes(classes: Iterator[type], children: _Children, training: list[str]) -> Iterator[None]:
    """Open a scope in `__call__` of classes whose instances do not know their paths.

    Args:
        classes: the classes.
        children: yields the names and values of the parts of an instance.
        training: the list to which the paths of modules in training mode are added.
    """
    paths = _Paths(children, training)

    def wrap(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with paths.calling(self):
                return _visible(original.__get__(self)(*args, **kwargs), args)

        return call

    patched = [(each, vars(each)["__call__"]) for each in classes if "__call__" in vars(each)]
    _active.append(paths)
    try:
        for each, original in patched:
            type.__setattr__(each, "__call__", wrap(original))
        yield
    finally:
        for each, original in patched:
            type.__setattr__(each, "__call__", original)
        _active.remove(paths)


def _nnx_classes() -> Iterator[type]:
    from flax import nnx

    yield from _subclasses(nnx.Module)


def _nnx_children(part: Any) -> Iterator[tuple[str, Any]]:
    from flax import nnx

    if isinstance(part, nnx.Module):
        yield from _containers((name, each) for name, each in vars(part).items() if not name.startswith("_pytree"))
    else:
        yield from _containers(_items(part))


def _equinox_classes() -> Iterator[type]:
    equinox = sys.modules.get("equinox")  # a model of Equinox has imported it
    if equinox is not None:
        yield from _subclasses(equinox.Module)


def _equinox_children(part: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(part):
        fields = ((each.name, getattr(part, each.name, None)) for each in dataclasses.fields(part))
        yield from _containers(fields)
    else:
        yield from _containers(_items(part))


def _items(part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, Mapping):
        yield from ((str(name), each) for name, each in part.items())
    elif isinstance(part, (list, tuple)):
        yield from ((str(n), each) for n, each in enumerate(part))


def _containers(items: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the items that are modules, or that may contain modules."""
    from flax import nnx

    for name, each in items:
        if isinstance(each, (nnx.Module, Mapping, list, tuple)) or (dataclasses.is_dataclass(each) and callable(each)):
            yield name, each


def _subclasses(base: type) -> Iterator[type]:
    """Yield a class and all of its subclasses, each once."""
    seen, left = set(), [base]
    while left:
        each = left.pop()
        if each not in seen:
            seen.add(each)
            yield each
            left += type.__subclasses__(each)
