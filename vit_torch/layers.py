"""Layers and functions of the PyTorch twin.  Unlike model.py, they may differ from `vit_jax/layers.py`.

Weights have the shape (outputs, inputs) with merged heads, as in timm, so that timm can load the `state_dict`.
"""

import operator
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from vit_spec import InputError, ViTConfig
from vit_spec.config import check_config
from vit_spec.errors import require_type
from vit_spec.noise import Site
from vit_torch.execution import Execution
from vit_torch.linear import OPERATIONS, linear
from vit_torch.noise import Noise, signed_threshold

Shape = tuple[int, ...]
ConstantTables = tuple[np.ndarray, ...]


class ViTModule(nn.Module):
    """Base class of the modules that read the config in the forward pass or have intermediates.

    Attributes:
        config: the config of the model.
        execution: the execution options of the model.
        on_intermediate: function of the name and the value of an intermediate, which returns the value to use instead; None
            if intermediates are not recorded.
    """

    on_intermediate: Callable[[str, Tensor], Tensor] | None = None

    def __init__(self, config: ViTConfig, execution: Execution) -> None:
        check_config(config)
        require_type("execution is", execution, Execution)
        super().__init__()
        self.config = config
        self.execution = execution

    def intermediate(self, name: str, value: Tensor) -> Tensor:
        """Record an intermediate under a name; return it, or the value fed to replace it: see `vit_torch.intermediates`."""
        return value if self.on_intermediate is None else self.on_intermediate(name, value)

    def record(self, name: str, value: Tensor) -> None:
        """Record a value that the forward pass does not use further, so that it cannot be replaced."""
        if self.on_intermediate is not None and self.on_intermediate(name, value) is not value:
            raise InputError(f"fed names {name!r}, which no later operation reads: feed an intermediate that is read later")

    def constants(self, make: Callable[..., ConstantTables], grid: tuple[int, int], x: Tensor) -> tuple[Tensor, ...]:
        """Return constant tables of `vit_spec` for this grid, in x's dtype, but at least float32, on x's device.

        Indices are integers.
        """
        return self._constants(make, grid, at_least_float32(x), x.device)

    def _constants(
        self, make: Callable[..., ConstantTables], grid: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        tables = make(self.config, grid)
        tensors = (torch.tensor(table, dtype=dtype if table.dtype.kind == "f" else torch.int64) for table in tables)
        constants = tuple(tensor.to(device, non_blocking=True) for tensor in tensors)
        for table in constants:  # with `dynamic=True`, torch.compile would fail on sizes that are not those of an input
            table._dynamo_static_indices = set(range(table.ndim))  # type: ignore[attr-defined]
        return constants

    # torch.compile must not trace numpy.  The functions that set these attributes, `torch.compiler.assume_constant_result`
    # and `torch._dynamo.mark_static`, import the compiler, which doubles the time to import PyTorch.
    _constants._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Linear(nn.Linear):
    """A linear layer from the trailing axes `inputs` to the axes `outputs`: (..., *inputs) -> (..., *outputs)."""

    def __init__(self, inputs: Shape, outputs: Shape, bias: bool = True) -> None:
        super().__init__(prod(inputs), prod(outputs), bias)
        self.inputs = inputs
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(-len(self.inputs))
        x = linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        return x.unflatten(-1, self.outputs)


class PatchProjection(nn.Conv2d):
    """A linear projection of patches, which do not overlap: (B, C, H, W) -> (B, rows * columns, width)."""

    def __init__(self, config: ViTConfig, execution: Execution, bias: bool) -> None:
        super().__init__(config.in_channels, config.width, config.patch_size, config.patch_size, bias=bias)
        self.dtype = execution.dtype

    def forward(self, images: Tensor) -> Tensor:
        (b, c, height, width), (ph, pw) = images.shape, self.kernel_size
        x = images.to(self.dtype or self.weight.dtype)
        x = x.view(b, c, height // ph, ph, width // pw, pw).permute(0, 2, 4, 1, 3, 5)
        x = x.reshape(b, height // ph * (width // pw), c * ph * pw)
        # A matrix product, not a convolution: it computes the same sum, and convolution settings (TF32) do not apply.
        return linear(x, self.weight.to(x.dtype).flatten(1), None if self.bias is None else self.bias.to(x.dtype))


class Norm(nn.LayerNorm):
    """Layer or RMS normalization of the trailing axes together, in at least float32: (..., *dims) -> (..., *dims)."""

    def __init__(self, config: ViTConfig, dims: Shape) -> None:
        super().__init__(prod(dims), config.norms.eps, bias=config.norms.bias)
        self.dims = dims
        self.kind = config.norms.kind

    def forward(self, x: Tensor) -> Tensor:
        dtype = at_least_float32(x)
        wide, weight = x.flatten(-len(self.dims)).to(dtype), self.weight.to(dtype)
        if self.kind == "rms":
            y = F.rms_norm(wide, self.normalized_shape, weight, self.eps)
        else:
            bias = None if self.bias is None else self.bias.to(dtype)
            y = F.layer_norm(wide, self.normalized_shape, weight, bias, self.eps)
        return y.to(x.dtype).view_as(x)


class LayerScale(nn.Module):
    """A learned factor per channel: (..., width) -> (..., width)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(config.width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma.to(x.dtype)


def activation(x: Tensor, kind: str) -> Tensor:
    """Apply the activation function `kind` of `vit_spec.Mlp`; "swiglu" maps (..., 2, ff) to (..., ff)."""
    match kind:
        case "gelu":
            return F.gelu(x, approximate="none")
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "quick_gelu":
            return x * torch.sigmoid(1.702 * x)
        case "relu":
            return F.relu(x)
        case "silu":
            return F.silu(x)
        case "mish":
            return F.mish(x)
        case "none":
            return x
        case "swiglu":
            gate, value = x.unbind(-2)
            return F.silu(gate) * value
    raise ValueError(f"unknown activation {kind!r}: give one of `vit_spec.Mlp.activation`, or add it to both twins")


def dropout(module: ViTModule, x: Tensor, rate: float, noise: Noise | None, site: Site) -> Tensor:
    """Apply dropout in training: set entries to zero with probability `rate`, and multiply the others by 1 / (1 - rate).

    Args:
        module: the module, in training or evaluation mode.
        x: the entries, (B, ...).
        rate: the probability.
        noise: the random numbers of the module; None: those of PyTorch's generator.
        site: the place of x in the part of the model that `noise` belongs to.
    """
    if noise is None or not rate or not module.training:
        return F.dropout(x, rate, module.training)
    return torch.where(noise.keeps(site, x.shape, signed_threshold(rate)), x / (1 - rate), 0)


def drop_path(module: ViTModule, x: Tensor, rate: Tensor, noise: Noise | None, site: Site) -> Tensor:
    """Apply stochastic depth in training: dropout of whole images of x, (B, T, width)."""
    if not module.training:
        return x
    shape = (x.shape[0], 1, 1)
    if noise is None:
        keep = torch.rand(shape, device=x.device) >= rate
    else:
        keep = noise.keeps(site, shape, noise.drop_path_threshold)
    mask = module.intermediate("drop_path", keep.to(x.dtype))
    return torch.where(mask > 0, x.to(rate.dtype) / (1 - rate), 0).to(x.dtype)


def sample_kept_tokens(x: Tensor, prefix: int, rate: float, noise: Noise | None) -> Tensor:
    """Return the indices (B, kept) of the tokens that patch dropout keeps: the prefix, and a random subset of patches."""
    batch, patches = x.shape[0], x.shape[1] - prefix
    if noise is None:
        order = torch.rand(batch, patches, device=x.device).argsort(dim=1)
    else:
        order = noise.order(Site.PATCHES, (batch, patches))
    kept = order[:, : max(1, int(patches * (1 - rate)))] + prefix
    return torch.cat([torch.arange(prefix, device=x.device).expand(batch, prefix), kept], dim=1)


def run_block(block: nn.Module, x: Tensor, rate: Tensor, tables: tuple[Any, ...], noise: Noise | None) -> Tensor:
    """Apply one block, with the activation checkpointing of `Execution.remat`."""
    assert isinstance(block, ViTModule)
    # Intermediates that are read are stored anyway, and the recomputation would be without those that are fed.
    is_read = block.on_intermediate is not None
    if block.execution.remat == "none" or is_read or not torch.is_grad_enabled():
        return block(x, rate, tables, noise)
    if block.execution.remat == "full":
        return checkpoint(block, x, rate, tables, noise, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, OPERATIONS)
    return checkpoint(block, x, rate, tables, noise, use_reentrant=False, context_fn=contexts)


def at_least_float32(x: Tensor) -> torch.dtype:
    """Return the dtype for sums and exponentials: that of x, but at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def check_images(images: Tensor, config: ViTConfig) -> None:
    """Raise InputError unless `images` is a batch of floating-point images that fits the config."""
    require_type("images are", images, Tensor)
    expected, c = "(batch, channels, height, width)", config.in_channels
    if images.ndim != 4:
        raise InputError(f"images have shape {tuple(images.shape)}: expected {expected}; a single image is images[None]")
    if images.shape[1] != c:
        hint = "; these look channels-last: use images.permute(0, 3, 1, 2)" if images.shape[3] == c else ""
        raise InputError(f"images have shape {tuple(images.shape)}: expected {expected} with {c} channels{hint}")
    if not images.is_floating_point():
        raise InputError(
            f"images are {images.dtype}: expected floating-point numbers; normalize them first, "
            "vit_torch.normalize(images, config.pixels)"
        )


def image_size(images: Tensor) -> tuple[int, int]:
    """Return the (height, width) of images, (B, C, H, W), as numbers, so that torch.compile compiles each size separately.

    Raises:
        InputError: they are symbols of a program that is exported.
    """
    height, width = images.shape[2:]
    if isinstance(height, torch.SymInt) or isinstance(width, torch.SymInt):
        raise InputError(
            f"image size {height} x {width} is symbolic: export at one image size; only the batch may be dynamic"
        )
    return operator.index(height), operator.index(width)
