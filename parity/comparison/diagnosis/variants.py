"""Patches of blocks, norms, activations, tokens, pooling and outputs: what other implementations compute differently.

A patch changes one model of the PyTorch twin in place.  Patches of attention and rotary positions are in
`attention_variants`, patches to lower precision in `roundings`.  The two halves of a block are attention and the MLP, each
with its norm and its residual connection.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from parity.comparison.diagnosis.patches import Patch, intercept, patch_intermediate, require

Forward = Callable[[Any, Any, Any], Any]  # (block, tokens (B, T, width), rotary tables and bias) -> tokens


# Blocks ---------------------------------------------------------------------------------------------------------------


def replace_blocks(forward: Forward) -> Patch:
    """Return the patch that makes every block compute forward(block, x, tables): (B, T, width) -> (B, T, width)."""

    def patch(model: Any) -> None:
        for block in model.blocks:
            block.forward = partial(_block_forward, forward, block)

    return patch


def _block_forward(forward: Forward, block: Any, x: Any, rate: Any, tables: Any, noise: Any = None) -> Any:
    return forward(block, x, tables)


def _scaled_attn(block: Any, x: Any, tables: Any) -> Any:
    y = block.attn(x, tables)
    return y if block.ls1 is None else block.ls1(y)


def _scaled_mlp(block: Any, x: Any) -> Any:
    y = block.mlp(x)
    return y if block.ls2 is None else block.ls2(y)


def _norm2(block: Any, x: Any) -> Any:
    return (block.norm1 if block.norm2 is None else block.norm2)(x)


def post_norm(block: Any, x: Any, tables: Any) -> Any:
    """Apply the norms after the residual additions (post-norm)."""
    x = block.intermediate("sum", block.norm1(x + _scaled_attn(block, x, tables)))
    return _norm2(block, x + _scaled_mlp(block, x))


def res_post_norm(block: Any, x: Any, tables: Any) -> Any:
    """Apply the norms after attention and MLP, before the residual additions (Swin v2, timm's ResPostBlock)."""
    x = block.intermediate("sum", x + block.norm1(_scaled_attn(block, x, tables)))
    return x + _norm2(block, _scaled_mlp(block, x))


def parallel(block: Any, x: Any, tables: Any) -> Any:
    """Apply attention and MLP to the input of the block in parallel."""
    return x + _scaled_attn(block, block.norm1(x), tables) + _scaled_mlp(block, _norm2(block, x))


def swapped_halves(block: Any, x: Any, tables: Any) -> Any:
    """Apply the MLP before attention, with the norms in their usual order."""
    x = block.intermediate("sum", x + _scaled_mlp(block, block.norm1(x)))
    return x + _scaled_attn(block, _norm2(block, x), tables)


def swapped_halves_with_norms(block: Any, x: Any, tables: Any) -> Any:
    """Apply the MLP before attention, each with its own norm."""
    x = block.intermediate("sum", x + _scaled_mlp(block, _norm2(block, x)))
    return x + _scaled_attn(block, block.norm1(x), tables)


def residual(first: str, second: str) -> Forward:
    """Return the forward pass of a block with other residual additions after attention (first) and after the MLP (second).

    The term to add is "x", the usual one; "norm", the normalized x; "none"; "double", 2 x; or "start", the input of the
    block (second only).
    """

    def forward(block: Any, x: Any, tables: Any) -> Any:
        start, y = x, block.norm1(x)
        x = block.intermediate(
            "sum", _scaled_attn(block, y, tables) + {"x": x, "norm": y, "none": 0, "double": 2 * x}[first]
        )
        y = _norm2(block, x)
        return _scaled_mlp(block, y) + {"x": x, "norm": y, "none": 0, "start": start, "double": 2 * x}[second]

    return forward


def skip_halves(first: bool, second: bool) -> Forward:
    """Return the forward pass of a block without attention (first), without the MLP (second), or without both."""

    def forward(block: Any, x: Any, tables: Any) -> Any:
        x = x if first else x + _scaled_attn(block, block.norm1(x), tables)
        return x if second else x + _scaled_mlp(block, _norm2(block, x))

    return forward


def without_norm(first: bool) -> Forward:
    """Return the forward pass of a block without the norm before attention (first), or without the norm before the MLP."""

    def forward(block: Any, x: Any, tables: Any) -> Any:
        x = block.intermediate("sum", x + _scaled_attn(block, x if first else block.norm1(x), tables))
        return x + _scaled_mlp(block, _norm2(block, x) if first else x)

    return forward


# Norms ----------------------------------------------------------------------------------------------------------------


def replace_norm_statistics(forward: Callable[[Any, Any], Any], suffix: str | tuple[str, ...] = "") -> Patch:
    """Return the patch that makes norms compute forward(norm, x) before weight and bias are applied.

    suffix: only norms whose module name ends with it; by default all.
    """

    def patch(model: Any) -> None:
        for norm in _layer_norms(model, suffix):
            norm.forward = partial(_on_last_axis, partial(_affine_norm, forward), norm)

    return patch


def _layer_norms(model: Any, suffix: str | tuple[str, ...]) -> list[Any]:
    from vit_torch.layers import Norm

    norms = [module for name, module in model.named_modules() if isinstance(module, Norm) and name.endswith(suffix)]
    return require(norms or None, f"norm {suffix}")  # type: ignore[no-any-return]


def _on_last_axis(forward: Callable[[Any, Any], Any], norm: Any, x: Any) -> Any:
    """Apply forward(norm, x) to x with the axes that the norm normalizes merged into one."""
    return forward(norm, x.flatten(-len(norm.dims))).view_as(x)


def _affine_norm(forward: Callable[[Any, Any], Any], norm: Any, x: Any) -> Any:
    return forward(norm, x).to(x.dtype) * norm.weight.to(x.dtype) + _bias(norm, x)


def _bias(norm: Any, x: Any) -> Any:
    return 0 if norm.bias is None else norm.bias.to(x.dtype)


def replace_norm_forward(forward: Callable[[Any, Any], Any], suffix: str | tuple[str, ...] = "") -> Patch:
    """Return the patch that makes norms compute forward(norm, x), including weight and bias."""

    def patch(model: Any) -> None:
        for norm in _layer_norms(model, suffix):
            norm.forward = partial(_on_last_axis, forward, norm)

    return patch


def unbiased_variance(norm: Any, x: Any) -> Any:
    """Normalize with the variance divided by n - 1."""
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=1, keepdim=True) + norm.eps).sqrt()


