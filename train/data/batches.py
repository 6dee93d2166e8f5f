"""From labelled images to batches, framework-free: what to show in step s is a function of (seed, s) alone.

Training images are shown in an endless row of epochs, each a permutation of its own, cut into full batches that may
straddle two epochs.  The variation of an image depends on (seed, epoch, image, repetition) and on nothing else: neither on
the batch it falls into, nor on how many threads, processes or machines prepare it, nor on what was drawn before.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, islice
from multiprocessing import resource_tracker
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from parity.checkpoints.preprocessing import Preprocessing, central
from train.data.augment import Augment, Mix, augmented, mix, prepared
from train.data.rng import IMAGE, MIX, ORDER, generator
from train.data.sources import Examples, Source, Unavailable
from train.data.sources.columns import finite
from train.recipes import Task
from vit_spec import InputError, ViTConfig

Targets = NDArray[np.int32] | NDArray[np.float32]

AHEAD = 256 << 20  # bytes of batches that wait for the trainer
UNVARIED = Augment()
# Batches that wait when a run ends lie in shared memory, which Python's tracker gives back, warning of each.
UNTOLD = "ignore:resource_tracker:UserWarning"
TRIES = 100  # images in a row that cannot be read, before it is the data that cannot


class Batch(NamedTuple):
    """images (B, H, W, C) uint8; targets as `targets` makes them; rows (B,) int64, where each image is in its set.

    read: (B,) bool; where it is False the image could not be read, and another stands in its place.
    mix: how the batch is to be mixed with itself; None where the recipe mixes none.

    B is what this process feeds of the batch: all of it where it is the only one.
    """

    images: NDArray[np.uint8]
    targets: Targets
    rows: NDArray[np.int64]
    read: NDArray[np.bool_]
    mix: Mix | None = None


def targets(examples: Examples, classes: tuple[str, ...], kind: Task, task: Task) -> Targets:
    """Return what the model should answer, for answers of one kind and a task.

    classes: class numbers (N,) int32.   labels: 0 or 1 (N, labels) float32; asked of classes, 1 for the image's class and 0
    for the others.    values: (N, values) float32; asked of classes, the class's name read as a number, (N, 1).

    Raises:
        InputError: another task of labels or values than their own, or "values" with a class whose name is no such number.
    """
    if kind != "classes":
        if task != kind:
            raise InputError(f"--task {task} needs classes, and the data has {kind}: leave --task out")
        return examples.answers.astype(np.float32)
    numbers = examples.answers.astype(np.int32)
    if task == "classes":
        return numbers
    if task == "labels":
        return np.eye(len(classes), dtype=np.float32)[numbers]
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and what is none is nan
        values = np.array([finite(name) for name in classes], np.float64).astype(np.float32)
    if not np.isfinite(values).all():
        name = classes[int(np.isfinite(values).argmin())]
        raise InputError(f'--task values reads class names as numbers, and {name!r} is none: rename it, or use "classes"')
    return values[numbers][:, None]


def num_outputs(classes: tuple[str, ...], kind: Task, task: Task) -> int:
    """How many numbers the model gives for an image."""
    return 1 if (kind, task) == ("classes", "values") else len(classes)


def held_out(config: ViTConfig, augment: Augment) -> Preprocessing:
    """Return how a run prepares the images that it does not train on."""
    return central(config.image_size, augment.share, augment.held_out_filter)


def usual_workers(source: Source) -> int:
    """How many processes prepare images unless a number is asked for.

    None where images need no decoding, or on few cores: threads do there, since Pillow works outside Python's lock.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if source.size is not None or cores < 4 else cores - 1


