"""Attention maps as a picture: each image beside the attention that the last block gives to its patches."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from parity.checkpoints.atomic_write import atomic_replace
from train.loop.curves import INK
from train.loop.pictures import encode_png, overlay_attention
from vit_spec import InputError, ViTConfig

COLUMNS = 3  # pairs of image and map in a row; more if the picture would otherwise be taller than wide
CELL_SIDE, TITLE_HEIGHT, GAP = 2.6, 0.4, 0.08  # inches: an image and the gap beside it, the text above it, the gap
MAX_SIDE = 6000  # pixels of the picture's longer side

Array = NDArray[np.float32]


def patch_attention(weights: Array, config: ViTConfig) -> Array:
    """Return the attention that the class token gives to each patch, the mean over heads: (B, rows, columns).

    Without a class token, return the mean over the tokens that give attention.  The sum over patches may be below 1,
    because the attention to tokens that are no patches is left out.

    weights: (B, heads, T, T) attention weights; row t has those of token t to all tokens.
    """
    mean = weights.mean(1)
    rows = mean[:, 0] if config.tokens.class_token else mean.mean(1)
    return rows[:, config.num_prefix :].reshape(-1, *config.grid)


def draw_attention_maps(
    path: Path, images: NDArray[np.uint8], maps: Array, titles: list[str], *, force: bool = False
) -> None:
    """Write a PNG that shows each image, and beside it the same image, pale, with its map as a colour over it.

    All images are drawn into one axes, with inches as coordinates: axes for each image would take longer than to draw it.

    images: (B, H, W, C) uint8, as given to the model.    maps: (B, rows, columns).    titles: a text above each image.
    force: replace an existing file.

    Raises:
        InputError: the file exists and `force` is False, or it cannot be written.  An existing file then stays as it is.
    """
    height, width = images.shape[1:3]
    image_height = (CELL_SIDE - GAP) * min(height / width, 3)
    image_width, cell = image_height * width / height, np.array((2 * CELL_SIDE, TITLE_HEIGHT + image_height + GAP / 2))
    columns = min(len(images), max(COLUMNS, round(np.sqrt(len(images) * cell[1] / cell[0]))))
    size = cell * (columns, -(-len(images) // columns))
    figure = Figure(figsize=size.tolist(), facecolor="white")
    FigureCanvasAgg(figure)  # needs no display and no global state of pyplot
    axes = figure.add_axes((0, 0, 1, 1))
    for i, (image, overlay, weights, title) in enumerate(
        zip(images, overlay_attention(images, maps), maps, titles, strict=True)
    ):
        x, y = cell * (i % columns, i // columns) + (GAP / 2, TITLE_HEIGHT)
        for pixels, left, text, points in (
            (image, x, title, 11),
            (overlay, x + CELL_SIDE, f"attention, up to {weights.max():.1%}", 9),
        ):
            rgb = np.broadcast_to(pixels, (height, width, 3))
            axes.imshow(rgb, extent=(left, left + image_width, y + image_height, y), aspect="auto")
            axes.text(left, y - GAP, text, fontsize=points, color=INK)
    axes.set(xlim=(0, size[0]), ylim=(size[1], 0))
    axes.set_axis_off()
    picture = encode_png(figure, dpi=min(150, MAX_SIDE / size.max()))
    try:
        with atomic_replace(path, replace=force) as new:
            new.write_bytes(picture)
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror or error}): correct that, or give another name") from None
