"""Small rotations, shifts and changes of scale, for images such as handwriting that must not be cropped."""

import math

import numpy as np
from PIL import Image

from train.recipes.augmentation import Augment


def random_affine(image: Image.Image, options: Augment, rng: np.random.Generator) -> Image.Image:
    """Rotate, scale, shift and flip an image about its centre; pixels from outside of it are black.

    Five numbers are drawn whatever the options are, so a change of one option does not change the draws of the others.  A
    flip alone is exact; everything else is bilinear.
    """
    rotation, log_scale, right, down, side = (2 * x - 1 for x in rng.random(5).tolist())
    flipped = options.flip and side < 0
    if not options.rotate and not options.shift and options.scale == 1:
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flipped else image
    width, height = image.size
    angle, factor = math.radians(rotation * options.rotate), options.scale**log_scale
    # Pillow takes the inverse map: an output pixel p shows the source at centre + A (p - centre - shift).
    cos, sin = math.cos(angle) / factor, math.sin(angle) / factor
    flip = -1 if flipped else 1
    a, b, d, e = flip * cos, flip * -sin, sin, cos
    x, y = width / 2 + right * options.shift * width, height / 2 + down * options.shift * height
    matrix = (a, b, width / 2 - a * x - b * y, d, e, height / 2 - d * x - e * y)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
