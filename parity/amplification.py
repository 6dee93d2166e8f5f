"""What a function makes of rounding: every operation of a PyTorch pass sees operands that are disturbed at random.

Monte Carlo arithmetic (Parker, Monte Carlo arithmetic, UCLA CSD-970002, 1997; Verificarlo; CADNA): each floating-point
operand x of each operation, forward and backward, becomes x + d (h |x| + s), where d is uniform in [-1, 1] and drawn anew
for every entry, h is `ROUNDINGS` units of the type and s the least normal number of it.  The pass itself runs in float64,
so what it returns differs from the undisturbed pass by what the function makes of `ROUNDINGS` roundings of that type at
every operation: a matrix product sees the rounding of its terms, a sum that cancels that of its summands, a LayerNorm of
nearly constant tokens that of the tokens, the backward pass of a saturated softmax that of the weights.  s stands for
results that underflow, which XLA makes zero on CPU and PyTorch keeps.

Nothing is assumed to be linear or small: where a function loses every digit, the disturbed pass shows it.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from parity.localisation import GRADIENT, backward, forward
from parity.measures import LEAST, ROUNDINGS, UNIT, Error

if TYPE_CHECKING:
    from parity.runs import Run

PASSES = 3  # of which the largest disturbance counts

_MOVES = frozenset(("_to_copy", "clone", "copy_", "cat", "stack", "detach", "lift_fresh", "constant_pad_nd", "masked_fill"))


def disturbing(dtype: str, seed: int) -> Any:
    """Return a context in which each operation of PyTorch sees operands that `ROUNDINGS` roundings of a type disturb.

    dtype: the type whose roundings are meant; what runs inside should be float64.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    unit, least = ROUNDINGS * UNIT[dtype], LEAST[dtype]

    class Disturbing(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.generator = torch.Generator().manual_seed(seed)

        def disturbed(self, x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(map(self.disturbed, x))
            if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.is_meta:
                return x
            drawn = torch.empty_like(x).uniform_(-1, 1, generator=self.generator)
            return x.abs().mul_(unit).add_(least).mul_(drawn).add_(x)

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            schema = function._schema
            moves = schema.name.partition("::")[2] in _MOVES or any(each.alias_info for each in schema.returns)
            return function(*(args if moves else map(self.disturbed, args)), **(kwargs or {}))

    return Disturbing()


def amplified(reference: "Run", disturbed: "Iterable[Run]") -> dict[str, Error]:
    """Return how far disturbed passes are from the undisturbed one, at most, by the name of the tensor.

    The names are those of `parity.localisation`; "gradient" is the gradient by all parameters as one.
    """
    largest: dict[str, Error] = {}
    for run in disturbed:
        found = dict(forward(reference, run)) | {name: error for name, error, _ in backward(reference, run)}
        whole = Error()
        for name, error in found.items():
            if name.startswith(GRADIENT) and name != f"{GRADIENT}images":
                whole = whole.joined(error)
        for name, error in {**found, "gradient": whole}.items():
            largest[name] = max(largest.get(name, error), error, key=lambda each: each.norm)
    return largest
