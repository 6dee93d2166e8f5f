"""What a function makes of rounding: how far passes in which every operation is disturbed are from the undisturbed pass.

All of them run in float64, so that they differ by what the function makes of `ROUNDINGS` roundings of a type at every
operation; see `parity.comparison.monte_carlo_arithmetic`.
"""

from collections import defaultdict
from dataclasses import replace
from math import inf
from operator import attrgetter
from statistics import fmean
from typing import TYPE_CHECKING

from parity.comparison.localisation import GRADIENT, backward, forward
from parity.comparison.tolerances import Error

if TYPE_CHECKING:
    from parity.comparison.forward_backward import Run, TorchTwin


def amplified(twin: "TorchTwin", dtype: str, fed: "Run | None" = None, *, backward: bool = True) -> dict[str, Error]:
    """Return how far disturbed passes are from the undisturbed one, at most, by the name of the tensor.

    Attention is computed both ways, written out and by the fused kernel: the backward pass of the one takes a difference
    of weighted means of a single product, that of the other a difference of two, and rounds more where it cancels. There
    are two disturbed passes of each, and the cosine between what they change tells in how many directions that points; see
    `parity.comparison.tolerances`.

    The names are those of `parity.comparison.localisation`; "gradient" is the gradient by all parameters as one.

    Args:
        twin: what runs, in float64.
        dtype: the type whose roundings are meant.
        fed: what every part is fed; by default nothing, so that the whole model amplifies.
        backward: whether to compute gradients.
    """
    errors: dict[str, list[Error]] = defaultdict(list)
    squares: dict[str, list[float]] = defaultdict(list)
    for attention in ("explicit", "fused"):
        each = replace(twin, attention=attention)
        reference = each.run(backward=backward, fed=fed).spooled()
        runs = [replace(each, disturbed=(dtype, seed)).run(backward=backward, fed=fed).spooled() for seed in (0, 1)]
        first, second = (_distances(reference, run) for run in runs)
        for name, between in _distances(*runs).items():
            errors[name] += first[name], second[name]
            squares[name].append(first[name].cosine_with(second[name], between) ** 2)
    return {
        name: replace(max(each, key=attrgetter("norm")), directions=1 / mean if (mean := fmean(squares[name])) else inf)
        for name, each in errors.items()
    }


def _distances(reference: "Run", run: "Run") -> dict[str, Error]:
    found = dict(forward(reference, run)) | {name: error for name, error, _ in backward(reference, run)}
    whole = Error()
    for name, error in found.items():
        if name.startswith(GRADIENT) and name != f"{GRADIENT}images":
            whole = whole.joined(error)
    return found | {"gradient": whole}
