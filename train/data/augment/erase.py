"""Random erasing (arXiv 1708.04896) with noise per pixel, as in timm and DeiT."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

AREA = (0.02, 1 / 3)  # share of the image
ASPECT = (0.3, 1 / 0.3)  # height over width


def random_erase(
    pixels: NDArray[np.uint8],
    rng: np.random.Generator,
    probability: float,
    mean: Sequence[float] = (0.5,),
    std: Sequence[float] = (0.5,),
) -> NDArray[np.uint8]:
    """Overwrite a rectangle of an image (H, W, C) with noise, with some probability; otherwise return the image itself.

    The share of the area is uniform in [0.02, 1/3], and the logarithm of the aspect ratio is uniform with the ratio in
    [0.3, 1 / 0.3].  After ten draws that do not fit, the image is returned unchanged.  The noise is standard normal in the
    model's input, (x / 255 - mean) / std, converted back to 8 bits.  timm (timm/data/random_erasing.py, mode "pixel")
    erases normalized images, without limits; here the noise is rounded and clipped to 0 and 255.
    """
    if rng.random() >= probability:
        return pixels
    height, width, channels = pixels.shape
    for _ in range(10):
        share, shape, down, across = rng.random(4).tolist()
        area = (AREA[0] + share * (AREA[1] - AREA[0])) * height * width
        aspect = ASPECT[0] * (ASPECT[1] / ASPECT[0]) ** shape
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if h < height and w < width:
            top, left = int(down * (height - h + 1)), int(across * (width - w + 1))
            noise = rng.standard_normal((h, w, channels), np.float32) * np.array(std) + np.array(mean)
            erased = pixels.copy()
            erased[top : top + h, left : left + w] = np.clip(np.rint(noise * 255), 0, 255)
            return erased
    return pixels
