"""Images of a run for TensorBoard: a batch as it was shown, and where the network looked."""

import math

import numpy as np
from numpy.typing import NDArray

from train.data.augment import mixed_images
from train.data.batches import Batch

Pixels = NDArray[np.uint8]

MARK = np.array((209, 51, 13))  # the colour of attention
SOME = 16  # images in a picture


def shown(batch: Batch, repeats: int) -> Pixels:
    """The images of a batch as the network learns from them: mixed, where they are.

    Of several processes each mixes its own among themselves, so that the first few have other partners than in the step.
    """
    if batch.mix is None:
        return batch.images
    others = np.roll(batch.images, repeats, axis=0)
    return np.rint(mixed_images(batch.mix, batch.images, others)).astype(np.uint8)


def sheet(images: Pixels) -> Pixels:
    """Lay out images (N, H, W, C) in rows of one picture, (rows * H, columns * W, 3), the last row filled up with white."""
    count, height, width, _ = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    white = np.full((rows * columns, height, width, 3), 255, np.uint8)
    white[:count] = images
    return white.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(rows * height, columns * width, 3)


def marked(images: Pixels, maps: NDArray[np.float32]) -> Pixels:
    """Lay colour over pale images, as strong as the attention: (N, H, W, C), (N, rows, columns) -> (N, H, W, 3)."""
    height, width = images.shape[1:3]
    y, x = (np.arange(side) * cells // side for side, cells in zip((height, width), maps.shape[1:], strict=True))
    strength = (maps / maps.max((1, 2), keepdims=True))[:, y[:, None], x, None]
    pale = 140 + 0.45 * images.mean(-1, keepdims=True)
    return np.rint(pale + 0.85 * strength * (MARK - pale)).astype(np.uint8)
