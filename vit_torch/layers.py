"""The small parts of the object twin: everything in which it may differ from `vit_jax/layers.py`.

Weights are (outputs, inputs) with heads merged, as in timm, so that the `state_dict` is one that timm reads.
"""

from collections.abc import Callable
from math import prod

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vit_spec import InputError, Law, ViTConfig, position_table, rows
from vit_spec.laws import TRUNCATED_STD
from vit_torch.execution import Execution

Shape = tuple[int, ...]
Tables = tuple[np.ndarray, ...]


class Part(nn.Module):
    """A module of the twin: it knows the config."""

    tap: Callable[[str, Tensor], Tensor] | None = None

    def __init__(self, config: ViTConfig, execution: Execution) -> None:
        super().__init__()
        self.config = config
        self.execution = execution

    def keep(self, name: str, value: Tensor) -> Tensor:
        """Name an intermediate, and return it, or what is fed in its place; see `vit_torch.intermediates`."""
        return value if self.tap is None else self.tap(name, value)

    def show(self, name: str, value: Tensor) -> None:
        """Name a value that nothing goes on from."""
        if self.tap is not None:
            self.tap(name, value)

    def constants(self, make: Callable[..., Tables], grid: tuple[int, int], x: Tensor) -> tuple[Tensor, ...]:
        """The tables of `vit_spec` for this grid, rounded once to the type that x is summed in."""
        return self._constants(make, grid, at_least_float32(x), x.device)

    @torch.compiler.assume_constant_result  # numpy is not to be traced
    def _constants(
        self, make: Callable[..., Tables], grid: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        return tuple(torch.tensor(table, dtype=dtype, device=device) for table in make(self.config, grid))


class Linear(nn.Linear):
    """Contract the trailing axes `inputs` of x into the axes `outputs`: (..., *inputs) -> (..., *outputs)."""

    def __init__(self, inputs: Shape, outputs: Shape, bias: bool = True) -> None:
        super().__init__(prod(inputs), prod(outputs), bias)
        self.inputs = inputs
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(-len(self.inputs))
        x = F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        return x.unflatten(-1, self.outputs)


class PatchProjection(nn.Conv2d):
    """Cut images into patches and project each: (B, C, H, W) -> (B, rows * columns, width)."""

    def __init__(self, config: ViTConfig, execution: Execution, bias: bool) -> None:
        super().__init__(config.in_channels, config.width, config.patch_size, config.patch_size, bias=bias)
        self.dtype = execution.dtype

    def forward(self, images: Tensor) -> Tensor:
        (b, c, height, width), (ph, pw) = images.shape, self.kernel_size
        x = images.to(self.dtype or self.weight.dtype)
        x = x.view(b, c, height // ph, ph, width // pw, pw).permute(0, 2, 4, 1, 3, 5)
        x = x.reshape(b, -1, c * ph * pw)
        # A product, not a convolution: what is summed is the same, and no convolution setting (TF32) can change it.
        return F.linear(x, self.weight.to(x.dtype).flatten(1), None if self.bias is None else self.bias.to(x.dtype))


class LayerNorm(nn.LayerNorm):
    """Normalise the last axis, in at least float32: (..., dim) -> (..., dim)."""

    def __init__(self, config: ViTConfig, dim: int) -> None:
        super().__init__(dim, config.norms.eps)

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        y = F.layer_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.bias.to(wide), self.eps)
        return y.to(x.dtype)


class LayerScale(nn.Module):
    """A learned factor per channel: (..., width) -> (..., width)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(config.width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma.to(x.dtype)


def activation(x: Tensor, kind: str) -> Tensor:
    """Apply the non-linearity that `Mlp.activation` names; "swiglu" folds (..., 2, ff) into (..., ff)."""
    match kind:
        case "gelu":
            return F.gelu(x, approximate="none")
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "quick_gelu":
            return x * torch.sigmoid(1.702 * x)
        case "relu":
            return F.relu(x)
        case "swiglu":
            gate, value = x.unbind(-2)
            return F.silu(gate) * value
    return x


def attention(part: Part, q: Tensor, k: Tensor, v: Tensor, rate: float) -> Tensor:
    """softmax(scale q k^T) v for each head: (B, T, H, D), (B, S, H, D), (B, S, H, D) -> (B, T, H, D)."""
    scale, rate = part.config.scale, rate if part.training else 0.0
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
    if part.execution.attention == "fused":
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, scale=scale)
    else:
        scores = scale * (q @ k.transpose(2, 3)).to(at_least_float32(q))  # (B, H, T, S)
        scores = part.keep("scores", scores)
        weights = scores.softmax(-1)
        part.show("weights", weights)
        x = F.dropout(weights, rate).to(v.dtype) @ v
    return x.transpose(1, 2)


def rotate(x: Tensor, tables: tuple[Tensor, ...], kind: str) -> Tensor:
    """Turn queries or keys by their position: (B, T, H, D) and cosines, sines (B or 1, T, 1, D) -> (B, T, H, D)."""
    cos, sin = tables
    wide = x.to(cos.dtype)
    if kind == "axial":  # the pairs are neighbours
        turned = torch.stack([-wide[..., 1::2], wide[..., ::2]], -1).reshape(x.shape)
    else:  # the pairs are half a head apart
        first, second = wide.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    return (wide * cos + turned * sin).to(x.dtype)


def drop(part: Part, x: Tensor, rate: float) -> Tensor:
    """Dropout, in training: entries become zero with probability `rate`, the others grow by 1 / (1 - rate)."""
    return F.dropout(x, rate, part.training)


def drop_path(part: Part, x: Tensor, rate: float) -> Tensor:
    """Stochastic depth, in training: whole images of (B, T, width) become zero with probability `rate`."""
    if not part.training:
        return x
    mask = (torch.rand(x.shape[0], 1, 1, device=x.device) >= rate).to(x.dtype)
    mask = part.keep("drop_path", mask)
    return torch.where(mask > 0, x / (1 - rate), 0)


def drop_patches(part: Part, x: Tensor, prefix: int, rate: float) -> Tensor:
    """Return the places (B, kept) of the tokens of x that stay: the prefix, and a random share of the patches."""
    batch, patches = x.shape[0], x.shape[1] - prefix
    noise = torch.rand(batch, patches, device=x.device)
    kept = noise.argsort(dim=1)[:, : max(1, int(patches * (1 - rate)))] + prefix
    return torch.cat([torch.arange(prefix, device=x.device).expand(batch, prefix), kept], dim=1)


def run(block: nn.Module, x: Tensor, rate: float, tables: tuple[Tensor, ...] | None) -> Tensor:
    """Apply one block, keeping for the backward pass what `Execution.remat` says."""
    assert isinstance(block, Part)
    if block.execution.remat == "full" and torch.is_grad_enabled():
        return checkpoint(block, x, rate, tables, use_reentrant=False)
    return block(x, rate, tables)


def at_least_float32(x: Tensor) -> torch.dtype:
    """The type that sums and exponentials are computed in."""
    return torch.promote_types(x.dtype, torch.float32)


def check_images(images: Tensor, config: ViTConfig) -> None:
    """Refuse what is no batch of normalised images of this config."""
    wanted, c = "(batch, channels, height, width)", config.in_channels
    if images.ndim != 4:
        raise InputError(f"images have shape {tuple(images.shape)}: expected {wanted}; a single image is images[None]")
    if images.shape[1] != c:
        hint = "; these look channels-last: use images.permute(0, 3, 1, 2)" if images.shape[3] == c else ""
        raise InputError(f"images have shape {tuple(images.shape)}: expected {wanted} with {c} channels{hint}")
    if not images.is_floating_point():
        raise InputError(
            f"images are {images.dtype}: expected floating-point numbers; normalise them first, "
            "(images / 255 - config.pixels.mean) / config.pixels.std"
        )


@torch.no_grad()
def initialise(model: Part) -> None:
    """Draw every parameter anew, by the laws of `vit_spec.rows`, from PyTorch's global generator.

    Parameters on the meta device hold nothing, and stay as they are.
    """
    if next(model.parameters()).is_meta:
        return
    declared = rows(model.config)
    for name, parameter in model.named_parameters():
        words = name.split(".")
        row = declared[".".join(word for word in words if not word.isdigit())]
        if row.law is None:
            parameter.copy_(torch.tensor(position_table(model.config, model.config.grid)[0]).view(parameter.shape))
        else:
            _sample(row.law, parameter)


def _sample(law: Law, parameter: Tensor) -> None:
    match law.kind:
        case "constant":
            parameter.fill_(law.arguments[0])
        case "normal":
            parameter.normal_(0, law.std)
        case "uniform":
            parameter.uniform_(*law.arguments)
        case "trunc_normal":
            parent = law.std / TRUNCATED_STD
            nn.init.trunc_normal_(parameter, 0, parent, -2 * parent, 2 * parent)
