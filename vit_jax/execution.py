"""How the functional twin runs; nothing here changes the function it computes."""

from dataclasses import dataclass
from typing import Literal

import jax
from jax.typing import DTypeLike


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How to run the model.

    dtype: what activations are computed in; None is the parameters' own.  Norms, rotations and softmax are computed in at
        least float32 whatever it is.
    precision: of matrix products, for devices that round their inputs (TF32, bfloat16 passes); None is jax's default.
    attention: "explicit" writes the products and the softmax out; "cudnn" is the fused kernel of NVIDIA GPUs from Ampere
        on, for half precision; "auto" takes it where it serves.  The fused kernel has no attention dropout.  The single
        query of a pooling is always written out.
    remat: what a block keeps for the backward pass: "none" recomputes norms and activations alone, "dots" keeps the
        matrix products of weights and recomputes the rest, "full" keeps a block's input alone.
    unroll: blocks in one iteration of the scan; more compile longer and may run faster.
    """

    dtype: DTypeLike | None = None
    precision: jax.lax.PrecisionLike = None
    attention: Literal["auto", "explicit", "cudnn"] = "auto"
    remat: Literal["none", "dots", "full"] = "none"
    unroll: int = 1
