"""The data loader of both frameworks: batches of preprocessed images, where batch s is a pure function of (seed, s).

Training runs through an endless sequence of epochs, each in a new order (`train.data.order`), cut into full batches that
may span two epochs.  The augmentation of an image depends only on (seed, epoch, image, repetition): not on its batch, on
the number of threads, processes or machines that prepare it, or on earlier random numbers.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from parity.checkpoints.preprocessing import Preprocessing, center_crop
from train.data.augment import Augment, Mix, augment_image, preprocess, sample_mix
from train.data.hidden_imports import hide_packages
from train.data.order import EpochOrder
from train.data.rng import IMAGE, MIX, generator
from train.data.sources import Examples, FileAccessError
from train.data.targets import ModelTargets
from train.data.workers import block_signals, exit_with_trainer, parse_flags, quiet_absl
from vit_spec import InputError, ViTConfig

PREFETCH_BYTES = 256 << 20  # of batches that are prepared ahead of the trainer
NO_AUGMENTATION = Augment()
MAX_UNREADABLE = 100  # damaged images in a row that are skipped before it is an error


class Batch(NamedTuple):
    """A batch, or this process's part of it.

    images: (B, H, W, C) uint8.
    targets: see `train.data.targets.targets_for_task`.
    rows: (B,) int64, the index of each image in its examples.
    readable: (B,) bool; False where the image could not be read and another image replaces it.
    mix: the mixup or CutMix of the batch; None if the recipe mixes no images.
    """

    images: NDArray[np.uint8]
    targets: ModelTargets
    rows: NDArray[np.int64]
    readable: NDArray[np.bool_]
    mix: Mix | None = None


def held_out_preprocessing(config: ViTConfig, augment: Augment) -> Preprocessing:
    """Return the preprocessing of a run's held-out images."""
    return center_crop(config.image_size, augment.share, augment.held_out_filter)


