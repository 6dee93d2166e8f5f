"""Outputs of the modules inside two models, and the first module whose outputs differ.

A Flax module and a PyTorch module correspond if they have the same parameters.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.comparison.any_model.correspondence import Correspondence
from parity.comparison.tolerances import FLOAT64_TOLERANCE, ErrorNorms

Array = NDArray[Any]
Path = tuple[str, ...]


def first_differing_module(flax: Mapping[Path, Array], torch: Mapping[Path, Array], correspondence: Correspondence) -> str:
    """Return a text with the first module whose output differs in float64, and its relRMS; "" if there is none.

    flax, torch: the first output of each module, by the path of the module; the torch modules are in the order in which
        they return.
    """
    flax_paths = _corresponding_modules(correspondence)
    for path, output in torch.items():
        other = flax_paths.get(path, ())
        if other in flax and (difference := _difference(flax[other], output)) > FLOAT64_TOLERANCE:
            return f"{'.'.join(path)} of torch, {'/'.join(other)} of flax, by {difference:.1e}"
    return ""


def capture_flax_outputs(
    run: Callable[[], Any], named_arrays: Callable[[Any], Iterator[tuple[str, Any]]]
) -> dict[Path, Array]:
    """Return the first output of every linen module that `run` calls, by the path of the module.

    Modules inside nn.scan and other transformations are left out, because they return tracers.

    run: calls the model outside of jit.
    named_arrays: yields the arrays in a module's return value, with their names.
    """
    import jax
    from flax import linen

    outputs: dict[Path, Array] = {}

    def interceptor(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        returned = call(*args, **kwargs)
        if context.method_name == "__call__":
            _, array = next(named_arrays(returned), ("", None))
            if array is not None and not isinstance(array, jax.core.Tracer):
                outputs.setdefault(tuple(context.module.path), np.asarray(array))
        return returned

    with linen.intercept_methods(interceptor):
        run()
    return outputs


def capture_torch_outputs(
    module: Any, inputs: Sequence[Any], named_arrays: Callable[[Any], Iterator[tuple[str, Any]]]
) -> dict[Path, Array]:
    """Return the first output of every module inside `module`, by its path, in the order in which the modules return.

    named_arrays: as in `capture_flax_outputs`.
    """
    outputs: dict[Path, Array] = {}

    def make_hook(path: Path) -> Callable[..., None]:
        def hook(_: Any, __: Any, returned: Any) -> None:
            _name, array = next(named_arrays(returned), ("", None))
            if array is not None:
                outputs.setdefault(path, array.detach().numpy().copy())

        return hook

    own = copy.deepcopy(module)
    for name, inner in own.named_modules():
        if name:
            inner.register_forward_hook(make_hook(tuple(name.split("."))))
    own(*inputs)
    return outputs


def _corresponding_modules(correspondence: Correspondence) -> dict[Path, Path]:
    """Return a dict from torch modules to the flax modules with the same parameters; modules without one are left out."""
    keys: tuple[dict[Path, set[str]], dict[Path, set[str]]] = (defaultdict(set), defaultdict(set))
    for pair in correspondence.pairs:
        for a, b, _, _ in pair.arrays():
            paths = tuple(a.removeprefix("batch_stats/").split("/")), tuple(b.split("."))
            for modules, path in zip(keys, paths, strict=True):
                for n in range(1, len(path)):
                    modules[path[:n]].add(a)
    flax = {frozenset(group): path for path, group in sorted(keys[0].items(), key=lambda item: len(item[0]))}
    return {path: flax[frozenset(group)] for path, group in keys[1].items() if frozenset(group) in flax}


def _difference(flax: Array, torch: Array) -> float:
    """Return the smallest relRMS between two outputs over the orders of axes that may correspond; 0 if no shape fits."""
    candidates = [torch]
    if torch.ndim > 2:
        candidates += [np.moveaxis(torch, 1, -1), np.swapaxes(torch, 0, 1)]  # channels first; time first
    if torch.size == flax.size and torch.shape[:-1] == flax.shape[: torch.ndim - 1]:
        candidates.append(torch.reshape(flax.shape))  # heads merged
    errors = [ErrorNorms.of(flax, array).relative_rms() for array in candidates if array.shape == flax.shape]
    return min(errors, default=0.0)
