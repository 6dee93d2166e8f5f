"""Linear layers in float32 on AMD CPUs with AVX-512: by oneDNN, instead of MKL, which PyTorch calls.

On AMD CPUs, MKL does not use AVX-512.  The layers for which oneDNN is faster were measured on a Zen 4.  Other CPUs keep
MKL, which uses AVX-512 on Intel's.  Nothing is measured when a model runs: its arithmetic must not depend on noise.
"""

from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

# oneDNN is slower for few tokens, and for the matrices of ViT-Ti, which have up to 147,456 entries (benchmarks/linear.py).
MIN_ROWS = 128
MIN_ENTRIES = 200_000
HAS_ONEDNN = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def _is_amd_with_avx512() -> bool:
    try:
        cpu = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return False
    return "AuthenticAMD" in cpu and "avx512f" in cpu


PREFERS_ONEDNN = HAS_ONEDNN and _is_amd_with_avx512()

# The operations of linear layers; products of activations, as in attention, are batched.
OPERATIONS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def _flops(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * prod(x) * weight[0]


if HAS_ONEDNN:
    OPERATIONS.append(torch.ops.mkldnn._linear_pointwise.default)
    if torch.ops.mkldnn._linear_pointwise not in flop_registry:  # this module may be imported again
        register_flop_formula(torch.ops.mkldnn._linear_pointwise)(_flops)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weight^T + bias, as `F.linear` does: (..., inputs), (outputs, inputs), (outputs,) -> (..., outputs).

    `torch.backends.mkldnn.flags(enabled=False)` selects `F.linear`.
    """
    if _is_for_onednn(x, weight, bias):
        return _OneDnnLinear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


def _is_for_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    # Programs that are compiled or exported are to have PyTorch's own operations, and autocast decides for these only.
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    if is_traced or torch.is_autocast_enabled("cpu") or not (PREFERS_ONEDNN and torch.backends.mkldnn.enabled):
        return False
    # A subclass, such as a quantized weight, has its own `F.linear`.
    is_plain = all(type(each) in (Tensor, nn.Parameter) for each in (x, weight, bias) if each is not None)
    is_float32 = x.dtype == torch.float32 and x.device.type == "cpu"
    return is_plain and is_float32 and x.numel() >= MIN_ROWS * x.shape[-1] and weight.numel() >= MIN_ENTRIES


class _OneDnnLinear(torch.autograd.Function):
    """One call of oneDNN.  The backward pass is that of `F.linear`, because MKL's products are as fast there."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        bias = None if bias is None else bias.contiguous()  # oneDNN ignores its stride
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            (rows @ weight).view_as(x) if needs_x else None,
            rows.t() @ x.flatten(0, -2) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None) -> Tensor:
        x, weight = ctx.saved_tensors
        result = x.new_zeros(*x.shape[:-1], weight.shape[0])
        result = result if dx is None else result + F.linear(dx, weight)
        result = result if dweight is None else result + F.linear(x, dweight)
        return result if dbias is None else result + dbias

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor | None) -> tuple[Tensor, int]:
        return torch.vmap(F.linear, in_dims)(*inputs), 0  # type: ignore[arg-type]
