"""Augmentations of colour and sharpness: colour jitter, and three-augment of DeiT-III."""

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


def colour_jitter(image: Image.Image, rng: np.random.Generator, strength: float) -> Image.Image:
    """Change brightness, contrast and saturation in random order, each by a factor uniform in [1 - s, 1 + s].

    Source: torchvision's ColorJitter(s, s, s) on Pillow images (torchvision/transforms/transforms.py).
    """
    factors = 1 + strength * rng.uniform(-1, 1, len(ENHANCERS))
    for i in rng.permutation(len(ENHANCERS)).tolist():
        image = ENHANCERS[i](image).enhance(float(factors[i]))
    return image


def three_augment(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Make an image grey, solarize it from 128 on, or blur it by a Gaussian of 0.1 to 2 pixels, with equal probability.

    Source: DeiT-III (arXiv 2204.07118, section 3), facebookresearch/deit/augment.py; its jitter of 0.3 is `colour_jitter`.
    """
    which, radius = rng.random(2).tolist()
    if which < 1 / 3:
        return image.convert("L").convert(image.mode)
    if which < 2 / 3:
        return ImageOps.solarize(image)
    return image.filter(ImageFilter.GaussianBlur(0.1 + 1.9 * radius))