@dataclass(frozen=True)
class DataLoader:
    """Batches of a set of examples, with the image size and the channels of a model.

    targets: see `train.data.targets.targets_for_task`.
    augment: the augmentation of training images; its `share` and `held_out_filter` preprocess held-out images.
    local_indices: (local B,) the indices in a batch of the images that this process prepares; None: all.
    skip_damaged: replace a damaged image by the next one, instead of an error.
    workers: worker processes that prepare batches; 0: threads.
    error_hint: added to the message about a damaged image: what the user can do besides replacing or removing it.
    preprocessing: preprocessing of held-out images, instead of that from `augment`.
    balanced: (N,) the classes that are equally frequent in an epoch; None: each image is in it once.

    Raises:
        InputError: a model with neither 1 nor 3 channels.
    """

    examples: Examples
    targets: ModelTargets
    config: ViTConfig
    batch_size: int
    augment: Augment = NO_AUGMENTATION
    local_indices: NDArray[np.int64] | None = None
    skip_damaged: bool = False
    workers: int = 0
    error_hint: str = ""
    preprocessing: Preprocessing | None = None
    balanced: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if self.config.in_channels not in (1, 3):
            raise InputError(f"in_channels is {self.config.in_channels}: images are grey (1) or colour (3)")

    @cached_property
    def _indices(self) -> NDArray[np.int64]:
        return np.arange(self.batch_size) if self.local_indices is None else self.local_indices

    def training_batches(
        self, *, seed: int, first_step: int, end_step: int, image_offset: int = 0
    ) -> Generator[Batch, None, None]:
        """Yield the batches of steps `first_step` to `end_step` - 1, prepared ahead.

        image_offset: by how many images the batches of all steps are further on, see `train.loop.schedule`.

        Raises:
            InputError: an image cannot be read; raised when its batch is due.  If damaged images are skipped: many of them
                follow each other, or the system does not give one (`FileAccessError`).
        """
        count, repeats, local_size = len(self.examples), self.augment.repeats, len(self._indices)
        order = EpochOrder(seed, count, self.balanced)

        def load(number: int) -> tuple[Batch, NDArray[np.int64]]:
            step, index = divmod(number, local_size)
            epoch, position = divmod(step * self.batch_size + int(self._indices[index]) + image_offset, count)
            rows, copies = order.of(epoch)
            row, copy = int(rows[position // repeats]), int(copies[position // repeats])
            rng = generator(IMAGE, seed, epoch, row, copy * repeats + position % repeats)

            def augment(image: Image.Image) -> NDArray[np.uint8]:
                pixels = self.config.pixels
                return augment_image(image, self.augment, self.config.image_size, rng, pixels.mean, pixels.std)

            return self._load(row, augment)

        size = self.config.image_size
        for step, batch in enumerate(self._batches(load, first_step * local_size, end_step * local_size), first_step):
            mix = sample_mix(self.augment, size, generator(MIX, seed, step)) if self.augment.mixes else None
            yield batch._replace(mix=mix)

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yield every image once, in order and without augmentation; the first images fill up the last batch.

        Raises:
            InputError: as `training_batches`.
        """
        count = len(self.examples)
        local_size = len(self._indices)

        def load(number: int) -> tuple[Batch, NDArray[np.int64]]:
            step, index = divmod(number, local_size)
            return self._load((step * self.batch_size + int(self._indices[index])) % count, self._preprocess)

        yield from self._batches(load, 0, -(-count // self.batch_size) * local_size)

    def _preprocess(self, image: Image.Image) -> NDArray[np.uint8]:
        preprocessing = self.preprocessing or held_out_preprocessing(self.config, self.augment)
        return np.asarray(preprocess(image, preprocessing, self.config.pixels.mean)).reshape(*preprocessing.size, -1)

    def _load(self, row: int, transform: Callable[[Image.Image], NDArray[np.uint8]]) -> tuple[Batch, NDArray[np.int64]]:
        """Return an image and its target as an unbatched `Batch`, and the row of the image that cannot be read, or -1.

        If damaged images are skipped, the image is the first that can be read of this one and those after it.

        transform: turns a decoded image into the pixels of the batch.
        """
        mode, failed = "L" if self.config.in_channels == 1 else "RGB", row
        for other in range(row, row + MAX_UNREADABLE):
            other %= len(self.examples)
            try:
                image = self.examples.read(other)
            except InputError as error:
                if self.skip_damaged and not isinstance(error, FileAccessError):
                    continue
                failed = other
                break
            try:
                pixels = transform(image if image.mode == mode else image.convert(mode))
            except InputError as error:  # a shape that cannot be resized
                raise InputError(f"{self.examples.names[other]}: {error}") from None
            return Batch(pixels, self.targets[other], np.asarray(row), np.asarray(other == row)), np.asarray(-1)
        # `_batches` raises the error when the batch is due.
        blank = np.zeros((*self.config.image_size, self.config.in_channels), np.uint8)
        return Batch(blank, self.targets[row], np.asarray(row), np.asarray(False)), np.asarray(failed)

    def _batches(self, load: Callable[[int], tuple[Batch, NDArray[np.int64]]], first: int, end: int) -> Iterator[Batch]:
        """Yield the batches of `load(first)` to `load(end - 1)`, prepared ahead by threads or processes."""
        # A process that has not imported jax by now does not compute with it, and grain needs neither jax nor orbax.
        with hide_packages("jax", "orbax"), quiet_absl():  # without jax, grain warns that it cannot profile with it
            import grain  # imported late, since it takes long

        local_size = len(self._indices)
        shape = (*self.config.image_size, self.config.in_channels)
        prefetch = max(2, min(8, PREFETCH_BYTES // (local_size * int(np.prod(shape)))))
        dataset = grain.MapDataset.range(end).map(load).batch(local_size)[first // local_size :]
        if self.workers:
            parse_flags()
            prepared = dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
            options = grain.MultiprocessingOptions(self.workers, per_worker_buffer_size=1)
            prepared = prepared.mp_prefetch(options, exit_with_trainer)
        else:
            prepared = dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=prefetch))
        with closing(iter(prepared)) as batches:
            with block_signals() if self.workers else nullcontext():
                first_batch = list(islice(batches, 1))  # asking for it starts the workers
            for batch, failed in chain(first_batch, batches):
                for row in failed[failed >= 0].tolist():
                    self._raise_error(row)
                yield batch._replace(mix=None)  # without jax, grain makes an array of None

    def _raise_error(self, row: int) -> NoReturn:
        """Read an image that cannot be read again, and raise its error."""
        try:
            self.examples.read(row)
        except FileAccessError:
            raise
        except InputError as error:
            raise InputError(f"{error}{self.error_hint}") from None
        raise InputError(f"{self.examples.names[row]} could not be read a moment ago: look at the disk")
