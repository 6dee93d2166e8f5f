"""Normalization of the PyTorch twin's images."""

import torch
from torch import Tensor

from vit_spec import InputError, Pixels
from vit_spec.errors import require_type


def normalize(images: Tensor, pixels: Pixels, *, channel_dim: int = -3) -> Tensor:
    """Return (images / 255 - mean) / std, the input of a `ViT`: (..., C, H, W) -> (..., C, H, W).

    Args:
        images: values from 0 to 255, (..., C, H, W), of an integer or floating-point dtype.  The result has
            their dtype, but at least PyTorch's default dtype.
        pixels: mean and std; `pixels` of the model's config.
        channel_dim: the dimension of the channels, in the images and in the result; -1 for (..., H, W, C).

    Raises:
        vit_spec.InputError: `images` is not a tensor or lacks the dimension of the channels, or `pixels` is not a `Pixels`
            or for another number of channels.
    """
    require_type("images are", images, Tensor)
    require_type("pixels are", pixels, Pixels, example="config.pixels")
    if not -images.ndim <= channel_dim < images.ndim:
        shape = tuple(images.shape)
        raise InputError(
            f"images have the shape {shape}, without the dimension channel_dim={channel_dim}: give another one"
        )
    pixels.check(in_channels=images.shape[channel_dim])
    x = images.to(torch.promote_types(images.dtype, torch.get_default_dtype())).movedim(channel_dim, -1)
    # Each value is filled in on the device: to copy them there would wait for the device, in every training step.
    mean, std = (
        torch.stack([torch.full((), value, dtype=x.dtype, device=x.device) for value in values])
        for values in (pixels.mean, pixels.std)
    )
    return ((x / 255 - mean) / std).movedim(-1, channel_dim)
