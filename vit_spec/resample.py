"""Resampling matrices, which interpolate a learned position table to another grid.

Resampling is linear and separable, so one matrix per axis describes it.  Both twins compute, for a table g (H, W, D),

    einsum("hH,wW,HWD->hwD", matrix(H, h, ...), matrix(W, w, ...), g)

with the same matrices, so that their result does not depend on the resize kernels of their frameworks.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


@cache
def matrix(size_in: int, size_out: int, *, kernel: str, antialias: bool, align_corners: bool, offset: float) -> Matrix:
    """Return the resampling matrix of one axis, (size_out, size_in), float64 and read-only; every row sums to one.

    Sources: ATen UpSample.h and its `_upsample_bicubic2d_aa`; Keys, "Cubic convolution interpolation", 1981.

    Args:
        size_in: number of input pixels.
        size_out: number of output pixels.
        kernel: "bilinear" or "bicubic".
        antialias: False is torch without antialiasing: bicubic has a = -0.75, and border pixels are repeated outside the
            image.  True is PIL, and torch with antialias=True: bicubic has a = -0.5; when downsampling, the kernel widens
            by the scale; weights outside the image are dropped and the others renormalized.  If the new grid has one
            column, and another number of rows than the old one, torch 2.13 differs from PIL, and this is PIL.
        align_corners: whether the first and last pixels keep their positions, as in torch.  With "bilinear" this is
            `scipy.ndimage.zoom(order=1, mode="nearest")` to 1e-14, as big_vision and Google's vision_transformer intend.
            They leave zoom's mode at "constant", which is zero outside the image.  Where rounding moves the last coordinate
            one ulp outside (28 -> 14, 32 -> 16; not 14 -> 24), scipy 1.17 returns zeros for the last row and column.  This
            error is not reproduced.
        offset: 0; or 0.1 for DINO and DINOv2, which pass the scale (size_out + 0.1) / size_in to torch, which uses it
            unchanged.  Bicubic without antialiasing then shifts even an axis that keeps its size; the models do not
            resample a grid whose axes both keep their sizes.

    Raises:
        ValueError: unknown kernel; a size below 1; a negative offset; align_corners with antialias or an offset.
    """
    if kernel not in ("bilinear", "bicubic"):
        raise ValueError(f'kernel must be "bilinear" or "bicubic", not {kernel!r}')
    if min(size_in, size_out) < 1 or offset < 0:
        raise ValueError(
            f"cannot resample {size_in} pixels to {size_out} + {offset}: give sizes of at least 1, and no negative offset"
        )
    if align_corners and (antialias or offset):
        raise ValueError("align_corners cannot be combined with antialias or an offset: set them to False and 0")

    if size_in == size_out and (antialias or kernel == "bilinear"):
        offset = 0.0  # torch copies an axis that keeps its size, except for bicubic without antialiasing
    source = _source_coordinates(size_in, size_out, align_corners, offset)[:, None]
    if antialias:
        stretch = max(size_in / (size_out + offset), 1.0)
        weights = _kernel_weights(kernel, (np.arange(size_in) - source) / stretch, a=-0.5)
        result: Matrix = weights / weights.sum(axis=1, keepdims=True)
    else:
        taps = np.floor(source).astype(int) + np.arange(-1, 3)  # (size_out, 4)
        pixels = np.eye(size_in)[taps.clip(0, size_in - 1)]  # (size_out, 4, size_in), one-hot
        result = np.einsum("ot,oti->oi", _kernel_weights(kernel, taps - source, a=-0.75), pixels)
    result.flags.writeable = False  # the cache returns the same array to every caller
    return result


def _source_coordinates(size_in: int, size_out: int, align_corners: bool, offset: float) -> Matrix:
    """Return the input coordinate of each output pixel, (size_out,), in pixels from the center of the first pixel."""
    target = np.arange(size_out, dtype=np.float64)
    if align_corners:
        return target * (size_in - 1) / max(size_out - 1, 1)  # a single output pixel maps to the first input pixel
    return (target + 0.5) * (size_in / (size_out + offset)) - 0.5


def _kernel_weights(kernel: str, distance: Matrix, a: float) -> Matrix:
    """Return the kernel at each distance: a triangle, or Keys' cubic, whose slope at distance 1 is `a`."""
    x: Matrix = np.abs(distance)
    if kernel == "bilinear":
        return np.where(x < 1, 1 - x, 0.0)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * (x**3 - 5 * x**2 + 8 * x - 4)
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
