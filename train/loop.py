"""The course of a run, for whichever twin's engine does the mathematics: steps, looks at the held-out images, saves."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, SupportsFloat

import numpy as np

from train.data import Batch, Feed
from train.interruption import Interruption
from train.metrics import LEADING, better, score
from train.progress import Display
from train.recipes import Recipe
from train.run import Run
from vit_spec import InputError

# Metrics are read this many steps late, so that a device need not wait for the host between two steps.
LAG = 2


class Diverged(RuntimeError):
    """The loss or a gradient is no finite number any more.  The message is one line: where, and what to do."""


class Engine(Protocol):
    """What a twin brings: a model, its optimizer and the devices they are on."""

    def step(self, batch: Batch) -> Mapping[str, SupportsFloat]:
        """Start one update; return loss, score, grad_norm and lr, which may still be on their way.

        From the first loss or gradient on that is not finite, no update changes anything.
        """

    def answer(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return the model's outputs (B, num_outputs) and each image's loss (B,)."""

    def save(self, path: Path) -> None:
        """Write the weights: completely, or not at all."""


@dataclass(frozen=True)
class Plan:
    """When things happen, in steps: `total` of them, `warmup` ahead of the cosine, `per_epoch`, and the looks."""

    total: int
    warmup: float
    per_epoch: float
    looks: frozenset[int]

    @classmethod
    def of(cls, recipe: Recipe, images: int) -> Self:
        """The plan of a recipe for so many training images."""
        per_epoch = images / recipe.batch_size
        total = max(1, round(recipe.epochs * per_epoch))
        looks = {round(k * recipe.eval_every * per_epoch) for k in range(1, int(recipe.epochs / recipe.eval_every) + 1)}
        return cls(total, recipe.warmup * total, per_epoch, frozenset(looks | {total}))


@dataclass
class Loop:
    """One run.  After `fit()`: `done` steps, the held-out metrics `last` and `best`, and whether Ctrl-C ended it."""

    engine: Engine
    recipe: Recipe
    plan: Plan
    train: Feed
    held_out: Feed
    classes: tuple[str, ...]
    run: Run
    display: Display

    def __post_init__(self) -> None:
        self.done, self.interrupted = 0, False
        self.last: dict[str, float] = {}
        self.best: dict[str, float] = {}
        self._window: list[dict[str, float]] = []  # metrics of the steps since the last record
        self._mean: dict[str, float] = {}  # the last record

    def fit(self) -> None:
        """Train to the end, or until Ctrl-C.

        Raises:
            Diverged: the loss or a gradient is not finite; the last weights saved stay.
            InputError: an image cannot be read; the weights are saved before.
        """
        r, pending = self.recipe, deque[tuple[int, Batch, Mapping[str, SupportsFloat]]]()
        batches = self.train.training(r.augment, seed=r.seed, first=0, last=self.plan.total)
        with Interruption() as stop, self.display:
            try:
                for step, batch in enumerate(batches):
                    pending.append((step, batch, self.engine.step(batch)))
                    stopping = stop.requested  # asked once: what comes later waits for the next step
                    pause = stopping or step + 1 in self.plan.looks
                    while len(pending) > (0 if pause else LAG):
                        self._settle(*pending.popleft())
                    if pause:
                        self._look(stop)
                    if stopping:
                        break
            except InputError as error:
                if not self.done:
                    raise
                self.engine.save(self.run.weights)
                raise InputError(f"{error}; what was learnt in {self.done} steps is in {self.run.weights}") from None
            self.interrupted = stop.requested

    def _settle(self, step: int, batch: Batch, arriving: Mapping[str, SupportsFloat]) -> None:
        """Wait for a step's metrics, show and record them."""
        metrics = {name: float(value) for name, value in arriving.items()}
        if not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["grad_norm"]):
            raise self._diverged(step, batch, metrics)
        self.done = step + 1
        self._window.append(metrics)
        self.display.step(self.done, self._epoch, metrics)
        if self.done % self.recipe.log_every == 0 or self.done == self.plan.total:
            mean = {name: float(np.mean([m[name] for m in self._window])) for name in metrics}
            self._mean = mean | {"lr": metrics["lr"]}
            self.run.log("train", self.done, self._epoch, self._mean)
            self._window.clear()

    def _look(self, stop: Interruption) -> None:
        """Save the weights, and judge them by the held-out images unless there is no time for it."""
        self.engine.save(self.run.weights)
        all_outputs, all_losses = [], []
        for batch, count in self.held_out.evaluation():
            if stop.requested:
                return
            outputs, losses = self.engine.answer(batch)
            all_outputs.append(outputs[:count])
            all_losses.append(losses[:count])
        loss = float(np.concatenate(all_losses).mean(dtype=np.float64))
        found = score(self.recipe.task, np.concatenate(all_outputs), self.held_out.targets, self.classes)
        self.last = {"loss": loss, **found}
        self.run.log("held_out", self.done, self._epoch, self.last)
        self.display.looked(self.done, self._epoch, self._mean, self.last)
        leading = LEADING[self.recipe.task]
        if not self.best or better(leading, self.last[leading], than=self.best[leading]):
            self.best = self.last
            self.engine.save(self.run.best)

    def _diverged(self, step: int, batch: Batch, metrics: dict[str, float]) -> Diverged:
        what = "loss" if not math.isfinite(metrics["loss"]) else "grad_norm"
        if not self.run.weights.exists():
            self.engine.save(self.run.weights)  # the weights as they were ahead of this step
        names = ", ".join(self.train.examples.names[row] for row in batch.rows[:3])
        return Diverged(
            f"{what} is {metrics[what]} at step {step + 1} (images {names}, ...): lower --optimizer.lr, or look at the "
            f"images; the last good weights are in {self.run.weights}"
        )

    @property
    def _epoch(self) -> float:
        return self.done / self.plan.per_epoch
