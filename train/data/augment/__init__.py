"""Bringing images to size, and varying them for training.

Pillow images in and out, but for erasing (pixels) and mixing (parameters only, the device does it).  Every function takes
its random numbers from the generator it is given and leaves its image as it was.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from train.data.augment.affine import vary
from train.data.augment.colour import colour_jitter, three_augment
from train.data.augment.crop import cut, fit, inception_box, prepared, resized_box, simple_crop
from train.data.augment.erase import random_erase
from train.data.augment.mix import Mix, mix, mixed_images, mixed_targets
from train.data.augment.randaugment import randaugment
from train.recipes.augmentation import Augment

__all__ = ["Augment", "Mix", "augmented", "colour_jitter", "cropped", "fit", "mix", "mixed_images", "mixed_targets"]
__all__ += ["prepared", "randaugment", "random_erase", "three_augment", "vary"]


def augmented(
    image: Image.Image,
    options: Augment,
    size: tuple[int, int],
    rng: np.random.Generator,
    mean: Sequence[float] = (0.5,),
    std: Sequence[float] = (0.5,),
) -> NDArray[np.uint8]:
    """Return a training image as the model is shown it this time, (height, width, channels) uint8.

    In order: crop, turn and mirror, RandAugment, three-augment, jitter, erase; each only if `options` ask for it.

    image: grey (L) or colour (RGB).
    mean, std: of the model's input, for the noise that erases.
    """
    image = vary(cropped(image, options, size, rng), options, rng)
    if options.randaugment:
        image = randaugment(image, rng, *options.randaugment)
    if options.three_augment:
        image = three_augment(image, rng)
    if options.jitter:
        image = colour_jitter(image, rng, options.jitter)
    pixels = np.asarray(image).reshape(*size, -1)
    return random_erase(pixels, rng, options.erase, mean, std) if options.erase else pixels


def cropped(image: Image.Image, options: Augment, size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    """Cut what `options.crop` says out of an image, and bring it to `size`, (height, width) in pixels."""
    match options.crop:
        case "fit":
            return fit(image, size, filter=options.filter)
        case "simple":
            return simple_crop(image, size, rng, options.filter)
        case "inception":
            box = inception_box(*image.size, rng, options.crop_area)
        case "resized":
            box = resized_box(*image.size, rng, options.crop_area)
    return cut(image, box, size, options.filter)
