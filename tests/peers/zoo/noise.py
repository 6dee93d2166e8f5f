"""Random weights that hide nothing."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.goldens.peers import seeded


def perturb(model: nn.Module, name: str) -> None:
    """Draw every parameter of a model in float64, by a name as the seed.

    No zero, no one, no round number and no symmetry is left: norms and layer scales lie around one, matrices keep the size
    of what passes through them, and all else (biases, tokens, positions, tables) is as large as a token's entries.
    """
    rng = seeded(name)
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


class _Undrawn(TorchFunctionMode):
    """Under this mode nothing is drawn."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = tuple(args)
        drawing = (torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.erfinv_, torch.nn.init.trunc_normal_)
        return given[0].zero_() if func in drawing else func(*given, **(kwargs or {}))


@contextlib.contextmanager
def uninitialised() -> Iterator[None]:
    """Build models here without drawing their weights, which `perturb` replaces anyway."""
    with _Undrawn():
        yield
