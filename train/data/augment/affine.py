"""Small turns, shifts and changes of scale, for images such as handwriting that must not be cut."""

import math

import numpy as np
from PIL import Image

from train.recipes.augmentation import Augment


def vary(image: Image.Image, options: Augment, rng: np.random.Generator) -> Image.Image:
    """Turn, scale, shift and mirror an image about its centre; what comes in from outside is black.

    Five numbers are drawn whatever the options, so that changing one option leaves the others' draws alone.  A mirror
    alone moves whole pixels; all else is bilinear.
    """
    turn, grow, right, down, side = (2 * x - 1 for x in rng.random(5).tolist())
    mirrored = options.flip and side < 0
    if not options.rotate and not options.shift and options.scale == 1:
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else image
    width, height = image.size
    angle, factor = math.radians(turn * options.rotate), options.scale**grow
    # Pillow wants the way back: an output pixel p shows the source at centre + A (p - centre - shift).
    cos, sin = math.cos(angle) / factor, math.sin(angle) / factor
    flip = -1 if mirrored else 1
    a, b, d, e = flip * cos, flip * -sin, sin, cos
    x, y = width / 2 + right * options.shift * width, height / 2 + down * options.shift * height
    matrix = (a, b, width / 2 - a * x - b * y, d, e, height / 2 - d * x - e * y)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
