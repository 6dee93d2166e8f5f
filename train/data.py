"""From labelled images to batches, framework-free: what to show in step s is a function of (seed, s) alone.

Training images are shown in an endless row of epochs, each a permutation of its own, cut into full batches that may
straddle two epochs.  The variation of an image depends on (seed, epoch, image) and on nothing else: neither on the batch
it falls into, nor on how many threads prepare it, nor on what was drawn before.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import grain
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from train.augment import fit, vary
from train.chance import IMAGE, ORDER, generator
from train.recipes import Augment, Task
from train.sources import Examples
from vit_spec import InputError, ViTConfig

Targets = NDArray[np.int32] | NDArray[np.float32]


class Batch(NamedTuple):
    """images (B, H, W, C) uint8; targets as `targets` makes them; rows (B,) int64, where each image is in its set."""

    images: NDArray[np.uint8]
    targets: Targets
    rows: NDArray[np.int64]


def targets(examples: Examples, classes: tuple[str, ...], task: Task) -> Targets:
    """Return what the model should answer.

    classes: class numbers (N,) int32.   labels: 1 for the image's class and 0 for the others, (N, classes) float32.
    values: the class's name read as a number, (N, 1) float32.

    Raises:
        InputError: task "values" with a class whose name is no number.
    """
    if task == "classes":
        return examples.labels.astype(np.int32)
    if task == "labels":
        return np.eye(len(classes), dtype=np.float32)[examples.labels]
    try:
        values = np.array([float(name) for name in classes], np.float32)
    except ValueError as error:
        raise InputError(f'--task values reads class names as numbers ({error}): rename them, or use "classes"') from None
    return values[examples.labels][:, None]


def num_outputs(classes: tuple[str, ...], task: Task) -> int:
    """How many numbers the model gives for an image."""
    return 1 if task == "values" else len(classes)


@dataclass(frozen=True)
class Feed:
    """A set of images with their targets, brought to the size and the channels of a model, in batches.

    Raises:
        InputError: a model of neither 1 nor 3 channels.
    """

    examples: Examples
    targets: Targets
    config: ViTConfig
    batch_size: int

    def __post_init__(self) -> None:
        if self.config.in_channels not in (1, 3):
            raise InputError(f"in_channels is {self.config.in_channels}: images are grey (1) or colour (3)")

    def training(self, augment: Augment, *, seed: int, first: int, last: int) -> Iterator[Batch]:
        """Yield the batches of steps `first` to `last` - 1, prepared ahead in threads.

        Raises:
            InputError: an image that cannot be read, when its batch is due.
        """
        count = len(self.examples)

        @lru_cache(maxsize=2)  # a batch may straddle two epochs
        def order(epoch: int) -> NDArray[np.int64]:
            return generator(ORDER, seed, epoch).permutation(count)

        def show(position: int) -> Batch:
            epoch, place = divmod(position, count)
            row = order(epoch)[place]
            image = vary(self._image(int(row)), augment, generator(IMAGE, seed, epoch, int(row)))
            return Batch(_pixels(image), self.targets[row], row)

        shown = grain.MapDataset.range(last * self.batch_size).map(show).batch(self.batch_size)
        return iter(shown[first:].to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)))

    def evaluation(self) -> Iterator[tuple[Batch, int]]:
        """Yield every image once, in order and unvaried, and how many of each batch count.

        The last batch is filled up with repetitions, so that all have one shape.
        """
        for start in range(0, len(self.examples), self.batch_size):
            rows = np.arange(start, min(start + self.batch_size, len(self.examples)))
            filled = np.resize(rows, self.batch_size)
            images = np.stack([_pixels(self._image(int(row))) for row in filled])
            yield Batch(images, self.targets[filled], filled), len(rows)

    def _image(self, row: int) -> Image.Image:
        image = self.examples.read(row).convert("L" if self.config.in_channels == 1 else "RGB")
        return fit(image, self.config.image_size)


def _pixels(image: Image.Image) -> NDArray[np.uint8]:
    """A grey or colour image as (H, W, C) uint8."""
    array = np.asarray(image)
    return array[:, :, None] if array.ndim == 2 else array
