"""How the object twin runs; nothing here changes the function it computes."""

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How to run the model.

    dtype: what activations are computed in; None is the parameters' own.  Norms, rotations and softmax are computed in at
        least float32 whatever it is.
    attention: "fused" is `scaled_dot_product_attention`, with the kernel that PyTorch chooses; "explicit" writes the
        products and the softmax out.
    remat: what a block keeps for the backward pass: "none" recomputes nothing, "full" keeps a block's input alone.
    """

    dtype: torch.dtype | None = None
    attention: Literal["fused", "explicit"] = "fused"
    remat: Literal["none", "full"] = "none"
