"""The engine: what a framework's trainer gives to the loop, which knows no framework."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, SupportsFloat

from numpy.typing import ArrayLike, NDArray

from parity.checkpoints.weights import Checkpoint
from train.data.batches import Batch
from train.recipes import Recipe, Task
from vit_spec import ViTConfig

Note = dict[str, Any]  # JSON that a checkpoint keeps beside the state


class Evaluated(NamedTuple):
    """Results for the images of a batch; arrays of a framework that may still be computed, which `np.asarray` waits for.

    outputs: (B, num_outputs).
    losses: (B,).
    read: (B,) bool, whether the image could be read.
    """

    outputs: ArrayLike
    losses: ArrayLike
    read: ArrayLike


class Engine(Protocol):
    """A model, its optimizer, and the devices that they are on."""

    @property
    def distributed(self) -> bool:
        """Whether other processes take part in the run."""

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes for all of them."""

    @property
    def hardware(self) -> str:
        """The devices and the mesh, in words."""

    @property
    def peak_rate(self) -> float | None:
        """Operations a second of all devices at best, dense and in bfloat16; None where it is not known."""

    @property
    def replicated(self) -> str:
        """Names of parameters that stay replicated although the mesh should shard them; "" if they are few."""

    @property
    def batch_rows(self) -> NDArray[Any]:
        """Which images of a batch this process loads, (B of this process,)."""

    @property
    def averages(self) -> bool:
        """Whether there is a running mean of the weights, which is used unless raw weights are asked for."""

    def step(self, batch: Batch) -> Mapping[str, SupportsFloat]:
        """Start one update; return loss, score, grad_norm and lr, which may still be computed.

        A loss or gradient that is not finite changes nothing; unless such steps are skipped, nothing does from then on.
        """

    def evaluate(self, batch: Batch, *, raw: bool = False) -> Evaluated:
        """Start the evaluation of a batch; raw: with the raw weights, although there is a running mean."""

    def attention(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return the attention weights of the last block for images (N, H, W, C) uint8: (N, heads, T, T)."""

    def save_weights(self, path: Path, *, raw: bool = False) -> None:
        """Write the weights that `evaluate` uses: completely, or not at all."""

    def save_checkpoint(self, step: int, note: Note) -> None:
        """Start to write a checkpoint: the state from which training resumes, and a note."""

    def restore(self) -> tuple[int, Note] | None:
        """Restore the newest checkpoint that can be read; return its step and note, or None where there is none."""

    def profile(self, folder: Path | None) -> None:
        """Start the framework's profiler, which writes into a folder; None: stop it."""

    def preempted(self) -> bool:
        """Whether all processes are to stop after this step, because one of them was told to; every process must ask."""

    def close(self) -> None:
        """Wait until everything is written."""


class MakeEngine(Protocol):
    """What makes an engine for a run: its class."""

    def __call__(
        self,
        config: ViTConfig,
        recipe: Recipe,
        *,
        task: Task,
        rate: Callable[[Any], Any],
        start: Checkpoint | None,
        folder: Path,
        described: Mapping[str, Any] | None = None,
    ) -> Engine:
        """Return the engine.

        Args:
            config: the model.
            recipe: the run.
            task: what is learnt.
            rate: learning rate of the step that follows so many others; it is called with a framework's array.
            start: the weights to start from; None: they are initialized with the recipe's seed.
            folder: where checkpoints are kept.
            described: labels, preprocessing and task, which files of weights contain, as `parity.save` takes them.

        Raises:
            InputError: a recipe that these devices cannot run.
        """
