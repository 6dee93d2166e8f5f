"""Amplification of rounding errors, measured by passes in which every operation is perturbed.

A perturbation is at most `PERTURBATION_ROUNDOFFS` unit roundoffs of a type; see `parity.comparison.monte_carlo_arithmetic`.
All passes run in float64, so the differences between them are the effect of the perturbations alone.
"""

from collections import defaultdict
from dataclasses import replace
from math import inf
from operator import attrgetter
from statistics import fmean
from typing import TYPE_CHECKING

from parity.comparison.localisation import GRADIENT_OF, compare_backward, compare_forward
from parity.comparison.tolerances import ErrorNorms

if TYPE_CHECKING:
    from parity.comparison.forward_backward import PassResult, TorchTwin


def measure_rounding_errors(
    twin: "TorchTwin", dtype: str, inputs_from: "PassResult | None" = None, *, backward: bool = True
) -> dict[str, ErrorNorms]:
    """Return the largest change of each tensor, by name, in four passes whose operations are perturbed.

    Two of the passes compute explicit attention and two run the fused kernel, because their backward passes round
    differently.  Explicit attention subtracts from a product its own weighted mean.  The fused kernel subtracts one product
    from another, and so loses more digits where they cancel.

    Args:
        twin: the model to run, in float64.
        dtype: the type whose unit roundoff scales the perturbations.
        inputs_from: the pass from which every part takes its inputs; without it the model runs as a whole.
        backward: whether to compute gradients.

    Returns:
        The changes, by the names of `parity.comparison.localisation`; "gradient" is the gradient with respect to all
        parameters, as one vector.  The cosine between the changes of two passes gives the number of directions that the
        changes point in; see `parity.comparison.tolerances`.
    """
    errors: dict[str, list[ErrorNorms]] = defaultdict(list)
    squares: dict[str, list[float]] = defaultdict(list)
    for attention in ("explicit", "fused"):
        exact = replace(twin, attention=attention)
        reference = exact.run(backward=backward, inputs_from=inputs_from).cached_on_disk()
        runs = [
            replace(exact, perturbation=(dtype, seed)).run(backward=backward, inputs_from=inputs_from).cached_on_disk()
            for seed in (0, 1)
        ]
        first, second = (_compare(reference, run) for run in runs)
        for name, between in _compare(*runs).items():
            errors[name] += first[name], second[name]
            squares[name].append(first[name].cosine_with(second[name], between) ** 2)
    return {
        name: replace(max(each, key=attrgetter("norm")), directions=1 / mean if (mean := fmean(squares[name])) else inf)
        for name, each in errors.items()
    }


def _compare(reference: "PassResult", run: "PassResult") -> dict[str, ErrorNorms]:
    """Return the error of every tensor of a pass by name, and of the whole gradient as "gradient"."""
    errors = dict(compare_forward(reference, run)) | {name: error for name, error, _ in compare_backward(reference, run)}
    whole = ErrorNorms()
    for name, error in errors.items():
        if name.startswith(GRADIENT_OF) and name != f"{GRADIENT_OF}images":
            whole = whole.combined_with(error)
    return errors | {"gradient": whole}
