"""The image files that a command line names, and the views of an image whose predictions are averaged."""

import glob
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from parity.checkpoints.preprocessing import Preprocessing
from parity.checkpoints.reading import resolve_path
from train.data.augment.crop import preprocess
from train.data.batches import DataLoader
from train.data.sources import Examples, read_image
from train.data.sources.decoding import SUFFIXES
from train.data.sources.files import walk_files
from train.inference.arguments import NUM_VIEWS, Views
from train.inference.line_files import read_lines
from train.inference.model import TrainedModel
from vit_spec import InputError

MAX_LIST_BYTES = 1 << 28
FIVE_CROP_SHARE = 0.875  # of a side that a crop has, if the preprocessing leaves no margin: 224 of 256 pixels


def find_images(arguments: Sequence[str]) -> list[Path]:
    """Return the images that a command line names, in its order; those of a folder or pattern sorted by name.

    A folder stands for all images below it, a pattern such as 'photos/**/*.jpg' for those that match, and @FILE for the
    lines of a text file.

    Raises:
        InputError: a file is missing, or a folder, pattern or list has no images.
    """
    paths: list[Path] = []
    for argument in arguments:
        if argument.startswith("@"):
            paths += (resolve_path(line) for line in _read_list(Path(argument[1:])))
        elif os.path.isdir(argument):
            if not (found := [Path(argument, name) for name in walk_files(argument, SUFFIXES)]):
                raise InputError(f"{argument} has no images ({', '.join(SUFFIXES)}): give another folder")
            paths += found
        elif glob.has_magic(argument) and not os.path.lexists(argument):
            matches = sorted(path for path in map(Path, glob.glob(argument, recursive=True)) if path.is_file())
            if not matches:
                raise InputError(f"no file matches {argument}: check the pattern")
            paths += matches
        else:
            paths.append(resolve_path(argument))
    return paths


def _read_list(path: Path) -> list[str]:
    try:
        lines = read_lines(path, max_bytes=MAX_LIST_BYTES)
    except (OSError, ValueError) as error:  # ValueError: not UTF-8
        raise InputError(f"@{path} cannot be read ({error}): give a text file with one image per line") from None
    if not (found := [line for line in lines if line]):
        raise InputError(f"@{path} names no images: write one per line")
    return found


def load_views(
    paths: Sequence[Path], model: TrainedModel, views: Views, batch_size: int, errors: dict[int, str]
) -> DataLoader:
    """Return a loader of the views of images, those of one image after each other.

    none: the preprocessing of the model.    flip: the same, and mirrored.    five-crop: the crops at the centre and at the
    four corners (Krizhevsky et al., 2012, section 4.1), of an image resized to a margin of an eighth if the preprocessing
    leaves none.

    errors: the messages about images that cannot be read are written here, by the index of the image.
    """
    config, preprocessing, count = model.input_config, model.preprocessing, NUM_VIEWS[views]
    mode, size = "L" if config.in_channels == 1 else "RGB", model.preprocessing.size
    blank = Image.new(mode, size[::-1])

    @lru_cache(maxsize=4)  # the views of an image follow each other
    def decode(n: int) -> Image.Image | None:
        try:
            image = read_image(paths[n])
            return image if image.mode == mode else image.convert(mode)
        except InputError as error:
            errors[n] = str(error)
            return None

    def read(row: int) -> Image.Image:
        if (image := decode(row // count)) is None:
            return blank
        try:
            return view(image, preprocessing, views, row % count, config.pixels.mean)
        except InputError as error:  # a shape that cannot be resized
            errors[row // count] = f"{paths[row // count]}: {error}"
            return blank

    no_targets = np.zeros(len(paths) * count, np.int64)
    names = [str(path) for path in paths for _ in range(count)]
    examples, whole = Examples(read, no_targets, names), Preprocessing(size=size, resize="none", resized=size)
    rows = count * min(batch_size, len(paths))
    return DataLoader(examples, no_targets.astype(np.int32), config, rows, preprocessing=whole)


def view(image: Image.Image, preprocessing: Preprocessing, views: Views, number: int, mean: Sequence[float]) -> Image.Image:
    """Return a view of an image; see `load_views`."""
    if views == "flip":
        found = preprocess(image, preprocessing, mean)
        return found.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if number else found
    if views == "none":
        return preprocess(image, preprocessing, mean)
    if all(whole <= part for whole, part in zip(preprocessing.resized, preprocessing.size, strict=True)):
        height, width = (round(side / FIVE_CROP_SHARE) for side in preprocessing.size)
        preprocessing = replace(preprocessing, resize="cover", resized=(height, width))
    if number == 0:
        return preprocess(image, preprocessing, mean)
    resized = preprocessing.resized_to(image.height, image.width)
    # The whole resized image: a crop of its own size
    resized_image = preprocess(image, replace(preprocessing, size=resized), mean)
    height, width = preprocessing.size
    top, left = (resized[0] - height) * ((number - 1) // 2), (resized[1] - width) * ((number - 1) % 2)
    return resized_image.crop((left, top, left + width, top + height))
