"""Computations of other implementations that no config names: patches that change one model of the PyTorch twin in place.

Blocks, norms, activations, tokens, pooling and outputs are here; `attention_variants` has attention and rotary positions,
`roundings` has lower precision.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from parity.comparison.diagnosis.patches import Patch, at, kept, there

Forward = Callable[[Any, Any, Any], Any]  # block, tokens (B, T, width), rotary tables, to tokens


# Blocks ---------------------------------------------------------------------------------------------------------------


def blocks(forward: Forward) -> Patch:
    """Every block computes forward(block, x, tables): (B, T, width) -> (B, T, width)."""

    def patch(model: Any) -> None:
        for block in model.blocks:
            block.forward = partial(_block, forward, block)

    return patch


def _block(forward: Forward, block: Any, x: Any, rate: float, tables: Any) -> Any:
    return forward(block, x, tables)


def _attn(block: Any, x: Any, tables: Any) -> Any:
    y = block.attn(x, tables)
    return y if block.ls1 is None else block.ls1(y)


def _mlp(block: Any, x: Any) -> Any:
    y = block.mlp(x)
    return y if block.ls2 is None else block.ls2(y)


def _norm2(block: Any, x: Any) -> Any:
    return (block.norm1 if block.norm2 is None else block.norm2)(x)


def post_norm(block: Any, x: Any, tables: Any) -> Any:
    """Norms after the sums."""
    x = block.keep("sum", block.norm1(x + _attn(block, x, tables)))
    return _norm2(block, x + _mlp(block, x))


def res_post_norm(block: Any, x: Any, tables: Any) -> Any:
    """Norms after attention and MLP, ahead of the sums (Swin v2, timm's ResPostBlock)."""
    x = block.keep("sum", x + block.norm1(_attn(block, x, tables)))
    return x + _norm2(block, _mlp(block, x))


def parallel(block: Any, x: Any, tables: Any) -> Any:
    """Both halves read what enters the block."""
    return x + _attn(block, block.norm1(x), tables) + _mlp(block, _norm2(block, x))


def swapped_halves(block: Any, x: Any, tables: Any) -> Any:
    """The MLP first."""
    x = block.keep("sum", x + _mlp(block, block.norm1(x)))
    return x + _attn(block, _norm2(block, x), tables)


def swapped_halves_with_norms(block: Any, x: Any, tables: Any) -> Any:
    """The MLP first, each half with its own norm."""
    x = block.keep("sum", x + _mlp(block, _norm2(block, x)))
    return x + _attn(block, block.norm1(x), tables)


def residual(first: str, second: str) -> Forward:
    """Add to the halves: "x" what entered, "norm" that normalised, "none" nothing, "start" the block's, "double" 2 x."""

    def forward(block: Any, x: Any, tables: Any) -> Any:
        start, y = x, block.norm1(x)
        x = block.keep("sum", _attn(block, y, tables) + {"x": x, "norm": y, "none": 0, "double": 2 * x}[first])
        y = _norm2(block, x)
        return _mlp(block, y) + {"x": x, "norm": y, "none": 0, "start": start, "double": 2 * x}[second]

    return forward


def skipped(first: bool, second: bool) -> Forward:
    """Blocks without attention, without the MLP, or without both."""

    def forward(block: Any, x: Any, tables: Any) -> Any:
        x = x if first else x + _attn(block, block.norm1(x), tables)
        return x if second else x + _mlp(block, _norm2(block, x))

    return forward


def without_norm(first: bool) -> Forward:
    """The norm ahead of attention, or of the MLP, left out."""

    def forward(block: Any, x: Any, tables: Any) -> Any:
        x = block.keep("sum", x + _attn(block, x if first else block.norm1(x), tables))
        return x + _mlp(block, _norm2(block, x) if first else x)

    return forward


# Norms ----------------------------------------------------------------------------------------------------------------


def norms(forward: Callable[[Any, Any], Any], where: str | tuple[str, ...] = "") -> Patch:
    """Every norm computes forward(norm, x), ahead of its weight and bias.

    where: the end of the names of those that do; by default all.
    """

    def patch(model: Any) -> None:
        for norm in _layer_norms(model, where):
            norm.forward = partial(_norm, forward, norm)

    return patch


def _layer_norms(model: Any, where: str | tuple[str, ...]) -> list[Any]:
    from vit_torch.layers import LayerNorm

    found = [module for name, module in model.named_modules() if isinstance(module, LayerNorm) and name.endswith(where)]
    return there(found or None, f"norm {where}")  # type: ignore[no-any-return]


def _norm(forward: Callable[[Any, Any], Any], norm: Any, x: Any) -> Any:
    return forward(norm, x).to(x.dtype) * norm.weight.to(x.dtype) + norm.bias.to(x.dtype)


def whole_norms(forward: Callable[[Any, Any], Any], where: str | tuple[str, ...] = "") -> Patch:
    """Every norm computes forward(norm, x), its weight and bias included."""

    def patch(model: Any) -> None:
        for norm in _layer_norms(model, where):
            norm.forward = partial(forward, norm)

    return patch


def unbiased(norm: Any, x: Any) -> Any:
    """The variance divided by n - 1."""
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=1, keepdim=True) + norm.eps).sqrt()


def eps_outside(norm: Any, x: Any) -> Any:
    """eps added to the standard deviation."""
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, correction=0, keepdim=True) + norm.eps)


