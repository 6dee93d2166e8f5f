"""Where a network looked, as a picture: each image beside the attention of the last block to its patches."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from train.curves import INK
from train.pictures import marked
from vit_spec import ViTConfig

COLUMNS = 3  # pairs beside each other, at most
SIDE = 2.6  # inches of an image

Array = NDArray[np.float32]


def looked_at(weights: Array, config: ViTConfig) -> Array:
    """Return the share of its attention that the class token gives each patch, the mean over heads: (B, rows, columns).

    Without a class token it is what all tokens give on average.  What goes to other tokens is missing in the sum.

    weights: (B, heads, T, T), row t says where token t looks.
    """
    mean = weights.mean(1)
    rows = mean[:, 0] if config.tokens.class_token else mean.mean(1)
    return rows[:, config.num_prefix :].reshape(-1, *config.grid)


def draw(path: Path, images: NDArray[np.uint8], maps: Array, titles: list[str]) -> None:
    """Write a PNG on white: each image, and beside it the map, a colour as strong as the attention, over the pale image.

    images: (B, H, W, C) uint8, as the network saw them.    maps: (B, rows, columns).    titles: what stands above each.
    """
    across = min(COLUMNS, len(images))
    down = math.ceil(len(images) / across)
    height, width = images.shape[1:3]
    tall = SIDE * min(height / width, 3) + 0.45
    figure = Figure(figsize=(2 * SIDE * across, tall * down), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)  # no display, and none of pyplot's global state
    places = figure.subplots(down, 2 * across, squeeze=False).reshape(-1, 2)
    for axes in places.ravel():
        axes.set_axis_off()
    for (left, right), image, under, weights, title in zip(
        places, images, marked(images, maps), maps, titles, strict=False
    ):
        _show(left, image)
        left.set_title(title, loc="left", fontsize=11, color=INK)
        _show(right, under)
        right.set_title(f"attention, up to {weights.max():.1%}", loc="left", fontsize=9, color=INK)
    figure.savefig(path, dpi=150)


def _show(axes: Axes, image: NDArray[Any]) -> None:
    height, width, _ = image.shape
    axes.imshow(np.broadcast_to(image / 255, (height, width, 3)), extent=(0, width, height, 0))