@dataclass(frozen=True)
class Feed:
    """A set of images with their targets, brought to the size and the channels of a model, in batches.

    augment: how training images are varied; its `share` and `held_out_filter` are how held-out images are prepared.
    preprocessing: how held-out images are prepared instead; None: as `augment` says.
    here: which images of a batch this process prepares, (B here,); None: all.
    skip: let another image stand for one that is damaged, rather than raise.
    workers: processes that prepare batches; 0: threads.
    advice: what else can be done about a damaged image than to replace or remove it.

    Raises:
        InputError: a model of neither 1 nor 3 channels.
    """

    examples: Examples
    targets: Targets
    config: ViTConfig
    batch_size: int
    augment: Augment = UNVARIED
    here: NDArray[np.int64] | None = None
    skip: bool = False
    workers: int = 0
    advice: str = ""
    preprocessing: Preprocessing | None = None

    def __post_init__(self) -> None:
        if self.config.in_channels not in (1, 3):
            raise InputError(f"in_channels is {self.config.in_channels}: images are grey (1) or colour (3)")

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        return np.arange(self.batch_size) if self.here is None else self.here

    def training(self, *, seed: int, first: int, last: int) -> Generator[Batch, None, None]:
        """Yield the batches of steps `first` to `last` - 1, prepared ahead.

        Raises:
            InputError: an image that cannot be read, when its batch is due.  Where damaged ones are skipped: many in a row,
                or one that the system does not give.
        """
        count, repeats, here = len(self.examples), self.augment.repeats, len(self._places)

        def show(number: int) -> tuple[Batch, NDArray[np.int64]]:
            step, place = divmod(number, here)
            epoch, place = divmod(step * self.batch_size + int(self._places[place]), count)
            row = int(_order(seed, epoch, count)[place // repeats])
            rng = generator(IMAGE, seed, epoch, row, place % repeats)

            def varied(image: Image.Image) -> NDArray[np.uint8]:
                pixels = self.config.pixels
                return augmented(image, self.augment, self.config.image_size, rng, pixels.mean, pixels.std)

            return self._shown(row, varied)

        for step, batch in enumerate(self._batches(show, first * here, last * here), first):
            drawn = mix(self.augment, self.config.image_size, generator(MIX, seed, step)) if self.augment.mixes else None
            yield batch._replace(mix=drawn)

    def evaluation(self) -> Iterator[Batch]:
        """Yield every image once, in order and unvaried; the last batch is filled up with the first images.

        Raises:
            InputError: as `training`.
        """
        count = len(self.examples)
        here = len(self._places)

        def show(number: int) -> tuple[Batch, NDArray[np.int64]]:
            step, place = divmod(number, here)
            return self._shown((step * self.batch_size + int(self._places[place])) % count, self._fitted)

        yield from self._batches(show, 0, -(-count // self.batch_size) * here)

    def _fitted(self, image: Image.Image) -> NDArray[np.uint8]:
        how = self.preprocessing or held_out(self.config, self.augment)
        return np.asarray(prepared(image, how, self.config.pixels.mean)).reshape(*how.size, -1)

    def _shown(self, row: int, bring: Any) -> tuple[Batch, NDArray[np.int64]]:
        """One image as the model sees it, or where damaged ones are skipped, the next that can be read.

        And the row of an image that stops the run; -1: none does.
        """
        mode, wrong = "L" if self.config.in_channels == 1 else "RGB", row
        for other in range(row, row + TRIES):
            other %= len(self.examples)
            try:
                image = self.examples.read(other)
            except InputError as error:
                if self.skip and not isinstance(error, Unavailable):
                    continue
                wrong = other
                break
            try:
                pixels = bring(image if image.mode == mode else image.convert(mode))
            except InputError as error:  # a shape that nothing can be made of
                raise InputError(f"{self.examples.names[other]}: {error}") from None
            return Batch(pixels, self.targets[other], np.asarray(row), np.asarray(other == row)), np.asarray(-1)
        # What is wrong is told where the batch is due.
        nothing = np.zeros((*self.config.image_size, self.config.in_channels), np.uint8)
        return Batch(nothing, self.targets[row], np.asarray(row), np.asarray(False)), np.asarray(wrong)

    def _batches(self, show: Any, first: int, last: int) -> Iterator[Batch]:
        """Yield the batches of the images numbered `first` to `last` - 1, made ahead by threads or processes."""
        import grain  # which loads jax where jax is installed

        here = len(self._places)
        shape = (*self.config.image_size, self.config.in_channels)
        ahead = max(2, min(8, AHEAD // (here * int(np.prod(shape)))))
        shown = grain.MapDataset.range(last).map(show).batch(here)[first // here :]
        if self.workers:
            _parse_flags()
            made = shown.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
            made = made.mp_prefetch(grain.MultiprocessingOptions(self.workers, per_worker_buffer_size=1), _end_with_trainer)
        else:
            made = shown.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=ahead))
        with closing(iter(made)) as batches:
            with _signals_held_back() if self.workers else nullcontext():
                begun = list(islice(batches, 1))  # the workers begin with the first
            for batch, wrong in chain(begun, batches):
                for row in wrong[wrong >= 0].tolist():
                    self._refuse(row)
                yield batch

    def _refuse(self, row: int) -> NoReturn:
        """Raise what is wrong with an image."""
        try:
            self.examples.read(row)
        except Unavailable:
            raise
        except InputError as error:
            raise InputError(f"{error}{self.advice}") from None
        raise InputError(f"{self.examples.names[row]} could not be read a moment ago: look at the disk")


@lru_cache(maxsize=2)  # a batch may straddle two epochs
def _order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The order in which an epoch shows so many images."""
    return generator(ORDER, seed, epoch).permutation(count)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Let processes begin that never see SIGINT and SIGTERM, which come to all of a group: the trainer sees to its end."""
    if UNTOLD not in sys.warnoptions:
        sys.warnoptions.append(UNTOLD)
    resource_tracker.ensure_running()  # when it begins, it lets both through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_trainer(worker: int, workers: int) -> None:
    """Let this worker end when the trainer is killed; it would wait for ever for somebody to take its batches."""

    def wait() -> None:
        trainer = multiprocessing.parent_process()
        assert trainer is not None
        trainer.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _parse_flags() -> None:
    """Grain's workers ask absl for flags, which nothing here parses (google/grain#1355)."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
