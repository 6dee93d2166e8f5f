"""The data loader of both frameworks: batches of preprocessed images, where batch s is a pure function of (seed, s).

Training runs through an endless sequence of epochs, each in a new order (`train.data.order`), cut into full batches that
may span two epochs.  The augmentation of an image depends only on (seed, epoch, image, repetition): not on its batch, on
the number of threads, processes or machines that prepare it, or on earlier random numbers.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from multiprocessing import resource_tracker
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from parity.checkpoints.preprocessing import Preprocessing, center_crop
from train.data.augment import Augment, Mix, augment_image, preprocess, sample_mix
from train.data.order import EpochOrder
from train.data.rng import IMAGE, MIX, generator
from train.data.sources import Dataset, Examples, FileAccessError
from train.data.sources.table_columns import parse_finite
from train.recipes import Task
from vit_spec import InputError, ViTConfig

ModelTargets = NDArray[np.int32] | NDArray[np.float32]

PREFETCH_BYTES = 256 << 20  # of batches that are prepared ahead of the trainer
NO_AUGMENTATION = Augment()
# When a run ends, prefetched batches are still in shared memory; Python's tracker frees them and warns of each.
TRACKER_WARNING = "ignore:resource_tracker:UserWarning"
MAX_UNREADABLE = 100  # damaged images in a row that are skipped before it is an error


class Batch(NamedTuple):
    """A batch, or this process's part of it.

    images: (B, H, W, C) uint8.
    targets: see `targets_for_task`.
    rows: (B,) int64, the index of each image in its examples.
    readable: (B,) bool; False where the image could not be read and another image replaces it.
    mix: the mixup or CutMix of the batch; None if the recipe mixes no images.
    """

    images: NDArray[np.uint8]
    targets: ModelTargets
    rows: NDArray[np.int64]
    readable: NDArray[np.bool_]
    mix: Mix | None = None


def targets_for_task(examples: Examples, classes: tuple[str, ...], data_task: Task, task: Task) -> ModelTargets:
    """Return the targets that the model is trained and evaluated with.

    data_task: the kind of targets that the data has.
    task: what the model predicts.

    classes: (N,) int32 class numbers.
    labels: (N, labels) float32 of 0 and 1; made from classes, 1 for the image's class and 0 for the others.
    values: (N, values) float32; made from classes, the class's name as a number, (N, 1).

    Raises:
        InputError: data of labels or values with another task, or "values" with a class whose name is not a finite number.
    """
    if data_task != "classes":
        if task != data_task:
            raise InputError(f"--task {task} needs classes, and the data has {data_task}: leave --task out")
        return examples.targets.astype(np.float32)
    numbers = examples.targets.astype(np.int32)
    if task == "classes":
        return numbers
    if task == "labels":
        return np.eye(len(classes), dtype=np.float32)[numbers]
    with np.errstate(over="ignore"):  # too large a number becomes infinite, and text becomes nan
        values = np.array([parse_finite(name) for name in classes], np.float64).astype(np.float32)
    if not np.isfinite(values).all():
        name = classes[int(np.isfinite(values).argmin())]
        raise InputError(
            f"--task values reads class names as numbers, and {name!r} is not one: rename it, or give --task classes"
        )
    return values[numbers][:, None]


def num_outputs(classes: tuple[str, ...], data_task: Task, task: Task) -> int:
    """Return the number of the model's outputs for an image."""
    return 1 if (data_task, task) == ("classes", "values") else len(classes)


def held_out_preprocessing(config: ViTConfig, augment: Augment) -> Preprocessing:
    """Return the preprocessing of a run's held-out images."""
    return center_crop(config.image_size, augment.share, augment.held_out_filter)


def default_workers(source: Dataset) -> int:
    """Return the number of worker processes for a recipe that gives none.

    It is 0 for images that need no decoding, and on machines with few cores: threads suffice there, because Pillow releases
    Python's global lock.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if source.size is not None or cores < 4 else cores - 1


@dataclass(frozen=True)
class DataLoader:
    """Batches of a set of examples, with the image size and the channels of a model.

    targets: see `targets_for_task`.
    augment: the augmentation of training images; its `share` and `held_out_filter` preprocess held-out images.
    local_indices: (local B,) the indices in a batch of the images that this process prepares; None: all.
    skip_damaged: replace a damaged image by the next one, instead of an error.
    workers: worker processes that prepare batches; 0: threads.
    error_hint: added to the message about a damaged image: what the user can do besides replacing or removing it.
    preprocessing: of held-out images, instead of that from `augment`.
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

    def _load(self, row: int, transform: Any) -> tuple[Batch, NDArray[np.int64]]:
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

    def _batches(self, load: Any, first: int, end: int) -> Iterator[Batch]:
        """Yield the batches of `load(first)` to `load(end - 1)`, prepared ahead by threads or processes."""
        with _quiet_absl():  # without jax, grain warns that it cannot profile with it
            import grain  # imported late because it imports jax, if jax is installed

        local_size = len(self._indices)
        shape = (*self.config.image_size, self.config.in_channels)
        prefetch = max(2, min(8, PREFETCH_BYTES // (local_size * int(np.prod(shape)))))
        dataset = grain.MapDataset.range(end).map(load).batch(local_size)[first // local_size :]
        if self.workers:
            _parse_flags()
            prepared = dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
            options = grain.MultiprocessingOptions(self.workers, per_worker_buffer_size=1)
            prepared = prepared.mp_prefetch(options, _exit_with_trainer)
        else:
            prepared = dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=prefetch))
        with closing(iter(prepared)) as batches:
            with _block_signals() if self.workers else nullcontext():
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


@contextmanager
def _quiet_absl() -> Iterator[None]:
    """Show only errors that absl logs."""
    from absl import logging as absl_logging

    logger = absl_logging.get_absl_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _block_signals() -> Iterator[None]:
    """Block SIGINT and SIGTERM in processes started here: a terminal sends them to all, but the trainer ends them."""
    if TRACKER_WARNING not in sys.warnoptions:
        sys.warnoptions.append(TRACKER_WARNING)
    resource_tracker.ensure_running()  # its start unblocks both signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_with_trainer(worker: int, workers: int) -> None:
    """Exit this worker process when the trainer is killed, instead of waiting for ever for its batches to be taken."""

    def wait() -> None:
        trainer = multiprocessing.parent_process()
        assert trainer is not None
        trainer.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _parse_flags() -> None:
    """Mark absl's flags as parsed: grain's workers read them, and nothing here parses them (google/grain#1355)."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
