"""Cutting a part out of an image and bringing it to the size of a model.

Sizes are (height, width) in pixels, boxes (left, top, right, bottom) as Pillow's.  A cut at random and its resizing are one
step: no image is made between them, and where a filter reaches over the edge of the cut it sees the image's own pixels
there.  What is not random is resized first and cut then, as timm and transformers do it, to the last bit.
JPEG's reduced decoding (`Image.draft`) and `reducing_gap` are not used: both change what a filter sees.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from parity.checkpoints.preprocessing import Preprocessing, central
from train.recipes.augmentation import Filter
from vit_spec import InputError

Box = tuple[int, int, int, int]
FILTERS = {name: Image.Resampling[name.upper()] for name in ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")}
ASPECT = (3 / 4, 4 / 3)  # width over height, least and greatest
# From a pixel's edge to its centre, less a bit: no rounding shall take a place at a centre for one before it.
HALF = 0.5 - 2**-20


# Not random -----------------------------------------------------------------------------------------------------------


def prepared(image: Image.Image, how: Preprocessing, mean: Sequence[float] = (0.5,)) -> Image.Image:
    """Prepare an image as a model was trained to see it: resized by Pillow, and cut to `how.size`.

    mean: of the model's input, the colour of a border.

    Raises:
        InputError: an image so long that resizing it would take more memory than Pillow thinks safe.
    """
    height, width = how.resized_to(image.height, image.width)
    if how.filter == "bilinear_aliased":
        return _aliased(image, how, (height, width))
    if width * height > (Image.MAX_IMAGE_PIXELS or math.inf):
        raise InputError(
            f"{image.width}x{image.height} pixels would be resized to {width}x{height}, more than is safe: crop it first"
        )
    resized = image.resize((width, height), FILTERS[how.filter]) if how.resize != "none" else image
    top, left = how.corner(resized.height, resized.width)
    if how.resize == "border":
        colour = tuple(round(255 * value) for value in mean)
        whole = Image.new(image.mode, how.size[::-1], colour[0] if image.mode == "L" else (colour * 3)[:3])
        whole.paste(resized, (-left, -top))
        return whole
    return resized.crop((left, top, left + how.size[1], top + how.size[0]))


def fit(image: Image.Image, size: tuple[int, int], share: float = 1.0, filter: Filter = "bicubic") -> Image.Image:
    """Bring the middle of an image to `size`, by timm's rule: resized to cover size / share, and `size` cut out of it.

    timm's crop_pct is the share; big_vision's resize_small(256)|central_crop(224) is share 224/256 with filter "box".
    Pillow's box takes each pixel wholly or not at all, where TensorFlow's area takes those at its edges in part.
    """
    return prepared(image, central(size, share, filter))


def cut(image: Image.Image, box: Box, size: tuple[int, int], filter: Filter) -> Image.Image:
    """Bring the part of an image inside `box` to `size`."""
    if filter == "bilinear_aliased":
        left, top, right, bottom = box
        return _sampled(image, (left, top), ((right - left) / size[1], (bottom - top) / size[0]), size)
    return image.resize(size[::-1], FILTERS[filter], box=box)


# At random ------------------------------------------------------------------------------------------------------------


def inception_box(width: int, height: int, rng: np.random.Generator, area: tuple[float, float]) -> Box:
    """Draw the crop of TensorFlow's sample_distorted_bounding_box, as big_vision's inception_crop calls it.

    The aspect ratio is uniform in [3/4, 4/3]; then the height is uniform among those that keep the area within `area`
    (shares of the image's) and the width within the image; then the place.  After 100 failures it is the whole image.
    TensorFlow never draws the last place of either corner; here it counts as any other.

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
        h += h * round(h * aspect) < least  # roundings may step over a bound by less than a row
        h -= h * round(h * aspect) > most
        w = round(h * aspect)
        if least <= w * h <= most and 0 < w <= width and 0 < h <= height:
            left, top = int(across * (width - w + 1)), int(down * (height - h + 1))
            return left, top, left + w, top + h
    return 0, 0, width, height


def resized_box(width: int, height: int, rng: np.random.Generator, area: tuple[float, float]) -> Box:
    """Draw the crop of torchvision's RandomResizedCrop.

    Area and the logarithm of the aspect ratio are uniform; after 10 draws that do not fit it is the largest part in the
    middle whose aspect ratio lies within [3/4, 4/3].

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
    """Resize an image to cover `size`, add 4 mirrored pixels on every side, and cut `size` out at random.

    Source: DeiT-III (arXiv 2204.07118), facebookresearch/deit/augment.py.
    """
    (height, width), (across, down) = size, image.size
    covering = max(height, int(width * down / across)), max(width, int(height * across / down))
    pixels = np.asarray(cut(image, (0, 0, *image.size), covering, filter))
    rows, columns = (
        np.pad(np.arange(there), 4, mode="reflect")[start : start + wanted]
        for there, wanted in zip(covering, size, strict=True)
        for start in (int(rng.random() * (there + 8 - wanted + 1)),)
    )
    return Image.fromarray(pixels[rows][:, columns])


# Without smoothing ----------------------------------------------------------------------------------------------------


def _aliased(image: Image.Image, how: Preprocessing, resized: tuple[int, int]) -> Image.Image:
    """Resize and cut in one step, with TensorFlow's resize without antialias."""
    (rows, columns), (height, width) = how.size, resized
    down, across = image.height / height, image.width / width
    corner = (image.width - across * columns) / 2, (image.height - down * rows) / 2
    return _sampled(image, corner, (across, down), how.size)


def _sampled(
    image: Image.Image, corner: tuple[float, float], step: tuple[float, float], size: tuple[int, int]
) -> Image.Image:
    """Read an image at size (height, width) places, `step` (x, y) apart, bilinearly between pixel centres.

    This is TensorFlow's resize without antialias and Pillow's transform (Image.Transform.EXTENT) in half of Pillow's time:
    four images of nearest pixels, pasted over each other.  Weights have 8 bits and both passes round, so a value is off by
    less than 2 of 255.
    """
    (left, top), (across, down) = corner, step

    def neighbour(right: int, below: int) -> Image.Image:
        way_back = (across, 0, left + right - HALF, 0, down, top + below - HALF)
        return image.transform(size[::-1], Image.Transform.AFFINE, way_back, Image.Resampling.NEAREST)

    horizontal = Image.fromarray(np.tile(_weights(left, across, size[1], image.width), (size[0], 1)))
    vertical = Image.fromarray(np.repeat(_weights(top, down, size[0], image.height)[:, None], size[1], 1))
    above, below = neighbour(0, 0), neighbour(0, 1)
    above.paste(neighbour(1, 0), None, horizontal)
    below.paste(neighbour(1, 1), None, horizontal)
    above.paste(below, None, vertical)
    return above


def _weights(start: float, step: float, count: int, there: int) -> NDArray[np.uint8]:
    """Return the weight, of 255, of the later one of the two pixels about each place; at the edges there is only one."""
    place = (np.arange(count) + 0.5) * step + (start - HALF)
    before = np.floor(place)
    weight = np.rint((place - before) * 255)
    weight[before < 0] = 255
    weight[before + 1 >= there] = 0
    return weight.astype(np.uint8)
