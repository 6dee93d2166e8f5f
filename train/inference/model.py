"""A trained network and nothing that trains it: opened from a run's folder or any file of weights, and shown images."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

import parity
from parity.checkpoints.config_overrides import assignments
from parity.checkpoints.formats import Fields
from parity.checkpoints.preprocessing import Preprocessing, central
from parity.checkpoints.reading import WEIGHTS
from parity.checkpoints.weights import Checkpoint
from train.loop.run_folder import best
from train.recipes import Recipe, Task
from vit_spec import InputError, ViTConfig, bounded_json

if TYPE_CHECKING:
    from train.data.batches import Batch, Feed

TWINS = ("jax", "torch")  # in the order in which they are taken where none is asked for
_CONFIG = 1 << 24  # bytes of a run's config.json: the names of 21,843 classes take 3 MB

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Frozen:
    """Weights, and what is known of their answers and of how they were judged.

    task: what the outputs are; "classes" where nothing says it.
    names: of the outputs, (num_outputs,); their numbers where they have none.
    preprocessing: how images are prepared; timm's way, of all of the image, where nothing says it.
    batch_size: images shown at once.
    data, held_out: what the run was trained on and judged by; None of a bare file.
    corrupt: what the run did where an image could not be read.
    """

    checkpoint: Checkpoint
    task: Task
    names: tuple[str, ...]
    preprocessing: Preprocessing
    batch_size: int
    data: str | None = None
    held_out: float | str | None = None
    corrupt: Literal["stop", "skip"] = "stop"

    @property
    def shown(self) -> ViTConfig:
        """The config at the size in which images are shown: positions are resampled where it is not the config's own.

        Raises:
            InputError: a size that the model's patches do not divide.
        """
        return self.checkpoint.config.replace(image_size=self.preprocessing.size)


class Network(Protocol):
    """Either twin in float32, its matrix products unrounded, so that both give the same to the sixth digit or so.

    images: (B, height, width, channels) uint8, of the config's size.
    """

    def outputs(self, images: NDArray[np.uint8]) -> Array:
        """Return logits (B, num_classes), or without a head features (B, width), as `config.head` names them."""

    def attention(self, images: NDArray[np.uint8]) -> Array:
        """Return the last block's attention weights, (B, heads, T, T)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Let a command line name weights, and the twin that they are to be used in."""
    text = "a run's folder (its best weights), a file or folder of weights, or hf://owner/name"
    parser.add_argument("weights", metavar="RUN_OR_FILE", help=text)
    parser.add_argument("--from", dest="format", metavar="FORMAT", help="what RUN_OR_FILE is; by default it is recognised")
    text = "set a field of the config that RUN_OR_FILE does not tell, e.g. num_heads=4; again for others"
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help=text)
    parser.add_argument("--twin", choices=TWINS, help="by default the one that is installed, jax first")
    parser.add_argument("--json", action="store_true", help="print JSON, an object a line, for machines")


def named(given: argparse.Namespace) -> Frozen:
    """Open what a command line names."""
    return opened(given.weights, given.format, assignments(given.set))


def opened(place: str, format: str | None = None, given: Fields | None = None) -> Frozen:
    """Open a run's folder, its best weights if it has any, or whatever `parity.load` reads.

    A file inside a run's folder brings what the run says too: RUN/weights.safetensors are its newest weights.

    format, given: as for `parity.load`.

    Raises:
        InputError: nothing there, no known weights, or a run's config that lacks something.
    """
    path = Path(place)
    run = path if path.is_dir() else path.parent
    said = None if place.startswith("hf://") else _run_config(run / "config.json")
    if said is not None and run == path and not (path / WEIGHTS).exists():
        raise InputError(f"{path} is a run without weights yet: they come with its first look at the held-out images")
    checkpoint = parity.load(best(place), format=format, given=given)
    outputs, task = checkpoint.config.num_classes, checkpoint.task
    numbers = ("value",) if (outputs, task) == (1, "values") else tuple(map(str, range(outputs)))
    how = checkpoint.preprocessing or central(checkpoint.config.image_size)
    known = (checkpoint, task, checkpoint.labels or numbers, how)
    if said is None:
        return Frozen(*known, Recipe().batch_size)
    try:
        return Frozen(*known, *(said["recipe"][name] for name in ("batch_size", "data", "held_out", "corrupt")))
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{run / 'config.json'} is of another version ({error}): copy the weights out of the folder to use them alone"
        ) from None


def _run_config(path: Path) -> dict[str, Any] | None:
    """Return the config of a run; None where there is none, or another program's."""
    try:
        found = bounded_json.read_object(path, longest=_CONFIG) if path.is_file() else {}
    except (OSError, InputError):
        return None
    return found if {"recipe", "data"} <= found.keys() else None


def pooled(checkpoint: Checkpoint) -> None:
    """Refuse weights that give numbers for every patch and none for an image.

    Raises:
        InputError: as said.
    """
    if checkpoint.config.head.pool == "none":
        raise InputError(
            "these weights have head.pool=none, so no feature of an image: give weights of a network that pools"
        )


def network(checkpoint: Checkpoint, twin: str | None) -> Network:
    """Load a framework, and the weights into its twin.

    twin: "jax" or "torch"; None: the first that is installed.

    Raises:
        ModuleNotFoundError: the framework is not installed.
    """
    chosen = twin or next(filter(find_spec, TWINS), TWINS[0])
    found: Network = import_module(f"train.{chosen}.inference").Twin(checkpoint)
    return found


def gathered(feed: "Feed", look: "Callable[[Batch], Array]") -> Array:
    """Return what `look` makes of each image of a feed, (N, ...), once and in order.

    look: batch -> (B, ...).

    Raises:
        InputError: an image that cannot be read, or numbers that are not finite.
    """
    parts = []
    for batch in feed.evaluation():
        made = look(batch)
        wrong = ~np.isfinite(made.reshape(len(made), -1)).all(1)
        if wrong.any():
            name = feed.examples.names[int(batch.rows[wrong][0])]
            raise InputError(
                f"the network gives no finite numbers for {name}: look at its weights, python -m parity inspect --values"
            )
        parts.append(made)
    return np.concatenate(parts)[: len(feed.examples)]
