"""Monte Carlo arithmetic (Parker, UCLA CSD-970002, 1997) on PyTorch: random perturbation of every operand.

Each floating-point operand x of each operation, forward and backward, becomes x + d (h |x| + s).  Here d is uniform in
[-1, 1] and drawn independently for every entry, h is `PERTURBATION_ROUNDOFFS` unit roundoffs of a type, and s is
`PERTURBATION_ROUNDOFFS` times the underflow error of the type (`UNDERFLOW_ERROR`).  The result of the operation is
perturbed by d s too.

So the result of a matrix product shows the rounding of its terms, and a sum that cancels shows the rounding of its
summands.  The LayerNorm of nearly constant tokens shows the rounding of the tokens and of their mean, and the backward pass
of a saturated softmax shows the rounding of the weights.  The term with s represents results that underflow, which XLA on
CPU makes zero and PyTorch keeps; a zero stays zero.  The method does not assume that the function is linear or that the
perturbation is small: where a function loses every digit, the perturbed pass shows it.
"""

from typing import Any

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.tolerances import PERTURBATION_ROUNDOFFS, UNDERFLOW_ERROR, UNIT_ROUNDOFF

_EXACT = frozenset(  # operations that do not round
    "_to_copy clone copy_ cat stack detach lift_fresh constant_pad_nd masked_fill neg "
    "empty_like zeros_like ones_like full_like zeros ones full scalar_tensor arange "
    "select_backward slice_backward gather amax abs where gt ge lt le eq ne rand".split()
)


def perturb_array(x: Array, dtype: str, rng: np.random.Generator) -> Array:
    """Return a floating-point array perturbed as an operand; see the docstring of this module.

    dtype: the type whose unit roundoff scales the perturbation; the array should be float64.
    """
    unit, least = PERTURBATION_ROUNDOFFS * UNIT_ROUNDOFF[dtype], PERTURBATION_ROUNDOFFS * UNDERFLOW_ERROR[dtype]
    perturbed: Array = x + rng.uniform(-1, 1, x.shape) * (unit * np.abs(x) + least * (x != 0))
    return perturbed


def perturb_operands(dtype: str, seed: int) -> Any:
    """Return a context manager in which PyTorch perturbs the operands of each operation; see the docstring of this module.

    Args:
        dtype: the type whose unit roundoff scales the perturbations; the operations inside should be in float64.
        seed: seed of the perturbations.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    # Implementations compute 1 + erf(x), which cancels far below zero, or erfc(x), which does not.
    cancelling = (torch.ops.aten.gelu.default, torch.ops.aten.gelu_backward.default)
    unit, least = PERTURBATION_ROUNDOFFS * UNIT_ROUNDOFF[dtype], PERTURBATION_ROUNDOFFS * UNDERFLOW_ERROR[dtype]

    class PerturbedOperands(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.generator = torch.Generator().manual_seed(seed)

        def perturb(self, x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(map(self.perturb, x))
            if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.is_meta:
                return x
            return x.abs().mul_(unit).add_(x != 0, alpha=least).mul_(self.uniform(x)).add_(x)

        def add_underflow(self, x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(map(self.add_underflow, x))
            floats = isinstance(x, torch.Tensor) and x.is_floating_point() and not x.is_meta
            return self.uniform(x).mul_(x != 0).mul_(least).add_(x) if floats else x

        def perturb_mean(self, weight: Any, x: Any, mean: Any, root: Any) -> Any:
            """Add to normalized tokens the effect of rounding their mean; perturbed tokens alone do not show it."""
            shift = self.uniform(mean).mul_(unit).mul_(mean.abs()).mul_(root)
            return x + (shift if weight is None else shift * weight), mean, root

        def perturb_gradient_means(self, found: Any, gradient: Any, x: Any, mean: Any, root: Any, weight: Any) -> Any:
            """Add to the gradient of a LayerNorm's input the effect of rounding its two means.

            In tokens of one entry each term equals its mean, so the gradient is exactly zero for any perturbed operands.
            """
            if found[0] is None:
                return found
            terms, normal = gradient if weight is None else gradient * weight, (x - mean) * root
            means = terms.mean(-1, keepdim=True), normal * (terms * normal).mean(-1, keepdim=True)
            rounded = sum(self.uniform(each).mul_(unit).mul_(each.abs()) for each in means)
            return found[0] + rounded * root, *found[1:]

        def uniform(self, x: Any) -> Any:
            return torch.empty_like(x).uniform_(-1, 1, generator=self.generator)

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            schema = function._schema
            if schema.name.partition("::")[2] in _EXACT or any(each.alias_info for each in schema.returns):
                return function(*args, **(kwargs or {}))
            found = function(*map(self.perturb, args), **(kwargs or {}))
            if function is torch.ops.aten.native_layer_norm.default:
                found = self.perturb_mean(args[2], *found)
            if function is torch.ops.aten.native_layer_norm_backward.default:
                found = self.perturb_gradient_means(found, args[0], args[1], args[3], args[4], args[5])
            if function in cancelling:
                found = found + self.uniform(found).mul_(unit).mul_(args[0].abs())
            return self.add_underflow(found)

    return PerturbedOperands()
