"""Lower precision at single places: patches that round what the PyTorch twin computes there."""

from collections.abc import Callable
from typing import Any

from parity.comparison.diagnosis.patches import Patch, kept


def rounded(kind: str) -> Callable[[Any], Any]:
    """Return the function that rounds a tensor to "bfloat16", "float16" or "float32", and keeps its own type."""

    def function(x: Any) -> Any:
        import torch

        return x.to(getattr(torch, kind)).to(x.dtype)

    return function


def norms_in(kind: str) -> Callable[[Any, Any], Any]:
    """Return LayerNorm with its input, its statistics and its output in a lower type."""

    def forward(norm: Any, x: Any) -> Any:
        import torch
        import torch.nn.functional as F

        low = getattr(torch, kind)
        weight, bias = norm.weight.to(low), norm.bias.to(low)
        return F.layer_norm(x.to(low), norm.normalized_shape, weight, bias, norm.eps).to(x.dtype)

    return forward


def images(low: Callable[[Any], Any]) -> Patch:
    """Every model sees low(images)."""

    def patch(model: Any) -> None:
        model.patch_embed.register_forward_pre_hook(lambda module, inputs: (low(inputs[0]),))

    return patch


def tf32(layers: bool, attention: bool, projection: bool) -> Patch:
    """Round both factors of products to ten bits behind the point, as TF32 of Nvidia's tensor cores does.

    layers, attention: the products of linear layers, and those of attention.
    projection: of the patch projection, which elsewhere is a convolution with a setting of its own.
    """

    def patch(model: Any) -> None:
        from vit_torch.layers import Linear

        linear = [m for m in model.modules() if isinstance(m, Linear)] if layers else []
        for module in [*linear, *([model.patch_embed.proj] if projection else [])]:
            module.weight.data = _ten_bits(module.weight.data)
            module.register_forward_pre_hook(lambda _, inputs: (_ten_bits(inputs[0]), *inputs[1:]))
        for block in model.blocks if attention else ():
            kept(block.attn, _ten_bits_of_attention())

    return patch


def _ten_bits_of_attention() -> Callable[[str, Any], Any]:
    seen: dict[str, Any] = {}

    def change(name: str, value: Any) -> Any:
        if name == "heads":
            mixed: Any = seen["weights"].to(value.dtype) @ seen["v"].to(value.dtype).transpose(1, 2)
            return mixed.transpose(1, 2)
        seen[name] = _ten_bits(value) if name in ("q", "k", "v", "weights") else value
        return seen[name]

    return change


def _ten_bits(x: Any) -> Any:
    import torch

    bits = x.to(torch.float32).contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).to(x.dtype)
