"""Bringing images to size, and varying them for training: Pillow images in, Pillow images out."""

import math

import numpy as np
from PIL import Image, ImageOps

from train.recipes import Augment


def fit(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize (bicubic, antialiased) to cover `size`, (height, width) in pixels, and cut the overhang off evenly."""
    height, width = size
    return ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)


def vary(image: Image.Image, options: Augment, rng: np.random.Generator) -> Image.Image:
    """Turn, scale, shift and mirror an image about its centre; what comes in from outside is black.

    Five numbers are drawn whatever the options, so that changing one option leaves the others' draws alone.
    """
    turn, grow, right, down, side = rng.uniform(-1, 1, 5)
    width, height = image.size
    angle, factor = math.radians(turn * options.rotate), options.scale**grow
    # Pillow wants the way back: an output pixel p shows the source at centre + A (p - centre - shift).
    cos, sin = math.cos(angle) / factor, math.sin(angle) / factor
    flip = -1 if options.flip and side < 0 else 1
    a, b, d, e = flip * cos, flip * -sin, sin, cos
    x, y = width / 2 + right * options.shift * width, height / 2 + down * options.shift * height
    matrix = (a, b, width / 2 - a * x - b * y, d, e, height / 2 - d * x - e * y)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
