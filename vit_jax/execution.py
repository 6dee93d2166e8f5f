"""Execution options of the JAX twin: dtype, kernels, rematerialization.  They do not change the function."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from vit_spec.errors import require
from vit_spec.typed_fields import check_choices


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
        remat: which activations a block stores for the backward pass.  "none" recomputes only norms, activation functions,
            and on GPUs sums; "dots" stores the outputs of matrix products with weights and recomputes the rest; "full"
            stores only the input of the block.
        unroll: number of blocks per iteration of the scan; larger values take longer to compile and may run faster.  None
            means all blocks on GPUs if `remat` is "none", else 1.

    Raises:
        vit_spec.InputError: an unknown kernel or rematerialization, or a dtype without fractions.
    """

    dtype: DTypeLike | None = None
    precision: jax.lax.PrecisionLike = None
    attention: Literal["auto", "explicit", "cudnn"] = "auto"
    remat: Literal["none", "dots", "full"] = "none"
    unroll: int | None = None

    def __post_init__(self) -> None:
        check_choices(self, "execution.")
        require(
            self.dtype is None or jnp.issubdtype(self.dtype, jnp.floating),
            f"execution.dtype is {self.dtype!r}: give a floating-point dtype such as 'bfloat16', or None",
        )
