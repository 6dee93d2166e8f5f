"""The schedule of a run: the steps at which it evaluates, saves checkpoints and changes its learning rate."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from train.recipes import Recipe
from train.recipes.durations import duration_in_steps
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
    """

    total: int
    steps_per_epoch: float
    warmup: float
    cooldown: float
    eval_steps: frozenset[int]
    save_steps: frozenset[int]

    @classmethod
    def from_recipe(cls, recipe: Recipe, images: int) -> Self:
        """Return the schedule of a recipe.

        images: number of training images.

        Raises:
            InputError: a duration that cannot be parsed, more than `MAX_STEPS` steps, or steps to profile after the last.
        """
        length = partial(duration_in_steps, batch_size=recipe.batch_size, images=images)
        total = max(1, round(length(recipe.epochs, default_unit="epochs")))
        if total > MAX_STEPS:
            raise InputError(f"--epochs {recipe.epochs} are {total:.0e} steps: give fewer than {MAX_STEPS:.0e}")
        if recipe.profile and recipe.profile[1] > total:
            first, last = recipe.profile
            raise InputError(f"--profile {first} {last} goes beyond the run of {total} steps: give steps up to {total}")

        def every(duration: float | str) -> frozenset[int]:
            interval = max(1.0, length(duration, default_unit="epochs", total=total))
            return frozenset({max(1, round(k * interval)) for k in range(1, int(total / interval) + 1)} | {total})

        return cls(
            total,
            images / recipe.batch_size,
            length(recipe.warmup, default_unit="share", total=total),
            length(recipe.cooldown, default_unit="share", total=total),
            every(recipe.eval_every),
            every(recipe.save_every),
        )

    @property
    def single_step(self) -> Self:
        """The schedule of a dry run: one step at the peak learning rate, then an evaluation and a checkpoint."""
        return replace(self, total=1, warmup=0.0, cooldown=0.0, eval_steps=frozenset({1}), save_steps=frozenset({1}))

    def learning_rate(self, recipe: Recipe, step: Any) -> Any:
        """Return the learning rate of the update after `step` others; see `train.recipes.schedule.learning_rate`."""
        return learning_rate(
            step,
            peak=recipe.optimizer.lr,
            warmup=self.warmup,
            total=self.total,
            shape=recipe.decay,
            cooldown=self.cooldown,
        )
