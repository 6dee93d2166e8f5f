"""Execution options of the JAX twin: dtype, kernels, rematerialization.  They do not change the function."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from vit_spec.errors import require
from vit_spec.typed_fields import check_choices, coerce


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

    Raises:
        vit_spec.InputError: an unknown kernel, rematerialization or precision, a dtype without fractions or of 8 bits, or
            an `unroll` that is not positive.
    """

    dtype: DTypeLike | None = None
    precision: jax.lax.PrecisionLike = None
    attention: Literal["auto", "explicit", "cudnn"] = "auto"
    remat: Literal["none", "dots", "full"] = "none"
    unroll: int | None = None

    def __post_init__(self) -> None:
        check_choices(self, "execution.")
        require(
            self.dtype is None or _is_supported(self.dtype),
            f"execution.dtype is {self.dtype!r}: give a floating-point dtype of 16 bits or more, such as 'bfloat16', "
            "or None",
        )
        require(
            self.precision is None or _is_precision(self.precision),
            f"execution.precision is {self.precision!r}: give a precision of jax.lax.dot, such as 'highest', or None",
        )
        coerce("execution.unroll", self.unroll, int | None)
        require(
            self.unroll is None or self.unroll > 0,
            f"execution.unroll is {self.unroll}: give a positive number of blocks, or None",
        )


def _is_supported(dtype: DTypeLike) -> bool:
    """Return whether activations can have this dtype: numbers of 8 bits are not promoted to others."""
    try:
        return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 1
    except TypeError:  # no dtype has this name
        return False


def _is_precision(precision: jax.lax.PrecisionLike) -> bool:
    """Return whether jax's matrix products accept this precision: only they know all names of algorithms."""
    matrix = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        jax.eval_shape(partial(jax.lax.dot, precision=precision), matrix, matrix)
    except (TypeError, ValueError):
        return False
    return True
