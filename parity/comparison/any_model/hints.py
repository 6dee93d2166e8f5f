"""Mistakes that the tensors of a failed comparison show by themselves: swapped outputs, detached inputs, batch norms."""

from collections.abc import Iterator, Mapping

import numpy as np

from parity.comparison.any_model.report import GRADIENT_OF, GRADIENT_OF_INPUT, STATISTICS, Tensors
from parity.comparison.any_model.tensor_comparison import error_of
from parity.comparison.tolerances import FLOAT64_TOLERANCE, ErrorNorms

_PROPORTIONAL = 1e-9  # relRMS between two updates, one of which is a multiple of the other, in float64


def swapped_outputs(flax: Tensors, torch: Tensors, names: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each output of Flax that differs from PyTorch's, and that is another one of PyTorch's.

    flax, torch: the tensors of both models, by the names of Flax's outputs.
    names: the names of Flax's outputs, with those of PyTorch's.
    """
    for name in names:
        agreeing = [
            other
            for other in names
            if flax[name].shape == torch[other].shape
            and error_of(name, flax[name], torch[other]).relative_rms() <= FLOAT64_TOLERANCE
        ]
        if agreeing and name not in agreeing:
            yield f"{name} of flax is {names[agreeing[0]]} of torch: return the outputs in the same order"


def detached_inputs(flax: Tensors, torch: Tensors) -> Iterator[str]:
    """Yield a line for each input that a gradient reaches in one of the models alone; arguments as in `swapped_outputs`."""
    for name in (name for name in torch if name.startswith(GRADIENT_OF_INPUT)):
        sides = [side for side, tensors in (("flax", flax), ("torch", torch)) if not tensors[name].any()]
        if len(sides) == 1:
            yield f"no gradient of {sides[0]} reaches {name.removeprefix(GRADIENT_OF)}: the model detaches it, or rounds it"


def other_momenta(
    flax: Tensors, torch: Tensors, before: Tensors, batch_norms: Mapping[str, tuple[float, int]]
) -> Iterator[str]:
    """Yield a line for each batch norm whose running mean Flax moves in PyTorch's direction by another step, or not at all.

    flax, torch: the tensors of both models; before: the weights of PyTorch before the run.
    batch_norms: see `TorchRunner.batch_norms`.
    """
    for key, (momentum, _) in batch_norms.items():
        key = key.replace("running_var", "running_mean")
        name = f"{STATISTICS}{key}"
        if name in flax and name in torch:
            of_flax, of_torch = (np.asarray(side[name], np.float64) - before[key] for side in (flax, torch))
            size = float(np.vdot(of_torch, of_torch))
            ratio = float(np.vdot(of_flax, of_torch)) / size if size else 1.0
            is_multiple = ErrorNorms.of(of_flax, ratio * of_torch).relative_rms() <= _PROPORTIONAL
            if size and not of_flax.any():
                yield (
                    f"{key}: flax does not update it, as with use_running_average=True or a momentum of 1: "
                    f"give flax use_running_average=False and momentum={1 - momentum:.3g}"
                )
            elif is_multiple and abs(ratio - 1) > _PROPORTIONAL:
                yield (
                    f"{key}: the momentum is {1 - ratio * momentum:.3g} in flax and {momentum:.3g} in torch, which counts "
                    f"the new batch with it, and flax the old mean: give flax {1 - momentum:.3g}"
                )
