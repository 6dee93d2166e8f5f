"""The schedule of a run: the steps at which it evaluates, saves checkpoints and changes its learning rate."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from train.recipes import Recipe
from train.recipes.durations import duration_in_steps, parse_duration
from train.recipes.fields import format_value
from train.recipes.schedule import learning_rate
from vit_spec import InputError

MAX_STEPS = 10**9  # of a run: a larger number is taken for a mistake


@dataclass(frozen=True)
class Schedule:
    """The steps of a run at which something happens.  All fields count steps.

    total: steps of the run.
    steps_per_epoch: training images / batch size, not rounded.
    warmup, cooldown: lengths of the learning rate's rise and of its final fall, not rounded.
    eval_steps, save_steps: numbers of steps done after which to evaluate and to save a checkpoint; both have `total`.
    image_offset: the training images that the steps so far have had, less those that they would have had with the present
        batch size.  It is 0 unless a resumed run has changed its batch size.
    step_offset: the same in steps of the present batch size, not rounded.  Epochs and the learning rate follow step +
        step_offset, as if all steps had had this size.
    offset_from: the step from which `image_offset` is right: that of the last change of the batch size.
    """

    total: int
    steps_per_epoch: float
    warmup: float
    cooldown: float
    eval_steps: frozenset[int]
    save_steps: frozenset[int]
    image_offset: int = 0
    step_offset: float = 0.0
    offset_from: int = 0

    @classmethod
    def from_recipe(cls, recipe: Recipe, images: int, image_offset: int = 0, offset_from: int = 0) -> Self:
        """Return the schedule of a recipe.

        images: number of training images.
        image_offset, offset_from: see above.

        Raises:
            InputError: a duration that cannot be parsed, more than `MAX_STEPS` steps, or steps to profile after the last.
        """
        offset = image_offset / recipe.batch_size
        length = partial(duration_in_steps, batch_size=recipe.batch_size, images=images)

        def shift(duration: float | str, default_unit: str) -> float:
            return 0.0 if parse_duration(duration, default_unit=default_unit)[1] == "steps" else offset

        total = max(1, round(length(recipe.epochs, default_unit="epochs") - shift(recipe.epochs, "epochs")))
        if total > MAX_STEPS:
            epochs = format_value(recipe.epochs)
            raise InputError(f"--epochs {epochs} are {total:.0e} steps: give fewer than {MAX_STEPS:.0e}")
        if recipe.profile and recipe.profile[1] > total:
            first, last = recipe.profile
            raise InputError(f"--profile {first} {last} goes beyond the run of {total} steps: give steps up to {total}")

        def every(duration: float | str) -> frozenset[int]:
            interval = max(1.0, length(duration, default_unit="epochs", total=total + offset))
            before = shift(duration, "epochs")
            steps = (round(k * interval - before) for k in range(1, int((total + before) / interval) + 1))
            return frozenset({max(1, step) for step in steps} | {total})

        return cls(
            total,
            images / recipe.batch_size,
            length(recipe.warmup, default_unit="share", total=total + offset),
            length(recipe.cooldown, default_unit="share", total=total + offset),
            every(recipe.eval_every),
            every(recipe.save_every),
            image_offset,
            offset,
            offset_from,
        )

    @property
    def epochs(self) -> float:
        """The length of the run in epochs."""
        return self.epoch(self.total)

    def epoch(self, step: int) -> float:
        """Return the number of epochs after `step` steps."""
        return (step + self.step_offset) / self.steps_per_epoch

    @property
    def single_step(self) -> Self:
        """The schedule of a dry run: one step at the peak learning rate, then an evaluation and a checkpoint."""
        once = frozenset({1})
        return replace(
            self, total=1, warmup=0.0, cooldown=0.0, eval_steps=once, save_steps=once, image_offset=0, step_offset=0.0
        )

    def learning_rate(self, recipe: Recipe, step: Any) -> Any:
        """Return the learning rate of the update after `step` others; see `train.recipes.schedule.learning_rate`."""
        return learning_rate(
            step,
            peak=recipe.optimizer.lr,
            warmup=self.warmup,
            total=self.total,
            shape=recipe.decay,
            cooldown=self.cooldown,
            offset=self.step_offset,
        )
