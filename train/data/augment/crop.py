"""Crops and resizing of images to the size of a model.

Sizes are (height, width) in pixels; boxes are (left, top, right, bottom), as in Pillow.  A random crop and its resizing are
one step without an image in between, so a filter that reaches over the edge of the crop reads the image's own pixels there.
Deterministic preprocessing resizes first and then crops, bitwise as timm and transformers do.  JPEG's reduced decoding
(`Image.draft`) and `reducing_gap` are not used, because both change the pixels that a filter reads.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from parity.checkpoints.preprocessing import Preprocessing, center_crop
from train.recipes.augmentation import Filter
from vit_spec import InputError

Box = tuple[int, int, int, int]
FILTERS = {name: Image.Resampling[name.upper()] for name in ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")}
ASPECT = (3 / 4, 4 / 3)  # smallest and largest width / height
# The distance of a pixel's edge to its centre, minus a little: rounding must not move a centre to the pixel before it.
HALF_PIXEL = 0.5 - 2**-20


# Deterministic --------------------------------------------------------------------------------------------------------


def preprocess(image: Image.Image, preprocessing: Preprocessing, mean: Sequence[float] = (0.5,)) -> Image.Image:
    """Resize an image with Pillow and crop or pad it to `preprocessing.size`.

    mean: mean of the model's input, the colour of padding.

    Raises:
        InputError: an image so long that the resized image would have more pixels than Pillow considers safe.
    """
    height, width = preprocessing.resized_to(image.height, image.width)
    if preprocessing.filter == "bilinear_aliased":
        return _preprocess_aliased(image, preprocessing, (height, width))
    _check_resized(image, (height, width))
    resized = image.resize((width, height), FILTERS[preprocessing.filter]) if preprocessing.resize != "none" else image
    top, left = preprocessing.crop_corner(resized.height, resized.width)
    if preprocessing.resize == "border":
        colour = tuple(round(255 * value) for value in mean)
        padded = Image.new(image.mode, preprocessing.size[::-1], colour[0] if image.mode == "L" else (colour * 3)[:3])
        padded.paste(resized, (-left, -top))
        return padded
    return resized.crop((left, top, left + preprocessing.size[1], top + preprocessing.size[0]))


def _check_resized(image: Image.Image, size: tuple[int, int]) -> None:
    """Raise InputError if an image of `size` (height, width), to which `image` is resized, would have too many pixels."""
    height, width = size
    if width * height > (Image.MAX_IMAGE_PIXELS or math.inf):
        raise InputError(
            f"{image.height}x{image.width} pixels would be resized to {height}x{width} (height x width), "
            "more than is safe: crop it first"
        )


def resize_and_center_crop(
    image: Image.Image, size: tuple[int, int], share: float = 1.0, filter: Filter = "bicubic"
) -> Image.Image:
    """Resize an image to cover size / share and crop `size` out of its centre, by timm's rule.

    share: timm's crop_pct.  big_vision's resize_small(256)|central_crop(224) is share 224/256 with filter "box"; Pillow's
        box filter counts each pixel fully or not at all, where TensorFlow's area method counts pixels at its edges in part.
    """
    return preprocess(image, center_crop(size, share, filter))


def crop_and_resize(image: Image.Image, box: Box, size: tuple[int, int], filter: Filter) -> Image.Image:
    """Crop `box` out of an image and resize it to `size`."""
    if filter == "bilinear_aliased":
        left, top, right, bottom = box
        return _bilinear_sample(image, (left, top), ((right - left) / size[1], (bottom - top) / size[0]), size)
    return image.resize(size[::-1], FILTERS[filter], box=box)


# Random ---------------------------------------------------------------------------------------------------------------


def inception_box(width: int, height: int, rng: np.random.Generator, area: tuple[float, float]) -> Box:
    """Draw the crop of TensorFlow's sample_distorted_bounding_box, as big_vision's inception_crop calls it.

    The aspect ratio is uniform in [3/4, 4/3].  Then the height is uniform among those with an area within `area` (shares of
    the image's) and a width within the image.  Then the position is uniform.  TensorFlow never draws the last position;
    here it is as likely as any other.  After 100 failures the box is the whole image.

    Source: tensorflow/core/kernels/image/sample_distorted_bounding_box_op.cc.
    """
    least, most = (share * width * height for share in area)
    for _ in range(100):
        shape, grow, across, down = rng.random(4).tolist()
        aspect = ASPECT[0] + shape * (ASPECT[1] - ASPECT[0])
        high = min(round(math.sqrt(most / aspect)), height)
        if round(high * aspect) > width:
            high = int((width + 0.5) / aspect)
        low = min(round(math.sqrt(least / aspect)), high)
        h = low + int(grow * (high - low + 1))
        h += h * round(h * aspect) < least  # rounding may exceed a bound by less than a row
        h -= h * round(h * aspect) > most
        w = round(h * aspect)
        if least <= w * h <= most and 0 < w <= width and 0 < h <= height:
            left, top = int(across * (width - w + 1)), int(down * (height - h + 1))
            return left, top, left + w, top + h
    return 0, 0, width, height


def resized_box(width: int, height: int, rng: np.random.Generator, area: tuple[float, float]) -> Box:
    """Draw the crop of torchvision's RandomResizedCrop.

    The area and the logarithm of the aspect ratio are uniform.  After 10 draws that do not fit, the crop is the largest
    central box with an aspect ratio within [3/4, 4/3].

    Source: torchvision/transforms/transforms.py.
    """
    for _ in range(10):
        share, shape, across, down = rng.random(4).tolist()
        target = (area[0] + share * (area[1] - area[0])) * width * height
        aspect = ASPECT[0] * (ASPECT[1] / ASPECT[0]) ** shape
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(across * (width - w + 1)), int(down * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * ASPECT[1])), min(height, round(width / ASPECT[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def simple_crop(image: Image.Image, size: tuple[int, int], rng: np.random.Generator, filter: Filter) -> Image.Image:
    """Resize an image to cover `size`, pad it by 4 reflected pixels on every side, and crop `size` at a random position.

    Source: DeiT-III (arXiv 2204.07118), facebookresearch/deit/augment.py.

    Raises:
        InputError: as `preprocess`.
    """
    (height, width), (across, down) = size, image.size
    covering = max(height, int(width * down / across)), max(width, int(height * across / down))
    _check_resized(image, covering)
    pixels = np.asarray(crop_and_resize(image, (0, 0, *image.size), covering, filter))
    rows, columns = (
        np.pad(np.arange(length), 4, mode="reflect")[start : start + cropped]
        for length, cropped in zip(covering, size, strict=True)
        for start in (int(rng.random() * (length + 8 - cropped + 1)),)
    )
    return Image.fromarray(pixels[rows][:, columns])


# Without antialiasing ------------------------------------------------------------------------------------------------


def _preprocess_aliased(image: Image.Image, preprocessing: Preprocessing, resized: tuple[int, int]) -> Image.Image:
    """Resize and crop in one step, with TensorFlow's resize without antialiasing."""
    (rows, columns), (height, width) = preprocessing.size, resized
    down, across = image.height / height, image.width / width
    corner = (image.width - across * columns) / 2, (image.height - down * rows) / 2
    return _bilinear_sample(image, corner, (across, down), preprocessing.size)


def _bilinear_sample(
    image: Image.Image, corner: tuple[float, float], step: tuple[float, float], size: tuple[int, int]
) -> Image.Image:
    """Sample an image bilinearly at a grid of `size` (height, width) points that are `step` (x, y) apart.

    This equals TensorFlow's resize without antialiasing and Pillow's transform (Image.Transform.EXTENT), in half of
    Pillow's time: four images of nearest pixels are pasted over each other.  Weights have 8 bits and both passes round, so
    a value is off by less than 2 of 255.

    corner: (x, y) of the grid's upper left corner, half a step before its first point.
    """
    (left, top), (across, down) = corner, step

    def neighbour(right: int, below: int) -> Image.Image:
        inverse = (across, 0, left + right - HALF_PIXEL, 0, down, top + below - HALF_PIXEL)
        return image.transform(size[::-1], Image.Transform.AFFINE, inverse, Image.Resampling.NEAREST)

    horizontal = Image.fromarray(np.tile(_bilinear_weights(left, across, size[1], image.width), (size[0], 1)))
    vertical = Image.fromarray(np.repeat(_bilinear_weights(top, down, size[0], image.height)[:, None], size[1], 1))
    above, below = neighbour(0, 0), neighbour(0, 1)
    above.paste(neighbour(1, 0), None, horizontal)
    below.paste(neighbour(1, 1), None, horizontal)
    above.paste(below, None, vertical)
    return above


def _bilinear_weights(start: float, step: float, count: int, length: int) -> NDArray[np.uint8]:
    """Return the weight, 0 to 255, of the second of the two pixels around each of `count` points along a side.

    Points outside of the centres of the first and last of `length` pixels have one pixel only.
    """
    position = (np.arange(count) + 0.5) * step + (start - HALF_PIXEL)
    before = np.floor(position)
    weight = np.rint((position - before) * 255)
    weight[before < 0] = 255
    weight[before + 1 >= length] = 0
    return weight.astype(np.uint8)
