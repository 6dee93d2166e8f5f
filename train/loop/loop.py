"""The training loop: steps, evaluations and checkpoints of a run, with the engine of either framework."""

import math
import signal
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsFloat

import numpy as np
from numpy.typing import NDArray

from train.data.batches import Batch, DataLoader
from train.loop import hand_over
from train.loop.attention_maps import patch_attention
from train.loop.engine import Engine, EvalOutput
from train.loop.interruption import Interruption
from train.loop.lineage import TRAINER
from train.loop.loop_state import LoopState, Scores, equal_metrics
from train.loop.metrics import PRIMARY_METRIC, compute_metrics, is_better
from train.loop.pictures import MAX_IMAGES, image_grid, overlay_attention, training_images
from train.loop.profile import Profile
from train.loop.progress import ProgressDisplay
from train.loop.run_folder import RunFolder
from train.loop.saved_run import CHECKPOINTS, checkpoints_folder
from train.loop.schedule import Schedule
from train.loop.settings import changes_since, describe_other_settings
from train.loop.weight_files import WeightFiles
from train.loop.write_files import folder_gone_error
from train.recipes import Recipe, Task
from train.recipes.fields import format_value
from vit_spec import InputError
from vit_spec.printable import escape_surrogates

METRICS_DELAY = 2  # steps by which metrics are read late, so that the devices need not wait for the host between two steps
# Steps in a row that `--non-finite skip` skips: single bad batches are fewer, and no later step can mend weights that are
# the cause.  The docstring of `Recipe.non_finite` has the number too.
MAX_SKIPPED = 20

Arrays = tuple[np.ndarray, ...]


class Diverged(RuntimeError):
    """A loss or the gradient norm is not finite.  The message is one line: at which step, and what to do."""