def std_plus_eps(norm: Any, x: Any) -> Any:
    """Normalize with eps added to the standard deviation."""
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, correction=0, keepdim=True) + norm.eps)


def unbiased_std_plus_eps(norm: Any, x: Any) -> Any:
    """Normalize with eps added to the standard deviation of `torch.Tensor.std`, which divides by n - 1."""
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + norm.eps)


def no_mean_subtraction(norm: Any, x: Any) -> Any:
    """Normalize by the root mean square, without subtracting the mean."""
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()


def rms_norm(norm: Any, x: Any) -> Any:
    """Compute RMSNorm (arXiv 1910.07467): no mean, no bias."""
    return no_mean_subtraction(norm, x) * norm.weight.to(x.dtype)


def no_std_division(norm: Any, x: Any) -> Any:
    """Subtract the mean, without dividing by the standard deviation."""
    return x - x.mean(-1, keepdim=True)


def weight_plus_one(norm: Any, x: Any) -> Any:
    """Multiply by 1 + weight."""
    import torch.nn.functional as F

    return F.layer_norm(x, norm.normalized_shape, norm.weight.to(x.dtype) + 1, None, norm.eps) + _bias(norm, x)


def bias_before_weight(norm: Any, x: Any) -> Any:
    """Add the bias before multiplying by the weight."""
    import torch.nn.functional as F

    plain = F.layer_norm(x, norm.normalized_shape, None, None, norm.eps)
    return (plain + _bias(norm, x)) * norm.weight.to(x.dtype)


