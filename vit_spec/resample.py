"""Resampling matrices: how a table of positions learnt on one grid is read on another.

Resampling is linear and separable, so one matrix a side is all of it. A grid g (H, W, D) becomes

    einsum("hH,wW,HWD->hwD", matrix(H, h, ...), matrix(W, w, ...), g)

in both twins, with the same numbers, whatever the resize kernels of their frameworks do.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


@cache
def matrix(size_in: int, size_out: int, *, kernel: str, antialias: bool, align_corners: bool, offset: float) -> Matrix:
    """One side's resampling matrix, (size_out, size_in), float64 and read-only; every row sums to one.

    kernel         "bilinear" or "bicubic"
    antialias      False: torch's plain kernels; bicubic has a = -0.75 and reads the border again beyond it.
                   True: PIL's and torch's antialias=True; a = -0.5, the kernel widens by the scale when it
                   shrinks, and what falls beyond the border is dropped and the rest renormalised.
    align_corners  True: first and last pixel keep their places, as in torch. Bilinear, this is
                   `scipy.ndimage.zoom(order=1, mode="nearest")` to 1e-14, and so what big_vision and Google's
                   vision_transformer mean. They leave zoom's mode at "constant", zero beyond the border, and
                   where rounding puts the last coordinate an ulp outside (28 -> 14, 32 -> 16; not 14 -> 24)
                   scipy 1.17 returns zeros for the last row and column. That fault is not copied.
    offset         0, or 0.1 for DINO and DINOv2, which give torch the scale (size_out + 0.1) / size_in, and
                   torch takes it as it is. Their plain bicubic then moves even a side that keeps its size;
                   the models do not resample a grid that keeps both.

    ATen UpSample.h and its `_upsample_bicubic2d_aa`; Keys, "Cubic convolution interpolation", 1981.

    ValueError: unknown kernel; a size below 1; a negative offset; align_corners with antialias or an offset.
    """
    if kernel not in ("bilinear", "bicubic"):
        raise ValueError(f'kernel must be "bilinear" or "bicubic", not {kernel!r}')
    if min(size_in, size_out) < 1 or offset < 0:
        raise ValueError(f"no {size_in} pixels to {size_out} + {offset}: sizes start at 1, offsets at 0")
    if align_corners and (antialias or offset):
        raise ValueError("align_corners fixes the coordinates: it takes neither antialias nor an offset")

    if size_in == size_out and (antialias or kernel == "bilinear"):
        offset = 0.0  # torch copies a side that keeps its size, whatever the scale, but in plain bicubic
    source = _source(size_in, size_out, align_corners, offset)[:, None]
    if antialias:
        stretch = max(size_in / (size_out + offset), 1.0)
        weights = _weights(kernel, (np.arange(size_in) - source) / stretch, a=-0.5)
        result: Matrix = weights / weights.sum(axis=1, keepdims=True)
    else:
        taps = np.floor(source).astype(int) + np.arange(-1, 3)  # (size_out, 4)
        pixels = np.eye(size_in)[taps.clip(0, size_in - 1)]  # (size_out, 4, size_in), one-hot
        result = np.einsum("ot,oti->oi", _weights(kernel, taps - source, a=-0.75), pixels)
    result.flags.writeable = False  # the cache hands the same array to everyone
    return result


def _source(size_in: int, size_out: int, align_corners: bool, offset: float) -> Matrix:
    """Where each output pixel lies on the input, (size_out,), in pixels from the centre of the first."""
    target = np.arange(size_out, dtype=np.float64)
    if align_corners:
        return target * (size_in - 1) / max(size_out - 1, 1)  # a single output pixel lies on the first
    return (target + 0.5) * (size_in / (size_out + offset)) - 0.5


def _weights(kernel: str, distance: Matrix, a: float) -> Matrix:
    """The kernel at each distance: a triangle, or Keys' cubic, whose slope at distance 1 is `a`."""
    x: Matrix = np.abs(distance)
    if kernel == "bilinear":
        return np.where(x < 1, 1 - x, 0.0)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * (x**3 - 5 * x**2 + 8 * x - 4)
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
