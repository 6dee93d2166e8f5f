"""Pictures: images of a training batch and attention maps over images, for TensorBoard; and figures of matplotlib."""

import io
import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from train.data.augment import mix_images
from train.data.batches import Batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Pixels = NDArray[np.uint8]

ATTENTION_COLOUR = np.array((209, 51, 13))
MAX_IMAGES = 16  # in a picture


def training_images(batch: Batch, repeats: int) -> Pixels:
    """Return the images of a batch as the model sees them in training: mixed, if `batch.mix` is given.

    With several processes, each mixes its own images among themselves, so the first few have other partners than in the
    training step.

    repeats: `recipe.augment.repeats`, by which partners are rolled.
    """
    if batch.mix is None:
        return batch.images
    others = np.roll(batch.images, repeats, axis=0)
    return np.rint(mix_images(batch.mix, batch.images, others)).astype(np.uint8)


def image_grid(images: Pixels) -> Pixels:
    """Return images (N, H, W, C) as a grid in one picture, (rows * H, columns * W, 3), the last row padded with white."""
    count, height, width, _ = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    white = np.full((rows * columns, height, width, 3), 255, np.uint8)
    white[:count] = images
    return white.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(rows * height, columns * width, 3)


def overlay_attention(images: Pixels, maps: NDArray[np.float32]) -> Pixels:
    """Return images in pale grey with their attention as a colour over them.

    The colour of a pixel is as strong as the attention to its patch, relative to the largest of the image.

    images: (N, H, W, C) uint8.    maps: (N, rows, columns).    Returns (N, H, W, 3) uint8.
    """
    height, width = images.shape[1:3]
    y, x = (np.arange(side) * cells // side for side, cells in zip((height, width), maps.shape[1:], strict=True))
    strength = (maps / maps.max((1, 2), keepdims=True))[:, y[:, None], x, None]
    pale = 140 + 0.45 * images.mean(-1, keepdims=True)
    return np.rint(pale + 0.85 * strength * (ATTENTION_COLOUR - pale)).astype(np.uint8)


def encode_png(figure: "Figure", **options: Any) -> bytes:
    """Return a figure of matplotlib as a PNG.

    Its texts are drawn as they are: names of classes and folders may have dollar signs, between which matplotlib would read
    formulas, and letters that its font lacks.
    """
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)  # it is drawn as a box
        figure.savefig(picture, format="png", **options)
    return picture.getvalue()