def fast_variance(norm: Any, x: Any) -> Any:
    """Compute the variance as E[x^2] - E[x]^2 in float32."""
    import torch

    x = x.to(torch.float32)
    mean = x.mean(-1, keepdim=True)
    variance = (x.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
    return (x - mean) * (variance + norm.eps).rsqrt()


def set_norm_eps(name: str, eps: float) -> Patch:
    """Return the patch that sets eps of all norms with this name, e.g. "norm1"."""

    def patch(model: Any) -> None:
        for norm in [module for full_name, module in model.named_modules() if full_name.rpartition(".")[2] == name]:
            norm.eps = eps

    return patch


# The MLP --------------------------------------------------------------------------------------------------------------


def replace_activation(function: Callable[[Any], Any]) -> Patch:
    """Return the patch that replaces the activation of every MLP; for a gated MLP, the silu of the gate."""

    def patch(model: Any) -> None:
        for block in model.blocks:
            _replace_mlp_activation(block.mlp, function)

    return patch


def _replace_mlp_activation(mlp: Any, function: Callable[[Any], Any]) -> None:
    captured: dict[str, Any] = {}
    mlp.fc1.register_forward_hook(lambda module, inputs, output: captured.update(x=output))

    def change(name: str, value: Any) -> Any:
        if name != "activation":
            return value
        if not mlp.config.mlp.is_gated:
            return function(captured["x"])
        gate, linear = captured["x"].unbind(-2)
        return function(gate) * linear

    intercept(mlp, change)


# Positions, tokens and outputs ----------------------------------------------------------------------------------------


def roll_positions(steps: int) -> Patch:
    """Return the patch that rolls the rows of the position table by a number of rows."""
    return patch_intermediate("positions", lambda table: table.roll(steps, 1))


def change_tokens(change: Callable[[Any, int], Any]) -> Patch:
    """Return the patch that replaces the tokens, before positions are added, by change(tokens, number of prefix tokens)."""

    def patch(model: Any) -> None:
        patch_intermediate("tokens", lambda x: change(x, model.config.num_prefix))(model)

    return patch


def column_major_tokens(x: Any, grid: tuple[int, int], prefix: int) -> Any:
    """Return tokens (B, T, width) with the patches in column-major order."""
    import torch

    head, body = x[:, :prefix], x[:, prefix:]
    body = body.unflatten(1, grid).transpose(1, 2).flatten(1, 2)
    return torch.cat([head, body], 1)


def column_major_patches(model: Any) -> None:
    """Make a model order its image patches column by column."""
    original = model.patch_embed.forward

    def forward(images: Any) -> Any:
        return column_major_tokens(original(images), model.config.grid_of(*images.shape[2:]), 0)

    model.patch_embed.forward = forward


def replace_pooling(pool: Callable[[Any, int], Any]) -> Patch:
    """Return the patch that pools with pool(tokens, number of prefix tokens)."""

    def patch(model: Any) -> None:
        model.pool = lambda x, noise=None: model.intermediate("pool", pool(x, model.config.num_prefix))

    return patch


def change_outputs(change: Callable[[Any], Any]) -> Patch:
    """Return the patch that makes the model return change(logits)."""

    def patch(model: Any) -> None:
        original = model.classify
        model.classify = lambda x, *_: change(original(x))

    return patch


def combine_heads(change: Callable[[Any, Any], Any]) -> Patch:
    """Return the patch that makes the model return change(class logits, distillation logits)."""

    def patch(model: Any) -> None:
        def classify(x: Any, *_: Any) -> Any:
            first = model.output(model.pool(x), model.head)
            return change(first, model.output(x[:, 1], model.head_dist))

        model.classify = classify

    return patch


def apply_twice(name: str) -> Patch:
    """Return the patch that applies the module of this name twice in a row."""

    def patch(model: Any) -> None:
        module = require(getattr(model, name), name)
        original = module.forward
        module.forward = lambda x: original(original(x))

    return patch


def norm_pooled_feature(model: Any) -> None:
    """Make a model apply the final norm to the pooled feature again."""
    norm, original = require(model.norm, "norm"), model.pool
    model.pool = lambda x, noise=None: norm(original(x))


def replace_hidden_activation(function: Callable[[Any], Any]) -> Patch:
    """Return the patch that replaces the tanh after the hidden layer of the head."""

    def patch(model: Any) -> None:
        layer = require(model.pre_logits, "hidden layer")

        def output(x: Any, head: Any) -> Any:
            x = function(layer(x if model.fc_norm is None else model.fc_norm(x)))
            return x if head is None else head(x)

        model.output = output

    return patch
