"""Execution options of the JAX twin: dtype, kernels, rematerialization.  They do not change the function."""

from dataclasses import dataclass
from typing import Literal

import jax
from jax.typing import DTypeLike


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Options that determine how the model runs, and not what it computes.

    Attributes:
        dtype: dtype of activations; None means the dtype of the parameters.  Norms, rotary embeddings and softmax are
            always computed in at least float32.
        precision: precision of matrix products, for devices that round their inputs (TF32, bfloat16 passes); None means
            jax's default.
        attention: "explicit" computes the products and the softmax as separate operations; "cudnn" is the fused kernel for
            NVIDIA GPUs from Ampere on, in half precision; "auto" uses it where it is supported.  The fused kernel has no
            attention dropout.  Attention pooling, which has a single query, is always explicit.
        remat: which activations a block stores for the backward pass.  "none" recomputes only norms and activation
            functions; "dots" stores the outputs of matrix products with weights and recomputes the rest; "full" stores only
            the input of the block.
        unroll: number of blocks per iteration of the scan; larger values take longer to compile and may run faster.  None
            means all blocks on GPUs if `remat` is "none", else 1.
    """

    dtype: DTypeLike | None = None
    precision: jax.lax.PrecisionLike = None
    attention: Literal["auto", "explicit", "cudnn"] = "auto"
    remat: Literal["none", "dots", "full"] = "none"
    unroll: int | None = None
