"""Patches that make one operation of the PyTorch twin run in lower precision."""

from collections.abc import Callable
from typing import Any

from parity.comparison.diagnosis.patches import Patch, intercept


def round_to(dtype: str) -> Callable[[Any], Any]:
    """Return the function that rounds a tensor to "bfloat16", "float16" or "float32" and keeps its dtype."""

    def function(x: Any) -> Any:
        import torch

        return x.to(getattr(torch, dtype)).to(x.dtype)

    return function


def layer_norm_in_dtype(dtype: str) -> Callable[[Any, Any], Any]:
    """Return the forward pass of LayerNorm with input, statistics and output in a lower precision."""

    def forward(norm: Any, x: Any) -> Any:
        import torch
        import torch.nn.functional as F

        low_dtype = getattr(torch, dtype)
        weight, bias = norm.weight.to(low_dtype), None if norm.bias is None else norm.bias.to(low_dtype)
        return F.layer_norm(x.to(low_dtype), norm.normalized_shape, weight, bias, norm.eps).to(x.dtype)

    return forward


def round_images(cast: Callable[[Any], Any]) -> Patch:
    """Return the patch that gives the model cast(images)."""

    def patch(model: Any) -> None:
        model.patch_embed.register_forward_pre_hook(lambda module, inputs: (cast(inputs[0]),))

    return patch


def tf32(layers: bool, attention: bool, projection: bool) -> Patch:
    """Return the patch that rounds both factors of matrix products to a mantissa of ten bits, as NVIDIA's TF32 does.

    layers: whether to round in linear layers.
    attention: whether to round in the two products of attention.
    projection: whether to round in the patch projection; other libraries compute it by a convolution, which has its own
        TF32 setting.
    """

    def patch(model: Any) -> None:
        from vit_torch.layers import Linear

        linear = [m for m in model.modules() if isinstance(m, Linear)] if layers else []
        for module in [*linear, *([model.patch_embed.proj] if projection else [])]:
            module.weight.data = _round_to_tf32(module.weight.data)
            module.register_forward_pre_hook(lambda _, inputs: (_round_to_tf32(inputs[0]), *inputs[1:]))
        for block in model.blocks if attention else ():
            intercept(block.attn, _round_attention_to_tf32())

    return patch


def _round_attention_to_tf32() -> Callable[[str, Any], Any]:
    """Return the change that computes the heads from rounded queries, keys, values and attention weights."""
    values: dict[str, Any] = {}

    def change(name: str, value: Any) -> Any:
        if name == "heads":
            heads: Any = values["weights"].to(value.dtype) @ values["v"].to(value.dtype).transpose(1, 2)
            return heads.transpose(1, 2)
        values[name] = _round_to_tf32(value) if name in ("q", "k", "v", "weights") else value
        return values[name]

    return change


def _round_to_tf32(x: Any) -> Any:
    import torch

    bits = x.to(torch.float32).contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).to(x.dtype)
