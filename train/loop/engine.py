"""The protocol between the training loop and an engine.

`train.loop` decides when something happens: which step comes next, when the held-out set is evaluated, when a checkpoint is
saved and when the run ends.  An engine does it in one framework: it owns the model, the optimizer, their state on the
devices, and the checkpoint files.  The loop knows no framework and calls nothing but the members below.

A run calls an engine in this order, in every process of the run:

1. The factory makes the engine, with fresh or given weights.  It must write no file: the run folder is checked later.
2. `synchronize`.  If a run changes its trainer, `from_main`, `adopt` for the best and the newest checkpoint of the other
   one, and `synchronize` again.  `restore_checkpoint`; to restore a file of best weights, `from_main`, and
   `restore_checkpoint` again with their step, then with the first step again.  `save_weights` for each file that is
   restored.
3. `step` for each training step, and after each step `should_stop`.  Metrics of a step are read up to
   `train.loop.loop.METRICS_DELAY` steps later, so `step` should return before the devices have finished.
4. Every `eval_every`: `evaluate` for each batch of the held-out set (with an EMA twice, the second time with `raw`), and
   `save_weights` if the loss is finite and the metrics are the best so far.  Every `save_every`, after each evaluation,
   and before the run stops: `save_checkpoint` and `save_weights`.  The run stops early if `recipe.patience` evaluations in
   a row were not better.
5. `close`, always, also after an exception.

A run whose last evaluation was interrupted begins with step 4.

Any method may raise `InputError` with a message of one line; it ends the run with that message.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, SupportsFloat

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parity.checkpoints.weights import Checkpoint
from train.checkpoints.training_state import TrainingState
from train.data.batches import Batch
from train.loop.loop_state import LoopState
from train.loop.teacher import Teacher
from train.recipes import Recipe, Task
from vit_spec import ViTConfig


class EvalOutput(NamedTuple):
    """Results for the B images of a whole batch, from all processes, in the order of the batch.

    The arrays are of numpy or of the framework, on any device.  `np.asarray` must accept them, and wait until they are
    computed.

    outputs: (B, num_outputs) float32 or wider: logits, or predicted values.
    losses: (B,) float32 or wider: the loss of each image, without label smoothing, mixing or class weights.
    readable: (B,) bool: `Batch.readable` of all processes, False for images that could not be read, which are left out.
    """

    outputs: ArrayLike
    losses: ArrayLike
    readable: ArrayLike


class RestoredCheckpoint(NamedTuple):
    """The facts about a restored checkpoint that the loop needs.

    step: the number of steps done.
    loop_state: what was given to `Engine.save_checkpoint`; None if the checkpoint has metadata that no run writes.
    note: a line that the loop prints; "" for none.
    """

    step: int
    loop_state: LoopState | None
    note: str = ""


CheckpointCheck = Callable[[int, LoopState | None], None]  # see `Engine.restore_checkpoint`


class Engine(Protocol):
    """A model, its optimizer and their state, on the devices of the run."""

    @property
    def trainer(self) -> str:
        """The module that runs the engine: "train.jax" or "train.torch"."""

    @property
    def config(self) -> ViTConfig:
        """The model."""

    @property
    def is_distributed(self) -> bool:
        """Whether the run has several processes.

        If True, the engine handles SIGTERM (see `should_stop`), no attention maps are drawn, and a run needs `--run`.
        """

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes the run folder; True for exactly one process of a run."""

    @property
    def hardware(self) -> str:
        """The mesh and its devices, for the table at the start: "data=2, fsdp=4 (8 x NVIDIA H100)"."""

    @property
    def peak_flops(self) -> float | None:
        """Peak dense bfloat16 FLOP/s of all devices of the run together; None if it is not known.

        See `train.loop.peak_flops`.
        """

    @property
    def replication_note(self) -> str:
        """A line that names the parameters that stay replicated although the mesh should shard them; "" if they are few.

        See `train.mesh.replication_note`.
        """

    @property
    def batch_rows(self) -> NDArray[Any]:
        """Which images of a batch this process loads: (B of this process,) int64, from 0 to `recipe.batch_size` - 1.

        The batches given to `step` and `evaluate` have these images, in this order.  Together the processes load each image
        once.
        """

    @property
    def has_ema(self) -> bool:
        """Whether the engine keeps an exponential moving average (EMA) of the weights: if `recipe.ema` is above 0."""

    def step(self, batch: Batch) -> Mapping[str, SupportsFloat]:
        """Start one training step and return its metrics; do not wait for the devices.

        Let n be the number of steps before this one, those of a restored checkpoint included.  The step is:

        1. Normalize the uint8 images to x = (images / 255 - mean) / std, mean and std per channel from `config.pixels`.
        2. If the recipe smooths labels or `batch.mix` is given, turn class numbers into probabilities.  If `batch.mix` is
           given, mix images and targets (`train.data.augment`) with their partners: the whole batch, of all processes,
           rolled by `recipe.augment.repeats` along its first axis.
        3. Compute the mean loss of the batch of all processes, with class weights, and its gradient.  With a teacher, the
           loss is (1 - w) times this loss plus w times `train.jax.losses.teacher_loss`, w = `distillation_weight`.  The
           teacher, without dropout, gets the mixed images by `train.loop.teacher.InputTransform`.  If the student has a
           distillation token, the first head has the first part of the loss, and the second head the teacher's.
           `recipe.accumulate` = N parts are computed one after the other; part j has the images j, j + N, j + 2N, ... of
           the whole batch.  Loss, metric and gradient are the means over the parts.  Random numbers of the model (dropout,
           drop path) are a function of `recipe.seed`, n and j.  If `recipe.rng` is "shared", they are those that
           `vit_spec.noise` defines for the whole part j, with the key fold_in(seed's key, n), or
           fold_in(fold_in(seed's key, n), j) if N > 1.  The words of the seed's key are the upper and the lower 32 bits of
           the seed.
        4. Update the weights by `recipe.optimizer` with the learning rate `learning_rate(n)`: clip the gradient to the
           global norm `clip`, without frozen weights, which do not change; multiply the rate of each parameter by its
           `train.recipes.param_groups.lr_multipliers`; and decay the parameters whose row in `vit_spec.rows` has `decays`.
        5. If there is an EMA, move it towards the new weights by `train.recipes.schedule.ema_step_size(n + 1)`.

        Activations have `recipe.dtype`.  Weights, optimizer state, EMA and loss are float32, or wider.

        A step whose loss or gradient norm is not finite changes neither weights nor optimizer state nor EMA.  If
        `recipe.non_finite` is "skip", it still counts for n, but not for the optimizer's own count (bias correction).  If
        it is "stop", all later steps change nothing either: the loop learns of it some steps late, and may then save the
        weights of the last good step.

        Args:
            batch: the images that `batch_rows` names.

        Returns:
            Scalars of the framework, the same in every process, for which `float` works and waits: "loss", the metric
            `train.loop.metrics.BATCH_METRIC[task]`, "grad_norm", the global norm of the gradient before clipping, without
            frozen weights, and "lr".  Loss and metric are computed from the mixed images and targets.  For mixed or
            smoothed targets, the metric takes the class with the largest probability.
        """

    def evaluate(self, batch: Batch, *, raw: bool = False) -> EvalOutput:
        """Evaluate a batch without dropout, and return its results, which may not be computed yet.

        Args:
            batch: the images that `batch_rows` names.  The last batch of a set is filled up to `recipe.batch_size` images.
            raw: use the weights themselves, even if there is an EMA.  By default the EMA is used if there is one.
        """

    def attention_maps(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return the attention weights of the last block, for the parameters that `evaluate` uses by default.

        The loop calls it only if `is_distributed` is False.

        Args:
            images: (N, H, W, C) uint8, not normalized.

        Returns:
            (N, heads, T, T) float32; row t has the weights that token t gives to all T tokens.
        """

    def save_weights(self, path: Path, *, raw: bool = False) -> None:
        """Write the weights as safetensors in the twin's own format, with the config and `metadata` in the header.

        `parity.save(..., force=True)` does that.  Every process calls this method, and the main process writes.  The file
        is replaced atomically: it has the old or the new content.

        Args:
            path: the file.
            raw: as for `evaluate`.

        Raises:
            InputError, OSError: the file cannot be written; the loop turns an OSError into a message.
        """

    def save_checkpoint(self, step: int, loop_state: LoopState) -> None:
        """Start to write a checkpoint to `folder`/`step`, and return while it is being written.

        A checkpoint has all that steps change: weights, optimizer state, EMA, the number of steps done, and whether a
        non-finite step has stopped the run; and `loop_state`.  A checkpoint that is not complete must never be taken for a
        complete one, whenever the process is killed.  The previous checkpoint is complete before this one is written.
        The checkpoint has the JSON of `loop_state.to_json`, and the loop does not change `loop_state` after the call.

        Of the checkpoints, the newest `recipe.keep` stay, and besides them the one with the best
        `loop_state.scores.last[train.loop.metrics.PRIMARY_METRIC[task]]` among those with a true `loop_state.is_evaluated`.
        NaN is never best, nor is an evaluation whose loss is not finite; of equal values, the earliest is best.

        A checkpoint for a step that already has one replaces it.  The old one stays until the new one is complete, whenever
        the process is killed: if it needs another name meanwhile, it is in the folder that
        `train.loop.checkpoint_folder.replaced_folder` returns, and `restore_checkpoint` finds it if the new one is not
        complete.

        Args:
            step: the number of steps done.

        Raises:
            InputError: this or an earlier checkpoint cannot be written, such as on a full disk.
        """

    def adopt(self, state: TrainingState, loop_state: LoopState, folder: Path) -> None:
        """Take over the training state of a checkpoint of another trainer, and write it to a complete checkpoint.

        Every process calls it.

        Args:
            state: the training state.
            loop_state: the state of the loop in the other checkpoint.
            folder: the folder for the checkpoint, `folder`/`state.step`; it is another one than the engine's own.

        Raises:
            ValueError: the state lacks an array of the run, or has one of another dtype.
            InputError: the checkpoint cannot be written.
        """

    def restore_checkpoint(
        self, step: int | None = None, *, check: CheckpointCheck | None = None
    ) -> RestoredCheckpoint | None:
        """Restore the newest checkpoint that can be read, or that of a step, written by any number of devices and any mesh.

        If `step` is None, a damaged checkpoint is moved to the folder `checkpoints-damaged` beside `folder`, a printed line
        says so, and the previous checkpoint is read.

        Args:
            step: the step whose checkpoint to restore; None for the newest that can be read.
            check: called with the step and the loop state of a checkpoint before its tensors are read; it raises InputError
                if the run must not resume from it.  None: every checkpoint is accepted.

        Returns:
            None if there is no checkpoint, or if that of `step` is missing or damaged.

        Raises:
            InputError: there are checkpoints and none can be read; or the newest is of a newer version of this package, or
                cannot be read for a reason other than its content, such as missing permission; or `check` raises it.
        """

    def profile(self, folder: Path | None) -> None:
        """Start the framework's profiler, which writes its trace into `folder`; None: stop it and write the trace."""

    def from_main(self, value: Any) -> Any:
        """Return the value that the main process gives; every process calls it.

        A network file system may show other processes an older state of a folder, from which they would decide otherwise.

        Args:
            value: a JSON value; only that of the main process counts.
        """

    def should_stop(self) -> bool:
        """Return whether to stop after this step because a process received SIGTERM; the same answer in every process.

        The loop calls it after each step in every process, so it may communicate.  With one process it returns False: the
        loop handles signals itself (`train.loop.interruption`).  With several processes, the engine handles SIGTERM from
        the moment when it is made; the loop does not, and turns Ctrl-C into a SIGTERM.
        """

    def synchronize(self) -> None:
        """Wait until all processes of the run have called this method."""

    def close(self) -> None:
        """Wait until everything is written; called once, also after an exception.

        Raises:
            InputError: a checkpoint cannot be written.
        """


class EngineFactory(Protocol):
    """A callable that makes the engine of a run, such as the engine's class."""

    def __call__(
        self,
        config: ViTConfig,
        recipe: Recipe,
        *,
        task: Task,
        learning_rate: Callable[[Any], Any],
        initial_weights: Checkpoint | None,
        folder: Path,
        metadata: Mapping[str, Any] | None = None,
        class_weights: NDArray[np.float64] | None = None,
        teacher: Teacher | None = None,
    ) -> Engine:
        """Return the engine, ready for its first step.

        Args:
            config: the model.
            recipe: the settings of the run; `recipe.task` may be None, use `task`.
            task: what is learnt.
            learning_rate: the learning rate as a function of the number of steps done before the step.  It takes a number
                or an array of a library with `__array_namespace__`, such as jax, also under tracing; not a `torch.Tensor`.
            initial_weights: the weights to start from, of this config, in any dtype and any format of `parity`; see
                `parity.to_jax` and `parity.to_torch`.  None: initialize them with the seed `recipe.seed`; not if
                `recipe.rng` is "shared", unless a checkpoint will be restored.
            folder: the absolute path of the folder for checkpoints; it may not exist yet.
            metadata: the keyword arguments `labels`, `preprocessing` and `task` of `parity.save`, for files of weights.
            class_weights: weights of the terms of the training loss, as `train.data.class_weights` returns them; None: 1.
            teacher: for knowledge distillation; None without.

        Raises:
            InputError: the devices cannot run the recipe, such as a mesh that does not match them or the batch.
        """
