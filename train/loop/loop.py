"""The course of a run, for whichever twin's engine does the mathematics: steps, looks at the held-out images, saves."""

import math
import signal
from collections import deque
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, SupportsFloat

import numpy as np

from train.data.batches import Batch, Feed
from train.loop.attention_maps import looked_at
from train.loop.engine import Engine, Evaluated, Note
from train.loop.interruption import Interruption
from train.loop.metrics import LEADING, better, score
from train.loop.pictures import SOME, marked, sheet, shown
from train.loop.progress import Display
from train.loop.run_folder import STATES, Run, writing
from train.recipes import Recipe, Task
from train.recipes.durations import steps
from train.recipes.schedule import learning_rate
from vit_spec import InputError

# Metrics are read this many steps late, so that a device need not wait for the host between two steps.
LAG = 2
Arrays = tuple[np.ndarray, ...]

MOST = 10**9  # steps: more, and what was meant is another number


class Diverged(RuntimeError):
    """The loss or a gradient is no finite number any more.  The message is one line: where, and what to do."""


@dataclass(frozen=True)
class Plan:
    """When things happen, in steps: `total` of them, `per_epoch`, the looks and saves, and the learning rate's bends."""

    total: int
    per_epoch: float
    warmup: float
    cooldown: float
    looks: frozenset[int]
    saves: frozenset[int]

    @classmethod
    def of(cls, recipe: Recipe, images: int) -> Self:
        """The plan of a recipe for so many training images.

        Raises:
            InputError: a duration that is not understood, or a run without end.
        """
        length = partial(steps, batch_size=recipe.batch_size, images=images)
        total = max(1, round(length(recipe.epochs, alone="epochs")))
        if total > MOST:
            raise InputError(f"--epochs {recipe.epochs} are {total:.0e} steps: give fewer than {MOST:.0e}")
        if recipe.profile and recipe.profile[1] > total:
            first, last = recipe.profile
            raise InputError(f"--profile {first} {last} goes beyond the run, which has {total} steps: give steps of these")

        def every(duration: float | str) -> frozenset[int]:
            interval = max(1.0, length(duration, alone="epochs", total=total))
            return frozenset({max(1, round(k * interval)) for k in range(1, int(total / interval) + 1)} | {total})

        return cls(
            total,
            images / recipe.batch_size,
            length(recipe.warmup, alone="share", total=total),
            length(recipe.cooldown, alone="share", total=total),
            every(recipe.eval_every),
            every(recipe.save_every),
        )

    @property
    def first_step(self) -> Self:
        """The plan of one step at the full rate, with a look and a save behind it."""
        return replace(self, total=1, warmup=0.0, cooldown=0.0, looks=frozenset({1}), saves=frozenset({1}))

    def rate(self, recipe: Recipe, step: Any) -> Any:
        """The learning rate of the update that follows `step` others."""
        return learning_rate(
            step,
            peak=recipe.optimizer.lr,
            warmup=self.warmup,
            total=self.total,
            shape=recipe.decay,
            cooldown=self.cooldown,
        )