@dataclass
class Loop:
    """One run.

    train, held_out: the images; classes: names of the classes, labels or values.
    stop: whether Ctrl-C or SIGTERM asked to stop.

    After `fit`:
    done: number of steps done.
    state: the metrics, and what else a checkpoint has.
    interrupted: the number of the signal that ended the run, or 0.
    """

    engine: Engine
    recipe: Recipe
    task: Task
    schedule: Schedule
    train: DataLoader
    held_out: DataLoader
    classes: tuple[str, ...]
    run: RunFolder
    display: ProgressDisplay
    stop: Interruption

    def __post_init__(self) -> None:
        self.done, self.interrupted = 0, 0
        self.state = LoopState()
        self._weight_files = WeightFiles(self.engine, self.run, self.display, self.state.best_files)
        self._pending = deque[tuple[int, Batch, Mapping[str, SupportsFloat]]]()  # steps whose metrics are not read yet
        self._profile = Profile(self.engine, self.run.path / "profile", self.recipe.profile)
        self._restored_notes: list[str] | None = None  # lines about the checkpoint; None if there was none
        self._saved_step = -1  # of the newest checkpoint

    @property
    def is_stopped_early(self) -> bool:
        """Whether the run has ended before its last step, because `recipe.patience` evaluations were not better."""
        return 0 < self.recipe.patience <= self.state.evaluations_since_best and self.done < self.schedule.total

    def restore(self) -> None:
        """Restore the newest checkpoint and the records up to it, if there is one; call it once, before `fit`.

        Raises:
            InputError: the run cannot resume from it, or a file cannot be written.
        """
        self.engine.synchronize()  # until the main process has settled the folder
        handed_over = None
        if self.run.may_change:
            folder = checkpoints_folder(self.run.path)
            handed_over = hand_over.hand_over(self.engine, folder, self.task, self._check_checkpoint)
        if (restored := self.engine.restore_checkpoint(check=self._check_checkpoint)) is None:
            self.run.resume_at(0, 0.0, is_evaluated=False)
            return
        self._weight_files.set_has_checkpoint()
        self.done, state, note = restored
        assert state is not None  # `_check_checkpoint` refuses such a checkpoint
        if self.done < self.schedule.offset_from:
            raise InputError(
                f"the batch size has changed at step {self.schedule.offset_from}, whose checkpoint is damaged: give the "
                f"same command again, and it changes at step {self.done}, from which the run resumes"
            )
        if self.done > self.schedule.total:
            epochs = format_value(self.recipe.epochs)
            raise InputError(
                f"--epochs {epochs} are {self.schedule.total:,} steps, and the run has done {self.done:,}: give more"
            )
        changes = changes_since(self.run.settings, self.done, state.settings)
        if any(each["changes"].keys() - {TRAINER} for each in changes):
            state.evaluations_since_best = 0  # else a run that has stopped early could not go on with another recipe
        self._saved_step, self.state = self.done, state
        self._weight_files.recorded = state.best_files
        self.run.resume_at(self.done, state.seconds, is_evaluated=state.is_evaluated)
        self._restored_notes = handed_over.describe(self.engine.trainer) if handed_over else []
        self._restored_notes += filter(None, [note])

    def _check_checkpoint(self, step: int, state: LoopState | None) -> None:
        """Raise InputError if the run must not resume from a checkpoint, given its loop state."""
        where = f"the checkpoint of step {step} in {self.run.path / CHECKPOINTS}"
        remedy = "move that checkpoint away to resume from an older one, or give --run a new folder"
        if state is None:
            raise InputError(f"{where} has metadata that no run writes: {remedy}")
        if (run_id := self.run.id) and state.run_id not in ("", run_id):
            raise InputError(f"{where} is another run's (id {state.run_id}; config.json has {run_id}): {remedy}")
        if difference := describe_other_settings(self.run.settings, step, state.settings):
            raise InputError(
                f"{where} has other settings than config.json: {difference}; put config.json back as it was, or {remedy}"
            )

    def fit(self) -> None:
        """Train from the state that `restore` has left to the end, or until a signal asks to stop.

        The end is the last step of the schedule, or earlier if `is_stopped_early`.

        Raises:
            Diverged: the loss or the gradient norm is not finite, and the recipe does not skip such steps, or has skipped
                `MAX_SKIPPED` in a row; or the held-out loss at the end is not finite.
            InputError: an image cannot be read, or a file cannot be written.  A checkpoint is saved first, if possible.
        """
        if self._restored_notes is not None:
            self._resume(self._restored_notes)
        training = self.train.training_batches(
            seed=self.recipe.seed,
            first_step=self.done,
            end_step=self.schedule.total,
            image_offset=self.schedule.image_offset,
        )
        with self.display, closing(training) as batches:
            try:
                if self._repeat_cut_evaluation() and not self.is_stopped_early:
                    self._train(batches)
            except InputError as error:
                self._finish_steps(delay=0)
                if self.done == self._saved_step or not self.done or self.engine.is_distributed:
                    raise
                self._save_checkpoint()
                raise InputError(f"{error}; {self.done} steps are saved: give the same --run to resume") from None
            finally:
                self._profile.close()
                self.engine.close()
        self._weight_files.set_has_checkpoint()
        last = self.state.scores.last
        if not self.interrupted and last and not math.isfinite(last["loss"]):
            raise Diverged(
                f"the held-out loss is {last['loss']} after step {self.done}, the last one, so the weights in "
                f"{self.run.weights} are broken: {self._restart_advice}"
            )

    def _repeat_cut_evaluation(self) -> bool:
        """Evaluate if a signal cut the evaluation of the restored step short; return False if one does so again."""
        if self.done not in self.schedule.eval_steps or self.state.is_evaluated:
            return True
        self.state.is_evaluated = self._evaluate()
        if self.state.is_evaluated:
            self._saved_step = -1
            self._save_checkpoint()
        else:
            self.interrupted = self.stop.requested
        return self.state.is_evaluated

    def _train(self, batches: Iterator[Batch]) -> None:
        """Train to the last step, until a signal asks to stop, or until evaluations are no longer better."""
        first_step = self.done
        for step, batch in enumerate(batches, first_step):
            if self._profile.begins_at(step + 1):
                self._finish_steps(delay=0)
                self._profile.begin()
                if step > first_step:  # the first step compiles: the throughput is measured from its end
                    self.display.restart_throughput(self.done)
            self._pending.append((step, batch, self.engine.step(batch)))
            if self.run.has_tensorboard and step in (0, self.schedule.total - 1):
                shown = training_images(batch, self.recipe.augment.repeats)[:MAX_IMAGES]
                self.run.log_image("shown", step + 1, image_grid(shown))
            # Read once, before the delay is chosen: all pending steps are finished if the run stops.  A later signal is
            # seen after the next step.
            stopping = self.stop.requested or signal.SIGTERM * self.engine.should_stop()
            is_eval_step, is_save_step = step + 1 in self.schedule.eval_steps, step + 1 in self.schedule.save_steps
            is_awaited = stopping or step == first_step or is_eval_step or is_save_step or self._profile.ends_at(step + 1)
            self._finish_steps(delay=0 if is_awaited else METRICS_DELAY)
            if self._profile.ends_at(step + 1):
                self._profile.close()
                self.display.restart_throughput(self.done)
            self.state.is_evaluated = is_eval_step and not stopping and self._evaluate()
            if is_eval_step and not self.state.is_evaluated:
                stopping = stopping or self.stop.requested  # the signal that cut the evaluation short
            if is_eval_step or is_save_step or stopping:
                self._save_checkpoint()
                self.display.restart_throughput(self.done)
            if stopping:
                self.interrupted = int(stopping)
            if stopping or self.is_stopped_early:
                break

    # Metrics of a step -------------------------------------------------------------------------------------------

    def _finish_steps(self, *, delay: int) -> None:
        """Finish the pending steps but the newest `delay`."""
        while len(self._pending) > delay:
            self._finish_step(*self._pending.popleft())

    def _finish_step(self, step: int, batch: Batch, arriving: Mapping[str, SupportsFloat]) -> None:
        """Wait for the metrics of a step, then display and record them."""
        metrics = {name: float(value) for name, value in arriving.items()}
        self._add_unreadable(self.train, batch.rows[~batch.readable])
        self.done = step + 1
        if not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["grad_norm"]):
            if self.recipe.non_finite == "stop":
                self.done = step
                raise Diverged(f"{self._not_finite(step, batch, metrics)}: {self._remedy()}")
            self.state.skipped += 1
            self.state.skipped_in_a_row += 1
            self.display.print_line(f"{self._not_finite(step, batch, metrics)}; the step is skipped")
            if self.state.skipped_in_a_row == MAX_SKIPPED:
                raise Diverged(f"{self._not_finite(step, batch, metrics)}: {self._remedy_after_skips()}")
        else:
            self.state.skipped_in_a_row = 0
            self.state.recent_metrics.append(metrics)
        self.display.step(self.done, self._epoch, metrics, pending=len(self._pending))
        self.state.mean_metrics = {}
        if self.done % self.recipe.log_every == 0 or self.done == self.schedule.total:
            self.state.mean_metrics = _mean(self.state.recent_metrics) | {"lr": metrics["lr"]}
            self.run.log("train", self.done, self._epoch, self.state.mean_metrics)
            self.state.recent_metrics.clear()

    def _not_finite(self, step: int, batch: Batch, metrics: Mapping[str, float]) -> str:
        what = "loss" if not math.isfinite(metrics["loss"]) else "grad_norm"
        names = ", ".join(self.train.examples.names[row] for row in batch.rows[:3])
        return f"{what} is {metrics[what]} at step {step + 1} (images {names}, ...)"

    def _remedy(self) -> str:
        where = f"the weights of step {self._saved_step} are in {self.run.weights}"
        if self._saved_step < 0:
            # The engine still has the weights before this step: neither this step nor a later one changes them.
            self._weight_files.write_newest()
            where = f"the weights before this step are in {self.run.weights}"  # they may be the cause
        return f"check the images, resume with --non-finite skip, or start again with a lower --optimizer.lr; {where}"

    def _remedy_after_skips(self) -> str:
        return f"{MAX_SKIPPED} steps in a row are skipped, so the weights are probably the cause: {self._restart_advice}"

    @property
    def _restart_advice(self) -> str:
        best = f", or --init {self.run.path} from its best weights" if self.state.scores.best else ""
        return f"start again with a lower --optimizer.lr{best}"

    # Evaluation and checkpoints ----------------------------------------------------------------------------------

    def _evaluate(self) -> bool:
        """Evaluate the weights on the held-out set and save the best; return False if a signal cut it short."""
        self.state.is_evaluated = False  # stays False if a file cannot be written: the resumed run evaluates again
        if (evaluated := self._run_evaluation()) is None:
            return False
        results, first_images = evaluated
        self._log_evaluation(results)
        if self.run.has_tensorboard and not self.engine.is_distributed and math.isfinite(self.state.scores.last["loss"]):
            maps = patch_attention(self.engine.attention_maps(first_images), self.train.config)
            self.run.log_image("attention", self.done, image_grid(overlay_attention(first_images, maps)))
        self._save_if_best()
        return True

    def _run_evaluation(self) -> tuple[list[list[Arrays]], NDArray[np.uint8]] | None:
        """Return the results of each batch of the held-out set, and its first images; None if a signal cut it short.

        The results are those of the EMA, then those of the weights themselves; without an EMA, of the weights alone.
        """
        raw_flags = (False, True) if self.engine.has_ema else (False,)  # values of `raw`
        pending = deque[list[EvalOutput]]()  # results that the devices may still compute
        results: list[list[Arrays]] = [[] for _ in raw_flags]
        first_images = np.empty(0, np.uint8)

        def collect() -> None:
            for arrays, evaluated in zip(results, pending.popleft(), strict=True):
                arrays.append(tuple(map(np.asarray, evaluated)))

        for batch in self.held_out.evaluation_batches():
            if self.stop.requested:
                return None
            first_images = first_images if len(first_images) else batch.images[:MAX_IMAGES]
            pending.append([self.engine.evaluate(batch, raw=raw) for raw in raw_flags])
            while len(pending) > METRICS_DELAY:
                collect()
        while pending:
            collect()
        *_, readable = zip(*results[0], strict=True)  # of all processes, where a batch has the images of one
        self._add_unreadable(self.held_out, np.flatnonzero(~np.concatenate(readable)[: len(self.held_out.examples)]))
        return results, first_images

    def _log_evaluation(self, results: list[list[Arrays]]) -> None:
        """Record and print the metrics of an evaluation, from what `_run_evaluation` returns."""
        scores, raw = self.state.scores, self.state.scores_raw
        scores.last = self._compute_metrics(results[0])
        self.run.log("held_out", self.done, self._epoch, scores.last)
        if self.engine.has_ema:
            raw.last = self._compute_metrics(results[1])
            self.run.log("held_out_raw", self.done, self._epoch, raw.last)
        training = self.state.mean_metrics or _mean(self.state.recent_metrics)
        self.display.print_evaluation(self.done, self._epoch, training, scores.last, raw.last)
        for which, metrics in {"held-out loss": scores.last, "held-out loss of the raw weights": raw.last}.items():
            if metrics and not math.isfinite(metrics["loss"]):
                self.display.print_line(
                    f"the {which} is {metrics['loss']}: these weights are not the best, whatever their "
                    f"{PRIMARY_METRIC[self.task]}"
                )

    def _save_if_best(self) -> None:
        """Write the weights of the newest evaluation to the files of best weights if they are the best."""
        scores, raw = self.state.scores, self.state.scores_raw
        is_better = self._is_better(scores)
        if is_better:
            self._weight_files.write_best(self.run.best, self.done)
            # Set last, so that the checkpoint saved after a failed write does not name these as best.
            scores.best = scores.last
        if self.engine.has_ema and self._is_better(raw):
            self._weight_files.write_best(self.run.best_raw, self.done, raw=True)
            raw.best = raw.last
        if is_better:
            self.state.evaluations_since_best = 0
        elif not self._is_undefined(scores):
            self.state.evaluations_since_best += 1

    def _compute_metrics(self, results: list[Arrays]) -> dict[str, float]:
        """Return the metrics of the held-out set, from the results of each batch."""
        count = len(self.held_out.examples)
        outputs, losses, readable = (np.concatenate(parts)[:count] for parts in zip(*results, strict=True))
        loss = float(losses[readable].mean(dtype=np.float64))
        return {
            "loss": loss,
            **compute_metrics(self.task, outputs[readable], self.held_out.targets[readable], self.classes),
        }

    def _is_better(self, scores: Scores) -> bool:
        """Return whether the newest metrics are better than the best.

        Those whose loss is not finite, or whose primary metric is NaN, never are.
        """
        name = PRIMARY_METRIC[self.task]
        is_finite = math.isfinite(scores.last["loss"])
        return is_finite and is_better(name, scores.last[name], than=scores.best.get(name, math.nan))

    def _is_undefined(self, scores: Scores) -> bool:
        """Return whether the newest metrics cannot tell how good the weights are: finite loss, primary metric NaN."""
        return math.isfinite(scores.last["loss"]) and math.isnan(scores.last[PRIMARY_METRIC[self.task]])

    def _save_checkpoint(self) -> None:
        """Start to write a checkpoint of the engine's state and the loop's, and write the weights."""
        if self._saved_step == self.done:
            return
        is_first = self._saved_step < 0
        self._saved_step = self.done  # before writing: a write that fails is not tried twice
        # Orbax would make the folder again.  Other processes may see files of the main one late.
        if self.engine.is_main and (gone := folder_gone_error(self.run.path)):
            raise gone
        self.state.run_id, self.state.seconds = self.run.id, self.run.seconds
        self.state.settings = self.run.settings
        self.state.num_records = self.run.count_records(self.done, is_evaluated=self.state.is_evaluated)
        # A copy: the engine may write it after the state has changed.
        self.engine.save_checkpoint(self.done, deepcopy(self.state))
        if not is_first:
            self._weight_files.set_has_checkpoint()  # the previous checkpoint is complete when this one begins
        self._weight_files.write_newest()

    def _resume(self, notes: list[str]) -> None:
        """Say from where the run resumes, and make its weight files agree with the restored checkpoint.

        notes: lines about the checkpoint.
        """
        self.display.print_line(f"resuming from step {self.done:,} of {self.schedule.total:,}")
        if (steps := self.recipe.profile) and steps[1] <= self.done:
            self.display.print_line(
                f"--profile {steps[0]} {steps[1]}: the run has done these steps already, and can profile only later ones"
            )
        if (missing := self.state.num_records - len(self.run.records)) > 0:
            self.display.print_line(
                f"{self.run.path / 'metrics.jsonl'} lacks {missing:,} of the {self.state.num_records:,} records up to this "
                "step: it was cut or replaced, and the curves lack them too"
            )
        for note in notes:
            self.display.print_line(note)
        # The files may have other weights: the run ended before they were written, or it resumes from an older checkpoint.
        self._weight_files.write_newest()
        self._restore_best(self.run.best)
        self._restore_best(self.run.best_raw, raw=True)

    def _restore_best(self, path: Path, *, raw: bool = False) -> None:
        """Restore a file of best weights; forget their metrics if they are neither in that file nor in a checkpoint.

        path, raw: see `WeightFiles.restore_best`.
        """

        def scores_of(state: LoopState) -> Scores:
            return state.scores_raw if raw else state.scores

        def is_best(state: LoopState) -> bool:
            return state.is_evaluated and equal_metrics(scores_of(state).last, scores.best)

        scores = scores_of(self.state)
        if scores.best and not self._weight_files.restore_best(
            path, self.done, is_newest=is_best(self.state), is_best=is_best, raw=raw
        ):
            scores.best = {}

    @property
    def is_readable_held_out(self) -> NDArray[np.bool_]:
        """Which held-out images could be read, (images,): metrics are of these."""
        unreadable = set(self.state.unreadable)
        return np.array([escape_surrogates(name) not in unreadable for name in self.held_out.examples.names])

    def _add_unreadable(self, loader: DataLoader, rows: NDArray[np.integer]) -> None:
        """Record the names of images that could not be read, as the JSON of a checkpoint can hold them."""
        if names := {escape_surrogates(loader.examples.names[row]) for row in rows}:
            self.state.unreadable = sorted(names.union(self.state.unreadable))

    @property
    def _epoch(self) -> float:
        return self.schedule.epoch(self.done)


def _mean(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Return the means of the metrics of several steps; {} of none."""
    return {name: float(np.mean([each[name] for each in metrics])) for name in (metrics[0] if metrics else ())}
