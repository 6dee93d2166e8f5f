"""Normalization of the JAX twin's images."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from vit_spec import Pixels
from vit_spec.errors import require, require_type


def normalize(images: ArrayLike, pixels: Pixels) -> Array:
    """Return (images / 255 - mean) / std, the input of a `ViT`: (..., H, W, C) -> (..., H, W, C).

    Args:
        images: values from 0 to 255, (..., H, W, C), of an integer or floating-point dtype.  The result has
            their dtype, but at least jax's default floating-point dtype.
        pixels: mean and std; `pixels` of the model's config.

    Raises:
        vit_spec.InputError: `images` is a scalar, or `pixels` is not a `Pixels`, or is for another number of channels.
    """
    require_type("pixels are", pixels, Pixels, example="config.pixels")
    require(jnp.ndim(images) > 0, "images are a scalar: give an array of the shape (..., H, W, C)")
    pixels.check(in_channels=jnp.shape(images)[-1])
    dtype = jnp.promote_types(jnp.result_type(images), jnp.result_type(float))
    mean, std = jnp.asarray(pixels.mean, dtype), jnp.asarray(pixels.std, dtype)
    return (jnp.asarray(images, dtype) / 255 - mean) / std
