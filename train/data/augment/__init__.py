"""Preprocessing and augmentation of images.

Functions take and return Pillow images.  Random erasing takes pixel arrays.  Of mixup and CutMix only the parameters are
drawn here; the devices mix.  Every function draws from the generator that it is given, and does not modify its image.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from train.data.augment.affine import random_affine
from train.data.augment.colour import colour_jitter, three_augment
from train.data.augment.crop import (
    crop_and_resize,
    inception_box,
    preprocess,
    resize_and_center_crop,
    resized_box,
    simple_crop,
)
from train.data.augment.erase import random_erase
from train.data.augment.mix import Mix, mix_images, mix_targets, sample_mix
from train.data.augment.randaugment import randaugment
from train.recipes.augmentation import Augment

__all__ = ["Augment", "Mix", "augment_image", "colour_jitter", "crop_image", "mix_images", "mix_targets"]
__all__ += [
    "preprocess",
    "randaugment",
    "random_affine",
    "random_erase",
    "resize_and_center_crop",
    "sample_mix",
    "three_augment",
]


def augment_image(
    image: Image.Image,
    options: Augment,
    size: tuple[int, int],
    rng: np.random.Generator,
    mean: Sequence[float] = (0.5,),
    std: Sequence[float] = (0.5,),
) -> NDArray[np.uint8]:
    """Return an augmented training image, (height, width, channels) uint8.

    The steps are: crop, affine transform and flip, RandAugment, three-augment, colour jitter, random erasing; each only if
    `options` enable it.

    image: grey (L) or colour (RGB).
    size: (height, width) in pixels.
    mean, std: mean and std of the model's input, for the noise of random erasing.
    """
    image = random_affine(crop_image(image, options, size, rng), options, rng)
    if options.randaugment:
        image = randaugment(image, rng, *options.randaugment)
    if options.three_augment:
        image = three_augment(image, rng)
    if options.jitter:
        image = colour_jitter(image, rng, options.jitter)
    pixels = np.asarray(image).reshape(*size, -1)
    return random_erase(pixels, rng, options.erase, mean, std) if options.erase else pixels


def crop_image(image: Image.Image, options: Augment, size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    """Crop an image as `options.crop` says and resize the crop to `size`, (height, width) in pixels."""
    match options.crop:
        case "fit":
            return resize_and_center_crop(image, size, filter=options.filter)
        case "simple":
            return simple_crop(image, size, rng, options.filter)
        case "inception":
            box = inception_box(*image.size, rng, options.crop_area)
        case "resized":
            box = resized_box(*image.size, rng, options.crop_area)
    return crop_and_resize(image, box, size, options.filter)
