"""Random weights without zeros or symmetries, which could hide an error."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.goldens.peers import rng_for


def perturb(model: nn.Module, name: str) -> None:
    """Draw every parameter of a model in float64; the seed is a hash of `name`.

    Norms and layer scales are around one, matrices preserve the magnitude of activations, and all other parameters (biases,
    tokens, positions, tables) have the magnitude of a token's entries.
    """
    rng = rng_for(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            noise = rng.standard_normal(shape)
            if re.search(r"gamma|lambda1", key) or (key.endswith("weight") and len(shape) == 1):
                noise = 1 + 0.25 * noise
            elif key.endswith(("weight", "proj")) and len(shape) > 1:
                noise *= 1.2 * float(np.prod(shape[1:])) ** -0.5
            else:
                noise *= 0.5
            parameter.copy_(torch.from_numpy(noise))


class _SkipInitialisation(TorchFunctionMode):
    """A mode in which the initializers of parameters draw no random numbers."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, named = tuple(args), kwargs or {}
        # Of torch.Tensor, of torch.nn.init, or what transformers puts in place of torch.nn.init.
        if getattr(func, "__name__", "").endswith(("uniform_", "normal_", "erfinv_")):
            return (given[0] if given else named["tensor"]).zero_()
        return func(*given, **named)


@contextlib.contextmanager
def uninitialised() -> Iterator[None]:
    """Return a context within which models are built without random weights, which `perturb` replaces anyway."""
    with _SkipInitialisation():
        yield
