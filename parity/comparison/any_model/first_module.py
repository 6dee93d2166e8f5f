"""Which of two models' modules is the first whose output differs; modules are the same that hold the same parameters."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.comparison.any_model.correspondence import Correspondence
from parity.comparison.tolerances import FUNCTION, Error

Array = NDArray[Any]
Path = tuple[str, ...]


def first_module(flax: Mapping[Path, Array], torch: Mapping[Path, Array], correspondence: Correspondence) -> str:
    """Return the first module, in the order in which PyTorch ends them, whose outputs part in float64, or "".

    flax, torch: the first output of each module by its path.
    """
    same = _same_modules(correspondence)
    for path, output in torch.items():
        other = same.get(path, ())
        if other in flax and (difference := _difference(flax[other], output)) > FUNCTION:
            return f"{'.'.join(path)} of torch, {'/'.join(other)} of flax, by {difference:.1e}"
    return ""


def flax_outputs(run: Callable[[], Any], arrays: Callable[[Any], Iterator[tuple[str, Any]]]) -> dict[Path, Array]:
    """Return what every linen module returns while `run` is called, but for what a transformation such as scan traces."""
    import jax
    from flax import linen

    found: dict[Path, Array] = {}

    def note(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        answer = call(*args, **kwargs)
        if context.method_name == "__call__":
            _, array = next(arrays(answer), ("", None))
            if array is not None and not isinstance(array, jax.core.Tracer):
                found.setdefault(tuple(context.module.path), np.asarray(array))
        return answer

    with linen.intercept_methods(note):
        run()
    return found


def torch_outputs(
    module: Any, inputs: Sequence[Any], arrays: Callable[[Any], Iterator[tuple[str, Any]]]
) -> dict[Path, Array]:
    """Return what every module within `module` returns."""
    found: dict[Path, Array] = {}

    def note(path: Path) -> Callable[..., None]:
        def hook(_: Any, __: Any, answer: Any) -> None:
            _name, array = next(arrays(answer), ("", None))
            if array is not None:
                found.setdefault(path, array.detach().numpy().copy())

        return hook

    own = copy.deepcopy(module)
    for name, inner in own.named_modules():
        if name:
            inner.register_forward_hook(note(tuple(name.split("."))))
    own(*inputs)
    return found


def _same_modules(correspondence: Correspondence) -> dict[Path, Path]:
    """The flax module, by its path, that holds the same parameters as a torch one."""
    keys: tuple[dict[Path, set[str]], dict[Path, set[str]]] = (defaultdict(set), defaultdict(set))
    for pair in correspondence.pairs:
        for a, b, _, _ in pair.places():
            paths = tuple(a.removeprefix("batch_stats/").split("/")), tuple(b.split("."))
            for modules, path in zip(keys, paths, strict=True):
                for n in range(1, len(path)):
                    modules[path[:n]].add(a)
    flax = {frozenset(held): path for path, held in sorted(keys[0].items(), key=lambda item: len(item[0]))}
    return {path: flax[frozenset(held)] for path, held in keys[1].items() if frozenset(held) in flax}


def _difference(flax: Array, torch: Array) -> float:
    """relRMS of two modules' outputs, whichever way each framework lays them out; 0 where no way fits."""
    ways = [torch]
    if torch.ndim > 2:
        ways += [np.moveaxis(torch, 1, -1), np.swapaxes(torch, 0, 1)]  # channels first; time first
    if torch.size == flax.size and torch.shape[:-1] == flax.shape[: torch.ndim - 1]:
        ways.append(torch.reshape(flax.shape))  # heads merged
    fitting = [Error.of(flax, way).relative_rms() for way in ways if way.shape == flax.shape]
    return min(fitting, default=0.0)
