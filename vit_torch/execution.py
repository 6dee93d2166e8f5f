"""Execution options of the PyTorch twin: dtype, kernels, rematerialization.  They do not change the function."""

from dataclasses import dataclass
from typing import Literal

import torch

from vit_spec.errors import require
from vit_spec.typed_fields import check_choices


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Options that determine how the model runs, and not what it computes.

    Attributes:
        dtype: dtype of activations; None means the dtype of the parameters.  Norms, rotary embeddings and softmax are
            always computed in at least float32.
        attention: "fused" is `scaled_dot_product_attention`, with the kernel that PyTorch chooses; "explicit" computes the
            products and the softmax as separate operations.
        remat: which activations a block stores for the backward pass: "none" stores all; "dots" stores the outputs of
            matrix products with weights and recomputes the rest; "full" stores only the input of the block (activation
            checkpointing).

    Raises:
        vit_spec.InputError: an unknown kernel or rematerialization, or a dtype that is no floating-point torch.dtype of 16
            bits or more.
    """

    dtype: torch.dtype | None = None
    attention: Literal["fused", "explicit"] = "fused"
    remat: Literal["none", "dots", "full"] = "none"

    def __post_init__(self) -> None:
        check_choices(self, "execution.")
        is_dtype = isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point
        require(
            self.dtype is None or (is_dtype and self.dtype.itemsize > 1),  # numbers of 8 bits are not promoted to others
            f"execution.dtype is {self.dtype!r}: give a floating-point dtype of 16 bits or more, such as torch.bfloat16, "
            "or None",
        )