def unbiased_eps_outside(norm: Any, x: Any) -> Any:
    """As `torch.Tensor.std` gives it, plus eps."""
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + norm.eps)


def no_mean(norm: Any, x: Any) -> Any:
    """Divided by the root of the mean square."""
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()


def rms_norm(norm: Any, x: Any) -> Any:
    """RMSNorm (arXiv 1910.07467): no mean, no bias."""
    return no_mean(norm, x) * norm.weight.to(x.dtype)


def no_variance(norm: Any, x: Any) -> Any:
    """The mean subtracted, and no division."""
    return x - x.mean(-1, keepdim=True)


def weight_plus_one(norm: Any, x: Any) -> Any:
    """A weight that counts from zero."""
    import torch.nn.functional as F

    return F.layer_norm(x, norm.normalized_shape, norm.weight.to(x.dtype) + 1, norm.bias.to(x.dtype), norm.eps)


def bias_scaled(norm: Any, x: Any) -> Any:
    """The bias added ahead of the weight."""
    import torch.nn.functional as F

    plain = F.layer_norm(x, norm.normalized_shape, None, None, norm.eps)
    return (plain + norm.bias.to(x.dtype)) * norm.weight.to(x.dtype)


def fast_variance(norm: Any, x: Any) -> Any:
    """E[x^2] - E[x]^2 in float32."""
    import torch

    x = x.to(torch.float32)
    mean = x.mean(-1, keepdim=True)
    variance = (x.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
    return (x - mean) * (variance + norm.eps).rsqrt()


def one_eps(where: str, eps: float) -> Patch:
    """Another eps in the norms of one name."""

    def patch(model: Any) -> None:
        for norm in [each for name, each in model.named_modules() if name.rpartition(".")[2] == where]:
            norm.eps = eps

    return patch


# The MLP --------------------------------------------------------------------------------------------------------------


def activation(function: Callable[[Any], Any]) -> Patch:
    """Every MLP of a block computes function in the place of its activation; of a gated one, for the gate's silu."""

    def patch(model: Any) -> None:
        for block in model.blocks:
            _activated(block.mlp, function)

    return patch


def _activated(mlp: Any, function: Callable[[Any], Any]) -> None:
    seen: dict[str, Any] = {}
    mlp.fc1.register_forward_hook(lambda module, inputs, output: seen.update(x=output))

    def change(name: str, value: Any) -> Any:
        if name != "activation":
            return value
        if mlp.config.mlp.activation != "swiglu":
            return function(seen["x"])
        gate, linear = seen["x"].unbind(-2)
        return function(gate) * linear

    kept(mlp, change)


# Positions, tokens and outputs ----------------------------------------------------------------------------------------


def rolled(steps: int) -> Patch:
    """Every row of the position table one place further."""
    return at("positions", lambda table: table.roll(steps, 1))


def embedded(change: Callable[[Any, int], Any]) -> Patch:
    """Every sequence is change(tokens (B, T, width), number of prefix tokens), ahead of the positions."""

    def patch(model: Any) -> None:
        at("tokens", lambda x: change(x, model.config.num_prefix))(model)

    return patch


def by_columns(x: Any, grid: tuple[int, int], prefix: int) -> Any:
    """Return tokens (B, T, width) with the patches column by column."""
    import torch

    head, body = x[:, :prefix], x[:, prefix:]
    body = body.unflatten(1, grid).transpose(1, 2).flatten(1, 2)
    return torch.cat([head, body], 1)


def patches_by_columns(model: Any) -> None:
    """Patches cut column by column."""
    before = model.patch_embed.forward

    def forward(images: Any) -> Any:
        return by_columns(before(images), model.config.grid_of(*images.shape[2:]), 0)

    model.patch_embed.forward = forward


def pool(pooled: Callable[[Any, int], Any]) -> Patch:
    """The feature is pooled(tokens, number of prefix tokens)."""

    def patch(model: Any) -> None:
        model.pool = lambda x: model.keep("pool", pooled(x, model.config.num_prefix))

    return patch


def outputs(change: Callable[[Any], Any]) -> Patch:
    """What comes out is change(logits)."""

    def patch(model: Any) -> None:
        before = model.classify
        model.classify = lambda x: change(before(x))

    return patch


def heads(change: Callable[[Any, Any], Any]) -> Patch:
    """What comes out is change(logits of the class token, logits of the distillation token)."""

    def patch(model: Any) -> None:
        def classify(x: Any) -> Any:
            first = model.output(model.pool(x), model.head)
            return change(first, model.output(x[:, 1], model.head_dist))

        model.classify = classify

    return patch


def twice(name: str) -> Patch:
    """The module of this name applied to its own output as well."""

    def patch(model: Any) -> None:
        module = there(getattr(model, name), name)
        before = module.forward
        module.forward = lambda x: before(before(x))

    return patch


def normed_again(model: Any) -> None:
    """The final norm applied again to the pooled feature."""
    norm, before = there(model.norm, "norm"), model.pool
    model.pool = lambda x: norm(before(x))


def hidden(function: Callable[[Any], Any]) -> Patch:
    """Another function in the place of tanh after the hidden layer of the head."""

    def patch(model: Any) -> None:
        layer = there(model.pre_logits, "hidden layer")

        def output(x: Any, head: Any) -> Any:
            x = function(layer(x if model.fc_norm is None else model.fc_norm(x)))
            return x if head is None else head(x)

        model.output = output

    return patch
