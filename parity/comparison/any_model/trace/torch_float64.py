"""A mode in which a PyTorch module computes all of its parts in float64, also those with a fixed lower precision."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from parity.comparison.any_model.trace.fixed_parts import FixedPart
from parity.comparison.any_model.trace.numbers import intended_numbers
from parity.comparison.any_model.trace.places import current_stack

_CASTS = ("float", "half", "bfloat16")  # methods of tensors
# Functions whose gradients multiply by 1/6 in float32 also in float64 (ATen/native/cpu/Activation.cpp).
_INEXACT: dict[str, Callable[[Any], Any]] = {
    "hardsigmoid": lambda x: (x + 3).clamp(0, 6) / 6,
    "hardswish": lambda x: x * ((x + 3).clamp(0, 6) / 6),
}


@contextmanager
def all_in_float64(module: Any, parts: list[FixedPart]) -> Iterator[None]:
    """Replace every floating-point dtype that the code of a module fixes by float64, and add the places to `parts`."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._pytree import tree_map

    narrow = {torch.float32, torch.float16, torch.bfloat16}
    tensor_types = (torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor)
    dtypes = {key: each.dtype for each in tensor_types for key in (each, torch.typename(each))}  # as Tensor.type takes them
    # In the place of its original in all operations, also those that change it in place.  The original is kept, so that no
    # other tensor gets its id.
    converted: dict[int, tuple[Any, Any]] = {}

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, found = kwargs or {}, []
            name = getattr(func, "__name__", "")

            def convert(leaf: Any) -> Any:
                if isinstance(leaf, torch.dtype) and leaf in narrow:
                    found.append(leaf)
                    return torch.float64
                if name == "type" and leaf in dtypes:
                    found.append(dtypes[leaf])
                    return torch.float64
                if isinstance(leaf, torch.Tensor) and leaf.dtype in narrow:
                    found.append(leaf.dtype)
                    return converted.setdefault(id(leaf), (leaf, _widened(leaf)))[1]
                return leaf

            if name == "__set__":
                return func(*args, **kwargs)
            if name == "__get__":
                name, value = func.__self__.__name__, func(*args, **kwargs)
                if not (isinstance(value, torch.Tensor) and value.dtype in narrow):  # as tensor.T is, or tensor.data
                    return value
            args, kwargs = tree_map(convert, args), tree_map(convert, kwargs)
            if name == "rms_norm" and kwargs.get("eps") is None and len(args) < 4:
                # Its default depends on the dtype; the model's is that of float32.
                kwargs = {**kwargs, "eps": torch.finfo(torch.float32).eps}
            if name in _INEXACT:
                parts.append(FixedPart("torch", scopes.current, "float32", f"{name}_backward", current_stack()))
                return _INEXACT[name](args[0] if args else kwargs["input"])
            if name in _CASTS and not found and isinstance(args[0], torch.Tensor):
                found.append(torch.float32 if name == "float" else getattr(torch, name))
                func = torch.Tensor.double
            returned = func(*args, **kwargs)
            if found and isinstance(returned, torch.Tensor) and returned.is_floating_point():
                dtype = str(found[0]).removeprefix("torch.")
                parts.append(FixedPart("torch", scopes.current, dtype, name, current_stack()))
            return returned

    default = torch.get_default_dtype()
    with module_scopes(module) as scopes:
        try:
            torch.set_default_dtype(torch.float64)
            with Mode():
                yield
        finally:
            torch.set_default_dtype(default)


def _widened(tensor: Any) -> Any:
    """Return a tensor in float64; equal entries as the number that they stand for."""
    import torch

    if tensor.dtype == torch.float32 and not tensor.requires_grad:
        return torch.tensor(intended_numbers(tensor.cpu().numpy()), dtype=torch.float64)
    return tensor.to(torch.float64)


class Scopes:
    """The paths of the modules that are being called, the innermost last."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    @property
    def current(self) -> str:
        """Path of the innermost module."""
        return self.paths[-1] if self.paths else ""


@contextmanager
def module_scopes(module: Any, returned: Callable[[str, Any, Any], None] | None = None) -> Iterator[Scopes]:
    """Track which of a module's submodules is being called.

    returned: called after each call with the path of the module, its arguments and what it returns.
    """
    scopes, handles = Scopes(), []

    def enter(path: str) -> Callable[..., None]:
        return lambda *_: scopes.paths.append(path)

    def leave(_: Any, given: Any, result: Any) -> None:
        path = scopes.paths.pop()
        if returned is not None:
            returned(path, given, result)

    for path, inner in module.named_modules():
        handles.append(inner.register_forward_pre_hook(enter(path), prepend=True))
        handles.append(inner.register_forward_hook(leave, always_call=True))
    try:
        yield scopes
    finally:
        for handle in handles:
            handle.remove()
