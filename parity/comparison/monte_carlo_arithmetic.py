"""Monte Carlo arithmetic (Parker, UCLA CSD-970002, 1997) on PyTorch: every operation sees operands disturbed at random.

Each floating-point operand x of each operation, forward and backward, becomes x + d (h |x| + s), where d is uniform in
[-1, 1] and drawn anew for every entry, h is `ROUNDINGS` units of a type and s as many times its least normal number; d s is
added to what the operation returns as well.

A matrix product sees the rounding of its terms, a sum that cancels that of its summands, a LayerNorm of nearly constant
tokens that of the tokens and of their mean, the backward pass of a saturated softmax that of the weights.  s stands for
results that underflow, which XLA makes zero on CPU and PyTorch keeps; a zero stays one.  Nothing is assumed to be linear or
small: where a function loses every digit, the disturbed pass shows it.
"""

from typing import Any

from parity.comparison.tolerances import LEAST, ROUNDINGS, UNIT

_EXACT = frozenset(  # operations that round nothing
    "_to_copy clone copy_ cat stack detach lift_fresh constant_pad_nd masked_fill neg "
    "empty_like zeros_like ones_like full_like zeros ones full scalar_tensor arange "
    "select_backward slice_backward gather amax abs where gt ge lt le eq ne rand".split()
)


def disturbing(dtype: str, seed: int) -> Any:
    """Return a context in which each operation of PyTorch sees operands that `ROUNDINGS` roundings of a type disturb.

    dtype: the type whose roundings are meant; what runs inside should be float64.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    # They take 1 + erf(x), which cancels far below zero, or erfc(x), which does not.
    cancelling = (torch.ops.aten.gelu.default, torch.ops.aten.gelu_backward.default)
    unit, least = ROUNDINGS * UNIT[dtype], ROUNDINGS * LEAST[dtype]

    class Disturbing(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.generator = torch.Generator().manual_seed(seed)

        def disturbed(self, x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(map(self.disturbed, x))
            if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.is_meta:
                return x
            return x.abs().mul_(unit).add_(x != 0, alpha=least).mul_(self.drawn(x)).add_(x)

        def underflowing(self, x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(map(self.underflowing, x))
            floats = isinstance(x, torch.Tensor) and x.is_floating_point() and not x.is_meta
            return self.drawn(x).mul_(x != 0).mul_(least).add_(x) if floats else x

        def shifted(self, weight: Any, x: Any, mean: Any, root: Any) -> Any:
            """Add what rounding of the mean does to normalised tokens, which no disturbance of the tokens shows."""
            shift = self.drawn(mean).mul_(unit).mul_(mean.abs()).mul_(root)
            return x + (shift if weight is None else shift * weight), mean, root

        def recentred(self, found: Any, gradient: Any, x: Any, mean: Any, root: Any, weight: Any) -> Any:
            """Add what rounding of its two means does to the gradient of a LayerNorm's input.

            In tokens of one entry each term equals its mean, and of any disturbed operands exactly nothing is left.
            """
            if found[0] is None:
                return found
            terms, normal = gradient if weight is None else gradient * weight, (x - mean) * root
            means = terms.mean(-1, keepdim=True), normal * (terms * normal).mean(-1, keepdim=True)
            rounded = sum(self.drawn(each).mul_(unit).mul_(each.abs()) for each in means)
            return found[0] + rounded * root, *found[1:]

        def drawn(self, x: Any) -> Any:
            return torch.empty_like(x).uniform_(-1, 1, generator=self.generator)

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            schema = function._schema
            if schema.name.partition("::")[2] in _EXACT or any(each.alias_info for each in schema.returns):
                return function(*args, **(kwargs or {}))
            found = function(*map(self.disturbed, args), **(kwargs or {}))
            if function is torch.ops.aten.native_layer_norm.default:
                found = self.shifted(args[2], *found)
            if function is torch.ops.aten.native_layer_norm_backward.default:
                found = self.recentred(found, args[0], args[1], args[3], args[4], args[5])
            if function in cancelling:
                found = found + self.drawn(found).mul_(unit).mul_(args[0].abs())
            return self.underflowing(found)

    return Disturbing()
