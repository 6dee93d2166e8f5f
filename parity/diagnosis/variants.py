"""What other implementations compute and no config says: each changes one model of the PyTorch twin, in place."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from parity.diagnosis.trial import Patch

if TYPE_CHECKING:
    from torch import Tensor

    Mixing = Callable[[Tensor], Tensor]  # scores (B, H, T, S) to weights


# Blocks ---------------------------------------------------------------------------------------------------------------


def blocks(forward: Callable[[Any, Any, Any], Any]) -> Patch:
    """Every block computes forward(block, x, tables): (B, T, width) -> (B, T, width)."""

    def patch(model: Any) -> None:
        for block in model.blocks:
            block.forward = partial(_block, forward, block)

    return patch


def _block(forward: Callable[[Any, Any, Any], Any], block: Any, x: Any, rate: float, tables: Any) -> Any:
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
    x = block.norm1(x + _attn(block, x, tables))
    return _norm2(block, x + _mlp(block, x))


def parallel(block: Any, x: Any, tables: Any) -> Any:
    """Both halves read what enters the block."""
    return x + _attn(block, block.norm1(x), tables) + _mlp(block, _norm2(block, x))


def swapped_halves(block: Any, x: Any, tables: Any) -> Any:
    """The MLP first."""
    x = x + _mlp(block, block.norm1(x))
    return x + _attn(block, _norm2(block, x), tables)


def residual(first: str, second: str) -> Callable[[Any, Any, Any], Any]:
    """What is added to each half: "x" what entered it, "norm" that normalised, "none" nothing, "start" the block's own."""

    def forward(block: Any, x: Any, tables: Any) -> Any:
        start, y = x, block.norm1(x)
        x = _attn(block, y, tables) + {"x": x, "norm": y, "none": 0}[first]
        y = _norm2(block, x)
        return _mlp(block, y) + {"x": x, "norm": y, "none": 0, "start": start}[second]

    return forward


def without_norm(first: bool) -> Callable[[Any, Any, Any], Any]:
    """The norm ahead of attention, or of the MLP, left out."""

    def forward(block: Any, x: Any, tables: Any) -> Any:
        x = x + _attn(block, x if first else block.norm1(x), tables)
        return x + _mlp(block, _norm2(block, x) if first else x)

    return forward


# Norms ----------------------------------------------------------------------------------------------------------------


def norms(forward: Callable[[Any, Any], Any]) -> Patch:
    """Every norm computes forward(norm, x), ahead of its weight and bias."""

    def patch(model: Any) -> None:
        from vit_torch.layers import LayerNorm

        for module in model.modules():
            if isinstance(module, LayerNorm):
                setattr(module, "forward", partial(_norm, forward, module))  # noqa: B010 (a method)

    return patch


def _norm(forward: Callable[[Any, Any], Any], norm: Any, x: Any) -> Any:
    return forward(norm, x).to(x.dtype) * norm.weight.to(x.dtype) + norm.bias.to(x.dtype)


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
        for name, module in model.named_modules():
            if name.rpartition(".")[2] == where:
                module.eps = eps

    return patch


# Attention ------------------------------------------------------------------------------------------------------------


def mixing(weights: "Mixing") -> Patch:
    """Every attention of a block mixes values by weights(scores)."""

    def patch(model: Any) -> None:
        for block in model.blocks:
            block.attn.tap = _heads(block.attn, weights)

    return patch


def _heads(part: Any, weights: "Mixing") -> Callable[[str, Any], Any]:
    seen: dict[str, Any] = {}

    def tap(name: str, value: Any) -> Any:
        seen[name] = value
        if name != "heads":
            return value
        mixed = weights(seen["scores"]).to(value.dtype) @ seen["v"].transpose(1, 2)  # (B, H, T, D)
        return mixed.transpose(1, 2)

    return tap


def causal(scores: "Tensor") -> "Tensor":
    """No token sees those after it."""
    import torch

    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def tables(change: Callable[["Tensor", "Tensor", Any], tuple["Tensor", "Tensor"]]) -> Patch:
    """Queries and keys are turned by change(cosines, sines, model)."""

    def patch(model: Any) -> None:
        before = model.embed

        def embed(images: Any) -> Any:
            x, (cos, sin) = before(images)
            return x, change(cos, sin, model)

        model.embed = embed

    return patch


def shifted(sign: int) -> Callable[["Tensor", "Tensor", Any], tuple["Tensor", "Tensor"]]:
    """Rotary positions of patches counted from one more or one less; the first patch's angle is one step."""

    def change(cos: Any, sin: Any, model: Any) -> Any:
        n = model.config.num_prefix
        c, s = cos[:, n : n + 1], sign * sin[:, n : n + 1]
        turned = cos * c - sin * s, sin * c + cos * s
        return tuple(_joined(before, after, n) for before, after in zip((cos, sin), turned, strict=True))

    return change


def _joined(before: Any, after: Any, n: int) -> Any:
    import torch

    return torch.cat([before[:, :n], after[:, n:]], 1)


# Positions, tokens and outputs ----------------------------------------------------------------------------------------


def rolled(steps: int) -> Patch:
    """Every row of the position table one place further."""

    def patch(model: Any) -> None:
        before = model.positions
        model.positions = lambda x, grid: before(x, grid).roll(steps, 1)

    return patch


def pool(pooled: Callable[[Any, int], Any]) -> Patch:
    """The feature is pooled(tokens, number of prefix tokens)."""

    def patch(model: Any) -> None:
        model.pool = lambda x: pooled(x, model.config.num_prefix)

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


def linear_hidden(model: Any) -> None:
    """No tanh after the hidden layer of the head."""

    def output(x: Any, head: Any) -> Any:
        x = model.pre_logits(x if model.fc_norm is None else model.fc_norm(x))
        return x if head is None else head(x)

    model.output = output


# Rounding -------------------------------------------------------------------------------------------------------------


def tf32(layers: bool, attention: bool, projection: bool) -> Patch:
    """Both factors of products have ten bits behind the point, as in the TF32 of Nvidia's tensor cores.

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
            block.attn.tap = _rounded_attention(block.attn)

    return patch


def _rounded_attention(part: Any) -> Callable[[str, Any], Any]:
    seen: dict[str, Any] = {}

    def tap(name: str, value: Any) -> Any:
        seen[name] = _ten_bits(value) if name in ("q", "k", "v", "weights") else value
        if name == "heads":
            return (seen["weights"] @ seen["v"].transpose(1, 2)).transpose(1, 2)
        return seen[name]

    return tap


def _ten_bits(x: Any) -> Any:
    import torch

    bits = x.to(torch.float32).contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).to(x.dtype)
