"""Cutting a part out of an image and bringing it to the size of a model.

Sizes are (height, width) in pixels, boxes (left, top, right, bottom) as Pillow's.  A cut and its resizing are one step:
no image is made between them, and where a filter reaches over the edge of the cut it sees the image's own pixels there.
JPEG's reduced decoding (`Image.draft`) and `reducing_gap` are not used: both change what a filter sees.
"""

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from train.augment.options import Filter

Box = tuple[int, int, int, int]
FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
}
ASPECT = (3 / 4, 4 / 3)  # width over height, least and greatest
# From a pixel's edge to its centre, less a bit: no rounding shall take a place at a centre for one before it.
HALF = 0.5 - 2**-20


# Not random -----------------------------------------------------------------------------------------------------------


def fit(image: Image.Image, size: tuple[int, int], share: float = 1.0, filter: Filter = "bicubic") -> Image.Image:
    """Bring the middle of an image to `size`: the largest part of that shape, its sides times `share`.

    It is what resizing an image to cover size / share and cutting `size` out of the middle gives, but for the roundings
    of the size between and of the cut's corner to whole pixels, which move the picture by a pixel at most.
    timm's crop_pct is the share; big_vision's resize_small(256)|central_crop(224) is share 224/256 with filter "box".
    Pillow's box takes each pixel wholly or not at all, where TensorFlow's area takes those at its edges in part.
    """
    if filter == "bilinear_aliased":
        (height, width), (rows, columns) = size, (image.height, image.width)
        scale = share * min(columns / width, rows / height)
        return _sampled(image, ((columns - scale * width) / 2, (rows - scale * height) / 2), (scale, scale), size)
    return ImageOps.fit(image, size[::-1], FILTERS[filter], bleed=(1 - share) / 2)


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
