"""Inference: load a trained model from a run folder or any checkpoint, and apply it to images with either twin."""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

import parity
from parity.checkpoints.config_overrides import parse_overrides
from parity.checkpoints.containers.folders import RUN_FILES
from parity.checkpoints.format_file import read_format
from parity.checkpoints.formats import Fields, registered
from parity.checkpoints.preprocessing import Preprocessing, center_crop
from parity.checkpoints.weights import Checkpoint
from train.inference.twins import choose_twin
from train.loop.saved_run import missing_best_note, read_run_config
from train.recipes import Recipe, Task
from vit_spec import InputError, ViTConfig

if TYPE_CHECKING:
    from train.data.batches import Batch, DataLoader


Array = NDArray[np.float32]


@dataclass(frozen=True)
class TrainedModel:
    """Weights with their metadata: what the outputs mean, how images are preprocessed, and how the run was evaluated.

    task: what the outputs are; "classes" if the file has no task.
    names: names of the outputs, (num_outputs,); their numbers if the file has no names.
    preprocessing: preprocessing of images; timm's centre crop of the whole image if the file has none.
    batch_size: the run's; the default recipe's for a file outside of a run folder.
    run: the run's folder; None for a file outside of one.
    data, held_out: the run's `--data` and `--held-out`; None for a file outside of a run folder.
    corrupt: what the run does with an image that cannot be read.
    newest_note: a line that says so if a run's newest weights were loaded because it has no best ones; else "".
    """

    checkpoint: Checkpoint
    task: Task
    names: tuple[str, ...]
    preprocessing: Preprocessing
    batch_size: int
    run: Path | None = None
    data: str | None = None
    held_out: float | str | None = None
    corrupt: Literal["stop", "skip"] = "stop"
    newest_note: str = ""

    @property
    def input_config(self) -> ViTConfig:
        """The config at the size of preprocessed images; positions are resampled if that is not the checkpoint's own size.

        Raises:
            InputError: the patch size does not divide the image size.
        """
        return self.checkpoint.config.replace(image_size=self.preprocessing.size)


class Predictor(Protocol):
    """A model of either twin with its weights, in float32 with full-precision matrix products.

    Both twins then agree to about six digits.

    images: (B, height, width, channels) uint8, of the config's size, not normalized.
    """

    def predict(self, images: NDArray[np.uint8]) -> Array:
        """Return logits (B, num_classes); of a model without a head, the features (B, features) that a head would get."""

    def attention_maps(self, images: NDArray[np.uint8]) -> Array:
        """Return the attention weights of the last block, (B, heads, T, T)."""


def load_from_arguments(args: argparse.Namespace) -> TrainedModel:
    """Load the model that a command line names; see `train.inference.arguments`."""
    given = parse_overrides(args.set)
    with registered(*map(read_format, args.format_file)):
        return load_trained_model(args.weights, args.format, given, strip=args.strip, ignore=args.ignore)


def load_trained_model(
    place: str,
    format: str | None = None,
    given: Fields | None = None,
    *,
    strip: str | None = None,
    ignore: Sequence[str] = (),
) -> TrainedModel:
    """Load a run folder's best weights, or anything else that `parity.load` reads.

    A file in a run folder gets the metadata of the run too; RUN/weights.safetensors has its newest weights.  If the run has
    no best weights, these are loaded.

    place: a path, in which a leading ~ is the home folder, or a name on the hub.
    format, given, strip, ignore: as for `parity.load`.

    Raises:
        InputError: there is nothing to load, the format is unknown, or the run's config lacks a field.
    """
    place = os.path.expanduser(place)
    path = Path(place)
    run = path if path.is_dir() else path.parent
    run_config = None if place.startswith("hf://") else read_run_config(run)
    if run_config is not None and run == path and not any((path / name).exists() for name in RUN_FILES):
        raise InputError(f"{path} is a run without weights yet: it saves them with its first evaluation")
    checkpoint = parity.load(place, format=format, given=given, strip=strip, ignore=ignore)
    outputs, task = checkpoint.config.num_classes, checkpoint.task
    numbers = ("value",) if (outputs, task) == (1, "values") else tuple(map(str, range(outputs)))
    preprocessing = checkpoint.preprocessing or center_crop(checkpoint.config.image_size)
    fields = (checkpoint, task, checkpoint.labels or numbers, preprocessing)
    newest_note = missing_best_note(place, checkpoint.path)
    if run_config is None:
        return TrainedModel(*fields, Recipe().batch_size, newest_note=newest_note)
    try:
        recipe = run_config["recipe"]
        settings = {name: recipe[name] for name in ("batch_size", "data", "held_out", "corrupt")}
        return TrainedModel(*fields, **settings, run=run, newest_note=newest_note)
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{run / 'config.json'} is of another version ({error}): copy the weights out of the folder to use them alone"
        ) from None


def require_pooling(checkpoint: Checkpoint) -> None:
    """Refuse a model that gives an output per token and none for the image.

    Raises:
        InputError: it has head.pool=none.
    """
    if checkpoint.config.head.pool == "none":
        raise InputError(
            "these weights have head.pool=none and give no feature of an image: give weights of a model that pools"
        )


def load_predictor(checkpoint: Checkpoint, twin: str | None) -> Predictor:
    """Load weights into a twin, and return it ready for inference.

    twin: "jax" or "torch"; None: the first of them that is installed.

    Raises:
        ModuleNotFoundError: the framework is not installed.
    """
    found: Predictor = import_module(f"train.{choose_twin(twin)}.inference").TwinPredictor(checkpoint)
    return found


def predict_all(loader: "DataLoader", predict: "Callable[[Batch], Array]") -> Array:
    """Return the outputs for each image of a data loader, (N, ...); see `predict_batches`."""
    return np.concatenate(list(predict_batches(loader, predict)))


def predict_batches(loader: "DataLoader", predict: "Callable[[Batch], Array]") -> Iterator[Array]:
    """Yield the outputs for the images of a data loader, (B, ...) at a time, each image once and in order.

    predict: takes a batch and returns its outputs, (B, ...).

    Raises:
        InputError: an image that cannot be read, or outputs that are not finite.
    """
    missing = len(loader.examples)
    for batch in loader.evaluation_batches():
        outputs = predict(batch)
        is_broken = ~np.isfinite(outputs.reshape(len(outputs), -1)).all(1)
        if is_broken.any():
            name = loader.examples.names[int(batch.rows[is_broken][0])]
            raise InputError(
                f"the outputs for {name} are not finite: check the weights with python -m parity inspect --values"
            )
        yield outputs[:missing]
        missing -= len(outputs)
