"""AdamW of clipped gradients as a torch optimizer, to the last digit what the formula says.

Read it beside `vit_jax/optimizer.py`: what one does to its parameters, the other keeps in a state and returns.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vit_spec import ViTConfig, rows


class AdamW(torch.optim.Adam):
    """Adam with decoupled weight decay (arXiv 1711.05101) of the gradients g, clipped, t = 1, 2, ...:

        m <- b1 m + (1 - b1) g
        v <- b2 v + (1 - b2) g^2
        p <- p - lr(t - 1) [ (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p ]

    `decays` has the parameters' names; weight decay acts where it is True.

    torch's own AdamW multiplies p by 1 - lr weight_decay, which float32 rounds to a multiple of 6e-8, for every entry
    alike and at every step: at lr 1e-4 and weight_decay 0.1 the decay is wrong by up to 0.3 %.  So its Adam does the rest,
    and the decay is subtracted here.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        learning_rate: Callable[[int], float],
        *,
        clip: float,
        b1: float,
        b2: float,
        eps: float,
        weight_decay: float,
        decays: Mapping[str, bool],
    ) -> None:
        groups: list[dict[str, Any]] = [
            {"params": [p for name, p in params.items() if decays[name]], "decay": weight_decay},
            {"params": [p for name, p in params.items() if not decays[name]], "decay": 0.0},
        ]
        super().__init__(groups, betas=(b1, b2), eps=eps)
        self._learning_rate, self._clip = learning_rate, clip

    @property
    def updates(self) -> int:
        """Updates done so far; a state dict that is loaded brings its own."""
        return max((int(state["step"]) for state in self.state.values()), default=0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Clip the gradients where they are, and move the parameters."""
        clip_by_global_norm([p.grad for group in self.param_groups for p in group["params"]], self._clip)
        rate = float(self._learning_rate(self.updates))
        for group in self.param_groups:
            group["lr"] = rate
            for p in group["params"] if group["decay"] else ():
                p.add_(p, alpha=-rate * group["decay"])
        super().step()


@torch.no_grad()
def clip_by_global_norm(grads: Sequence[Tensor], limit: float) -> None:
    """Scale all gradients in place by min(1, limit / norm), norm being the root of the sum of all their squares.

    No epsilon is added to the norm: torch's own `clip_grad_norm_` adds 1e-6, which shows in a float64 comparison, and at
    a norm of zero the minimum is 1 without it.
    """
    factor = (limit / torch.nn.utils.get_total_norm(grads)).clamp(max=1.0)
    for g in grads:
        g.mul_(factor)


def decay_mask(config: ViTConfig, params: Iterable[str]) -> dict[str, bool]:
    """Return which parameters of the object twin decay, by their names, as `vit_spec.rows` says."""

    def decays(name: str) -> bool:
        row = ".".join(word for word in name.split(".") if not word.isdigit())
        return rows(config)[row].decays

    return {name: decays(name) for name in params}