@dataclass
class Loop:
    """One run.  After `fit()`: `done` steps, the held-out metrics `last` and `best`, the signal that ended it or 0.

    Where the engine averages, `last` and `best` are of the running mean of the weights; `last_raw` and `best_raw` are of
    the raw weights, which are evaluated and saved beside it.  Elsewhere these two are empty.
    """

    engine: Engine
    recipe: Recipe
    task: Task
    plan: Plan
    train: Feed
    held_out: Feed
    classes: tuple[str, ...]
    run: Run
    display: Display
    stop: Interruption

    def __post_init__(self) -> None:
        self.done, self.interrupted = 0, 0
        self.last: dict[str, float] = {}
        self.best: dict[str, float] = {}
        self.last_raw: dict[str, float] = {}
        self.best_raw: dict[str, float] = {}
        self.unread: set[str] = set()  # images that could not be read
        self.skipped = 0  # steps left out, since a number in them was not finite
        self._window: list[dict[str, float]] = []  # metrics of the steps since the last record
        self._mean: dict[str, float] = {}  # the last record
        self._saved = -1  # the step of the last checkpoint
        self._looked = False  # whether `last` is of the weights as they are

    def fit(self) -> None:
        """Train to the end, or until a signal asks for a stop; go on from the newest checkpoint where there is one.

        Raises:
            Diverged: the loss or a gradient is not finite; the last checkpoint stays.
            InputError: an image cannot be read, or a file not written; the state is saved before, as far as it can be.
        """
        pending = deque[tuple[int, Batch, Mapping[str, SupportsFloat]]]()
        first, last = self.recipe.profile or (0, 0)
        tracing = False
        self._resume()
        training = self.train.training(seed=self.recipe.seed, first=self.done, last=self.plan.total)
        with self.display, closing(training) as batches:
            try:
                if self.done in self.plan.looks and not self._looked:  # a signal kept the run from it
                    self._looked = self._look()
                    if not self._looked:
                        self.interrupted = self.stop.requested
                        return
                    self._saved = -1
                    self._save()
                for step, batch in enumerate(batches, self.done):
                    if step + 1 == first:
                        self.engine.profile(self.run.path / "profile")
                        tracing = True
                    pending.append((step, batch, self.engine.step(batch)))
                    if self.run.shows and step in (0, self.plan.total - 1):
                        self.run.picture("shown", step + 1, sheet(shown(batch, self.recipe.augment.repeats)[:SOME]))
                    # Asked once, while all steps can still be waited for: what comes later waits for the next step.
                    stopping = self.stop.requested or signal.SIGTERM * self.engine.preempted()
                    look, save = step + 1 in self.plan.looks, step + 1 in self.plan.saves
                    late = 0 if stopping or look or save or step + 1 == last else LAG
                    while len(pending) > late:
                        self._settle(*pending.popleft(), alone=len(pending) <= late)
                    if tracing and step + 1 == last:
                        self.engine.profile(None)
                        tracing = False
                    self._looked = look and not stopping and self._look()
                    if look and not self._looked:
                        stopping = stopping or self.stop.requested  # which cut the look short
                    if look or save or stopping:
                        self._save()
                        self.display.goes_on(self.done)
                    if stopping:
                        self.interrupted = int(stopping)
                        break
            except InputError as error:
                while pending:
                    self._settle(*pending.popleft())
                if self.done == self._saved or not self.done or self.engine.distributed:
                    raise
                self._save()
                raise InputError(f"{error}; {self.done} steps are saved: the same --run goes on from there") from None
            finally:
                if tracing:
                    self.engine.profile(None)
                self.engine.close()

    # What one step leaves ----------------------------------------------------------------------------------------

    def _settle(self, step: int, batch: Batch, arriving: Mapping[str, SupportsFloat], *, alone: bool = True) -> None:
        """Wait for a step's metrics, show and record them; alone: see `Display.step`."""
        metrics = {name: float(value) for name, value in arriving.items()}
        self.unread |= {self.train.examples.names[row] for row in batch.rows[~batch.read]}
        self.done = step + 1
        if not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["grad_norm"]):
            if self.recipe.non_finite == "stop":
                self.done = step
                raise Diverged(f"{self._not_finite(step, batch, metrics)}: {self._remedy()}")
            self.skipped += 1
            self.display.say(f"{self._not_finite(step, batch, metrics)}; the step is left out")
        else:
            self._window.append(metrics)
        self.display.step(self.done, self._epoch, metrics, alone=alone)
        if self.done % self.recipe.log_every == 0 or self.done == self.plan.total:
            mean = {name: float(np.mean([m[name] for m in self._window])) for name in metrics if self._window}
            self._mean = mean | {"lr": metrics["lr"]}
            self.run.log("train", self.done, self._epoch, self._mean)
            self._window.clear()

    def _not_finite(self, step: int, batch: Batch, metrics: Mapping[str, float]) -> str:
        what = "loss" if not math.isfinite(metrics["loss"]) else "grad_norm"
        names = ", ".join(self.train.examples.names[row] for row in batch.rows[:3])
        return f"{what} is {metrics[what]} at step {step + 1} (images {names}, ...)"

    def _remedy(self) -> str:
        where = f"the weights of step {self._saved} are in {self.run.weights}"
        if self._saved < 0:
            self._write_weights()  # as they were ahead of this step: from then on nothing moved
            where = f"the last good weights are in {self.run.weights}"
        return f"look at the images, go on with --non-finite skip, or begin anew with a lower --optimizer.lr; {where}"

    # Looking and saving ------------------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Judge the weights by the held-out images and keep the best; return False where a signal left no time for it."""
        kinds = (False, True) if self.engine.averages else (False,)  # whether raw weights are used
        pending = deque[list[Evaluated]]()  # results that the device may still compute
        found: list[list[Arrays]] = [[] for _ in kinds]
        seen = np.empty(0, np.uint8)  # the first images, for a picture

        def settle() -> None:
            for arrays, evaluated in zip(found, pending.popleft(), strict=True):
                arrays.append(tuple(map(np.asarray, evaluated)))

        for batch in self.held_out.evaluation():
            if self.stop.requested:
                return False
            seen = seen if len(seen) else batch.images[:SOME]
            pending.append([self.engine.evaluate(batch, raw=raw) for raw in kinds])
            while len(pending) > LAG:
                settle()
            self.unread |= {self.held_out.examples.names[row] for row in batch.rows[~batch.read]}
        while pending:
            settle()
        self.last = self._scored(found[0])
        self.run.log("held_out", self.done, self._epoch, self.last)
        if self.engine.averages:
            self.last_raw = self._scored(found[1])
            self.run.log("held_out_raw", self.done, self._epoch, self.last_raw)
        self.display.looked(self.done, self._epoch, self._mean, self.last, self.last_raw)
        if self.run.shows and not self.engine.distributed:
            maps = looked_at(self.engine.attention(seen), self.train.config)
            self.run.picture("attention", self.done, sheet(marked(seen, maps)))
        if self._improves(self.last, self.best):
            self.best = self.last
            with writing(self.run.best):
                self.engine.save_weights(self.run.best)
        if self.engine.averages and self._improves(self.last_raw, self.best_raw):
            self.best_raw = self.last_raw
            with writing(self.run.best_raw):
                self.engine.save_weights(self.run.best_raw, raw=True)
        return True

    def _scored(self, found: list[Arrays]) -> dict[str, float]:
        """Return the metrics of all held-out images, from the results of each batch."""
        count = len(self.held_out.examples)
        outputs, losses, read = (np.concatenate(parts)[:count] for parts in zip(*found, strict=True))
        loss = float(losses[read].mean(dtype=np.float64))
        return {"loss": loss, **score(self.task, outputs[read], self.held_out.targets[read], self.classes)}

    def _improves(self, metrics: dict[str, float], best: dict[str, float]) -> bool:
        leading = LEADING[self.task]
        return not best or better(leading, metrics[leading], than=best[leading])

    def _write_weights(self) -> None:
        """Write the newest weights: the running mean, and the raw ones too, where the engine averages."""
        with writing(self.run.weights):
            self.engine.save_weights(self.run.weights)
        if self.engine.averages:
            with writing(self.run.weights_raw):
                self.engine.save_weights(self.run.weights_raw, raw=True)

    def _save(self) -> None:
        """Begin a checkpoint of the state and of what is known of the run so far, and write the weights."""
        if self._saved == self.done:
            return
        self._saved = self.done  # first of all: what cannot be written is not tried twice
        note = {
            "last": self.last,
            "looked": self._looked,
            "best": self.best,
            "last_raw": self.last_raw,
            "best_raw": self.best_raw,
            "window": list(self._window),  # written later, when the window is another
            "mean": self._mean,
            "unread": sorted(self.unread),
            "skipped": self.skipped,
            "seconds": self.run.seconds,
        }
        self.engine.save_checkpoint(self.done, note)
        self._write_weights()

    def _resume(self) -> None:
        if (found := self.engine.restore()) is None:
            self.run.go_on(0, 0.0)
            return
        self.done, note = found
        missing: Note = {"last_raw": {}, "best_raw": {}}  # from older notes
        note = missing | note if isinstance(note, dict) else {}
        if not _is_of_a_run(note, LEADING[self.task]):
            raise InputError(
                f"the note of the checkpoint of step {self.done} in {self.run.path / STATES} is not what a run writes: "
                "put that checkpoint aside to go on from an older one, or give --run a new folder"
            )
        self._saved, self.skipped, self.unread = self.done, note["skipped"], set(note["unread"])
        self.last, self.best, self._window, self._mean = (note[name] for name in ("last", "best", "window", "mean"))
        self.last_raw, self.best_raw, self._looked = note["last_raw"], note["best_raw"], note["looked"]
        self.run.go_on(self.done, note["seconds"])
        self.display.say(f"going on from step {self.done:,} of {self.plan.total:,}")
        if "remark" in note:
            self.display.say(note["remark"])

    @property
    def _epoch(self) -> float:
        return self.done / self.plan.per_epoch


def _is_of_a_run(note: Note, leading: str) -> bool:
    """Whether a note has what `Loop` writes, each of its type: its file may have been damaged, or be somebody else's."""
    named = [note.get(name) for name in ("last", "best", "last_raw", "best_raw", "mean")]
    window, unread = note.get("window"), note.get("unread")
    if not isinstance(window, list) or not isinstance(unread, list) or not all(isinstance(name, str) for name in unread):
        return False
    metrics = [each for each in (*named, *window) if isinstance(each, dict)]
    return (
        len(metrics) == len(named) + len(window)
        and all(type(value) in (int, float) for each in metrics for value in each.values())
        and all(leading in each for each in (note["best"], note["best_raw"]) if each)
        and (type(note.get("skipped")), type(note.get("looked"))) == (int, bool)
        and type(note.get("seconds")) in (int, float)
        and math.isfinite(note["seconds"])
    )
