"""A folder that reports an evaluation: scores, predictions, the confusion matrix, and the worst mistakes as a picture."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from parity.checkpoints.atomic_write import atomic_replace
from train.inference.head import shorten_name
from train.inference.scores import Array, Scores
from train.loop.class_names import SINGULAR
from train.loop.curves import INK
from train.loop.pictures import encode_png
from train.recipes import Task
from vit_spec import InputError
from vit_spec.printable import escape_surrogates

MISTAKE_COLUMNS = 6
CELL_SIDE, TITLE_HEIGHT, GAP = 1.9, 0.42, 0.1  # inches: an image and the gap beside it, the text above it, the gap
MAX_NAMED = 40  # classes whose names stand beside the confusion matrix
MAX_COUNTED = 20  # classes up to which the numbers stand in it


def prepare_folder(folder: Path, *, force: bool) -> None:
    """Create the folder of a report.

    Raises:
        InputError: it holds files and `force` is False, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not force:
            raise InputError(f"--out {folder} is not empty: give another folder, or --force to replace files of a report")
    except OSError as error:
        raise InputError(f"--out {folder} cannot be made ({error.strerror}): give another folder") from None


class Report:
    """Writes the files of a report into a folder, each of them whole or not at all.

    folder: as `prepare_folder` left it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write_result(self, result: dict[str, Any]) -> None:
        """Write scores.json, the result that `--json` prints."""
        self._write("scores.json", json.dumps(result, indent=1).encode() + b"\n")

    def write_each(self, task: Task, scores: Scores, images: dict[str, int]) -> None:
        """Write classes.csv, labels.csv or values.csv: the metrics of each, with the ends of their intervals.

        images: what `train.inference.head.images_of_each` returns.
        """
        metrics = list(next(iter(scores.each.values())))
        header = [SINGULAR[task], *["images"] * bool(images)]
        header += [f"{metric}{end}" for metric in metrics for end in ("", "_low", "_high")]
        counts = {name: [images[name]] if images else [] for name in scores.each}
        numbers = {name: [x for metric in metrics for x in each[metric]] for name, each in scores.each.items()}
        rows = ([name, *counts[name], *numbers[name]] for name in scores.each)
        self._write_table(f"{task}.csv", header, rows)

    def write_predictions(self, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Write predictions.csv, a row for each image."""
        self._write_table("predictions.csv", header, rows)

    def write_confusion(self, matrix: Array, names: Sequence[str]) -> None:
        """Write confusion.csv and confusion.png.

        matrix: (C, C), the number of images by class and predicted class.    names: (C,).
        """
        rows = ([name, *row] for name, row in zip(names, matrix.tolist(), strict=True))
        self._write_table("confusion.csv", ["class \\ predicted", *names], rows)
        self._draw("confusion.png", draw_confusion(matrix, names))

    def write_mistakes(self, images: NDArray[np.uint8], titles: Sequence[str]) -> None:
        """Write mistakes.png.  images: (N, H, W, C), as the model sees them.    titles: (N,), two lines each."""
        self._draw("mistakes.png", draw_images(images, titles))

    def _write_table(self, name: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")  # names of classes may equal those of other columns
        table.writerow(header)
        table.writerows(["" if isinstance(x, float) and np.isnan(x) else x for x in row] for row in rows)
        self._write(name, escape_surrogates(text.getvalue()).encode())

    def _draw(self, name: str, figure: Figure) -> None:
        self._write(name, encode_png(figure, bbox_inches="tight", pad_inches=0.1))

    def _write(self, name: str, content: bytes) -> None:
        path = self._folder / name
        try:
            with atomic_replace(path, replace=True) as new:
                new.write_bytes(content)
        except OSError as error:
            raise InputError(
                f"cannot write {path} ({error.strerror or error}): correct that, or give another --out"
            ) from None


def draw_confusion(matrix: Array, names: Sequence[str]) -> Figure:
    """Return a picture of a confusion matrix, with each row's shares as colour and, of few classes, the counts.

    matrix: (classes, classes) the number of images by class and predicted class.
    """
    count, shown = len(names), [shorten_name(name) for name in names]
    side = min(12.0, 3.0 + 0.32 * count)
    figure = Figure(figsize=(side + 1, side), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)  # needs no display and no global state of pyplot
    axes = figure.add_subplot()
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted", ylabel="class")
    if count <= MAX_NAMED:
        axes.set_xticks(range(count), shown, rotation=90, fontsize=8)
        axes.set_yticks(range(count), shown, fontsize=8)
    if count <= MAX_COUNTED:
        for (row, column), images in np.ndenumerate(matrix):
            if images:
                colour = "white" if shares[row, column] > 0.5 else INK
                axes.text(column, row, f"{images:,}", ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(picture, label="share of the images of a class", shrink=0.8)
    return figure


def draw_images(images: NDArray[np.uint8], titles: Sequence[str]) -> Figure:
    """Return a picture of images (N, H, W, C) in rows, each with a title of two lines above it."""
    height, width = images.shape[1:3]
    image_height = (CELL_SIDE - GAP) * min(height / width, 3)
    image_width, cell = image_height * width / height, np.array((CELL_SIDE, TITLE_HEIGHT + image_height + GAP))
    columns = min(len(images), MISTAKE_COLUMNS)
    size = cell * (columns, -(-len(images) // columns))
    figure = Figure(figsize=size.tolist(), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    for i, (image, title) in enumerate(zip(images, titles, strict=True)):
        x, y = cell * (i % columns, i // columns) + (GAP / 2, TITLE_HEIGHT)
        rgb = np.broadcast_to(image, (height, width, 3))
        axes.imshow(rgb, extent=(x, x + image_width, y + image_height, y), aspect="auto")
        axes.text(x, y - GAP / 2, title, fontsize=7.5, color=INK, linespacing=1.3)
    axes.set(xlim=(0, size[0]), ylim=(size[1], 0))
    axes.set_axis_off()
    return figure
