"""RandAugment (arXiv 1909.13719) with the sixteen operations of big_vision (big_vision/pp/archive/autoaugment.py).

The operations are Pillow's, as in the paper's own code (ImageOps, ImageEnhance, Image.transform by the nearest pixel).
Pixels from outside of the image are grey (128).  Departures from big_vision:

- Contrast blends with the mean of the image.  big_vision uses pixels / 256 instead, which is 196 for any 224x224 image
  (big_vision issue 109).
- Solarize inverts values from 256 - 25.6 M on, as in the paper's code (tensorflow/models, research/autoaugment).
  big_vision's 25.6 M overflows to 0 at M = 10, the value of its recipe, which is the same (big_vision issue 110).
- Posterize keeps at least one bit, Pillow's minimum; big_vision blackens the image if M is below 2.5.
- Translations and the side of the cutout are shares of the image's sides: 100 and 80 of 224 at M = 10.
- Rotations and shears sample at Pillow's positions, at most half a pixel from TensorFlow's.
"""

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageChops, ImageEnhance, ImageOps

Operation = Callable[[Image.Image, float, float, float], Image.Image]
FILL: dict[str, int | tuple[int, int, int]] = {"L": 128, "RGB": (128, 128, 128)}


def randaugment(image: Image.Image, rng: np.random.Generator, count: int = 2, magnitude: float = 10) -> Image.Image:
    """Apply `count` random operations of the sixteen, all at one magnitude (0 to 30).

    image: grey (L) or colour (RGB).
    """
    for _ in range(count):
        which, one, other = rng.random(3).tolist()
        image = _OPERATION_LIST[int(which * len(_OPERATION_LIST))](image, magnitude / 10, one, other)
    return image


def solarize_add(image: Image.Image, addition: int) -> Image.Image:
    """Add to the values below 128, clipped at 255."""
    levels = [min(value + addition, 255) if value < 128 else value for value in range(256)]
    return image.point(levels * len(image.getbands()))


def sharpen(image: Image.Image, factor: float) -> Image.Image:
    """Return `ImageEnhance.Sharpness(image).enhance(factor)` in a third of its time.

    It blends the image with the mean of 3x3 pixels, the middle one counted five times.  A border of one pixel stays as it
    is, and so does an image with a side of less than three pixels.
    """
    pixels = np.asarray(image)
    if min(image.size) < 3:
        return image
    wide = pixels.astype(np.uint16)
    total = wide[:-2] + wide[1:-1] + wide[2:]
    total = total[:, :-2] + total[:, 1:-1] + total[:, 2:]
    total += 4 * wide[1:-1, 1:-1]
    smooth = pixels.copy()
    smooth[1:-1, 1:-1] = (total + 6) // 13
    return Image.blend(Image.fromarray(smooth), image, factor)


def affine_transform(image: Image.Image, *inverse: float) -> Image.Image:
    """Return an image whose pixel (x, y) is the nearest to (a x + b y + c, d x + e y + f) of the given one, or grey.

    inverse: a, b, c, d, e, f.
    """
    return image.transform(image.size, Image.Transform.AFFINE, inverse, fillcolor=FILL[image.mode])


def cutout(image: Image.Image, half: float, x: float, y: float) -> Image.Image:
    """Cover a rectangle with grey.  Its centre (x, y) and half of its sides are shares of the image's sides."""
    (width, height), covered = image.size, image.copy()
    column, row, across, down = int(x * width), int(y * height), int(half * width), int(half * height)
    covered.paste(FILL[image.mode], (column - across, row - down, column + across, row + down))
    return covered


def random_sign(value: float, draw: float) -> float:
    """Return the value for draws below 0.5, and its negative for others."""
    return value if draw < 0.5 else -value


# Each takes an image, a tenth of the magnitude, and two random numbers from [0, 1).
OPERATIONS: dict[str, Operation] = {
    "AutoContrast": lambda image, m, u, v: ImageOps.autocontrast(image),
    "Equalize": lambda image, m, u, v: ImageOps.equalize(image),
    "Invert": lambda image, m, u, v: ImageChops.invert(image),
    "Rotate": lambda image, m, u, v: image.rotate(random_sign(30 * m, u), fillcolor=FILL[image.mode]),
    "Posterize": lambda image, m, u, v: ImageOps.posterize(image, min(max(int(4 * m), 1), 8)),
    "Solarize": lambda image, m, u, v: ImageOps.solarize(image, 256 - int(256 * m)),
    "SolarizeAdd": lambda image, m, u, v: solarize_add(image, int(110 * m)),
    "Color": lambda image, m, u, v: ImageEnhance.Color(image).enhance(1.8 * m + 0.1),
    "Contrast": lambda image, m, u, v: ImageEnhance.Contrast(image).enhance(1.8 * m + 0.1),
    "Brightness": lambda image, m, u, v: ImageEnhance.Brightness(image).enhance(1.8 * m + 0.1),
    "Sharpness": lambda image, m, u, v: sharpen(image, 1.8 * m + 0.1),
    "ShearX": lambda image, m, u, v: affine_transform(image, 1, random_sign(0.3 * m, u), 0, 0, 1, 0),
    "ShearY": lambda image, m, u, v: affine_transform(image, 1, 0, 0, random_sign(0.3 * m, u), 1, 0),
    "TranslateX": lambda image, m, u, v: affine_transform(
        image, 1, 0, random_sign(100 / 224 * m * image.width, u), 0, 1, 0
    ),
    "TranslateY": lambda image, m, u, v: affine_transform(
        image, 1, 0, 0, 0, 1, random_sign(100 / 224 * m * image.height, u)
    ),
    "Cutout": lambda image, m, u, v: cutout(image, 40 / 224 * m, u, v),
}
_OPERATION_LIST = tuple(OPERATIONS.values())
