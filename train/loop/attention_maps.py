"""Where a network looked, as a picture: each image beside the attention of the last block to its patches."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from train.loop.curves import INK
from train.loop.pictures import marked
from vit_spec import ViTConfig

COLUMNS = 3  # pairs beside each other, unless there are so many that the picture would be taller than wide
SIDE, TITLE, GAP = 2.6, 0.4, 0.08  # inches: an image with the gap beside it, what stands above it, the gap
LARGEST = 6000  # pixels of the picture's longer side

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

    All are in one axes, in inches: axes of their own would each take longer than what they show.

    images: (B, H, W, C) uint8, as the network saw them.    maps: (B, rows, columns).    titles: what stands above each.
    """
    height, width = images.shape[1:3]
    tall = (SIDE - GAP) * min(height / width, 3)
    wide, step = tall * width / height, np.array((2 * SIDE, TITLE + tall + GAP / 2))
    across = min(len(images), max(COLUMNS, round(np.sqrt(len(images) * step[1] / step[0]))))
    size = step * (across, -(-len(images) // across))
    figure = Figure(figsize=size.tolist(), facecolor="white")
    FigureCanvasAgg(figure)  # no display, and none of pyplot's global state
    axes = figure.add_axes((0, 0, 1, 1))
    for i, (image, under, weights, title) in enumerate(zip(images, marked(images, maps), maps, titles, strict=True)):
        x, y = step * (i % across, i // across) + (GAP / 2, TITLE)
        for pixels, left, text, points in (
            (image, x, title, 11),
            (under, x + SIDE, f"attention, up to {weights.max():.1%}", 9),
        ):
            shown = np.broadcast_to(pixels, (height, width, 3))
            axes.imshow(shown, extent=(left, left + wide, y + tall, y), aspect="auto")
            axes.text(left, y - GAP, text, fontsize=points, color=INK)
    axes.set(xlim=(0, size[0]), ylim=(size[1], 0))
    axes.set_axis_off()
    figure.savefig(path, dpi=min(150, LARGEST / size.max()))
